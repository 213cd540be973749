"""Time the catalog's GEMM kernels for the host, and torch.mm on the same tensors, and compare them with targets.

The sides of a problem take turns in one process, on the same threads. Figures are medians, or with --best minima: on a
busy machine only these mean anything. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from host_sides import TYPES, compare, parser_of
from report import Label, Row, Target
from timing import STREAM_BYTES, Call, Pace, copies_to_stream, interleaved, rotating, stream

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem

SQUARES = [(size, size, size) for size in (256, 512, 1024, 2048, 4096)]
FEW_ROWS = [(m, 4096, 4096) for m in (1, 2, 4, 8, 16)]
EXPERTS, SKEW = 64, 1.2
MODELS = [(tokens, 768, 2048) for tokens in (256, 1024, 4096)]
"""Tokens of all experts, and the weights of each: their numbers fall as a power of the expert's rank, the skew."""

KINDS = ("one", "few", "grouped")
COLUMNS = (
    *("kind", "dtype", "layout", "m", "n", "k", "ours ms", "torch ms", "GFLOP/s", "of peak", "GB/s", "ours/stream"),
    "torch/ours",
)
TARGETS = [
    Target("torch/ours", ">=", 1.0, {"kind": ("one", "few")}),
    Target("ours/stream", ">=", 0.9),
    Target("torch/ours", ">=", 1.5, {"kind": ("grouped",)}),
    Target("of peak", ">=", 0.9, {"dtype": ("fp32",), "m": (2048,)}),
]


def skewed(tokens: int) -> tuple[int, ...]:
    """The tokens of each expert, in no order."""
    shares = torch.arange(1, EXPERTS + 1, dtype=torch.float64) ** -SKEW
    chosen = torch.multinomial(shares, tokens, replacement=True, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(chosen, minlength=EXPERTS)
    return tuple(counts[torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1))].tolist())


def each(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, groups: tuple[int, ...]) -> None:
    """PyTorch's side of groups: a product for each."""
    for rows, weights, result in zip(a.split(groups), b, out.split(groups), strict=True):
        if len(rows):
            torch.mm(rows, weights, out=result)


def row_of(catalog: Catalog, problem: GemmProblem, kind: str, peak: float, pace: Pace) -> Row:
    """Ours and PyTorch's side on the same tensors; ``peak`` is in GFLOP/s.

    The weights of a product of few rows are read from memory, and compared with a sum that reads it.
    """
    m, n, k, dtype, streams = problem.m, problem.n, problem.k, problem.dtype, kind == "few"
    a, b = (torch.randn(problem.shapes[name]).to(TYPES[dtype]) for name in ("a", "b"))
    weights = [b, *(b.clone() for _ in range(copies_to_stream(problem.bytes) - 1 if streams else 0))]
    out = torch.empty(m, n, dtype=TYPES[dtype])
    plan = catalog.select(problem)
    theirs = partial(torch.mm, out=out) if problem.groups is None else partial(each, out=out, groups=problem.groups)
    sides: dict[str, Call] = {
        "ours": rotating([plan.bind(a=a, b=copy).launch for copy in weights]),
        "torch": rotating([partial(theirs, a, copy if problem.layout[1] == "r" else copy.mT) for copy in weights]),
    }
    seconds, runs = interleaved(sides | ({"stream": stream()} if streams else {}), pace)
    rate = problem.flops / seconds["ours"] / 1e9
    figures = {f"{side} ms": 1e3 * seconds[side] for side in sides}
    figures |= {"GFLOP/s": rate, "torch/ours": seconds["torch"] / seconds["ours"]}
    figures["GB/s"] = problem.traffic / seconds["ours"] / 1e9
    if dtype == "fp32":
        figures["of peak"] = rate / peak
    if streams:
        figures["ours/stream"] = problem.traffic / seconds["ours"] * seconds["stream"] / STREAM_BYTES
    labels: dict[str, Label] = {"kind": kind, "dtype": dtype, "layout": problem.layout, "m": m, "n": n, "k": k}
    return Row("gemm", labels, figures, runs, str(plan))


def rows_of(catalog: Catalog, peak: float, options: argparse.Namespace) -> Iterator[Row]:
    pace = Pace(options.runs, 1, options.seconds, min if options.best else median)
    for dtype in options.dtype:
        for layout in options.layout:
            kinds: dict[str, list[dict[str, Any]]] = {
                "one": [{"m": m, "n": n, "k": k} for m, n, k in SQUARES],
                "few": [{"m": m, "n": n, "k": k} for m, n, k in FEW_ROWS],
                "grouped": [{"groups": skewed(tokens), "n": n, "k": k} for tokens, n, k in MODELS],
            }
            for kind in options.kind:
                for sizes in kinds[kind]:
                    problem = GemmProblem(**sizes, dtype=dtype, layout=layout)
                    if max(problem.m, problem.n) <= options.largest:
                        yield row_of(catalog, problem, kind, peak, pace)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layout", nargs="+", choices=("rcr", "rrr"), default=["rcr", "rrr"])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="few: 1 to 16 rows")
    parser.add_argument("--largest", type=int, default=4096, help="largest M or N (default 4096)")
    options = parser.parse_args()
    compare(COLUMNS, TARGETS, options.threads, partial(rows_of, options=options))


if __name__ == "__main__":
    main()
