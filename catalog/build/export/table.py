"""The registration table of an export: a C header, and the C++ file that lists the kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from catalog.errors import UsageError

_PREFIX = re.compile(r"[A-Za-z_]\w*", re.ASCII)

_HEADER = """\
/* The kernels of this folder, {title}. Every file of kernels/ and {prefix}_register.cpp make one library. */
#ifndef {guard}_REGISTER_H
#define {guard}_REGISTER_H

#include <stddef.h>
#include <stdint.h>
{includes}
#define {guard}_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {{
#endif

typedef struct {prefix}_kernel {{
{fields}
}} {prefix}_kernel;

/* All kernels, ordered by name; *count is how many, unless count is NULL. They live as long as the program. */
{guard}_API const {prefix}_kernel* {prefix}_kernels(size_t* count);

/* Calls add(kernel, context) for every kernel, ordered by name, until one does not return 0; returns what the last call
 * did. */
{guard}_API int32_t {prefix}_register_kernels(int32_t (*add)(const {prefix}_kernel* kernel, void* context),
                                              void* context);

#ifdef __cplusplus
}}
#endif

#endif
"""

_SOURCE = """\
#include "{prefix}_register.h"

extern "C" {{
{declarations}
}}

extern "C" const {prefix}_kernel* {prefix}_kernels(size_t* count) {{
    static const {prefix}_kernel kernels[] = {{
{entries}
    }};
    if (count) *count = sizeof(kernels) / sizeof(*kernels);
    return kernels;
}}

extern "C" int32_t {prefix}_register_kernels(int32_t (*add)(const {prefix}_kernel*, void*), void* context) {{
    size_t count = 0;
    const {prefix}_kernel* kernels = {prefix}_kernels(&count);
    for (size_t index = 0; index < count; ++index)
        if (const int32_t status = add(&kernels[index], context)) return status;
    return 0;
}}
"""


@dataclass(frozen=True)
class Entry:
    """A kernel in the table: what its translation unit defines, and the values of the struct's fields in C++."""

    declarations: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A kind of table: its description in the header, its includes, and the fields of the struct in C."""

    title: str
    includes: tuple[str, ...]
    fields: str

    def files(self, prefix: str, entries: Sequence[Entry]) -> dict[str, str]:
        """The header and the source file of the table, by name."""
        includes = "".join(f'#include "{header}"\n' for header in self.includes)
        names = {"prefix": prefix, "guard": prefix.upper()}
        header = _HEADER.format(**names, title=self.title, includes=includes and f"\n{includes}", fields=self.fields)
        declarations = "\n".join(line for entry in entries for line in entry.declarations)
        values = "\n".join(f"        {{{', '.join(entry.values)}}}," for entry in entries)
        source = _SOURCE.format(**names, declarations=declarations, entries=values)
        return {f"{prefix}_register.h": header, f"{prefix}_register.cpp": source}


def check_prefix(prefix: str) -> None:
    """Raise UsageError unless ``prefix`` may begin a C name."""
    if not _PREFIX.fullmatch(prefix):
        raise UsageError(f"--prefix {prefix!r} is not a C identifier")


def c_string(text: str) -> str:
    """``text``, without line breaks, as a string literal of C and C++."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
