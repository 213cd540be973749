"""The translation unit of an AMD row: its traits as a C++ struct, for an instance of CK's templates."""

from __future__ import annotations

from collections.abc import Iterator

from catalog.build.describe import c_string
from catalog.errors import BuildError
from catalog.ops.ck_templates import CkTemplates
from catalog.ops.gemm.kernels.ck.headers import HEADERS
from catalog.ops.gemm.traits import TRAITS, Family, Reduction
from catalog.ops.product_words import Epilogue
from catalog.schema.kernel import Kernel

_LAYOUTS = {"r": "RowMajor", "c": "ColumnMajor"}


def emit(kernel: Kernel, revision: str) -> str:
    """The C++ source of ``kernel`` for CK's headers of ``revision``; equal kernels, equal sources.

    Raises:
        BuildError: the headers do not implement the kernel; the message names the trait.
    """
    header = HEADERS.facts().families.get(kernel.family)
    if header is None:
        raise BuildError(
            f"kernel {kernel.name}: a launch passes one A and one B, and the family {kernel.family} has several",
            hint="`catalog query --operation gemm` lists other families.",
        )
    body = "\n".join(f"    {member}" for member in _members(kernel, revision))
    return f"""\
// {kernel.name}
#include "hip/older_hip.hpp"
#include "ck/headers_{revision.replace("-", "_")}.hpp"
#include "ck/{header}.hpp"
#include "abi/export.hpp"

namespace {{

struct Row {{
{body}
}};

using Family = catalog::ck::Family<Row>;

}}  // namespace

CATALOG_ENTRY_POINTS({c_string(kernel)}, catalog::ck::workspace_size<Family>(args, size),
                     (catalog::ck::launch<Row, Family>(args, stream)))
"""


def _members(kernel: Kernel, revision: str) -> Iterator[str]:
    facts, row = HEADERS.facts(), kernel.to_row()
    facts.headers[revision].check(kernel, revision)
    signature, algorithm = kernel.signature, kernel.algorithm
    loop, pipeline = facts.pipelines[row["pipeline"]]
    for name, trait in {"A": "dtype_a", "B": "dtype_b", "C": "dtype_c", "Sum": "dtype_acc"}.items():
        yield f"using {name} = {facts.elements[row[trait]]};"
    for name, letter in zip("ABC", signature.layout, strict=False):
        yield f"using Layout{name} = ck_tile::tensor_layout::gemm::{_LAYOUTS[letter]};"
    yield f"using Combine = catalog::ck::{row['elementwise']};"
    for name, template in {"Loop": loop, "Pipeline": pipeline}.items():
        yield "template <class Problem>"
        yield f"using {name} = ck_tile::{template}<Problem>;"
    yield f"static constexpr auto scheduler = ck_tile::GemmPipelineScheduler::{row['scheduler'].capitalize()};"
    flags = {
        "rows_a": signature.layout[0] == "r",
        "rows_b": signature.layout[1] == "r",
        "shuffles": algorithm.epilogue is Epilogue.CSHUFFLE,
        "preshuffled": signature.family is Family.PRESHUFFLE,
        "grouped": signature.family is Family.GROUPED,
        "atomic": algorithm.reduction is Reduction.ATOMIC,
    } | {name: row[name] for name in TRAITS if TRAITS[name].kind == "bool"}
    yield from (f"static constexpr bool {name} = {str(bool(flag)).lower()};" for name, flag in flags.items())
    yield from (f"static constexpr int {name} = {row[name]};" for name in TRAITS if TRAITS[name].kind == "int")


TEMPLATES = CkTemplates(HEADERS, emit)
