"""Replay of a trace: each problem runs once, on its recorded inputs or else on seeded random ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from catalog.errors import INTERRUPTED, CatalogError
from catalog.runtime import tracing
from catalog.runtime.bench_shapes import checks_of, expected_of
from catalog.runtime.here import check_available, resolve_arch
from catalog.runtime.inputs import draw_inputs
from catalog.runtime.measure import StopRule, measure, summarise
from catalog.runtime.traces import Used
from catalog.runtime.validate import Check, Expected

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.measure import Measurement
    from catalog.runtime.plan import Plan
    from catalog.runtime.tensors import Array

COLUMNS = (
    *("problem", "arch", "calls", "launches", "total_ms", "recorded_ms", "median_ms", "speedup", "tflops", "n"),
    *("inputs", "verified", "same_kernels", "kernels", "error"),
)
"""The columns of a replayed problem."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay.

    Attributes:
        arch: the arch to run on; None: that of the recorded calls.
        repeats: number of launches per problem if there is no ``rule``.
        rule: time until the medians are precise; None: just ``repeats`` launches.
        verify: compare the outputs with the float64 reference.
        jobs: number of parallel compilers; None: one per core.
    """

    arch: str | None = None
    repeats: int = 5
    rule: StopRule | None = None
    verify: bool = False
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replayed problem.

    ``inputs`` says which inputs were used, ``kernels`` has the kernels that ran now, ``error`` why the problem did not
    run. ``checks`` has the checked outputs for all recorded inputs; it is empty if the problem was not verified.
    """

    used: Used
    arch: str
    inputs: str = ""
    kernels: tuple[str, ...] = ()
    measurement: Measurement | None = None
    checks: tuple[Check, ...] = field(default=())
    error: CatalogError | None = None

    @property
    def verified(self) -> bool | None:
        """Whether every output was right; None if it was not verified."""
        return all(check.passed for check in self.checks) if self.checks else None

    @property
    def passed(self) -> bool:
        """Whether it ran without a wrong output."""
        return self.error is None and self.verified is not False

    @property
    def about(self) -> str:
        """The time or the error, in one line."""
        if self.error is not None:
            return self.error.message.splitlines()[0]
        if not self.passed:
            worst = max(self.checks, key=lambda check: check.tolerance_used)
            return f"WRONG: {worst.tensor} is off by {worst.tolerance_used:.3g} times the tolerance"
        return "" if self.measurement is None else f"{self.measurement.median_ms:.3f} ms"

    @property
    def row(self) -> list[Any]:
        """The values of :data:`COLUMNS`."""
        used, now = self.used, None if self.measurement is None else self.measurement.median_ms
        before = used.median_ms
        return [
            *(used.name, self.arch, used.calls, used.launches, round(used.total_ms, 4)),
            None if before is None else round(before, 6),
            None if now is None else round(now, 6),
            None if now is None or before is None else round(before / now, 3),
            None if now is None else round(used.problem.flops / now / 1e9, 6),
            None if self.measurement is None else self.measurement.n,
            self.inputs or None,
            None if self.verified is None else int(self.verified),
            int(self.kernels == used.kernels) if self.kernels else None,
            " -> ".join(self.kernels) or None,
            None if self.passed else self.about,
        ]


def replay(
    catalog: Catalog,
    asked: Sequence[Used],
    options: ReplayOptions | None = None,
    on_done: Callable[[Replayed], None] | None = None,
) -> list[Replayed]:
    """Run each recorded problem again, with the kernels that selection chooses now.

    Nothing is recorded in the catalog or in a trace. A problem that does not run does not stop the others; its result
    has the error.

    Raises:
        UsageError: an arch is unknown, or kept inputs are damaged.
        SpecError, RegistryError: as :meth:`Catalog.select`.
    """
    options = options or ReplayOptions()
    done: list[Replayed] = []
    with tracing.paused():
        if options.arch is not None:
            catalog.spec(options.arch)  # an unknown arch raises before anything runs
        plans = [_plan(catalog, used, options) for used in asked]
        if catalog.builds.may_compile:
            ready = (plan for plan in plans if not isinstance(plan, CatalogError))
            kernels = {kernel.id: kernel for plan in ready for kernel in plan.kernels}
            catalog.builder.build_many(kernels.values(), options.jobs)
        for used, plan in zip(asked, plans, strict=True):
            done.append(_replayed(used, plan, options))
            if on_done is not None:
                on_done(done[-1])
    return done


def exit_code(asked: Sequence[Used], done: Sequence[Replayed]) -> int:
    """Exit code of ``catalog replay``: 1 if a problem did not run or is wrong, 130 if some were not tried."""
    if len(done) < len(asked):
        return INTERRUPTED
    return int(not all(replayed.passed for replayed in done))


def _plan(catalog: Catalog, used: Used, options: ReplayOptions) -> Plan | CatalogError:
    """The plan of a problem, or the error why it has none here."""
    try:
        check_available(resolve_arch(options.arch or used.wanted.arch))
        if options.arch is None:
            return catalog.select(used.problem, **used.wanted.keywords)
        return catalog.select(used.problem, arch=options.arch)
    except CatalogError as error:
        return error


def _replayed(used: Used, plan: Plan | CatalogError, options: ReplayOptions) -> Replayed:
    if isinstance(plan, CatalogError):
        return Replayed(used, options.arch or used.wanted.arch, error=plan)
    kept = [recording.load(used.problem) for recording in used.recordings]
    what = f"{len(kept)} kept" if kept else f"seed {used.seed}"
    try:
        checks = tuple(_checks(plan, used, kept)) if options.verify else ()
        measurement = _measured(plan, kept[0] if kept else draw_inputs(used.problem, used.seed), options)
    except CatalogError as error:
        return Replayed(used, plan.arch, what, error=error)
    return Replayed(used, plan.arch, what, tuple(kernel.name for kernel in plan.kernels), measurement, checks)


def _checks(plan: Plan, used: Used, kept: Sequence[Mapping[str, Array]]) -> list[Check]:
    """Check the outputs for all recorded inputs, or for seeded ones on a small problem with the same traits."""
    if not kept:
        plan.build()  # replaces a kernel that does not compile before its plan for the smaller problem is made
        return list(checks_of(plan, expected_of(used.problem, plan.arch, used.seed)))
    expected = [Expected(used.problem, inputs, plan.arch) for inputs in kept]
    return [check for one in expected for check in one.check(one.run(plan))]


def _measured(plan: Plan, inputs: Mapping[str, Array], options: ReplayOptions) -> Measurement:
    bound = plan.bind({name: array.copy() for name, array in inputs.items()})  # copies: some inputs are updated
    if options.rule is not None:
        return measure(bound, options.rule)
    bound.launch()  # the first launch has extra cost: page faults, starting threads
    return summarise(bound.time(options.repeats), clock_mhz=bound.clock_mhz())
