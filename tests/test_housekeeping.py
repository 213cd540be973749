"""``catalog cache`` and ``catalog timings``: listing, checking, collecting; what is in use stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import command
import pytest
from rough import FORK, in_child
from tiny_project import Project, make_kernel, make_project

from catalog import Catalog
from catalog.build import housekeeping
from catalog.build.cache import Cache
from catalog.build.first_runs import FirstRuns, Quarantine
from catalog.build.housekeeping import DAY_SECONDS, OLD_SECONDS, SizeCap, clear, collect, entries, sync_registry, verify
from catalog.errors import UsageError
from catalog.files import PARTIAL_PREFIX
from catalog.registry.artifacts import record_artifact
from catalog.registry.clear import clear_timings
from catalog.runtime.devices.loading import open_library
from catalog.settings import settings
from catalog.units import format_size, parse_age, parse_size

HDIMS = (1, 2, 3)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


@pytest.fixture
def cache(project: Project, tmp_path: Path) -> Cache:
    """Three libraries: the first was last used three days ago, the second two, the third one."""
    cache = Cache(tmp_path / "cache")
    for days, hdim in zip((3, 2, 1), HDIMS, strict=True):
        artifact = project.builder(cache.folder).build(make_kernel(hdim))
        used = time.time() - days * DAY_SECONDS
        os.utime(cache.record_path(artifact.key), (used, used))
    return cache


def keys(cache: Cache, project: Project) -> list[int]:
    """The head dims of the libraries that are there."""
    return [hdim for hdim in HDIMS if cache.load(project.key(cache.scans, hdim).hex) is not None]


def size_of(cache: Cache) -> int:
    return sum(entry.bytes for entry in entries(cache))


# Sizes and ages


@pytest.mark.parametrize(
    ("text", "size"), [("2G", 2 << 30), ("500M", 500 << 20), ("1.5 GiB", 3 << 29), ("4096", 4096), ("0", 0)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("90m", 5_400), ("1.5s", 1.5)])
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "G", "2X", "-1G", "2GG", "many"])
def test_what_is_no_size_or_age_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)
    with pytest.raises(UsageError, match="is not an age"):
        parse_age(text)


def test_sizes_are_shown_in_fitting_units() -> None:
    assert [format_size(size) for size in (0, 1023, 1536, 5 << 40)] == ["0 bytes", "1023 bytes", "1.5 KiB", "5.0 TiB"]


# Entries


def test_entries_come_with_what_their_records_tell(cache: Cache) -> None:
    found = entries(cache)
    assert [entry.kernel for entry in found] == [make_kernel(hdim).name for hdim in reversed(HDIMS)]
    assert all(entry.bytes > 1000 and (entry.compile_s or 0) > 0 and entry.arch for entry in found)
    assert [entry.last_used for entry in found] == sorted((entry.last_used for entry in found), reverse=True)
    assert entries(Cache(cache.folder / "absent")) == []


def test_a_use_is_noted_once_a_process(cache: Cache, project: Project) -> None:
    record = cache.record_path(project.key(cache.scans, 1).hex)

    def builds() -> None:
        builder = project.builder(cache.folder)
        assert builder.build(make_kernel(1)).cached
        assert time.time() - record.stat().st_mtime < DAY_SECONDS
        _age(record, 9 * DAY_SECONDS)
        assert builder.build(make_kernel(1)).cached
        assert time.time() - record.stat().st_mtime > 8 * DAY_SECONDS

    for _ in range(2):
        in_child(builds)


def test_verify_names_what_is_damaged(cache: Cache, project: Project) -> None:
    flipped, missing, garbled = (project.key(cache.scans, hdim).hex for hdim in HDIMS)
    assert verify(cache) == []
    data = bytearray(cache.so_path(flipped).read_bytes())
    data[len(data) // 2] ^= 1
    cache.so_path(flipped).write_bytes(data)
    cache.so_path(missing).unlink()
    cache.record_path(garbled).write_text("{")
    damages = {damage.key: damage for damage in verify(cache)}
    assert "differs from the one that was built" in damages[flipped].reason
    assert "missing" in damages[missing].reason
    assert "record is damaged" in damages[garbled].reason
    assert damages[garbled].kernel is None
    assert len(entries(cache)) == 3
    assert all(damage.deleted for damage in verify(cache, delete=True))
    assert entries(cache) == verify(cache) == []


# Collecting


def test_the_longest_unused_go_first(cache: Cache, project: Project) -> None:
    whole = size_of(cache)
    dry = collect(cache, max_bytes=whole - 1, dry_run=True)
    assert keys(cache, project) == [1, 2, 3]
    done = collect(cache, max_bytes=whole - 1)
    assert done.dropped == dry.dropped
    assert keys(cache, project) == [2, 3]
    assert (done.left, done.left_bytes) == (2, size_of(cache))

    assert len(collect(cache, older_than=1.5 * DAY_SECONDS).dropped) == 1
    assert keys(cache, project) == [3]
    assert collect(cache).dropped == ()
    assert len(collect(cache, max_bytes=0).dropped) == 1
    assert [path.name for path in cache.folder.iterdir() if path.is_file()] == []


def _load_and_wait(cache: Cache, project: Project, loaded: Path) -> None:
    artifact = project.builder(cache.folder).build(make_kernel(1))
    before = cache.record_path(artifact.key).stat()
    open_library(artifact.path, artifact.sha256)
    os.utime(cache.record_path(artifact.key), (before.st_mtime - 9 * DAY_SECONDS,) * 2)
    loaded.touch()
    time.sleep(60)


@pytest.mark.parametrize("drop", [lambda cache: collect(cache, max_bytes=0), clear], ids=["gc", "clear"])
def test_what_a_process_has_loaded_stays(drop, cache: Cache, project: Project, tmp_path: Path) -> None:
    child = FORK.Process(target=_load_and_wait, args=(cache, project, tmp_path / "loaded"))
    child.start()
    while not (tmp_path / "loaded").exists():
        time.sleep(0.01)
    done = drop(cache)
    assert (len(done.dropped), done.in_use) == (2, 1)
    assert cache.load(project.key(tmp_path, 1).hex) is not None

    child.kill()
    child.join()
    assert len(drop(cache).dropped) == 1
    assert entries(cache) == []


def test_first_runs_are_forgotten_with_their_libraries_and_quarantines_are_not(cache: Cache) -> None:
    runs = FirstRuns(cache.folder)
    kept, dropped = entries(cache)[0].key, entries(cache)[-1].key
    for key in (kept, dropped):
        runs.remember(key, "d" * 64, "cpu")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about = {"kernel_id": "id", "kernel": "kernel", "arch": "cpu", "device": "cpu", "problem": "{}", "when": now}
    runs.quarantine(Quarantine(key="f" * 64, reason="died of SIGSEGV", **about))
    assert collect(cache, older_than=2.5 * DAY_SECONDS).dropped == (dropped,)
    assert [runs.passed(key, "d" * 64, "cpu") for key in (kept, dropped)] == [True, False]
    assert [quarantine.reason for quarantine in runs.quarantined()] == ["died of SIGSEGV"]


def test_what_is_being_built_stays(cache: Cache, project: Project, tmp_path: Path) -> None:
    text = f'touch "{tmp_path}/started"\nuntil [ -e "{tmp_path}/go" ]; do sleep 0.02; done\nexec "$@"'
    project.launch_with(tmp_path / "launcher", text)
    child = FORK.Process(target=lambda: project.builder(cache.folder).build(make_kernel(4)))
    child.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    clear(cache)
    assert len(list(cache.tmp.iterdir())) == 1
    (tmp_path / "go").touch()
    child.join(30)
    assert child.exitcode == 0
    assert [entry.kernel for entry in entries(cache)] == [make_kernel(4).name]


def test_an_entry_that_is_used_meanwhile_stays(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the listing and the deletion: the first deletion takes so long."""
    discard = cache.remove

    def slow(key: str) -> None:
        for entry in entries(cache):
            os.utime(cache.record_path(entry.key))
        discard(key)

    monkeypatch.setattr(cache, "remove", slow)
    done = collect(cache, max_bytes=0)
    assert (len(done.dropped), done.in_use) == (1, 2)


