"""Which file system a folder is on, whether other machines may write to it, and how far locks reach."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from catalog.build.toolchains import Facts, read_facts

MOUNTS = Path("/proc/self/mountinfo")

_ESCAPED = re.compile(r"\\([0-7]{3})")


class _Network(Facts):
    """The content of ``data/toolchains/file_systems.json``: network file systems, by the kernel's names.

    With those ``without_locks``, or mounted with such an option, a lock on a part of a file (fcntl) does not exclude
    other machines.
    """

    source: str
    network: dict[str, str]
    without_locks: frozenset[str]
    options_without_locks: frozenset[str]


@dataclass(frozen=True)
class FileSystem:
    """A file system: its type in the kernel's terms (empty if unknown), and whether machines share it.

    ``locks``: whether a lock on a part of a file excludes all who may use the file.
    """

    type: str
    network: bool
    locks: bool


def file_system(folder: Path, mounts: Path | None = None) -> FileSystem:
    """The file system of ``folder``, which need not exist yet.

    Args:
        folder: any folder.
        mounts: the kernel's table of mounts, by default :data:`MOUNTS`; without one (on systems other than Linux) the
            type is unknown.

    Raises:
        SpecError: the data file of network file systems is missing or malformed.
    """
    try:
        lines = (mounts or MOUNTS).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return FileSystem("", network=False, locks=True)
    place = folder.resolve()
    found, options, deepest = "", frozenset[str](), -1
    for line in lines:
        mount, type_, its_options = _parse(line)
        # Of two mounts at one point, the later one covers the earlier one.
        if len(mount.parts) >= deepest and place.is_relative_to(mount):
            found, options, deepest = type_, its_options, len(mount.parts)
    facts = read_facts(_Network, "toolchains/file_systems.json")
    network = found in facts.network
    locks = not network or (found not in facts.without_locks and options.isdisjoint(facts.options_without_locks))
    return FileSystem(found, network, locks)


def _parse(line: str) -> tuple[Path, str, frozenset[str]]:
    """Mount point, type and options of a line: ``36 35 98:0 /root /mnt/point rw shared:1 - ext4 /dev/sda rw``."""
    mount, _, source = line.partition(" - ")
    point = _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), mount.split(" ")[4])
    words = source.split(" ")
    return Path(point), words[0], frozenset(words[-1].split(","))
