"""The cache of compiled kernels: one folder, one library and one record per content key.

    <key>.so  <key>.json      the entry: it exists when the record does, and only as the record describes it
    locks/    tmp/            one file lock and one work folder per key
    logs/     scans/          output of failed compiles; which headers a source reaches (:mod:`catalog.build.keys`)
    guard/                    how the first runs of libraries ended (:mod:`catalog.build.first_runs`)

The library is renamed into place before its record, and a library that differs from its record is no entry. So a crash
between any two steps, a flipped bit and a truncated copy all read as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from catalog.build.processes import Interrupted
from catalog.build.resources import RESOURCES, Resources

_log = logging.getLogger(__name__)

_LOCK_WAIT_SECONDS = 0.5
_LOCK_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class ArtifactRecord:
    """One build, field by field the columns of the SQL table ``artifact``.

    ``log`` is the compiler's output; a failed build has no ``so_sha256``, no ``so_bytes`` and no resources. ``isa`` is
    what the compiler was asked for, ``compile_s`` in seconds, ``created`` ISO 8601, in UTC. ``kernel_id`` is empty for
    a library that is no row's, which the table leaves out.
    """

    key: str
    kernel_id: str
    arch: str
    toolchain: str
    isa: str
    flags: str
    status: Literal["built", "failed"]
    log: str
    so_sha256: str | None
    so_bytes: int | None
    compile_s: float
    created: str
    resources: Resources

    @property
    def columns(self) -> dict[str, Any]:
        """The record as one flat mapping, resources among the rest."""
        columns = asdict(self)
        columns |= columns.pop("resources")
        return columns

    @classmethod
    def from_columns(cls, columns: dict[str, Any]) -> ArtifactRecord:
        """The record of :attr:`columns`.

        Raises:
            TypeError: a column is missing, or there are others.
        """
        resources = Resources(**{name: columns.pop(name) for name in RESOURCES if name in columns})
        return cls(**columns, resources=resources)


@dataclass(frozen=True)
class Origin:
    """What a record also says of its library: the name that it was built under, which for a row is the kernel's, the
    number of its C ABI, and the SHA-256 of its emitted source.
    """

    kernel_name: str
    abi: int
    source: str


_ORIGIN = tuple(field.name for field in fields(Origin))


def _sync(path: Path) -> None:
    """Have the disk hold what ``path``, a file or a folder, contains."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Cache:
    """A content-addressed store of libraries in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scans = folder / "scans"
        self._locks, self._logs, self._tmp = (folder / name for name in ("locks", "logs", "tmp"))

    def create(self) -> None:
        """Create the folders that are not there yet, private to the user.

        Raises:
            OSError: the folder cannot be created.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.scans, self._locks, self._logs, self._tmp):
            folder.mkdir(exist_ok=True)

    def so_path(self, key: str) -> Path:
        """Where the library of ``key`` lies, or would lie."""
        return self.folder / f"{key}.so"

    def _record(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def log(self, key: str) -> Path:
        """Where the log of the last failed build of ``key`` lies, or would lie."""
        return self._logs / f"{key}.log"

    def load(self, key: str) -> ArtifactRecord | None:
        """The record of ``key``, checked against the library's bytes; None when there is no sound entry.

        Raises:
            OSError: the folder exists but cannot be read.
        """
        told = self.told(key)
        try:
            library = self.so_path(key).read_bytes()
        except FileNotFoundError:
            return None
        if told is None or told[0].so_sha256 != hashlib.sha256(library).hexdigest():
            return None
        return told[0]

    def told(self, key: str) -> tuple[ArtifactRecord, Origin | None] | None:
        """What the record file of ``key`` says, unchecked; None when there is none that can be read.

        Raises:
            OSError: the folder exists but cannot be read.
        """
        try:
            columns = json.loads(self._record(key).read_bytes())
            origin = {name: columns.pop(name) for name in _ORIGIN if name in columns}
            record = ArtifactRecord.from_columns(columns)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            _log.debug("%s: unreadable record: %s", self._record(key), error)
            return None
        if record.key != key:
            return None
        return record, Origin(**origin) if origin.keys() == set(_ORIGIN) else None

    @contextlib.contextmanager
    def lock(self, key: str, stop: threading.Event) -> Iterator[None]:
        """Hold the lock of ``key``, across threads and processes; it is released when its holder dies.

        Raises:
            Interrupted: ``stop`` was set while waiting.
            OSError: the cache folder cannot be written.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self._locks / f"{key}.lock")
        while True:
            if stop.is_set():
                raise Interrupted
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=_LOCK_WAIT_SECONDS, poll_interval=_LOCK_POLL_SECONDS)
                break
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def workspace(self, key: str) -> Iterator[Path]:
        """An empty folder, on the cache's file system, for the holder of the lock of ``key``.

        A builder that was killed leaves its folder behind; the next builder of the same key clears it.

        Raises:
            OSError: the cache folder cannot be written.
        """
        folder = self._tmp / key
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keys(self) -> set[str]:
        """The keys that have a record, sound or not.

        Raises:
            OSError: the folder exists but cannot be read.
        """
        try:
            return {name.removesuffix(".json") for name in os.listdir(self.folder) if name.endswith(".json")}
        except FileNotFoundError:
            return set()

    def publish(self, library: Path, record: ArtifactRecord, origin: Origin) -> None:
        """Make an entry of ``library``, a file in a :meth:`workspace`, and its record, for the holder of the lock.

        Raises:
            OSError: the disk is full, or the cache folder cannot be written.
        """
        self.put_library(library, record.key)
        # The record comes second: it is what makes the entry exist.
        self.put_record(record, origin)
        self.log(record.key).unlink(missing_ok=True)

    def put_library(self, library: Path, key: str) -> None:
        """The first half of :meth:`publish`: rename ``library`` into place.

        Raises:
            OSError: the disk is full, or the cache folder cannot be written.
        """
        _sync(library)
        os.replace(library, self.so_path(key))
        _sync(self.folder)

    def put_record(self, record: ArtifactRecord, origin: Origin) -> None:
        """The second half of :meth:`publish`: from now on the entry exists.

        Raises:
            OSError: the disk is full, or the cache folder cannot be written.
        """
        self._write(self._record(record.key), json.dumps({**asdict(origin), **record.columns}, indent=1))

    def remove(self, key: str) -> None:
        """Remove the entry of ``key``, its record first, for the holder of the lock.

        Raises:
            OSError: the cache folder cannot be written.
        """
        self._record(key).unlink(missing_ok=True)
        self.so_path(key).unlink(missing_ok=True)

    def keep_log(self, key: str, text: str) -> Path:
        """Keep the output of a failed build, for the holder of the lock of ``key``.

        Raises:
            OSError: the disk is full, or the cache folder cannot be written.
        """
        self._write(self.log(key), text)
        return self.log(key)

    def _write(self, path: Path, text: str) -> None:
        partial = self._tmp / path.name
        partial.write_text(text)
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)
