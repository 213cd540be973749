"""Tuning on this machine: what is timed, what is recorded, and what selection makes of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import pytest

from catalog.backends import HOST
from catalog.build import targets
from catalog.build.describe import describe
from catalog.cli import progress
from catalog.ops.attention.kernels.host import emit as host
from catalog.ops.attention.problem import Problem
from catalog.registry import timings
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host.device import HostDevice
from catalog.runtime.measure import StopRule
from catalog.runtime.tune import TuneOptions, TuneReport, tune
from catalog.schema.kernel import Kernel
from catalog.settings import settings

QUICK = TuneOptions(candidates=3, rule=StopRule(precision=0.2, least=3, seconds=0.2, warm_up_seconds=0.01))


def small(**fields: Any) -> Problem:
    return Problem(**{"batch": 1, "nhead_q": 2, "seqlen_q": 70, "hdim_q": 32, "dtype": "fp32"} | fields)


@pytest.fixture(scope="module")
def catalog(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    path = shutil.copy(host_file, tmp_path_factory.mktemp("tune") / "catalog.db")
    catalog = Catalog(path, num_threads=1)  # what else runs disturbs few
    yield catalog
    catalog.close()


@pytest.fixture
def untuned(host_file: Path, tmp_path: Path) -> Iterator[Catalog]:
    """A catalog without timings."""
    with Catalog(shutil.copy(host_file, tmp_path / "catalog.db"), num_threads=1) as catalog:
        yield catalog


def recorded(catalog: Catalog) -> list[tuple[Any, ...]]:
    rows = catalog.connection.execute(
        "SELECT problem.key, kernel_id, n, min_ms, low_ms, median_ms, high_ms, cold, load FROM timing "
        "JOIN problem ON problem.id = problem_id ORDER BY 1, 2"
    )
    return [tuple(row) for row in rows]


def tune_until_recorded(catalog: Catalog, problem: Problem, options: TuneOptions = QUICK) -> TuneReport:
    """Tuned again as long as the times are too noisy to be recorded, which a busy machine may make them."""
    for _ in range(20):
        report = tune(catalog, [problem], options)
        if report.recorded:
            break
    return report


def test_tuning_measures_records_and_selects(untuned: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 1.0, 0.5))
    catalog, problem = untuned, small()
    static = [found.kernel.id for found in catalog.candidates(problem, limit=3, static=True)]
    before = catalog.select(problem)
    report = tune_until_recorded(catalog, problem)
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
        assert load == 2.5

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
    tune_until_recorded(catalog, small())
    rows = recorded(catalog)
    (again,) = tune(catalog, [small()], QUICK).tuned
    assert again.known
    assert len(again.medians) == 3
    assert recorded(catalog) == rows
    again_one = TuneOptions(candidates=1, rule=QUICK.rule, again=True)
    (fresh,) = tune_until_recorded(catalog, small(), again_one).tuned
    assert not fresh.known
    assert len(recorded(catalog)) == len(rows), "a row for each problem, kernel, device and library"


@pytest.mark.slow
def test_a_budget_leaves_the_rest_for_another_time(catalog: Catalog) -> None:
    problems = [small(seqlen_q=length) for length in (10, 20, 30)]
    stopped = tune(catalog, problems, TuneOptions(candidates=1, seconds=0, rule=QUICK.rule))
    assert (stopped.tuned, stopped.left) == ((), tuple(problems))
    seen: list[Problem] = []
    report = tune(catalog, problems, TuneOptions(candidates=1, rule=QUICK.rule), lambda done: seen.append(done.problem))
    assert [tuned.problem for tuned in report.tuned] == seen == problems


def test_a_problem_without_a_kernel_is_reported_and_stops_no_other(catalog: Catalog) -> None:
    wide = small(hdim_q=2048)
    report = tune(catalog, [wide, small()], TuneOptions(candidates=1, rule=QUICK.rule))
    assert "hdim" in report.unanswered[wide.key]
    assert [tuned.problem for tuned in report.tuned] == [small()]


@pytest.fixture
def emitting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """Give rows, by id, other sources."""

    def install(sources: Mapping[str, str]) -> None:
        def emit(kernel: Kernel, _memory: Path) -> str:
            return sources.get(kernel.id) or host.emit(kernel)

        monkeypatch.setattr(targets, "HOST", replace(targets.HOST, emit=emit))

    return install


def tune_by_command(catalog: Catalog, seqlen_q: int, *words: str) -> subprocess.CompletedProcess[str]:
    """``catalog tune`` of three kernels for a problem like :func:`small`."""
    problem = f"--batch 1 --nhead-q 2 --seqlen-q {seqlen_q} --hdim-q 32 --dtype fp32 --candidates 3 --format json"
    return command.catalog("tune", *problem.split(), *words, db=catalog.path, CATALOG_NUM_THREADS=1)


def timings_of(catalog: Catalog, problem: Problem) -> int:
    return sum(row[0] == problem.key for row in recorded(catalog))


def test_a_kernel_that_does_not_compile_is_left_out_and_reported(
    catalog: Catalog, emitting: Callable[[Mapping[str, str]], None]
) -> None:
    broken = catalog.candidates(small(seqlen_q=40), limit=3, static=True)[1].kernel
    emitting({broken.id: "#error broken\n"})
    done = tune_by_command(catalog, 40)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["kernels"], row["failed"]) == (2, 1)
    (reason,) = [line for line in done.stderr.splitlines() if broken.name in line]
    assert "does not compile" in reason
    assert timings_of(catalog, small(seqlen_q=40)) == 2


def test_a_tuning_in_which_every_kernel_fails_is_a_failure(
    catalog: Catalog, emitting: Callable[[Mapping[str, str]], None]
) -> None:
    problem = small(seqlen_q=41, lse=True)
    found = [candidate.kernel for candidate in catalog.candidates(problem, limit=3, static=True)]
    emitting({kernel.id: "#error broken\n" for kernel in found})
    done = tune_by_command(catalog, 41, "--lse")
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)
    assert (row["best"], row["confidence"], row["kernels"], row["failed"]) == (None, "every kernel failed", 0, 3)
    assert all(any(kernel.name in line for line in done.stderr.splitlines()) for kernel in found)
    assert "times as fast" not in done.stderr
    assert "0 problems tuned" in done.stderr
    assert timings_of(catalog, problem) == 0


def test_times_that_are_noise_are_not_recorded(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says that a thread waited for a core during every launch."""
    monkeypatch.setattr(HostDevice, "waits", lambda _: {"thread": time.monotonic_ns()})
    problem = small(seqlen_q=42)
    done = tune_by_command(catalog, 42)
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)
    assert (row["best"], row["gain"], row["confidence"]) == (None, None, "too noisy: not recorded")
    assert "other processes had the cores during 100 % of the time. Stop other work" in done.stderr
    assert "CATALOG_NUM_THREADS=1" in done.stderr
    assert timings_of(catalog, problem) == 0


