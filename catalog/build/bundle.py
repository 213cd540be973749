"""Bundles: built libraries and their records in one file, so that one machine builds for many.

A bundle is a zip archive of ``manifest.json`` and ``libraries/<key>.so``. Its comment, the last 64 bytes of the file,
is the SHA-256, in hex, of all bytes before it: a damaged bundle is refused before it is read as an archive. The
manifest has the digest of every library, so each library is certain to be the one that was built.

Digests detect damage, not intent: a bundle is code that will run, so it must come from a trusted source.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from catalog.build.cache import MOST_LIBRARY_BYTES, ArtifactRecord, Cache, Origin
from catalog.build.keys import abi_number
from catalog.build.targets import BUILD_DIR
from catalog.errors import BundleError
from catalog.files import open_given, parse_json, published, read_own
from catalog.messages import expected
from catalog.ops import AnyKernel
from catalog.registry.rows import Digest, Row, Text, Timing, is_future

FORMAT = 1
"""Increase it when the manifest or the members change."""

MOST_MANIFEST_BYTES = 256 * 2**20
MOST_BUNDLE_BYTES = 64 * 2**30

_MANIFEST = "manifest.json"
_SEAL_BYTES = 64
_CHUNK = 2**20
_READ_ERRORS: tuple[type[Exception], ...] = (
    *(OSError, EOFError, ValueError, KeyError, OverflowError, RuntimeError, struct.error),
    *(zipfile.BadZipFile, zlib.error),
)
"""Exceptions of zipfile for malformed archives."""


class Entry(Row):
    """A library: the row that it was built from, the row's name, its build record, and the digest of its source."""

    kernel: AnyKernel
    name: Text
    artifact: ArtifactRecord
    source: Digest

    @property
    def member(self) -> str:
        """Its file name in the archive."""
        return f"libraries/{self.artifact.key}.so"


class Manifest(Row):
    """The contents of a bundle: its format, the C ABI of its libraries, and an entry for each."""

    format: int
    abi: int
    created: str
    entries: tuple[Entry, ...]
    timings: tuple[Timing, ...]


def abi() -> int:
    """The number of this version's C ABI.

    Raises:
        BuildError: its header cannot be read.
    """
    return abi_number(BUILD_DIR / "abi" / "catalog_abi.h")


def write_bundle(path: Path, manifest: Manifest, cache: Cache) -> int:
    """Write the entries of ``manifest``, with their libraries from ``cache``, to ``path``; return the size in bytes.

    Raises:
            BundleError: a library changed meanwhile, or the file cannot be written; no file is left then.
    """
    try:
        with published(path) as file:
            _write(file, manifest, cache)
        return path.stat().st_size
    except OSError as error:
        raise BundleError(f"{error.filename or path}: {error.strerror}", hint="Choose another file.") from None


def _write(file: BinaryIO, manifest: Manifest, cache: Cache) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.comment = b"0" * _SEAL_BYTES
        archive.writestr(_member(_MANIFEST), manifest.model_dump_json(indent=1))
        for entry in manifest.entries:
            archive.writestr(_member(entry.member), library_of(entry, cache))
    file.flush()
    size = file.seek(0, os.SEEK_END) - _SEAL_BYTES
    file.seek(size)
    file.write(_digest(file, size).encode())


def library_of(entry: Entry, cache: Cache) -> bytes:
    """The library of an entry from ``cache``, which has loaded it.

    Raises:
        BundleError: it has changed since then.
        OSError: it cannot be read.
    """
    path = cache.loaded_path(entry.artifact.key)
    library = read_own(path, MOST_LIBRARY_BYTES)
    if hashlib.sha256(library).hexdigest() != entry.artifact.so_sha256:
        raise BundleError(f"{path} has changed", hint="Build it again, then export.")
    return library


def _member(name: str) -> zipfile.ZipInfo:
    """A member without a date, so that equal bundles have equal bytes."""
    member = zipfile.ZipInfo(name)
    member.compress_type = zipfile.ZIP_DEFLATED
    return member


def _digest(file: BinaryIO, size: int) -> str:
    """The SHA-256 of the first ``size`` bytes; the file is left positioned after them."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (data := file.read(min(size, _CHUNK))):
        digest.update(data)
        size -= len(data)
    return digest.hexdigest()


class Bundle:
    """A checked bundle that fits this version and this machine; see :func:`open_bundle`."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, manifest: Manifest) -> None:
        self.manifest = manifest
        self._path = path
        self._archive = archive

    def content_of(self, entry: Entry) -> bytes:
        """The bytes of a library, checked against its digest.

        Raises:
            BundleError: its digest differs.
        """
        library = _read(self._archive, entry.member, entry.artifact.so_bytes or 0, self._path)
        if hashlib.sha256(library).hexdigest() != entry.artifact.so_sha256:
            raise BundleError(f"{self._path}: {entry.member} differs from the manifest's digest")
        return library


@contextlib.contextmanager
def open_bundle(path: Path, why_not_here: Callable[[str, str], str | None]) -> Iterator[Bundle]:
    """Open a bundle and check all of it without writing anything.

    Args:
        path: path of the file.
        why_not_here: returns why a library of an arch and an ISA does not fit this machine; None if it does.

    Raises:
        BundleError: it is damaged, has another format or ABI, is for an arch that this version does not know or an ISA
            that this CPU does not run, or its members or its manifest are invalid.
    """
    try:
        file = open_given(path, MOST_BUNDLE_BYTES)
    except FileNotFoundError:
        raise BundleError(f"there is no file {path}") from None
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from None
    with file:
        _check_seal(file, path)
        try:
            archive = zipfile.ZipFile(file)
        except _READ_ERRORS as error:
            raise BundleError(f"{path} is not a bundle: {error}") from None
        manifest = parsed_manifest(_read(archive, _MANIFEST, MOST_MANIFEST_BYTES, path), path)
        _check(manifest, why_not_here, path)
        _check_members(archive, manifest, path)
        bundle = Bundle(path, archive, manifest)
        for entry in manifest.entries:
            bundle.content_of(entry)
        yield bundle


