"""The translation unit of a host row, for a header of its operation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from catalog.build.describe import c_string
from catalog.build.row_source import row_source
from catalog.schema.kernel import Kernel

TYPES: Mapping[str, str] = MappingProxyType(
    {
        "fp32": "float",
        "fp16": "catalog::host::fp16",
        "bf16": "catalog::host::bf16",
        "fp8": "catalog::host::fp8",
        "bf8": "catalog::host::bf8",
        "int8": "std::int8_t",
        "int32": "std::int32_t",
    }
)
"""The C++ type of each element type."""


def host_source(
    kernel: Kernel,
    header: str,
    types: Mapping[str, str],
    values: Mapping[str, bool | int | str],
    workspace: str = "catalog::no_workspace(args, size)",
) -> str:
    """The C++ source of a host kernel; equal kernels have equal sources.

    Args:
        kernel: the row.
        header: defines ``launch<Row>``.
        types: element types by the name of the alias in ``Row``.
        values: constants in ``Row``; a text is a C++ expression.
        workspace: the expression for ``catalog_workspace_size``.
    """
    members = [f"using {name} = {TYPES[of]};" for name, of in types.items()]
    for name, value in values.items():
        kind = "auto" if isinstance(value, str) else type(value).__name__
        members.append(f"static constexpr {kind} {name} = {value if kind != 'bool' else str(value).lower()};")
    exports = f"""\
CATALOG_ENTRY_POINTS({c_string(kernel)}, {workspace},
                     catalog::host::launch<Row>(args))
"""
    return row_source(kernel, header, members, exports)
