"""Rows as sources for somebody else's build: a translation unit each, and a function that registers them all."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from catalog.build.builder import BUILD_DIR, Target, target_of
from catalog.errors import BuildError, UsageError
from catalog.schema.kernel import Kernel

_PREFIX = re.compile(r"[A-Za-z_]\w*")
_SYMBOL_DIGITS = 16
"""Digits of a row's id in its symbols: 64 bits."""

_HEADER = """\
/* {count} kernels, registered by one call. Compile every file of kernels/ and {prefix}_register.cpp with -Iinclude. */
#ifndef {guard}_REGISTER_H
#define {guard}_REGISTER_H

#include "abi/catalog_abi.h"

#ifdef __cplusplus
extern "C" {{
#endif

typedef struct {prefix}_kernel {{
    const char* id;                         /* of the catalog's row, 64 hex digits */
    const char* name;                       /* upstream's canonical name */
    const char* arch;
    const char* (*describe)(void);          /* JSON of the row */
    int32_t (*workspace_size)(const catalog_args* args, catalog_workspace* size);
    int32_t (*launch)(const catalog_args* args, void* stream);
}} {prefix}_kernel;

/* Calls add(kernel, context) for every kernel, ordered by name, until one does not return 0; returns what the last call
 * did. The kernels live as long as the program. */
int32_t {prefix}_register_kernels(int32_t (*add)(const {prefix}_kernel* kernel, void* context), void* context);

#ifdef __cplusplus
}}
#endif

#endif
"""

_REGISTRATION = """\
#include "{prefix}_register.h"

extern "C" {{
{declarations}
}}

namespace {{
const {prefix}_kernel kernels[] = {{
{entries}
}};
}}  // namespace

extern "C" int32_t {prefix}_register_kernels(int32_t (*add)(const {prefix}_kernel*, void*), void* context) {{
    for (const {prefix}_kernel& kernel : kernels)
        if (const int32_t status = add(&kernel, context)) return status;
    return 0;
}}
"""


def export_register(
    kernels: Iterable[Kernel], folder: Path, prefix: str, on_done: Callable[[Kernel], None] | None = None
) -> list[Path]:
    """Write what registers ``kernels`` into ``folder``; the files that were written or changed.

    ``kernels/NAME.cpp`` has a kernel each, ``PREFIX_register.h`` and ``.cpp`` the C entry, ``include/`` our headers,
    and ``inventory.json`` says which file is which row, and which flags an arch is compiled with. Files that are
    already what they should be are not touched.

    Args:
        kernels: rows of one or several arches.
        folder: where to; made when it is not there.
        prefix: of the C names, ``PREFIX_register_kernels``.
        on_done: hears of each kernel.

    Raises:
        UsageError: there are no kernels, two have one name, or the prefix is no C identifier.
        BuildError: a kernel has no source, or the folder cannot be written; then nothing was.
    """
    if not _PREFIX.fullmatch(prefix):
        raise UsageError(f"--prefix {prefix!r} is no C identifier")
    chosen = sorted(kernels, key=lambda kernel: kernel.name)
    if not chosen:
        raise UsageError("no kernels: nothing to export")
    for one, other in itertools.pairwise(chosen):
        if one.name == other.name:
            raise UsageError(
                f"two rows are called {one.name}", hint="narrow the expression: arch, revision, space or mask_impl"
            )
    files = dict(_files(chosen, prefix, on_done))
    try:
        return [path for name, text in files.items() if _write(path := folder / name, text)]
    except OSError as error:
        raise BuildError(f"{error.filename or folder}: {error.strerror}", hint="choose another --out") from None


def _files(kernels: list[Kernel], prefix: str, on_done: Callable[[Kernel], None] | None) -> Iterator[tuple[str, str]]:
    targets: dict[str, Target] = {}
    with tempfile.TemporaryDirectory(prefix="catalog-") as memory:
        for kernel in kernels:
            target = targets.setdefault(kernel.arch, target_of(kernel.arch))
            renamed = "".join(f"#define {name} {name}_{_symbol(kernel)}\n" for name in _EXPORTED)
            yield f"kernels/{kernel.name}.cpp", renamed + target.emit(kernel, Path(memory))
            if on_done is not None:
                on_done(kernel)
    for header in sorted(path for folder in ("abi", "host", "ck") for path in (BUILD_DIR / folder).glob("*.h*")):
        yield f"include/{header.relative_to(BUILD_DIR).as_posix()}", header.read_text()
    yield f"{prefix}_register.h", _HEADER.format(count=len(kernels), prefix=prefix, guard=prefix.upper())
    yield f"{prefix}_register.cpp", _registration(kernels, prefix)
    yield "inventory.json", _inventory(kernels)


_EXPORTED = {
    "catalog_describe": "const char* {}(void);",
    "catalog_workspace_size": "int32_t {}(const catalog_args* args, catalog_workspace* size);",
    "catalog_launch": "int32_t {}(const catalog_args* args, void* stream);",
}
"""The entry points of a library, with their declarations."""


def _symbol(kernel: Kernel) -> str:
    return kernel.id[:_SYMBOL_DIGITS]


def _registration(kernels: list[Kernel], prefix: str) -> str:
    declarations, entries = [], []
    for kernel in kernels:
        symbols = {f"{name}_{_symbol(kernel)}": declaration for name, declaration in _EXPORTED.items()}
        declarations += [declaration.format(symbol) for symbol, declaration in symbols.items()]
        entries.append(f'    {{"{kernel.id}", "{kernel.name}", "{kernel.arch}", {", ".join(symbols)}}},')
    return _REGISTRATION.format(prefix=prefix, declarations="\n".join(declarations), entries="\n".join(entries))


def _inventory(kernels: list[Kernel]) -> str:
    rows = [
        {"id": kernel.id, "file": f"kernels/{kernel.name}.cpp", "name": kernel.name} | kernel.to_row()
        for kernel in kernels
    ]
    flags = {arch: target_of(arch).flags(arch) for arch in sorted({kernel.arch for kernel in kernels})}
    families = sorted({(kernel.arch, kernel.family) for kernel in kernels})
    of_family = {family: target_of(arch).family_flags(family) for arch, family in families}
    return json.dumps({"compile_flags": flags, "family_flags": of_family, "kernels": rows}, indent=1) + "\n"


def _write(path: Path, text: str) -> bool:
    """Whether the file had to be written."""
    if path.is_file() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return True
