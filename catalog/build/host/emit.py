"""The translation unit of a host row: its traits as a C++ struct, handed to the kernel header of its family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from catalog.build.describe import describe, uses
from catalog.errors import BuildError
from catalog.schema.fields import (
    TRAITS,
    Bias,
    Dtype,
    Family,
    KvLookupTable,
    KvMemoryLayout,
    Mask,
    Mode,
    Qscale,
    Rope,
    Signature,
)
from catalog.schema.kernel import Kernel

_FP32, _FP16, _BF16 = "float", "catalog::host::fp16", "catalog::host::bf16"
_FP8, _BF8 = "catalog::host::fp8", "catalog::host::bf8"

_DTYPES: Mapping[Dtype, tuple[str, str]] = MappingProxyType(
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
)
"""C++ types of the elements of Q, K and V, and of O."""

_HEADERS: Mapping[Family, str] = MappingProxyType(
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

PEAK_PROBE = '#include "host/peaks.hpp"\n'
"""The C++ source of the library that measures what the CPU reaches at best."""

_ENUMS = (Mode, Mask, Bias, Qscale, Rope, KvMemoryLayout, KvLookupTable)
"""Types of traits that the headers know by the same name."""

_UNKNOWN = frozenset({"mx"})
"""Values of those types that they do not know."""

_ALIASES = MappingProxyType({"no": "none", "mask": "generic"})

_EXTENTS = tuple(name for name in TRAITS if name.startswith(("tile_", "warp_")) and TRAITS[name].kind == "int")
_PADS = ("pad_s", "pad_sk", "pad_d", "pad_dv")


def _member(kernel: Kernel, name: str, value: object) -> str:
    """One trait of the signature as a member of the C++ struct.

    Raises:
        BuildError: the headers know no such value.
    """
    if isinstance(value, bool):
        return f"static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"static constexpr int {name} = {value};"
    if isinstance(value, _ENUMS) and value.value not in _UNKNOWN:
        cpp = f"catalog::host::{type(value).__name__}"
        return f"static constexpr auto {name} = {cpp}::{_ALIASES.get(value.value, value.value)};"
    if value == TRAITS[name].default:
        return ""
    raise BuildError(f"kernel {kernel.name}: the host has no kernels for {name} = {value}")


def _members(kernel: Kernel) -> list[str]:
    signature = kernel.signature
    if signature.dtype not in _DTYPES:
        raise BuildError(f"kernel {kernel.name}: the host has no kernels for dtype = {signature.dtype}")
    of_input, of_output = _DTYPES[signature.dtype]
    row = kernel.to_row()
    members = [f"using dtype = {of_input};", f"using otype = {of_output};"]
    members += [
        _member(kernel, name, getattr(signature, name))
        for name in Signature.model_fields
        if name not in ("family", "dtype")
    ]
    members += [f"static constexpr int {name} = {row[name]};" for name in _EXTENTS if row[name]]
    members += [f"static constexpr bool {name} = {str(bool(row[name])).lower()};" for name in _PADS]
    return [member for member in members if member]


def emit(kernel: Kernel) -> str:
    """The C++ source of a host kernel; equal kernels have equal sources.

    Raises:
        BuildError: the kernel headers implement no such kernel; the message names the trait.
    """
    header = _HEADERS[kernel.family]
    members = "\n".join(f"    {member}" for member in _members(kernel))
    # JSON of JSON: ASCII, with quotes and backslashes escaped as C++ escapes them.
    description = json.dumps(describe(kernel))
    return f"""\
// {kernel.name}
#include "host/{header}.hpp"

namespace {{

struct Row {{
{members}
}};

}}  // namespace

CATALOG_EXPORT(catalog::host::launch_{header}<Row>, {description}, {uses(kernel)})
"""
