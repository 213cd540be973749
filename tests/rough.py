"""Rough conditions, for real: processes without root's privileges, disks without room."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")

_PRIVILEGES = (1, 2, 3)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER: what lets root ignore permissions
_DROP_FROM_BOUNDING_SET = 24  # PR_CAPBSET_DROP


def in_child(work: Callable[[], Any], timeout: float = 60) -> Any:
    """What ``work`` returns in a process of its own, or the exception that it raises there, as text."""
    answers = FORK.SimpleQueue()

    def run() -> None:
        try:
            answers.put(work())
        except Exception as error:
            answers.put(f"{type(error).__name__}: {error}")

    child = FORK.Process(target=run)
    child.start()
    child.join(timeout)
    child.kill()
    child.join()
    assert child.exitcode == 0, f"the child ended with {child.exitcode}"
    return answers.get()


def give_up_privileges() -> None:
    """From now on permissions hold for this process, root or not; its children keep none either."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for privilege in _PRIVILEGES:
        assert libc.prctl(_DROP_FROM_BOUNDING_SET, privilege, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: the lower halves, then the upper ones
    assert libc.capget(header, sets) == 0
    for which in range(3):
        for privilege in _PRIVILEGES:
            sets[which] &= ~(1 << privilege)
    assert libc.capset(header, sets) == 0


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Nobody may write to what is in ``folder``, who gives up privileges."""
    places = [folder, *folder.rglob("*")]
    modes = {place: place.stat().st_mode for place in places}
    for place in places:
        place.chmod(modes[place] & ~0o222)
    try:
        yield
    finally:
        for place in places:
            place.chmod(modes[place])


class Disk:
    """A folder on a disk that can be made small: a tmpfs where this process may mount one, else by a limit on files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.mounted = self._mount("size=300m,mode=700")

    def _mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        try:
            return subprocess.run(command, check=False, capture_output=True).returncode == 0
        except OSError:
            return False

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    def with_room(self, kib: int, work: Callable[[], Any]) -> Any:
        """As :func:`in_child`, while so much room is left: on the disk, or for every file."""
        if not self.mounted:

            def limited() -> Any:
                resource.setrlimit(resource.RLIMIT_FSIZE, (kib << 10, resource.RLIM_INFINITY))
                return work()

            return in_child(limited)
        facts = os.statvfs(self.folder)
        used = (facts.f_blocks - facts.f_bfree) * facts.f_bsize >> 10
        assert self._mount(f"remount,size={max(4, used + kib)}k")
        try:
            return in_child(work)
        finally:
            assert self._mount("remount,size=300m")
