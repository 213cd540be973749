"""The translation unit of an NVIDIA row: its traits as a C++ struct, passed to the header of all rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from catalog.build.describe import c_string
from catalog.build.row_source import row_source
from catalog.errors import BuildError
from catalog.ops.gemm.stage_layout import along_k
from catalog.ops.gemm.traits import OF_GROUPS, Elementwise, scales_of
from catalog.schema.kernel import Kernel

_OPERANDS = frozenset({"fp16", "bf16", "fp8", "bf8", "int8"})
_RESULTS: Mapping[str, str] = MappingProxyType(
    {
        "fp32": "float",
        "fp16": "catalog::cuda::fp16",
        "bf16": "catalog::cuda::bf16",
        "int32": "std::int32_t",
    }
)

_NUMBERS = ("tile_m", "tile_n", "tile_k", "wave_m", "wave_n", "warp_tile_m", "warp_tile_n", "num_stages", "cluster_m")


def emit(kernel: Kernel) -> str:
    """The CUDA C++ source of an NVIDIA kernel; equal kernels have equal sources.

    Raises:
        BuildError: the kernel headers do not implement the element type.
    """
    signature, algorithm = kernel.signature, kernel.algorithm
    if signature.dtype not in _OPERANDS:
        raise BuildError(f"kernel {kernel.name}: NVIDIA has no GEMM kernels for dtype = {signature.dtype}")
    of_a, of_b = signature.layout[:2]
    grouped = signature.family in OF_GROUPS.values()
    a_along, b_along = along_k(signature.layout, grouped=grouped)
    truths = {
        "a_along": a_along,
        "b_along": b_along,
        "given_a_along": of_a == "r",
        "given_b_along": of_b == "c",
        "multiplies": signature.elementwise is Elementwise.MULTI_D_MULTIPLY,
        "grouped": grouped,
        "along_depth": False,
    }
    members = [f"using dtype = catalog::cuda::{signature.dtype};", f"using out = {_RESULTS[signature.dtype_c]};"]
    members += [f"static constexpr bool {name} = {str(value).lower()};" for name, value in truths.items()]
    members += [f"static constexpr auto scales = catalog::cuda::Scales::{scales_of(signature.family)};"]
    members += [f"static constexpr int num_d = {signature.num_d};"]
    members += [f"static constexpr int {name} = {getattr(algorithm, name)};" for name in _NUMBERS]
    exports = f"""\
CATALOG_ENTRY_POINTS({c_string(kernel)}, catalog::cuda::gemm_workspace<Row>(args, size),
                     catalog::cuda::launch_gemm_wgmma<Row>(args, static_cast<cudaStream_t>(stream)))
CATALOG_EXPORT_BLOCK(catalog::cuda::block_of<Row>)
"""
    return row_source(kernel, "cuda/gemm_wgmma.hpp", members, exports)
