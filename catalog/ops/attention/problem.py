"""An attention problem: one concrete call, validated and normalised, with a key to look it up."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from catalog.errors import ProblemError
from catalog.ops.attention.checks import check_features, check_lengths, check_relevance
from catalog.ops.attention.cost import flops_of
from catalog.ops.attention.fields import (
    BiasDims,
    Element,
    Layout,
    LookupTable,
    MaskWord,
    MemoryLayout,
    Op,
    Scale,
    Window,
)
from catalog.ops.attention.likeness import coordinates_of, kind_of, kind_words, steps_of
from catalog.ops.attention.shape_names import name_of
from catalog.ops.attention.sizing import borrowing_of, sizing_of
from catalog.ops.attention.tensors import extents_of, first_tokens, forms_of, traffic_of
from catalog.ops.attention.traits import Bias, Dtype, KvLookupTable, KvMemoryLayout, Mask, Mode, Qscale, Rope
from catalog.schema import problem
from catalog.schema.arguments import NO_LISTS, Lists
from catalog.schema.derived import derived
from catalog.schema.problem import Extent, Lengths, Size
from catalog.schema.problem_tensors import TensorForm

_UNBOUNDED = (-1, -1)
_CAUSAL = (-1, 0)
_Positive = Annotated[float, Field(ge=2.0**-126, le=(2 - 2.0**-23) * 2.0**127)]
"""A positive normal float32."""


# Defaults that follow from earlier fields; a field that failed validation is absent among them.


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


class Problem(problem.Problem):
    """A concrete call: operation, sizes, element type, features.

    ``Problem(batch=2, nhead_q=8, seqlen_q=1024, hdim_q=128)`` is batch mode: equal lengths, dense tensors. Giving
    ``seqlens_q`` instead of ``batch`` and ``seqlen_q`` is group mode: sequences of different lengths, packed along the
    token axis. These are the lengths as stored: the optional tensors ``seqlens_q`` and ``seqlens_k`` of a run state how
    many tokens of each sequence are real. A field that is None takes its default.

    Operations: ``fwd``; ``splitkv``, the same with the keys divided into parallel splits; ``pagedkv`` and
    ``batch_prefill``, with a paged K/V cache (``seqlen_k`` is the longest sequence that fits into the page table);
    ``appendkv``, which writes ``seqlen_new`` tokens into a cache of ``seqlen_k`` tokens; ``bwd``.

    Masks: ``causal`` is ``top_left`` (PyTorch's ``is_causal``: query i sees the keys up to i), ``bottom_right`` is
    flash-attn's causal (the last query sees the last key), ``window`` (also spelled ``generic``) is flash-attn's
    sliding window, aligned bottom-right; ``top_left`` or ``bottom_right`` with a ``window`` choose its corner. The
    first ``sink_size`` keys stay visible to the left of a window. ``appendkv`` has no scores: there a mask means that
    query i has the position i after the end of the sequence; without a mask all queries have the position of the end.

    Block masks: with ``block_mask_q`` and ``block_mask_kv``, the tensor ``block_mask`` has a byte for each block of
    that many queries and keys of a head. A query sees a key if the mask shows it and the byte of their block is not 0.

    After construction the fields hold the normal form: ``mask`` is ``no``, ``top_left`` or ``bottom_right``, ``window``
    is None unless it says more than the mask does, ``scale`` is None at its default. Problems that mean the same are
    equal and have the same :attr:`key`.

    Raises:
        ProblemError: a field is unknown, missing or outside its domain, or fields contradict each other.
    """

    operation = "attention"
    sizes = ("batch", "seqlen_q", "seqlen_k", "seqlens_q", "seqlens_k", "num_pages")
    always_in_key = ("op", "dtype", "mask", "lse", "layout")
    states_operation = False  # these keys were recorded before there were other operations

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
    block_mask_q: Size = Field(0, description="queries that an entry of the block mask covers; 0: no block mask")
    block_mask_kv: Size = Field(0, description="keys that an entry of the block mask covers; 0: no block mask")
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

    def normalise(self) -> None:
        """As :meth:`~catalog.schema.problem.Problem.normalise`."""
        check_relevance(self)
        check_lengths(self)
        mask, window = _normal_mask(self.mask, self.window)
        left_is_open = window is None or window[0] < 0
        is_default = self.scale is None or _float32(self.scale) == _float32(_default_scale(self.hdim_q))
        self.set_fields(
            mask=mask,
            window=window,
            sink_size=0 if left_is_open else self.sink_size,
            scale=None if is_default else self.scale,
            # Rows of packed sequences are separate anyway: one batch of biases is enough.
            bias_dims="1h" if self.bias is Bias.NO or self._one_bias_a_row else self.bias_dims,
        )
        check_features(self)
        self._set_cache()

    @property
    def _one_bias_a_row(self) -> bool:
        return self.bias is Bias.BIAS and self.bias_dims == "bh" and self.mode is Mode.GROUP

    def _set_cache(self) -> None:
        """Defaults of the cache's fields, which depend on the operation."""
        if self.paged and self.num_pages is None:
            self.set_fields(num_pages=self.batch * self.pages_per_sequence)
        if self.op == "batch_prefill":
            self.set_fields(
                kv_memory_layout=self.kv_memory_layout or KvMemoryLayout.LINEAR,
                kv_lookup_table=self.kv_lookup_table or KvLookupTable.VLLM,
            )
        if self.rope is not Rope.NO and self.rotary_dim is None:
            self.set_fields(rotary_dim=self.hdim_q // 2 * 2)

    def sizing(self) -> Callable[[Mapping[str, Any]], Mapping[str, Any] | None]:
        """As :func:`catalog.ops.attention.sizing.sizing_of`."""
        return sizing_of(self)

    def borrowing(self) -> Callable[[problem.Problem], Mapping[str, Any] | None]:
        """As :func:`catalog.ops.attention.sizing.borrowing_of`."""
        return borrowing_of(self)

    def form_facts(self) -> dict[str, Any]:
        """The mode, which depends on which sizes are given."""
        return {"mode": self.mode.value}

    @property
    def name(self) -> str:
        """As :func:`catalog.ops.attention.shape_names.name_of`."""
        return name_of(self)

    def kind_fields(self) -> dict[str, Any]:
        """As :func:`catalog.ops.attention.likeness.kind_of`."""
        return kind_of(self)

    @classmethod
    def kind_words(cls, fields: Mapping[str, Any]) -> str:
        """As :func:`catalog.ops.attention.likeness.kind_words`."""
        return kind_words(fields)

    @property
    def coordinates(self) -> tuple[float, ...]:
        """As :func:`catalog.ops.attention.likeness.coordinates_of`."""
        return coordinates_of(self)

    @property
    def steps(self) -> tuple[int, ...]:
        """As :func:`catalog.ops.attention.likeness.steps_of`."""
        return steps_of(self)

    @derived
    def mode(self) -> Mode:
        """Group if sequences are packed, otherwise batch."""
        return Mode.BATCH if self.seqlens_q is None else Mode.GROUP

    @property
    def sequences(self) -> Iterable[tuple[int, int]]:
        """(queries, keys) of each sequence as stored; for a paged sequence the maximum number of keys."""
        if self.seqlens_q is None:
            return ((self.seqlen_q, self.seqlen_k) for _ in range(self.batch))
        return zip(self.seqlens_q, self.seqlens_k or (self.seqlen_k,) * self.batch, strict=True)

    @property
    def tokens_q(self) -> int:
        """Queries of all sequences together."""
        return self.batch * self.seqlen_q if self.seqlens_q is None else sum(self.seqlens_q)

    @property
    def tokens_k(self) -> int:
        """Keys along the token axis: of all packed sequences together, or of one sequence of a batch."""
        return self.seqlen_k if self.seqlens_k is None else sum(self.seqlens_k)

    @property
    def kernel_mask(self) -> Mask:
        """The mask that a kernel must be compiled for: a window requires generic."""
        if self.mask == "no":
            return Mask.NO
        return Mask.CAUSAL if self.window is None else Mask.GENERIC

    @property
    def window_left(self) -> int:
        """Keys visible to the left of the diagonal; -1 for all."""
        return -1 if self.window is None else self.window[0]

    @property
    def window_right(self) -> int:
        """Keys visible to the right of the diagonal; -1 for all."""
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
        """Whether K and V are stored in pages."""
        return self.page_size > 0

    @property
    def block_masked(self) -> bool:
        """Whether a bitmap names the blocks of queries and keys that are attended to."""
        return self.block_mask_q > 0

    @property
    def pages_per_sequence(self) -> int:
        """Number of pages that the longest sequence fills; 0 without pages."""
        return -(-self.seqlen_k // self.page_size) if self.page_size else 0

    @property
    def appended(self) -> int:
        """Number of positions after the cached tokens that appending needs, for new keys and rotated queries.

        Without a mask all queries have the first position.
        """
        queries = self.seqlen_q if self.kernel_mask is not Mask.NO else min(self.seqlen_q, 1)
        return max(self.seqlen_new or 0, queries if self.rope is not Rope.NO else 0)

    @derived
    def extents(self) -> Mapping[str, int]:
        """The extents of the axes in which problems of its form may differ, by name."""
        return extents_of(self)

    @derived
    def lists(self) -> Lists:
        """The first tokens of packed sequences, queries and keys."""
        return NO_LISTS if self.seqlens_q is None else first_tokens(self.seqlens_q, self.seqlens_k)

    @property
    def divided(self) -> bool:
        """Whether its keys may be split into parts."""
        return self.op in ("splitkv", "bwd")

    def tensor_forms(self) -> Mapping[str, TensorForm]:
        """As :func:`catalog.ops.attention.tensors.forms_of`."""
        return forms_of(self)

    @derived
    def flops(self) -> int:
        """FLOP of the matrix products, by convention: see :func:`~catalog.ops.attention.cost.flops_of`."""
        return flops_of(self)

    @derived
    def traffic(self) -> int:
        """Minimum memory traffic in bytes: see :func:`~catalog.ops.attention.tensors.traffic_of`."""
        return traffic_of(self)


def _default_scale(hdim_q: int) -> float:
    return 1.0 / math.sqrt(hdim_q)


def _float32(number: float) -> float:
    """The number as kernels receive it."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _normal_mask(mask: MaskWord, window: tuple[int, int] | None) -> tuple[MaskWord, tuple[int, int] | None]:
    """The normal form of a mask: no, top_left or bottom_right, and a window only where it is neither."""
    if window is None:
        if mask in ("window", "generic"):
            raise ProblemError(f"mask={mask!r} needs window=(left, right), -1 for an unbounded side")
        return ("top_left" if mask == "causal" else mask), None
    if mask in ("no", "causal"):
        raise ProblemError(
            f"window={window} cannot be combined with mask={mask!r}",
            hint="Masks that take a window: window (aligned bottom-right), top_left, bottom_right.",
        )
    if window == _UNBOUNDED:
        return "no", None
    return ("top_left" if mask == "top_left" else "bottom_right"), (None if window == _CAUSAL else window)
