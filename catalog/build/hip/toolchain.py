"""HIP compilers of this machine: ROCm's, or a distribution's clang++ with HIP headers and device libraries.

Flags, paths and versions are data (:mod:`catalog.build.hip.facts`). The identity of a compiler includes the device
libraries that it links into every kernel. If no compiler knows an arch, a newer clang borrows the HIP parts of one of
them (:mod:`catalog.build.hip.borrowing`).
"""

from __future__ import annotations

import functools
import hashlib
import shlex
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from catalog.build import processes
from catalog.build.hip.borrowing import Completed, complete
from catalog.build.hip.facts import clang_number, hip_facts, hip_flags
from catalog.build.permissions import make_private
from catalog.build.toolchains import (
    PROBE_TIMEOUT_SECONDS,
    Compiler,
    Toolchain,
    digest_of,
    first_error,
    identify,
)
from catalog.errors import ToolchainError
from catalog.settings import Settings, rocm_path, settings

# One function for each constant that controls the device libraries: denormals, rounding, fast math.
_PROBE = """\
#include <hip/hip_runtime.h>
__global__ void catalog_probe(float* x) { *x = expf(*x) + logf(*x) + sinf(*x) + sqrtf(*x); }
"""

_MODULE = 'target triple = "amdgcn-amd-amdhsa"\n'
_CONSTANT = "@{name} = linkonce_odr protected local_unnamed_addr addrspace(4) constant {type} {value}, align {bytes}\n"


def rocm_root() -> Path:
    """The root of ROCm: the setting, or the first usual place with HIP's headers; the last place if none has them."""
    chosen = rocm_path()
    if chosen is not None:
        return chosen
    roots = hip_facts().roots
    return next((root for root in roots if (root / "include" / "hip" / "hip_runtime.h").is_file()), roots[-1])


def hip_toolchain(arch: str) -> Toolchain:
    """The toolchain for an AMD arch.

    Raises:
        ToolchainError: there is no compiler that knows the arch, or no device libraries.
        SpecError: ``data/toolchains/hip.json`` is missing or malformed.
    """
    return _find(arch, rocm_root(), settings())


@functools.cache
def _find(arch: str, root: Path, chosen: Settings) -> Toolchain:
    facts = hip_facts()
    found = _compiler_for(arch, root, chosen.hipcxx, chosen.hipcxx_device)
    compiler = found.compiler
    libraries = device_libraries(root)
    parts = [f"{path.name} {digest_of(str(path))}" for path in sorted(libraries.glob("*.bc"))]
    constants = _missing_constants(arch, compiler, libraries)
    if constants:
        parts.append(constants)
    digest = hashlib.sha256("\n".join([compiler.digest, *parts]).encode()).hexdigest()
    if constants:
        folder = chosen.cache_dir / "device-libs" / f"{digest[:16]}-{arch}"
        libraries = _with_constants(libraries, _isa_module(arch), constants, compiler, folder)
    return Toolchain(
        compiler=replace(compiler, digest=digest),
        isa=arch,
        compile_flags=(*hip_flags(arch, compiler.version), *_code_object_flags(compiler, libraries)),
        link_flags=facts.link,
        launcher=_launcher(compiler, chosen.compiler_launcher),
        places=(f"--rocm-path={root}", f"--rocm-device-lib-path={libraries}", f"-L{root / 'lib'}", *found.places),
        scan_flags=facts.scan,
        probe=_PROBE,
        check=check,
    )


def _launcher(compiler: Compiler, chosen: str | None) -> tuple[str, ...]:
    """The launcher. Launchers identify a compiler by its name: they would take ``zig clang`` for Zig."""
    subcommand = any(not argument.startswith("-") for argument in compiler.arguments)
    return () if subcommand else tuple(shlex.split(chosen or ""))


def _code_object_flags(compiler: Compiler, libraries: Path) -> tuple[str, ...]:
    """Flags that make a compiler's code fit device libraries older than itself."""
    code_objects = hip_facts().code_objects
    fits = clang_number(compiler.version) < code_objects.clang or (libraries / code_objects.module).is_file()
    return () if fits else code_objects.otherwise


def _compilers(root: Path, chosen: str | None) -> Iterator[Path]:
    facts = hip_facts()
    wanted = [chosen] if chosen is not None else [*(str(root / inner) for inner in facts.compilers), *facts.names]
    for name in wanted:
        found = shutil.which(name)
        if found is not None:
            yield Path(found).absolute()


