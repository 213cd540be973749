"""The oldest manylinux policy that compiled libraries meet: which Linux distributions can load them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict

from catalog.build.toolchains import read_facts

Version = tuple[int, ...]


class _Facts(BaseModel):
    """What ``manylinux.json`` states: libraries that every distribution has, and by policy the newest symbol versions.

    Policies come oldest first, and are named by their version of GLIBC.
    """

    model_config = ConfigDict(extra="forbid")

    source: str
    libraries: frozenset[str]
    policies: tuple[Mapping[str, str], ...]


def policy_of(libraries: Iterable[bytes]) -> str | None:
    """The oldest policy that all ELF files meet, such as ``manylinux_2_34``; None if one needs more than any allows.

    One file at a time is in memory.

    Raises:
        SpecError: the file of the policies is missing or malformed.
    """
    facts = read_facts(_Facts, "toolchains/manylinux.json")
    names: set[str] = set()
    newest: dict[str, Version] = {}
    for content in libraries:
        needed, versions = _needs(content)
        names |= needed
        for kind, version in versions:
            newest[kind] = max(newest.get(kind, ()), version)
    for policy in facts.policies if names <= facts.libraries else ():
        if all(kind in policy and version <= _version(policy[kind]) for kind, version in newest.items()):
            return f"manylinux_{policy['GLIBC'].replace('.', '_')}"
    return None


def _needs(content: bytes) -> tuple[set[str], set[tuple[str, Version]]]:
    """The libraries that an ELF file needs, and the versions of their symbols by kind, such as GLIBC and 2.34."""
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    names: set[str] = set()
    versions: set[tuple[str, Version]] = set()
    for section in ELFFile(io.BytesIO(content)).iter_sections():
        if isinstance(section, DynamicSection):
            names |= {tag.needed for tag in section.iter_tags("DT_NEEDED")}  # type: ignore[attr-defined]
        if isinstance(section, GNUVerNeedSection):
            for _, auxiliaries in section.iter_versions():
                kinds = (auxiliary.name.rpartition("_") for auxiliary in auxiliaries)
                versions |= {(kind, _version(number)) for kind, _, number in kinds}
    return names, versions


def _version(text: str) -> Version:
    """The parts of a version; a word such as PRIVATE is newer than all."""
    return tuple(int(part) if part.isdigit() else 10**9 for part in text.split("."))
