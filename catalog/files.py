"""Safe reading of untrusted files, and atomic writing: a file appears whole or not at all.

A file that this process did not write may be anything: a pipe without a writer, an endless device, a link, a sparse
file of a terabyte. So a file is opened without blocking, the checks apply to the open file instead of its name, and
at most the caller's limit is read. The two ways to open a file differ in what they accept:

- :func:`open_given`, for a path that the user names, follows links and accepts any owner.
- :func:`open_own`, for the project's own files, rejects links and any owner but this user and root.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from catalog.errors import CatalogError, UsageError

StrPath: TypeAlias = str | os.PathLike[str]
"""A path that the user names. Public functions take it, and make it a ``Path`` before they use it."""

MOST_TEXT_BYTES = 16 * 2**20
"""Size limit of files that people write by hand: a spec, a set of shapes, a sweep, a filter."""

PARTIAL_PREFIX = ".partial-"
"""Prefix of the names of unfinished files; an old one was left by a killed process."""

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder"}
"""Kinds of files that can be opened but are not regular; any other kind is a device."""

_CHUNK = 2**16
_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class UnsafeFileError(OSError):
    """A file is rejected: it is not a regular file, is a link, is too large, or belongs to another user."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(errno.EPERM, reason, str(path))


def open_given(path: Path, most_bytes: int) -> BinaryIO:
    """Open for reading a file that the user names.

    Raises:
        UnsafeFileError: it is not a regular file or is larger than ``most_bytes``.
        OSError: it cannot be opened.
    """
    return _file(path, _given(path, most_bytes))


def open_own(path: Path, most_bytes: int) -> BinaryIO:
    """Open for reading a file in the cache or in another folder of this project.

    Raises:
        UnsafeFileError: it is a link or not a regular file, is larger than ``most_bytes``, or belongs to neither this
            user nor root.
        OSError: it cannot be opened.
    """
    return _file(path, _own(path, most_bytes))


def read_given(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """Return the content of a file that the user names.

    Raises:
        UnsafeFileError, OSError: like :func:`open_given`.
    """
    return _content(path, _given(path, most_bytes), most_bytes)


def read_own(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file that belongs to this project.

    Raises:
        UnsafeFileError, OSError: like :func:`open_own`.
    """
    return _content(path, _own(path, most_bytes), most_bytes)


def _given(path: Path, most_bytes: int) -> int:
    descriptor, _ = _open(path, most_bytes, os.O_RDONLY)
    return descriptor


def _own(path: Path, most_bytes: int) -> int:
    descriptor, info = _open(path, most_bytes, os.O_RDONLY | os.O_NOFOLLOW)
    if info.st_uid not in (os.geteuid(), 0):
        os.close(descriptor)
        raise UnsafeFileError(path, f"it belongs to another user (number {info.st_uid})")
    return descriptor


def _open(path: Path, most_bytes: int, flags: int) -> tuple[int, os.stat_result]:
    try:
        descriptor = os.open(path, flags | _FLAGS)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise UnsafeFileError(path, "it is a link") from None
        raise
    except ValueError:
        raise UnsafeFileError(path, "its name has a NUL byte") from None
    info = os.fstat(descriptor)
    if stat.S_ISREG(info.st_mode) and info.st_size <= most_bytes:
        return descriptor, info
    os.close(descriptor)
    if stat.S_ISREG(info.st_mode):
        raise UnsafeFileError(path, _too_large(most_bytes))
    raise UnsafeFileError(path, f"it is {_KINDS.get(stat.S_IFMT(info.st_mode), 'a device')}, not a regular file")


def _file(path: Path, descriptor: int) -> BinaryIO:
    return open(path, "rb", opener=lambda _name, _flags: descriptor)


def _content(path: Path, descriptor: int, most_bytes: int) -> bytes:
    """Read a file to its end and close it; its size is not reliable: files grow, and those in /proc have none."""
    parts, left = list[bytes](), most_bytes + 1
    try:
        while left > 0 and (part := os.read(descriptor, min(left, _CHUNK))):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(descriptor)
    if left <= 0:
        raise UnsafeFileError(path, _too_large(most_bytes))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(most_bytes: int) -> str:
    return f"it has more than {most_bytes:,} bytes"


def parse_json(content: bytes | str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is not JSON, not UTF-8, or nested too deeply; the message says which, and the place if known.
    """
    try:
        return json.loads(content)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        line = "" if error.lineno == 1 else f"line {error.lineno}, "
        raise ValueError(f"not JSON: {error.msg} ({line}column {error.colno})") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"not JSON that can be read: {error}") from None


class Sync(Enum):
    """What a power failure may do to a new file."""

    FULL = "nothing: content and name are on the disk when the call returns"
    NONE = "remove or empty it: for files that can be made again and are checked each time they are read"


@contextlib.contextmanager
def published(path: Path, sync: Sync = Sync.FULL, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file that replaces ``path`` when the block ends, and is removed if the block raises.

    Until then it is in the same folder as ``path``. If ``path`` is a link, the link is replaced, not its target.
    ``mode`` is subject to the umask.

    Raises:
        OSError: the file cannot be written; an existing one is unchanged.
    """
    partial = path.with_name(f"{PARTIAL_PREFIX}{secrets.token_hex(8)}")
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb+") as file:
            yield file
        put_in_place(partial, path, sync)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename == str(partial):
            raise OSError(error.errno, error.strerror, str(path)) from None  # nobody else knows the other name
        raise


def publish(path: Path, content: bytes | str, sync: Sync = Sync.FULL, mode: int = 0o666) -> None:
    """Write ``content`` to ``path`` as :func:`published` does; text is encoded as UTF-8.

    Raises:
        OSError: the file cannot be written; an existing one is unchanged.
    """
    with published(path, sync, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def check_file(path: Path) -> None:
    """Check that a file can be written at ``path``, as far as this can be known in advance.

    Raises:
        UsageError: its folder does not exist or is not writable, or ``path`` exists and is not a file.
    """
    try:
        folder = path.resolve().parent
        is_other, has_folder = path.exists() and not path.is_file(), folder.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long; links that lead to each other
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not has_folder:
        raise UsageError(f"{path}: the folder {folder} does not exist")
    if is_other:
        raise UsageError(f"{path}: it exists and is not a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: the folder {folder} is not writable")


def write_file(path: Path, text: str) -> Path:
    """Write ``text`` to ``path``, a file that the user names, and return ``path``; its folder is created.

    The file is replaced as a whole or not at all. A link is followed.

    Raises:
        CatalogError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path.resolve(), text)
    except (OSError, RuntimeError) as error:  # links that lead to each other
        reason = getattr(error, "strerror", None) or error
        raise CatalogError(f"{path} cannot be written: {reason}", hint="Choose another file.") from None
    return path


def put_in_place(made: Path, path: Path, sync: Sync = Sync.FULL) -> None:
    """Rename a finished file to ``path`` in the same file system, replacing any file of that name.

    Raises:
        OSError: the disk is full, or the folder is not writable.
    """
    if sync is Sync.FULL:
        _sync(made)
    os.replace(made, path)
    if sync is Sync.FULL:
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)
