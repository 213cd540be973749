"""Files: what is no regular file is not waited for, and what is written appears whole."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from rough import in_child

from catalog import files
from catalog.files import PARTIAL_PREFIX, Sync, UnsafeFileError, parse_json, publish, published, read_given, read_own

MOST = 100


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "a pipe, not a regular file"),
    "a folder": (Path.mkdir, "a folder, not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "a device, not a regular file|a link"),
    "an endless file": (lambda path: path.symlink_to("/proc/self/smaps"), "more than 100 bytes|a link"),
    "a sparse file": (_sparse, "more than 100 bytes"),
    "a socket": (_socket, "No such device"),
    "one byte too many": (lambda path: path.write_bytes(b"x" * 101), "more than 100 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("read", [read_given, read_own])
def test_what_is_not_a_small_regular_file_is_refused_at_once(
    read: Callable[[Path, int], bytes], name: str, tmp_path: Path
) -> None:
    make, message = HOSTILE[name]
    make(tmp_path / "file")

    def refused() -> str:
        with pytest.raises(OSError, match=message) as caught:
            read(tmp_path / "file", MOST)
        return str(caught.value)

    assert str(tmp_path / "file") in in_child(refused, timeout=20)


def test_own_files_are_this_users_and_no_links(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"x" * MOST)
    link.symlink_to(file)
    assert read_given(link, MOST) == read_own(file, MOST) == b"x" * MOST
    with pytest.raises(UnsafeFileError, match="a link"):
        read_own(link, MOST)
    with pytest.raises(UnsafeFileError, match="NUL"):
        read_given(Path("a\0b"), MOST)
    if os.geteuid() == 0:
        os.chown(file, 12345, 12345)
        assert read_given(file, MOST)
        with pytest.raises(UnsafeFileError, match="another user"):
            read_own(file, MOST)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000, b"\xff", b"{", b""])
def test_what_is_not_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^not "):
        parse_json(text)


@pytest.mark.parametrize("sync", Sync)
def test_a_file_appears_whole_or_not_at_all(sync: Sync, tmp_path: Path) -> None:
    path, target = tmp_path / "file", tmp_path / "target"
    target.write_text("kept")
    path.symlink_to(target)
    with pytest.raises(TypeError), published(path, sync) as file:
        file.writelines([b"half of it", "and what is no bytes"])
    assert path.is_symlink()
    assert path.read_text() == "kept"
    publish(path, "whole", sync)
    assert (path.read_text(), path.is_symlink(), target.read_text()) == ("whole", False, "kept")
    assert not list(tmp_path.glob(f"{PARTIAL_PREFIX}*"))


def test_one_module_writes_atomically() -> None:
    """Renaming into place and syncing are done in one way, by :mod:`catalog.files`."""
    package = Path(files.__file__).parent
    atomic = re.compile(r"\bos\.(replace|rename|fsync)\b|NamedTemporaryFile|mkstemp")
    assert [path.name for path in package.rglob("*.py") if atomic.search(path.read_text())] == ["files.py"]
