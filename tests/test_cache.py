"""The cache under rough treatment: full and read-only disks, network file systems, replaced libraries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rough import FORK, Disk, give_up_privileges, in_child, unwritable
from tiny_project import Project, answer_of, make_kernel, make_project

from catalog import Catalog
from catalog.build import locks
from catalog.build.builder import Builder
from catalog.build.cache import ArtifactRecord, Cache
from catalog.build.file_systems import file_system
from catalog.errors import BuildError
from catalog.runtime.devices.loading import open_library
from catalog.settings import settings


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.close()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.01)


def slow_compiler(project: Project, folder: Path, hdim: int) -> None:
    """A compiler that waits for the file ``go`` before it compiles the kernel of one head dim."""
    text = f'if grep -q "OFFSET + {hdim};" kernel.cpp; then\n'
    text += f'  touch "{folder}/started"\n  until [ -e "{folder}/go" ]; do sleep 0.02; done\nfi\nexec "$@"'
    project.launch_with(folder / "launcher", text)


# Builders among themselves


def test_builders_of_different_kernels_do_not_wait_for_each_other(project: Project, tmp_path: Path) -> None:
    slow_compiler(project, tmp_path, hdim=64)
    builder = project.builder(tmp_path / "cache")
    other = FORK.Process(target=builder.build, args=(make_kernel(64),))
    other.start()
    wait_for(tmp_path / "started")
    assert answer_of(builder.build(make_kernel(128)).path) == 1128
    assert other.is_alive()
    (tmp_path / "go").touch()
    other.join(30)
    assert builder.build(make_kernel(64)).cached


def test_two_builders_that_both_believe_to_hold_the_lock(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a lease was lost: both compile, and the entry is sound all the same."""
    slow_compiler(project, tmp_path, hdim=64)
    first = FORK.Process(target=project.builder(tmp_path / "cache").build, args=(make_kernel(64),))
    first.start()
    wait_for(tmp_path / "started")
    (tmp_path / "started").unlink()

    monkeypatch.setenv("CATALOG_CACHE_LOCKS", "lease")
    settings.cache_clear()
    second = FORK.Process(target=project.builder(tmp_path / "cache").build, args=(make_kernel(64),))
    second.start()
    wait_for(tmp_path / "started")
    (tmp_path / "go").touch()
    for builder in (first, second):
        builder.join(30)
        assert builder.exitcode == 0
    artifact = project.builder(tmp_path / "cache").build(make_kernel(64))
    assert artifact.cached
    assert answer_of(artifact.path) == 1064


# Network file systems

MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:40 / /home rw,relatime shared:5 - autofs systemd-1 rw
23 21 0:41 / /home rw,relatime shared:6 master:2 - nfs4 server:/home rw,vers=4.2
24 23 0:42 / /home/me/.cache rw - tmpfs tmpfs rw
25 21 0:43 / /mnt/a\\040share rw - cifs //server/share rw
26 21 0:44 / /scratch rw - lustre 10.0.0.1@tcp:/scratch rw,noflock
27 21 0:45 / /homework rw - xfs /dev/vdb rw
28 21 0:46 / /remote rw - fuse.sshfs me@server: rw
"""


@pytest.mark.parametrize(
    ("folder", "type_", "network"),
    [
        ("/var/cache", "ext4", False),
        ("/home/me/kernels", "nfs4", True),
        ("/home/me/.cache/kernels", "tmpfs", False),
        ("/mnt/a share/kernels", "cifs", True),
        ("/scratch", "lustre", True),
        ("/homework/kernels", "xfs", False),
        ("/remote/kernels", "fuse.sshfs", True),
    ],
)
def test_the_file_system_of_a_folder(folder: str, type_: str, network: bool, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    found = file_system(Path(folder), tmp_path / "mountinfo")
    assert (found.type, found.network) == (type_, network)
    assert found.locks is (type_ not in ("lustre", "fuse.sshfs")), "without locks for all, as mounted there"


def test_the_file_system_of_this_machine_and_of_none(tmp_path: Path) -> None:
    assert file_system(Path("/proc")).type == "proc"
    unknown = file_system(tmp_path, tmp_path / "absent")
    assert (unknown.type, unknown.network, unknown.locks) == ("", False, True)


@pytest.mark.slow
def test_a_builder_that_died_on_another_machine_is_succeeded(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATALOG_CACHE_LOCKS", "lease")
    settings.cache_clear()
    monkeypatch.setattr(locks, "LEASE_SECONDS", 2.0)
    slow_compiler(project, tmp_path, hdim=64)
    builder = project.builder(tmp_path / "cache")
    child = FORK.Process(target=builder.build, args=(make_kernel(64),))
    child.start()
    wait_for(tmp_path / "started")
    child.kill()
    child.join()
    (lease,) = (tmp_path / "cache" / "locks").glob("*.lease")
    marker = lease.read_text()
    assert "host" in marker, marker
    lease.write_text(
        "".join("host=elsewhere\n" if line.startswith("host") else line for line in marker.splitlines(True))
    )
    (tmp_path / "go").touch()
    started = time.monotonic()
    assert answer_of(builder.build(make_kernel(64)).path) == 1064
    assert time.monotonic() - started > 1.5  # so long it may have lived
    assert not lease.exists()


# Full disks


@pytest.mark.parametrize("kib", [0, 4, 16, 28])
def test_a_build_on_a_full_disk_fails_clearly_and_loses_nothing(kib: int, project: Project, disk: Disk) -> None:
    records: list[ArtifactRecord] = []
    cache = disk.folder / "cache"
    builder = project.builder(cache, records.append)
    kept = builder.build(make_kernel(1))

    message = disk.with_room(kib, lambda: (builder.build(make_kernel(2)), records[1:])[1])
    if isinstance(message, str):
        assert message.startswith(("BuildError", "CacheError")), message
        assert "No space left on device" in message or "File " in message, message
        assert "CATALOG_CACHE_DIR" in message or "catalog cache gc" in message
    else:
        assert [record.status for record in message] == ["built"]  # there was room enough
    assert kib != 0 or isinstance(message, str)
    assert not list((cache / "tmp").iterdir())

    assert builder.build(make_kernel(1)) == replace(kept, cached=True)
    assert answer_of(builder.build(make_kernel(2)).path) == 1002
    assert {record.status for record in records} == {"built"}


def test_no_room_to_list_headers_is_an_error_about_the_disk(project: Project, disk: Disk) -> None:
    builder = project.builder(disk.folder / "cache")
    builder.cache.create()
    project.source += "// " + "x" * 100_000
    message = disk.with_room(0, lambda: builder.key_of(make_kernel()))
    assert message.startswith("BuildError: no content key"), message
    assert "No space left on device" in message or "File too large" in message


@pytest.mark.slow
def test_a_population_on_a_full_disk_changes_nothing(disk: Disk, gfx950: Catalog) -> None:
    path = disk.folder / "catalog.db"
    Catalog(path).connection.close()
    message = disk.with_room(2_000, lambda: Catalog(path).populate("gfx950"))
    assert message.startswith("RegistryError: the catalog cannot be written"), message
    assert "Nothing was changed" in message
    catalog = Catalog(path)
    assert catalog.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert catalog.connection.execute("SELECT count(*) FROM kernel").fetchone()[0] == 0
    rows = gfx950.connection.execute("SELECT count(*) FROM kernel").fetchone()[0]
    assert catalog.populate("gfx950").kernels == rows
    catalog.close()


# Read-only disks


@pytest.mark.slow
def test_a_read_only_catalog_and_cache_serve_what_they_have(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    variables = {"CATALOG_DB": str(place / "catalog.db"), "CATALOG_CACHE_DIR": str(place / "cache")}
    problem = ["--batch", "1", "--nhead-q", "2", "--seqlen-q", "17", "--hdim-q", "32", "--dtype", "fp32"]

    def catalog(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "catalog", *words]
        return subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | variables,
            preexec_fn=give_up_privileges,
        )

    run = ["run", *problem, "--validate", "--repeats", "1", "--format", "json"]
    [first] = json.loads(catalog(*run).stdout)
    shutil.rmtree(place / "cache" / "scans")  # answers are remembered to save time, and for nothing else
    with unwritable(place):
        assert catalog("query", "built", "--count").stdout == "1\n"
        assert first["kernel"] in catalog("select", *problem, "--format", "json").stdout
        [second] = json.loads(catalog(*run).stdout)
        assert (second["kernel"], second["compile_s"], second["validation"]) == (first["kernel"], 0, "passed")

        for words, message in (
            (["run", *problem, "--lse"], "Permission denied\nHint: CATALOG_CACHE_DIR chooses another"),
            (["populate", "--arch", "gfx950"], "cannot be written: attempt to write a readonly database"),
            (["cache", "clear", "--yes"], "Permission denied\nHint: CATALOG_CACHE_DIR chooses another"),
        ):
            refused = catalog(*words)
            assert refused.returncode == 1
            assert refused.stderr.splitlines()[-2].startswith("Error: "), refused.stderr
            assert message in refused.stderr
        assert "1 library is intact, 0 damaged" in catalog("cache", "verify").stdout


def test_a_read_only_catalog_whose_log_is_needed_says_so(tmp_path: Path) -> None:
    """A reader that ignored the log would miss what is in it."""
    place = tmp_path / "place"
    place.mkdir()
    catalog = Catalog(place / "catalog.db")
    catalog.connection.execute("INSERT INTO device (arch, name, facts) VALUES ('a', 'b', 'c')")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("catalog.db", "catalog.db-wal"):
        shutil.copy(place / name, copy / name)

    def read() -> object:
        give_up_privileges()
        return Catalog(copy / "catalog.db").connection

    with unwritable(copy):
        message = in_child(read)
    assert message.startswith("RegistryError"), message
    assert "-wal" in message
    catalog.close()


def test_a_library_of_an_older_header_is_not_taken_for_the_new_one(project: Project, tmp_path: Path) -> None:
    builder = project.builder(tmp_path / "cache")
    old = builder.build(make_kernel())
    project.write("inner.hpp", "#define OFFSET 2000\n")
    key = project.key(tmp_path).hex
    for kind in (".so", ".json"):
        shutil.copy(old.path.with_suffix(kind), tmp_path / "cache" / f"{key}{kind}")
    new = builder.build(make_kernel())
    assert (new.key, new.cached) == (key, False)
    assert answer_of(new.path) == 2064


def test_a_loaded_library_survives_its_replacement(project: Project, tmp_path: Path) -> None:
    """Both are loaded, each from the bytes that were checked; descriptors do not run out."""
    artifact = project.builder(tmp_path / "cache").build(make_kernel(64))
    other = project.builder(tmp_path / "cache").build(make_kernel(128))

    def load() -> list[int]:
        first = open_library(artifact.path, artifact.sha256)
        os.replace(other.path, artifact.path)
        second = open_library(artifact.path, other.sha256)
        return [first.answer(), second.answer()]

    assert in_child(load) == [1064, 1128]


def test_more_libraries_than_descriptors(project: Project, tmp_path: Path) -> None:
    artifact = project.builder(tmp_path / "cache").build(make_kernel(64))

    def load() -> int:
        import resource

        few = max(map(int, os.listdir("/proc/self/fd"))) + 50  # beside those that other tests have left open
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for place in range(100):
            copy = tmp_path / "cache" / f"{place}.so"
            shutil.copy(artifact.path, copy)
            assert open_library(copy, artifact.sha256).answer() == 1064
        return 100

    assert in_child(load) == 100


def test_a_cache_that_is_removed_under_a_builder_is_made_anew(project: Project, tmp_path: Path) -> None:
    builder: Builder = project.builder(tmp_path / "cache")
    builder.build(make_kernel())
    shutil.rmtree(tmp_path / "cache")
    assert answer_of(builder.build(make_kernel()).path) == 1064
    assert Cache(tmp_path / "cache").load(project.key(tmp_path).hex) is not None


def test_a_file_in_place_of_the_folder(project: Project, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="file") as caught:
        project.builder(tmp_path / "file" / "cache").build(make_kernel())
    assert "CATALOG_CACHE_DIR" in str(caught.value)
