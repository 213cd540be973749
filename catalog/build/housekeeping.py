"""Maintenance of the cache: listing its entries, finding damage, dropping what is no longer needed.

Entries in use are never dropped: a builder holds the entry's lock, and a process that has loaded a library holds a
shared lock on its file (:mod:`catalog.runtime.devices.loading`). On a network file system, where such a lock may be
invisible, entries used within a day count as in use. The record is deleted first, then the library: after a kill in
between, the entry is absent, and the library is a leftover for the next collection.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path

from catalog.build.cache import Cache, DamagedEntry, delete
from catalog.build.first_runs import FirstRuns
from catalog.build.permissions import ANOTHER
from catalog.errors import CacheError
from catalog.files import PARTIAL_PREFIX
from catalog.forks import Lock
from catalog.messages import counted
from catalog.registry.connection import connect
from catalog.registry.transactions import transaction
from catalog.settings import settings
from catalog.units import format_size

DAY_SECONDS = 86_400.0
RECENT_SECONDS = 3_600.0
"""The size cap keeps entries used within an hour: compiling the kernels of one plan may take that long."""

OLD_SECONDS = 30 * DAY_SECONDS
"""Age at which logs of failed builds, stored scans and trials are deleted: they only save time."""

_SHARE = 16
"""A process may exceed the size cap by 1/_SHARE of it before it scans the folder again."""

_log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """A library of the cache: ``bytes`` includes its record, ``compile_s`` is in seconds, times are ISO 8601 in UTC.

    Fields that only a record has are None if the record is damaged.
    """

    key: str
    kernel: str | None
    arch: str | None
    bytes: int
    compile_s: float | None
    created: str | None
    last_used: str


@dataclass(frozen=True)
class Damage:
    """An entry that differs from its record, and why; ``deleted`` if it was deleted."""

    key: str
    kernel: str | None
    reason: str
    deleted: bool

    @property
    def about(self) -> str:
        """What is damaged, why, and what happens to it, in one line."""
        fate = "deleted" if self.deleted else "the next build replaces it"
        return f"{self.key}  {self.kernel or '?'}: {self.reason}; {fate}"


@dataclass(frozen=True)
class Collected:
    """What was dropped (or would be): libraries by key, other files; and what is left."""

    dropped: tuple[str, ...]
    dropped_bytes: int
    in_use: int
    leftovers: int
    left: int
    left_bytes: int

    @property
    def about(self) -> str:
        """What was dropped and what is left, as the continuation of a verb."""
        kept = f", {self.in_use:,} in use were kept" if self.in_use else ""
        return (
            f"{counted(len(self.dropped), 'library')} ({format_size(self.dropped_bytes)}) and "
            f"{counted(self.leftovers, 'other file')}{kept}; "
            f"left: {counted(self.left, 'library')} ({format_size(self.left_bytes)})"
        )


@dataclass
class _Files:
    """Files of one key: bytes of record and library, time of last use in seconds since 1970, and which files exist."""

    bytes: int = 0
    last_used: float = 0.0
    has_record: bool = False
    has_library: bool = False


def entries(cache: Cache) -> list[Entry]:
    """All entries, last used first; empty if there is no folder.

    Raises:
        CacheError: the folder cannot be read.
    """
    with _errors(cache):
        found = [(key, files) for key, files in _scan(cache).items() if files.has_record]
        found.sort(key=lambda item: item[1].last_used, reverse=True)
        return [_entry(cache, key, files) for key, files in found]


def verify(cache: Cache, *, delete: bool = False) -> list[Damage]:
    """Check every library against its record; return damaged entries, deleted if requested and not in use.

    Raises:
        CacheError: the folder cannot be read; or, to delete, not be written; or others have access to it.
    """
    with _errors(cache):
        if not cache.folder.is_dir():
            return []
        cache.create()
        sweep = _Sweep(cache)
        found = sorted((key, files) for key, files in _scan(cache).items() if files.has_record)
        damages = []
        for key, files in found:
            reason = _reason(cache, key)
            if reason is not None:
                damages.append(Damage(key, _entry(cache, key, files).kernel, reason, delete and sweep.drop(key, files)))
        return damages


def collect(
    cache: Cache, max_bytes: int | None = None, older_than: float | None = None, *, dry_run: bool = False
) -> Collected:
    """Drop entries unused for ``older_than`` seconds, then the least recently used until ``max_bytes`` are left.

    Leftovers are always removed: those of killed builders after a day, logs, stored scans and trials after a month, and
    lock files that nobody holds.

    Args:
        cache: the cache to collect.
        max_bytes: limit for libraries and records together; None for no limit.
        older_than: seconds since the last use; None for any age.
        dry_run: report what would be dropped, and keep it.

    Raises:
        CacheError: the folder cannot be written, or others have access to it.
    """
    return _collect(_Sweep(cache, dry_run=dry_run), max_bytes, older_than)


def clear(cache: Cache) -> Collected:
    """Drop everything that is not in use.

    Raises:
        CacheError: the folder cannot be written, or others have access to it.
    """
    return _collect(_Sweep(cache, young=0.0, old=0.0), 0, None)


class SizeCap:
    """Keeps the libraries of a cache below ``CATALOG_CACHE_MAX_BYTES``, by running :func:`collect` when needed.

    Scanning the whole folder at every build would be slow. So a process scans it at its first build, and again whenever
    it has added 1/:data:`_SHARE` of the cap; each sweep frees that much room. Libraries in use are kept, as in
    :func:`collect`, and so are those used within :data:`RECENT_SECONDS`, which may not be loaded yet.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._room = 0
        self._dropped: list[str] = []
        self._lock = Lock()

    def grew(self, added: int) -> None:
        """Count ``added`` published bytes and sweep if needed; a folder that cannot be swept stays unchanged."""
        cap = settings().cache_max_bytes
        with self._lock:
            self._room -= added
            if not cap or self._room > 0:
                return
            self._room = cap // _SHARE
            try:
                if sum(files.bytes for files in _scan(self._cache).values()) > cap:
                    done = _collect(_Sweep(self._cache, recent=RECENT_SECONDS), cap - cap // _SHARE, None)
                    self._dropped += done.dropped
                    _log.info("%s: dropped the %d least recently used libraries", self._cache.folder, len(done.dropped))
            except (OSError, CacheError) as error:
                _log.warning("the cache %s cannot be kept below %d bytes: %s", self._cache.folder, cap, error)

    def take_dropped(self) -> list[str]:
        """The keys dropped since the last call, for the registry."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        return dropped


def sync_registry(cache: Cache, catalog: Path) -> int:
    """Update which libraries are in the cache in the catalog's file, if it exists; return the number of changed rows.

    Raises:
        CacheError: the cache folder cannot be read.
        RegistryError: the file cannot be written, or is not a catalog.
    """
    if not catalog.is_file():
        return 0
    with _errors(cache):
        present = [(key,) for key, files in _scan(cache).items() if files.has_record and files.has_library]
    connection = connect(catalog)
    try:
        connection.execute("CREATE TEMP TABLE present (key TEXT PRIMARY KEY) WITHOUT ROWID")
        connection.executemany("INSERT INTO present VALUES (?)", present)
        with transaction(connection):
            gone = connection.execute(
                "UPDATE artifact SET dropped = ? WHERE status <> 'failed' AND NOT elsewhere AND dropped IS NULL "
                "AND key NOT IN (SELECT key FROM present)",
                (_iso(time.time()),),
            ).rowcount
            back = connection.execute(
                "UPDATE artifact SET dropped = NULL WHERE dropped IS NOT NULL AND key IN (SELECT key FROM present)"
            ).rowcount
    finally:
        connection.close()
    return gone + back


class _Sweep:
    """One pass through the cache, and what it dropped.

    ``young`` is the age in seconds below which a file without a record may belong to a running builder; ``old`` is the
    age from which logs, scans and trials are deleted; an entry counts as in use, by any process, for ``recent`` seconds
    after its last use.
    """

    def __init__(
        self,
        cache: Cache,
        young: float = DAY_SECONDS,
        old: float = OLD_SECONDS,
        dry_run: bool = False,
        recent: float = 0.0,
    ) -> None:
        self.cache = cache
        self.now = time.time()
        self.dropped: list[str] = []
        self.dropped_bytes = self.in_use = self.leftovers = 0
        self._young, self._old, self._dry_run = young, old, dry_run
        self._recent = recent if cache.locks.exclusive else max(recent, DAY_SECONDS)

    def drop(self, key: str, files: _Files) -> bool:
        """Drop the entry of ``key``, unless it is in use or used since ``files`` was read; return whether it went."""
        library = self.cache.so_path(key)
        with self.cache.locks.try_hold(key) as held, _alone(library) as alone:
            if not held or not alone or self._used_again(key, files):
                self.in_use += 1
                return False
            if not self._dry_run:
                self.cache.remove(key)
            self.cache.locks.forget(key)
        self.dropped.append(key)
        self.dropped_bytes += files.bytes
        return True

    def _used_again(self, key: str, files: _Files) -> bool:
        if files.has_record and self._recent and self.now - files.last_used < self._recent:
            return True
        with contextlib.suppress(FileNotFoundError):
            return self.cache.record_path(key).stat().st_mtime > files.last_used and files.has_record
        return False

    def sweep_leftovers(self, found: dict[str, _Files]) -> None:
        """Remove leftovers of killed builders, old files, and lock files that nobody holds."""
        for key, files in found.items():
            if not files.has_record and self.now - files.last_used >= self._young:
                self._remove_if_free(key, self.cache.so_path(key))
        for path in self._list(self.cache.tmp):
            age = self._age(path)
            if self.cache.locks.exclusive or age >= self._young:
                self._remove_if_free(path.name[:64], path)
        for path in chain.from_iterable(map(self._list, (self.cache.logs, self.cache.scans, self.cache.trials))):
            if self._age(path) >= self._old:
                self._remove(path)
        for folder, names in (
            (self.cache.folder, f"{PARTIAL_PREFIX}*"),
            (self.cache.logs, f"{PARTIAL_PREFIX}*"),
            (self.cache.scans, f"{PARTIAL_PREFIX}*"),
            (self.cache.trials, f"{PARTIAL_PREFIX}*"),
            (self.cache.scans, "tmp*"),
            (self.cache.folder / "device-libs", "tmp*"),
        ):
            for path in folder.glob(names):
                if self._age(path) >= self._young:
                    self._remove(path)
        for path in self._list(self.cache.locks.folder):
            key = path.name[:64]
            if path == self.cache.locks.path(key):
                self._remove_if_free(key, path)
            elif self._age(path) >= self._young:
                self._remove(path)

    def sweep_first_runs(self, keys: Set[str]) -> None:
        """Forget outcomes of first runs of libraries not among ``keys``, except quarantines."""
        self.leftovers += FirstRuns(self.cache.folder).sweep(keys, self._young, dry_run=self._dry_run)

    def _remove_if_free(self, key: str, path: Path) -> None:
        """Remove a file or folder that only the holder of the lock of ``key`` may be using."""
        with self.cache.locks.try_hold(key) as held:
            if held:
                self._remove(path)
                self.cache.locks.forget(key)

    def _remove(self, path: Path) -> None:
        self.leftovers += 1
        if not self._dry_run:
            delete(path)

    def _age(self, path: Path) -> float:
        try:
            return self.now - path.lstat().st_mtime
        except FileNotFoundError:
            return 0.0

    @staticmethod
    def _list(folder: Path) -> list[Path]:
        """The files in a folder of the cache whose names are the cache's."""
        return [path for path in folder.iterdir() if _KEY.match(path.name)] if folder.is_dir() else []


def _collect(sweep: _Sweep, max_bytes: int | None, older_than: float | None) -> Collected:
    cache = sweep.cache
    with _errors(cache):
        if not cache.folder.is_dir():
            return Collected((), 0, 0, 0, 0, 0)
        cache.create()
        found = _scan(cache)
        whole = {key: files for key, files in found.items() if files.has_record}
        left = sum(files.bytes for files in whole.values())
        for key, files in sorted(whole.items(), key=lambda item: item[1].last_used):
            expired = older_than is not None and sweep.now - files.last_used > older_than
            if expired or (max_bytes is not None and left > max_bytes) or not files.has_library:
                left -= files.bytes if sweep.drop(key, files) else 0
        dropped = tuple(sweep.dropped)
        sweep.sweep_leftovers(found)
        sweep.sweep_first_runs(whole.keys() - set(dropped))
        return Collected(dropped, sweep.dropped_bytes, sweep.in_use, sweep.leftovers, len(whole) - len(dropped), left)


def _scan(cache: Cache) -> dict[str, _Files]:
    """The files of the folder by key; empty if there is no folder."""
    found: dict[str, _Files] = {}
    if not cache.folder.is_dir():
        return found
    with os.scandir(cache.folder) as listing:
        for item in listing:
            key, _, kind = item.name.partition(".")
            if kind not in {"so", "json"} or not _KEY.fullmatch(key):
                continue
            with contextlib.suppress(FileNotFoundError):
                info = item.stat(follow_symlinks=False)
                files = found.setdefault(key, _Files())
                files.bytes += info.st_size
                if kind == "json":
                    files.has_record, files.last_used = True, info.st_mtime
                else:
                    files.has_library = True
                    files.last_used = files.last_used if files.has_record else info.st_mtime
    return found


def _entry(cache: Cache, key: str, files: _Files) -> Entry:
    last_used = _iso(files.last_used)
    try:
        record, origin = cache.read(key)
    except (DamagedEntry, FileNotFoundError):
        return Entry(key, None, None, files.bytes, None, None, last_used)
    return Entry(key, origin.kernel_name, record.arch, files.bytes, record.compile_s, record.created, last_used)


def _reason(cache: Cache, key: str) -> str | None:
    """What is wrong with an entry. If it is being replaced, waits until that is done."""
    for _ in range(2):
        try:
            cache.check(key)
        except FileNotFoundError:
            return None
        except DamagedEntry as damage:
            reason = str(damage)
        else:
            return None
        try:
            with cache.locks.try_hold(key) as held:
                if not held:
                    return None
        except OSError:  # nobody can build in a read-only folder
            return reason
    return reason


@contextlib.contextmanager
def _alone(library: Path) -> Iterator[bool]:
    """Whether no process has loaded ``library``; while the context lasts, none can begin to use it."""
    try:
        # NFS grants an exclusive lock only on a file that is open for writing.
        descriptor = os.open(library, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        yield True
        return
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link or a socket, which no process loads
            raise
        yield True
        return
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no such locks, so processes that load a library hold none either
        return True
    return True


@contextlib.contextmanager
def _errors(cache: Cache) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(f"{error.filename or cache.folder}: {error.strerror or error}", hint=ANOTHER) from None


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
