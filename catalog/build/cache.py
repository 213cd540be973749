"""The cache of compiled kernels: one folder, one library and one record per content key.

    <key>.so  <key>.json      the entry: it exists if the record does and the library matches it
    locks/    tmp/            one file lock and one work folder per key
    logs/     scans/          output of failed compiles; headers that sources reach (:mod:`catalog.build.keys`)
    guard/  trials/           how the first runs of libraries ended (:mod:`catalog.build.first_runs`); toolchains that
                              work (:mod:`catalog.build.trials`)

The library is renamed into place before its record, and a library that differs from its record is not an entry. So
after a crash between any two steps, a flipped bit or a truncated copy, the entry counts as absent. The record includes
its own digest, and its modification time is the time of last use.

The folder must belong to the caller alone, which is checked before anything is read
(:mod:`catalog.build.permissions`). A read-only folder can serve its entries: only a build needs locks. What the folder
lacks may be installed (:mod:`catalog.build.installed`): such entries are served, too, and never written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from catalog.build.installed import installed_folders
from catalog.build.locks import Locks
from catalog.build.permissions import ANOTHER, make_private, require_private, require_safe
from catalog.build.resources import RESOURCES, Resources
from catalog.errors import CacheError
from catalog.files import UnsafeFileError, open_own, publish, put_in_place, read_own
from catalog.registry.rows import Amount, Digest, Name, Stamp, Text

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

MOST_LIBRARY_BYTES = 512 * 2**20
"""The largest kernels of AMD archs have a few MiB."""

MOST_RECORD_BYTES = 2**20


@dataclass(frozen=True)
class ArtifactRecord:
    """The record of one build; its fields are the columns of the SQL table ``artifact``.

    ``log`` is the compiler's output. A failed build has no ``so_sha256``, no ``so_bytes`` and no resources. ``isa`` is
    the ISA passed to the compiler, ``compile_s`` is in seconds, ``created`` is ISO 8601 in UTC. ``kernel_id`` is empty
    for a library that belongs to no row, which is not in the table.

    Records written by another process or machine are validated against these types: :meth:`from_columns`.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    key: Digest
    kernel_id: Name
    arch: Name
    toolchain: Text
    isa: Text
    flags: Text
    status: Literal["built", "failed"]
    log: Text
    so_sha256: Digest | None
    so_bytes: Annotated[int, Field(gt=0, le=MOST_LIBRARY_BYTES)] | None
    compile_s: Amount
    created: Stamp
    resources: Resources

    @property
    def columns(self) -> dict[str, Any]:
        """The record as one flat mapping, resources included."""
        columns = asdict(self)
        columns |= columns.pop("resources")
        return columns

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> ArtifactRecord:
        """The record with these :attr:`columns`.

        Raises:
            ValueError: a column is missing, unknown or invalid.
        """
        resources = {name: value for name, value in columns.items() if name in RESOURCES}
        others = {name: value for name, value in columns.items() if name not in RESOURCES}
        try:
            text = json.dumps({**others, "resources": resources})
        except TypeError as error:
            raise ValueError(str(error)) from None
        return _artifact_record().validate_json(text)


@dataclass(frozen=True)
class Origin:
    """The origin of a library: the name that it was built under (for a row the kernel's), the number of its C ABI, and
    the SHA-256 of its emitted source.
    """

    kernel_name: Text
    abi: int
    source: Digest


