"""The translation unit of a host row: its traits as a C++ struct, passed to the header of all rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from catalog.build.describe import c_string
from catalog.ops.gemm.traits import Elementwise, Family, Pipeline
from catalog.schema.kernel import Kernel

_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "fp32": "float",
        "fp16": "catalog::host::fp16",
        "bf16": "catalog::host::bf16",
        "fp8": "catalog::host::fp8",
        "bf8": "catalog::host::bf8",
        "int8": "std::int8_t",
        "int32": "std::int32_t",
    }
)

_NUMBERS = ("tile_m", "tile_n", "tile_k", "warp_tile_m", "warp_tile_n")


def emit(kernel: Kernel) -> str:
    """The C++ source of a host kernel; equal kernels have equal sources."""
    signature, algorithm = kernel.signature, kernel.algorithm
    of_a, of_b = signature.layout[:2]
    truths = {
        "a_along": of_a == "r",
        "b_along": of_b == "c",
        "streams": algorithm.pipeline is Pipeline.HOST_STREAM,
        "in_tiles": algorithm.pipeline is Pipeline.HOST_AMX,
        "grouped": signature.family is Family.GROUPED,
        "multiplies": signature.elementwise is Elementwise.MULTI_D_MULTIPLY,
    }
    members = [f"using dtype = {_TYPES[signature.dtype_a]};", f"using otype = {_TYPES[signature.dtype_c]};"]
    members += [f"static constexpr bool {name} = {str(value).lower()};" for name, value in truths.items()]
    members += [f"static constexpr int num_d = {signature.num_d};"]
    members += [f"static constexpr int {name} = {getattr(algorithm, name)};" for name in _NUMBERS]
    body = "\n".join(f"    {member}" for member in members)
    return f"""\
// {kernel.name}
#include "host/product.hpp"

namespace {{

struct Row {{
{body}
}};

}}  // namespace

CATALOG_ENTRY_POINTS({c_string(kernel)}, catalog::host::workspace_size<Row>(args, size),
                     catalog::host::launch<Row>(args))
"""
