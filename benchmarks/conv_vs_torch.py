"""Time the catalog's convolution kernels for the host and PyTorch's on the same tensors, and compare them with targets.

Images are in PyTorch's channels_last. The sides of a problem take turns in one process, on the same threads. Figures
are medians, or with --best minima, and with --cpu CPU seconds: on a busy machine only these mean anything. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from host_sides import TYPES, compare, parser_of
from report import Label, Row, Target
from timing import Call, Pace, interleaved

from catalog import Catalog
from catalog.ops.conv.problem import ConvProblem

DIRECTIONS = ("forward", "bwd_data", "bwd_weight")


def _layer(c: int, k: int, size: tuple[int, ...], extent: int, **fields: Any) -> dict[str, Any]:
    """A layer whose filter has one extent, with as much padding as keeps the size."""
    ndim = len(size)
    stride = (fields.pop("stride", 1),) * ndim
    return {
        "c": c,
        "k": k,
        "size": size,
        "filter": (extent,) * ndim,
        "pad": (extent // 2,) * ndim,
        "stride": stride,
    } | fields


SHAPES: dict[str, list[dict[str, Any]]] = {
    # ResNet-50: He et al., "Deep Residual Learning for Image Recognition" (2015), table 1.
    "resnet": [
        _layer(3, 64, (224, 224), 7, stride=2),
        *(_layer(64, k, (56, 56), extent) for k, extent in ((64, 1), (64, 3), (256, 1))),
        _layer(128, 128, (56, 56), 3, stride=2),
        *(_layer(128, k, (28, 28), extent) for k, extent in ((128, 3), (512, 1))),
        _layer(512, 1024, (28, 28), 1, stride=2),
        *(_layer(256, k, (14, 14), extent) for k, extent in ((256, 3), (1024, 1))),
        _layer(512, 512, (7, 7), 3),
        _layer(2048, 512, (7, 7), 1),
    ],
    # MobileNetV2: Sandler et al., "Inverted Residuals and Linear Bottlenecks" (2018), table 2.
    "depthwise": [
        _layer(c, c, (size, size), 3, stride=stride, g=c)
        for c, size, stride in ((32, 112, 1), (96, 112, 2), (144, 56, 1), (192, 28, 1), (384, 14, 1), (960, 7, 1))
    ],
    # Images of 3 channels and of a few features, several outputs per channel, groups of different numbers of channels.
    "few": [
        *(_layer(c, c, (size, size), extent, g=c) for c, size, extent in ((3, 224, 7), (8, 112, 3), (12, 56, 5))),
        *(_layer(c, m * c, (size, size), 3, g=c) for c, m, size in ((3, 8, 112), (64, 2, 28))),
        *(_layer(16 * i, 16 * o, (size, size), 3, g=16) for i, o, size in ((3, 1, 112), (2, 7, 56), (16, 4, 28))),
    ],
    # ResNeXt-50 32x4d: Xie et al., "Aggregated Residual Transformations for Deep Neural Networks" (2016), table 1.
    "grouped": [_layer(c, c, (size, size), 3, g=32) for c, size in ((128, 56), (256, 28), (512, 14), (1024, 7))],
    # Hara et al., "Can Spatiotemporal 3D CNNs Retrace the History of 2D CNNs and ImageNet?" (2017).
    "video": [_layer(c, c, size, 3, n=1) for c, size in ((64, (8, 56, 56)), (128, (4, 28, 28)), (256, (2, 14, 14)))],
}
COLUMNS = (
    *("kind", "direction", "dtype", "c", "k", "g", "size", "filter", "stride", "ours ms", "torch ms", "GFLOP/s"),
    *("of peak", "torch/ours"),
)
TARGETS = [
    Target("torch/ours", ">=", 1.0, {"kind": ("resnet", "few")}),
    Target("torch/ours", ">=", 1.5, {"kind": ("depthwise", "grouped")}),
    Target("torch/ours", ">=", 1.2, {"kind": ("video",)}),
]


def theirs_of(problem: ConvProblem, tensors: dict[str, torch.Tensor]) -> Call:
    """PyTorch's side, on tensors whose channels come second."""
    common = (list(problem.stride), list(problem.pad), list(problem.dilation), False, [0] * problem.ndim, problem.g)
    if problem.direction == "forward":
        return partial(torch.convolution, tensors["input"], tensors["weight"], None, *common)
    mask = [problem.direction == "bwd_data", problem.direction == "bwd_weight", False]
    backward = torch.ops.aten.convolution_backward
    return partial(backward, tensors["output"], tensors["input"], tensors["weight"], None, *common, mask)


def row_of(catalog: Catalog, problem: ConvProblem, kind: str, peak: float, pace: Pace) -> Row:
    """Ours and PyTorch's side on the same tensors; ``peak`` is in GFLOP/s."""
    ours = {name: torch.randn(problem.shapes[name]).to(TYPES[problem.dtype]) for name in problem.shapes}
    second = {name: tensor.movedim(-1, 1) for name, tensor in ours.items()}
    plan = catalog.select(problem)
    sides: dict[str, Call] = {
        "ours": plan.bind({name: ours[name] for name in problem.needed}).launch,
        "torch": theirs_of(problem, second),
    }
    seconds, runs = interleaved(sides, pace)
    rate = problem.flops / seconds["ours"] / 1e9
    figures = {f"{side} ms": 1e3 * seconds[side] for side in sides}
    figures |= {"GFLOP/s": rate, "torch/ours": seconds["torch"] / seconds["ours"]}
    if problem.dtype == "fp32":
        figures["of peak"] = rate / peak
    labels: dict[str, Label] = {"kind": kind}
    for name in ("direction", "dtype", "c", "k", "g", "size", "filter", "stride"):
        value = getattr(problem, name)
        labels[name] = "x".join(map(str, value)) if isinstance(value, tuple) else value
    return Row("conv", labels, figures, runs, str(plan))


def rows_of(catalog: Catalog, peak: float, options: argparse.Namespace) -> Iterator[Row]:
    clock = time.thread_time if options.cpu else time.perf_counter
    pace = Pace(options.runs, 1, options.seconds, min if options.best else median, clock)
    for dtype in options.dtype:
        for direction in options.direction:
            for kind in options.kind:
                for shape in SHAPES[kind]:
                    problem = ConvProblem(**{"n": options.images, **shape}, direction=direction, dtype=dtype)
                    yield row_of(catalog, problem, kind, peak, pace)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--kind", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--images", type=int, default=8, help="of a batch, except of videos (default 8)")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds instead of wall time, with --threads 1")
    options = parser.parse_args()
    if options.cpu and options.threads != 1:
        parser.error("--cpu counts the seconds of one thread: add --threads 1")
    compare(COLUMNS, TARGETS, options.threads, partial(rows_of, options=options))


if __name__ == "__main__":
    main()
