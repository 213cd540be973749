"""A folder of generated headers as a library: one translation unit each, and a table that lists them all.

For headers in the form that the generators of CK's dispatcher write, one kernel each: GEMM, grouped convolution, FMHA.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from catalog.build.export.folder import write_export
from catalog.build.export.headers import GeneratedHeader, read_header
from catalog.build.export.projects import UNITS, Project, ProjectFormat, project_files
from catalog.build.export.rows import copied_headers, toolset_facts
from catalog.build.export.table import Entry, Table, c_string, check_prefix
from catalog.build.export.toolset import Toolset
from catalog.build.hip.ck_include import ck_include
from catalog.build.hip.toolchain import rocm_root
from catalog.build.targets import CK, Target
from catalog.errors import BuildError, UsageError
from catalog.files import StrPath

_log = logging.getLogger(__name__)

_LAUNCH = "int32_t (*{name})(const void* args, const void* stream_config, float* milliseconds)"

_TABLE = Table(
    title="of generated headers",
    includes=(),
    fields=f"""\
    const char* name;
    const char* header;   /* that defines it */
    const char* launcher; /* the C++ type or function that launches it; "": none was found */

    /* Returns 0, or 1 when the kernel refused its arguments. args points to what the launcher takes, stream_config to a
     * ck_tile::stream_config; *milliseconds, unless it is NULL, becomes what the launcher returns. NULL where there is
     * no launcher, or not one function that takes the two. */
    {_LAUNCH.format(name="launch")};""",
)

_UNIT = """\
// {name}
#define CK_TILE_SINGLE_KERNEL_INCLUDE
{renamed}#include {header}

#include "export/launcher.hpp"