SPINNING = """\
#include "abi/catalog_abi.h"
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT const char* catalog_describe() {{ return {description}; }}
EXPORT int32_t catalog_workspace_size(const catalog_args* args, catalog_workspace* size) {{
    *size = {{args->num_splits}};
    return 0;
}}
EXPORT int32_t catalog_launch(const catalog_args* args, void*) {{
    if (args->batch < 0) return 2;  // asked for its ABI
    for (volatile int64_t i = 0; i < {iterations}; i = i + 1) {{}}
    return 0;
}}
"""


@pytest.mark.slow
def test_beside_real_neighbours_the_faster_kernel_wins_or_none(
    catalog: Catalog, emitting: Callable[[Mapping[str, str]], None]
) -> None:
    """Of three kernels that do nothing but count, while more processes than there are cores do so too."""
    problem = small(seqlen_q=43)
    found = [candidate.kernel for candidate in catalog.candidates(problem, limit=3, static=True)]
    counts = dict(zip([kernel.id for kernel in found], (260_000, 200_000, 330_000), strict=True))
    emitting(
        {
            kernel.id: SPINNING.format(description=json.dumps(describe(kernel)), iterations=counts[kernel.id])
            for kernel in found
        }
    )
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range((os.cpu_count() or 1) + 1)]
    try:
        rows = [json.loads(tune_by_command(catalog, 43, "--again").stdout)[0] for _ in range(5)]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert {row["id"] for row in rows} <= {found[1].id, None}
    assert all((row["id"] is None) == (row["confidence"] == "too noisy: not recorded") for row in rows)
    assert timings_of(catalog, problem) == (3 if any(row["id"] for row in rows) else 0)


