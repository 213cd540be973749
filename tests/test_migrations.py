"""Catalogs that older versions of the program made: the first use migrates one, and what was recorded stays."""

from __future__ import annotations

import json
import lzma
import re
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import command
import pytest
from rough import give_up_privileges, in_child, unwritable

from catalog.errors import RegistryError
from catalog.ops.attention.problem import Problem
from catalog.registry.connection import connect
from catalog.registry.migrate import STEPS
from catalog.registry.query import Query, count
from catalog.runtime.catalog import Catalog

VERSIONS = (1, 7, 8, 12, 15)
"""Those of the files in old_catalogs, where make.py says how they were made."""

PROBLEM = Problem(batch=1, nhead_q=1, seqlen_q=64, hdim_q=64, dtype="fp32")
"""What every file has timings of."""

OPTIONS = ("--batch", 1, "--nhead-q", 1, "--seqlen-q", 64, "--hdim-q", 64, "--dtype", "fp32", "--arch", "x86_64_v3")

KEPT = {
    "kernel": "SELECT id, name FROM kernel ORDER BY id",
    "artifact": "SELECT rowid, key, kernel_id, status, log, so_sha256, code_bytes, created FROM artifact ORDER BY key",
    "timing": "SELECT problem.key, device.name, facts, kernel_id, artifact_key, n, median_ms, p90_ms, timing.created "
    "FROM timing JOIN problem ON problem.id = problem_id JOIN device ON device.id = device_id ORDER BY kernel_id",
}
"""What no migration may change, in words that mean the same in every version."""


@pytest.fixture(params=VERSIONS, ids="version_{}".format)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpacked(request.param, tmp_path)


def test_steps_are_numbered_by_the_version_that_they_lead_to() -> None:
    assert [step.name[:4] for step in STEPS] == [f"{version:03}_" for version in range(1, len(STEPS) + 1)]


def unpacked(version: int, folder: Path) -> Path:
    packed = Path(__file__).parent / "old_catalogs" / f"version_{version}.db.xz"
    path = folder / "catalog.db"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == version
    return path


def kept(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    with closing(sqlite3.connect(path)) as connection:
        found = {what: connection.execute(sql).fetchall() for what, sql in KEPT.items()}
    assert all(found.values())
    return found


def schema(connection: sqlite3.Connection) -> dict[str, str]:
    """The SQL of everything in the file, without comments, spaces and quotes."""
    rows = connection.execute("SELECT name, sql FROM sqlite_schema")
    return {name: re.sub(r'--[^\n]*|[\s"]', "", sql or "") for name, sql in rows}


def _query(path: Path) -> None:
    done = command.catalog(
        "query", "built AND num_stages = 0", "--columns", "id,best_ms,isa", "--format", "json", db=path
    )
    listed = {row["id"]: row["best_ms"] for row in json.loads(done.stdout)}
    medians = {row[3]: row[6] for row in kept(path)["timing"]}
    built = {row[2] for row in kept(path)["artifact"] if row[3] == "built"}
    assert listed == {kernel: medians[kernel] for kernel in built}


def _select(path: Path) -> None:
    selected = json.loads(command.catalog("select", *OPTIONS, "--limit", 9, "--format", "json", db=path).stdout)
    with closing(sqlite3.connect(path)) as connection:
        [kind] = connection.execute("SELECT kind FROM problem WHERE key = ?", (PROBLEM.key,)).fetchone()
    medians = {row[3]: row[6] for row in kept(path)["timing"]} if kind else {}  # version 1 knew no kinds
    assert selected
    assert {row["id"]: row["median_ms"] for row in selected} == {row["id"]: medians.get(row["id"]) for row in selected}


def _timings(path: Path) -> None:
    timings = len(kept(path)["timing"])
    assert f"{timings} timings" in command.catalog("timings", "clear", "--yes", db=path).stdout
    with closing(connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM timing").fetchone()[0] == 0


@pytest.mark.parametrize("use", [_query, _select, _timings], ids=["query", "select", "timings"])
def test_any_first_use_migrates(old: Path, tmp_path: Path, use: Callable[[Path], None]) -> None:
    use(old)
    with closing(connect(old)) as connection, closing(connect(tmp_path / "new.db")) as new:
        assert schema(connection) == schema(new)
        assert connection.execute("PRAGMA user_version").fetchone()[0] == len(STEPS)


def test_what_was_recorded_stays(old: Path, tmp_path: Path) -> None:
    before, bytes_before = kept(old), old.read_bytes()
    with Catalog(tmp_path / "merged.db") as catalog:
        [merged] = catalog.merge([old])
        assert merged.counts["timing"]["added"] == len(before["timing"])
        assert not merged.refused
    assert old.read_bytes() == bytes_before, "merging only reads"
    with Catalog(old) as catalog:
        connection = catalog.connection
        assert kept(old) == before
        policies = connection.execute("SELECT DISTINCT measured_as, cold FROM timing").fetchall()
        assert [tuple(row) for row in policies] == [("graph", 0)], "what they were measured under"
        assert {kernel.id for kernel in catalog.kernels("1")} == {row[0] for row in before["kernel"]}, "made of traits"
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.execute("DELETE FROM artifact")
        assert connection.execute("SELECT count(*) FROM timing").fetchone()[0] == 0, "foreign keys are on again"


@pytest.mark.parametrize(("version", "misses"), [(1, {64: 3}), (7, {200: 2, 2000: 1}), (8, {200: 2, 2000: 1})])
def test_misses_are_counted_on_by_bucket(tmp_path: Path, version: int, misses: dict[int, int]) -> None:
    """Version 1 knew no kinds, so its miss of a problem that was timed keeps a bucket of its own."""
    with Catalog(unpacked(version, tmp_path)) as catalog:
        assert {json.loads(key)["seqlen_k"]: n for key, n in catalog.misses("x86_64_v3")} == misses
        catalog.select(PROBLEM.model_copy(update={"seqlen_k": 220}), arch="x86_64_v3")
        [counted] = [n for key, n in catalog.misses("x86_64_v3") if json.loads(key)["seqlen_k"] in (200, 220)]
        assert counted == misses.get(200, 0) + 1


def test_processes_that_open_an_old_catalog_at_once_migrate_it_once(old: Path) -> None:
    before = kept(old)
    with ThreadPoolExecutor(8) as pool:
        for connection in pool.map(connect, [old] * 8):
            connection.close()
    assert kept(old) == before


def test_an_old_catalog_that_cannot_be_written_is_only_read(tmp_path: Path) -> None:
    path = unpacked(7, tmp_path)

    def used() -> tuple[int, str]:
        give_up_privileges()
        with pytest.raises(RegistryError, match="migrate it first") as refused:
            connect(path)
        return count(path, Query("built")), refused.value.message

    with unwritable(tmp_path):
        built, message = in_child(used)
    assert built == sum(row[3] == "built" for row in kept(path)["artifact"])
    assert str(path) in message
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == 7
