"""A problem: one concrete call of attention, validated, in one normal form, with a key to look it up by."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import itemgetter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from catalog.errors import ProblemError
from catalog.messages import did_you_mean
from catalog.ops.attention.checks import certain_sizes, check_features, check_lengths, check_relevance
from catalog.ops.attention.cost import flops_of
from catalog.ops.attention.fields import (
    MAX_TOTAL,
    BiasDims,
    Element,
    Extent,
    Layout,
    Lengths,
    LookupTable,
    MaskWord,
    MemoryLayout,
    Op,
    Scale,
    Size,
    Window,
)
from catalog.ops.attention.form import SIZES, Form, form_of
from catalog.ops.attention.tensors import Tensor, extents_of, traffic_of
from catalog.ops.attention.traits import Bias, Dtype, KvLookupTable, KvMemoryLayout, Mask, Mode, Qscale, Rope
from catalog.schema.derived import derived
from catalog.schema.fields import fields_of

_UNBOUNDED = (-1, -1)
_CAUSAL = (-1, 0)
_Positive = Annotated[float, Field(ge=2.0**-126, le=(2 - 2.0**-23) * 2.0**127)]
"""A positive normal float32."""


# Defaults that follow from the fields before them, of which those that failed validation are absent.


def _same_as(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: fields.get(name)


def _keys_like_queries(fields: dict[str, Any]) -> Any:
    return None if fields.get("page_size") else fields.get("seqlens_q")


def _lengths_instead_of(name: str, fields: dict[str, Any]) -> tuple[int, ...]:
    lengths: tuple[int, ...] | None = fields.get("seqlens_q", ())
    if lengths is None:
        raise ProblemError(f"a problem needs {name}, or seqlens_q for packed sequences of different lengths")
    return lengths


def _sequence_count(fields: dict[str, Any]) -> int:
    return len(_lengths_instead_of("batch", fields))


def _longest_q(fields: dict[str, Any]) -> int:
    return max(_lengths_instead_of("seqlen_q", fields), default=0)


def _longest_k(fields: dict[str, Any]) -> Any:
    lengths = fields.get("seqlens_k")
    return fields.get("seqlen_q") if lengths is None else max(lengths, default=0)


class Problem(BaseModel):
    """A concrete call: operation, sizes, element type, features.

    ``Problem(batch=2, nhead_q=8, seqlen_q=1024, hdim_q=128)`` is batch mode: equal lengths, dense tensors. Giving
    ``seqlens_q`` instead of ``batch`` and ``seqlen_q`` is group mode: sequences of different lengths, packed along the
    token axis. The lengths are those of the storage: the optional tensors ``seqlens_q`` and ``seqlens_k`` of a run say
    how many tokens of each sequence are real. A field that is None takes its default.

    Operations: ``fwd``; ``splitkv``, the same with the keys divided among parallel splits; ``pagedkv`` and
    ``batch_prefill``, over a paged K/V cache (``seqlen_k`` is the longest sequence that the page table has room for);
    ``appendkv``, which writes ``seqlen_new`` tokens into a cache of ``seqlen_k``; ``bwd``.

    Masks: ``causal`` is ``top_left`` (PyTorch's ``is_causal``: query i sees the keys up to i), ``bottom_right`` is
    flash-attn's causal (the last query sees the last key), ``window`` (also spelled ``generic``) is flash-attn's
    sliding window, aligned bottom-right; ``top_left`` or ``bottom_right`` with a ``window`` choose its corner. The
    first ``sink_size`` keys stay visible to the left of a window. ``appendkv`` has no scores: there a mask says that
    query i has the position of the sequence's end plus i, and without one all queries have that of its end.

    The normal form is what the fields hold after construction: ``mask`` is ``no``, ``top_left`` or ``bottom_right``,
    ``window`` is None unless it says more than the mask does, ``scale`` is None where it is the default. Problems that
    mean the same are equal and have the same :attr:`key`.

    Raises:
        ProblemError: a field is unknown, missing or outside of its domain, or fields contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(derived,))

    op: Op = Field("fwd", description="operation")
    dtype: Element = Field(Dtype.FP16, description="element type")
    page_size: Size = Field(0, description="tokens of a page of the K/V cache; 0 for a dense cache")
    seqlens_q: Lengths | None = Field(None, description="queries of each packed sequence, integers from 0")
    seqlens_k: Lengths | None = Field(
        default_factory=_keys_like_queries,
        description="keys of each packed sequence, integers from 0; default: as many as queries",
    )
    batch: Size = Field(default_factory=_sequence_count, description="number of sequences")
    nhead_q: Extent = Field(description="query heads")
    nhead_k: Extent = Field(
        default_factory=_same_as("nhead_q"), description="key heads, a divisor of nhead_q; default: nhead_q"
    )
    seqlen_q: Size = Field(default_factory=_longest_q, description="queries of a sequence")
    seqlen_k: Size = Field(
        default_factory=_longest_k,
        description="keys of a sequence, or that a paged sequence has room for; default: as many as queries",
    )
    hdim_q: Extent = Field(description="head dim of Q and K")
    hdim_v: Extent = Field(default_factory=_same_as("hdim_q"), description="head dim of V and O; default: hdim_q")
    mask: MaskWord = Field("no", description="mask (causal is top_left, window needs a window)")
    window: Window | None = Field(
        None, description="(left, right): keys seen on each side of the diagonal, from 0, or -1 for all"
    )
    sink_size: Size = Field(0, description="first keys that stay visible to the left of a window")
    lse: StrictBool = Field(False, description="store the log-sum-exp of every row")
    scale: _Positive | None = Field(
        None, description="factor of the scores, a positive float32; default: 1 / sqrt(hdim_q)"
    )
    bias: Bias = Field(Bias.NO, description="what is added to the scores")
    bias_dims: BiasDims = Field("1h", description="batch and head axes of the bias or of the slopes")
    logits_soft_cap: _Positive | None = Field(
        None, description="soft cap c of the scores, c * tanh(score / c), a positive float32; default: no cap"
    )
    dropout: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="probability that an attention weight is dropped, from 0 to 1"
    )
    randval: StrictBool = Field(False, description="store the dropout's random bytes")
    qscale: Scale = Field(Qscale.NO, description="granularity of the scales of fp8 and bf8 tensors")
    block_scale_size_q: Extent = Field(128, description="queries that share a block scale")
    block_scale_size_kv: Extent = Field(128, description="keys that share a block scale")
    min_seqlen_q: Size = Field(0, description="skip packed sequences of this many queries or fewer")
    num_splits: Size = Field(0, description="parts that the keys are divided into; 0 to choose")
    num_pages: Size | None = Field(None, description="pages of the K/V cache; default: as many as the sequences fill")
    kv_memory_layout: MemoryLayout | None = Field(None, description="order of the elements inside a page")
    kv_lookup_table: LookupTable | None = Field(None, description="form of the page table")
    seqlen_new: Size | None = Field(None, description="tokens that are appended to each sequence")
    rope: Rope = Field(Rope.NO, description="rotary embedding, of interleaved or half-rotated pairs")
    rotary_dim: Extent | None = Field(
        None, description="leading elements of a head that are rotated, an even number; default: all"
    )
    dbias: StrictBool = Field(False, description="compute the gradient of the bias")
    dlse: StrictBool = Field(False, description="take the gradient of LSE as an input")
    deterministic: StrictBool = Field(False, description="make dQ the same in every run")
    layout: Layout = Field("bhsd", description="axis order of the dense tensors")

    def __init__(self, **fields: Any) -> None:
        for name in fields:
            if name not in type(self).model_fields:
                raise ProblemError(
                    f"a problem has no field {name!r}{did_you_mean(name, type(self).model_fields)}",
                    hint=f"Fields: {', '.join(type(self).model_fields)}.",
                )
        try:
            super().__init__(**{name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise _explained(error) from None

    @model_validator(mode="after")
    def _normalise(self) -> Problem:
        check_relevance(self)
        check_lengths(self)
        mask, window = _normal_mask(self.mask, self.window)
        left_is_open = window is None or window[0] < 0
        is_default = self.scale is None or _float32(self.scale) == _float32(_default_scale(self.hdim_q))
        self._set(
            mask=mask,
            window=window,
            sink_size=0 if left_is_open else self.sink_size,
            scale=None if is_default else self.scale,
            # The rows of packed sequences are apart already: one batch of biases is enough.
            bias_dims="1h" if self.bias is Bias.NO or self._one_bias_a_row else self.bias_dims,
        )
        check_features(self)
        self._set_cache()
        for quantity, total in (("FLOP", self.flops), ("bytes of tensors", self.bytes)):
            if total > MAX_TOTAL:
                raise ProblemError(f"the sizes multiply to {total:.3g} {quantity}, which do not fit in 63 bits")
        return self

    def _set(self, **fields: Any) -> None:
        self.__dict__.update(fields)  # frozen for users; this is still construction

    @property
    def _one_bias_a_row(self) -> bool:
        return self.bias is Bias.BIAS and self.bias_dims == "bh" and self.mode is Mode.GROUP

    def _set_cache(self) -> None:
        """Defaults of the cache's fields, which depend on the operation."""
        if self.paged and self.num_pages is None:
            self._set(num_pages=self.batch * self.pages_per_sequence)
        if self.op == "batch_prefill":
            self._set(
                kv_memory_layout=self.kv_memory_layout or KvMemoryLayout.LINEAR,
                kv_lookup_table=self.kv_lookup_table or KvLookupTable.VLLM,
            )
        if self.rope is not Rope.NO and self.rotary_dim is None:
            self._set(rotary_dim=self.hdim_q // 2 * 2)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Problem:
        """The same problem with other values in some fields, validated like any other.

        ``deep`` has no effect: a problem is immutable. Fields keep the values that they have, even those that were
        defaults: a copy with another ``seqlen_q`` has the old ``seqlen_k``.

        Raises:
            ProblemError: as the constructor.
        """
        return type(self)(**{**self.model_dump(), **(update or {})})

    def resized(self, **sizes: Any) -> Problem:
        """The problem of the same form with these sizes: the other sizes take their defaults.

        As ``Problem(**fields)`` with the fields of this problem that are no sizes, at a tenth of the price where the
        sizes are certain to be valid; where they are not, that very call decides.

        Args:
            sizes: fields of :data:`~catalog.ops.attention.form.SIZES`.

        Raises:
            ProblemError: as the constructor.
        """
        certain = certain_sizes(self, sizes)
        if certain is not None:
            resized = type(self).__new__(type(self))
            # As pickle makes one: what is in a problem of this form was validated, and so were these sizes.
            resized.__setstate__({"__dict__": {**self.form.fields, **certain}, "__pydantic_fields_set__": _FIELDS})
            return resized
        fields = {name: value for name, value in self.model_dump().items() if name not in SIZES}
        return type(self)(**{**fields, **sizes})

    def without_caches(self) -> Problem:
        """The same problem, with nothing remembered that follows from its fields."""
        fields = type(self).model_fields
        return type(self).model_construct(**{name: self.__dict__[name] for name in fields})

    def __reduce__(self) -> tuple[Callable[[str], Problem], tuple[str]]:
        return _of_key, (self.key,)  # what is remembered of it, its form above all, is this process's

    def __eq__(self, other: object) -> bool:
        return self.identity == other.identity if isinstance(other, Problem) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.identity)

    @derived
    def form(self) -> Form:
        """What it has in common with problems of other sizes."""
        return form_of(self)

    @derived
    def identity(self) -> tuple[Any, ...]:
        """The form and the sizes: equal where the keys are, and made sooner."""
        return self.form, *_sizes_of(self.__dict__)

    @derived
    def key(self) -> str:
        """Canonical JSON of the normal form: equal problems have equal keys, and ``Problem(**json.loads(key))``.

        Features that the problem does without are left out.
        """
        return json.dumps(self.key_fields(), sort_keys=True, separators=(",", ":"))

    def key_fields(self, without: Collection[str] = ()) -> dict[str, Any]:
        """The fields of :attr:`key` as JSON has them, but those ``without``."""
        return {
            name: value
            for name, value in self.model_dump(mode="json", exclude_none=True, exclude=set(without)).items()
            if name in _ALWAYS_IN_KEY or value != type(self).model_fields[name].default
        }

    @derived
    def mode(self) -> Mode:
        """Group when sequences are packed, else batch."""
        return Mode.BATCH if self.seqlens_q is None else Mode.GROUP

    @property
    def sequences(self) -> Iterable[tuple[int, int]]:
        """(queries, keys) of each sequence, as stored; of a paged one the most keys that it may have."""
        if self.seqlens_q is None:
            return ((self.seqlen_q, self.seqlen_k) for _ in range(self.batch))
        return zip(self.seqlens_q, self.seqlens_k or (self.seqlen_k,) * self.batch, strict=True)

    @property
    def tokens_q(self) -> int:
        """Queries of all sequences together."""
        return self.batch * self.seqlen_q if self.seqlens_q is None else sum(self.seqlens_q)

    @property
    def tokens_k(self) -> int:
        """Keys along the token axis: those of all packed sequences, or of one sequence of a batch."""
        return self.seqlen_k if self.seqlens_k is None else sum(self.seqlens_k)

    @property
    def kernel_mask(self) -> Mask:
        """The mask that a kernel must be compiled for: a window needs generic."""
        if self.mask == "no":
            return Mask.NO
        return Mask.CAUSAL if self.window is None else Mask.GENERIC

    @property
    def window_left(self) -> int:
        """Keys visible to the left of the diagonal; -1: all."""
        return -1 if self.window is None else self.window[0]

    @property
    def window_right(self) -> int:
        """Keys visible to the right of the diagonal; -1: all."""
        if self.window is None:
            return -1 if self.mask == "no" else 0
        return self.window[1]

    @property
    def mask_corner(self) -> Literal[0, 1]:
        """Where the diagonal starts: 0 top-left (query i at key i), 1 bottom-right (last query at last key)."""
        return 1 if self.mask == "bottom_right" else 0

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores before the softmax."""
        return _default_scale(self.hdim_q) if self.scale is None else self.scale

    @property
    def ratio(self) -> int:
        """Query heads that share a key head."""
        return self.nhead_q // self.nhead_k

    @property
    def paged(self) -> bool:
        """Whether K and V lie in pages."""
        return self.page_size > 0

    @property
    def pages_per_sequence(self) -> int:
        """Pages that the longest sequence fills."""
        return -(-self.seqlen_k // self.page_size)

    @property
    def appended(self) -> int:
        """Positions behind the cached tokens that appending needs: of new keys, and of rotated queries.

        Without a mask all queries have the position of the first.
        """
        queries = self.seqlen_q if self.kernel_mask is not Mask.NO else min(self.seqlen_q, 1)
        return max(self.seqlen_new or 0, queries if self.rope is not Rope.NO else 0)

    @derived
    def extents(self) -> Mapping[str, int]:
        """The extents of axes in which it differs from other problems of its form, by name."""
        return extents_of(self)

    @derived
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor of a run by name: inputs, required ones first, then outputs."""
        return {name: tensor.tensor(self.extents) for name, tensor in self.form.tensors.items()}

    @derived
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor that a run needs: its required inputs, then its outputs. See :attr:`tensors`."""
        return {name: tensor.shape for name, tensor in self.tensors.items() if not tensor.optional}

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the tensors that a run must be given, in the order of a call."""
        return self.form.needed

    @property
    def accepted(self) -> tuple[str, ...]:
        """Names of the tensors that a run may be given, in the order of a call."""
        return self.form.accepted

    @property
    def made(self) -> tuple[str, ...]:
        """Names of the tensors that a run makes for its results."""
        return self.form.made

    @derived
    def flops(self) -> int:
        """FLOP of the matrix products, by convention: see :func:`~catalog.ops.attention.cost.flops_of`."""
        return flops_of(self)

    @derived
    def bytes(self) -> int:
        """Bytes of all tensors that a run needs."""
        return self.form.bytes_at(self.extents)

    @derived
    def traffic(self) -> int:
        """Bytes, the least memory traffic: see :func:`~catalog.ops.attention.tensors.traffic_of`."""
        return traffic_of(self)


_FIELDS = set(Problem.model_fields)
_sizes_of = itemgetter(*SIZES)
_ALWAYS_IN_KEY = ("op", "dtype", "mask", "lse", "layout")


def _of_key(key: str) -> Problem:
    return Problem(**json.loads(key))


def _default_scale(hdim_q: int) -> float:
    return 1.0 / math.sqrt(hdim_q)


def _float32(number: float) -> float:
    """The number as kernels get it."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _normal_mask(mask: MaskWord, window: tuple[int, int] | None) -> tuple[MaskWord, tuple[int, int] | None]:
    """The one spelling of a mask: no, top_left or bottom_right, and a window only where it is neither."""
    if window is None:
        if mask in ("window", "generic"):
            raise ProblemError(f"mask={mask!r} needs window=(left, right), -1 for an unbounded side")
        return ("top_left" if mask == "causal" else mask), None
    if mask in ("no", "causal"):
        raise ProblemError(
            f"window={window} does not go with mask={mask!r}",
            hint="Masks that take a window: window (aligned bottom-right), top_left, bottom_right.",
        )
    if window == _UNBOUNDED:
        return "no", None
    return ("top_left" if mask == "top_left" else "bottom_right"), (None if window == _CAUSAL else window)


def _explained(error: ValidationError) -> ProblemError:
    """The first failure, in the words of the field's description."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    value, is_missing, indices = first["input"], first["type"] == "missing", first["loc"][1:]
    field = fields_of(Problem)[name]
    if is_missing and not indices:
        return ProblemError(f"a problem needs {name}: {field.about}")
    if field.words:
        meant = did_you_mean(str(value), field.words)
        return ProblemError(f"{name}={value!r} is not allowed{meant}", hint=f"Allowed: {', '.join(field.words)}.")
    element = "" if is_missing else "".join(f"[{index}]" for index in indices)
    expected = f"expected {field.domain}; " if field.domain else ""
    return ProblemError(f"{name}{element}={value!r}: {expected}{field.about}")
