"""The translation unit of a host row: its traits as a C++ struct, handed to the kernel headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from catalog.errors import BuildError
from catalog.schema.fields import TRAITS, Dtype, Family, Mask, Mode
from catalog.schema.kernel import Kernel

_DTYPES = MappingProxyType({Dtype.FP32: "float", Dtype.FP16: "catalog::host::fp16", Dtype.BF16: "catalog::host::bf16"})
_MASKS = MappingProxyType({Mask.NO: "none", Mask.CAUSAL: "causal", Mask.GENERIC: "generic", Mask.MASK: "generic"})

# What the headers implement. Of every other trait of the signature they know the default only.
_IMPLEMENTED: Mapping[str, frozenset[object]] = MappingProxyType(
    {
        "family": frozenset({Family.FWD}),
        "dtype": frozenset(_DTYPES),
        "mode": frozenset(Mode),
        "mask": frozenset(_MASKS),
        "lse": frozenset({False, True}),
    }
)
_FREE = frozenset({"hdim_q", "hdim_v"})

_EXTENTS = ("hdim_q", "hdim_v", "tile_m0", "tile_n0", "warp_m0", "warp_n0", "warp_m1", "warp_n1")


def _refuse_unimplemented(kernel: Kernel) -> None:
    for name, value in kernel.signature:
        if name in _FREE:
            continue
        if value not in _IMPLEMENTED.get(name, {TRAITS[name].default}):
            raise BuildError(f"kernel {kernel.name}: the host has no kernels for {name} = {value}")


def _describe(kernel: Kernel) -> str:
    described = json.loads(kernel.canonical_json) | {"id": kernel.id, "name": kernel.name}
    return json.dumps(described, sort_keys=True, separators=(",", ":"))


def _bool(value: object) -> str:
    return "true" if value else "false"


def emit(kernel: Kernel) -> str:
    """The C++ source of a host kernel; equal kernels have equal sources.

    Raises:
        BuildError: the kernel headers implement no such kernel; the message names the trait.
    """
    _refuse_unimplemented(kernel)
    signature, algorithm = kernel.signature, kernel.algorithm
    row = kernel.to_row()
    extents = "\n".join(f"    static constexpr int {name} = {row[name]};" for name in _EXTENTS)
    # JSON of JSON: ASCII, with quotes and backslashes escaped as C++ escapes them.
    description = json.dumps(_describe(kernel))
    return f"""\
// {kernel.name}
#include "host/fmha_fwd.hpp"

namespace {{

struct Row {{
    using dtype = {_DTYPES[signature.dtype]};
{extents}
    static constexpr auto mask = catalog::host::Mask::{_MASKS[signature.mask]};
    static constexpr bool group = {_bool(signature.mode is Mode.GROUP)};
    static constexpr bool lse = {_bool(signature.lse)};
    static constexpr bool pad_d = {_bool(algorithm.pad_d)};
    static constexpr bool pad_dv = {_bool(algorithm.pad_dv)};
}};

}}  // namespace

CATALOG_EXPORT_FWD(Row, {description})
"""
