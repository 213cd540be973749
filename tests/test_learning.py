"""Learning from timings: the model of the time, what selection makes of it, and how it travels."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import command
import pytest
from conftest import copy_of
from test_select import problem
from test_select_measured import GPU, record_timings

from catalog.ops import operation
from catalog.ops.attention.problem import Problem
from catalog.registry.learned import ARMS
from catalog.runtime.catalog import Catalog
from catalog.runtime.cost_model import Sample, fit
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem as AnyProblem

LENGTHS = (100, 150, 220, 330, 500, 700, 1000, 1500, 2200, 3300, 5000, 7000)


class Law:
    """Made-up times: a constant and a rate for each of three kernels, so that the best one depends on the size."""

    def __init__(self, catalog: Catalog, arch: str = "gfx950") -> None:
        found = catalog.candidates(problem(seqlen_q=1000), arch=arch, limit=3, static=True)
        self.kernels = {candidate.kernel.id: candidate.kernel for candidate in found}
        self.factors = dict(zip(self.kernels, ((0.06, 1.0), (0.03, 1.5), (0.015, 2.5)), strict=True))

    def times(self, asked: AnyProblem) -> dict[str, float]:
        return {name: self.time(asked, kernel) for name, kernel in self.kernels.items()}

    def time(self, asked: AnyProblem, kernel: Kernel) -> float:
        constant, rate = self.factors[kernel.id]
        area = operation("attention").work(asked, kernel, GPU.cores)["area"]
        return constant + rate * area / 2e9

    def best(self, asked: AnyProblem) -> str:
        times = self.times(asked)
        return min(times, key=times.__getitem__)


@pytest.fixture
def law(copied: Catalog) -> Law:
    """The law behind the timings in ``copied``."""
    law = Law(copied)
    for length in LENGTHS:
        record_timings(copied, problem(seqlen_q=length), law.times(problem(seqlen_q=length)))
    copied.connection.execute(
        "UPDATE artifact SET created = '2026-01-01T00:00:00+00:00', so_sha256 = key, so_bytes = 1"
    )
    return law


def new_problems(count: int) -> list[Problem]:
    draw = random.Random(0)  # noqa: S311
    lengths = (round(math.exp(draw.uniform(math.log(80), math.log(8000)))) for _ in range(count))
    return [problem(seqlen_q=length) for length in lengths if length not in LENGTHS]


def test_predicted_times_choose_for_problems_that_were_not_measured(copied: Catalog, law: Law) -> None:
    asked = new_problems(40)
    by_nearest = [copied.select(one, arch="gfx950").kernels[0].id == law.best(one) for one in asked]
    [lesson] = copied.learn().lessons
    assert lesson.learned is not None
    assert lesson.learned.best == "predicted"
    assert lesson.learned.scores["predicted"] < min(lesson.learned.scores[arm] for arm in ("static", "nearest"))
    assert len({law.best(one) for one in asked}) == 3, "no kernel is the best for all"
    chosen = [copied.select(one, arch="gfx950").kernels for one in asked]
    assert sum(by_nearest) < sum(kernels[0].id == law.best(one) for kernels, one in zip(chosen, asked, strict=True))
    for kernels, one in zip(chosen, asked, strict=True):
        times = law.times(one)
        assert times[kernels[0].id] <= 1.02 * min(times.values())
        choice = copied.choice(one, arch="gfx950", limit=4)
        assert (choice.evidence, choice.candidates[0].kernel.id) == ("predicted", kernels[0].id)
        predicted = [candidate.predicted_ms for candidate in choice.candidates if candidate.predicted_ms is not None]
        assert predicted == sorted(predicted)
        assert predicted[0] == pytest.approx(times[kernels[0].id], rel=0.25)
    assert copied.choice(problem(seqlen_q=LENGTHS[0]), arch="gfx950").evidence == "measured"
    assert copied.choice(problem(lse=True), arch="gfx950").evidence == "static", "of another kind"
    about = copied.choice(asked[0], arch="gfx950").about
    assert about.startswith("Predicted: from 36 timings of 12 problems of this kind; on problems that were left out")


def test_where_predictions_do_not_choose_better_selection_stays_as_it_was(copied: Catalog) -> None:
    """One kernel is the best for all sizes, and the times have nothing to do with the work."""
    static = [found.kernel.id for found in copied.candidates(problem(), arch="gfx950", limit=3, static=True)]
    draw = random.Random(1)  # noqa: S311
    for length in LENGTHS:
        record_timings(
            copied, problem(seqlen_q=length), {one: draw.uniform(1, 9) for one in static[:2]} | {static[2]: 0.9}
        )
    before = [copied.select(one, arch="gfx950").kernels[0].id for one in new_problems(5)]
    [lesson] = copied.learn().lessons
    assert lesson.learned is not None
    assert lesson.learned.best == "nearest"
    assert [copied.select(one, arch="gfx950").kernels[0].id for one in new_problems(5)] == before
    assert copied.choice(new_problems(1)[0], arch="gfx950").evidence == "nearest"


def test_a_model_travels_with_merged_catalogs_and_goes_with_its_timings(
    copied: Catalog, law: Law, gfx950: Catalog, tmp_path: Path
) -> None:
    copied.learn()
    copied.close()
    damaged = tmp_path / "damaged.db"
    shutil.copy(copied.path, damaged)
    other, asked = copy_of(gfx950, tmp_path / "other.db"), new_problems(1)[0]
    with Catalog(damaged) as spoilt:
        spoilt.connection.execute("""UPDATE model SET factors = '{"a": [-1]}'""")
    [merged] = other.merge([damaged])
    assert dict(merged.refused) == {("model", "a kernel has not one factor for each term"): 1}
    assert other.choice(asked, arch="gfx950").evidence == "nearest"
    for counted in ({"added": 1}, {"the same": 1}):
        [merged] = other.merge([copied.path])
        assert merged.counts["model"] == counted
    assert other.choice(asked, arch="gfx950").candidates == copied.choice(asked, arch="gfx950").candidates
    other.close()
    done = command.catalog("timings", "clear", "--yes", db=other.path)
    assert done.returncode == 0, done.stderr
    assert other.connection.execute("SELECT count(*) FROM model").fetchone()[0] == 0


def test_the_command_says_how_well_each_way_chooses(copied: Catalog, law: Law) -> None:
    record_timings(copied, problem(lse=True), dict.fromkeys(law.kernels, 1.0))
    copied.close()
    done = command.catalog("learn", "--format", "json", db=copied.path)
    assert done.returncode == 0, done.stderr
    of_kind = {row["selection_uses"]: row for row in json.loads(done.stdout)}
    assert of_kind.keys() == {"predicted", "too few"}
    assert of_kind["predicted"]["predicted"] < min(of_kind["predicted"][arm] for arm in ARMS if arm != "predicted")
    assert (of_kind["predicted"]["problems"], of_kind["predicted"]["timings"]) == (12, 36)
    assert "2 kinds of problems: selection uses predicted times for 1; 1 with fewer than 6 problems." in done.stderr
    words = ["--batch", 8, "--nhead-q", 32, "--seqlen-q", 900, "--hdim-q", 128, "--dtype", "bf16", "--arch", "gfx950"]
    shown = command.catalog("select", *words, "--explain", "--format", "json", db=copied.path)
    assert "Predicted: from 36 timings of 12 problems" in shown.stderr
    best = law.best(problem(seqlen_q=900))
    [row] = json.loads(shown.stdout)
    assert (row["id"], row["median_ms"]) == (best, None)
    assert row["predicted_ms"] == pytest.approx(law.times(problem(seqlen_q=900))[best], rel=0.25)
    explained = command.catalog("explain", *words, db=copied.path)
    assert explained.stdout.startswith("Predicted: from 36 timings of 12 problems")
    assert "predicted_ms" in explained.stdout


def test_without_timings_there_is_nothing_to_learn(host_file: Path, tmp_path: Path) -> None:
    done = command.catalog("learn", db=Path(shutil.copy(host_file, tmp_path / "catalog.db")))
    assert (done.returncode, done.stderr) == (1, "0 kinds of problems: selection uses nothing new.\n")


def samples(of: Mapping[str, tuple[float, float]], sizes: Mapping[str, tuple[int, ...]]) -> list[Sample]:
    return [
        Sample(
            size,
            name,
            {"launch": 1.0, "size": float(size), "useless": float(size % 3)},
            of[name][0] + of[name][1] * size,
        )
        for name, there in sizes.items()
        for size in there
    ]


def test_factors_are_fitted_for_each_kernel_and_shared_where_timings_are_few() -> None:
    law = {"a": (2.0, 0.5), "b": (2.0, 1.0), "c": (2.0, 0.7)}
    model = fit(samples(law, {"a": tuple(range(1, 40)), "b": tuple(range(1, 40)), "c": (5,)}), ridge=0.1)
    assert set(model.terms) <= {"launch", "size", "useless"}
    for name in "ab":
        for size in (3, 30):
            work = {"launch": 1.0, "size": size, "useless": 0.0}
            assert model.ms(name, work) == pytest.approx(law[name][0] + law[name][1] * size, rel=0.15)
    a, b, c = (model.ms(name, {"launch": 1.0, "size": 30.0}) for name in "abc")
    assert a < c < b
    assert all(factor >= 0 for factors in model.factors.values() for factor in factors)
