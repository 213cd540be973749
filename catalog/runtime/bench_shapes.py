"""Benchmarks of many problems: the best kernels of each, checked when asked for, timed, and recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from catalog.errors import CatalogError, SelectionError
from catalog.registry.timings import Timing
from catalog.runtime.guard import Limits, guarded_problem
from catalog.runtime.inputs import draw_inputs, make_inputs
from catalog.runtime.measure import Measurement, StopRule, measure_all
from catalog.runtime.measuring import keep, library_key, main_kernel, prepared
from catalog.runtime.plan import Plan
from catalog.runtime.tensors import make_outputs
from catalog.runtime.tracing import paused
from catalog.runtime.validate import Check, Expected
from catalog.schema.shapes import Shape

if TYPE_CHECKING:
    from catalog.runtime.bound import BoundPlan
    from catalog.runtime.catalog import Catalog
    from catalog.schema.kernel import Kernel
    from catalog.schema.problem import Problem

MOST_CHECKED_FLOPS = 10**9
"""Work of the problem that a kernel is checked on: the reference takes about a second for it."""

ONE_PROBLEM = "problem"
"""The category of a problem that is of no set."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How to benchmark.

    Attributes:
        arch: what kernels are for; this machine must have the device.
        candidates: maximum number of kernels of a problem, best first; selection takes the first one.
        rule: when to stop timing a kernel. The kernels of a shape are timed in the same rounds.
        verify: compare each kernel with the float64 reference first, and time none that is wrong.
        jobs: compilers at once; None: one a core.
        seed: of the inputs.
    """

    arch: str = "host"
    candidates: int = 1
    rule: StopRule = field(default_factory=StopRule)
    verify: bool = False
    jobs: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Benched:
    """A kernel on a shape: all stages of its plan together.

    ``main`` is the kernel that does most of the work, ``stages`` are all. ``measurement`` is None where the kernel is
    wrong; ``checks`` are of the outputs, none where it was not verified. ``artifact_key`` is that of ``main``.
    """

    shape: Shape
    main: Kernel
    stages: tuple[Kernel, ...]
    artifact_key: str
    checks: tuple[Check, ...]
    measurement: Measurement | None

    @property
    def verified(self) -> bool | None:
        """Whether every output was right; None where it was not looked at."""
        return all(check.passed for check in self.checks) if self.checks else None

    @property
    def timed(self) -> bool:
        """Whether there is a measurement."""
        return self.measurement is not None

    @property
    def about(self) -> str:
        """The kernel and its median, or what is wrong with it."""
        if self.measurement is not None:
            return f"{self.measurement.median_ms:.3f} ms {self.measurement.confidence}, {self.main.name}"
        wrong = ", ".join(
            f"{check.tensor} is off by {check.max_error:.3g}, {check.tolerance_used:.3g} times what is allowed"
            for check in self.checks
            if not check.passed
        )
        return f"{self.main.name} is WRONG: {wrong}"


@dataclass(frozen=True, slots=True)
class NotBenched:
    """Why a shape, or one kernel of it, could not be timed."""

    shape: Shape
    main: Kernel | None
    error: CatalogError

    @property
    def timed(self) -> bool:
        """Never."""
        return False

    @property
    def about(self) -> str:
        """The kernel and the reason in a line."""
        reason = self.error.message.splitlines()[0]
        return reason if self.main is None or self.main.name in reason else f"{self.main.name}: {reason}"


Outcome: TypeAlias = Benched | NotBenched
OnDone: TypeAlias = Callable[[Outcome], None]


def shape_of(problem: Problem) -> Shape:
    """The shape that a problem by itself is."""
    return Shape(problem.name, ONE_PROBLEM, problem)


def bench_shapes(
    catalog: Catalog,
    shapes: Sequence[Shape],
    options: BenchOptions | None = None,
    on_done: OnDone | None = None,
) -> list[Outcome]:
    """Time the best kernels of each shape on this machine, and record the medians in the catalog as tuning does.

    Those of a shape are recorded together, and only if all of them are sound. A kernel that is wrong, does not compile
    or whose launch fails is not timed, and a shape may have no kernel: the outcome says so. ``on_done`` gets each
    outcome when it is recorded, so that after an interrupt nothing that was done is lost.

    Raises:
        DeviceError: this machine has no device for the arch.
        UsageError, SpecError, RegistryError: as :meth:`Catalog.select`; RegistryError also where the catalog cannot be
            written.
    """
    options = options or BenchOptions()
    device = catalog.device_info(options.arch)
    done: list[Outcome] = []
    for shape, found in zip(shapes, outcomes(catalog, shapes, options), strict=True):
        timed = [one for one in found if isinstance(one, Benched)]
        timings = [Timing(one.main.id, one.artifact_key, one.measurement) for one in timed if one.measurement]
        if timings and all(timing.measurement.sound for timing in timings):  # noise would decide which of them wins
            keep(catalog, shape.problem, device, timings)
        for outcome in found:
            done.append(outcome)
            if on_done is not None:
                on_done(outcome)
    catalog.forget()
    return done


def outcomes(catalog: Catalog, shapes: Sequence[Shape], options: BenchOptions) -> Iterator[list[Outcome]]:
    """The outcomes of each shape, as they come; nothing is recorded.

    Raises:
        UsageError, SpecError, RegistryError, DeviceError: as :meth:`Catalog.select`.
    """
    answered = prepared(
        catalog,
        (shape.problem for shape in shapes),
        arch=options.arch,
        candidates=options.candidates,
        jobs=options.jobs,
    )
    for shape, (_, plans) in zip(shapes, answered, strict=True):
        if isinstance(plans, SelectionError):
            yield [NotBenched(shape, None, plans)]
        else:
            yield list(_of_shape(shape, plans, options))


def _of_shape(shape: Shape, plans: Sequence[Plan], options: BenchOptions) -> Iterator[Outcome]:
    built: dict[str, tuple[Kernel, Plan]] = {}
    for plan in plans:
        main = main_kernel(plan)
        try:
            built[library_key(plan, main)] = main, plan
        except CatalogError as error:
            yield NotBenched(shape, main, error)
    if not built:
        return
    try:
        # Drawn, not computed: what a launch takes does not depend on the values of a backward's O and LSE.
        inputs = draw_inputs(shape.problem, options.seed)
        outputs = make_outputs(shape.problem, inputs)
        expected = expected_of(shape.problem, options.arch, options.seed) if options.verify else None
    except CatalogError as error:
        yield NotBenched(shape, None, error)
        return
    yield from _timed(shape, built, lambda plan: plan.bind(inputs, outputs=outputs), expected, options.rule)


def _timed(
    shape: Shape,
    built: Mapping[str, tuple[Kernel, Plan]],
    bind: Callable[[Plan], BoundPlan],
    expected: Expected | None,
    rule: StopRule,
) -> Iterator[Outcome]:
    """The outcomes of the built kernels of a shape, by the keys of their libraries; the correct ones take turns."""
    checks: dict[str, tuple[Check, ...]] = {}
    bound: dict[str, BoundPlan] = {}
    failures: dict[str, CatalogError] = {}
    for key, (_, plan) in built.items():
        try:
            checks[key] = () if expected is None else checks_of(plan, expected)
            if all(check.passed for check in checks[key]):
                bound[key] = bind(plan)
        except CatalogError as error:
            failures[key] = error
    measured, failed = measure_all(bound, rule)
    failures |= failed
    for key, (main, plan) in built.items():
        if key in failures:
            yield NotBenched(shape, main, failures[key])
        else:
            yield Benched(shape, main, plan.kernels, key, checks[key], measured.get(key))


def expected_of(problem: Problem, arch: str, seed: int = 0) -> Expected:
    """What the reference says of the problem, or of a smaller one with the same traits.

    Raises:
        ProblemError: what a run needs is larger than this machine's memory.
    """
    small = guarded_problem(problem, Limits(MOST_CHECKED_FLOPS))
    return Expected(small, make_inputs(small, seed), arch)


def checks_of(plan: Plan, expected: Expected) -> tuple[Check, ...]:
    """Every output of the kernels of ``plan`` on the problem that something is expected of.

    Raises:
        CatalogError: as :meth:`Plan.run`.
    """
    checked = Plan(expected.problem, plan.arch, plan.kernels, plan.services)
    with paused():
        return tuple(expected.check(expected.run(checked)))
