"""The translation unit of a host row."""

from __future__ import annotations

from catalog.build.host.source import host_source
from catalog.ops.gemm.traits import OF_GROUPS, Elementwise, Pipeline, scales_of
from catalog.schema.kernel import Kernel

_NUMBERS = ("tile_m", "tile_n", "tile_k", "warp_tile_m", "warp_tile_n")


def emit(kernel: Kernel) -> str:
    """The C++ source of a host kernel; equal kernels have equal sources."""
    signature, algorithm = kernel.signature, kernel.algorithm
    of_a, of_b = signature.layout[:2]
    values = {
        "a_along": of_a == "r",
        "b_along": of_b == "c",
        "streams": algorithm.pipeline is Pipeline.HOST_STREAM,
        "transposes": algorithm.pipeline is Pipeline.HOST_FEW_COLUMNS,
        "in_tiles": algorithm.pipeline is Pipeline.HOST_AMX,
        "grouped": signature.family in OF_GROUPS.values(),
        "scales": f"catalog::host::Scales::{scales_of(signature.family)}",
        "multiplies": signature.elementwise is Elementwise.MULTI_D_MULTIPLY,
        "num_d": signature.num_d,
        **{name: getattr(algorithm, name) for name in _NUMBERS},
    }
    return host_source(
        kernel,
        "host/product.hpp",
        {"dtype": signature.dtype_a, "otype": signature.dtype_c},
        values,
        "catalog::host::workspace_size<Row>(args, size)",
    )
