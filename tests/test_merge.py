"""Catalogs of several machines become one: real files, in any order, any number of times."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import permutations
from pathlib import Path

import command
import pytest
from conftest import slow_but
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from catalog.errors import RegistryError, UsageError
from catalog.ops.attention.kernel import AttentionKernel
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.traits import TRAITS
from catalog.registry import merge_read
from catalog.registry.connection import connect, sha256_hex
from catalog.registry.kernels import add_kernel, kernel_of
from catalog.registry.query import Query, run
from catalog.registry.views import drop_views
from catalog.runtime.catalog import Catalog

CONTENT = {
    "kernel": f"SELECT id, name, arch, variant, {', '.join(TRAITS)}, hw_valid, dispatch_order FROM attention_row "
    "WHERE id IN (SELECT kernel_id FROM artifact)",
    "receipt": "SELECT * FROM kernel_receipt WHERE kernel_id IN (SELECT kernel_id FROM artifact)",
    "artifact": "SELECT key, kernel_id, toolchain, status, log, compile_s, created FROM artifact",
    "timing": "SELECT key, kernel_id, arch, name, facts, artifact_key, median_ms, timing.created FROM timing "
    "JOIN device ON device.id = device_id JOIN problem ON problem.id = problem_id",
}
"""All that merging is about, in words that mean the same in every file."""


@pytest.fixture(scope="session")
def kernels(gfx950: Catalog) -> list[AttentionKernel]:
    return gfx950.kernels("family = 'fwd'", arch="gfx950", limit=4)


@pytest.fixture
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catalogs")
    connect(folder / "empty.db").close()
    return folder


Record = tuple[int, int, str, str]
"""AttentionKernel, toolchain, status, when."""
Time = tuple[int, int, int, int, str, float]
"""Problem, kernel, toolchain, device, when, median."""

FIRST, SECOND = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"


def problem_key(number: int) -> str:
    return Problem(batch=1 + number, nhead_q=1, seqlen_q=64, hdim_q=64, dtype="fp16").key


def artifact_key(kernel: AttentionKernel, toolchain: int) -> str:
    return sha256_hex(f"{kernel.id} {toolchain}")


def there(connection: sqlite3.Connection, table: str) -> list[str]:
    """The columns that a table of this file's version has."""
    return [row["name"] for row in connection.execute(f"PRAGMA table_info({table})")]


def write(
    path: Path, kernels: Sequence[AttentionKernel], records: Sequence[Record], times: Sequence[Time] = ()
) -> Path:
    """A catalog at ``path`` with the rows that are asked for, and those that they refer to."""
    connection = connect(path)
    for number, toolchain, status, day in records:
        kernel = kernels[number]
        if kernel_of(connection, kernel.id) is None:
            add_kernel(connection, kernel, {"hw_valid": 1, "dispatch_order": 1})
        connection.execute("INSERT OR IGNORE INTO kernel_receipt VALUES (?, ?)", (kernel.id, number))
        connection.execute(
            "INSERT OR IGNORE INTO artifact (key, kernel_id, arch, toolchain, flags, status, log, compile_s, created) "
            "VALUES (?, ?, ?, ?, '', ?, '', 1.0, ?)",
            (artifact_key(kernel, toolchain), kernel.id, kernel.arch, f"compiler {toolchain}", status, day),
        )
    for problem, number, toolchain, device, day, median in times:
        kernel = kernels[number]
        connection.execute("INSERT OR IGNORE INTO problem (key) VALUES (?)", (problem_key(problem),))
        connection.execute("INSERT OR IGNORE INTO device (arch, name, facts) VALUES ('a', ?, '{}')", (f"gpu {device}",))
        row = {
            "kernel_id": kernel.id,
            "artifact_key": artifact_key(kernel, toolchain),
            "n": 9,
            "measured_as": "graph",
            "cold": 0,
            "created": day,
        }
        row |= dict.fromkeys(("min_ms", "median_ms", "p10_ms", "p90_ms", "low_ms", "high_ms", "tflops", "gbps"), median)
        row = {name: value for name, value in row.items() if name in there(connection, "timing")}
        connection.execute(
            f"INSERT OR IGNORE INTO timing (problem_id, device_id, {', '.join(row)}) SELECT problem.id, device.id, "
            f"{', '.join('?' * len(row))} FROM problem, device WHERE key = ? AND name = ?",
            (*row.values(), problem_key(problem), f"gpu {device}"),
        )
    connection.close()
    return path


