"""A problem: one concrete call of attention, validated, in one normal form, with a key to look it up by."""

from __future__ import annotations

import difflib
import json
import math
import operator
import struct
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError, model_validator

from catalog.errors import ProblemError
from catalog.schema.fields import Dtype, Mask, Mode

Op = Literal["fwd"]
Layout = Literal["bhsd", "bshd"]
MaskWord = Literal["no", "causal", "top_left", "bottom_right", "window", "generic"]

MAX_SIZE = 2**31 - 1
"""Largest extent of an axis, and largest token count of a group: kernels index them with 32 bits."""

MAX_TOTAL = 2**63 - 1
"""Largest FLOP and byte count: what a SQLite INTEGER holds."""

ELEMENT_BYTES: Mapping[Dtype, tuple[int, int]] = MappingProxyType(
    {
        Dtype.FP32: (4, 4),
        Dtype.FP16: (2, 2),
        Dtype.BF16: (2, 2),
        Dtype.FP8: (1, 1),
        Dtype.BF8: (1, 1),
        Dtype.FP8FP16: (1, 2),
        Dtype.FP8BF16: (1, 2),
        Dtype.FP8FP32: (1, 4),
    }
)
"""Bytes of an element of Q, K, V and of an element of O. The mx types are absent: they need block scales."""

_UNBOUNDED = (-1, -1)
_CAUSAL = (-1, 0)
_FLOAT32_RANGE = (2.0**-126, (2 - 2.0**-23) * 2.0**127)


