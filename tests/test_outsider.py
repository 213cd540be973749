"""An operation of another distribution, tests/outsider: everything works on it, and the catalog does not know it."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import command
import numpy as np
import pytest
from build_tools import build, library
from conftest import fill
from pages import ROOT, blocks_of
from test_export_projects import registered
from test_export_projects import run as run_entry

from catalog import doctor, ops
from catalog.build.export.projects import ProjectFormat
from catalog.errors import TensorError
from catalog.runtime.catalog import Catalog

OUTSIDER = Path(__file__).parent / "outsider"
PAGE = ROOT / "docs" / "how-to" / "add-an-operation.md"
MOST_LINES = 250
LANES = (8, 16, 32, 64)
FIELDS = {"operation": "rmsnorm", "rows": 48, "columns": 1000}
WORDS = ("rmsnorm", "--rows", 48, "--columns", 1000)
OF_ATTENTION = re.compile(r"hdim|seqlen|nhead|\bmask\b(?! impl|-impl)")
EXAMPLE = re.compile(r"[Ee]xample|as in|hint=|``|hdim 128|interface\.get")
"""Lines that may: examples in help texts, hints and docstrings; the kernel of a command; a member of CUDA's arrays."""
Run = Callable[..., subprocess.CompletedProcess[str]]


