"""The translation unit of an NVIDIA row: its traits as a C++ struct, passed to the header of its pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from catalog.build.describe import c_string
from catalog.errors import BuildError
from catalog.schema.kernel import Kernel

_TYPES: Mapping[str, str] = MappingProxyType({"fp16": "catalog::cuda::fp16", "bf16": "catalog::cuda::bf16"})

_NUMBERS = ("tile_m", "tile_n", "wave_m")


def emit(kernel: Kernel) -> str:
    """The CUDA C++ source of an NVIDIA kernel; equal kernels have equal sources.

    Raises:
        BuildError: the kernel headers do not implement the element type.
    """
    signature, algorithm = kernel.signature, kernel.algorithm
    if signature.dtype not in _TYPES:
        raise BuildError(f"kernel {kernel.name}: NVIDIA has no convolution kernels for dtype = {signature.dtype}")
    members = [
        f"using dtype = {_TYPES[signature.dtype]};",
        f"static constexpr auto direction = catalog::conv::Direction::{signature.direction};",
        f"static constexpr int ndim = {signature.ndim};",
        *(f"static constexpr int {name} = {getattr(algorithm, name)};" for name in _NUMBERS),
    ]
    body = "\n".join(f"    {member}" for member in members)
    return f"""\
// {kernel.name}
#include "cuda/conv_launch.hpp"

namespace {{

struct Row {{
{body}
}};

}}  // namespace

CATALOG_ENTRY_POINTS({c_string(kernel)}, catalog::no_workspace(args, size),
                     catalog::cuda::launch_conv_wgmma<Row>(args, static_cast<cudaStream_t>(stream)))
CATALOG_EXPORT_BLOCK(catalog::cuda::block_of<Row>)
"""
