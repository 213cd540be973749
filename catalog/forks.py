"""Locks that survive a fork, and what a forked child must know about its parent.

A fork copies the memory of a process, but only the forking thread. Other threads do not exist in the child: locks that
they held would stay locked forever. Host kernels look after themselves: their pool starts new threads in the child.
"""

from __future__ import annotations

import os
import threading
import weakref

SPAWN = (
    "Start processes with multiprocessing.get_context('spawn') or 'forkserver' (PyTorch's DataLoader: "
    "multiprocessing_context='spawn'), or fork before the first use."
)
"""The hint of errors about things that do not survive a fork."""


class Lock:
    """A reentrant lock that is free in a forked child, unless the forking thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def acquire(self, timeout: float = -1) -> bool:
        """Acquire the lock; return whether that succeeded within ``timeout`` seconds (-1: no limit)."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Release the lock once; it is free after as many releases as acquisitions."""
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def free_in_child(self) -> None:
        """Replace the lock if another thread held it at the fork: that thread does not exist in the child."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()

_forks = 0


def forks() -> int:
    """The number of forks between the process that imported this module and this one."""
    return _forks


def _after_fork_in_child() -> None:
    global _forks  # noqa: PLW0603 - a process has one state
    _forks += 1
    for lock in _locks:
        lock.free_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
