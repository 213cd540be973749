"""The translation unit of a row: its traits as a C++ struct, for the header that implements it."""

from __future__ import annotations

from collections.abc import Iterable

from catalog.schema.kernel import Kernel


def row_source(kernel: Kernel, header: str, members: Iterable[str], exports: str) -> str:
    """The C++ source of ``kernel``; equal kernels have equal sources.

    Args:
        kernel: the row.
        header: what implements it, as it is included.
        members: the declarations in the struct ``Row``.
        exports: the source of the exported functions.
    """
    body = "\n".join(f"    {member}" for member in members)
    return f"""\
// {kernel.name}
#include "{header}"

namespace {{

struct Row {{
{body}
}};

}}  // namespace

{exports}"""