def test_problems_that_were_never_measured_are_counted_until_one_of_their_size_is(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> dict[str, int]:
        return dict(catalog.misses(catalog.device("host").device.arch))

    seldom, often, close = (small(seqlen_q=length, mask="causal", hdim_q=64, lse=True) for length in (20, 64, 120))
    for problem in (seldom, often, close, close):
        catalog.select(problem)
        catalog.forget()
    assert (asked()[seldom.key], asked()[often.key]) == (1, 3)
    assert next(iter(asked())) == often.key
    assert close.key not in asked(), "one row counts what is about as large"
    tune_until_recorded(catalog, close, TuneOptions(candidates=1, rule=QUICK.rule))
    catalog.select(often)
    assert often.key not in asked()

    monkeypatch.setenv("CATALOG_RECORD_MISSES", "false")
    settings.cache_clear()
    catalog.select(small(seqlen_q=700))
    assert small(seqlen_q=700).key not in asked()


def test_a_cache_that_grows_leaves_few_misses(host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row per size, not per length; where there are too many sizes, the least recently asked ones go."""
    catalog = Catalog(shutil.copy(host_file, tmp_path / "catalog.db"))
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
    """Of the recorded times only the sound ones count; neighbours on the machine may leave a slower kernel's noisy."""
    tune_until_recorded(catalog, small())
    of_small = "SELECT count(*) FROM timing JOIN problem ON problem.id = problem_id WHERE key = ?"
    (sound,) = catalog.connection.execute(f"{of_small} AND {timings.SOUND}", (small().key,)).fetchone()
    assert catalog.select(small()).explain().about.startswith(f"Measured: {sound} of these kernels")
    near = catalog.select(small(seqlen_q=75)).explain()
    assert near.evidence == "nearest"
    assert small().key in near.about
    assert "Static order" in catalog.select(small(dtype="bf16")).explain(limit=1).about


def test_the_command_tunes_a_problem_and_a_file_of_them(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose output goes to a file says how far it is."""
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0)
    shapes = tmp_path / "mine.yaml"
    shapes.write_text(
        "about: two small ones\ngrids:\n  - name: mine\n    about: small\n    category: prefill\n"
        "    fixed: {batch: 1, nhead_q: 2, hdim_q: 32, dtype: fp32}\n    vary: {seqlen_q: [70, 64]}\n"
    )
    for budget, tuned, message in ((["--budget", "0"], 0, "2 left"), ([], 2, "2 problems tuned")):
        options = ["--shapes", str(shapes), "--format", "json", *budget]
        done = command.catalog("tune", "--candidates", "2", *options, db=catalog.path, CATALOG_NUM_THREADS=1)
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)
        assert [row["kernels"] for row in rows] == [2] * tuned
        assert message in done.stderr
        assert re.findall(r"^tuning: (\d of 2), .", done.stderr, re.MULTILINE) == ["1 of 2", "2 of 2"][:tuned]
    wrong = command.catalog("tune", "--candidates", "2", "--misses", "--shapes", "smoke", db=catalog.path)
    assert wrong.returncode == 2
    assert "give exactly one of" in wrong.stderr
