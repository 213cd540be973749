"""What other distributions bring: an operation and a pipeline of attention, each in a folder of tests/.

Everything works on them, and the catalog does not know them.
"""

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
from conftest import fill, forget_packages
from pages import ROOT, blocks_of
from test_export_projects import registered
from test_export_projects import run as run_entry

from catalog import doctor, ops
from catalog.build.export.projects import ProjectFormat
from catalog.errors import SpecError, TensorError
from catalog.runtime.catalog import Catalog

OUTSIDER = Path(__file__).parent / "outsider"
PIPELINE = Path(__file__).parent / "outsider_pipeline"
FAMILY = Path(__file__).parent / "outsider_family"
PAGES = {OUTSIDER: "add-an-operation.md", PIPELINE: "add-a-pipeline.md", FAMILY: "add-a-family.md"}
MOST_LINES = 250
LANES = (8, 16, 32, 64)
FIELDS = {"operation": "rmsnorm", "rows": 48, "columns": 1000}
WORDS = ("rmsnorm", "--rows", 48, "--columns", 1000)
OF_ATTENTION = re.compile(r"hdim|seqlen|nhead|\bmask\b(?! impl|-impl)|catalog\.ops\.attention")
EXAMPLE = re.compile(
    r"Example: |for example |``[^`]*\b(hdim|nhead|mask)|<code>"  # in help texts, docstrings and pages
    r"|catalog\.ops\.attention\.upstream"  # CK's generator of attention, for commands about checkouts
    r'|interface\.get\("mask"\)'  # a member of CUDA's arrays
)
DOORS = {"attention", "torch", "integrations", "migrations"}
"""The operation, its doors, and tables as they were."""
Run = Callable[..., subprocess.CompletedProcess[str]]


