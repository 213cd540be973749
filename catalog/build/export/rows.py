"""Export of rows: one translation unit each, a function that registers them all, and build files."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog.build.cache import Cache
from catalog.build.export.folder import write_export
from catalog.build.export.projects import UNITS, Project, ProjectFormat, project_files
from catalog.build.export.table import Entry, Table, c_string, check_prefix
from catalog.build.export.toolset import Toolset
from catalog.build.keys import abi_number
from catalog.build.targets import HEADERS, Target
from catalog.errors import UsageError
from catalog.files import StrPath
from catalog.ops import emitters_of, operation_of
from catalog.ops.protocol import Emitter
from catalog.schema.kernel import Kernel
from catalog.settings import settings

_SYMBOL_DIGITS = 16
"""Digits of a row's id used in its symbols: 64 bits."""

_EXPORTED = {
    "catalog_describe": "const char* {}(void);",
    "catalog_workspace_size": "int32_t {}(const catalog_args* args, catalog_workspace* size);",
    "catalog_launch": "int32_t {}(const catalog_args* args, void* stream);",
}
"""What every translation unit defines, with its declaration. In one library each row needs its own names."""

_RENAMED = (*_EXPORTED, "catalog_block")
"""All symbols of units on any arch. The last one is read from the library's file when it holds one row."""

_ARGUMENTS = "include/operation/args.h"
"""Where ``abi/catalog_abi.h`` finds the argument struct: the table includes it without the source of a kernel."""

_TABLE = Table(
    title="rows of the catalog",
    includes=("abi/catalog_abi.h",),
    fields="""\
    const char* id;                         /* of the catalog's row, 64 hex digits */
    const char* name;                       /* upstream's canonical name */
    const char* arch;
    const char* (*describe)(void);          /* JSON of the row */
    int32_t (*workspace_size)(const catalog_args* args, catalog_workspace* size);
    int32_t (*launch)(const catalog_args* args, void* stream);""",
)


def export_register(
    kernels: Iterable[Kernel],
    folder: StrPath,
    prefix: str,
    on_done: Callable[[Kernel], None] | None = None,
    *,
    targets: Callable[[str], Target],
    toolsets: Callable[[str], Toolset],
) -> list[Path]:
    """Write what registers ``kernels`` into ``folder``; return the files written or changed.

    ``kernels/NAME.cpp`` has one kernel each, ``PREFIX_register.h`` and ``.cpp`` the C entry point, ``include/`` our
    headers, and ``inventory.json`` lists the row of each file and the compile flags of each arch. Files that are
    already right stay untouched; those of rows no longer exported are removed.

    Args:
        kernels: rows of one or several archs.
        folder: the folder to write; made if it does not exist.
        prefix: prefix of the C names, as in ``PREFIX_register_kernels``.
        on_done: called with each kernel as it is written.
        targets: returns the target of an arch, as :func:`catalog.backends.target_of`.
        toolsets: returns the toolset of an arch, as :func:`catalog.backends.toolset_of`.

    Raises:
        UsageError: there are no kernels, two have the same name, the prefix is not a C identifier, or the folder holds
            something that no export wrote.
        BuildError: a kernel has no source, or the folder cannot be written.
    """
    rows = _Rows.of(kernels, prefix, targets, toolsets)
    return write_export(Path(folder), rows.files(on_done), rows.inventory)


def export_project(
    kernels: Iterable[Kernel],
    folder: StrPath,
    prefix: str,
    form: ProjectFormat,
    on_done: Callable[[Kernel], None] | None = None,
    *,
    targets: Callable[[str], Target],
    toolsets: Callable[[str], Toolset],
) -> list[Path]:
    """Write ``kernels`` and the build of ``libPREFIX.so`` from them; return the files written or changed.

    The output is that of :func:`export_register`, plus the build files of ``form``.

    Args:
        kernels: rows of one arch.
        folder: as in :func:`export_register`.
        prefix: prefix of the C names and of the library.
        form: the build tool.
        on_done, targets, toolsets: as in :func:`export_register`.

    Raises:
        UsageError: as in :func:`export_register`, or the rows are of several archs.
        BuildError: as in :func:`export_register`.
    """
    rows = _Rows.of(kernels, prefix, targets, toolsets)
    if len(rows.targets) > 1:
        raise UsageError(
            f"a project is for one arch, and these rows are of {', '.join(rows.targets)}", hint="--arch chooses one."
        )
    ((arch, target),) = rows.targets.items()
    others = {
        f"{name.upper()}_DIR": path
        for emitters in rows.emitters
        for name, path in target.other_headers(emitters).items()
    }
    project = Project(prefix, [kernel.name for kernel in rows.kernels], rows.toolsets[arch], others)
    built = {"format": form.value, "library": project.output, "variables": project.variables}
    files = {**rows.files(on_done), **project_files(project, form)}
    return write_export(Path(folder), files, {**rows.inventory, **built})


