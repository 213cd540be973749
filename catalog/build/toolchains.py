"""Compilers of this machine, and the commands that turn a translation unit into a library.

Flags are data: ``data/toolchains/host.json``. The identity of a compiler (path, version, digest) is read once per
process. Whether the compiler really works is tested only after a failure, and by :mod:`catalog.build.trials`: a kernel
in the cache never pays for that test.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from catalog.build import processes
from catalog.errors import SpecError, ToolchainError
from catalog.files import read_given
from catalog.messages import expected
from catalog.settings import data_dir, settings

CANDIDATES = ("g++", "clang++", "c++")
SOURCE, OBJECT, LIBRARY, STACK_USAGE = "kernel.cpp", "kernel.o", "kernel.so", "kernel.su"
"""Files of a build, relative to its folder: relative names keep this machine's paths out of the output."""

PROBE_TIMEOUT_SECONDS = 60.0

MOST_PROGRAM_BYTES = 4 * 2**30
"""Maximum size of a header or program of a compiler that is read."""

# Programs that a driver runs; cc1plus, not g++, is the compiler proper.
_PROGRAMS = ("cc1plus", "as", "ld")

_PROBE = "#include <atomic>\nstd::atomic<int> catalog_probe;\n"


class Facts(BaseModel):
    """A part of a file of facts."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ToolchainFacts(Facts):
    """The common part of the compiler files in ``data/toolchains``: the source, and how to install each part."""

    source: str
    install: dict[str, dict[str, str]]

    def remedy(self, part: str) -> str:
        """How to install ``part`` on each distribution, in one line."""
        return "; ".join(f"{system}: {command}" for system, command in self.install[part].items())


class FamilyFlags(Facts):
    """Flags of a compiler family for all archs."""

    compile: tuple[str, ...]
    link: tuple[str, ...]


class ArchFlags(Facts):
    """An arch for a compiler: the ISA by name, the flags that select it, and further flags by compiler family.

    ``cpu`` is archspec's name of the minimum CPU that runs it; None if it equals the arch. ``vector_bits`` is the
    length of SVE's vectors that the flags fix and the CPU must have; None without SVE.
    """

    isa: str
    compile: tuple[str, ...]
    families: dict[str, tuple[str, ...]] = {}
    cpu: str | None = None
    vector_bits: int | None = None


class HostFacts(ToolchainFacts):
    """The content of ``data/toolchains/host.json``; ``host`` is the first of ``arches`` that the CPU runs."""

    families: dict[str, FamilyFlags]
    arches: dict[str, ArchFlags]


_F = TypeVar("_F", bound=BaseModel)


def read_facts(model: type[_F], name: str) -> _F:
    """The content of a file of facts below :func:`~catalog.settings.data_dir`, read once per process.

    Raises:
        SpecError: it is missing or malformed; the message names it and the field.
    """
    return cast(_F, _read_facts(model, data_dir(), name))


@functools.cache
def _read_facts(model: type[BaseModel], folder: Path, name: str) -> BaseModel:
    path = folder / name
    try:
        return model.model_validate_json(read_given(path))
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise SpecError(f"{path}: {place}: {expected(first)}") from None


def host_facts() -> HostFacts:
    """Arches, flags and packages of the host toolchains.

    Raises:
        SpecError: the file is missing or malformed; the message names it and the field.
    """
    return read_facts(HostFacts, "toolchains/host.json")


@dataclass(frozen=True)
class Compiler:
    """A compiler and its identity: ``digest`` covers the driver and the programs that it runs.

    ``arguments`` turn a multi-purpose program into a compiler (``zig clang``). ``lender`` is the compiler whose headers
    and programs this one uses because it has none of its own.
    """

    path: Path
    family: str
    version: str
    digest: str
    arguments: tuple[str, ...] = ()
    lender: Compiler | None = None

    @property
    def command(self) -> list[str]:
        """The command that runs it, before any flag."""
        return [str(self.path), *self.arguments]

    @property
    def title(self) -> str:
        """Its version line, and the compiler that it borrows from."""
        lent = "" if self.lender is None else f" with HIP of {self.lender.path} ({self.lender.title})"
        return self.version + lent

    @property
    def identity(self) -> list[str]:
        """All facts about the compiler and its lender that a content key covers."""
        own = [str(self.path), self.version, self.digest, *self.arguments]
        return own if self.lender is None else [*own, *self.lender.identity]


def first_error(source: str, *commands: Sequence[str]) -> tuple[str, str] | None:
    """Run commands that compile and link ``source``: error and output of the first one that fails; None if all work."""
    with tempfile.TemporaryDirectory(prefix="catalog-") as scratch:
        folder = Path(scratch)
        (folder / SOURCE).write_text(source)
        for command in commands:
            done = processes.run(command, folder, PROBE_TIMEOUT_SECONDS, threading.Event())
            if done.failure is not None:
                error = next((line for line in done.output.splitlines() if "error" in line), done.failure)
                return error, done.output
    return None


def _check_host(toolchain: Toolchain) -> None:
    """Check the flags of the ISA, the C++ library and linking."""
    failed = first_error(toolchain.probe, toolchain.compile_command(()), toolchain.link_command())
    if failed is not None:
        raise ToolchainError(
            f"{toolchain.compiler.path} does not compile for {toolchain.isa} on this {platform.machine()}: {failed[0]}",
            hint="Set CATALOG_CXX to a compiler that does.",
        )


@dataclass(frozen=True)
class Toolchain:
    """A compiler with the flags for one ISA.

    The flags are all that may shape the output. Include folders are added, and ``places``: flags with paths of this
    machine whose contents ``compiler.digest`` covers. The launcher is assumed to change only the speed. ``scan_flags``
    restrict a compiler of several passes to one, for listing headers. ``to_host_compiler`` precedes a flag that is not
    for the driver itself. ``check`` raises ToolchainError if the trivial source ``probe`` does not compile and link.
    """

    compiler: Compiler
    isa: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    scan_flags: tuple[str, ...] = ()
    to_host_compiler: tuple[str, ...] = ()
    probe: str = _PROBE
    check: Callable[[Toolchain], None] = _check_host

    @property
    def label(self) -> str:
        """The compiler's version line and lender, as shown in the registry."""
        return self.compiler.title

    @property
    def flags(self) -> str:
        """Compile flags, then link flags, quoted for a shell."""
        return shlex.join((*self.compile_flags, *self.link_flags))

    def scan_command(self, include_dirs: Sequence[Path]) -> list[str]:
        """The command that prints, as a make rule, every file that the translation unit reads."""
        return [
            *(*self.compiler.command, *self.compile_flags, *self.places, *self.scan_flags),
            *(*_search(include_dirs), "-M", SOURCE),
        ]

    def compile_command(self, include_dirs: Sequence[Path]) -> list[str]:
        """The command that compiles without linking, the only step that launchers can cache or distribute."""
        unmapped = [
            flag for folder in include_dirs for flag in (*self.to_host_compiler, f"-ffile-prefix-map={folder}=.")
        ]
        compiler = [*self.launcher, *self.compiler.command]
        flags = (*self.compile_flags, *self.places, *unmapped, *_search(include_dirs))
        return [*compiler, *flags, "-c", SOURCE, "-o", OBJECT]

    def link_command(self) -> list[str]:
        """The command that makes the library from the object file."""
        return [*self.compiler.command, OBJECT, *self.link_flags, *self.places, "-o", LIBRARY]

    def verify(self) -> None:
        """Compile something trivial, to distinguish a broken toolchain from a broken kernel; once per process.

        Raises:
            ToolchainError: a part does not work, or the launcher is missing.
        """
        self.require_launcher()
        _check(self)

    def require_launcher(self) -> None:
        """Check that the launcher, if one is set, is a program.

        Raises:
            ToolchainError: it is not.
        """
        if self.launcher and shutil.which(self.launcher[0]) is None:
            raise ToolchainError(
                f"CATALOG_COMPILER_LAUNCHER: {self.launcher[0]} is not a program",
                hint="Install it, or unset the variable.",
            )