def content(path: Path) -> dict[str, list[tuple[object, ...]]]:
    with closing(sqlite3.connect(path)) as connection:
        return {name: sorted(map(tuple, connection.execute(sql))) for name, sql in CONTENT.items()}


def open_files() -> set[str]:
    """What the descriptors of this process refer to."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found.add(str(descriptor.readlink()))
    return found


def merged(folder: Path, name: str, *paths: Path) -> Path:
    """The first of ``paths``, copied, with the others merged into it."""
    shutil.copy(paths[0], folder / name)
    catalog = Catalog(folder / name)
    catalog.merge(paths[1:])
    catalog.close()
    return folder / name


days = st.sampled_from([FIRST, SECOND])
records = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.sampled_from(["built", "failed"]), days))
times = st.lists(st.tuples(*[st.integers(0, 1)] * 4, days, st.sampled_from([0.5, 1.0, 2.0])))


@pytest.mark.slow
@given(data=st.data())
@hypothesis_settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_order_and_repetition_do_not_count(
    data: st.DataObject, kernels: list[AttentionKernel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    files = []
    for name in ("a", "b", "c"):
        timed = data.draw(times)
        for_timings = [(kernel, toolchain, "built", FIRST) for _, kernel, toolchain, *_ in timed]
        files.append(write(folder / f"{name}.db", kernels, data.draw(records) + for_timings, timed))
    a, b, c = files
    one = merged(folder, "one.db", a, b, c)
    assert content(one) == content(merged(folder, "other.db", c, b, a))
    assert content(one) == content(merged(folder, "nested.db", a, merged(folder, "inner.db", c, b)))
    assert content(one) == content(merged(folder, "again.db", one, b, a, c))


def test_every_order_of_the_files_makes_the_same_catalog(kernels: list[AttentionKernel], empty: Path) -> None:
    """Timings of one second, builds that failed elsewhere, receipts, a model whose kernels are in other files."""
    files = [
        write(empty / "a.db", kernels, [(0, 0, "built", FIRST)], [(0, 0, 0, 0, SECOND, 1.0)]),
        write(empty / "b.db", kernels, [(0, 0, "failed", SECOND), (0, 1, "built", FIRST)], [(0, 0, 0, 0, SECOND, 2.0)]),
        write(empty / "c.db", kernels, [(1, 0, "failed", FIRST)]),
    ]
    model = (
        "INSERT INTO model SELECT '{}', lineage.id, device.id, 'graph', 0, '[]', '{}', 1, 1, 1, 1.0, 1.0, 1.0, "
        f"'{FIRST}' FROM lineage, device"
    )
    with closing(connect(files[2])) as connection:
        connection.execute("INSERT INTO device (arch, name, facts) VALUES ('a', 'gpu 0', '{}')")
        connection.execute(model)
        connection.execute("UPDATE kernel SET hw_valid = 0, dispatch_order = 7")
        connection.execute("DELETE FROM artifact")
    with closing(connect(files[1])) as connection:
        connection.execute("UPDATE kernel SET dispatch_order = 9")
        connection.execute("INSERT INTO kernel_receipt SELECT id, 9 FROM kernel")
    found = []
    for number, order in enumerate(permutations(files)):
        with Catalog(shutil.copy(empty / "empty.db", empty / f"{number}.db")) as catalog:
            catalog.merge(order)
            models = catalog.connection.execute("SELECT kind, terms FROM model").fetchall()
        found.append((content(catalog.path), [tuple(row) for row in models]))
    assert found == found[:1] * len(found)
    [(contents, models)] = found[:1]
    assert (len(contents["timing"]), len(contents["receipt"]), models) == (1, 2, [("{}", "[]")])


def test_devices_stay_apart_and_the_newest_wins(kernels: list[AttentionKernel], empty: Path) -> None:
    builds = [(0, 0, "built", FIRST), (1, 0, "failed", FIRST)]
    here = write(empty / "here.db", kernels, builds, [(0, 0, 0, 0, FIRST, 1.0)])
    there = write(empty / "there.db", kernels, builds, [(0, 0, 0, 0, SECOND, 2.0), (0, 0, 0, 1, FIRST, 3.0)])
    catalog = Catalog(here)
    [done] = catalog.merge([there])
    counts = {table: dict(count) for table, count in done.counts.items()}
    assert counts["timing"] == {"renewed": 1, "added": 1}
    assert counts["device"] == {"added": 1, "the same": 1}
    assert counts["kernel"] == counts["artifact"] == {"the same": 2}
    rows = catalog.connection.execute(
        "SELECT name, median_ms FROM timing JOIN device ON device.id = device_id ORDER BY 1"
    )
    assert list(map(tuple, rows)) == [("gpu 0", 2.0), ("gpu 1", 3.0)]
    [again] = catalog.merge([there])
    assert {how for count in again.counts.values() for how in count} == {"the same"}


def test_files_merged_together_count_as_if_merged_one_after_another(
    kernels: list[AttentionKernel], empty: Path
) -> None:
    """Files of the same machine too: the third has a newer timing than the first and the timing of the second."""
    timings = [
        [(0, 0, 0, 0, FIRST, 1.0), (1, 0, 0, 0, FIRST, 1.0)],
        [(0, 0, 0, 1, FIRST, 2.0)],
        [(0, 0, 0, 0, SECOND, 3.0), (0, 0, 0, 1, FIRST, 2.0), (0, 0, 0, 2, FIRST, 4.0)],
    ]
    files = [
        write(empty / f"{number}.db", kernels, [(0, 0, "built", FIRST)], times) for number, times in enumerate(timings)
    ]
    together, one_by_one = (Catalog(shutil.copy(empty / "empty.db", empty / f"{name}.db")) for name in "ab")
    done = together.merge(files)
    assert [one.counts for one in done] == [one.counts for path in files for one in one_by_one.merge([path])]
    assert [dict(one.counts["timing"]) for one in done] == [
        {"added": 2},
        {"added": 1},
        {"added": 1, "renewed": 1, "the same": 1},
    ]
    assert content(together.path) == content(one_by_one.path)


def test_a_file_from_before_a_trait_was_added_is_merged(kernels: list[AttentionKernel], empty: Path) -> None:
    there = write(empty / "there.db", kernels, [(0, 0, "built", FIRST)], [(0, 0, 0, 0, FIRST, 1.0)])
    with closing(sqlite3.connect(there, isolation_level=None)) as connection:
        drop_views(connection)
        connection.execute("ALTER TABLE attention DROP COLUMN num_stages")
    with Catalog(empty / "empty.db") as catalog:
        [done] = catalog.merge([there])
        assert (done.counts["timing"], done.refused) == ({"added": 1}, {})
        assert catalog.kernels("num_stages = 0") == kernels[:1]


@pytest.mark.slow
def test_built_speaks_of_this_machine_alone(kernels: list[AttentionKernel], empty: Path) -> None:
    there = write(
        empty / "there.db",
        kernels,
        [(0, 0, "built", SECOND), (1, 0, "built", SECOND), (2, 0, "failed", SECOND)],
        [(0, 0, 0, 0, SECOND, 2.0)],
    )
    here = write(empty / "here.db", kernels, [(1, 0, "built", FIRST)])
    catalog = Catalog(here)
    catalog.merge([there])
    asked = Query(columns=("id", "built", "best_ms"))
    assert sorted(run(here, asked)) == sorted(
        [(kernels[0].id, 0, 2.0), (kernels[1].id, 1, None), (kernels[2].id, 0, None)]
    )
    # A whole population finds the rows that came before it, with their receipts, and what is known of them.
    catalog.populate("gfx950")
    assert catalog.parity("gfx950", 0).passed
    assert list(run(here, Query("best_ms IS NOT NULL", columns=("id", "built")))) == [(kernels[0].id, 0)]


def test_kernels_of_other_facts_stay_out_of_a_whole_population(
    copied: Catalog, kernels: list[AttentionKernel], empty: Path
) -> None:
    alien = AttentionKernel.from_row(kernels[0].to_row() | {"tile_m0": 8})
    there = write(empty / "there.db", [alien], [(0, 0, "built", FIRST)], [(0, 0, 0, 0, FIRST, 1.0)])
    [done] = copied.merge([there])
    assert "left out 1 kernel" in done.notes[0]
    assert "the facts here make for gfx950 2026-05 ck generic" in done.notes[0]
    assert copied.connection.execute("SELECT count(*) FROM timing").fetchone()[0] == 0
    assert copied.parity("gfx950", 0).passed
    [done] = Catalog(empty / "empty.db").merge([there])
    assert done.counts["timing"]["added"] == 1, "where nothing is populated, it is a kernel as any other"


def _nothing(path: Path) -> None:
    path.write_bytes(b"")


def _no_database(path: Path) -> None:
    path.write_text("no database at all, but some words that are long enough for a header of SQLite's " * 9)


def _foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE timing (id)")


def _newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


def _torn(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8192] + b"\xa5" * (len(data) - 8192))


def _dangling(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM device")


def _lying(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_schema SET sql = replace(sql, 'STRICT', '') WHERE name = 'timing'")
        connection.execute("PRAGMA writable_schema = RESET")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE timing SET median_ms = 'soon'")


def _a_view_without_end(path: Path) -> None:
    columns = ", ".join(f"i AS {name}" for name in _columns(path, "timing"))
    endless = "WITH RECURSIVE endless(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM endless)"
    _replace_timing(path, f"CREATE VIEW timing AS {endless} SELECT {columns} FROM endless")


def _a_view_in_disguise(path: Path) -> None:
    """A row of the schema that says that it is a table, and whose SQL makes a view."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_schema SET sql = 'CREATE VIEW timing AS SELECT 1' WHERE name = 'timing'")


