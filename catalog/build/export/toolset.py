"""Compilers and flags for another build: the builder's flags, with paths of this machine as variables."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from catalog.build.cuda.facts import cuda_facts, cuda_flags
from catalog.build.hip.facts import hip_facts, hip_flags
from catalog.build.hip.toolchain import device_libraries, rocm_root
from catalog.build.targets import Target
from catalog.build.toolchains import CANDIDATES, Compiler, Toolchain, host_facts, host_flags
from catalog.errors import ToolchainError


@dataclass(frozen=True)
class PlacedFlag:
    """A flag with a path that is a variable of the build file: ``option``, the variable's value, ``below``."""

    option: str
    variable: str
    below: str = ""

    def of(self, value: str) -> str:
        """The flag with ``value`` for the variable."""
        return f"{self.option}{value}{self.below}"


@dataclass(frozen=True)
class Toolset:
    """A compiler as called from a shell, the ISA, its flags, and the paths in some of them.

    The environment variable ``compiler_variable`` selects another compiler. ``driver_flags`` are passed in every call,
    including a build tool's trial runs; ``objects_option`` precedes the name of a file that lists objects.
    """

    compiler: str
    isa: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    variables: Mapping[str, Path] = field(default_factory=dict)
    placed_compile_flags: tuple[PlacedFlag, ...] = ()
    placed_link_flags: tuple[PlacedFlag, ...] = ()
    compiler_variable: str = "CXX"
    driver_flags: tuple[str, ...] = ()
    objects_option: str = "@"

    def adding(self, compile_flags: Iterable[str]) -> Toolset:
        """This toolset with additional compile flags, each once."""
        return replace(self, compile_flags=(*self.compile_flags, *dict.fromkeys(compile_flags)))


def _toolchain(arch: str, target: Target) -> Toolchain | None:
    try:
        return target.toolchain(arch)
    except ToolchainError:
        return None


def _called(compiler: Compiler) -> str:
    """Its name if a shell finds it under that, otherwise its path; with its arguments, quoted for a shell."""
    found = shutil.which(compiler.path.name)
    name = compiler.path.name if found is not None and Path(found) == compiler.path else str(compiler.path)
    return shlex.join([name, *compiler.arguments])


def toolset_from(toolchain: Toolchain) -> Toolset:
    """The compiler and the flags of ``toolchain``, none of which contains a path of this machine."""
    return Toolset(
        compiler=_called(toolchain.compiler),
        isa=toolchain.isa,
        compile_flags=toolchain.compile_flags,
        link_flags=toolchain.link_flags,
    )


def toolset_here(arch: str, target: Target) -> Toolset | None:
    """The toolset of this machine's toolchain for ``arch``, if there is one."""
    toolchain = _toolchain(arch, target)
    return None if toolchain is None else toolset_from(toolchain)


def host_toolset(arch: str) -> Toolset:
    """The toolset of a host arch without a compiler here: g++ and its flags.

    Raises:
        SpecError: ``data/toolchains/host.json`` is missing or malformed.
    """
    facts = host_facts()
    return Toolset(CANDIDATES[0], facts.arches[arch].isa, host_flags(arch), facts.families["gnu"].link)


def cuda_toolset(arch: str, target: Target) -> Toolset:
    """The toolset of an NVIDIA arch; without a toolchain here, nvcc under its usual name.

    Raises:
        SpecError: ``data/toolchains/cuda.json`` is missing or malformed.
    """
    toolchain, facts = _toolchain(arch, target), cuda_facts()
    return Toolset(
        compiler=facts.names[0] if toolchain is None else _called(toolchain.compiler),
        isa=facts.arches[arch].isa,
        compile_flags=cuda_flags(arch),
        link_flags=facts.link,
        compiler_variable=facts.project.compiler_variable,
        driver_flags=facts.project.driver_flags,
        objects_option=facts.project.objects_option,
    )


def hip_toolset(arch: str, target: Target) -> Toolset:
    """The toolset of an AMD arch, with ROCm's folders as variables; without a toolchain here, ROCm's compiler.

    Raises:
        SpecError: ``data/toolchains/hip.json`` is missing or malformed.
    """
    toolchain = _toolchain(arch, target)
    facts, root = hip_facts(), rocm_root()
    places = tuple(_hip_places())
    flags: tuple[str, ...] = hip_flags(arch)
    own: tuple[str, ...] = ()
    variables = {"ROCM_PATH": root, "ROCM_DEVICE_LIBS": _device_libraries(root)}
    if toolchain is not None:
        flags = toolchain.compile_flags
        options = {place.option: place.variable for place in places}
        given = {option: place for place in toolchain.places for option in options if place.startswith(option)}
        variables |= {options[option]: Path(place.removeprefix(option)) for option, place in given.items()}
        own = tuple(place for place in toolchain.places if place not in given.values() and place != f"-L{root / 'lib'}")
    return Toolset(
        compiler=str(root / facts.compilers[0]) if toolchain is None else _called(toolchain.compiler),
        isa=arch,
        # The builder has the compiler print resources for the registry; here that would bury the progress display.
        compile_flags=(*(flag for flag in flags if not flag.startswith("-Rpass")), *own),
        link_flags=(*facts.link, *own),
        variables=variables,
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