def _search(include_dirs: Sequence[Path]) -> list[str]:
    return [f"-I{folder}" for folder in include_dirs]


def digest_of(path: str) -> str:
    """SHA-256 of a file's bytes, in hex.

    Raises:
        OSError: the file cannot be read.
    """
    return hashlib.sha256(read_given(Path(path), MOST_PROGRAM_BYTES)).hexdigest()


def ask(command: Sequence[str]) -> str:
    """The answer of a compiler to a question about itself.

    Raises:
        ToolchainError: it fails, or cannot be run.
    """
    try:
        done = processes.run(command, Path(tempfile.gettempdir()), PROBE_TIMEOUT_SECONDS, threading.Event())
    except OSError as error:
        raise ToolchainError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.failure is not None:
        raise ToolchainError(f"{shlex.join(command)}: {done.failure}\n{done.output}".strip())
    return done.output.strip()


def _programs(command: Sequence[str]) -> Iterator[str]:
    yield command[0]
    for program in _PROGRAMS:
        found = shutil.which(ask([*command, f"-print-prog-name={program}"]))
        if found is not None:
            yield found


@functools.cache
def identify(path: Path, arguments: tuple[str, ...] = ()) -> Compiler:
    """Identify the compiler at ``path``, which may need ``arguments`` to act as one, once per process.

    A running process does not notice when the compiler is replaced in place.

    Raises:
        ToolchainError: it does not run, or does not state its version.
    """
    command = [str(path), *arguments]
    version = next(iter(ask([*command, "--version"]).splitlines()), "")
    try:
        digest = hashlib.sha256("".join(map(digest_of, _programs(command))).encode()).hexdigest()
    except OSError as error:
        raise ToolchainError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    if not version:
        raise ToolchainError(f"{path} --version prints nothing: it is not a compiler that the catalog knows")
    return Compiler(path, "clang" if "clang" in version else "gnu", version, digest, arguments)


