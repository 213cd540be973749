"""Wheels with compiled kernels and their timings: packages whose entries the cache finds by an entry point.

They are what :mod:`catalog.build.installed` looks for. The layout is that of PEP 427. Equal libraries and timings make
equal files: members have no dates and a fixed order.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import sysconfig
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from catalog.build.bundle import FORMAT, Entry, Manifest, abi, library_of
from catalog.build.cache import MOST_RECORD_BYTES, Cache
from catalog.build.installed import GROUP, MANIFEST
from catalog.build.manylinux import policy_of
from catalog.errors import BundleError, UsageError
from catalog.files import published, read_own
from catalog.registry.rows import Timing
from catalog.units import format_size

DISTRIBUTION = "kernel-catalog"
"""The distribution of this package, which wheels require in its exact version."""

_MEMBER_BYTES = 1024
"""More than a member takes besides its content, its line in RECORD included."""

_METADATA_BYTES = 8192
"""More than the members take that are no entries."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_MACHINES = {62: "x86_64", 183: "aarch64"}
"""Names of machines in platform tags, by e_machine of ELF."""


@dataclass(frozen=True)
class Wheel:
    """A wheel to write.

    Attributes:
        name: normalised name of the distribution.
        platform: its platform tag.
        about: a one-line summary.
        entries: the libraries.
        timings: their timings.
    """

    name: str
    platform: str
    about: str
    entries: Sequence[Entry]
    timings: Sequence[Timing]

    @property
    def package(self) -> str:
        """The package with the entries."""
        return f"catalog_libraries_{self.name.replace('-', '_')}"

    @property
    def manifest(self) -> bytes:
        """What a catalog records of the libraries, as of the newest of them: equal wheels have equal manifests."""
        entries = tuple(sorted(self.entries, key=lambda entry: entry.artifact.key))
        created = max(entry.artifact.created for entry in entries)
        timings = tuple(self.timings)
        return (
            Manifest(format=FORMAT, abi=abi(), created=created, entries=entries, timings=timings)
            .model_dump_json()
            .encode()
        )

    @property
    def file(self) -> str:
        """The file name."""
        return f"{self.name.replace('-', '_')}-{version(DISTRIBUTION)}-py3-none-{self.platform}.whl"


def check_name(name: str) -> str:
    """The normalised name of a distribution.

    Raises:
        UsageError: no distribution can have it.
    """
    normalised = re.sub(r"[-_.]+", "-", name).lower()
    if not _NAME.fullmatch(normalised) or normalised == DISTRIBUTION:
        raise UsageError(f"{name!r} is not a name for a wheel", hint=f"As in: {DISTRIBUTION}-gfx942.")
    return normalised


def parts(
    entries: Iterable[Entry], timings: Mapping[str, Sequence[Timing]], cache: Cache, most_bytes: int
) -> Iterator[list[Entry]]:
    """The entries in groups, in order, each of which fits into a wheel of at most ``most_bytes``.

    ``timings`` has those of each library by its key.

    Raises:
        UsageError: one library alone does not fit.
    """
    part, left = list[Entry](), 0
    for entry in entries:
        stated = (entry, *timings.get(entry.artifact.key, ()))
        manifest = "".join(row.model_dump_json() for row in stated).encode()
        content = (library_of(entry, cache), _record_of(entry, cache), manifest)
        size = sum(len(zlib.compress(data)) + _MEMBER_BYTES for data in content)
        if size > most_bytes - _METADATA_BYTES:
            raise UsageError(
                f"the library of {entry.name} alone takes {format_size(size)}, more than a wheel of "
                f"{format_size(most_bytes)} has room for",
                hint="Choose a larger --max-size.",
            )
        if not part or size > left:
            if part:
                yield part
            part, left = [], most_bytes - _METADATA_BYTES
        part.append(entry)
        left -= size
    if part:
        yield part


def platform_of(entries: Iterable[Entry], cache: Cache) -> str:
    """The platform tag of the libraries: of the machine that they were compiled for, else of this one.

    It is the oldest ``manylinux`` tag that they meet, or ``linux``, which no index accepts, if they need libraries that
    not every distribution has.

    Raises:
        UsageError: they were compiled for several machines.
        BundleError: a library has changed.
    """
    numbers: set[int] = set()

    def elf_files() -> Iterator[bytes]:
        for entry in entries:
            content = library_of(entry, cache)
            is_elf = content[:4] == b"\x7fELF"
            numbers.add(struct.unpack_from("<H", content, 18)[0] if is_elf else 0)
            if is_elf:
                yield content

    policy = policy_of(elf_files())
    if len(numbers) > 1:
        raise UsageError("the libraries are of several kinds of machines", hint="Choose one arch: --arch x86_64_v3")
    machine = _MACHINES.get(*numbers)
    if machine is None:
        return re.sub(r"[-.]", "_", sysconfig.get_platform())
    return f"{policy or 'linux'}_{machine}"


def write_wheel(folder: Path, wheel: Wheel, cache: Cache) -> Path:
    """Write ``wheel`` to ``folder`` and return its path; a file of that name is replaced.

    Raises:
        BundleError: a library changed meanwhile, or the file cannot be written; it is unchanged then.
    """
    path = folder / wheel.file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with published(path) as file, zipfile.ZipFile(file, "w") as archive:
            recorded = [_added(archive, name, content) for name, content in _members(wheel, cache)]
            record = f"{_information(wheel)}/RECORD"
            _added(archive, record, "".join([*recorded, f"{record},,\n"]).encode())
    except OSError as error:
        raise BundleError(f"{error.filename or path}: {error.strerror}", hint="Choose another folder.") from None
    return path


def _members(wheel: Wheel, cache: Cache) -> Iterator[tuple[str, bytes]]:
    yield f"{wheel.package}/__init__.py", f'"""{wheel.about}."""\n'.encode()
    for entry in sorted(wheel.entries, key=lambda entry: entry.artifact.key):
        yield f"{wheel.package}/{entry.artifact.key}.so", library_of(entry, cache)
        yield f"{wheel.package}/{entry.artifact.key}.json", _record_of(entry, cache)
    yield f"{wheel.package}/{MANIFEST}", wheel.manifest
    made_by = version(DISTRIBUTION)
    for name, lines in (
        ("METADATA", (
            "Metadata-Version: 2.1", f"Name: {wheel.name}", f"Version: {made_by}", f"Summary: {wheel.about}",
            "Requires-Python: >=3.10", f"Requires-Dist: {DISTRIBUTION}=={made_by}",
        )),
        ("WHEEL", (
            "Wheel-Version: 1.0", f"Generator: {DISTRIBUTION} {made_by}", "Root-Is-Purelib: false",
            f"Tag: py3-none-{wheel.platform}",
        )),
        ("entry_points.txt", (f"[{GROUP}]", f"{wheel.name} = {wheel.package}")),
    ):  # fmt: skip
        yield f"{_information(wheel)}/{name}", "".join(f"{line}\n" for line in lines).encode()


def _record_of(entry: Entry, cache: Cache) -> bytes:
    return read_own(cache.loaded_path(entry.artifact.key).with_suffix(".json"), MOST_RECORD_BYTES)


def _information(wheel: Wheel) -> str:
    return wheel.file.rpartition("-py3-")[0] + ".dist-info"


def _added(archive: zipfile.ZipFile, name: str, content: bytes) -> str:
    """Add a member and return its line for RECORD."""
    member = zipfile.ZipInfo(name)
    member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
    archive.writestr(member, content)
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"
