"""The translation unit of an NVIDIA row: its traits as a C++ struct, for the header of its family and pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from catalog.errors import BuildError
from catalog.ops.attention.fields import ELEMENTS
from catalog.ops.attention.kernels.dialect import Dialect
from catalog.ops.attention.traits import (
    TRAITS,
    Bias,
    Family,
    KvLookupTable,
    KvMemoryLayout,
    Mask,
    Mode,
    Pipeline,
    Qscale,
    Rope,
)
from catalog.schema.kernel import Kernel

_CUDA = Dialect(
    title="NVIDIA",
    folder="cuda",
    dtypes=tuple(ELEMENTS),
    elements=MappingProxyType(
        {
            "float16": "catalog::cuda::fp16",
            "bfloat16": "catalog::cuda::bf16",
            "float32": "float",
            "float8_e4m3fn": "catalog::cuda::fp8",
            "float8_e5m2": "catalog::cuda::bf8",
        }
    ),
    enums=(Mode, Mask, Bias, Qscale, Rope, KvMemoryLayout, KvLookupTable),
    unknown=frozenset({Qscale.MX.value}),
    numbers=tuple(
        name
        for name in TRAITS
        if name.startswith(("tile_", "wave_", "warp_", "block_per_cu", "num_stages")) and TRAITS[name].kind == "int"
    ),
    sized=frozenset(
        {
            "backward/fmha_bwd_dq_dk_dv_mma",
            "backward/fmha_bwd_dq_dk_dv_wgmma",
            "latent/fmha_fwd_splitkv_latent_whole",
            "mma/fmha_fwd_splitkv_stream",
            "mma/fmha_fwd_splitkv_whole",
        }
    ),
    footer="CATALOG_EXPORT_BLOCK(catalog::cuda::block_of<Row>)\n",
)

_HEADERS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        (Family.FWD, Pipeline.SM90_WGMMA): "forward/fmha_fwd_wgmma",
        (Family.FWD, Pipeline.SM90_LATENT): "latent/fmha_fwd_latent",
        (Family.FWD, Pipeline.SM90_MMA): "mma/fmha_fwd_mma",
        (Family.FWD_PAGEDKV, Pipeline.SM90_WGMMA): "forward/fmha_fwd_wgmma",
        (Family.FWD_PAGEDKV, Pipeline.SM90_MMA): "mma/fmha_fwd_mma",
        (Family.FWD_PAGEDKV, Pipeline.SM90_LATENT): "latent/fmha_fwd_latent",
        (Family.BATCH_PREFILL, Pipeline.SM90_WGMMA): "forward/fmha_fwd_wgmma",
        (Family.BATCH_PREFILL, Pipeline.SM90_MMA): "mma/fmha_fwd_mma",
        (Family.BATCH_PREFILL, Pipeline.SM90_LATENT): "latent/fmha_fwd_latent",
        (Family.FWD_SPLITKV, Pipeline.SM90_MMA): "mma/fmha_fwd_splitkv_mma",
        (Family.FWD_SPLITKV, Pipeline.SM90_LATENT): "latent/fmha_fwd_splitkv_latent",
        (Family.FWD_SPLITKV, Pipeline.SM90_LATENT_WHOLE): "latent/fmha_fwd_splitkv_latent_whole",
        (Family.FWD_SPLITKV, Pipeline.SM90_STREAM): "mma/fmha_fwd_splitkv_stream",
        (Family.FWD_SPLITKV, Pipeline.SM90_WHOLE): "mma/fmha_fwd_splitkv_whole",
        (Family.FWD_SPLITKV_COMBINE, Pipeline.UNUSED): "mma/fmha_fwd_splitkv_combine",
        (Family.FWD_APPENDKV, Pipeline.NO): "append/fmha_fwd_appendkv",
        (Family.BWD_DOT_DO_O, Pipeline.NO): "backward/fmha_bwd_dot_do_o",
        (Family.BWD_DQ_DK_DV, Pipeline.SM90_MMA): "backward/fmha_bwd_dq_dk_dv_mma",
        (Family.BWD_DQ_DK_DV, Pipeline.SM90_WGMMA): "backward/fmha_bwd_dq_dk_dv_wgmma",
        (Family.BWD_CONVERT_DQ, Pipeline.NO): "backward/fmha_bwd_convert_dq",
    }
)
"""Kernel headers: each defines launch_<its name>."""


def emit(kernel: Kernel) -> str:
    """The CUDA C++ source of an NVIDIA kernel; equal kernels have equal sources.

    Raises:
        BuildError: the kernel headers implement no such kernel; the message names the trait.
    """
    header = _HEADERS.get((kernel.family, kernel.algorithm.pipeline))
    if header is None:
        raise BuildError(
            f"kernel {kernel.name}: NVIDIA has no kernels of family {kernel.family} with pipeline = "
            f"{kernel.algorithm.pipeline}"
        )
    return _CUDA.source(kernel, header)
