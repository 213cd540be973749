"""Sources of rows that no generator lists: a row's traits as a C++ struct, for the headers in ``rows/``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType

from catalog.errors import BuildError
from catalog.ops.attention.kernels.ck.headers import all_headers
from catalog.ops.attention.traits import TRAITS, Bias, DropoutVariant, Mode, Qscale, Rope, VLayout
from catalog.schema.kernel import Kernel

_BIAS = MappingProxyType({Bias.NO: "NO_BIAS", Bias.BIAS: "ELEMENTWISE_BIAS", Bias.ALIBI: "ALIBI"})
_ROPE = MappingProxyType({Rope.NO: "NONE", Rope.INTER: "INTERLEAVED", Rope.HALF: "HALF_ROTATED"})


def source_of_row(kernel: Kernel, revision: str) -> str:
    """The C++ source that instantiates ``kernel`` with CK's headers of ``revision``; equal kernels, equal sources.

    It defines ``Instance``, with the type ``Args`` of CK's argument struct and a function ``run`` that launches.

    Raises:
        BuildError: the headers do not implement the kernel; the message names the trait.
    """
    members = "\n".join(f"    {member}" for member in _members(kernel, revision))
    return f"""\
// {kernel.name}
#include "ck/rows/headers_{revision.replace("-", "_")}.hpp"
#include "ck/rows/{kernel.family}.hpp"

namespace {{

struct Row {{
{members}
}};

using Instance = catalog::ck::Family<Row>;

}}  // namespace
"""


def _members(kernel: Kernel, revision: str) -> Iterator[str]:
    headers, signature, row = all_headers()[revision], kernel.signature, kernel.to_row()

    def check(trait: str, values: Iterable[object]) -> None:
        if row[trait] not in values:
            raise BuildError(
                f"kernel {kernel.name}: CK's headers of {revision} have no {trait} = {row[trait]}",
                hint="`catalog rules --kind headers` lists what the headers demand.",
            )

    for trait, values in headers.only.items():
        check(trait, values)
    elements = headers.elements["bwd" if kernel.family.startswith("bwd") else "fwd"]
    masks = headers.masks_of.get(kernel.family, headers.masks[kernel.variant])
    check("dtype", elements)
    check("mask", masks)
    yield f"using Element = {elements[row['dtype']]};"
    yield f"using Mask = {masks[row['mask']]};"
    if kernel.family in headers.pipelines:
        pipelines = headers.pipelines[kernel.family]
        check("pipeline", pipelines)
        yield "template <class Problem>"
        yield f"using Pipeline = ck_tile::{pipelines[row['pipeline']]}<Problem>;"
    wide = signature.dropout_variant is not DropoutVariant.WG16
    yield f"using Dropout = ck_tile::BlockDropoutBwd<{_flags(signature.dropout, wide, signature.store_randval)}>;"
    yield f"static constexpr auto bias = ck_tile::BlockAttentionBiasEnum::{_BIAS[signature.bias]};"
    yield f"static constexpr auto rope = ck_tile::RotaryEmbeddingEnum::{_ROPE[signature.rope]};"
    flags = {
        "group": signature.mode is Mode.GROUP,
        "v_in_rows": signature.vlayout is VLayout.ROW,
        "descaled": signature.qscale is not Qscale.NO,
    } | {name: row[name] for name in TRAITS if TRAITS[name].kind == "bool"}
    yield from (f"static constexpr bool {name} = {_flags(flag)};" for name, flag in flags.items())
    yield from (f"static constexpr int {name} = {row[name]};" for name in TRAITS if TRAITS[name].kind == "int")


def _flags(*flags: bool) -> str:
    return ", ".join(str(flag).lower() for flag in flags)
