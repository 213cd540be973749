"""Who may write to the cache: strangers, changed libraries, and files that no build has made."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import slow_but
from rough import in_child
from tiny_project import Project, answer_of, make_kernel, make_project

from catalog import Catalog, Problem
from catalog.build.cache import Cache
from catalog.build.housekeeping import collect, verify
from catalog.build.permissions import require_private, require_safe
from catalog.errors import CacheError, ChangedLibraryError
from catalog.runtime.devices.loading import open_library
from catalog.settings import settings


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


# Strangers


def test_folders_made_by_us_are_private_from_the_start(project: Project, tmp_path: Path) -> None:
    def build() -> list[int]:
        os.umask(0)
        project.builder(tmp_path / "new" / "deep" / "cache").build(make_kernel())
        return [
            stat.S_IMODE(path.stat().st_mode)
            for path in (tmp_path / "new", *(tmp_path / "new").rglob("*"))
            if path.is_dir() or path.suffix == ".so"
        ]

    modes = in_child(build)
    assert len(modes) == 9
    assert set(modes) == {0o700}


def _open_parent(cache: Path) -> None:
    cache.parent.chmod(0o777)


def _foreign(cache: Path) -> None:
    os.chown(cache, 65534, -1)


STRANGERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "others may read": (lambda cache: cache.chmod(0o755), r"is open to others \(mode 0755\)\nRun chmod 700 .*cache"),
    "a group may write": (lambda cache: cache.chmod(0o770), r"is open to others \(mode 0770\)"),
    "anybody may write to a parent": (_open_parent, r"anybody may write to .*parent \(mode 0777\)\nRun chmod o-w"),
    "somebody else owns it": (_foreign, r"belongs to .*, and this process runs as"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_cache_that_strangers_can_reach_is_refused(stranger: str, project: Project, tmp_path: Path) -> None:
    spoil, message = STRANGERS[stranger]
    cache = tmp_path / "parent" / "cache"
    project.builder(cache).build(make_kernel())
    for check in (require_private, require_safe):
        check.cache_clear()  # a new process, as it were
    if spoil is _foreign and os.geteuid() != 0:
        cache = Path("/usr")  # who cannot give a folder away takes one of root's
    else:
        spoil(cache)
    with pytest.raises(CacheError, match=message) as caught:
        project.builder(cache).build(make_kernel())
    assert "CATALOG_CACHE_DIR" in str(caught.value)


@pytest.mark.slow
def test_a_cache_that_strangers_can_reach_is_refused_once_and_not_kernel_by_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    problem = Problem(batch=1, nhead_q=1, seqlen_q=5, hdim_q=32, dtype="fp32")
    with pytest.raises(CacheError, match="is open to others"):
        Catalog(tmp_path / "catalog.db").select(problem).build()
    assert not caplog.records


def test_a_sticky_parent_is_safe(project: Project, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(0o1777)
    assert answer_of(project.builder(parent / "cache").build(make_kernel()).path) == 1064


def test_a_library_that_anybody_may_write_to_is_replaced(project: Project, tmp_path: Path) -> None:
    builder = project.builder(tmp_path / "cache")
    artifact = builder.build(make_kernel())
    artifact.path.chmod(0o777)
    with pytest.raises(CacheError, match="anybody may write to it"):
        open_library(artifact.path, artifact.sha256)
    assert not builder.build(make_kernel()).cached
    assert stat.S_IMODE(artifact.path.stat().st_mode) == 0o700


# Changed libraries


@pytest.fixture
def victim(project: Project, tmp_path: Path):
    """A library in the cache, and another one that leaves a trace when it is loaded."""
    artifact = project.builder(tmp_path / "cache").build(make_kernel())
    (tmp_path / "evil.c").write_text(
        "#include <stdio.h>\n__attribute__((constructor)) static void run(void) "
        f'{{ FILE* f = fopen("{tmp_path}/trace", "w"); if (f) fclose(f); }}\n'
    )
    compiler = str(project.toolchain.compiler.path)
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "evil.c", "-o", "evil.so"], cwd=tmp_path, check=True)
    shutil.copy(tmp_path / "evil.so", tmp_path / "copy.so")
    return artifact


def _flip(path: Path, _evil: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "flipped byte": _flip,
    "truncated": lambda path, evil: os.truncate(path, 100),
    "empty": lambda path, evil: os.truncate(path, 0),
    "overwritten": lambda path, evil: shutil.copyfile(evil, path),
    "replaced": lambda path, evil: os.replace(evil, path),
    "linked elsewhere": lambda path, evil: (path.unlink(), path.symlink_to(evil)),
    "gone": lambda path, evil: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_library_that_changes_after_its_build_is_not_loaded(change: str, victim, tmp_path: Path) -> None:
    def try_to_load() -> object:
        CHANGES[change](victim.path, tmp_path / "evil.so")
        try:
            open_library(victim.path, victim.sha256)
        except ChangedLibraryError as error:
            return str(error)
        return "loaded"

    message = in_child(try_to_load)
    assert str(victim.path) in message
    assert "Build the kernel again" in message
    assert not (tmp_path / "trace").exists()

    assert in_child(lambda: ctypes.CDLL(str(tmp_path / "copy.so")) is not None)
    assert (tmp_path / "trace").exists()  # it would have left one


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a sparse file": _sparse,
    "deeply nested": lambda path: path.write_bytes(b"[" * 100_000),
    "not UTF-8": lambda path: path.write_bytes(b"\xff" * 1000),
}


@pytest.mark.parametrize("kind", slow_but([".so"], [".so", ".json"]))
@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_is_no_file_of_a_build_is_built_again(hostile: str, kind: str, project: Project, tmp_path: Path) -> None:
    artifact = project.builder(tmp_path / "cache").build(make_kernel())
    path = artifact.path.with_suffix(kind)
    path.unlink()
    HOSTILE[hostile](path)

    def rebuilt() -> tuple[list[str], bool, int]:
        if kind == ".so":
            with pytest.raises(ChangedLibraryError, match="Build the kernel again"):
                open_library(path, artifact.sha256)
        damaged = [damage.key for damage in verify(Cache(tmp_path / "cache"))]
        collect(Cache(tmp_path / "cache"), dry_run=True)
        again = project.builder(tmp_path / "cache").build(make_kernel())
        return damaged, again.cached, answer_of(again.path)

    assert in_child(rebuilt, timeout=50) == ([artifact.key], False, 1064)
    assert path.is_file()
    assert not path.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("kind", [".so", ".json"])
def test_what_another_user_owns_is_built_again(kind: str, project: Project, tmp_path: Path) -> None:
    builder = project.builder(tmp_path / "cache")
    artifact = builder.build(make_kernel())
    os.chown(artifact.path.with_suffix(kind), 12345, 12345)
    if kind == ".so":
        with pytest.raises(ChangedLibraryError, match="belongs to another user"):
            open_library(artifact.path, artifact.sha256)
    assert "belongs to another user" in verify(Cache(tmp_path / "cache"))[0].reason
    assert not builder.build(make_kernel()).cached


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["record"].update(log="another"),
        lambda content: content["record"].update(compile_s="long"),
        lambda content: content["record"].update(so_bytes=2**62),
        lambda content: content["record"]["resources"].update(registers=10**400),
        lambda content: content["origin"].update(abi=2),
        lambda content: content.update(more=1),
        lambda content: content.pop("sha256"),
    ],
)
def test_a_record_says_what_was_written_or_nothing(
    change: Callable[[dict[str, dict[str, object]]], object], project: Project, tmp_path: Path
) -> None:
    artifact = project.builder(tmp_path / "cache").build(make_kernel())
    path = artifact.path.with_suffix(".json")
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert Cache(tmp_path / "cache").load(artifact.key) is None


def test_a_folder_of_the_cache_that_leads_elsewhere_is_not_used(project: Project, tmp_path: Path) -> None:
    Cache(tmp_path / "cache").create()
    (tmp_path / "cache" / "scans").rmdir()
    (tmp_path / "cache" / "scans").symlink_to(tmp_path)
    with pytest.raises(CacheError, match="scans is a link, not a folder"):
        project.builder(tmp_path / "cache").build(make_kernel())
