"""With what another build compiles for an arch: the builder's flags, and places of this machine as variables."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from catalog.build.builder import Target
from catalog.build.ck.toolchain import device_libraries, hip_facts, hip_flags, rocm_root
from catalog.build.toolchains import CANDIDATES, Compiler, host_facts, host_flags
from catalog.errors import ToolchainError


@dataclass(frozen=True)
class PlacedFlag:
    """A flag with a path that a build file has as a variable: ``option``, the variable's value, ``below``."""

    option: str
    variable: str
    below: str = ""

    def of(self, value: str) -> str:
        """The flag, where the variable is ``value``."""
        return f"{self.option}{value}{self.below}"


@dataclass(frozen=True)
class Toolset:
    """A compiler by name or path, what it is asked for, its flags, and the paths that some of them have."""

    compiler: str
    isa: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    variables: Mapping[str, Path] = field(default_factory=dict)
    placed_compile_flags: tuple[PlacedFlag, ...] = ()
    placed_link_flags: tuple[PlacedFlag, ...] = ()


def toolset_of(arch: str, target: Target) -> Toolset:
    """The toolset of ``arch``: with the compiler that the builder would take, or its usual name where there is none.

    Raises:
        SpecError: a file of facts is missing or malformed.
    """
    compiler = _compiler(arch, target)
    if arch in host_facts().arches:
        return _host_toolset(arch, compiler)
    return _hip_toolset(arch, compiler)


def _compiler(arch: str, target: Target) -> Compiler | None:
    try:
        return target.toolchain(arch).compiler
    except ToolchainError:
        return None


def _called(compiler: Compiler) -> str:
    """Its name where a shell finds it by that, else its path."""
    found = shutil.which(compiler.path.name)
    return compiler.path.name if found is not None and Path(found) == compiler.path else str(compiler.path)


def _host_toolset(arch: str, compiler: Compiler | None) -> Toolset:
    facts, family = host_facts(), "gnu" if compiler is None else compiler.family
    return Toolset(
        compiler=CANDIDATES[0] if compiler is None else _called(compiler),
        isa=facts.arches[arch].isa,
        compile_flags=host_flags(arch, family),
        link_flags=facts.families[family].link,
    )


def _hip_toolset(arch: str, compiler: Compiler | None) -> Toolset:
    facts, root = hip_facts(), rocm_root()
    places = tuple(_hip_places())
    flags = hip_flags(arch, "" if compiler is None else compiler.version)
    return Toolset(
        compiler=str(root / facts.compilers[0]) if compiler is None else _called(compiler),
        isa=arch,
        # What the builder has the compiler print, for the registry, would drown the progress.
        compile_flags=tuple(flag for flag in flags if not flag.startswith("-Rpass")),
        link_flags=facts.link,
        variables={"ROCM_PATH": root, "ROCM_DEVICE_LIBS": _device_libraries(root)},
        placed_compile_flags=places,
        placed_link_flags=(*places, PlacedFlag("-L", "ROCM_PATH", "/lib")),
    )


def _hip_places() -> Iterator[PlacedFlag]:
    yield PlacedFlag("--rocm-path=", "ROCM_PATH")
    yield PlacedFlag("--rocm-device-lib-path=", "ROCM_DEVICE_LIBS")


def _device_libraries(root: Path) -> Path:
    try:
        return device_libraries(root)
    except ToolchainError:
        return root / hip_facts().device_libs[0]
