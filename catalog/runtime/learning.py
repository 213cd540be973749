"""Learning from timings: which evidence chooses best for problems that were not measured, and a model of the time.

For each kind of problems there are three ways to choose a kernel without a measurement of the problem itself: the
static order, the medians of the nearest measured problem, and times predicted by a model that is fitted on all timings
of the kind (:mod:`catalog.runtime.cost_model`). Cross-validation decides between them: the measured problems are
divided into folds, and each fold is chosen for with the evidence of the others. The score of a way to choose is the
geometric mean of the time of its choices over that of the best kernel. Selection uses the way with the best score.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from catalog.backends import backend_of
from catalog.errors import CatalogError
from catalog.messages import counted
from catalog.ops import kind_words, operation_of, problem_of_key
from catalog.registry.kernels import kernel_of, lineage_id
from catalog.registry.learned import ARMS, Arm, Learned, Place, keep
from catalog.registry.timings import SOUND
from catalog.runtime.cost_model import RIDGES, Sample, fit
from catalog.runtime.race import choice
from catalog.schema.lineage import OWN_SPACES
from catalog.schema.name_parts import sql_literal
from catalog.schema.policy import Policy

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.schema.kernel import Kernel
    from catalog.schema.lineage import Lineage
    from catalog.schema.problem import Problem

FEWEST = 6
"""Minimum number of measured problems of a kind to learn from. Only those count of which several kernels were timed."""

FOLDS = 10
"""Maximum number of folds of the cross-validation."""

_SHORTEST_MS = 1e-6
"""A predicted time has a logarithm."""

COLUMNS = ("kind", "arch", "device", "cores", "as", "problems", "timings", *ARMS, "selection_uses")
"""The columns of what was learned. The ways to choose have the loss of their choices in percent."""


@dataclass(frozen=True)
class Timed:
    """A measured problem: the medians of its kernels in ms by id, and the first of the static order that was timed."""

    problem: Problem
    medians: Mapping[str, float]
    first: str

    @property
    def best(self) -> float:
        """The lowest median."""
        return min(self.medians.values())


@dataclass(frozen=True)
class Lesson:
    """What was learned about problems of a kind on a device under a policy; ``learned`` None: they are too few."""

    kind: str
    arch: str
    device: str
    cores: int | None
    policy: Policy
    problems: int
    learned: Learned | None

    @property
    def row(self) -> list[Any]:
        """The values of :data:`COLUMNS`."""
        where = [kind_words(self.kind), self.arch, self.device, self.cores, str(self.policy), self.problems]
        if self.learned is None:
            return [*where, None, None, None, None, "too few"]
        losses = [round(100 * (self.learned.scores[arm] - 1), 2) for arm in ARMS]
        return [*where, self.learned.timings, *losses, self.learned.best]


@dataclass(frozen=True)
class Lessons:
    """What was learned about all kinds; ``unusable`` are the reasons why some were left out, by kind."""

    lessons: tuple[Lesson, ...]
    unusable: Mapping[str, str]

    @property
    def summary(self) -> str:
        """How many kinds there are, and what selection uses for them, as a sentence."""
        used = Counter(lesson.learned.best for lesson in self.lessons if lesson.learned is not None)
        few = sum(lesson.learned is None for lesson in self.lessons)
        words = {"predicted": "predicted times", "nearest": "the nearest problem", "static": "the static order"}
        uses = ", ".join(f"{words[arm]} for {used[arm]:,}" for arm in reversed(ARMS) if used[arm]) or "nothing new"
        left = f"; {few:,} with fewer than {FEWEST} problems" if few else ""
        return f"{counted(len(self.lessons), 'kind')} of problems: selection uses {uses}{left}."

    @property
    def exit_code(self) -> int:
        """Exit code of ``catalog learn``: 1 if nothing was learned."""
        return int(all(lesson.learned is None for lesson in self.lessons))


def learn(catalog: Catalog, arch: str | None = None) -> Lessons:
    """Learn from all timings in the catalog, or from those of ``arch``; the models replace those stored before.

    Raises:
        RegistryError: the catalog cannot be written; nothing changes.
    """
    lessons, unusable, models = list[Lesson](), dict[str, str](), list[tuple[Place, dict[str, Any]]]()
    for group in _groups(catalog, arch):
        lesson = group.described
        if len(group.medians) >= FEWEST:
            try:
                learned = group.learned(catalog)
            except CatalogError as error:  # the rows of an operation or a checkout that is not here, say
                unusable[group.kind] = error.message
                continue
            lesson = group.described_as(learned)
            lineage = lineage_id(catalog.connection, group.lineage)
            models.append((Place(group.kind, lineage, group.device, group.policy), learned.columns))
        lessons.append(lesson)
    with catalog.writing() as connection:
        for model in models:
            keep(connection, *model)
    catalog.forget()
    return Lessons(tuple(lessons), unusable)


@dataclass(frozen=True)
class _Group:
    """The timings of a kind, lineage, device and policy: medians in ms by kernel id, by problem key."""

    kind: str
    lineage: Lineage
    device: int
    name: str
    cores: int | None
    policy: Policy
    kernels: Mapping[str, Kernel]
    medians: Mapping[str, Mapping[str, float]]

    @property
    def described(self) -> Lesson:
        return self.described_as(None)

    def described_as(self, learned: Learned | None) -> Lesson:
        count = len(self.medians)
        return Lesson(self.kind, self.lineage.arch, self.name, self.cores, self.policy, count, learned)

    def learned(self, catalog: Catalog) -> Learned:
        """What the group teaches.

        Raises:
            CatalogError: a problem or the static order cannot be had.
        """
        candidates = max(map(len, self.medians.values()))
        timed = [timed_of(catalog, key, medians, self.lineage) for key, medians in sorted(self.medians.items())]
        noise, units = backend_of(self.lineage.arch).noise, self.cores or 1
        samples = samples_of(timed, self.kernels, units)
        best = min((cross_validated(timed, samples, ridge, noise) for ridge in RIDGES), key=lambda one: one.error)
        return Learned(fit(samples, best.ridge), candidates, len(timed), len(samples), best.scores, units)


def timed_of(catalog: Catalog, key: str, medians: Mapping[str, float], lineage: Lineage) -> Timed:
    """A measured problem, with the first kernel of the static order of a lineage among those timed.

    Raises:
        CatalogError: the problem's operation is not installed, or no kernel answers it any more.
    """
    problem = problem_of_key(key)
    limit = max(10, 2 * len(medians))
    ordered = catalog.candidates(problem, **lineage.wanted.keywords, limit=limit, static=True)
    listed = [candidate.kernel.id for candidate in ordered if candidate.kernel.id in medians]
    return Timed(problem, medians, (listed or sorted(medians))[0])


def samples_of(timed: Sequence[Timed], kernels: Mapping[str, Kernel], units: int) -> list[Sample]:
    """The timings of problems with the work of each."""
    return [
        Sample(place, kernel_id, operation_of(one.problem).work(one.problem, kernels[kernel_id], units), median_ms)
        for place, one in enumerate(timed)
        for kernel_id, median_ms in one.medians.items()
    ]


@dataclass(frozen=True)
class Validated:
    """The outcome of a cross-validation: the score of each way to choose, and the model's mean squared error.

    The error is that of the logarithms of predicted times, without what all kernels of a problem have in common.
    """

    scores: Mapping[Arm, float]
    error: float
    ridge: float


def cross_validated(timed: Sequence[Timed], samples: Sequence[Sample], ridge: float, noise: float) -> Validated:
    """Choose for each problem with the evidence of other folds.

    Args:
        timed: the problems.
        samples: their timings, as :func:`samples_of`.
        ridge: as for :func:`~catalog.runtime.cost_model.fit`.
        noise: medians within this share of the lowest count as equal.
    """
    logs: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
    of_problem: dict[int, list[Sample]] = {}
    for sample in samples:
        of_problem.setdefault(sample.problem, []).append(sample)
    folds, squares = min(FOLDS, len(timed)), list[float]()
    for fold in range(folds):
        model = fit([sample for sample in samples if sample.problem % folds != fold], ridge)
        near = [one for place, one in enumerate(timed) if place % folds != fold]
        for place in range(fold, len(timed), folds):
            one = timed[place]
            predicted = {
                sample.kernel_id: max(model.ms(sample.kernel_id, sample.work), _SHORTEST_MS)
                for sample in of_problem[place]
                if sample.kernel_id in model.factors
            }
            errors = [math.log(ms / one.medians[kernel_id]) for kernel_id, ms in predicted.items()]
            common = sum(errors) / max(1, len(errors))
            squares += [(error - common) ** 2 for error in errors]
            for arm, kernel_id in _chosen(one, near, predicted, noise).items():
                logs[arm].append(math.log(one.medians[kernel_id] / one.best))
    scores = {arm: math.exp(sum(found) / len(found)) for arm, found in logs.items()}
    return Validated(scores, sum(squares) / max(1, len(squares)), ridge)


def _chosen(one: Timed, near: Sequence[Timed], predicted: Mapping[str, float], noise: float) -> dict[Arm, str]:
    """The kernel that each way to choose takes for a problem, among those that were timed."""
    chosen: dict[Arm, str] = dict.fromkeys(ARMS, one.first)
    if predicted:
        chosen["predicted"] = min(predicted, key=predicted.__getitem__)
    here = one.problem.coordinates
    neighbour = min(near, key=lambda other: math.dist(other.problem.coordinates, here))
    there = {kernel_id: ms for kernel_id, ms in neighbour.medians.items() if kernel_id in one.medians}
    if there:
        chosen["nearest"] = choice(there, noise)
    return chosen


def _groups(catalog: Catalog, arch: str | None) -> Iterator[_Group]:
    """The sound timings of kernels whose operation is installed, by kind, lineage, device and policy."""
    connection = catalog.connection
    spaces = ", ".join(map(sql_literal, OWN_SPACES))
    rows = connection.execute(
        "SELECT kind, problem.key, kernel_id, kernel.lineage, device_id, device.name, "
        "json_extract(facts, '$.cores') AS cores, measured_as, cold, median_ms, max(timing.created) "
        "FROM timing JOIN problem ON problem.id = problem_id JOIN kernel ON kernel.id = kernel_id "
        "JOIN device ON device.id = device_id JOIN lineage ON lineage.id = kernel.lineage "
        f"WHERE {SOUND} AND space IN ({spaces}) AND lineage.arch = device.arch "
        "AND device.arch = coalesce(:arch, device.arch) "
        "GROUP BY problem_id, kernel_id, device_id, measured_as, cold "
        "ORDER BY device_id, measured_as, cold, kernel.lineage, kind, problem_id, kernel_id",
        {"arch": arch},
    ).fetchall()
    kernels = {kernel_id: kernel_of(connection, kernel_id) for kernel_id in {row["kernel_id"] for row in rows}}
    grouped: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        if kernels[row["kernel_id"]] is not None:
            key = (*(row[name] for name in ("kind", "lineage", "device_id", "name", "cores")),)
            grouped.setdefault((*key, Policy(row["measured_as"], bool(row["cold"]))), []).append(row)
    for (kind, _, device, name, cores, policy), found in grouped.items():
        medians: dict[str, dict[str, float]] = {}
        for row in found:
            medians.setdefault(row["key"], {})[row["kernel_id"]] = row["median_ms"]
        medians = {key: of_problem for key, of_problem in medians.items() if len(of_problem) > 1}
        if not medians:  # nothing to choose from
            continue
        of_group = {row["kernel_id"]: kernel for row in found if (kernel := kernels[row["kernel_id"]]) is not None}
        lineage = next(iter(of_group.values())).lineage
        yield _Group(kind, lineage, device, name, cores, policy, of_group, medians)