def _compiler_for(arch: str, root: Path, chosen: str | None, newer: str | None) -> Completed:
    """The first compiler that is new enough for ``arch``, else a newer one that borrows from the first that is not."""
    facts = hip_facts()
    needed = facts.arches[arch].clang
    seen = []
    older = []
    for path in _compilers(root, chosen):
        try:
            compiler = identify(path)
        except ToolchainError as error:
            seen.append(error.message)
            continue
        if clang_number(compiler.version) >= needed:
            return Completed(compiler, ())
        known = clang_number(compiler.version) > 0
        seen.append(f"{path} is {compiler.version}" if known else f"{path} states no version of clang")
        older.append(compiler)
    if chosen is not None and not seen:
        seen = [f"CATALOG_HIPCXX={chosen} is not a program"]
    try:
        return complete(needed, older, newer)
    except ToolchainError as error:
        seen.append(error.message)
    raise ToolchainError(
        f"no HIP compiler for {arch}, which needs clang {needed} or newer: {'; '.join(seen)}",
        hint=f"Install one ({facts.remedy('compiler')}), or set CATALOG_HIPCXX or CATALOG_HIPCXX_DEVICE.",
    )


def device_libraries(root: Path) -> Path:
    """The folder of AMD's device libraries in the ROCm at ``root``.

    Raises:
        ToolchainError: there are none.
    """
    facts = hip_facts()
    for place in facts.device_libs:
        for folder in sorted(root.glob(place), reverse=True):
            if (folder / "ocml.bc").is_file():
                return folder
    raise ToolchainError(
        f"no device libraries of ROCm in {root}: none of {', '.join(facts.device_libs)} has ocml.bc",
        hint=f"Install them ({facts.remedy('device_libs')}), or set CATALOG_ROCM_PATH.",
    )


def _isa_module(arch: str) -> str:
    return f"oclc_isa_version_{arch.removeprefix('gfx')}.bc"


def _missing_constants(arch: str, compiler: Compiler, libraries: Path) -> str:
    """LLVM IR of constants that ``libraries`` need and that ``compiler`` would not find in them; empty if none.

    Older libraries lack the number of a newer arch; a newer compiler leaves out a module that older libraries need.
    """
    facts = hip_facts()
    left_out = facts.left_out
    needs_more = clang_number(compiler.version) >= left_out.clang and (libraries / left_out.module).is_file()
    if (libraries / _isa_module(arch)).is_file() and not needs_more:
        return ""
    number = facts.arches[arch].isa_version
    more = _CONSTANT.format(name=left_out.constant, type="i8", value=left_out.value, bytes=1) if needs_more else ""
    return _MODULE + _CONSTANT.format(name="__oclc_ISA_version", type="i32", value=number, bytes=4) + more


def _with_constants(libraries: Path, module: str, constants: str, compiler: Compiler, folder: Path) -> Path:
    """``libraries`` with ``constants`` added to ``module``, the one that differs between archs.

    ``folder`` is built elsewhere and renamed: other threads and processes see all of it or nothing.
    """
    if (folder / module).is_file():
        return folder
    try:
        make_private(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _make_module(made / module, constants, compiler)
            for library in libraries.glob("*.bc"):
                if library.name != module:
                    (made / library.name).symlink_to(library)
            _publish(made, folder)
    except OSError as error:
        raise ToolchainError(
            f"{libraries} lacks constants of {module}, and {error.filename or folder} cannot be written: "
            f"{error.strerror}",
            hint="CATALOG_CACHE_DIR chooses another cache folder.",
        ) from None
    return folder


def _publish(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another builder has just made it, with the same content
            raise


def _make_module(module: Path, constants: str, compiler: Compiler) -> None:
    source = module.with_suffix(".ll")
    source.write_text(constants)
    command = [*compiler.command, "-x", "ir", "--target=amdgcn-amd-amdhsa", "-nogpulib", "-emit-llvm", "-c"]
    command += [source.name, "-o", module.name]
    done = processes.run(command, module.parent, PROBE_TIMEOUT_SECONDS, threading.Event())
    if done.failure is not None:
        raise ToolchainError(
            f"the device libraries lack constants of {module.name}, and {compiler.path} cannot make it: {done.failure}",
            hint=f"Newer ones have it ({hip_facts().remedy('device_libs')}).",
        )
    source.unlink()


def check(toolchain: Toolchain) -> None:
    """Compile and link a trivial kernel, to distinguish a broken toolchain from a broken kernel.

    It calls functions of the device libraries. Clang's driver links device code with ``--no-undefined``, so here as in
    every build a symbol that no library has is an error.

    Raises:
        ToolchainError: the message says which part is missing and which package has it.
    """
    failed = first_error(toolchain.probe, toolchain.compile_command(()), toolchain.link_command())
    if failed is None:
        return
    error, output = failed
    part = "compiler"
    if "hip_runtime.h" in output or "amdhip64" in output:
        part = "runtime"
    elif "device librar" in output:
        part = "device_libs"
    raise ToolchainError(
        f"{toolchain.compiler.path} does not build HIP for {toolchain.isa}: {error}",
        hint=f"Install what is missing ({hip_facts().remedy(part)}), or set CATALOG_HIPCXX or CATALOG_ROCM_PATH.",
    )
