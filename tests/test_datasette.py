"""The catalog in Datasette: descriptions of tables and columns, and the included queries."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import copy_of

from catalog.ops import operation
from catalog.ops.attention.problem import Problem
from catalog.registry.connection import connect
from catalog.registry.tables import tables_of
from catalog.registry.timings import Timing, record
from catalog.report.datasette import QUERIES, metadata
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.measure import summarise

PATIENCE = {"sql_time_limit_ms": 30_000}


@pytest.fixture(scope="module")
def database(gfx950: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gfx950 with three libraries: a timed one, one that was never timed and spills, one that failed; and a miss."""
    path = tmp_path_factory.mktemp("datasette") / "catalog.db"
    catalog = copy_of(gfx950, path)
    asked = Problem(batch=8, nhead_q=32, seqlen_q=2048, hdim_q=128, dtype="bf16")
    timed, spilling, failing = (one.kernel.id for one in catalog.candidates(asked, arch="gfx950", limit=3))
    for kernel_id, status, spills, compile_s in (
        (timed, "built", 0, 20),
        (spilling, "built", 7, 30),
        (failing, "failed", None, 1),
    ):
        catalog.connection.execute(
            "INSERT INTO artifact (key, kernel_id, arch, toolchain, flags, status, log, compile_s, created, spills) "
            "VALUES (?1, ?1, 'gfx950', 'clang', '', ?2, 'its log', ?3, '', ?4)",
            (kernel_id, status, compile_s, spills),
        )
    device = DeviceInfo("gfx950", "MI355X", 256)
    record(catalog.connection, asked, device, [Timing(timed, timed, summarise([2_000_000] * 9))])
    catalog.select(asked.model_copy(update={"seqlen_q": 5}), arch="gfx950")
    catalog.close()
    return path


def test_every_column_of_every_table_is_described(tmp_path: Path) -> None:
    connection = connect(tmp_path / "catalog.db")
    there = {
        row["name"]: [column["name"] for column in connection.execute(f"PRAGMA table_info({row['name']})")]
        for row in connection.execute("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')")
    }
    connection.close()
    assert {name: sorted(columns) for name, columns in there.items()} == {
        name: sorted(table.columns) for name, table in tables_of(operation()).items()
    }
    assert all(text for table in tables_of(operation()).values() for text in (table.about, *table.columns.values()))


@pytest.mark.slow
def test_every_query_answers(database: Path) -> None:
    from datasette.app import Datasette

    async def answers() -> dict[str, list[dict[str, Any]]]:
        datasette = Datasette([str(database)], metadata=metadata("catalog"), settings=PATIENCE)
        found = {}
        for query in QUERIES:
            response = await datasette.client.get(f"/catalog/{query.name}.json?_shape=array")
            assert response.status_code == 200, response.text
            found[query.name] = response.json()
        page = (await datasette.client.get("/catalog/kernels")).text
        assert "registers spilled to memory" in page, "columns are described"
        home = (await datasette.client.get("/catalog")).text
        assert all(query.title in home for query in QUERIES)
        receipt = await datasette.client.get("/catalog/coverage_of_receipt.json?receipt=3&_shape=array")
        found["receipt 3"] = receipt.json()
        return found

    found = asyncio.run(answers())
    assert [row["median_ms"] for row in found["fastest_kernels"]] == [2.0]
    assert len(found["built_never_timed"]) == 1
    assert [row["compile_s"] for row in found["slowest_compiles"]] == [30, 20]
    assert [row["spills"] for row in found["spills"]] == [7]
    assert sum(row["kernels"] for row in found["coverage_of_receipt"]) == 34_889
    assert sum(row["kernels"] for row in found["receipt 3"]) == 12_771
    assert [row["times"] for row in found["misses"]] == [1]
    assert [row["log"] for row in found["failed_builds"]] == ["its log"]
    assert [row["relative"] for row in found["best_tiles"]] == [1.0]
    assert {row["arch"] for row in found["rules_of_family"]} == {"gfx950"}


@pytest.mark.slow
def test_the_command_writes_what_datasette_reads(database: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "catalog", "--db", str(database), "datasette-metadata"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    out = tmp_path / "metadata.json"
    written = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=True)
    assert written.stdout.strip() == str(out)
    assert json.loads(out.read_text()) == json.loads(printed)
    get = ["--metadata", str(out), "--get", "/catalog/spills.json?_shape=array"]
    setting = ["--setting", "sql_time_limit_ms", "30000"]
    served = subprocess.run(
        [sys.executable, "-m", "datasette", str(database), *get, *setting], capture_output=True, text=True, check=True
    )
    assert [row["spills"] for row in json.loads(served.stdout)] == [7]