class RecordFile(BaseModel):
    """A record as a file has it, here and in a remote cache; ``sha256`` is the digest of the other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sha256: Digest
    origin: Origin
    record: ArtifactRecord

    @classmethod
    def of(cls, record: ArtifactRecord, origin: Origin) -> RecordFile:
        """The file of ``record`` and ``origin``."""
        content = json.dumps([asdict(origin), asdict(record)], sort_keys=True)
        return cls.model_construct(sha256=hashlib.sha256(content.encode()).hexdigest(), origin=origin, record=record)

    def check(self, key: str) -> None:
        """Check that this is what was written for ``key``.

        Raises:
            DamagedEntry: it is not.
        """
        if self.sha256 != RecordFile.of(self.record, self.origin).sha256:
            raise DamagedEntry("its record differs from the one that was written")
        if self.record.key != key:
            raise DamagedEntry("its record belongs to another library")


@functools.cache
def _artifact_record() -> TypeAdapter[ArtifactRecord]:
    return TypeAdapter(ArtifactRecord)


def subject_of(record: ArtifactRecord, origin: Origin) -> str:
    """What a library was built for, whichever compiler made it: a row, by its id, or else a helper."""
    return record.kernel_id or helper_subject(origin.kernel_name, record.arch, origin.source)


def helper_subject(name: str, arch: str, source: str) -> str:
    """The subject of a library without a row, with this name and this digest of its source."""
    return f"{name} {arch} {source}"


class DamagedEntry(Exception):
    """An entry that differs from its record; the text says how."""


_used: set[Path] = set()
"""Records whose time of last use this process has renewed."""


class Entries:
    """The entries in ``folder``, for reading."""

    require: Callable[[Path], None] = staticmethod(require_safe)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def so_path(self, key: str) -> Path:
        """Path of the library of ``key``, whether or not it exists."""
        return self.folder / f"{key}.so"

    def record_path(self, key: str) -> Path:
        """Path of the record of ``key``, whether or not it exists."""
        return self.folder / f"{key}.json"

    def keys(self) -> set[str]:
        """The keys that have a record, valid or not.

        Raises:
            OSError: the folder exists but cannot be read.
        """
        try:
            return {name.removesuffix(".json") for name in os.listdir(self.folder) if name.endswith(".json")}
        except FileNotFoundError:
            return set()

    def read(self, key: str) -> tuple[ArtifactRecord, Origin]:
        """The contents of the record file of ``key``, not checked against the library.

        Raises:
            DamagedEntry: the record is invalid.
            OSError: there is none, or it cannot be read.
        """
        try:
            found = RecordFile.model_validate_json(read_own(self.record_path(key), MOST_RECORD_BYTES))
        except UnsafeFileError as error:
            raise DamagedEntry(f"its record cannot be read: {error.strerror}") from None
        except ValueError:
            raise DamagedEntry("its record is damaged") from None
        found.check(key)
        return found.record, found.origin

    def check(self, key: str) -> ArtifactRecord:
        """The record of ``key``, checked against the library's bytes.

        Raises:
            CacheError: others have access to the folder.
            DamagedEntry: they differ, or others may write to the library.
            OSError: there is no entry, or it cannot be read.
        """
        self.require(self.folder)
        record, _ = self.read(key)
        try:
            with open_own(self.so_path(key), record.so_bytes or 0) as library:
                info = os.fstat(library.fileno())
                writable = info.st_mode & stat.S_IWOTH
                digest = hashlib.sha256(library.read(info.st_size + 1)).hexdigest()
        except FileNotFoundError:
            raise DamagedEntry("its library is missing") from None
        except UnsafeFileError as error:
            raise DamagedEntry(f"its library cannot be read: {error.strerror}") from None
        if record.so_sha256 != digest:
            raise DamagedEntry("its library differs from the one that was built")
        if writable:
            raise DamagedEntry("anybody may write to its library")
        return record


class Cache(Entries):
    """A content-addressed store of libraries in ``folder``, and the installed ones, which are only read."""

    require = staticmethod(require_private)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._found: dict[str, Path] = {}
        self.scans, self.logs, self.tmp, self.trials = (folder / name for name in ("scans", "logs", "tmp", "trials"))
        self.locks = Locks(folder / "locks")
        self._created = False

    def create(self) -> None:
        """Check or create the folder, once.

        Raises:
            CacheError: others have access to it.
            OSError: it does not exist and cannot be created.
        """
        if self._created:
            return
        try:
            self._create()
        except OSError as error:
            if not self.folder.is_dir():
                raise
            _log.debug("%s: %s", self.folder, error)  # a read-only folder can still be read
        self._created = True

    def _create(self) -> None:
        if not self.folder.is_dir():
            make_private(self.folder)
        require_private(self.folder)
        for folder in (self.scans, self.locks.folder, self.logs, self.tmp, self.trials):
            folder.mkdir(mode=0o700, exist_ok=True)
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise CacheError(f"{folder} is a link, not a folder", hint=f"Remove it. Or: {ANOTHER}")

    def log(self, key: str) -> Path:
        """Path of the log of the last failed build of ``key``, whether or not it exists."""
        return self.logs / f"{key}.log"

    def load(self, key: str) -> ArtifactRecord | None:
        """As :meth:`check`, of this folder or else of the installed libraries; None when there is no intact entry.

        Raises:
            CacheError: others have access to the folder.
            OSError: the folder exists but cannot be read.
        """
        return self._sound(lambda entries: entries.check(key), key)

    def loaded_path(self, key: str) -> Path:
        """Path of the library that :meth:`load` found for ``key``."""
        return self._found.get(key, self.so_path(key))

    def use(self, key: str) -> None:
        """Record that ``key`` is used now, once per process; does nothing in a read-only folder."""
        record = self.record_path(key)
        if record not in _used:
            _used.add(record)
            with contextlib.suppress(OSError):
                os.utime(record)

    def read_record(self, key: str) -> tuple[ArtifactRecord, Origin] | None:
        """As :meth:`read`, of this folder or else of the installed libraries; None when there is no valid record.

        Raises:
            OSError: the folder exists but cannot be read.
        """
        return self._sound(lambda entries: entries.read(key), key)

    def _sound(self, read: Callable[[Entries], _T], key: str) -> _T | None:
        """The first result of ``read`` on an intact entry, in this folder or else among the installed ones, or None."""
        for entries in self._places():
            try:
                found = read(entries)
            except FileNotFoundError:
                continue
            except DamagedEntry as damage:
                _log.debug("%s: %s", entries.record_path(key), damage)
                continue
            self._found[key] = entries.so_path(key)
            return found
        return None

    def _places(self) -> Iterator[Entries]:
        yield self
        yield from map(Entries, installed_folders())

    @contextlib.contextmanager
    def lock(self, key: str, stop: threading.Event) -> Iterator[None]:
        """As :meth:`Locks.hold`.

        Raises:
            Interrupted: ``stop`` was set while waiting.
            CacheError: others have access to the cache folder.
            OSError: it cannot be written.
        """
        self._create()
        with self.locks.hold(key, stop):
            yield

    @contextlib.contextmanager
    def workspace(self, key: str) -> Iterator[Path]:
        """An empty folder on the cache's file system, for the holder of the lock of ``key``.

        A builder that was killed leaves its folder behind; the next builder of the same key clears it.

        Raises:
            OSError: the cache folder cannot be written.
        """
        if self.locks.exclusive:
            for left in self.tmp.glob(f"{key}*"):
                delete(left)
        folder = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=self.tmp))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def all_keys(self) -> set[str]:
        """The keys that have a record in this folder or among the installed libraries, valid or not.

        Raises:
            OSError: the folder exists but cannot be read.
        """
        return {key for entries in self._places() for key in entries.keys()}  # noqa: SIM118 - no mapping

    def publish(self, library: Path, record: ArtifactRecord, origin: Origin) -> None:
        """Make an entry of ``library``, a file in a :meth:`workspace`, and its record; the caller holds the lock.

        Raises:
            OSError: the disk is full, or the cache folder cannot be written; no entry is made then.
        """
        self.put_library(library, record.key)
        try:
            # The record comes second, because the entry exists as soon as the record does.
            self.put_record(record, origin)
        except OSError:
            self.remove(record.key)
            raise
        self.log(record.key).unlink(missing_ok=True)

    def put_library(self, library: Path, key: str) -> None:
        """The first half of :meth:`publish`: rename ``library`` into place.

        Raises:
            OSError: the disk is full, or the cache folder cannot be written.
        """
        library.chmod(0o700)
        put_in_place(library, self.so_path(key))

    def put_record(self, record: ArtifactRecord, origin: Origin) -> None:
        """The second half of :meth:`publish`: from now on the entry exists.

        Raises:
            OSError: the disk is full, or the cache folder cannot be written.
        """
        publish(self.record_path(record.key), RecordFile.of(record, origin).model_dump_json(indent=1), mode=0o600)

    def remove(self, key: str) -> None:
        """Remove the entry of ``key``, its record first; the caller holds the lock.

        Raises:
            OSError: the cache folder cannot be written.
        """
        for path in (self.record_path(key), self.so_path(key)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def keep_log(self, key: str, text: str) -> Path:
        """Store the output of a failed build; the caller holds the lock of ``key``.

        Raises:
            OSError: the disk is full, or the cache folder cannot be written.
        """
        publish(self.log(key), text.encode(errors="replace"), mode=0o600)
        return self.log(key)


def delete(path: Path) -> None:
    """Remove a file or a folder, if it exists and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
