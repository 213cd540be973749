"""The translation unit of an AMD row: its traits as a C++ struct, for an instance of CK's templates."""

from __future__ import annotations

from collections.abc import Iterator

from catalog.build.describe import c_string
from catalog.ops.ck_templates import CkTemplates
from catalog.ops.conv.kernels.ck.headers import HEADERS
from catalog.ops.conv.traits import TRAITS
from catalog.schema.kernel import Kernel


def emit(kernel: Kernel, revision: str) -> str:
    """The C++ source of ``kernel`` for CK's headers of ``revision``; equal kernels, equal sources.

    Raises:
        BuildError: the headers do not implement the kernel; the message names the trait.
    """
    body = "\n".join(f"    {member}" for member in _members(kernel, revision))
    return f"""\
// {kernel.name}
#include "hip/older_hip.hpp"
#include "ck/headers_{revision.replace("-", "_")}.hpp"
#include "ck/convolution.hpp"
#include "abi/export.hpp"

namespace {{

struct Row {{
{body}
}};

}}  // namespace

CATALOG_ENTRY_POINTS({c_string(kernel)}, catalog::ck::workspace_size(args, size),
                     (catalog::ck::launch<Row, catalog::ck::Family<Row>>(args, stream)))
"""


def _members(kernel: Kernel, revision: str) -> Iterator[str]:
    facts, row = HEADERS.facts(), kernel.to_row()
    facts.headers[revision].check(kernel, revision)
    pipeline, loop = facts.pipelines[row["pipeline"]]
    yield f"static constexpr auto direction = catalog::ck::Direction::{row['direction']};"
    for name, trait in {"In": "dtype_in", "Weight": "dtype_weight", "Out": "dtype_out", "Sum": "dtype_acc"}.items():
        yield f"using {name} = {facts.elements[row[trait]]};"
    for name, layout in zip(("In", "Weight", "Out"), facts.layouts[str(row["ndim"])], strict=True):
        yield f"using Layout{name} = ck_tile::tensor_layout::convolution::{layout};"
    special = facts.specializations[row["specialization"]]
    yield f"static constexpr auto specialization = ck_tile::ConvolutionSpecialization::{special};"
    for name, template in {"Pipeline": pipeline, "Loop": loop}.items():
        if template:
            yield "template <class Problem>"
            yield f"using {name} = ck_tile::{template}<Problem>;"
    yield f"static constexpr bool simple_loop = {str(not loop).lower()};"
    yield f"static constexpr auto scheduler = ck_tile::GemmPipelineScheduler::{row['scheduler'].capitalize()};"
    yield from (
        f"static constexpr bool {name} = {str(bool(row[name])).lower()};" for name in TRAITS if _is(name, "bool")
    )
    yield from (f"static constexpr int {name} = {row[name]};" for name in TRAITS if _is(name, "int"))


def _is(trait: str, kind: str) -> bool:
    return TRAITS[trait].kind == kind


TEMPLATES = CkTemplates(HEADERS, emit)
