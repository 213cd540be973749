"""The translation unit of a host row: its traits as a C++ struct, handed to the kernel header of its family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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

HOST = Dialect(
    title="the host",
    folder="host",
    dtypes=tuple(ELEMENTS),
    elements=MappingProxyType(
        {
            "float32": "float",
            "float16": "catalog::host::fp16",
            "bfloat16": "catalog::host::bf16",
            "float8_e4m3fn": "catalog::host::fp8",
            "float8_e5m2": "catalog::host::bf8",
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
