"""Tuning on this machine: what is timed, what is recorded, and what selection makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from catalog.backends import HOST
from catalog.runtime import timings
from catalog.runtime.catalog import Catalog
from catalog.runtime.measure import StopRule
from catalog.runtime.tune import TuneOptions, tune
from catalog.schema.problem import Problem
from catalog.settings import settings

QUICK = TuneOptions(candidates=3, rule=StopRule(precision=0.2, least=3, seconds=0.2, warm_up_seconds=0.01))


def small(**fields: Any) -> Problem:
    return Problem(**{"batch": 1, "nhead_q": 2, "seqlen_q": 70, "hdim_q": 32, "dtype": "fp32"} | fields)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path_factory.mktemp("tune") / "catalog.db")
    yield catalog
    catalog.close()


def recorded(catalog: Catalog) -> list[tuple[Any, ...]]:
    rows = catalog.connection.execute(
        "SELECT problem.key, kernel_id, n, min_ms, low_ms, median_ms, high_ms, cold, load FROM timing "
        "JOIN problem ON problem.id = problem_id ORDER BY 1, 2"
    )
    return [tuple(row) for row in rows]


def test_tuning_measures_records_and_selects(catalog: Catalog) -> None:
    problem = small()
    static = [found.kernel.id for found in catalog.candidates(problem, limit=3, static=True)]
    before = catalog.select(problem)
    report = tune(catalog, [problem], QUICK)
    (tuned,) = report.tuned
    assert sorted(tuned.medians) == sorted(static)
    assert not tuned.failures
    assert tuned.first == static[0]
    assert tuned.gain is not None
    assert report.gain == pytest.approx(tuned.gain)
    assert tuned.gain >= 1

    rows = recorded(catalog)
    assert [row[1] for row in rows] == sorted(static)
    for _, _, n, least, low, median, high, cold, load in rows:
        assert n >= 3
        assert least <= low <= median <= high
        assert not cold
        assert load >= 0

    choice = catalog.choice(problem)
    assert choice.evidence == "measured"
    assert tuned.best is not None
    assert choice.candidates[0].median_ms is not None
    assert choice.candidates[0].median_ms <= (1 + HOST.noise) * tuned.best[1]
    after = catalog.select(problem)
    assert after is not before, "what was chosen before is forgotten"
    assert after.kernels[0].id == choice.candidates[0].kernel.id
    assert catalog.choice(small(seqlen_q=100)).evidence == "nearest"


def test_what_was_measured_is_not_measured_again_unless_asked(catalog: Catalog) -> None:
    tune(catalog, [small()], QUICK)
    rows = recorded(catalog)
    (again,) = tune(catalog, [small()], QUICK).tuned
    assert again.known
    assert len(again.medians) == 3
    assert recorded(catalog) == rows
    (fresh,) = tune(catalog, [small()], TuneOptions(candidates=1, rule=QUICK.rule, again=True)).tuned
    assert not fresh.known
    assert len(recorded(catalog)) == len(rows), "a row for each problem, kernel, device and library"


def test_a_budget_leaves_the_rest_for_another_time(catalog: Catalog) -> None:
    problems = [small(seqlen_q=length) for length in (10, 20, 30)]
    stopped = tune(catalog, problems, TuneOptions(candidates=1, seconds=0, rule=QUICK.rule))
    assert (stopped.tuned, stopped.left) == ((), tuple(problems))
    seen: list[Problem] = []
    report = tune(catalog, problems, TuneOptions(candidates=1, rule=QUICK.rule), lambda done: seen.append(done.problem))
    assert [tuned.problem for tuned in report.tuned] == seen == problems


def test_a_problem_without_a_kernel_is_told_and_stops_no_other(catalog: Catalog) -> None:
    wide = small(hdim_q=2048)
    report = tune(catalog, [wide, small()], TuneOptions(candidates=1, rule=QUICK.rule))
    assert "hdim" in report.unanswered[wide.key]
    assert [tuned.problem for tuned in report.tuned] == [small()]


def test_a_kernel_that_does_not_compile_is_left_out(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small(seqlen_q=40, lse=True)
    broken = catalog.candidates(problem, limit=3, static=True)[1].kernel
    emit = catalog.builder._targets(broken.arch).emit
    from catalog.build import targets

    def emitting(kernel: Any, memory: Any) -> str:
        return "#error broken\n" if kernel.id == broken.id else emit(kernel, memory)

    from dataclasses import replace

    monkeypatch.setattr(targets, "HOST", replace(targets.HOST, emit=emitting))
    (tuned,) = tune(catalog, [problem], QUICK).tuned
    assert "does not compile" in tuned.failures[broken.id]
    assert len(tuned.medians) == 2


def test_problems_that_were_never_measured_are_counted_until_one_of_their_size_is(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> dict[str, int]:
        return dict(catalog.misses(catalog.device("host").device.arch))

    seldom, often, close = (small(seqlen_q=length, mask="causal") for length in (20, 64, 120))
    for problem in (seldom, often, close, close):
        catalog.select(problem)
        catalog.forget()
    assert (asked()[seldom.key], asked()[often.key]) == (1, 3)
    assert next(iter(asked())) == often.key
    assert close.key not in asked(), "one row counts what is about as large"
    tune(catalog, [close], TuneOptions(candidates=1, rule=QUICK.rule))
    catalog.select(often)
    assert often.key not in asked()

    monkeypatch.setenv("CATALOG_RECORD_MISSES", "false")
    settings.cache_clear()
    catalog.select(small(seqlen_q=700))
    assert small(seqlen_q=700).key not in asked()


def test_a_cache_that_grows_leaves_few_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row a size, not a row a length; and where there are too many sizes, those go that nobody asked for any more."""
    catalog = Catalog(tmp_path / "catalog.db")
    lengths = range(1, 1025)
    for length in lengths:
        catalog.select(small(seqlen_q=1, seqlen_k=length))
    counts = [count for _, count in catalog.misses(catalog.device("host").device.arch)]
    assert len(counts) == 10
    assert sum(counts) == len(lengths)
    assert catalog.connection.execute("SELECT count(*) FROM problem").fetchone()[0] == 10

    monkeypatch.setattr(timings, "MAX_MISSES", 4)
    catalog.select(small(seqlen_q=5000, seqlen_k=1))
    left = [json.loads(key)["seqlen_q"] for key, _ in catalog.misses(catalog.device("host").device.arch)]
    assert len(left) == 4
    assert 5000 in left
    assert catalog.connection.execute("SELECT count(*) FROM problem").fetchone()[0] == 4