def test_on_a_network_file_system_what_was_used_today_stays(
    cache: Cache, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATALOG_CACHE_LOCKS", "lease")
    settings.cache_clear()
    os.utime(cache.record_path(project.key(cache.scans, 2).hex))
    done = collect(Cache(cache.folder), max_bytes=0)
    assert (len(done.dropped), done.in_use) == (2, 1)
    assert keys(cache, project) == [2]


def _age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


# The cap that applies itself


def test_a_build_keeps_the_cache_below_its_cap(cache: Cache, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest unused goes, but for what a process has loaded and what was used just now; the registry knows."""
    monkeypatch.setenv("CATALOG_CACHE_MAX_BYTES", str(size_of(cache) * 2 // 3))
    settings.cache_clear()
    ready, stop = FORK.Event(), FORK.Event()
    first = project.builder(cache.folder).build(make_kernel(1))
    _age(first.path.with_suffix(".json"), 3 * DAY_SECONDS)

    def hold() -> None:
        open_library(first.path, first.sha256)
        ready.set()
        stop.wait(60)

    holder = FORK.Process(target=hold)
    holder.start()
    assert ready.wait(60)
    builder = project.builder(cache.folder)
    builder.build(make_kernel(4))
    stop.set()
    holder.join()
    assert keys(cache, project) == [1]
    assert cache.load(project.key(cache.scans, 4).hex) is not None
    dropped = {project.key(cache.scans, hdim).hex for hdim in (2, 3)}
    assert set(builder.cap.take_dropped()) == dropped
    assert builder.cap.take_dropped() == []


def test_a_cap_looks_again_when_so_much_was_added(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(housekeeping, "_scan", lambda cache: looks.append(1) or {})
    cap = SizeCap(cache)
    for _ in range(64):
        cap.grew(settings().cache_max_bytes // 64)
    assert len(looks) == 16
    monkeypatch.setenv("CATALOG_CACHE_MAX_BYTES", "0")
    settings.cache_clear()
    SizeCap(cache).grew(2**60)
    assert len(looks) == 16


@pytest.mark.slow
def test_what_the_cap_dropped_is_not_built_in_the_catalog(
    host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    catalog = Catalog(shutil.copy(host_file, tmp_path / "catalog.db"))
    old, new = catalog.kernels("family = 'fwd_splitkv_combine'", limit=2)
    artifact = catalog.build(old)
    _age(artifact.path.with_suffix(".json"), DAY_SECONDS)
    monkeypatch.setenv("CATALOG_CACHE_MAX_BYTES", "1000")
    settings.cache_clear()
    again = Catalog(tmp_path / "catalog.db")
    again.build(new)
    assert again.kernels("built") == [new]


def test_leftovers_go_when_nobody_can_need_them(cache: Cache, project: Project) -> None:
    key = "ab" * 32
    lost = cache.so_path(key)
    lost.write_bytes(b"a library whose record was never written")
    (cache.tmp / f"{key}.x1").mkdir()
    (cache.tmp / f"{key}.x1" / "kernel.o").touch()
    (cache.tmp / f"{key}.json123").touch()
    old, partial = (cache.log(key), cache.scans / f"{key}.json", cache.trials / key), cache.scans / "tmpabc"
    folders = cache.folder, cache.logs, cache.scans, cache.trials
    unfinished = [folder / f"{PARTIAL_PREFIX}{key[:16]}" for folder in folders]
    for path in (*old, partial, *unfinished):
        path.touch()
    strangers = cache.folder / "notes.txt", cache.logs / "notes.txt"
    for path in strangers:
        path.touch()
        _age(path, 2 * OLD_SECONDS)

    collect(cache)
    assert not list(cache.tmp.iterdir())  # no builder is alive
    assert not list(cache.locks.folder.iterdir())
    assert all(path.exists() for path in (lost, *old, partial, *unfinished))  # they are young

    _age(lost, 2 * DAY_SECONDS)
    for path in (partial, *unfinished):
        _age(path, 2 * DAY_SECONDS)
    for path in old:
        _age(path, OLD_SECONDS + DAY_SECONDS)
    assert collect(cache, dry_run=True).leftovers == 9
    assert collect(cache).leftovers == 9
    assert not any(path.exists() for path in (lost, *old, partial, *unfinished))
    assert keys(cache, project) == [1, 2, 3]

    clear(cache)
    left = {path for path in cache.folder.rglob("*") if path.is_file()}
    assert left == set(strangers)  # what is not the cache's is left alone


@pytest.mark.parametrize("hostile", ["pipe", "nested", "link"])
def test_a_verdict_that_is_no_file_is_no_verdict(hostile: str, cache: Cache) -> None:
    runs, key = FirstRuns(cache.folder), "ab" * 32
    runs.remember(key, "cd" * 32, "x86_64_v3")
    [file] = (cache.folder / "guard").iterdir()
    assert runs.passed(key, "cd" * 32, "x86_64_v3")
    file.unlink()
    if hostile == "pipe":
        os.mkfifo(file)
    elif hostile == "link":
        file.symlink_to("/dev/zero")
    else:
        file.write_text("[" * 50_000)
    assert in_child(lambda: (runs.passed(key, "cd" * 32, "x86_64_v3"), runs.quarantined()), timeout=20) == (False, [])
    runs.remember(key, "cd" * 32, "x86_64_v3")
    assert runs.passed(key, "cd" * 32, "x86_64_v3")


# The registry


@pytest.fixture
def measured(populated: Callable[..., Path], tmp_path: Path) -> Catalog:
    """A catalog; two of its kernels are said to be built and timed."""
    catalog = Catalog(shutil.copy(populated("sm_90"), tmp_path / "catalog.db"))
    write = catalog.connection.execute
    write("INSERT INTO device VALUES (1, 'sm_90', 'a GPU', '{}')")
    write("INSERT INTO problem (id, key) VALUES (1, 'a problem')")
    rows = write("SELECT id FROM attention_row WHERE family = 'fwd' ORDER BY id LIMIT 2").fetchall()
    for place, (kernel,) in enumerate(rows):
        key = f"{place}" * 64
        write(
            "INSERT INTO artifact (key, kernel_id, arch, toolchain, flags, status, log, compile_s, created) "
            "VALUES (?, ?, 'sm_90', 'nvcc', '', 'built', '', 1, '2026-01-01')",
            (key, kernel),
        )
        write(
            "INSERT INTO timing (problem_id, kernel_id, device_id, artifact_key, measured_as, cold, n, min_ms, "
            "median_ms, p10_ms, p90_ms, low_ms, high_ms, tflops, gbps, created) "
            "VALUES (1, ?, 1, ?, 'graph', 0, 9, 1, 1, 1, 1, 1, 1, 1, 1, '2026-01-01')",
            (kernel, key),
        )
    return catalog


def built_and_timed(catalog: Catalog) -> tuple[int, int, int]:
    row = catalog.connection.execute("SELECT sum(built), count(best_ms), count(isa) FROM kernels").fetchone()
    return tuple(row)


def test_timings_and_libraries_are_dropped_separately(measured: Catalog, cache: Cache) -> None:
    assert built_and_timed(measured) == (2, 2, 2)
    assert sync_registry(cache, measured.path) == 2
    assert built_and_timed(measured)[:2] == (0, 2)
    assert sync_registry(cache, measured.path) == 0

    for kind in (".so", ".json"):  # one comes back, as a copy of the folder would bring it
        (cache.folder / ("0" * 64 + kind)).touch()
    assert sync_registry(cache, measured.path) == 1
    assert built_and_timed(measured)[:2] == (1, 2)

    kernel = measured.connection.execute("SELECT min(kernel_id) FROM timing").fetchone()[0]
    assert clear_timings(measured.path, f"id = '{kernel}'") == 1
    assert built_and_timed(measured)[:2] == (1, 1)
    assert clear_timings(measured.path) == 1
    assert built_and_timed(measured)[:2] == (1, 0)


def test_a_library_that_is_built_again_counts_again(
    project: Project, cache: Cache, populated: Callable[..., Path], tmp_path: Path
) -> None:
    catalog = Catalog(shutil.copy(populated("sm_90"), tmp_path / "catalog.db"))
    row = catalog.connection.execute("SELECT id FROM kernel LIMIT 1").fetchone()[0]
    record = cache.check(project.key(cache.scans, 1).hex)
    record = replace(record, kernel_id=row)
    record_artifact(catalog.connection, record.columns)
    clear(cache)
    sync_registry(cache, catalog.path)
    built = "SELECT built FROM kernels WHERE id = ?"
    assert catalog.connection.execute(built, (row,)).fetchone()[0] == 0
    record_artifact(catalog.connection, record.columns)
    assert catalog.connection.execute(built, (row,)).fetchone()[0] == 1


# The command line


def test_the_commands(cache: Cache, measured: Catalog) -> None:
    def catalog(*words: str) -> subprocess.CompletedProcess[str]:
        return command.catalog(*words, db=measured.path, CATALOG_CACHE_DIR=cache.folder)

    assert len(json.loads(catalog("cache", "ls", "--json").stdout)) == 3
    assert catalog("cache", "ls").stdout.splitlines()[-1].startswith("3 libraries, ")
    printed = catalog("cache", "path").stdout
    assert str(cache.folder) in printed
    assert "private" in printed
    assert "flock" in printed
    assert catalog("cache", "verify").stdout == "3 libraries are intact, 0 damaged\n"
    assert "Would drop 3 libraries" in catalog("cache", "gc", "--max-size", "0", "--dry-run").stdout

    os.truncate(cache.so_path(entries(cache)[0].key), 99)
    damaged = catalog("cache", "verify")
    assert damaged.returncode == 1
    assert "the next build replaces it" in damaged.stdout

    done = catalog("cache", "gc", "--older-than", "60h")
    assert done.stdout.startswith("Dropped 1 library"), done
    assert catalog("query", "built", "--count").stdout == "0\n"
    for words, message in (
        (["cache", "gc", "--max-size", "2X"], "'2X' is not a size\nHint: "),
        (["cache", "gc", "--older-than", "soon"], "'soon' is not an age\nHint: "),
        (["timings", "clear", "--where", "hdim=1", "--yes"], "no such column: hdim"),
    ):
        wrong = catalog(*words)
        assert (wrong.returncode, message in wrong.stderr) == (2, True)
    refused = catalog("cache", "clear")
    assert refused.returncode == 1
    assert len(entries(cache)) == 2
    assert "Dropped 2 libraries" in catalog("cache", "clear", "--yes").stdout
    assert catalog("timings", "clear", "--where", "family='bwd_dq_dk_dv'", "--yes").stdout == "Dropped 0 timings\n"
    assert catalog("timings", "clear", "--yes").stdout == "Dropped 2 timings\n"
