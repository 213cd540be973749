"""Which file system a folder is on, and whether other machines may write to it: this decides how to lock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from catalog.build.toolchains import Facts, read_facts
from catalog.settings import data_dir

MOUNTS = Path("/proc/self/mountinfo")

_ESCAPED = re.compile(r"\\([0-7]{3})")


class _Network(Facts):
    """The content of ``data/toolchains/file_systems.json``: network file systems, by the kernel's names."""

    source: str
    network: dict[str, str]


@dataclass(frozen=True)
class FileSystem:
    """A file system: its type in the kernel's terms (empty if unknown), and whether machines share it."""

    type: str
    network: bool


def file_system(folder: Path, mounts: Path = MOUNTS) -> FileSystem:
    """The file system of ``folder``, which need not exist yet.

    Args:
        folder: any folder.
        mounts: the kernel's table of mounts; without one (on systems other than Linux) the type is unknown.

    Raises:
        SpecError: the data file of network file systems is missing or malformed.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return FileSystem("", network=False)
    place = folder.resolve()
    found, deepest = "", -1
    for line in lines:
        mount, type_ = _parse(line)
        # Of two mounts at one point, the later one covers the earlier one.
        if len(mount.parts) >= deepest and place.is_relative_to(mount):
            found, deepest = type_, len(mount.parts)
    return FileSystem(found, found in read_facts(_Network, data_dir() / "toolchains" / "file_systems.json").network)


def _parse(line: str) -> tuple[Path, str]:
    """Mount point and type of a line: ``36 35 98:0 /root /mnt/point rw shared:1 - ext4 /dev/sda rw``."""
    mount, _, source = line.partition(" - ")
    point = _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), mount.split(" ")[4])
    return Path(point), source.split(" ")[0]