def test_a_plan_says_what_it_was_chosen_by(catalog: Catalog) -> None:
    tune(catalog, [small()], QUICK)
    assert catalog.select(small()).explain().about.startswith("Measured: 3 of these kernels")
    near = catalog.select(small(seqlen_q=75)).explain()
    assert near.evidence == "nearest"
    assert small().key in near.about
    assert "Static order" in catalog.select(small(dtype="bf16")).explain(limit=1).about


def test_the_command_tunes_a_problem_and_a_file_of_them(catalog: Catalog, tmp_path: Path) -> None:
    shapes = tmp_path / "mine.yaml"
    shapes.write_text(
        "about: two small ones\ngrids:\n  - name: mine\n    about: small\n    category: prefill\n"
        "    fixed: {batch: 1, nhead_q: 2, hdim_q: 32, dtype: fp32}\n    vary: {seqlen_q: [70, 64]}\n"
    )
    command = [sys.executable, "-m", "catalog", "--db", str(catalog.path), "tune", "--candidates", "2"]
    for budget, tuned, told in ((["--budget", "0"], 0, "2 left"), ([], 2, "2 problems tuned")):
        options = ["--shapes", str(shapes), "--format", "json", *budget]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
        rows = json.loads(done.stdout)
        assert [row["kernels"] for row in rows] == [2] * tuned
        assert told in done.stderr
    wrong = subprocess.run([*command, "--misses", "--shapes", "smoke"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "what to tune is one of" in wrong.stderr
