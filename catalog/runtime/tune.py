"""Tuning: times the kernels that answer a problem against each other, and records the medians.

The candidates are the first of the static order, so they do not depend on previous measurements. They run a race
(:mod:`catalog.runtime.race`), which also gives the confidence in its result; a noisy result is not recorded. Previous
measurements with the same libraries are not repeated, so a stopped tuning continues where it ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from catalog.backends import backend_of
from catalog.errors import CatalogError, SelectionError
from catalog.messages import counted
from catalog.registry.timings import Timing, measured
from catalog.runtime.guard import Stages
from catalog.runtime.inputs import draw_inputs
from catalog.runtime.measure import StopRule, remedy
from catalog.runtime.measuring import keep, library_key, main_kernel, prepared
from catalog.runtime.race import Sureness, Verdict, choice, race
from catalog.runtime.tensors import Array, make_outputs

if TYPE_CHECKING:
    from catalog.build.pools import Pool
    from catalog.runtime.bound import BoundPlan
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.plan import Plan
    from catalog.schema.kernel import Kernel
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
    """

    problem: Problem
    kernels: Mapping[str, Kernel] = field(repr=False)
    medians: Mapping[str, float]
    failures: Mapping[str, str]
    first: str
    noise: float
    verdict: Verdict | None

    @property
    def known(self) -> bool:
        """Whether everything was measured before."""
        return self.verdict is None and bool(self.medians)

    @property
    def best(self) -> tuple[str, float] | None:
        """The id of the kernel that selection chooses, and its median in ms; None if there is none."""
        if not self.medians:
            return None
        kernel_id = choice(self.medians, self.noise)
        return kernel_id, self.medians[kernel_id]

    @property
    def gain(self) -> float | None:
        """Speedup of the best kernel over the first of the static order; None if that was not timed.

        It is at least 1; kernels that are equal within noise have no speedup over each other.
        """
        if self.best is None or self.first not in self.medians:
            return None
        return max(1.0, self.medians[self.first] / self.best[1])

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
        kernel_id, median_ms = self.best
        return f"{median_ms:.3f} ms, {self.kernels[kernel_id].name}"

    @property
    def row(self) -> list[Any]:
        """The values of :data:`COLUMNS`."""
        failed = len(self.failures)
        counts = [self.confidence, len(self.kernels) - failed, failed]
        if self.best is None:
            return [None, None, None, None, *counts, None]
        kernel_id, median_ms = self.best
        tflops = round(self.problem.flops / median_ms / 1e9, 4)
        gain = None if self.gain is None else round(self.gain, 3)
        return [self.kernels[kernel_id].name, round(median_ms, 5), tflops, gain, *counts, kernel_id]

    @property
    def troubles(self) -> Iterator[str]:
        """Yield a line for each kernel that could not be timed, and one if nothing is recorded because of noise."""
        for kernel_id, reason in self.failures.items():
            first, *_ = reason.splitlines()
            name = self.kernels[kernel_id].name
            yield first if name in first else f"{name}: {first}"
        if self.best is None and self.verdict is not None:
            yield f"nothing is recorded: {remedy(self.verdict.disturbance)}"


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """How to tune.

    Attributes:
        arch: the kernels' arch; this machine must have the device.
        candidates: maximum number of kernels to try per problem.
        seconds: time limit for all problems together; the current problem is finished. None: no limit.
        rule: when to stop each part of a race.
        jobs: number of parallel compilers; None: one per core.
        pool: compiles on other machines, while timing stays on this one; None: compile on this machine.
        again: repeat previous measurements.
        revision: the kernels' revision; None: the arch's own.
    """

    arch: str = "host"
    candidates: int = 6
    seconds: float | None = None
    rule: StopRule = field(default_factory=StopRule)
    jobs: int | None = None
    pool: Pool | None = None
    again: bool = False
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
            written.
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
        failures: dict[str, str] = {}
        keys: dict[str, str] = {}
        for kernel_id, plan in zip(kernels, plans, strict=True):
            try:
                keys[kernel_id] = library_key(plan, kernels[kernel_id])
            except CatalogError as error:
                failures[kernel_id] = error.message
        known = {} if self._options.again else measured(self._catalog.connection, problem, self._device)
        medians = {kernel_id: known[kernel_id, key] for kernel_id, key in keys.items() if (kernel_id, key) in known}
        noise, verdict = backend_of(self._device.arch).noise, None
        if keys.keys() - medians.keys():  # time all again, so that they are compared under the same conditions
            bound = dict(self._bound(problem, dict(zip(kernels, plans, strict=True)), keys, failures))
            raced = race(bound, self._options.rule, noise)
            failures |= {kernel_id: error.message for kernel_id, error in raced.failures.items()}
            verdict = raced.verdict
            sure = verdict is not None and verdict.sureness is not Sureness.NOISY
            taken = raced.measurements if sure else {}
            timings = [Timing(kernel_id, keys[kernel_id], measurement) for kernel_id, measurement in taken.items()]
            keep(self._catalog, problem, self._device, timings)
            medians = {kernel_id: measurement.median_ms for kernel_id, measurement in taken.items()}
        ordered = dict(sorted(medians.items(), key=lambda item: (item[1], item[0])))
        return Tuned(problem, kernels, ordered, failures, next(iter(kernels)), noise, verdict)

    def _bound(
        self, problem: Problem, plans: Mapping[str, Plan], keys: Iterable[str], failures: dict[str, str]
    ) -> Iterator[tuple[str, BoundPlan]]:
        """The built candidates, bound to the same tensors."""
        built: list[Stages] = []
        for kernel_id in keys:
            with suppress(CatalogError):  # binding the plan raises the same error again
                built.append(Stages(problem, plans[kernel_id].kernels, plans[kernel_id].build()))
        self._catalog.build_log.guard.prepare(built, self._catalog.device(self._options.arch))
        inputs = draw_inputs(problem)
        outputs: dict[str, Array] = make_outputs(problem, inputs)
        for kernel_id in keys:
            try:
                yield kernel_id, plans[kernel_id].bind(inputs, outputs=outputs)
            except CatalogError as error:
                failures[kernel_id] = error.message
