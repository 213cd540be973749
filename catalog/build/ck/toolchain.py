"""HIP compilers of this machine: ROCm's, or a distribution's clang++ with HIP headers and device libraries.

Flags, places and versions are data: ``data/toolchains/hip.json``. A compiler is identified together with the device
libraries that it links into every kernel.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shlex
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from catalog.build import processes
from catalog.build.toolchains import (
    PROBE_TIMEOUT_SECONDS,
    SOURCE,
    Compiler,
    Diagnosis,
    Toolchain,
    diagnose,
    digest_of,
    identify,
    read_facts,
)
from catalog.errors import ToolchainError
from catalog.settings import data_dir, rocm_path, settings

_VERSION = re.compile(r"clang version (\d+)")
_PROBE = "#include <hip/hip_runtime.h>\n__global__ void catalog_probe(float* x) { *x = expf(*x); }\n"

# The constant by which device libraries tell processors apart (LLVM's AMDGPU device libraries, oclc_isa_version).
_ISA_MODULE = """\
target triple = "amdgcn-amd-amdhsa"
@__oclc_ISA_version = linkonce_odr protected local_unnamed_addr addrspace(4) constant i32 {version}, align 4
"""


class HipArch(BaseModel):
    """An arch to a HIP compiler: the first clang that knows it, its number in the device libraries, flags for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clang: int
    isa_version: int
    compile: tuple[str, ...] = ()


class HipFacts(BaseModel):
    """The content of ``data/toolchains/hip.json``; paths are relative to the root of ROCm."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    compile: tuple[str, ...]
    vendors: dict[str, tuple[str, ...]]
    scan: tuple[str, ...]
    link: tuple[str, ...]
    device_libs: tuple[str, ...]
    roots: tuple[Path, ...]
    compilers: tuple[str, ...]
    names: tuple[str, ...]
    arches: dict[str, HipArch]
    install: dict[str, dict[str, str]]

    def remedy(self, part: str) -> str:
        """How to install ``part``, as one line."""
        return "; ".join(f"{system}: {command}" for system, command in self.install[part].items())


def hip_facts() -> HipFacts:
    """Arches, flags and places of the HIP toolchains.

    Raises:
        SpecError: the file is missing or malformed; the message names it and the field.
    """
    return read_facts(HipFacts, data_dir() / "toolchains" / "hip.json")


def hip_flags(arch: str, version: str = "") -> tuple[str, ...]:
    """The compile flags of an AMD arch, for a compiler that calls itself ``version``.

    Raises:
        SpecError: ``data/toolchains/hip.json`` is missing or malformed.
    """
    facts = hip_facts()
    of_vendor = [flag for vendor, flags in facts.vendors.items() if vendor in version for flag in flags]
    of_arch = facts.arches[arch].compile if arch in facts.arches else ()
    return (*facts.compile, *of_vendor, *of_arch, f"--offload-arch={arch}")


def rocm_root() -> Path:
    """The root of ROCm: the setting, or the first of the usual ones with HIP's headers; the last one if none has."""
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
    return _find(arch, rocm_root(), settings().hipcxx, settings().compiler_launcher, settings().cache_dir)


@functools.cache
def _find(arch: str, root: Path, chosen: str | None, launcher: str | None, cache_dir: Path) -> Toolchain:
    facts = hip_facts()
    compiler = _compiler_for(arch, root, chosen)
    libraries = _device_libraries(root)
    contents = [f"{path.name} {digest_of(str(path))}" for path in sorted(libraries.glob("*.bc"))]
    digest = hashlib.sha256("\n".join([compiler.digest, *contents]).encode()).hexdigest()
    toolchain = Toolchain(
        compiler=replace(compiler, digest=digest),
        isa=arch,
        compile_flags=hip_flags(arch, compiler.version),
        link_flags=facts.link,
        launcher=tuple(shlex.split(launcher or "")),
        places=_places(root, libraries),
        scan_flags=facts.scan,
        check=check,
    )
    if (libraries / f"oclc_isa_version_{arch.removeprefix('gfx')}.bc").is_file():
        return toolchain
    complete = _with_isa(libraries, arch, compiler, cache_dir / "device-libs" / f"{digest[:16]}-{arch}")
    return replace(toolchain, places=_places(root, complete))


def _places(root: Path, libraries: Path) -> tuple[str, ...]:
    return (f"--rocm-path={root}", f"--rocm-device-lib-path={libraries}", f"-L{root / 'lib'}")


def _compilers(root: Path, chosen: str | None) -> Iterator[Path]:
    facts = hip_facts()
    wanted = [chosen] if chosen is not None else [*(str(root / inner) for inner in facts.compilers), *facts.names]
    for name in wanted:
        found = shutil.which(name)
        if found is not None:
            yield Path(found).absolute()