@dataclass(frozen=True)
class _Rows:
    """The rows to export: kernels ordered by name, what emits their sources, and target and toolset of each arch."""

    kernels: Sequence[Kernel]
    prefix: str
    emitters: Collection[tuple[Emitter, ...]]
    targets: Mapping[str, Target]
    toolsets: Mapping[str, Toolset]

    @classmethod
    def of(
        cls,
        kernels: Iterable[Kernel],
        prefix: str,
        target_of: Callable[[str], Target],
        toolset_of: Callable[[str], Toolset],
    ) -> _Rows:
        check_prefix(prefix)
        chosen = sorted(kernels, key=lambda kernel: kernel.name)
        if not chosen:
            raise UsageError("no kernels: nothing to export")
        for one, other in itertools.pairwise(chosen):
            if one.name == other.name:
                variant = operation_of(one).variant.name
                raise UsageError(
                    f"two rows are called {one.name}",
                    hint=f"Narrow the expression: arch, revision, space or {variant}.",
                )
        operations = sorted({kernel.operation for kernel in chosen})
        if len(operations) > 1:
            raise UsageError(
                f"one set of headers is for one operation, and these rows are of {', '.join(operations)}",
                hint="Export each into a folder of its own.",
            )
        by_arch = {arch: list(of) for arch, of in itertools.groupby(sorted(chosen, key=_arch), _arch)}
        targets = {arch: target_of(arch) for arch in by_arch}
        more = {  # a project has one list of flags: the union over its kernels
            arch: [flag for kernel in by_arch[arch] for flag in target.flags_of(kernel)]
            for arch, target in targets.items()
        }
        toolsets = {arch: toolset_of(arch).adding(flags) for arch, flags in more.items()}
        return cls(chosen, prefix, dict.fromkeys(map(emitters_of, chosen)), targets, toolsets)

    def files(self, on_done: Callable[[Kernel], None] | None) -> dict[str, str]:
        """Sources, table and headers: texts by name."""
        units = dict(self._units(on_done))
        sources = {**units, **_TABLE.files(self.prefix, [_entry(kernel) for kernel in self.kernels])}
        own = {name: path for emitters in self.emitters for of in emitters for name, path in of.headers.items()}
        copied = copied_headers(sources.values(), {**HEADERS, **own})
        return {**sources, **copied, _ARGUMENTS: operation_of(self.kernels[0]).arguments.header}

    def _units(self, on_done: Callable[[Kernel], None] | None) -> Iterator[tuple[str, str]]:
        cache = Cache(settings().cache_dir)
        with contextlib.suppress(OSError):  # the cache only saves calls of upstream's generator
            cache.create()
        for kernel in self.kernels:
            renamed = "".join(f"#define {name} {name}_{_symbol(kernel)}\n" for name in _RENAMED)
            yield _unit(kernel), renamed + self.targets[kernel.arch].emit(kernel, cache.scans)
            if on_done is not None:
                on_done(kernel)

    @property
    def inventory(self) -> dict[str, Any]:
        """The row of each file, and the compiler and flags of each arch, as JSON."""
        headers = {target.abi_header for target in self.targets.values()}
        return {
            "prefix": self.prefix,
            "abi": max(abi_number(header) for header in headers),
            **toolset_facts(self.toolsets),
            "kernels": [
                {"id": kernel.id, "file": _unit(kernel), "name": kernel.name} | kernel.to_row()
                for kernel in self.kernels
            ],
        }


def toolset_facts(toolsets: Mapping[str, Toolset]) -> dict[str, Any]:
    """The entry of each arch's toolset in an inventory, as JSON."""
    return {
        "isa": {arch: toolset.isa for arch, toolset in toolsets.items()},
        "compiler": {arch: toolset.compiler for arch, toolset in toolsets.items()},
        "compile_flags": {arch: toolset.compile_flags for arch, toolset in toolsets.items()},
        "link_flags": {arch: toolset.link_flags for arch, toolset in toolsets.items()},
    }


def copied_headers(sources: Iterable[str], folders: Mapping[str, Path] = HEADERS) -> dict[str, str]:
    """Headers of ``folders`` for ``include/``, texts by name: those that ``sources`` include, directly or indirectly.

    Each inner folder that is included from is copied whole.
    """
    found = ((path.relative_to(root).as_posix(), path) for root in folders.values() for path in root.glob("*/**/*.h*"))
    headers = {name: path.read_text() for name, path in found}
    wanted: dict[str, str] = {}
    text = "\n".join(sources)
    while text:
        new = {
            name: header
            for name, header in headers.items()
            if name not in wanted and f'#include "{name.partition("/")[0]}/' in text
        }
        wanted |= new
        text = "\n".join(new.values())
    return {f"include/{name}": wanted[name] for name in sorted(wanted)}


def _arch(kernel: Kernel) -> str:
    return kernel.arch


def _unit(kernel: Kernel) -> str:
    return f"{UNITS}/{kernel.name}.cpp"


def _symbol(kernel: Kernel) -> str:
    return kernel.id[:_SYMBOL_DIGITS]


def _entry(kernel: Kernel) -> Entry:
    symbols = {f"{name}_{_symbol(kernel)}": declaration for name, declaration in _EXPORTED.items()}
    return Entry(
        declarations=tuple(declaration.format(symbol) for symbol, declaration in symbols.items()),
        values=(c_string(kernel.id), c_string(kernel.name), c_string(kernel.arch), *symbols),
    )
