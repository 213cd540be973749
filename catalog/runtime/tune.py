"""Tuning: times the kernels that answer a problem against each other, and records the medians.

They are timed under a measuring policy, as programs run them (:mod:`catalog.runtime.deployed`). Other projects'
implementations of the same problem may run in the same race.

The candidates are the first of the static order, so they do not depend on previous measurements. They run a race
(:mod:`catalog.runtime.race`), which also gives the confidence in its result; a noisy result is not recorded. Previous
measurements with the same libraries are not repeated, so a stopped tuning continues where it ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from catalog.backends import backend_of
from catalog.errors import CatalogError, SelectionError
from catalog.foreign.installed import chosen
from catalog.messages import counted
from catalog.registry import foreign
from catalog.registry.foreign import rival_id, rival_timing
from catalog.registry.timings import Timing, device_id, measured, record
from catalog.runtime.against import check, entrant, place_of, rival_of, title_of
from catalog.runtime.bench_shapes import expected_of
from catalog.runtime.deployed import deployed
from catalog.runtime.guard import Stages
from catalog.runtime.inputs import draw_inputs
from catalog.runtime.measure import StopRule, remedy
from catalog.runtime.measuring import library_key, main_kernel, prepared
from catalog.runtime.race import Sureness, Verdict, choice, race
from catalog.runtime.tensors import Array, make_outputs
from catalog.runtime.torch_copies import same_threads

if TYPE_CHECKING:
    from catalog.build.pools import Pool
    from catalog.ops.implementation import Implementation
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.deployed import Deployed
    from catalog.runtime.devices import DeviceInfo
    from catalog.runtime.measure import Measurement
    from catalog.runtime.plan import Plan
    from catalog.schema.kernel import Kernel
    from catalog.schema.policy import Policy
    from catalog.schema.problem import Problem

COLUMNS = ("best", "median_ms", "tflops", "gain", "confidence", "kernels", "failed", "id")
"""The columns of a tuned problem."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The outcome of tuning a problem.

    Attributes:
        problem: the tuned problem.
        kernels: the candidates by id.
        medians: medians in ms by kernel id, fastest first; empty if they are noisy or all kernels failed.
        failures: the errors of kernels that could not be timed, by id.
        first: id of the first kernel of the static order.
        noise: medians within this share of the lowest count as equal.
        verdict: the race's verdict; None if all kernels failed or all were measured before.
        rivals: other projects' implementations among the entrants, with their versions, by id.
        unfit: why others were not entered, by name.
        device: the device of a cluster's worker that was measured; None: this machine's.
    """

    problem: Problem
    kernels: Mapping[str, Kernel] = field(repr=False)
    medians: Mapping[str, float]
    failures: Mapping[str, str]
    first: str
    noise: float
    verdict: Verdict | None
    rivals: Mapping[str, str] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    device: DeviceInfo | None = None

    def name_of(self, entrant: str) -> str:
        """The name of a kernel, or of another project's implementation, by id."""
        return self.rivals.get(entrant) or self.kernels[entrant].name

    @property
    def known(self) -> bool:
        """Whether everything was measured before."""
        return self.verdict is None and bool(self.medians)

    @property
    def best(self) -> tuple[str, float] | None:
        """The id of the best entrant, and its median in ms; None if there is none.

        Among equals a kernel of the catalog comes before other projects' implementations, then the lowest id decides,
        as selection does.
        """
        if not self.medians:
            return None
        best = choice(self.medians, self.noise)
        return best, self.medians[best]

    @property
    def gain(self) -> float | None:
        """Speedup of the best kernel over the first of the static order; None if that was not timed.

        It is at least 1; kernels that are equal within noise have no speedup over each other.
        """
        if self.first not in self.medians:
            return None
        ours = {kernel_id: median_ms for kernel_id, median_ms in self.medians.items() if kernel_id in self.kernels}
        return max(1.0, ours[self.first] / ours[choice(ours, self.noise)])

    @property
    def confidence(self) -> str:
        """The confidence in the outcome, or why there is none."""
        if self.verdict is not None:
            return self.verdict.about
        return "measured before" if self.known else "every kernel failed"

    @property
    def about(self) -> str:
        """The outcome in one line."""
        if self.best is None:
            return self.confidence
        best, median_ms = self.best
        return f"{median_ms:.3f} ms, {self.name_of(best)}"

    @property
    def where(self) -> str:
        """The device of a cluster's worker, with the number of cores that kernels use; empty for this machine's."""
        return "" if self.device is None else f"{self.device.name}, {counted(self.device.cores, 'core')}"

    @property
    def row(self) -> list[Any]:
        """The values of :data:`COLUMNS`."""
        failed = len(self.failures)
        counts = [self.confidence, len(self.kernels) + len(self.rivals) - failed, failed]
        if self.best is None:
            return [None, None, None, None, *counts, None]
        best, median_ms = self.best
        tflops = round(self.problem.flops / median_ms / 1e9, 4)
        gain = None if self.gain is None else round(self.gain, 3)
        return [self.name_of(best), round(median_ms, 5), tflops, gain, *counts, best]

    @property
    def troubles(self) -> Iterator[str]:
        """Yield a line for each entrant that could not be timed, and one if nothing is recorded because of noise."""
        for entrant_id, reason in self.failures.items():
            first, *_ = reason.splitlines()
            name = self.name_of(entrant_id)
            yield first if name in first or entrant_id in self.rivals else f"{name}: {first}"
        for name, reason in self.unfit.items():
            yield f"{name} does not compute it: {reason}"
        if self.best is None and self.verdict is not None:
            yield f"nothing is recorded: {remedy(self.verdict.disturbance)}"


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """How to tune.

    Attributes:
        arch: the kernels' arch; this machine must have the device.
        candidates: maximum number of kernels to try per problem.
        seconds: time limit for all problems together; the current problem is finished. None: no limit.
        rule: when to stop each part of a race, and the measuring policy.
        jobs: number of parallel compilers; None: one per core.
        pool: compiles on other machines, while timing stays on this one; None: compile on this machine.
        again: repeat previous measurements.
        against: names of other projects' implementations that run in the same races.
        revision: the kernels' revision; None: the arch's own.
    """

    arch: str = "host"
    candidates: int = 6
    seconds: float | None = None
    rule: StopRule = field(default_factory=StopRule)
    jobs: int | None = None
    pool: Pool | None = None
    again: bool = False
    against: tuple[str, ...] = ()
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The outcomes of the problems, in order.

    ``unanswered`` says by problem key why there is no kernel; ``left`` has the problems that there was no time for.
    """

    tuned: tuple[Tuned, ...]
    unanswered: Mapping[str, str]
    left: tuple[Problem, ...]

    @property
    def recorded(self) -> tuple[Tuned, ...]:
        """The problems whose kernels now have timings."""
        return tuple(tuned for tuned in self.tuned if tuned.best is not None)

    @property
    def noisy(self) -> tuple[Tuned, ...]:
        """The problems whose times are too noisy and not recorded."""
        return tuple(tuned for tuned in self.tuned if tuned.verdict is not None and tuned.best is None)

    @property
    def failed(self) -> tuple[Tuned, ...]:
        """The problems whose kernels all failed."""
        return tuple(tuned for tuned in self.tuned if tuned.verdict is None and tuned.best is None)

    @property
    def gain(self) -> float | None:
        """Geometric mean over the problems of :attr:`Tuned.gain`; None if it is not known for any."""
        gains = [tuned.gain for tuned in self.tuned if tuned.gain is not None]
        return math.exp(sum(map(math.log, gains)) / len(gains)) if gains else None

    @property
    def summary(self) -> str:
        """The number of problems by outcome, as a sentence."""
        order = "the first of the static order (geometric mean)"
        gain = "" if self.gain is None else f"the best kernels are {self.gain:.3f} times as fast as {order}; "
        return (
            f"{counted(len(self.recorded), 'problem')} tuned; {gain}"
            f"{len(self.noisy):,} too noisy, {len(self.failed):,} with no kernel that runs, {len(self.left):,} left, "
            f"{len(self.unanswered):,} without a kernel."
        )

    @property
    def exit_code(self) -> int:
        """Exit code of ``catalog tune``: 1 if problems were tried but none could be recorded."""
        return int(bool(self.tuned or self.unanswered) and not self.recorded)


def tune(
    catalog: Catalog,
    problems: Sequence[Problem],
    options: TuneOptions | None = None,
    on_done: Callable[[Tuned], None] | None = None,
) -> TuneReport:
    """Time the candidates of each problem on this machine, and record the medians in the catalog.

    A kernel that does not compile or fails to launch is left out and reported. Noisy times are not recorded.

    Raises:
        DeviceError: this machine has no device for the arch.
        ToolchainError: there is no usable compiler.
        UsageError, SpecError, RegistryError: as :meth:`Catalog.select`; RegistryError also where the catalog cannot be
            written; UsageError also if an implementation in ``against`` is not installed.
    """
    return _Tuning(catalog, options or TuneOptions()).run(problems, on_done)


class _Tuning:
    def __init__(self, catalog: Catalog, options: TuneOptions) -> None:
        self._catalog = catalog
        self._options = options
        self._device = catalog.device_info(options.arch)
        self._deadline = math.inf if options.seconds is None else time.monotonic() + options.seconds

    def run(self, problems: Sequence[Problem], on_done: Callable[[Tuned], None] | None) -> TuneReport:
        tuned: list[Tuned] = []
        unanswered: dict[str, str] = {}
        options = self._options
        of = dict.fromkeys(problem.operation for problem in problems)
        self._against = {name: chosen(name, options.against) for name in of} if options.against else {}
        candidates = prepared(
            self._catalog,
            takewhile(lambda _: self._in_time, problems),
            arch=options.arch,
            candidates=options.candidates,
            static=True,
            jobs=options.jobs,
            pool=options.pool,
            revision=options.revision,
        )
        for problem, plans in candidates:
            if isinstance(plans, SelectionError):
                unanswered[problem.key] = plans.message
            elif self._in_time:
                tuned.append(self._tune(problem, plans))
                if on_done is not None:
                    on_done(tuned[-1])
        self._catalog.forget()
        settled = unanswered.keys() | {done.problem.key for done in tuned}
        return TuneReport(tuple(tuned), unanswered, tuple(p for p in problems if p.key not in settled))

    @property
    def _in_time(self) -> bool:
        return time.monotonic() < self._deadline

    def _tune(self, problem: Problem, plans: Sequence[Plan]) -> Tuned:
        kernels = {kernel.id: kernel for kernel in map(main_kernel, plans)}
        policy, device = self._options.rule.policy, self._catalog.device(self._options.arch)
        asked = {one: one.objection(problem, place_of(device)) for one in self._against.get(problem.operation, ())}
        rivals = {rival_id(one.name): one for one, unfit in asked.items() if not unfit}
        failures: dict[str, str] = {}
        keys: dict[str, str] = {}
        for kernel_id, plan in zip(kernels, plans, strict=True):
            try:
                keys[kernel_id] = library_key(plan, kernels[kernel_id])
            except CatalogError as error:
                failures[kernel_id] = error.message
        medians = {} if self._options.again else self._known(problem, keys, rivals, policy)
        noise, verdict = backend_of(self._device.arch).noise, None
        entered = [*keys, *rivals]
        if set(entered) - medians.keys():  # time all again, so that they are compared under the same conditions
            ready = dict(self._ready(problem, dict(zip(kernels, plans, strict=True)), keys, rivals, failures))
            with same_threads(device) if rivals.keys() & ready.keys() else nullcontext():
                raced = race(ready, self._options.rule, noise)
            failures |= {kernel_id: error.message for kernel_id, error in raced.failures.items()}
            verdict = raced.verdict
            ours = [measurement for one, measurement in raced.measurements.items() if one in kernels]
            if verdict is not None and not any(measurement.sound for measurement in ours):
                verdict = replace(verdict, sureness=Sureness.NOISY)  # a rival may win, but selection needs our times
            sure = verdict is not None and verdict.sureness is not Sureness.NOISY
            taken = raced.measurements if sure else {}
            self._keep(problem, taken, keys, rivals)
            medians = {entrant_id: measurement.median_ms for entrant_id, measurement in taken.items()}
        ordered = dict(sorted(medians.items(), key=lambda item: (item[1], item[0])))
        titles = {entrant_id: title_of(one) for entrant_id, one in rivals.items()}
        unfit = {one.name: reason for one, reason in asked.items() if reason}
        return Tuned(problem, kernels, ordered, failures, next(iter(kernels)), noise, verdict, titles, unfit)

    def _known(
        self, problem: Problem, keys: Mapping[str, str], rivals: Mapping[str, Implementation], policy: Policy
    ) -> dict[str, float]:
        """The medians of the entrants that were measured before, in the same libraries and versions, by id."""
        connection = self._catalog.connection
        before = measured(connection, problem, self._device, policy)
        medians = {kernel_id: before[kernel_id, key] for kernel_id, key in keys.items() if (kernel_id, key) in before}
        for row in connection.execute("SELECT id FROM problem WHERE key = ?", (problem.key,)).fetchall():
            for rival in foreign.rivals(connection, row["id"], device_id(connection, self._device), policy):
                if rival.id in rivals and rivals[rival.id].version == rival.version:
                    medians[rival.id] = rival.median_ms
        return medians

    def _keep(
        self,
        problem: Problem,
        taken: Mapping[str, Measurement],
        keys: Mapping[str, str],
        rivals: Mapping[str, Implementation],
    ) -> None:
        """Record the measurements of a race, all of them or none."""
        with self._catalog.writing() as connection:
            ours = [Timing(one, keys[one], measurement) for one, measurement in taken.items() if one in keys]
            record(connection, problem, self._device, ours)
            theirs = {one: rival_of(rivals[one], taken[one].median_ms) for one in taken if one in rivals}
            foreign.record(
                connection, (rival_timing(rival, problem, self._device, taken[one]) for one, rival in theirs.items())
            )

    def _ready(
        self,
        problem: Problem,
        plans: Mapping[str, Plan],
        keys: Iterable[str],
        rivals: Mapping[str, Implementation],
        failures: dict[str, str],
    ) -> Iterator[tuple[str, Deployed]]:
        """The built candidates and the correct rivals, with the same inputs."""
        built: list[Stages] = []
        for kernel_id in keys:
            with suppress(CatalogError):  # binding the plan raises the same error again
                built.append(Stages(problem, plans[kernel_id].kernels, plans[kernel_id].build()))
        device, policy = self._catalog.device(self._options.arch), self._options.rule.policy
        self._catalog.build_log.guard.prepare(built, device)
        inputs = draw_inputs(problem)
        outputs: dict[str, Array] = make_outputs(problem, inputs)
        for kernel_id in keys:
            try:
                yield kernel_id, deployed(plans[kernel_id], inputs, outputs, policy)
            except CatalogError as error:
                failures[kernel_id] = error.message
        expected = None
        for entrant_id, one in rivals.items():
            expected = expected or expected_of(problem, self._options.arch)
            try:
                check(one, expected, device)
                yield entrant_id, entrant(one, problem, inputs, device, policy)
            except CatalogError as error:
                failures[entrant_id] = error.message
