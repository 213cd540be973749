"""The translation unit of an NVIDIA row: its traits as a C++ struct, passed to the header of its pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from catalog.build.describe import c_string
from catalog.build.row_source import row_source
from catalog.errors import BuildError
from catalog.ops.conv.traits import Pipeline
from catalog.schema.kernel import Kernel

_TYPES: Mapping[str, str] = MappingProxyType({"fp16": "catalog::cuda::fp16", "bf16": "catalog::cuda::bf16"})

_TILE = ("tile_m", "tile_n", "wave_m", "wave_n")

_HEADERS: Mapping[Pipeline, str] = MappingProxyType(
    {Pipeline.SM90_WGMMA: "conv", Pipeline.SM90_HALO: "halo", Pipeline.SM90_NARROW: "narrow"}
)
"""What the header of a pipeline's launch begins with."""


def emit(kernel: Kernel) -> str:
    """The CUDA C++ source of an NVIDIA kernel; equal kernels have equal sources.

    Raises:
        BuildError: the kernel headers do not implement the element type.
    """
    signature, algorithm = kernel.signature, kernel.algorithm
    if signature.dtype not in _TYPES:
        raise BuildError(f"kernel {kernel.name}: NVIDIA has no convolution kernels for dtype = {signature.dtype}")
    narrow = algorithm.pipeline is Pipeline.SM90_NARROW
    tile = () if narrow else (*_TILE, "num_wave_groups") if algorithm.pipeline is Pipeline.SM90_HALO else _TILE
    numbers = {name: getattr(algorithm, name) for name in tile} | ({} if narrow else {"ndim": signature.ndim})
    members = [
        f"using dtype = {_TYPES[signature.dtype]};",
        f"static constexpr auto direction = catalog::conv::Direction::{signature.direction};",
        *(f"static constexpr int {name} = {number};" for name, number in numbers.items()),
    ]
    launch = f"launch_{algorithm.pipeline.removeprefix('sm90_')}"
    exports = f"""\
CATALOG_ENTRY_POINTS({c_string(kernel)}, catalog::no_workspace(args, size),
                     catalog::cuda::{launch}<Row>(args, static_cast<cudaStream_t>(stream)))
CATALOG_EXPORT_BLOCK(catalog::cuda::block_of<Row>)
"""
    return row_source(kernel, f"cuda/{_HEADERS[algorithm.pipeline]}_launch.hpp", members, exports)
