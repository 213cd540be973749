"""Time the catalog's convolution kernels for NVIDIA GPUs, and cuDNN by PyTorch, and compare them with targets.

For each convolution and its two gradients, the kernels that selection considers and cuDNN take turns on one stream,
with none of the operands in the L2 cache. cuDNN has channels_last tensors and chooses its algorithm by timing
(``torch.backends.cudnn.benchmark``). Every answer is checked against PyTorch's before it is timed. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cuda_vs_torch import Row, check, medians, print_row, tensors

from catalog import Catalog
from catalog.ops.conv.problem import ConvProblem
from catalog.runtime.plan import Plan

CONVOLUTIONS: Sequence[tuple[int, ...]] = (
    *((32, width, width, size, 3, 1, 1, 1) for width, size in ((256, 56), (64, 56), (128, 28), (256, 14), (512, 7))),
    (32, 256, 64, 56, 1, 1, 0, 1),
    (32, 256, 512, 56, 1, 2, 0, 1),
    (32, 3, 64, 224, 7, 2, 3, 1),
    (8, 320, 320, 64, 3, 1, 1, 1),
    (2, 1280, 1280, 16, 3, 1, 1, 1),
    (32, 256, 256, 28, 3, 1, 1, 32),
    (32, 256, 256, 28, 3, 1, 1, 256),
)
"""Images, channels of input and output, height and width, extent of the filter, stride, padding, groups."""

MASKS = {"bwd_data": [True, False, False], "bwd_weight": [False, True, False]}
LEAST = 0.85
"""Slowest permitted convolution, compared with cuDNN; the geometric mean must be 1."""


def problems(dtype: str) -> Iterator[ConvProblem]:
    for n, c, k, size, reach, stride, pad, g in CONVOLUTIONS:
        axes = {"size": size, "filter": reach, "stride": stride, "pad": pad}
        fields: dict[str, Any] = {name: (number, number) for name, number in axes.items()}
        for direction in ("forward", *MASKS):
            yield ConvProblem(direction=direction, n=n, c=c, k=k, g=g, dtype=dtype, **fields)


class Bench:
    """The catalog, and how long and how much to time."""

    def __init__(self, catalog: Catalog, options: argparse.Namespace) -> None:
        self.catalog = catalog
        self.candidates: int = options.candidates
        self.seconds: float = options.seconds

    def plans(self, problem: ConvProblem) -> list[Plan]:
        """The first plans of the static order."""
        found = self.catalog.candidates(problem, arch="sm_90", limit=self.candidates, static=True)
        return [self.catalog.plan(problem, candidate.kernel) for candidate in found]

    def build(self, problems: Sequence[ConvProblem]) -> None:
        """Compile all plans, on every core."""
        kernels = {kernel.id: kernel for one in problems for plan in self.plans(one) for kernel in plan.kernels}
        for failure in self.catalog.builder.build_many(kernels.values()).failures:
            print(f"{failure.kernel.name}: {failure.error}")

    def row(self, problem: ConvProblem) -> Row:
        """TFLOP/s of the first plan, of the best one, and of cuDNN."""
        given, theirs = sides(problem)
        expected = theirs()
        calls: dict[str, Callable[[], Any]] = {}
        plans = self.plans(problem)
        [made] = problem.made
        for place, plan in enumerate(plans):
            result = torch.empty_like(expected.movedim(1, -1), memory_format=torch.contiguous_format)
            inputs = {name: tensor.movedim(1, -1) for name, tensor in given.items() if name != made}
            calls[str(place)] = bound = plan.bind(inputs, outputs={made: result}).enqueue
            bound()
            check(problem.name, result.movedim(-1, 1), expected)
        times = medians({**calls, "cudnn": theirs}, self.seconds, cold=True)
        cudnn = times.pop("cudnn")
        best = min(times, key=lambda place: times[place])
        rates = {"ours": times["0"], "best": times[best], "cudnn": cudnn}
        figures = {name: problem.flops / ms / 1e9 for name, ms in rates.items()}
        figures |= {"of cudnn": cudnn / times["0"], "best of cudnn": cudnn / times[best], "us": 1e3 * times["0"]}
        name = plans[int(best)].kernels[0].name
        return Row("conv", {"problem": problem.name}, figures, {f"x {LEAST}": figures["of cudnn"] >= LEAST}, name)


def sides(problem: ConvProblem) -> tuple[Mapping[str, torch.Tensor], Callable[[], torch.Tensor]]:
    """The tensors of a problem, channels_last and in PyTorch's order of axes, and its computation by cuDNN."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype]
    shapes = {
        "input": (problem.n, problem.c, *problem.size),
        "weight": (problem.k, problem.channels_in, *problem.filter),
        "output": (problem.n, problem.k, *problem.out),
    }
    given = {name: tensors(*shape).to(dtype).to(memory_format=torch.channels_last) for name, shape in shapes.items()}
    axes = [list(values) for values in (problem.stride, problem.pad, problem.dilation)]
    if problem.direction == "forward":
        convolve = partial(torch.ops.aten.convolution, given["input"], given["weight"], None)
        return given, lambda: convolve(*axes, False, [0, 0], problem.g)
    backward = partial(
        torch.ops.aten.convolution_backward, given["output"], given["input"], given["weight"], None, *axes
    )
    mask = MASKS[problem.direction]
    return given, lambda: backward(False, [0, 0], problem.g, mask)[mask.index(True)]


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--candidates", type=int, default=4, help="kernels of each problem; 1: only what is selected")
    parser.add_argument("--seconds", type=float, default=0.4, help="total for all sides of one problem")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--db", type=Path, default=None, help="the catalog")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    catalog = Catalog(options.db)
    catalog.populate("sm_90", operation="conv")
    listed = list(problems(options.dtype))
    bench = Bench(catalog, options)
    bench.build(listed)
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "cuDNN", torch.backends.cudnn.version())
    rows = []
    for problem in listed:
        rows.append(bench.row(problem))
        print_row(rows[-1])
    for direction in ("forward", *MASKS):
        of = [row.figures for row, problem in zip(rows, listed, strict=True) if problem.direction == direction]
        for figure in ("of cudnn", "best of cudnn"):
            shares = [one[figure] for one in of]
            print(f"{direction}: {figure} {mean(shares):.3f} on geometric mean of {len(of)}, worst {min(shares):.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
