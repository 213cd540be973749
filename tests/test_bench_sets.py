"""``catalog bench --shapes``: the kernels of a set timed, checked, recorded, and written to files."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from catalog.build import targets
from catalog.build.describe import describe
from catalog.cli.main import app
from catalog.errors import UsageError
from catalog.ops import operation
from catalog.ops.attention.kernel import AttentionKernel
from catalog.ops.attention.kernels.host import emit as host
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.traits import TRAITS
from catalog.runtime.bench_files import MEASURED, BenchFiles, BenchRun, columns_of
from catalog.runtime.bench_shapes import MOST_CHECKED_FLOPS, BenchOptions, bench_shapes
from catalog.runtime.catalog import Catalog
from catalog.schema.shapes import load_shapes
from catalog.settings import settings

COLUMNS = columns_of(operation())
HEADER = """\
about: small ones
grids:
  - name: mine
    category: prefill
    fixed: {batch: 1, nhead_q: 2, hdim_q: 32, dtype: fp32}
    vary: {seqlen_q: [70, 64]}
"""
WITHOUT_KERNEL = """\
  - name: wide
    category: head_dim
    fixed: {batch: 1, nhead_q: 2, seqlen_q: 8, hdim_q: 2048, dtype: fp32}
"""
LARGE = """\
  - name: large
    category: prefill
    fixed: {batch: 2, nhead_q: 4, seqlen_q: 1500, hdim_q: 32, dtype: fp32}
"""
SLOW = """\
  - name: slow
    category: prefill
    fixed: {batch: 8, nhead_q: 32, seqlen_q: 2048, hdim_q: 32, dtype: fp32}
"""
STAND_IN = """\
#include "abi/catalog_abi.h"
#include <cstdio>
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT const char* catalog_describe() {{ return {description}; }}
EXPORT int32_t catalog_workspace_size(const catalog_args* args, catalog_workspace* size) {{
    *size = {{args->num_splits}};
    return 0;
}}
EXPORT int32_t catalog_launch(const catalog_args* args, void*) {{
    if (args->batch < 0) return 2;  // asked for its ABI
    std::FILE* launches = std::fopen({launches}, "a");
    std::fputc('x', launches);
    std::fclose(launches);
    const int64_t elements = args->batch * args->nhead_q * args->seqlen_q * args->hdim_v;
    for (int64_t i = 0; i < elements; ++i) static_cast<float*>(args->o.data)[i] = 1;
    return 0;
}}
"""


@pytest.fixture(scope="module")
def catalog(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    path = shutil.copy(host_file, tmp_path_factory.mktemp("bench") / "catalog.db")
    catalog = Catalog(path, num_threads=1)  # what else runs disturbs few
    yield catalog
    catalog.close()


@pytest.fixture
def bench(catalog: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """The command, in this process, on a set with these grids."""
    monkeypatch.setenv("CATALOG_DB", str(catalog.path))
    monkeypatch.setenv("CATALOG_NUM_THREADS", "1")
    settings.cache_clear()

    def invoke(grids: str, *words: str) -> Result:
        shapes = tmp_path / "mine.yaml"
        shapes.write_text(grids)
        return CliRunner().invoke(app, ["bench", "--shapes", str(shapes), "--runs", "3", *words])

    return invoke


@pytest.fixture
def flawed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[AttentionKernel, str], Path]:
    """Give kernels a source that writes ones or does not compile; the file has a byte for each launch of it."""

    def install(row: AttentionKernel, flaw: str) -> Path:
        launches = tmp_path / "launches"

        def emit(kernel: AttentionKernel, _memory: Path) -> str:
            if kernel.id != row.id:
                return host.emit(kernel)
            if flaw == "does not compile":
                return "#error broken\n"
            return STAND_IN.format(description=json.dumps(describe(kernel)), launches=json.dumps(str(launches)))

        monkeypatch.setattr(targets, "HOST", replace(targets.HOST, emit=emit))
        return launches

    return install


def test_columns_of_every_operation_have_names_of_their_own() -> None:
    """A GEMM has an n, and a timing its number of launches."""
    for name in ("attention", "gemm", "conv"):
        columns = columns_of(operation(name)).all
        assert len({column.casefold() for column in columns}) == len(columns), "SQLite ignores case"
    assert {"m", "n", "k", "k_batch", "timed_n"} <= set(columns_of(operation("gemm")).all)


def test_the_columns_of_a_convolution_are_upstreams() -> None:
    conv = operation("conv")
    stated = ("N", "C", "K", "G", "Hi", "Wi", "Y", "X", "stride_h", "stride_w", "pad_h", "pad_w")
    assert {"kernel", *stated, "latency_ms", "tflops"} <= set(columns_of(conv).all)
    line = conv.problem(n=2, c=6, k=4, g=2, size=(50,), filter=(3,), stride=(2,), dtype="fp32")
    values = conv.bench_values(line)
    assert set(conv.bench_fields) <= set(values)
    assert [values[name] for name in stated] == [2, 6, 4, 2, 1, 50, 1, 3, 1, 2, 0, 0]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        assert tuple(rows.fieldnames or ()) == COLUMNS.all
        return list(rows)


def as_text(value: Any) -> str:
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def recorded(path: Path) -> dict[tuple[str, str], float]:
    """Medians in ms by problem and kernel."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            "SELECT problem.key, kernel_id, median_ms FROM timing JOIN problem ON problem.id = problem_id"
        ).fetchall()
    connection.close()
    return {(row[0], row[1]): row[2] for row in rows}


