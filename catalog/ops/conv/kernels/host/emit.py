"""The translation unit of a host row."""

from __future__ import annotations

from catalog.build.host.source import host_source
from catalog.ops.conv.traits import NARROW, Layout, Pipeline
from catalog.schema.kernel import Kernel

_NUMBERS = ("tile_m", "tile_n", "tile_k", "warp_tile_m", "warp_tile_n")
_IN_TILES = (
    *(Pipeline.HOST_AMX, Pipeline.HOST_GROUPS_AMX, Pipeline.HOST_LINES_AMX),
    *(Pipeline.HOST_SCATTER_AMX, Pipeline.HOST_SHIFT_AMX),
)
_IN_PAIRS = (Pipeline.HOST_DEPTHWISE_DOT, Pipeline.HOST_PADDED_DOT, Pipeline.HOST_TWO_ROWS_DOT)


def emit(kernel: Kernel) -> str:
    """The C++ source of a host kernel; equal kernels have equal sources."""
    signature, algorithm = kernel.signature, kernel.algorithm
    in_groups = algorithm.pipeline is Pipeline.HOST_GROUPS_AMX
    values = {
        "direction": f"catalog::host::Direction::{signature.direction}",
        "last": signature.layout is Layout.NHWGC,
        "narrow": f"catalog::host::Narrow::{_narrow(algorithm.pipeline)}",
        "in_pairs": algorithm.pipeline in _IN_PAIRS,
        "scattered": algorithm.pipeline in (Pipeline.HOST_SCATTER, Pipeline.HOST_SCATTER_AMX),
        "transformed": algorithm.pipeline is Pipeline.HOST_WINOGRAD,
        "shifted": algorithm.pipeline is Pipeline.HOST_SHIFT_AMX or (in_groups and signature.direction == "bwd_weight"),
        "in_groups": in_groups,
        "in_lines": algorithm.pipeline is Pipeline.HOST_LINES_AMX,
        "in_tiles": algorithm.pipeline in _IN_TILES,
        **{name: getattr(algorithm, name) for name in _NUMBERS},
    }
    types = {"dtype": signature.dtype_in, "otype": signature.dtype_out}
    return host_source(kernel, "host/launch.hpp", types, values)


def _narrow(pipeline: Pipeline) -> str:
    """The kernel of a pipeline for narrow groups, which those for pairs share; ``no`` of all others."""
    return pipeline.value.removeprefix("host_").removesuffix("_dot") if pipeline in NARROW else "no"
