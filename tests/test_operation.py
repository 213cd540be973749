"""An operation of another distribution, tests/rmsnorm: the catalog has no line that knows it."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import catalog
from catalog import ops
from catalog.backends import target_of, toolset_of
from catalog.build.export.rows import export_register
from catalog.conformance.findings import Verdict
from catalog.conformance.kernels import kernel_findings
from catalog.errors import ProblemError
from catalog.ops import operation, problem_of, problem_of_key
from catalog.report.data import collect
from catalog.runtime.bench_files import columns_of, row_of
from catalog.runtime.bench_shapes import Benched, BenchOptions, bench_shapes
from catalog.runtime.catalog import Catalog
from catalog.runtime.catalog_file import read_spec
from catalog.runtime.guard import Limits, guarded_problem
from catalog.runtime.measure import StopRule
from catalog.runtime.replay import ReplayOptions, replay
from catalog.runtime.traces import read_trace
from catalog.runtime.tracing import trace
from catalog.runtime.tune import TuneOptions, tune
from catalog.runtime.validate import run_problem
from catalog.schema.problem import Problem
from catalog.schema.shapes import load_shapes

PACKAGE = Path(__file__).parent / "rmsnorm"
MOST_LINES = 250
FIELDS: dict[str, Any] = {"operation": "rmsnorm", "rows": 64, "columns": 1000}
QUICK = StopRule(least=2, seconds=0.05)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The distribution where this process, and those that it starts, look for packages."""
    site = tmp_path / "site"
    shutil.copytree(PACKAGE / "rmsnorm", site / "rmsnorm")
    facts = site / "rmsnorm_kernels-0.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: rmsnorm-kernels\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text(f"[{ops.GROUP}]\nrmsnorm = rmsnorm:RMSNORM\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{Path(catalog.__file__).parent.parent}")
    ops._plugins.cache_clear()
    yield
    ops._plugins.cache_clear()
    ops.operation.cache_clear()
    sys.modules.pop("rmsnorm", None)


@pytest.fixture
def problem() -> Problem:
    return problem_of(FIELDS)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Catalog]:
    own = Catalog(tmp_path / "catalog.db")
    yield own
    own.close()


def test_the_package_is_small_and_its_header_that_of_its_list() -> None:
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".hpp", ".h", ".json", ".toml")]
    assert sum(len(path.read_text().splitlines()) for path in files) <= MOST_LINES
    header = operation("rmsnorm").headers["rmsnorm"] / "operation" / "args.h"
    assert header.read_text() == operation("rmsnorm").arguments.header


def test_a_problem_has_a_key_that_names_its_operation(problem: Problem) -> None:
    assert json.loads(problem.key) == FIELDS
    assert problem_of_key(problem.key) == problem == pickle.loads(pickle.dumps(problem))  # noqa: S301 - our own
    assert problem != problem_of(FIELDS | {"rows": 65})
    assert problem.form is problem_of(FIELDS | {"rows": 65}).form
    assert (problem.name, problem.bytes) == ("rmsnorm-rows64-columns1000", 4 * (2 * 64 * 1000 + 1000))
    for fields, message in (
        ({"colums": 3}, "a problem has no field 'colums'; did you mean columns?"),
        ({"columns": 0}, "columns=0: expected an integer from 1"),
        ({"dtype": "fp8"}, "dtype='fp8' is not allowed"),
    ):
        with pytest.raises(ProblemError) as error:
            problem_of(FIELDS | fields)
        assert message in str(error.value)
    assert guarded_problem(problem, Limits(flops=1)) == problem, "an operation need not say how to make it smaller"


def test_it_is_selected_run_and_right(own: Catalog, problem: Problem) -> None:
    facts, passed = run_problem(own, problem, arch="host", seed=0, repeats=1, validate=True)
    assert passed, facts
    assert str(facts["kernel"]).startswith("rmsnorm_fp32_l16")
    assert len(own.candidates(problem)) == 4
    x = np.ones((64, 2000), np.float32)[:, :1000]  # strided rows
    outputs = own.select(problem).run(x=x, gain=np.full(1000, 2, np.float32)).outputs
    np.testing.assert_allclose(outputs["y"], 2, rtol=1e-5)
    narrow = own.select(problem_of(FIELDS | {"columns": 7})).kernels
    assert [kernel.name.rpartition("_l")[2][0] for kernel in narrow] == ["4"], "a rule asks for the columns"


def test_it_is_tuned_benched_and_reported(own: Catalog, problem: Problem, tmp_path: Path) -> None:
    tuned = tune(own, [problem], TuneOptions(rule=QUICK))
    assert not tuned.failed
    assert not tuned.unanswered
    shapes = tmp_path / "rows.yaml"
    shapes.write_text(
        "about: rows\noperation: rmsnorm\ngrids:\n- {name: a, category: b, vary: {rows: [1, 64], columns: [1000]}}\n"
    )
    done = bench_shapes(own, load_shapes(str(shapes)).shapes, BenchOptions(rule=QUICK, verify=True))
    assert all(isinstance(one, Benched) and one.verified for one in done)
    assert list(row_of(done[0])) == list(columns_of(operation("rmsnorm")).all)
    report = collect(own, None, {})
    assert {coverage.lineage.operation for coverage in report.coverage} == {"rmsnorm"}


def test_its_calls_are_traced_and_replayed(own: Catalog, problem: Problem, tmp_path: Path) -> None:
    with trace(tmp_path / "calls.jsonl", tensors=True):
        own.select(problem).run(x=np.ones((64, 1000), np.float32), gain=np.ones(1000, np.float32))
    (done,) = replay(own, read_trace(tmp_path / "calls.jsonl").used, ReplayOptions(repeats=1, verify=True))
    assert done.verified
    assert done.inputs == "1 kept"


def test_it_conforms_and_is_exported(own: Catalog, problem: Problem, tmp_path: Path) -> None:
    kernels = own.select(problem).kernels
    findings = list(kernel_findings(own, read_spec("host", of="rmsnorm"), None))
    assert {finding.verdict for finding in findings} == {Verdict.PASSED}
    written = export_register(kernels, tmp_path / "out", "rms", targets=target_of, toolsets=toolset_of)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in written}
    assert {"include/rmsnorm/rmsnorm.hpp", "include/operation/args.h", "include/abi/export.hpp"} <= names