def find_host_compiler(chosen: str | None, search_path: str) -> Compiler:
    """``chosen``, or the first of :data:`CANDIDATES` on ``search_path``.

    Raises:
        ToolchainError: there is none, or it does not run.
    """
    return identify(_find_compiler(chosen, search_path))


def _find_compiler(chosen: str | None, search_path: str) -> Path:
    for name in CANDIDATES if chosen is None else (chosen,):
        found = shutil.which(name, path=search_path)
        if found is not None:
            return Path(found).absolute()
    missing = "no C++ compiler: none of " + ", ".join(CANDIDATES) + " is on PATH"
    if chosen is not None:
        missing = f"no C++ compiler: CATALOG_CXX={chosen} is not a program"
    raise ToolchainError(missing, hint=f"Install one ({host_facts().remedy('compiler')}), or set CATALOG_CXX.")


def host_flags(arch: str, family: str = "gnu") -> tuple[str, ...]:
    """The compile flags of a host arch, for a compiler family.

    Raises:
        ToolchainError: the arch is not one of the host's.
        SpecError: ``data/toolchains/host.json`` is missing or malformed.
    """
    facts = host_facts()
    if arch not in facts.arches:
        raise ToolchainError(f"no host toolchain for {arch}: data/toolchains/host.json has {', '.join(facts.arches)}")
    of_arch = facts.arches[arch]
    return (*facts.families[family].compile, *of_arch.compile, *of_arch.families.get(family, ()))


@functools.cache
def find_host_toolchain(arch: str, chosen: str | None, launcher: str | None, search_path: str) -> Toolchain:
    """The toolchain for a host arch: ``chosen``, or the first of :data:`CANDIDATES` on ``search_path``.

    Raises:
        ToolchainError: there is no compiler, it does not run, or the arch is not one of the host's.
        SpecError: ``data/toolchains/host.json`` is missing or malformed.
    """
    facts = host_facts()
    host_flags(arch)
    compiler = find_host_compiler(chosen, search_path)
    return Toolchain(
        compiler=compiler,
        isa=facts.arches[arch].isa,
        compile_flags=host_flags(arch, compiler.family),
        link_flags=facts.families[compiler.family].link,
        launcher=tuple(shlex.split(launcher or "")),
    )


def host_toolchain(arch: str) -> Toolchain:
    """The toolchain that the settings choose for a host arch.

    Raises:
        ToolchainError: there is no compiler, it does not run, or the arch is not one of the host's.
        SpecError: ``data/toolchains/host.json`` is missing or malformed.
    """
    chosen = settings()
    return find_host_toolchain(arch, chosen.cxx, chosen.compiler_launcher, os.environ.get("PATH", os.defpath))


@functools.cache
def _check(toolchain: Toolchain) -> None:
    toolchain.check(toolchain)


_MAKE_WORD = re.compile(r"(?:\\.|\$\$|[^\s\\])+")
_MAKE_ESCAPE = re.compile(r"\\(.)|\$(\$)")


def parse_make_rule(rule: str) -> list[str]:
    """The prerequisites of the make rule that ``-M`` prints, unescaped."""
    words = _MAKE_WORD.findall(rule.replace("\\\n", " "))
    first = 1 + next((place for place, word in enumerate(words) if word.endswith(":")), 0)
    return [_MAKE_ESCAPE.sub(lambda m: m[1] or m[2], word) for word in words[first:]]