def files_of(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


@pytest.fixture
def installed(install: Callable[[str, str | Path, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution is there; every launch takes 10 us by the clock of the tests, whatever else runs."""
    points = re.search(r'\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"', (OUTSIDER / "pyproject.toml").read_text())
    assert points is not None
    install("rmsnorm", OUTSIDER / "rmsnorm", "[{}]\n{} = {}\n".format(*points.groups()))
    monkeypatch.setenv("CATALOG_NUM_THREADS", "1")
    device = "catalog.runtime.devices.host.device"
    monkeypatch.setattr(f"{device}.time", SimpleNamespace(perf_counter_ns=partial(next, count(0, 10_000))))
    monkeypatch.setattr(f"{device}._waits", dict)


@pytest.fixture
def catalog(installed: None, tmp_path: Path) -> Run:
    """The command line on a catalog with the operation's kernels."""
    run = partial(command.catalog, db=tmp_path / "catalog.db")
    done = run("populate", "--arch", "host", "--operation", "rmsnorm")
    assert (done.returncode, done.stdout.split()[:4]) == (0, ["family", "kernels", "-------", "-------"]), done.stderr
    return run


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def lanes_of(row: dict[str, Any]) -> int:
    return int(row["name"].split("_")[2].removeprefix("l"))


def test_it_is_short_the_page_shows_it_all_and_the_catalog_does_not_know_it() -> None:
    files = files_of(OUTSIDER)
    assert sum(len(text.splitlines()) for text in files.values()) <= MOST_LINES
    assert {block.title: block.text for block in blocks_of(PAGE) if block.title} == {
        f"outsider/{name}": text for name, text in files.items()
    }
    for folder in ("catalog", "data"):
        known = subprocess.run(["grep", "-rilI", "rmsnorm", ROOT / folder], capture_output=True, text=True, check=False)
        assert known.stdout == ""


def test_what_is_common_to_operations_does_not_know_attention() -> None:
    folders = {"attention", "torch", "migrations"}  # the operation, its door, and tables as they were
    sources = [path for path in (ROOT / "catalog").rglob("*.*") if folders.isdisjoint(path.relative_to(ROOT).parts)]
    knowing = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources
        if path.suffix in {".py", ".hpp", ".h", ".c", ".sql", ".js"}
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if OF_ATTENTION.search(line) and not EXAMPLE.search(line)
    ]
    assert not knowing


def test_its_kernels_are_listed_and_explained(catalog: Run) -> None:
    listed = rows(catalog("query", "lanes < 64", "--order-by", "lanes DESC", "--limit", 2, "--format", "json"))
    assert [row["lanes"] for row in listed] == [32, 16]
    assert len(rows(catalog("query", "--operation", "rmsnorm", "--format", "json"))) == len(LANES)
    assert "lanes             INTEGER  integer >= 0" in catalog("columns", "--operation", "rmsnorm").stdout
    explained = catalog("explain", "rmsnorm", "family=rmsnorm", "lanes=12").stdout
    assert "rejected by: variants" in explained
    assert "lanes=16  1" in explained
    narrowed = catalog("explain", "rmsnorm", "--rows", 4, "--columns", 20, "--format", "json")
    assert {"lanes_filled": 2}.items() <= {row["id"]: row["rejects"] for row in rows(narrowed)}.items()
    assert "lanes <= 8 OR lanes <= :columns" in catalog("rules", "--operation", "rmsnorm").stdout


def test_an_expression_may_be_about_several_operations(installed: None, host_file: Path, tmp_path: Path) -> None:
    both = partial(command.catalog, db=Path(shutil.copy(host_file, tmp_path / "both.db")))
    both("populate", "--arch", "host", "--operation", "rmsnorm")

    def counted(*words: str) -> int:
        return int(both("query", *words, "--count").stdout)

    fp32, of = "dtype = 'fp32'", "--operation"
    assert counted(fp32, of, "rmsnorm") == counted(f"{fp32} AND lanes > 0") == len(LANES)
    assert counted(fp32) == counted(fp32, of, "attention") + len(LANES)
    assert counted(f"{fp32} AND hdim_q > 0") == counted(fp32, of, "attention")


def test_a_kernel_is_selected_built_run_and_right(catalog: Run, tmp_path: Path) -> None:
    best = rows(catalog("select", *WORDS, "--limit", 9, "--format", "json"))
    assert [lanes_of(row) for row in best] == [64, 32, 16, 8]
    narrow = rows(catalog("select", "rmsnorm", "--rows", 48, "--columns", 20, "--format", "json"))
    assert [lanes_of(row) for row in narrow] == [16]
    assert catalog("build", "lanes IN (16, 64)").returncode == 0
    assert int(catalog("query", "built AND lanes > 0", "--count").stdout) == 2
    (ran,) = rows(catalog("run", *WORDS, "--validate", "--format", "json"))
    assert (ran["kernel"], ran["validation"]) == (best[0]["name"], "passed")

    with Catalog(tmp_path / "catalog.db") as own:
        plan = own.select(ops.problem_of(FIELDS))
        x = np.ones((48, 2000), np.float32)[:, :1000]  # strided rows
        y = plan.run(x=3 * x, w=np.full(1000, 2, np.float32)).outputs["y"]
        np.testing.assert_allclose(y, 2, rtol=1e-5)
        with pytest.raises(TensorError, match="w"):
            plan.run(x=x, w=np.ones(999, np.float32))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rows", 4), "a problem needs columns: columns of x"),
        (("--rows", 0, "--columns", 8), "rows=0: expected an integer from 1 to 2147483647"),
        (("--rows", 4, "--columns", 8, "--dtype", "fp8"), "dtype='fp8' is not allowed"),
        (("--rows", 4, "--columns", 8, "--eps", -1), "eps=-1.0: added to the mean of the squares"),
        (("--rows", 4, "--columns", 8, "--arch", "gfx950"), "no arch is called 'gfx950'"),
        (("--rows", 2**30, "--columns", 2**20), "of memory"),
    ],
)
def test_wrong_input_is_a_message(catalog: Run, words: tuple[object, ...], message: str) -> None:
    done = catalog("run", "rmsnorm", *words)
    (error, *hint) = done.stderr.splitlines()
    assert done.returncode != 0
    assert error.startswith("Error: ")
    assert message in done.stderr
    assert all(line.startswith("Hint: ") for line in hint)


def test_it_is_tuned_and_reported(catalog: Run, tmp_path: Path) -> None:
    (tuned,) = rows(catalog("tune", *WORDS, "--precision", 0.2, "--format", "json"))
    assert tuned["kernels"] == len(LANES)
    assert rows(catalog("select", *WORDS, "--format", "json"))[0]["id"] == tuned["id"]
    assert catalog("report", "--out", tmp_path / "report").returncode == 0
    assert "rmsnorm-rows48-columns1000" in (tmp_path / "report" / "index.html").read_text()


@pytest.mark.slow
def test_it_is_benched(catalog: Run, tmp_path: Path) -> None:
    assert len(rows(catalog("bench", *WORDS, "--candidates", 2, "--verify", "--format", "json"))) == 2
    shapes = tmp_path / "rows.yaml"
    shapes.write_text(
        "about: rows\noperation: rmsnorm\ngrids:\n- {name: a, category: b, vary: {rows: [1, 64], columns: [1000]}}\n"
    )
    assert len(rows(catalog("bench", "--shapes", shapes, "--format", "json"))) == 2


def test_its_calls_are_traced_and_replayed(catalog: Run, tmp_path: Path) -> None:
    assert catalog("run", *WORDS, CATALOG_TRACE=tmp_path / "calls.jsonl").returncode == 0
    (replayed,) = rows(catalog("replay", tmp_path / "calls.jsonl", "--verify", "--format", "json"))
    assert (replayed["problem"], replayed["verified"]) == ("rmsnorm-rows48-columns1000", 1)


def test_an_exported_project_compiles_and_its_kernels_are_right(catalog: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--where", "dtype = 'fp32' AND lanes > 16", "--operation", "rmsnorm", "--out", out)
    assert catalog("export", *words, "--format", "make", "--prefix", "mine").returncode == 0
    assert len(build(ProjectFormat.MAKE, out)) == 3
    entries = registered(library(ProjectFormat.MAKE, out, "libmine.so"))
    assert len(entries) == 2
    for entry in entries.values():
        run_entry(entry, ops.problem_of(FIELDS))


def test_it_goes_to_other_catalogs(catalog: Run, tmp_path: Path) -> None:
    with Catalog(tmp_path / "catalog.db") as own:
        here = partial(catalog, CATALOG_CACHE_DIR=fill(tmp_path / "own", own.kernels("lanes > 0")))
    assert here("tune", *WORDS, "--precision", 0.2).returncode == 0
    bundle = tmp_path / "rows.bundle"
    assert here("cache", "export", "--where", "lanes >= 32", bundle).stdout.startswith("2 libraries and 2 timings")
    other = partial(command.catalog, CATALOG_CACHE_DIR=tmp_path / "cache")
    taken = other("cache", "import", "--trust", bundle, db=tmp_path / "imported.db")
    assert taken.stdout.startswith("2 libraries are new, 0 already present; 2 new timings"), taken.stderr
    merged = other("merge", tmp_path / "catalog.db", "--format", "json", db=tmp_path / "merged.db")
    assert {row["what"]: row["added"] for row in rows(merged)}["timings"] == len(LANES)
    assert catalog("timings", "clear", "--where", "lanes = 8", "--yes").stdout == "Dropped 1 timing\n"


def test_it_conforms(catalog: Run) -> None:
    found = rows(catalog("conformance", "--arch", "host", "--operation", "rmsnorm", "--format", "json"))
    assert {row["verdict"] for row in found} == {"passed"}
    assert {"names round trip", "built", "verified"} <= {row["check"] for row in found}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ("import numpy as np", "import no_numpy"),
            "ModuleNotFoundError: No module named 'no_numpy'",
        ),
        (
            ("RMSNORM = RmsNorm()", "RMSNORM = RmsNorm"),
            "twin:RMSNORM is not a catalog.ops.protocol.Operation, but <class",
        ),
        (("def reference", "def reverence"), "TypeError: Can't instantiate abstract class RmsNorm"),
        (('    name = "rmsnorm"', '    name = "kernel"'), "'kernel' cannot be the name of a table"),
        (('    name = "rmsnorm"', '    name = "attention"'), "there is another operation called attention"),
        (("", ""), "there is another operation called rmsnorm"),
    ],
    ids=["import", "object", "abstract", "table", "built-in", "twice"],
)
def test_an_operation_that_cannot_be_used_is_reported_once_and_left_out(
    install: Callable[[str, str | Path, str], None],
    caplog: pytest.LogCaptureFixture,
    change: tuple[str, str],
    reason: str,
) -> None:
    source = (OUTSIDER / "rmsnorm" / "__init__.py").read_text()
    install("twin", source.replace(*change), f"[{ops.GROUP}]\ntwin = twin:RMSNORM\n")
    with caplog.at_level(logging.WARNING):
        assert [of.name for of in ops.operations()] == ["attention", "gemm", "rmsnorm"]
        assert ops.operation("rmsnorm").about
    (reported,) = caplog.messages
    assert reported.startswith(f"operation twin of twin 1.2 cannot be used: {reason}")
    findings = {finding.what: finding for finding in doctor.about_plugins()}
    assert findings["operation twin of twin 1.2"].value == "unusable"
    assert findings["operation rmsnorm of rmsnorm 1.2"][1:] == ("usable", "root mean square normalisation of rows")
