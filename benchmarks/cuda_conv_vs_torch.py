"""Time the catalog's convolution kernels for NVIDIA GPUs, and cuDNN by PyTorch, and compare them with targets.

For each convolution and its two gradients, the kernels that selection considers and cuDNN take turns on one stream,
with none of the operands in the L2 cache. cuDNN has channels_last tensors and chooses its algorithm by timing
(``torch.backends.cudnn.benchmark``). Every answer is checked against PyTorch's before it is timed. See
benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from cuda_plans import Bench, parser_of, print_means, write_rows
from cuda_vs_torch import Row, check, print_row, tensors

from catalog import Catalog
from catalog.ops.conv.problem import ConvProblem

CONVOLUTIONS: Sequence[tuple[int, ...]] = (
    *((32, width, width, size, 3, 1, 1, 1) for width, size in ((256, 56), (64, 56), (128, 28), (256, 14), (512, 7))),
    (32, 256, 64, 56, 1, 1, 0, 1),
    (32, 256, 512, 56, 1, 2, 0, 1),
    (32, 3, 64, 224, 7, 2, 3, 1),
    (8, 320, 320, 64, 3, 1, 1, 1),
    (2, 1280, 1280, 16, 3, 1, 1, 1),
    (32, 256, 256, 28, 3, 1, 1, 32),
    (32, 128, 128, 56, 3, 1, 1, 32),
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


class ConvBench(Bench):
    """Times convolutions."""

    def row(self, problem: ConvProblem) -> Row:
        """TFLOP/s of the first plan, of the best one, and of cuDNN."""
        given, theirs = sides(problem)
        expected = theirs()
        plans, ours = self.plans(problem), []
        [made] = problem.made
        for plan in plans:
            result = torch.empty_like(expected.movedim(1, -1), memory_format=torch.contiguous_format)
            inputs = {name: tensor.movedim(1, -1) for name, tensor in given.items() if name != made}
            ours.append(plan.bind(inputs, outputs={made: result}).enqueue)
            ours[-1]()
            check(problem.name, result.movedim(-1, 1), expected)
        figures, best = self.compared(problem, ours, "cudnn", theirs)
        met = {f"x {LEAST}": figures["of cudnn"] >= LEAST}
        return Row("conv", {"problem": problem.name}, figures, met, plans[best].kernels[0].name)


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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    catalog = Catalog(options.db)
    catalog.populate("sm_90", operation="conv")
    listed = list(problems(options.dtype))
    bench = ConvBench(catalog, options)
    bench.build(listed)
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "cuDNN", torch.backends.cudnn.version())
    rows = []
    for problem in listed:
        rows.append(bench.row(problem))
        print_row(rows[-1])
    for direction in ("forward", *MASKS):
        of = [row.figures for row, problem in zip(rows, listed, strict=True) if problem.direction == direction]
        print_means(direction, "cudnn", of)
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