def _a_virtual_table(path: Path) -> None:
    columns = _columns(path, "timing")
    _replace_timing(path, f"CREATE VIRTUAL TABLE timing USING fts5({', '.join(columns)})")


def _a_generated_column(path: Path) -> None:
    columns = [name for name in _columns(path, "timing") if name != "n"]
    _replace_timing(path, f"CREATE TABLE timing ({', '.join(columns)}, n AS (length(hex(zeroblob(1000000)))))")


def _a_pipe_for_a_log(path: Path) -> None:
    os.mkfifo(path.with_name(path.name + "-journal"))


def _a_schema_that_is_not_utf8(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE problem", b"CREATE TABLE \xff\xfe\xfd\xff(\xff("))


def _columns(path: Path, table: str) -> list[str]:
    with closing(connect(path)) as connection:
        return there(connection, table)


def _replace_timing(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("DROP VIEW kernels")
        connection.execute("DROP TABLE timing")
        connection.execute(statement)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "there is no catalog at"),
        (_nothing, "is empty, not a catalog"),
        (_no_database, "not a database"),
        (_foreign, "not a catalog"),
        (_newer, "schema version 99"),
        (_torn, "malformed"),
        (_dangling, "refers to rows that do not exist"),
        (_lying, "cannot store TEXT value in REAL column"),
        (_a_view_without_end, "its timing is a view, not a table"),
        (_a_view_in_disguise, "malformed|not a table"),
        (_a_virtual_table, "its timing is a virtual, not a table"),
        (_a_generated_column, "other columns than those of a catalog"),
        (_a_pipe_for_a_log, "not a regular file"),
        (_a_schema_that_is_not_utf8, "cannot be merged"),
    ],
)
def test_a_file_that_cannot_be_merged_changes_nothing(
    damage: Callable[[Path], None], message: str, kernels: list[AttentionKernel], empty: Path
) -> None:
    sound = write(empty / "sound.db", kernels, [(0, 0, "built", FIRST)], [(0, 0, 0, 0, FIRST, 1.0)])
    damaged = write(empty / "damaged.db", kernels, [(1, 0, "built", FIRST)], [(0, 1, 0, 0, FIRST, 1.0)])
    damage(damaged)
    catalog = Catalog(empty / "empty.db")
    with pytest.raises(RegistryError, match=message) as caught:
        catalog.merge([sound, damaged, *[sound] * 6])  # of which some are being read when the error is found
    assert str(damaged) in str(caught.value)
    assert not any(content(catalog.path).values())
    assert not {str(sound), str(damaged)} & open_files()


REFUSED = {
    "UPDATE timing SET median_ms = -1, min_ms = -2": "1 timing (min_ms: must be at least 1e-06)",
    "UPDATE timing SET median_ms = 9e999": "1 timing (median_ms: expected a finite number)",
    "UPDATE timing SET tflops = 9e999": "1 timing (tflops: expected a finite number)",
    "UPDATE timing SET p90_ms = 0.5": "1 timing (the percentiles are not in order)",
    "UPDATE timing SET created = '2990-01-01T00:00:00+00:00'": "1 timing (created: a date in the future, or none)",
    "UPDATE timing SET created = '2026-13-32T25:00:00+00:00'": "1 timing (created: a date in the future, or none)",
    "UPDATE device SET facts = printf('%.*c', 100000, '[')": "1 timing (device.facts: must have at most 65,536 char",
    "UPDATE device SET facts = printf('%.*c', 60000, '[')": "1 timing (device.facts: not JSON",
    "UPDATE problem SET key = '{}'": "1 timing (problem: not the key of a problem)",
    "UPDATE artifact SET log = printf('%.*c', 5000000, 'x')": "1 artifact (log: must have at most 65,536 characters)",
    "UPDATE artifact SET created = '2990-01-01T00:00:00+00:00'": "1 artifact (created: a date in the future, or none)",
    "UPDATE artifact SET arch = 'gfx942'": "1 artifact (arch: differs from that of its kernel)",
    "UPDATE artifact SET so_bytes = -1": "1 artifact (so_bytes: must be above 0)",
    "UPDATE artifact SET registers = 9000000000": "1 artifact (resources.registers: must be below",
}


@pytest.mark.parametrize("change", slow_but([*REFUSED][::2], REFUSED))
def test_rows_that_no_catalog_can_have_are_refused(change: str, kernels: list[AttentionKernel], empty: Path) -> None:
    rows = [(0, 0, "built", FIRST)], [(0, 0, 0, 0, FIRST, 1.0)]
    sound, hostile = write(empty / "sound.db", kernels, *rows), write(empty / "hostile.db", kernels, *rows)
    with closing(sqlite3.connect(hostile, isolation_level=None)) as connection:
        connection.execute(change)
    expected = content(merged(empty, "expected.db", sound))
    catalog = Catalog(shutil.copy(sound, empty / "here.db"))
    [done] = catalog.merge([hostile])
    [note] = done.notes
    assert f"{hostile}: refused " in note
    assert REFUSED[change] in note
    assert content(catalog.path) == expected


def test_nobody_waits_while_a_file_is_read(
    kernels: list[AttentionKernel], empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading ends at its time limit, and holds no lock of the catalog that is merged into."""
    other = write(empty / "other.db", kernels, [(number, 0, "built", FIRST) for number in range(4)])
    monkeypatch.setattr(merge_read, "READ_SECONDS", 0.0)
    monkeypatch.setattr(merge_read, "_STEPS", 1)
    catalog, writer = Catalog(empty / "empty.db"), sqlite3.connect(empty / "empty.db", timeout=0)
    with closing(writer):
        writer.execute("BEGIN IMMEDIATE")
        with pytest.raises(RegistryError, match="reading it took longer than 0 s"):
            catalog.merge([other])


def test_a_catalog_is_not_merged_into_itself(empty: Path) -> None:
    with pytest.raises(UsageError, match="others are merged into"):
        Catalog(empty / "empty.db").merge([empty / "empty.db"])


def test_the_command_prints_what_was_added(kernels: list[AttentionKernel], empty: Path) -> None:
    there = write(empty / "mi300.db", kernels, [(0, 0, "built", FIRST)], [(0, 0, 0, 0, FIRST, 1.0)])
    db = empty / "empty.db"
    done = command.catalog("merge", there, db=db)
    assert [line.split() for line in done.stdout.splitlines()[2:]] == [
        ["mi300.db", f"{table}s", "1", "0", "0"] for table in ("kernel", "artifact", "device", "problem", "timing")
    ]
    shown = command.catalog("query", "best_ms = 1.0", "--columns", "arch,built", "--format", "json", db=db)
    assert json.loads(shown.stdout) == [{"arch": "gfx950", "built": False}]
    failed = command.catalog("merge", empty, db=db)
    assert (failed.returncode, failed.stderr) == (1, f"Error: there is no catalog at {empty}\n")
