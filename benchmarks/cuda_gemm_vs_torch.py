"""Time the catalog's GEMM kernels for NVIDIA GPUs, and cuBLAS by PyTorch, and compare them with targets.

For each product, the kernels that selection considers and cuBLAS take turns on one stream, with none of the operands in
the L2 cache. Products of few rows also run back to back, each with weights of its own, beside a copy of memory. Every
answer is checked against PyTorch's before it is timed. See benchmarks/README.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from cuda_plans import Bench, parser_of, print_means, write_rows
from cuda_vs_torch import COPY_BYTES, Row, check, medians, print_row, tensors
from drawn_problems import SPACES, drawn

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem

SIZES: tuple[tuple[int, int, int], ...] = (
    *((size, size, size) for size in (8192, 4096, 2048, 1024)),
    *((m, 4096, 4096) for m in (16384, 256, 16, 8, 1)),
    *((64, 4096, 14336), (16, 14336, 4096), (4096, 4096, 131)),
)
"""M, N and K; PyTorch multiplies fp8 only where K is a multiple of 16."""

GROUPS = (((256,) * 64, 4096, 4096), ((64,) * 64, 4096, 4096), ((1, 511, 0, 512) * 16, 4096, 4096))
"""Rows of each group, N and K."""

FEW_ROWS = 16
STREAMED_BYTES = 1 << 29
"""The weights of products that run back to back, in total: many times the L2 cache."""


class GemmBench(Bench):
    """Times products."""

    def cold(self, problem: GemmProblem) -> Row:
        """TFLOP/s of the first plan, of the best one, and of cuBLAS."""
        a, b = operands(problem)
        theirs = product_of(problem, a, b)
        expected = theirs()
        given = {"a": a, "b": b.mT if problem.layout[1] == "c" else b}
        plans, ours = self.plans(problem), []
        for plan in plans:
            c = torch.empty_like(expected)
            ours.append(plan.bind(given, outputs={"c": c}).enqueue)
            ours[-1]()
            check(f"gemm {problem.key}", c, expected)
        figures, best = self.compared(problem, ours, "cublas", theirs)
        labels = {"m": problem.m, "n": problem.n, "k": problem.k, "layout": problem.layout}
        met = {"cublas x 1.0": figures["of cublas"] >= 1}
        return Row("cold", labels, figures, met, plans[best].kernels[0].name)

    def groups(self, problem: GemmProblem) -> Row:
        """TFLOP/s of groups of rows, of PyTorch's groups, and of one product of the same work."""
        m, n, k = problem.m, problem.n, problem.k
        one = problem.model_copy(update={"groups": None})
        a, b = operands(one)
        weights = torch.stack([operands(one)[1].mT for _ in problem.groups or ()])
        plan = self.plans(problem)[0]
        c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        sides: dict[str, Callable[[], Any]] = {"ours": plan.bind({"a": a, "b": weights}, outputs={"c": c}).enqueue}
        sides["ours"]()
        ends = torch.tensor(problem.lists.arrays["starts"][1:], device="cuda", dtype=torch.int32)
        if problem.dtype == "bf16":
            sides["torch"] = partial(torch._grouped_mm, a, weights.mT, offs=ends)
            check(f"gemm {problem.key}", c, sides["torch"]())
        else:
            last = int(ends[-2])
            check(f"gemm {problem.key}", c[last:], product_of(one, a[last:], weights[-1].mT)())
        sides["one"] = product_of(one, a, b)
        times = medians(sides, self.seconds, cold=True)
        figures = {name: problem.flops / ms / 1e9 for name, ms in times.items()}
        share = times["one"] / times["ours"]
        figures |= {"of one": share, "us": 1e3 * times["ours"]}
        labels = {"groups": problem.products, "m": m, "n": n, "k": k}
        return Row("groups", labels, figures, {"one x 0.9": share >= 0.9}, plan.kernels[0].name)

    def streamed(self, problem: GemmProblem) -> Row:
        """GB/s of the first plan and of cuBLAS where weights come from memory, product after product, and of a copy."""
        m, n, k = problem.m, problem.n, problem.k
        weights = [tensors(n, k) for _ in range(math.ceil(STREAMED_BYTES / (2 * n * k)))]
        a, c, expected = tensors(m, k), tensors(m, n), tensors(m, n)
        plan = self.plans(problem)[0]
        ours = graph_of([plan.bind({"a": a, "b": b}, outputs={"c": c}).enqueue for b in weights])
        theirs = graph_of([partial(torch.mm, a, b.mT, out=expected) for b in weights])
        ours()
        theirs()
        check(f"gemm {problem.key}", c, expected)
        source = torch.empty(COPY_BYTES // 2, device="cuda", dtype=torch.uint8)
        target = torch.empty_like(source)
        times = medians({"ours": ours, "cublas": theirs, "copy": lambda: target.copy_(source)}, self.seconds)
        done = {"ours": problem.traffic * len(weights), "cublas": problem.traffic * len(weights), "copy": COPY_BYTES}
        figures = {f"{name} GB/s": size / times[name] / 1e6 for name, size in done.items()}
        share = figures["ours GB/s"] / figures["copy GB/s"]
        figures |= {"of cublas": times["cublas"] / times["ours"], "of copy": share}
        labels = {"m": m, "n": n, "k": k, "layout": problem.layout}
        return Row("streamed", labels, figures, {"copy x 0.85": share >= 0.85}, plan.kernels[0].name)

    def rows(self, problems: Sequence[GemmProblem]) -> Iterator[Row]:
        yield from map(self.cold, problems)
        for problem in problems:
            if (
                problem.m <= FEW_ROWS
                and problem.dtype == "bf16"
                and problem.layout == "rcr"
                and 2 * problem.n * problem.k >= STREAMED_BYTES // 64
            ):
                yield self.streamed(problem)


def operands(problem: GemmProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as PyTorch multiplies them: (m, k) and (k, n)."""
    m, n, k = problem.m, problem.n, problem.k
    a, b = tensors(m, k), tensors(n, k) if problem.layout[1] == "c" else tensors(k, n)
    if problem.dtype == "fp8":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    return a, b.mT if problem.layout[1] == "c" else b


def product_of(problem: GemmProblem, a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The product as PyTorch computes it; sums of fp8 are promoted, which is its default."""
    if problem.dtype == "fp8":
        one = torch.ones((), device="cuda")
        return partial(torch._scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return partial(torch.mm, a, b, out=torch.empty(problem.m, problem.n, device="cuda", dtype=a.dtype))


def graph_of(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """The calls as one CUDA graph, so that Python is not part of the time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="element type of A and B")
    parser.add_argument("--groups", action="store_true", help="also time groups of rows beside one product")
    parser.add_argument("--drawn", type=int, default=0, help="also time that many drawn products")
    parser.add_argument("--seed", type=int, default=7, help="of what is drawn")
    options = parser.parse_args()
    catalog = Catalog(options.db)
    catalog.populate("sm_90", operation="gemm")
    if options.drawn and options.dtype != "bf16":
        parser.error("--drawn: products of fp8 are not drawn")
    listed = [
        GemmProblem(m=m, n=n, k=k, dtype=options.dtype, dtype_c="bf16" if options.dtype == "fp8" else None, k_batch=0)
        for m, n, k in SIZES
        if options.dtype == "bf16" or k % 16 == 0
    ]
    space = drawn(SPACES["gemm", "gpu"], options.drawn, options.seed)
    others = [problem for problem in space if isinstance(problem, GemmProblem)]
    several = [
        GemmProblem(groups=groups, n=n, k=k, dtype=options.dtype, dtype_c=listed[0].dtype_c)
        for groups, n, k in (GROUPS if options.groups else ())
    ]
    bench = GemmBench(catalog, options)
    bench.build([*listed, *several, *others])
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    rows = []
    for row in (*map(bench.groups, several), *bench.rows([*listed, *others])):
        rows.append(row)
        print_row(row)
    cold = [row.figures for row in rows if row.scenario == "cold"]
    print_means("listed", "cublas", cold[: len(listed)])
    print_means("drawn", "cublas", cold[len(listed) :])
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
