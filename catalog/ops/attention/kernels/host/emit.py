"""The translation unit of a host row: its traits as a C++ struct, handed to the kernel header of its family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from catalog.ops.attention.kernels.dialect import Dialect
from catalog.ops.attention.traits import (
    TRAITS,
    Bias,
    Dtype,
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

_FP32, _FP16, _BF16 = "float", "catalog::host::fp16", "catalog::host::bf16"
_FP8, _BF8 = "catalog::host::fp8", "catalog::host::bf8"

HOST = Dialect(
    title="the host",
    folder="host",
    dtypes=MappingProxyType(
        {
            Dtype.FP32: (_FP32, _FP32),
            Dtype.FP16: (_FP16, _FP16),
            Dtype.BF16: (_BF16, _BF16),
            Dtype.FP8: (_FP8, _FP8),
            Dtype.BF8: (_BF8, _BF8),
            Dtype.FP8FP16: (_FP8, _FP16),
            Dtype.FP8BF16: (_FP8, _BF16),
            Dtype.FP8FP32: (_FP8, _FP32),
        }
    ),
    enums=(Mode, Mask, Bias, Qscale, Rope, KvMemoryLayout, KvLookupTable),
    unknown=frozenset({"mx"}),
    pipelines=frozenset({Pipeline.NO, Pipeline.HOST_PANEL, Pipeline.HOST_BF16, Pipeline.HOST_AMX}),
    numbers=tuple(name for name in TRAITS if name.startswith(("tile_", "warp_")) and TRAITS[name].kind == "int"),
)

_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        Family.FWD: "fmha_fwd",
        Family.FWD_PAGEDKV: "fmha_fwd",
        Family.BATCH_PREFILL: "fmha_fwd",
        Family.FWD_SPLITKV: "fmha_fwd_splitkv",
        Family.FWD_SPLITKV_COMBINE: "fmha_fwd_splitkv_combine",
        Family.FWD_APPENDKV: "fmha_fwd_appendkv",
        Family.BWD_DOT_DO_O: "fmha_bwd_dot_do_o",
        Family.BWD_DQ_DK_DV: "fmha_bwd_dq_dk_dv",
        Family.BWD_CONVERT_DQ: "fmha_bwd_convert_dq",
    }
)
"""Kernel headers: each defines launch_<header>."""


def emit(kernel: Kernel) -> str:
    """The C++ source of a host kernel; equal kernels have equal sources.

    Raises:
        BuildError: the kernel headers implement no such kernel; the message names the trait.
    """
    return HOST.source(kernel, _HEADERS[kernel.family])
