"""Ownership and permission checks for the cache folder: files that others can write are never loaded.

A successful check is not repeated: a process spends a few ``stat`` calls on each folder.
"""

from __future__ import annotations

import functools
import os
import shlex
import stat
from pathlib import Path

from catalog.errors import CacheError

ANOTHER = "CATALOG_CACHE_DIR chooses another cache folder."


def make_private(folder: Path) -> None:
    """Create ``folder`` and its missing parents, private to the user from the start.

    Raises:
        OSError: one of them cannot be created.
    """
    if not folder.parent.is_dir():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


@functools.cache
def require_private(folder: Path) -> None:
    """Refuse a cache folder that is not private to the caller.

    Raises:
        CacheError: others own it, have access to it, or may write to a parent folder; the hint says how to fix that.
        OSError: it does not exist.
    """
    info = folder.stat()
    if info.st_uid != os.geteuid():
        raise CacheError(
            f"the cache folder {folder} belongs to {_user(info.st_uid)}, and this process runs as "
            f"{_user(os.geteuid())}: libraries of others are not loaded",
            hint=ANOTHER,
        )
    if info.st_mode & 0o077:
        raise CacheError(
            f"the cache folder {folder} is open to others (mode {stat.S_IMODE(info.st_mode):04o})",
            hint=f"Run chmod 700 {shlex.quote(str(folder))}, if nobody else has written to it. Or: {ANOTHER}",
        )
    require_safe(folder)


@functools.cache
def require_safe(folder: Path) -> None:
    """Refuse a folder whose files others could replace: it or a parent is writable by all, and not sticky.

    Raises:
        CacheError: others could replace them; the message names the folder in question.
        OSError: it does not exist.
    """
    for start in dict.fromkeys((folder.absolute(), folder.resolve())):
        for place in (start, *start.parents):
            mode = place.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise CacheError(
                    f"libraries in {folder} are not loaded: anybody may write to {place} "
                    f"(mode {stat.S_IMODE(mode):04o})",
                    hint=f"Run chmod o-w {shlex.quote(str(place))}. Or: {ANOTHER}",
                )


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