def _check_seal(file: BinaryIO, path: Path) -> None:
    try:
        size = file.seek(0, os.SEEK_END) - _SEAL_BYTES
        sound = size > 0 and _digest(file, size).encode() == file.read()
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from None
    if not sound:
        raise BundleError(f"{path} is not a bundle, or is damaged", hint="Copy or export it again.")


def _read(archive: zipfile.ZipFile, name: str, most: int, path: Path) -> bytes:
    """Read a member whose stated and actual size is at most ``most`` bytes."""
    try:
        if archive.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BundleError(f"{path}: {name} is compressed with a method that bundles do not use")
        with archive.open(name) as member:
            data = member.read(most + 1)
    except _READ_ERRORS as error:
        raise BundleError(f"{path}: {name} cannot be read: {error}") from None
    if len(data) > most:
        raise BundleError(f"{path}: {name} has more than {most:,} bytes")
    return data


def parsed_manifest(data: bytes, path: Path) -> Manifest:
    """The manifest in ``data``, of the bundle or the folder ``path``.

    Raises:
        BundleError: it is invalid, or of another format.
    """
    try:
        found = parse_json(data)
    except ValueError as error:
        raise BundleError(f"{path}: {_MANIFEST} is {error}") from None
    stated = found.get("format") if isinstance(found, dict) else None
    if stated != FORMAT:
        raise BundleError(
            f"{path} has format {stated!r}; this version knows {FORMAT}", hint="Upgrade, or export again."
        )
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BundleError(f"{path}: {_MANIFEST}: {place}: {expected(first)}") from None


def _check(manifest: Manifest, why_not_here: Callable[[str, str], str | None], path: Path) -> None:
    if manifest.abi != abi():
        raise BundleError(
            f"{path}: its libraries have ABI {manifest.abi}; this version has ABI {abi()}",
            hint="Export it again with this version.",
        )
    for entry in manifest.entries:
        wrong = _what_is_wrong(entry, why_not_here)
        if wrong is not None:
            raise BundleError(f"{path}: kernel {entry.name[:500]}: {wrong}")
    keys = {entry.artifact.key for entry in manifest.entries}
    if len(keys) < len(manifest.entries):
        raise BundleError(f"{path}: a library is listed twice")
    for timing in manifest.timings:
        if timing.artifact_key not in keys:
            raise BundleError(f"{path}: a timing belongs to no library of the bundle: {timing.problem[:200]!r}")


def _what_is_wrong(entry: Entry, why_not_here: Callable[[str, str], str | None]) -> str | None:
    artifact = entry.artifact
    if artifact.status != "built" or artifact.so_sha256 is None or artifact.so_bytes is None:
        return "its record is not that of a successful build"
    if is_future(artifact.created):
        return f"it was built in the future, {artifact.created}"
    if (entry.kernel.id, entry.kernel.arch) != (artifact.kernel_id, artifact.arch):
        return "its record belongs to another row"
    return why_not_here(artifact.arch, artifact.isa)


def _check_members(archive: zipfile.ZipFile, manifest: Manifest, path: Path) -> None:
    sizes = {entry.member: entry.artifact.so_bytes for entry in manifest.entries}
    members = [info for info in archive.infolist() if info.filename != _MANIFEST]
    for info in members:
        if info.filename not in sizes:
            raise BundleError(f"{path}: {info.filename!r} is not in the manifest")
        if info.file_size != sizes[info.filename]:
            raise BundleError(f"{path}: {info.filename} has {info.file_size:,} bytes, not {sizes[info.filename]:,}")
    if len(archive.infolist()) != len(sizes) + 1:
        raise BundleError(f"{path}: its members differ from those of the manifest")


@contextlib.contextmanager
def placed(bundle: Bundle, cache: Cache) -> Iterator[Sequence[str]]:
    """Put the libraries that ``cache`` lacks into it, all records after all libraries, and yield their keys.

    If the body raises, or not all can be placed, those already placed are removed again.

    Raises:
        BundleError: the cache cannot be written.
    """
    done: list[str] = []
    stop = threading.Event()
    try:
        cache.create()
        with cache.lock("import", stop):
            missing = {e.artifact.key: e for e in bundle.manifest.entries if cache.load(e.artifact.key) is None}
            with cache.workspace("import") as folder:
                _place(bundle, missing, cache, folder, done)
            yield done
    except BaseException as error:
        for key in done:
            with contextlib.suppress(OSError), cache.lock(key, stop):
                cache.remove(key)
        if isinstance(error, OSError):
            raise BundleError(f"{error.filename or cache.folder}: {error.strerror}") from None
        raise


def _place(bundle: Bundle, missing: Mapping[str, Entry], cache: Cache, folder: Path, done: list[str]) -> None:
    stop = threading.Event()
    for key, entry in missing.items():  # a full disk shows here, before any record is published
        (folder / key).write_bytes(bundle.content_of(entry))
    for key in missing:
        with cache.lock(key, stop):
            if cache.load(key) is None:
                done.append(key)
                cache.put_library(folder / key, key)
    for key in done:
        entry = missing[key]
        with cache.lock(key, stop):
            if cache.load(key) is None:  # another build of the same key may have published it meanwhile
                cache.put_record(entry.artifact, Origin(entry.name, bundle.manifest.abi, entry.source))