def files_of(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def points_of(distribution: Path) -> str:
    points = re.findall(
        r'\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"', (distribution / "pyproject.toml").read_text()
    )
    assert points
    return "".join("[{}]\n{} = {}\n".format(*point) for point in points)


@pytest.fixture
def installed(install: Callable[[str, str | Path, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution is there, and the clock is steady."""
    install("rmsnorm", OUTSIDER / "rmsnorm", points_of(OUTSIDER))
    steady_clock(monkeypatch)


def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch on the host takes 10 us by the clock of the tests, whatever else runs."""
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
    assert " (revision native, space native) in " in done.stdout  # no masks
    return run


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def lanes_of(row: dict[str, Any]) -> int:
    return int(row["name"].split("_")[2].removeprefix("l"))


@pytest.mark.parametrize(("distribution", "name"), [(OUTSIDER, "rmsnorm"), (PIPELINE, "host_rows"), (FAMILY, "gemv")])
def test_it_is_short_the_page_shows_it_all_and_the_catalog_does_not_know_it(distribution: Path, name: str) -> None:
    files = files_of(distribution)
    page = ROOT / "docs" / "how-to" / PAGES[distribution]
    assert sum(len(text.splitlines()) for text in files.values()) <= MOST_LINES
    assert {block.title: block.text for block in blocks_of(page) if block.title} == {
        f"{distribution.name}/{file}": text for file, text in files.items()
    }
    for folder in ("catalog", "data"):
        known = subprocess.run(["grep", "-rilI", name, ROOT / folder], capture_output=True, text=True, check=False)
        assert known.stdout == ""


def test_what_is_common_to_operations_does_not_know_attention() -> None:
    package = ROOT / "catalog"
    files = set(package.rglob("*.*")) - {package / "__init__.py"}  # where catalog.Problem is attention's
    knowing = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(files)
        if path.suffix != ".pyc" and DOORS.isdisjoint(path.relative_to(package).parts)
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
    assert catalog("build", "lanes IN (16, 64)", "--operation", "rmsnorm").returncode == 0
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


@pytest.mark.slow
def test_it_is_tuned_and_reported_until_it_is_uninstalled(catalog: Run, tmp_path: Path) -> None:
    (tuned,) = rows(catalog("tune", *WORDS, "--precision", 0.2, "--format", "json"))
    assert tuned["kernels"] == len(LANES)
    assert rows(catalog("select", *WORDS, "--format", "json"))[0]["id"] == tuned["id"]
    assert catalog("report", "--out", tmp_path / "report").returncode == 0
    assert "rmsnorm-rows48-columns1000" in (tmp_path / "report" / "index.html").read_text()

    assert catalog("run", "rmsnorm", "--rows", 3, "--columns", 40).returncode == 0  # a miss
    assert catalog("populate", "--arch", "sm_90").returncode == 0
    shutil.rmtree(tmp_path / "rmsnorm-1.2.dist-info")
    forget_packages()
    done = catalog("report", "--out", tmp_path / "without")
    assert done.returncode == 0, done.stderr
    assert "Warning: the operation rmsnorm is left out: no installed package has it" in done.stderr
    page = (tmp_path / "without" / "index.html").read_text()
    assert "Left out: the operation rmsnorm, which no installed package has." in page
    assert "sm_90 native" in page
    assert "rmsnorm-rows" not in page


@pytest.mark.slow
def test_its_times_are_learned_from(catalog: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation says nothing about its work: FLOP, traffic and sizes are the terms of the time."""
    monkeypatch.setattr("catalog.runtime.learning.FEWEST", 2)
    for columns in (500, 1000):
        assert catalog("tune", *WORDS[:3], "--columns", columns, "--precision", 0.2).returncode == 0
    (lesson,) = rows(catalog("learn", "--format", "json"))
    assert (lesson["kind"], lesson["timings"]) == ("rmsnorm", 2 * len(LANES))
    assert {lesson["static"], lesson["nearest"], lesson["predicted"]} == {0}, "all take 10 us"


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


@pytest.mark.slow
def test_an_exported_project_compiles_and_its_kernels_are_right(catalog: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--where", "dtype = 'fp32' AND lanes > 16", "--operation", "rmsnorm", "--out", out)
    assert catalog("export", *words, "--format", "make", "--prefix", "mine").returncode == 0
    assert len(build(ProjectFormat.MAKE, out)) == 3
    entries = registered(library(ProjectFormat.MAKE, out, "libmine.so"))
    assert len(entries) == 2
    for entry in entries.values():
        run_entry(entry, ops.problem_of(FIELDS))


@pytest.mark.slow
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
        assert [of.name for of in ops.operations()] == ["attention", "gemm", "conv", "rmsnorm"]
        assert ops.operation("rmsnorm").about
    (reported,) = caplog.messages
    assert reported.startswith(f"operation twin of twin 1.2 cannot be used: {reason}")
    findings = {finding.what: finding for finding in doctor.about_plugins()}
    assert findings["operation twin of twin 1.2"].value == "unusable"
    assert findings["operation rmsnorm of rmsnorm 1.2"][1:] == ("usable", "root mean square normalisation of rows")


FEW = ("--batch", 1, "--nhead-q", 2, "--seqlen-q", 2, "--seqlen-k", 300, "--hdim-q", 32, "--dtype", "fp32")
OURS = "pipeline = 'host_rows'"


@pytest.fixture
def extended(install: Callable[[str, str | Path, str], None], tmp_path: Path) -> Run:
    """The command line on a catalog of a few kernels of attention, some with the pipeline of another distribution."""
    install("host_rows", PIPELINE / "host_rows", points_of(PIPELINE))
    run = partial(command.catalog, db=tmp_path / "catalog.db")
    where = "hdim_q = 32 AND dtype = 'fp32' AND mask = 'no' AND family = 'fwd'"
    done = run("populate", "--arch", "host", "--where", where)
    assert done.returncode == 0, done.stderr
    return run


def test_a_pipeline_of_another_distribution_is_listed_and_explained(
    extended: Run, host_file: Path, tmp_path: Path
) -> None:
    listed = rows(extended("query", OURS, "--format", "json"))
    assert len(listed) == 4
    assert all("_host_rows_vr_" in row["name"] for row in listed)
    others = ("query", "family = 'fwd' AND hdim_q = 32 AND dtype = 'fp32' AND mask = 'no' AND NOT " + OURS)
    ids = [
        {row["id"] for row in rows(command.catalog(*others, "--columns", "id", "--format", "json", db=db))}
        for db in (extended.keywords["db"], shutil.copy(host_file, tmp_path / "without.db"))
    ]
    assert ids[0] == ids[1]
    explained = extended("explain", "--arch", "host", "family=fwd", "pipeline=host_rows", "hdim_q=32", "dtype=bf16")
    assert "rejected by: variants" in explained.stdout
    many = rows(extended("explain", *FEW, "--seqlen-q", 5, "--format", "json"))
    assert {row["id"]: row["rejects"] for row in many}["rows_are_few"] == 1
    unknown = extended("explain", "--arch", "host", "family=fwd", "pipeline=host_row")
    assert "did you mean host_rows?" in unknown.stderr


def test_its_kernel_is_selected_built_run_and_right(extended: Run, tmp_path: Path) -> None:
    best = rows(extended("select", *FEW, "--limit", 9, "--format", "json"))
    assert ["host_rows" in row["name"] for row in best][:2] == [True, False]
    assert not any(
        "host_rows" in row["name"] for row in rows(extended("select", *FEW, "--seqlen-q", 5, "--format", "json"))
    )
    (ran,) = rows(extended("run", *FEW, "--validate", "--format", "json"))
    assert (ran["kernel"], ran["validation"]) == (best[0]["name"], "passed")
    assert int(extended("query", f"built AND {OURS}", "--count").stdout) == 1
    out = tmp_path / "out"
    assert extended("export", "--where", f"{OURS} AND mode = 'batch'", "--format", "make", "--out", out).returncode == 0
    assert (out / "include" / "rows" / "rows.hpp").is_file()
    build(ProjectFormat.MAKE, out)


def test_kernels_of_a_removed_package_are_reported(extended: Run, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "host_rows-1.2.dist-info")
    forget_packages()
    assert int(extended("query", OURS, "--count").stdout) == 4
    done = extended("build", OURS)
    error, hint = done.stderr.splitlines()
    assert done.returncode == 1
    assert error.endswith(": no installed package adds the pipeline 'host_rows' to attention")
    assert hint.startswith("Hint: Install the package, or drop its kernels: catalog populate --arch ")


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("__init__.py", ("EXTENSION = HostRows()", "import no_module"), "No module named 'no_module'"),
        ("__init__.py", ("EXTENSION = HostRows()", "EXTENSION = 7"), "is not a catalog.ops.protocol.Extension, but 7"),
        ("__init__.py", ('HERE / "specs"', 'str(HERE / "specs")'), "specs is not a pathlib.Path, but '"),
        ("__init__.py", ('HERE / "include"', '"include"'), "headers['rows'] is not a pathlib.Path, but 'include'"),
        ("points", ("host_rows =", "host_panel ="), "there is another pipeline called host_panel"),
        ("points", ("host_rows =", "Rows ="), "'Rows' cannot be a part of a kernel's name"),
    ],
    ids=["import", "object", "specs", "headers", "built-in", "word"],
)
def test_a_pipeline_that_cannot_be_used_is_reported_once_and_left_out(
    install: Callable[[str, str | Path, str], None],
    caplog: pytest.LogCaptureFixture,
    file: str,
    change: tuple[str, str],
    reason: str,
) -> None:
    source, points = (PIPELINE / "host_rows" / "__init__.py").read_text(), points_of(PIPELINE)
    if file == "points":
        points = points.replace(*change)
    install("host_rows", source.replace(*change), points)
    with caplog.at_level(logging.WARNING):
        spec = Catalog.default().spec("x86_64_v3")
        assert "fwd_rows" not in spec.enumerations
    (reported,) = caplog.messages
    assert re.match(rf"extension \w+ of host_rows 1.2 cannot be used: .*{re.escape(reason)}", reported)
    assert any(finding.value == "unusable" and reason in finding.about for finding in doctor.about_plugins())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (('"fwd_rows"', '"fwd"'), "enumerations.fwd: "),
        (
            ('{\n  "enumerations"', '{\n  "about": "mine", "enumerations"'),
            "about: an extension may only add enumerations",
        ),
        (('"tiles_of": "fwd"', '"tiles_of": "few"'), "tiles_of names the enumeration 'few'"),
        (("pipeline <> 'host_rows'", "pipelin <> 'host_rows'"), "no such column: pipelin"),
    ],
    ids=["enumeration", "field", "reference", "column"],
)
def test_an_extension_only_adds(
    install: Callable[[str, str | Path, str], None], tmp_path: Path, change: tuple[str, str], reason: str
) -> None:
    install("host_rows", PIPELINE / "host_rows", points_of(PIPELINE))
    path = tmp_path / "host_rows" / "specs" / "native" / "host.json"
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(SpecError, match=re.escape(reason)):
        Catalog.default().spec("x86_64_v3")
