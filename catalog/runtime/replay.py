"""Running the calls of a trace again: each problem once, on the inputs that were kept, else on seeded ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from catalog.errors import INTERRUPTED, CatalogError
from catalog.runtime import tracing
from catalog.runtime.bench_shapes import checks_of, expected_of
from catalog.runtime.devices.here import check_available, resolve_arch
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
"""What a replayed problem shows."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay.

    Attributes:
        arch: what kernels are for; None: that of the recorded calls.
        repeats: launches of each problem, where they are not timed by a rule.
        rule: time until the medians are known; None: just ``repeats`` launches.
        verify: hold the outputs against the float64 reference.
        jobs: compilers at once; None: one a core.
    """

    arch: str | None = None
    repeats: int = 5
    rule: StopRule | None = None
    verify: bool = False
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a problem: ``inputs`` says which, ``kernels`` are those that ran now; ``error`` why it did not run.

    ``checks`` are of the outputs, of all inputs that were kept; none where it was not verified.
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
        """Whether every output was right; None where it was not looked at."""
        return all(check.passed for check in self.checks) if self.checks else None

    @property
    def passed(self) -> bool:
        """Whether it ran, and nothing that was looked at is wrong."""
        return self.error is None and self.verified is not False

    @property
    def about(self) -> str:
        """The time, or what is wrong, in a line."""
        if self.error is not None:
            return self.error.message.splitlines()[0]
        if not self.passed:
            worst = max(self.checks, key=lambda check: check.tolerance_used)
            return f"WRONG: {worst.tensor} is off by {worst.tolerance_used:.3g} times what is allowed"
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
    """Run each of the recorded problems again, with the kernels that selection takes now.

    What is recorded of problems and timings in the catalog stays; nothing of this is traced. A problem that does not
    run stops no other: its outcome has the error.

    Raises:
        UsageError: an arch is unknown, or kept inputs are damaged.
        SpecError, RegistryError: as :meth:`Catalog.select`.
    """
    options = options or ReplayOptions()
    done: list[Replayed] = []
    with tracing.paused():
        if options.arch is not None:
            catalog.spec(options.arch)  # raises for an unknown one before anything runs
        plans = [_plan(catalog, used, options) for used in asked]
        kernels = {kernel.id: kernel for plan in plans if not isinstance(plan, CatalogError) for kernel in plan.kernels}
        catalog.builder.build_many(kernels.values(), options.jobs)
        for used, plan in zip(asked, plans, strict=True):
            done.append(_replayed(used, plan, options))
            if on_done is not None:
                on_done(done[-1])
    return done


def exit_code(asked: Sequence[Used], done: Sequence[Replayed]) -> int:
    """What ``catalog replay`` exits with: 1 where a problem does not run or is wrong, 130 where some were not tried."""
    if len(done) < len(asked):
        return INTERRUPTED
    return int(not all(replayed.passed for replayed in done))


def _plan(catalog: Catalog, used: Used, options: ReplayOptions) -> Plan | CatalogError:
    """The plan of a problem, or why it has none here."""
    try:
        check_available(resolve_arch(options.arch or used.wanted.arch))
        if options.arch is None:
            arch, revision, variant, _ = used.wanted
            return catalog.select(used.problem, arch=arch, revision=revision, mask_impl=variant)
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
    """The outputs of each call whose inputs were kept; of seeded ones, on a small problem of the same traits."""
    if not kept:
        plan.build()  # a kernel that does not compile gives way here, not in the plan of the smaller problem
        return list(checks_of(plan, expected_of(used.problem, plan.arch, used.seed)))
    expected = [Expected(used.problem, inputs, plan.arch) for inputs in kept]
    return [check for one in expected for check in one.check(one.run(plan))]


def _measured(plan: Plan, inputs: Mapping[str, Array], options: ReplayOptions) -> Measurement:
    bound = plan.bind({name: array.copy() for name, array in inputs.items()})  # an updated one is written
    if options.rule is not None:
        return measure(bound, options.rule)
    bound.launch()  # the first takes what no other does: pages, threads
    return summarise(bound.time(options.repeats), clock_mhz=bound.clock_mhz())
