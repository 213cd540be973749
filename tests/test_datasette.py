"""The catalog in Datasette: descriptions of tables and columns, and the included queries."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import command
import pytest
from browser import browser
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


@contextmanager
def served(database: Path) -> Iterator[str]:
    """The address of the catalog in a process that Ctrl-C ends."""
    command = [sys.executable, "-m", "catalog", "--db", str(database), "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        assert line.startswith("http://127.0.0.1:"), process.stderr.read() if process.stderr else line
        yield line.split()[0]
    finally:
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)
    assert (process.returncode, *said) == (0, "", "")


@pytest.mark.slow
def test_pages_are_served_and_the_file_stays_as_it_is(database: Path, tmp_path: Path) -> None:
    """From the table to a kernel, from there to why it exists; what answers a problem; bad input; the plots."""
    before = database.read_bytes()
    with served(database) as address, browser(tmp_path) as tab:
        tab.open(f"{address}catalog/timing")
        tab.open(tab.evaluate("document.querySelector('a[href^=\"/-/kernel/\"]').href"))
        text = tab.evaluate("document.body.innerText")
        assert "MI355X" in text
        assert "2.0" in text
        assert "clang" in text
        assert "CK checkout" in text, "the source, or what is missing for it"
        similar = tab.evaluate("document.querySelectorAll('#similar ~ div a[href^=\"/-/kernel/\"]').length")
        assert similar > 5
        tab.open(tab.evaluate("document.querySelector('a[href*=\"words=\"]').href"))
        assert "It exists: fmha_fwd_d128_bf16_batch" in tab.evaluate("document.body.innerText")
        for words, answer in (
            ("batch=1 nhead_q=8 seqlen_q=2048 hdim_q=128", "fwd kernels answer the problem"),
            ("family=fwd hdim_q=77", "No kernel of gfx950 has these traits"),
            ("batch=1 nhead_q=8 seqlen_q=many", "seqlen_q"),
            ("'", "No closing quotation"),
        ):
            tab.open(f"{address}-/explain?arch=gfx950")
            tab.evaluate(f"document.querySelector('#words').value = {json.dumps(words)}")
            there = tab.evaluate("'/-/explain?' + new URLSearchParams(new FormData(document.forms[0])).toString()")
            tab.open(f"{address[:-1]}{there}")
            assert answer in tab.evaluate("document.body.innerText")
        tab.open(f"{address}-/report")
        assert tab.evaluate("document.querySelectorAll('svg').length") > 0
        assert not tab.complaints()
        tab.open(f"{address}-/kernel/{'0' * 64}")
        assert "the catalog has no kernel" in tab.evaluate("document.body.innerText")
    assert database.read_bytes() == before


def test_a_server_needs_a_file_and_a_free_port(populated: Callable[..., Path], tmp_path: Path) -> None:
    absent = command.catalog("serve", db=tmp_path / "none.db")
    assert (absent.returncode, "there is no catalog at" in absent.stderr) == (2, True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = command.catalog("serve", "--port", taken.getsockname()[1], db=populated("sm_90"))
    assert (busy.returncode, "cannot be listened at" in busy.stderr) == (2, True)
