"""Time the catalog's GEMM kernels for the host, and torch.mm on the same tensors, and compare them with targets.

The sides of a problem take turns in one process, on the same threads. Figures are medians, or with --best minima: on a
busy machine only these mean anything. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
from report import Label, Row, Target, is_met, print_table, summary
from timing import Call, Pace, interleaved

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime.peaks import measure_peaks

SQUARES = [(size, size, size) for size in (256, 512, 1024, 2048, 4096)]
FEW_ROWS = [(m, 4096, 4096) for m in (1, 2, 4, 8, 16)]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COLUMNS = ("dtype", "layout", "m", "n", "k", "ours ms", "torch ms", "GFLOP/s", "of peak", "GB/s", "torch/ours")
TARGETS = [
    Target("torch/ours", ">=", 1.0),
    Target("of peak", ">=", 0.9, {"dtype": ("fp32",), "m": (2048,)}),
]


def row_of(catalog: Catalog, problem: GemmProblem, peak: float, pace: Pace) -> Row:
    """Ours and PyTorch's side on the same tensors; ``peak`` is in GFLOP/s."""
    m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
    by_rows = problem.layout[1] == "r"
    a, b = (torch.randn(shape).to(TYPES[dtype]) for shape in ((m, k), (k, n) if by_rows else (n, k)))
    out = torch.empty(m, n, dtype=TYPES[dtype])
    plan = catalog.select(problem)
    sides: dict[str, Call] = {
        "ours": plan.bind(a=a, b=b).launch,
        "torch": partial(torch.mm, a, b if by_rows else b.T, out=out),
    }
    seconds, runs = interleaved(sides, pace)
    rate = problem.flops / seconds["ours"] / 1e9
    figures = {f"{side} ms": 1e3 * of_side for side, of_side in seconds.items()}
    figures |= {"GFLOP/s": rate, "torch/ours": seconds["torch"] / seconds["ours"]}
    figures["GB/s"] = problem.traffic / seconds["ours"] / 1e9
    if dtype == "fp32":
        figures["of peak"] = rate / peak
    labels: dict[str, Label] = {"dtype": dtype, "layout": problem.layout, "m": m, "n": n, "k": k}
    return Row("gemm", labels, figures, runs, str(plan))


def rows_of(catalog: Catalog, options: argparse.Namespace, peak: float) -> Iterator[Row]:
    pace = Pace(options.runs, 1, options.seconds, min if options.best else median)
    for dtype in options.dtype:
        for layout in options.layout:
            for m, n, k in [*SQUARES, *FEW_ROWS]:
                if max(m, n) <= options.largest:
                    yield row_of(catalog, GemmProblem(m=m, n=n, k=k, dtype=dtype, layout=layout), peak, pace)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--layout", nargs="+", choices=("rcr", "rrr"), default=["rcr", "rrr"])
    parser.add_argument("--largest", type=int, default=4096, help="largest M or N (default 4096)")
    parser.add_argument("--runs", type=int, default=25, help="timed runs of each side (default 25)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one problem (default 8)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each side")
    parser.add_argument("--best", action="store_true", help="minima instead of medians, for a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["CATALOG_NUM_THREADS"] = str(options.threads)  # read by the first use of the catalog's settings
    catalog = Catalog()
    device = catalog.host().device
    peak = measure_peaks(catalog.builder, device.arch, device.cores).gflops
    print(f"{device.name}, {device.arch}, {device.cores} threads, peak {peak:.0f} GFLOP/s; PyTorch {torch.__version__}")
    rows = print_table(COLUMNS, TARGETS, rows_of(catalog, options, peak))
    print(f"\n{sum(is_met(row, TARGETS) for row in rows)}/{len(rows)} problems met")
    for line in summary(TARGETS, rows):
        print(f"    {line}")


if __name__ == "__main__":
    main()
