"""Facts about HIP compilers and archs: the content of ``data/toolchains/hip.json``."""

from __future__ import annotations

import re
from pathlib import Path

from catalog.build.toolchains import Facts, ToolchainFacts, read_facts

_VERSION = re.compile(r"clang version (\d+)")


class HipArch(Facts):
    """An arch for a HIP compiler.

    ``clang`` is the first version that knows it, ``isa_version`` its number in the device libraries, ``wavefront`` the
    lanes of a wave, ``compile`` its flags in addition to the common ones.
    """

    clang: int
    isa_version: int
    wavefront: int
    compile: tuple[str, ...] = ()


class CodeObjects(Facts):
    """From clang ``clang`` on, device libraries need the module ``module``; without it, kernels need ``otherwise``."""

    clang: int
    module: str
    otherwise: tuple[str, ...]


class LeftOut(Facts):
    """From clang ``clang`` on, the driver leaves out the module ``module``, and with it the value of a constant."""

    clang: int
    module: str
    constant: str
    value: int


class Zig(Facts):
    """Where Zig is found (programs, Python package), and the arguments that make it act as clang."""

    names: tuple[str, ...]
    package: str
    arguments: tuple[str, ...]


class Lent(Facts):
    """What a clang without HIP borrows from one that has it: headers in its resource folder, and programs."""

    headers: tuple[str, ...]
    wrappers: str
    programs: tuple[str, ...]


class HipFacts(ToolchainFacts):
    """The content of ``data/toolchains/hip.json``; paths are relative to the root of ROCm."""

    compile: tuple[str, ...]
    vendors: dict[str, tuple[str, ...]]
    since: dict[int, tuple[str, ...]]
    code_objects: CodeObjects
    left_out: LeftOut
    scan: tuple[str, ...]
    link: tuple[str, ...]
    device_libs: tuple[str, ...]
    roots: tuple[Path, ...]
    compilers: tuple[str, ...]
    names: tuple[str, ...]
    zig: Zig
    lent: Lent
    arches: dict[str, HipArch]


def hip_facts() -> HipFacts:
    """Arches, flags and places of the HIP toolchains.

    Raises:
        SpecError: the file is missing or malformed; the message names it and the field.
    """
    return read_facts(HipFacts, "toolchains/hip.json")


def clang_number(version: str) -> int:
    """The major number in a clang's version line; 0 for another compiler."""
    found = _VERSION.search(version)
    return int(found[1]) if found else 0


def hip_flags(arch: str, version: str = "") -> tuple[str, ...]:
    """The compile flags of an AMD arch for a compiler with the version line ``version``.

    Raises:
        SpecError: ``data/toolchains/hip.json`` is missing or malformed.
    """
    facts = hip_facts()
    of_vendor = [flag for vendor, flags in facts.vendors.items() if vendor in version for flag in flags]
    newer = [flag for clang, flags in facts.since.items() if clang <= clang_number(version) for flag in flags]
    of_arch = facts.arches[arch]
    newer = [flag.format(wavefront=of_arch.wavefront) for flag in newer]
    return (*facts.compile, *of_vendor, *newer, *of_arch.compile, f"--offload-arch={arch}")
