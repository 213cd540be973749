"""One lock per key, across threads and processes, and across machines if they share the folder.

- ``flock``, on a local disk: the kernel's lock on ``<key>.lock``, released when the holder dies.
- ``lease``, on a network file system, where flock may not reach other machines: ``<key>.lease`` exists as long as
  somebody holds it. The holder renews it. A waiting builder takes over the lease of a dead holder, at once on the same
  machine, from another machine after :data:`LEASE_SECONDS` without renewal.

A holder that was merely suspended can lose its lease. Two builders then make the same library, and the renames of
:mod:`catalog.build.cache` keep either one intact. The strategies use different files, so that neither waits for the
other's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from catalog.build.file_systems import FileSystem, file_system
from catalog.build.processes import Interrupted
from catalog.settings import settings

if TYPE_CHECKING:
    from filelock import BaseFileLock

LEASE_SECONDS = 60.0

STRATEGIES = MappingProxyType(
    {
        "flock": "the kernel's locks on files, released when their holder dies",
        "lease": f"files that holders renew, free {LEASE_SECONDS:.0f} s after a holder on another machine has died",
    }
)
"""A description of each strategy."""

_WAIT_SECONDS = 0.5
_POLL_SECONDS = 0.02


class Locks:
    """The locks in ``folder``, which must exist when one is taken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def file_system(self) -> FileSystem:
        """The file system of the folder."""
        return file_system(self.folder)

    @cached_property
    def strategy(self) -> Literal["flock", "lease"]:
        """The locking strategy: that of the settings, or the one that suits the file system."""
        chosen = settings().cache_locks
        if chosen == "auto":
            return "lease" if self.file_system.network else "flock"
        return chosen

    @property
    def exclusive(self) -> bool:
        """Whether holding a lock proves that nobody else holds it."""
        return self.strategy == "flock"

    def path(self, key: str) -> Path:
        """The lock file of ``key``."""
        return self.folder / f"{key}.{'lock' if self.strategy == 'flock' else 'lease'}"

    @contextlib.contextmanager
    def hold(self, key: str, stop: threading.Event) -> Iterator[None]:
        """Hold the lock of ``key``; it is released when its holder dies.

        Raises:
            Interrupted: ``stop`` was set while waiting.
            OSError: the folder cannot be written.
        """
        from filelock import Timeout

        lock = self._lock(key)
        while True:
            if stop.is_set():
                raise Interrupted
            with contextlib.suppress(Timeout):  # in short waits, because a lock cannot wait for ``stop`` as well
                lock.acquire(timeout=_WAIT_SECONDS, poll_interval=_POLL_SECONDS)
                break
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def try_hold(self, key: str) -> Iterator[bool]:
        """Hold the lock of ``key`` if it is free; yield whether it is held.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._try_flock(key) if self.strategy == "flock" else self._try_lease(key) as held:
            yield held

    @contextlib.contextmanager
    def _try_flock(self, key: str) -> Iterator[bool]:
        """The same lock as FileLock's, at a tenth of the cost: housekeeping takes thousands."""
        descriptor = os.open(self.path(key), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                # A removed file (no links) excludes nobody: others create and lock a new file under the same name.
                yield os.fstat(descriptor).st_nlink > 0
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if a fork has copied the descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _try_lease(self, key: str) -> Iterator[bool]:
        from filelock import Timeout

        lock = self._lock(key)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def forget(self, key: str) -> None:
        """Remove the lock file of ``key``; the caller holds it. Waiters for the old file notice and open a new one."""
        if self.strategy == "flock":
            self.path(key).unlink(missing_ok=True)

    def _lock(self, key: str) -> BaseFileLock:
        from filelock import FileLock, SoftFileLease

        if self.strategy == "flock":
            return FileLock(self.path(key))
        return SoftFileLease(self.path(key), lease_duration=LEASE_SECONDS)