#if !defined(__HIP_DEVICE_COMPILE__)
extern "C" {{
extern const catalog::exported::Launch {symbol};
const catalog::exported::Launch {symbol} = {launch};
}}
#endif
"""


def wrap_headers(
    kernel_dir: StrPath,
    folder: StrPath,
    prefix: str,
    form: ProjectFormat,
    *,
    arch: str,
    pattern: str = "*.hpp",
    on_done: Callable[[str], None] | None = None,
    targets: Callable[[str], Target],
    toolsets: Callable[[str], Toolset],
) -> list[Path]:
    """Write the build of ``libPREFIX.so`` from a folder of generated headers; return the files written or changed.

    ``kernels/STEM.cpp`` includes exactly one header and exports the launch function of its kernel.
    ``PREFIX_register.h`` and ``.cpp`` are the table of all kernels, named by their headers, or else after the header.

    Args:
        kernel_dir: the folder of the headers; the build reads them there.
        folder: the folder to write; made if it does not exist.
        prefix: prefix of the C names and of the library.
        form: the build tool.
        arch: the arch that the library is compiled for.
        pattern: selects headers, as in ``Path.glob``.
        on_done: called with the name of each kernel.
        targets, toolsets: as in :func:`~catalog.build.export.rows.export_register`.

    Raises:
        UsageError: there is no such folder or no header in it, names of two headers clash, the prefix is not a C
            identifier, or ``folder`` holds something that no export wrote.
        BuildError: a header cannot be read, ``folder`` cannot be written, or nothing compiles for the arch.
    """
    check_prefix(prefix)
    wrapped = sorted(_wrap(Path(kernel_dir), pattern), key=lambda kernel: kernel.name)
    target, toolset = targets(arch), toolsets(arch)
    gpu_header = next((kernel.header for kernel in wrapped if kernel.says.needs_hip), None)
    if target is not CK and gpu_header is not None:
        _log.warning(
            "%s includes headers of CK or HIP, and %s is not an AMD arch: --arch with one selects a HIP compiler",
            gpu_header,
            arch,
        )
    include_dirs = {"KERNEL_DIR": Path(os.path.abspath(kernel_dir)), **(_ck_dirs() if target is CK else {})}
    project = Project(prefix, [kernel.stem for kernel in wrapped], toolset, include_dirs)
    units = {}
    for kernel in wrapped:
        units[f"{UNITS}/{kernel.stem}.cpp"] = kernel.unit(prefix)
        if on_done is not None:
            on_done(kernel.name)
    files = {
        **units,
        **_TABLE.files(prefix, [kernel.entry(prefix) for kernel in wrapped]),
        **copied_headers(units.values()),
        **project_files(project, form),
    }
    inventory = {
        "prefix": prefix,
        "format": form.value,
        "library": project.output,
        **toolset_facts({arch: toolset}),
        "variables": project.variables,
        "kernels": [
            {"name": kernel.name, "file": f"{UNITS}/{kernel.stem}.cpp"}
            | {"header": kernel.header, "launcher": kernel.launcher}
            for kernel in wrapped
        ],
    }
    return write_export(Path(folder), files, inventory)


@dataclass(frozen=True)
class _Wrapped:
    """A header with its path in the folder, its description, and its name as a C identifier."""

    header: str
    stem: str
    says: GeneratedHeader

    @property
    def name(self) -> str:
        return self.says.name or Path(self.header).stem

    @property
    def launcher(self) -> str:
        return self.says.type or self.says.function or ""

    def _symbol(self, prefix: str) -> str:
        return f"{prefix}_launch_{self.stem}"

    def unit(self, prefix: str) -> str:
        launch = "nullptr"
        if self.says.type:
            launch = f"catalog::exported::Of<{self.says.type}>::launch"
        elif self.says.function:
            launch = f"catalog::exported::Call<&{self.says.function}>::launch"
        # Types with the same name in one library must be the same type, so each is renamed.
        renamed = "".join(f"#define {name} {name}_{self.stem}\n" for name in self.says.global_types)
        header = f'"{self.header}"'
        return _UNIT.format(name=self.name, renamed=renamed, header=header, symbol=self._symbol(prefix), launch=launch)

    def entry(self, prefix: str) -> Entry:
        symbol = self._symbol(prefix)
        return Entry(
            declarations=(f"extern {_LAUNCH.format(name=f'const {symbol}')};",),
            values=(c_string(self.name), c_string(self.header), c_string(self.launcher), symbol),
        )


def _wrap(kernel_dir: Path, pattern: str) -> list[_Wrapped]:
    if not kernel_dir.is_dir():
        raise UsageError(f"{kernel_dir} is not a folder", hint="--kernel-dir names one with generated headers.")
    try:
        found = sorted(kernel_dir.glob(pattern))
    except (ValueError, NotImplementedError, IndexError) as error:
        raise UsageError(f"--pattern {pattern!r}: {error}") from None
    except OSError as error:
        raise BuildError(f"{error.filename or kernel_dir}: {error.strerror}") from None
    if not found:
        raise UsageError(f"no header of {kernel_dir} matches {pattern}", hint="--pattern '**/*.hpp' searches below it.")
    wrapped = [_read(path, path.relative_to(kernel_dir).as_posix()) for path in found]
    _check_distinct(wrapped, [kernel.stem for kernel in wrapped], "become the C identifier")
    _check_distinct(wrapped, [kernel.name for kernel in wrapped], "are of a kernel called")
    return wrapped


def _read(path: Path, header: str) -> _Wrapped:
    if not header.isprintable() or '"' in header or "\\" in header:
        raise UsageError(
            f"{header!r}: no #include can name it", hint="Rename the header, or choose others with --pattern."
        )
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from None
    stem = re.sub(r"\W", "_", str(Path(header).with_suffix("")), flags=re.ASCII)
    return _Wrapped(header, stem, read_header(text))


def _check_distinct(wrapped: Sequence[_Wrapped], names: Sequence[str], what: str) -> None:
    headers: dict[str, str] = {}
    for kernel, name in zip(wrapped, names, strict=True):
        if name in headers:
            raise UsageError(f"{headers[name]} and {kernel.header} both {what} {name}", hint="Rename one of them.")
        headers[name] = kernel.header


def _ck_dirs() -> dict[str, Path]:
    """Folders of CK's headers, and of the checkout whose files FMHA headers include; by default ROCm's own."""
    try:
        include = ck_include("ck_tile")
    except BuildError:
        include = rocm_root() / "include"
    return {"CK_DIR": include, "CK_ROOT": include.parent}