def _compiler_for(arch: str, root: Path, chosen: str | None) -> Compiler:
    """The first compiler that is new enough for ``arch``."""
    facts = hip_facts()
    needed = facts.arches[arch].clang
    seen = []
    for path in _compilers(root, chosen):
        try:
            compiler = identify(path)
        except ToolchainError as error:
            seen.append(error.message)
            continue
        version = _VERSION.search(compiler.version)
        if version is not None and int(version[1]) >= needed:
            return compiler
        seen.append(f"{path} is {compiler.version}")
    if chosen is not None and not seen:
        seen = [f"CATALOG_HIPCXX={chosen} is not a program"]
    raise ToolchainError(
        f"no HIP compiler for {arch}, which needs clang {needed} or newer: {'; '.join(seen) or 'none is there'}",
        hint=f"install one ({facts.remedy('compiler')}), or set CATALOG_HIPCXX",
    )


def _device_libraries(root: Path) -> Path:
    facts = hip_facts()
    for place in facts.device_libs:
        for folder in sorted(root.glob(place), reverse=True):
            if (folder / "ocml.bc").is_file():
                return folder
    raise ToolchainError(
        f"no device libraries of ROCm in {root}: none of {', '.join(facts.device_libs)} has ocml.bc",
        hint=f"install them ({facts.remedy('device_libs')}), or set CATALOG_ROCM_PATH",
    )


def _with_isa(libraries: Path, arch: str, compiler: Compiler, folder: Path) -> Path:
    """``libraries`` with the module that tells ``arch`` apart, which older packages lack: it holds one number.

    ``folder`` is made whole elsewhere and renamed: other threads and processes see all of it or nothing.
    """
    module = f"oclc_isa_version_{arch.removeprefix('gfx')}.bc"
    if (folder / module).is_file():
        return folder
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _make_isa_module(made / module, arch, compiler)
            for library in libraries.glob("*.bc"):
                (made / library.name).symlink_to(library)
            _publish(made, folder)
    except OSError as error:
        raise ToolchainError(
            f"{libraries} has no {module}, and {error.filename or folder} cannot be written: {error.strerror}",
            hint="CATALOG_CACHE_DIR chooses another cache folder",
        ) from None
    return folder


def _publish(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another builder was first, with the same content
            raise


def _make_isa_module(module: Path, arch: str, compiler: Compiler) -> None:
    source = module.with_suffix(".ll")
    source.write_text(_ISA_MODULE.format(version=hip_facts().arches[arch].isa_version))
    command = [str(compiler.path), "-x", "ir", "--target=amdgcn-amd-amdhsa", "-nogpulib", "-emit-llvm", "-c"]
    command += [source.name, "-o", module.name]
    done = processes.run(command, module.parent, PROBE_TIMEOUT_SECONDS, threading.Event())
    if done.failure is not None:
        raise ToolchainError(
            f"the device libraries have no {module.name}, and {compiler.path} cannot make it: {done.failure}",
            hint=f"newer ones have it ({hip_facts().remedy('device_libs')})",
        )
    source.unlink()


def check(toolchain: Toolchain) -> None:
    """Compile and link a trivial kernel, to tell a broken toolchain from a broken kernel.

    Raises:
        ToolchainError: says which part is missing and which package has it.
    """
    facts = hip_facts()
    with tempfile.TemporaryDirectory(prefix="catalog-") as scratch:
        folder = Path(scratch)
        (folder / SOURCE).write_text(_PROBE)
        for command in (toolchain.compile_command(()), toolchain.link_command()):
            done = processes.run(command, folder, PROBE_TIMEOUT_SECONDS, threading.Event())
            if done.failure is None:
                continue
            error = next((line for line in done.output.splitlines() if "error" in line), done.failure)
            part = "compiler"
            if "hip_runtime.h" in done.output or "amdhip64" in done.output:
                part = "runtime"
            elif "device librar" in done.output:
                part = "device_libs"
            raise ToolchainError(
                f"{toolchain.compiler.path} does not build HIP for {toolchain.isa}: {error}",
                hint=f"install what is missing ({facts.remedy(part)}), or set CATALOG_HIPCXX or CATALOG_ROCM_PATH",
            )


def doctor() -> list[Diagnosis]:
    """One row per AMD arch: its compiler, and what is missing to build for it.

    Raises:
        SpecError: ``data/toolchains/hip.json`` is missing or malformed.
    """
    return [diagnose(arch, hip_toolchain) for arch in hip_facts().arches]
