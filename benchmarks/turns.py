"""Sides that are measured together, for a point of a scenario's axes, and the rows that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from report import Label
from sides import Maker, one_by_one, our_run, ours, sgemm, stream, streamed, their_backward, theirs
from timing import SGEMM_FLOP, STREAM_BYTES

from catalog import Problem

HEADS = 8
MASKS = {"full": "no", "causal": "top_left"}
OPS_OVER_PAGES = {"splitkv": "splitkv", "pagedkv": "fwd"}
"""Operations over pages, each with the operation that it is compared with."""

LAYOUTS = ("bshd", "bhsd")
"""Layouts of contiguous tensors: in the first, as in a page, all heads of a token are together."""

_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_MAX_PADDING = 10
"""Padding that multiplies the work by more than this is not measured: nobody would choose it."""

Seconds = Mapping[str, float]
Figure = Callable[[Seconds], float]


@dataclass(frozen=True)
class Planned:
    """A planned row: labels, figures from the seconds of the sides, the side that it describes.

    ``answer_of`` is another side, whose answer should be the same.
    """

    labels: Mapping[str, Label]
    figures: Mapping[str, Figure]
    side: str
    answer_of: str | None = None


@dataclass(frozen=True)
class Turn:
    """Sides by name, and the rows that they make; ``cache_gb`` is the size of K and V in GiB if that is limited."""

    sides: Mapping[str, Maker]
    rows: tuple[Planned, ...]
    cache_gb: float = 0.0


def ms(side: str) -> Figure:
    return lambda seconds: seconds[side] * 1e3


def us(side: str) -> Figure:
    return lambda seconds: seconds[side] * 1e6


def ratio(side: str, to: str) -> Figure:
    return lambda seconds: seconds[side] / seconds[to]


def gflops(flop: int, side: str) -> Figure:
    return lambda seconds: flop / seconds[side] / 1e9


def gb_per_s(size: int, side: str) -> Figure:
    return lambda seconds: size / seconds[side] / 1e9


def over(figure: Figure, other: Figure) -> Figure:
    return lambda seconds: figure(seconds) / other(seconds)


def full_and_causal(op: str, their_side: Callable[[Problem], Maker], dtype: str, hdim: int, seqlen: int) -> Turn:
    sides: dict[str, Maker] = {"sgemm": sgemm}
    rows = []
    for mask, word in MASKS.items():
        problem = _square(op=op, mask=word, dtype=dtype, hdim=hdim, seqlen=seqlen)
        mine, other = f"ours {mask}", f"torch {mask}"
        sides |= {mine: ours(problem), other: their_side(problem)}
        rate, machine = gflops(problem.flops, mine), gflops(SGEMM_FLOP, "sgemm")
        figures = {
            "ours ms": ms(mine),
            "torch ms": ms(other),
            "ours GF/s": rate,
            "sgemm GF/s": machine,
            "torch/ours": ratio(other, mine),
            "ours/sgemm": over(rate, machine),
        }
        if mask == "causal":
            figures["causal/half"] = lambda seconds: 2 * seconds["ours causal"] / seconds["ours full"]
        labels: dict[str, Label] = {"dtype": dtype, "mask": mask, "hdim": hdim, "seqlen": seqlen}
        rows.append(Planned(labels, figures, mine, other))
    return Turn(sides, tuple(rows))


def forward(dtype: str, hdim: int, seqlen: int) -> Turn:
    return full_and_causal("fwd", theirs, dtype, hdim, seqlen)


def backward(dtype: str, hdim: int, seqlen: int) -> Turn:
    return full_and_causal("bwd", their_backward, dtype, hdim, seqlen)


def gqa(dtype: str, mask: str, hdim: int, seqlen: int) -> Turn:
    problems = {
        heads: _square(nhead_k=heads, mask=MASKS[mask], dtype=dtype, hdim=hdim, seqlen=seqlen) for heads in (8, 4, 2, 1)
    }
    rows = tuple(
        Planned(
            {"dtype": dtype, "mask": mask, "hdim": hdim, "seqlen": seqlen, "nhead_k": heads},
            {"MHA ms": ms(str(HEADS)), "GQA ms": ms(str(heads)), "GQA/MHA": ratio(str(heads), str(HEADS))},
            str(heads),
        )
        for heads in problems
        if heads != HEADS
    )
    return Turn({str(heads): ours(problem) for heads, problem in problems.items()}, rows)


def decode(dtype: str, hdim: int, heads: tuple[int, int], batch: int, seqlen: int) -> Turn:
    nhead_q, nhead_k = heads
    problem = Problem(
        op="splitkv",
        batch=batch,
        nhead_q=nhead_q,
        nhead_k=nhead_k,
        seqlen_q=1,
        seqlen_k=seqlen,
        hdim_q=hdim,
        dtype=dtype,
    )
    rate, machine = gb_per_s(problem.bytes, "ours"), gb_per_s(STREAM_BYTES, "stream")
    figures = {
        "ours ms": ms("ours"),
        "torch ms": ms("torch"),
        "ours GB/s": rate,
        "stream GB/s": machine,
        "ours/stream": over(rate, machine),
        "torch/ours": ratio("torch", "ours"),
    }
    labels: dict[str, Label] = {"dtype": dtype, "hdim": hdim, "nhead_q": nhead_q, "nhead_k": nhead_k}
    labels |= {"batch": batch, "seqlen_k": seqlen}
    sides = {"ours": streamed(ours, problem), "torch": streamed(theirs, problem), "stream": stream}
    cache = 2 * batch * nhead_k * seqlen * hdim * _ELEMENT_BYTES[dtype]
    return Turn(sides, (Planned(labels, figures, "ours", "torch"),), cache / 2**30)


def short(dtype: str, hdim: int, batch: int, seqlen: int) -> Turn:
    problem = _square(batch=batch, dtype=dtype, hdim=hdim, seqlen=seqlen)
    figures = {
        "launch us": us("launch"),
        "run us": us("run"),
        "torch us": us("torch"),
        "torch/launch": ratio("torch", "launch"),
        "torch/run": ratio("torch", "run"),
        "run-launch us": lambda seconds: (seconds["run"] - seconds["launch"]) * 1e6,
    }
    labels: dict[str, Label] = {"dtype": dtype, "hdim": hdim, "batch": batch, "seqlen": seqlen}
    sides = {"launch": ours(problem), "run": our_run(problem), "torch": theirs(problem)}
    return Turn(sides, (Planned(labels, figures, "launch", "torch"),))


@dataclass(frozen=True)
class Lengths:
    """A list of lengths with a name for the table."""

    name: str
    lengths: tuple[int, ...] = field(repr=False)


def varlen(dtype: str, hdim: int, mask: str, lengths: Lengths) -> Turn:
    each = lengths.lengths
    word = MASKS[mask]
    packed = Problem(seqlens_q=each, nhead_q=HEADS, hdim_q=hdim, dtype=dtype, mask=word)
    padded = _square(batch=len(each), mask=word, dtype=dtype, hdim=hdim, seqlen=max(each))
    sides = {"packed": ours(packed), "alone": one_by_one(packed)}
    figures = {
        "packed ms": ms("packed"),
        "alone ms": ms("alone"),
        "GF/s": gflops(packed.flops, "packed"),
        "packed/alone": ratio("packed", "alone"),
    }
    if padded.flops <= _MAX_PADDING * packed.flops:
        sides["padded"] = ours(padded)
        figures["packed/padded"] = ratio("packed", "padded")
    labels: dict[str, Label] = {"dtype": dtype, "hdim": hdim, "mask": mask, "lengths": lengths.name}
    return Turn(sides, (Planned(labels, figures, "packed", "alone"),))


def paged(op: str, dtype: str, hdim: int, seqlens: tuple[int, int], pages: tuple[int, ...]) -> Turn:
    seqlen_q, seqlen_k = seqlens

    def side(op: str, page_size: int = 0, layout: str = "bhsd") -> Maker:
        problem = Problem(
            op=op,
            layout=layout,
            batch=1,
            nhead_q=HEADS,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            hdim_q=hdim,
            dtype=dtype,
            page_size=page_size,
        )
        return streamed(ours, problem) if seqlen_q == 1 else ours(problem)

    rows = tuple(
        Planned(
            {"op": op, "dtype": dtype, "hdim": hdim, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "page": page},
            {
                "paged ms": ms(str(page)),
                **{f"{layout} ms": ms(layout) for layout in LAYOUTS},
                **{f"paged/{layout}": ratio(str(page), layout) for layout in LAYOUTS},
            },
            str(page),
        )
        for page in pages
    )
    sides = {layout: side(OPS_OVER_PAGES[op], layout=layout) for layout in LAYOUTS}
    sides |= {str(page): side(op, page) for page in pages}
    return Turn(sides, rows)


def _square(*, batch: int = 1, hdim: int, seqlen: int, **fields: Any) -> Problem:
    """Self-attention of ``HEADS`` heads."""
    return Problem(batch=batch, nhead_q=HEADS, seqlen_q=seqlen, hdim_q=hdim, **fields)
