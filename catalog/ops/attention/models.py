"""The attention of a language model: the problems of its layers, derived from its configuration.

The configuration is that of Hugging Face's libraries, of which only numbers and words are read. A rank of a
tensor-parallel group has a part of the query heads, and the key heads that these need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from catalog.errors import UsageError
from catalog.messages import expected
from catalog.ops.attention.problem import Problem
from catalog.schema.deployment import Deployment, sizes_up_to

_SHORTEST = 16
"""Shorter prompts and caches select the same kernels."""

_BATCHES = (1, 2, 8, 64)
"""Batches of decoding, and the largest: kernels depend on whether few or many sequences fill a device."""

_DTYPES = MappingProxyType({"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"})

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "kv_lora_rank": "its latent attention compresses keys",
        "is_encoder_decoder": "its decoder also attends to an encoder",
        "attention_chunk_size": "its layers attend in chunks",
    }
)
"""Fields of configurations that change what attention computes in ways that are not derived here."""

Count = Annotated[int, Field(gt=0)]


def _named(*names: str) -> Any:
    """A required field that architectures name differently."""
    return Field(validation_alias=AliasChoices(*names))


class _Config(BaseModel):
    """The fields of a configuration that attention depends on; absent ones have the libraries' defaults."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    heads: Count = _named("num_attention_heads", "n_head", "n_heads")
    width: Count = _named("hidden_size", "n_embd", "d_model")
    longest: Count = _named("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    heads_k: Count | None = Field(None, validation_alias=AliasChoices("num_key_value_heads", "num_kv_heads"))
    hdim: Count | None = Field(None, validation_alias="head_dim")
    dtype: str | None = Field(None, validation_alias=AliasChoices("dtype", "torch_dtype"))
    window: Count | None = Field(None, validation_alias="sliding_window")
    use_sliding_window: bool = True
    layer_types: tuple[str, ...] | None = None
    soft_cap: float | None = Field(None, validation_alias="attn_logit_softcapping", gt=0)
    scalar: float | None = Field(None, validation_alias="query_pre_attn_scalar", gt=0)
    multiplier: float | None = Field(None, validation_alias="attention_multiplier", gt=0)
    alibi: bool = False
    dropout: float = Field(0.0, validation_alias=AliasChoices("attention_dropout", "attn_pdrop"), ge=0, le=1)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each kind of layer; None for layers that see everything.

        Configurations without ``layer_types`` do not say which layers have the window, so both kinds are assumed.
        """
        window = self.window if self.use_sliding_window else None
        if self.layer_types is None:
            return (None,) if window is None else (None, window)
        kinds = {"full_attention": None, "sliding_attention": window}
        return tuple(dict.fromkeys(kinds[kind] for kind in self.layer_types if kind in kinds))

    @property
    def scale(self) -> float | None:
        """Factor of the scores; None for the default."""
        return self.multiplier if self.scalar is None else self.scalar**-0.5


def problems_of_model(config: Mapping[str, Any], deployment: Deployment) -> Iterator[Problem]:
    """The problems of one rank of a model, each once.

    They stand for all lengths and batches up to those of the deployment: kernels are chosen by a few properties of
    sizes, which :func:`~catalog.schema.deployment.sizes_up_to` covers.

    Raises:
        UsageError: a field is missing or wrong, the ranks cannot share the heads, or attention is of a kind that is not
            derived, or has no gradient kernels.
    """
    text = config.get("text_config")  # of a model that also sees images
    if isinstance(text, Mapping):
        config = {**config, **text}
    for field, why in _REFUSED.items():
        if config.get(field):
            raise UsageError(f"{field}={config[field]!r}: {why}, which is not derived", hint="Record a trace instead.")
    model = _read(config)
    rank = _Rank(model, _common(model, deployment), deployment)
    phases = {"prefill": rank.prefill, "decode": rank.decode, "train": rank.train}
    seen: set[Problem] = set()
    for window in model.windows:
        for phase in deployment.phases:
            for problem in phases[phase](window):
                if problem not in seen:
                    seen.add(problem)
                    yield problem


def _read(config: Mapping[str, Any]) -> _Config:
    try:
        return _Config.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = "missing" if first["type"] == "missing" else expected(first)
        raise UsageError(f"{'.'.join(map(str, first['loc']))}: {reason}") from None


def _common(model: _Config, deployment: Deployment) -> dict[str, Any]:
    """The fields that all problems of a rank have in common."""
    tp, heads_k = deployment.tp, model.heads_k or model.heads
    if model.heads % tp or (heads_k % tp and tp % heads_k):
        raise UsageError(f"{tp} ranks cannot share {model.heads} query heads and {heads_k} key heads")
    dtype = (model.dtype or "bfloat16").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} is not an element type of kernels", hint=f"Known: {', '.join(_DTYPES)}.")
    return {
        "nhead_q": model.heads // tp,
        "nhead_k": max(1, heads_k // tp),  # a key head that several ranks need is on each of them
        "hdim_q": model.hdim or model.width // model.heads,
        "dtype": _DTYPES[dtype],
        "scale": model.scale,
        "bias": "alibi" if model.alibi else None,
        "logits_soft_cap": model.soft_cap,
    }


@dataclass(frozen=True)
class _Rank:
    """One rank of a deployed model: the problems of its phases, for layers with a window or without."""

    model: _Config
    common: Mapping[str, Any]
    deployment: Deployment

    @property
    def _lengths(self) -> Sequence[int]:
        longest = self.deployment.max_len or self.model.longest
        return sizes_up_to(longest, min(_SHORTEST, longest))

    @property
    def _batches(self) -> Sequence[int]:
        most = self.deployment.max_batch
        return sorted({most, *(batch for batch in _BATCHES if batch < most)})

    def prefill(self, window: int | None) -> Iterator[Problem]:
        """Prompts: alone, packed, and packed over a paged cache."""
        for length in self._lengths:
            seen = _mask(length, window)
            packed = (length, length // 2)
            yield from self._dense(batch=1, seqlen_q=length, **seen)
            yield self._problem(seqlens_q=packed, **seen)
            yield self._paged(seqlens_q=packed, seqlen_k=length, **seen)

    def decode(self, window: int | None) -> Iterator[Problem]:
        """One query of each sequence, on a dense or paged cache, whose keys may be split."""
        for length in self._lengths:
            # The last query sees every key, so engines leave out the causal mask, or keep it on packed queries.
            last = {} if window is None or length <= window else _mask(length, window)
            for batch in self._batches:
                one = {"batch": batch, "seqlen_q": 1, "seqlen_k": length, **last}
                yield from self._dense(**one)
                yield from self._dense(op="splitkv", **one)
                yield self._paged("splitkv", **one)
                yield self._paged(seqlens_q=(1,) * batch, seqlen_k=length, **_mask(length, window))

    def train(self, window: int | None) -> Iterator[Problem]:
        """Forward with the log-sum-exp, and backward: alike in length, and packed."""
        if self.model.soft_cap is not None and self.model.dropout:
            raise UsageError("phase train: no kernel computes the gradient of attention with a soft cap and dropout")
        for length in self._lengths:
            fields = {**_mask(length, window), "dropout": self.model.dropout}
            packed = (length, length // 2)
            yield from self._dense(batch=1, seqlen_q=length, lse=True, **fields)
            yield from self._dense(batch=1, seqlen_q=length, op="bwd", **fields)
            yield self._problem(seqlens_q=packed, lse=True, **fields)
            yield self._problem(seqlens_q=packed, op="bwd", **fields)

    def _problem(self, **fields: Any) -> Problem:
        return Problem(**self.common, **fields)

    def _dense(self, **fields: Any) -> Iterator[Problem]:
        """Heads before tokens, and tokens before heads."""
        for layout in ("bhsd", "bshd"):
            yield self._problem(layout=layout, **fields)

    def _paged(self, op: str = "pagedkv", **fields: Any) -> Problem:
        return self._problem(op=op, page_size=self.deployment.page_size, **fields)


def _mask(length: int, window: int | None) -> dict[str, Any]:
    """The mask of ``length`` tokens: causal while the window hides nothing. A token counts in its own window."""
    if window is None or length <= window:
        return {"mask": "bottom_right"}
    return {"mask": "window", "window": (window - 1, 0)}
