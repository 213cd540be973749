"""Tuning: time the kernels that answer a problem against each other, and record what came of it.

The candidates are the first of the static order, so that they do not depend on what was measured before. They take
turns, which spreads what else the machine does over all of them; after each turn those of the slower half drop out
that are slower than the best by more than noise, until none does or two are left. These take turns until their medians
are known. What was measured with the same libraries before is not measured again, so a tuning that was stopped goes on
where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from catalog.backends import backend_of
from catalog.errors import CatalogError, SelectionError
from catalog.runtime.inputs import draw_inputs
from catalog.runtime.measure import Measurement, StopRule, Stopwatch
from catalog.runtime.measuring import keep, library_key, main_kernel, prepared
from catalog.runtime.tensors import Array, make_outputs
from catalog.runtime.timings import Timing, measured

if TYPE_CHECKING:
    from catalog.build.pools import Pool
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.plan import Plan
    from catalog.schema.kernel import Kernel
    from catalog.schema.problem import Problem

FINALISTS = 2
"""Kernels of a problem that are timed until their medians are known."""

TURN_SECONDS = 0.05
"""How long a turn of a kernel takes, if a launch takes no longer."""

FEWEST = 3
"""Launches of a turn at the least."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning a problem gave: medians in ms by kernel id, the fastest first, and why others could not be timed.

    ``first`` is the kernel that the static order puts first; ``known`` says that all of it had been measured before.
    """

    problem: Problem
    kernels: Mapping[str, Kernel] = field(repr=False)
    medians: Mapping[str, float]
    failures: Mapping[str, str]
    first: str
    known: bool = False

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest kernel's id and its median in ms; None where none could be timed."""
        return next(iter(self.medians.items()), None)

    @property
    def gain(self) -> float | None:
        """How many times faster the best is than the first of the static order; None where that was not timed."""
        if self.best is None or self.first not in self.medians:
            return None
        return self.medians[self.first] / self.best[1]


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """How to tune.

    Attributes:
        arch: what kernels are for; this machine must have the device.
        candidates: kernels of a problem at the most.
        seconds: of all problems together; None: as long as it takes. The problem at hand is finished.
        rule: of the finalists' medians.
        jobs: compilers at once; None: one a core.
        pool: compiles somewhere else than on this machine, which times all the same; None: here.
        again: measure also what was measured before.
    """

    arch: str = "host"
    candidates: int = 6
    seconds: float | None = None
    rule: StopRule = field(default_factory=StopRule)
    jobs: int | None = None
    pool: Pool | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What came of the problems, in order.

    ``unanswered`` has the reason why a problem, by key, has no kernel; ``left`` are those that there was no time for.
    """

    tuned: tuple[Tuned, ...]
    unanswered: Mapping[str, str]
    left: tuple[Problem, ...]

    @property
    def gain(self) -> float:
        """Geometric mean over the problems of how many times faster the best is than the static order's first."""
        gains = [tuned.gain for tuned in self.tuned if tuned.gain is not None]
        return math.exp(sum(map(math.log, gains)) / len(gains)) if gains else 1.0


def tune(
    catalog: Catalog,
    problems: Sequence[Problem],
    options: TuneOptions | None = None,
    on_done: Callable[[Tuned], None] | None = None,
) -> TuneReport:
    """Time the candidates of each problem on this machine, and record the medians in the catalog.

    A kernel that does not compile, or whose launch fails, is left out and reported.

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
        fresh = keys.keys() - medians.keys()
        if fresh:  # all of them, so that they are compared under the same conditions
            runners = dict(self._runners(problem, dict(zip(kernels, plans, strict=True)), keys, failures))
            taken = _race(runners, self._options.rule, backend_of(self._device.arch).noise, failures)
            timings = [Timing(kernel_id, keys[kernel_id], measurement) for kernel_id, measurement in taken.items()]
            keep(self._catalog, problem, self._device, timings)
            medians = {kernel_id: measurement.median_ms for kernel_id, measurement in taken.items()}
        ordered = dict(sorted(medians.items(), key=lambda item: (item[1], item[0])))
        return Tuned(problem, kernels, ordered, failures, next(iter(kernels)), known=not fresh)

    def _runners(
        self, problem: Problem, plans: Mapping[str, Plan], keys: Mapping[str, str], failures: dict[str, str]
    ) -> Iterator[tuple[str, Stopwatch]]:
        """The candidates that were built, bound to the same tensors and warmed up."""
        inputs = draw_inputs(problem)
        outputs: dict[str, Array] = make_outputs(problem, inputs)
        for kernel_id in keys:
            try:
                stopwatch = Stopwatch(plans[kernel_id].bind(inputs, outputs=outputs), self._options.rule)
                stopwatch.warm_up()
            except CatalogError as error:
                failures[kernel_id] = error.message
            else:
                yield kernel_id, stopwatch


def _launches_of_a_turn(stopwatch: Stopwatch, rule: StopRule) -> int:
    return max(FEWEST, min(rule.least, round(TURN_SECONDS * 1e3 / stopwatch.typical_ms)))


def _faster(racing: Mapping[str, Stopwatch], noise: float) -> dict[str, Stopwatch]:
    """The faster half, at least :data:`FINALISTS`, and what is as good as the best for all that noise lets see."""
    ordered = sorted(racing, key=lambda kernel_id: (racing[kernel_id].median_ms, kernel_id))
    half = max(FINALISTS, math.ceil(len(ordered) / 2))
    limit = racing[ordered[0]].median_ms * (1 + noise) if ordered else 0.0
    return {
        kernel_id: racing[kernel_id]
        for place, kernel_id in enumerate(ordered)
        if place < half or racing[kernel_id].median_ms <= limit
    }


def _race(
    runners: Mapping[str, Stopwatch], rule: StopRule, noise: float, failures: dict[str, str]
) -> dict[str, Measurement]:
    """What was measured of each: of all but the finalists as little as it took to see that they are slower."""
    racing = dict(runners)
    last = False
    while racing:
        for kernel_id, stopwatch in list(racing.items()):
            try:
                stopwatch.go(_launches_of_a_turn(stopwatch, rule))
            except CatalogError as error:
                failures[kernel_id] = error.message
                del racing[kernel_id]
        if last:
            racing = {kernel_id: stopwatch for kernel_id, stopwatch in racing.items() if not stopwatch.done}
        else:
            finalists = _faster(racing, noise)
            last = len(finalists) in (len(racing), FINALISTS)
            racing = finalists
    return {kernel_id: stopwatch.measurement() for kernel_id, stopwatch in runners.items() if kernel_id not in failures}