def test_every_trait_has_a_column_and_the_leading_ones_are_the_problems() -> None:
    columns = COLUMNS.all
    assert columns[: columns.index("tile_m0")] == (
        *("problem_name", "batch", "seqlen_q", "seqlen_k", "nhead_q", "nhead_k", "hdim_q", "hdim_v", "dtype"),
        *("kernel", "family", "mode", "pipeline"),
    )
    measured = columns.index("latency_ms")
    assert columns[measured : measured + 3] == ("latency_ms", "tflops", "bandwidth_gb_s") == MEASURED
    assert sorted(COLUMNS.of_kernel.values()) == sorted(TRAITS)
    assert {"kernel_hdim_q", "kernel_hdim_v", "kernel_dtype"} < set(COLUMNS.of_kernel)
    assert len(set(columns)) == len(columns)


def test_the_files_say_which_kernels_ran_on_what_and_how_fast(
    bench: Callable[..., Result], catalog: Catalog, tmp_path: Path
) -> None:
    in_csv, in_json = tmp_path / "rows.csv", tmp_path / "rows.json"
    words = ["--candidates", "2", "--csv", str(in_csv), "--json", str(in_json), "--format", "json"]
    done = bench(HEADER + WITHOUT_KERNEL, *words)
    assert done.exit_code == 0, done.output

    written = json.loads(in_json.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(written) == {"metadata", "results"}
    shapes = load_shapes(str(tmp_path / "mine.yaml")).shapes
    about = written["metadata"]
    assert about["arch"] == catalog.device_info("host").arch
    assert about["device"] == catalog.device_info("host").name
    assert about["category"] == str(tmp_path / "mine.yaml")
    assert (about["shapes"], about["shapes_benchmarked"], about["total_measurements"]) == (3, 2, 4)
    assert (about["failed"], about["wrong"], about["interrupted"], about["precision"]) == (1, 0, False, 0.02)

    rows = read_csv(in_csv)
    assert [row["problem_name"] for row in rows] == [shapes[0].name] * 2 + [shapes[1].name] * 2
    assert about["total_kernels"] == len({row["kernel_id"] for row in rows})
    medians = recorded(catalog.path)
    for row, result in zip(rows, written["results"], strict=True):
        assert row == {name: as_text(result[name]) for name in COLUMNS.all}
        problem = next(shape.problem for shape in shapes if shape.name == result["problem_name"])
        assert Problem(**json.loads(result["problem"])) == problem
        fields = problem.model_dump(mode="json", include=set(COLUMNS.of_problem))
        assert {name: result[name] for name in COLUMNS.of_problem} == fields
        [kernel] = catalog.kernels(f"id = '{result['kernel_id']}'")
        identity = {name: result[name] for name in TRAITS.identity}
        assert (
            AttentionKernel.from_row({trait: result[column] for column, trait in COLUMNS.of_kernel.items()} | identity)
            == kernel
        )
        assert kernel.name == result["kernel"] == result["stages"]
        assert result["latency_ms"] == pytest.approx(medians[problem.key, kernel.id], abs=1e-6)
        assert 0 < result["min_ms"] <= result["p10_ms"] <= result["latency_ms"] <= result["p90_ms"]
        assert result["tflops"] * result["latency_ms"] * 1e9 == pytest.approx(problem.flops, rel=0.01)
        assert result["bandwidth_gb_s"] * result["latency_ms"] * 1e6 == pytest.approx(problem.traffic, rel=0.01)
        assert result["n"] >= 3
        assert result["verified"] is None

    assert [row["kernel"] for row in json.loads(done.stdout)] == [row["kernel"] for row in rows]
    [message] = [line for line in done.stderr.splitlines() if line.startswith(f"{shapes[2].name}: ")]
    assert "hdim" in message
    assert "4 measurements of" in done.stderr


@pytest.mark.slow
def test_verified_kernels_are_right_also_of_problems_too_large_for_the_reference(catalog: Catalog) -> None:
    path = catalog.path.with_name("large.yaml")
    path.write_text(HEADER + LARGE)
    shapes = load_shapes(str(path)).shapes
    assert shapes[-1].problem.flops > MOST_CHECKED_FLOPS
    done = bench_shapes(catalog, shapes, BenchOptions(verify=True))
    assert [(outcome.verified, outcome.timed) for outcome in done] == [(True, True)] * 3


@pytest.mark.parametrize(
    ("flaw", "code", "message"),
    [("computes ones", 1, "is WRONG: o is off by"), ("does not compile", 0, "does not compile")],
)
def test_a_flawed_kernel_is_reported_and_not_timed(  # noqa: PLR0917 - fixtures
    flaw: str,
    code: int,
    message: str,
    bench: Callable[..., Result],
    flawed: Callable[[AttentionKernel, str], Path],
    catalog: Catalog,
    tmp_path: Path,
) -> None:
    catalog.forget()
    shape = load_shapes_of(HEADER, tmp_path)[0]
    broken, sound = (found.kernel for found in catalog.candidates(shape.problem, limit=2, static=True))
    catalog.connection.execute("DELETE FROM timing")
    launches = flawed(broken, flaw)
    done = bench(HEADER, "--candidates", "2", "--verify", "--csv", str(tmp_path / "rows.csv"))
    assert done.exit_code == code, done.output
    assert len([line for line in done.stderr.splitlines() if message in line and broken.name in line]) == 2

    rows = {(row["problem_name"], row["kernel_id"]): row for row in read_csv(tmp_path / "rows.csv")}
    right = rows[shape.name, sound.id]
    assert right["verified"] == "1"
    assert float(right["latency_ms"]) > 0
    assert broken.id not in {kernel_id for _, kernel_id in recorded(catalog.path)}
    if flaw == "computes ones":
        wrong = rows[shape.name, broken.id]
        assert wrong["verified"] == "0"
        assert {wrong[name] for name in (*MEASURED, "min_ms", "p10_ms", "p90_ms", "n")} == {""}
        assert launches.read_text() == "xx", "one launch a shape, for the comparison"
    else:
        assert (shape.name, broken.id) not in rows


def load_shapes_of(grids: str, folder: Path) -> Any:
    path = folder / "asked.yaml"
    path.write_text(grids)
    return load_shapes(str(path)).shapes


def test_nothing_to_time_is_a_failure(bench: Callable[..., Result], tmp_path: Path) -> None:
    done = bench("about: none\ngrids:\n" + WITHOUT_KERNEL, "--csv", str(tmp_path / "rows.csv"))
    assert done.exit_code == 1
    assert read_csv(tmp_path / "rows.csv") == []


@pytest.mark.slow
def test_ctrl_c_leaves_files_with_what_is_done(catalog: Catalog, tmp_path: Path) -> None:
    shapes, in_csv, in_json = tmp_path / "mine.yaml", tmp_path / "rows.csv", tmp_path / "rows.json"
    shapes.write_text(HEADER + SLOW)
    catalog.connection.execute("DELETE FROM timing")
    words = ["bench", "--shapes", str(shapes), "--runs", "2000", "--csv", str(in_csv), "--json", str(in_json)]
    command = [sys.executable, "-m", "catalog", "--db", str(catalog.path), *words]
    environment = os.environ | {"CATALOG_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).with_name("steady"))}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        deadline = time.monotonic() + 60
        while len(recorded(catalog.path)) < 2 and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # the third shape takes minutes
        running.send_signal(signal.SIGINT)
        output, said = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert "Interrupted. 2 measurements" in said
    rows = read_csv(in_csv)
    assert {(row["problem"], row["kernel_id"]) for row in rows} >= set(recorded(catalog.path)), "noise is not recorded"
    written = json.loads(in_json.read_text())
    assert (len(written["results"]), written["metadata"]["interrupted"]) == (2, True)
    assert rows[0]["kernel"] in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "rows.csv", "rows.json"]


def test_an_interrupt_before_the_first_row_keeps_the_file_that_was_there(catalog: Catalog, tmp_path: Path) -> None:
    before = tmp_path / "rows.csv"
    before.write_text("worth keeping\n")
    run = BenchRun("smoke", (), BenchOptions(), catalog.device_info("host"))
    with pytest.raises(KeyboardInterrupt), BenchFiles(before).of(run):
        raise KeyboardInterrupt
    assert (run.exit_code, before.read_text()) == (130, "worth keeping\n")


@pytest.mark.slow
def test_one_problem_by_its_options_writes_the_same_files_and_records_nothing(
    bench: Callable[..., Result], catalog: Catalog, tmp_path: Path
) -> None:
    catalog.connection.execute("DELETE FROM timing")
    problem = ["--batch", "1", "--nhead-q", "2", "--seqlen-q", "70", "--hdim-q", "32", "--dtype", "fp32"]
    words = ["--runs", "2", "--verify", "--csv", str(tmp_path / "rows.csv"), "--json", str(tmp_path / "rows.json")]
    done = CliRunner().invoke(app, ["bench", *problem, *words])
    assert done.exit_code == 0, done.output
    [row] = read_csv(tmp_path / "rows.csv")
    assert (row["category"], row["verified"], row["seqlen_q"]) == ("problem", "1", "70")
    assert row["kernel"] in done.stdout
    written = json.loads((tmp_path / "rows.json").read_text())
    assert (written["metadata"]["category"], len(written["results"])) == ("problem", 1)
    assert recorded(catalog.path) == {}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"csv": Path("nowhere/rows.csv")}, "folder .*nowhere does not exist"),
        ({"json": Path()}, "is not a file"),
        ({"csv": Path("rows"), "json": Path("./rows")}, "are the same file"),
        ({"csv": Path("x" * 5000)}, "too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_reported_before_any_work(files: dict[str, Path], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchFiles(**files)


def test_a_set_and_a_problem_are_one_too_many(bench: Callable[..., Result]) -> None:
    done = bench(HEADER, "--batch", "1")
    assert isinstance(done.exception, UsageError)
    assert "give either the options of a problem or --shapes SET" in str(done.exception)