def _integer(value: Any) -> int:
    """An int, or what converts to one without loss (a NumPy integer); a bool is a mistake, not a number."""
    if isinstance(value, bool):
        raise ValueError("a bool is not an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError("not an integer") from None


def _listed(value: Any) -> Any:
    """A list or tuple; arrays become lists. An iterator or a set has no order to rely on."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        raise ValueError("not a list")
    return value


def _known_dtype(value: Any) -> Any:
    if value not in list(ELEMENT_BYTES):
        raise ValueError("not a dtype of problems")
    return value


Size = Annotated[int, BeforeValidator(_integer), Field(ge=0, le=MAX_SIZE)]
Extent = Annotated[int, BeforeValidator(_integer), Field(ge=1, le=MAX_SIZE)]
Side = Annotated[int, BeforeValidator(_integer), Field(ge=-1, le=MAX_SIZE)]
Lengths = Annotated[tuple[Size, ...], BeforeValidator(_listed)]
Window = Annotated[tuple[Side, Side], BeforeValidator(_listed)]


# Defaults that follow from the fields before them, of which those that failed validation are absent.


def _same_as(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: fields.get(name)


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
    """A concrete call: sizes, element type, mask.

    ``Problem(batch=2, nhead_q=8, seqlen_q=1024, hdim_q=128)`` is batch mode: equal lengths, dense tensors. Giving
    ``seqlens_q`` instead of ``batch`` and ``seqlen_q`` is group mode: sequences of different lengths, packed along the
    token axis. A field that is None takes its default.

    Masks: ``causal`` is ``top_left`` (PyTorch's ``is_causal``: query i sees the keys up to i), ``bottom_right`` is
    flash-attn's causal (the last query sees the last key), ``window`` (also spelled ``generic``) is flash-attn's
    sliding window, aligned bottom-right; ``top_left`` or ``bottom_right`` with a ``window`` choose its corner.

    The normal form is what the fields hold after construction: ``mask`` is ``no``, ``top_left`` or ``bottom_right``,
    ``window`` is None unless it says more than the mask does, ``scale`` is None where it is the default. Problems that
    mean the same are equal and have the same :attr:`key`.

    Raises:
        ProblemError: a field is unknown, missing or outside of its domain, or fields contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    op: Op = Field("fwd", description="operation")
    dtype: Annotated[Dtype, BeforeValidator(_known_dtype)] = Field(Dtype.FP16, description="element type")
    seqlens_q: Lengths | None = Field(
        None, description=f"queries of each packed sequence, a list of integers from 0 to {MAX_SIZE}"
    )
    seqlens_k: Lengths | None = Field(
        default_factory=_same_as("seqlens_q"),
        description=f"keys of each packed sequence, a list of integers from 0 to {MAX_SIZE}",
    )
    batch: Size = Field(
        default_factory=_sequence_count, description=f"number of sequences, an integer from 0 to {MAX_SIZE}"
    )
    nhead_q: Extent = Field(description=f"query heads, an integer from 1 to {MAX_SIZE}")
    nhead_k: Extent = Field(
        default_factory=_same_as("nhead_q"),
        description=f"key heads, an integer from 1 to {MAX_SIZE} that divides nhead_q",
    )
    seqlen_q: Size = Field(
        default_factory=_longest_q, description=f"queries of a sequence, an integer from 0 to {MAX_SIZE}"
    )
    seqlen_k: Size = Field(
        default_factory=_longest_k, description=f"keys of a sequence, an integer from 0 to {MAX_SIZE}"
    )
    hdim_q: Extent = Field(description=f"head dim of Q and K, an integer from 1 to {MAX_SIZE}")
    hdim_v: Extent = Field(
        default_factory=_same_as("hdim_q"),
        description=f"head dim of V and O, an integer from 1 to {MAX_SIZE}",
    )
    mask: MaskWord = Field("no", description="mask")
    window: Window | None = Field(
        None, description="(left, right): keys seen on each side of the diagonal, integers from 0, or -1 for all"
    )
    lse: StrictBool = Field(False, description="whether to store the log-sum-exp of every row, True or False")
    scale: Annotated[float, Field(ge=_FLOAT32_RANGE[0], le=_FLOAT32_RANGE[1])] | None = Field(
        None, description="factor of the scores, a positive float32; default 1 / sqrt(hdim_q)"
    )
    layout: Layout = Field("bhsd", description="axis order of the dense tensors")

    def __init__(self, **fields: Any) -> None:
        for name in fields:
            if name not in type(self).model_fields:
                raise ProblemError(
                    f"a problem has no field {name!r}{_nearest(name, type(self).model_fields)}",
                    hint=f"fields: {', '.join(type(self).model_fields)}",
                )
        try:
            super().__init__(**{name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise _explained(error) from None

    @model_validator(mode="after")
    def _normalise(self) -> Problem:
        self._check_lengths()
        if self.nhead_q % self.nhead_k:
            raise ProblemError(f"nhead_k={self.nhead_k}: must divide nhead_q={self.nhead_q}")
        mask, window = _normal_mask(self.mask, self.window)
        is_default = self.scale is None or _float32(self.scale) == _float32(_default_scale(self.hdim_q))
        scale = None if is_default else self.scale
        self.__dict__.update(mask=mask, window=window, scale=scale)  # frozen for users; this is still construction
        for quantity, total in (("FLOP", self.flops), ("bytes of tensors", self.bytes)):
            if total > MAX_TOTAL:
                raise ProblemError(f"the sizes multiply to {total:.3g} {quantity}, which do not fit in 63 bits")
        _ = self.key  # computed now, so that reading it is a plain attribute access
        return self

    def _check_lengths(self) -> None:
        if self.seqlens_q is None or self.seqlens_k is None:
            if self.seqlens_k is not None:
                raise ProblemError("seqlens_k is given without seqlens_q: group mode needs seqlens_q")
            return
        if len(self.seqlens_k) != len(self.seqlens_q):
            raise ProblemError(
                f"seqlens_k has {len(self.seqlens_k)} sequences: must have as many as seqlens_q, {len(self.seqlens_q)}"
            )
        for name, value, source, implied in (
            ("batch", self.batch, "seqlens_q", len(self.seqlens_q)),
            ("seqlen_q", self.seqlen_q, "seqlens_q", max(self.seqlens_q, default=0)),
            ("seqlen_k", self.seqlen_k, "seqlens_k", max(self.seqlens_k, default=0)),
        ):
            if value != implied:
                raise ProblemError(
                    f"{name}={value} contradicts {source}, which makes it {implied}", hint=f"leave {name} out"
                )
        for name, lengths in (("seqlens_q", self.seqlens_q), ("seqlens_k", self.seqlens_k)):
            if sum(lengths) > MAX_SIZE:
                raise ProblemError(f"{name} adds up to {sum(lengths)} tokens: at most {MAX_SIZE}")
        if self.layout != "bhsd":
            raise ProblemError(
                f"layout={self.layout!r} does not apply to packed sequences, which are (tokens, nhead, hdim)",
                hint="leave layout out",
            )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Problem:
        """The same problem with other values in some fields, validated like any other.

        ``deep`` has no effect: a problem is immutable. Fields keep the values that they have, even those that were
        defaults: a copy with another ``seqlen_q`` has the old ``seqlen_k``.

        Raises:
            ProblemError: as the constructor.
        """
        return type(self)(**{**self.model_dump(), **(update or {})})

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Problem) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> str:
        """Canonical JSON of the normal form: equal problems have equal keys, and ``Problem(**json.loads(key))``."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), sort_keys=True, separators=(",", ":"))

    @cached_property
    def mode(self) -> Mode:
        """Group when sequences are packed, else batch."""
        return Mode.BATCH if self.seqlens_q is None else Mode.GROUP

    @property
    def sequences(self) -> Iterable[tuple[int, int]]:
        """(queries, keys) of each sequence."""
        if self.seqlens_q is None or self.seqlens_k is None:
            return ((self.seqlen_q, self.seqlen_k) for _ in range(self.batch))
        return zip(self.seqlens_q, self.seqlens_k, strict=True)

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

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, inputs ``q k v`` first, then outputs ``o`` and, where asked for, ``lse``.

        Group mode: (tokens, nhead, hdim), lse (nhead_q, tokens_q). Batch mode: (batch, nhead, seqlen, hdim) in layout
        bhsd, (batch, seqlen, nhead, hdim) in layout bshd, lse (batch, nhead_q, seqlen_q) in both.
        """

        def shape(nhead: int, lengths: tuple[int, ...] | None, seqlen: int, hdim: int) -> tuple[int, ...]:
            if lengths is not None:
                return (sum(lengths), nhead, hdim)
            return (self.batch, nhead, seqlen, hdim) if self.layout == "bhsd" else (self.batch, seqlen, nhead, hdim)

        shapes = {
            "q": shape(self.nhead_q, self.seqlens_q, self.seqlen_q, self.hdim_q),
            "k": shape(self.nhead_k, self.seqlens_k, self.seqlen_k, self.hdim_q),
            "v": shape(self.nhead_k, self.seqlens_k, self.seqlen_k, self.hdim_v),
            "o": shape(self.nhead_q, self.seqlens_q, self.seqlen_q, self.hdim_v),
        }
        if self.lse:
            rows = (self.batch, self.nhead_q, self.seqlen_q)
            shapes["lse"] = rows if self.seqlens_q is None else (self.nhead_q, sum(self.seqlens_q))
        return shapes

    @property
    def flops(self) -> int:
        """FLOP of the two matrix products, by convention: 2 (hdim_q + hdim_v) for a query-key pair of a query head.

        Pairs are all pairs without a mask, half of all under a causal mask, whatever its corner (so do published
        figures count), and exactly the visible pairs under a window; group mode sums over its sequences.
        """
        flop_of_pair = 2 * self.nhead_q * (self.hdim_q + self.hdim_v)
        if self.window is not None:
            return flop_of_pair * sum(self._visible_pairs(*lengths) for lengths in self._distinct_sequences())
        pairs = sum(count * seqlen_q * seqlen_k for count, seqlen_q, seqlen_k in self._distinct_sequences())
        return flop_of_pair * pairs if self.mask == "no" else flop_of_pair // 2 * pairs

    def _distinct_sequences(self) -> list[tuple[int, int, int]]:
        """(count, queries, keys): one entry in batch mode, where all sequences are alike."""
        if self.mode is Mode.BATCH:
            return [(self.batch, self.seqlen_q, self.seqlen_k)]
        return [(1, *lengths) for lengths in self.sequences]

    def _visible_pairs(self, count: int, seqlen_q: int, seqlen_k: int) -> int:
        """Pairs inside the window, in closed form.

        The keys of query i end at clamp(i + to_end) and begin at clamp(i + to_begin), clamped to [0, seqlen_k].
        """

        def sum_of_clamps(offset: int) -> int:
            def below(stop: int) -> int:  # sum of clamp(i) over every i < stop
                inside = min(max(stop, 0), seqlen_k)
                return inside * (inside - 1) // 2 + max(stop - inside, 0) * seqlen_k

            return below(offset + seqlen_q) - below(offset)

        diagonal = seqlen_k - seqlen_q if self.mask_corner else 0
        ends = seqlen_q * seqlen_k if self.window_right < 0 else sum_of_clamps(diagonal + self.window_right + 1)
        begins = 0 if self.window_left < 0 else sum_of_clamps(diagonal - self.window_left)
        return count * (ends - begins)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors: the least memory traffic, every input read once, every output written once."""
        size_in, size_out = ELEMENT_BYTES[self.dtype]
        sizes = {"o": size_out, "lse": 4}
        return sum(math.prod(shape) * sizes.get(name, size_in) for name, shape in self.shapes.items())


_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "op": get_args(Op),
        "dtype": tuple(map(str, ELEMENT_BYTES)),
        "mask": get_args(MaskWord),
        "layout": get_args(Layout),
    }
)


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
            hint="masks that take a window: window (aligned bottom-right), top_left, bottom_right",
        )
    if window == _UNBOUNDED:
        return "no", None
    return ("top_left" if mask == "top_left" else "bottom_right"), (None if window == _CAUSAL else window)


def _nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean …?``, or nothing when no known word is near."""
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _explained(error: ValidationError) -> ProblemError:
    """The first failure, in the words of the field's description."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    meaning = Problem.model_fields[name].description
    value, is_missing, indices = first["input"], first["type"] == "missing", first["loc"][1:]
    if is_missing and not indices:
        return ProblemError(f"a problem needs {name}: {meaning}")
    if name in _CHOICES:
        allowed = _CHOICES[name]
        return ProblemError(f"{name}={value!r}: allowed: {', '.join(allowed)}{_nearest(str(value), allowed)}")
    element = "" if is_missing else "".join(f"[{index}]" for index in indices)
    return ProblemError(f"{name}{element}={value!r}: {meaning}")
