"""Benchmarks of many problems: the best kernels of each are verified if requested, timed, and recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from catalog.errors import CatalogError, SelectionError
from catalog.registry.timings import Timing
from catalog.runtime.deployed import Deployed, deployed
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
    from catalog.runtime.catalog import Catalog
    from catalog.schema.kernel import Kernel
    from catalog.schema.problem import Problem

MOST_CHECKED_FLOPS = 10**9
"""FLOP of the problem that a kernel is verified on; the reference takes about a second for it."""

ONE_PROBLEM = "problem"
"""The category of a problem that belongs to no set."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How to benchmark.

    Attributes:
        arch: the kernels' arch; this machine must have the device.
        candidates: maximum number of kernels per problem, best first; selection chooses the first.
        rule: when to stop timing a kernel. The kernels of a shape are timed in the same rounds.
        verify: compare each kernel with the float64 reference first, and do not time wrong ones.
        jobs: number of parallel compilers; None: one per core.
        seed: seed of the inputs.
    """

    arch: str = "host"
    candidates: int = 1
    rule: StopRule = field(default_factory=StopRule)
    verify: bool = False
    jobs: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Benched:
    """A kernel's result on a shape, for all stages of its plan together.

    ``main`` is the kernel that does most of the work, ``stages`` has all kernels. ``measurement`` is None if the kernel
    is wrong; ``checks`` has one entry per output, none if it was not verified. ``artifact_key`` is the key of ``main``.
    """

    shape: Shape
    main: Kernel
    stages: tuple[Kernel, ...]
    artifact_key: str
    checks: tuple[Check, ...]
    measurement: Measurement | None

    @property
    def verified(self) -> bool | None:
        """Whether every output was right; None if it was not verified."""
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
            f"{check.tensor} is off by {check.max_error:.3g}, {check.tolerance_used:.3g} times the tolerance"
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
        """The kernel and the reason, in one line."""
        reason = self.error.message.splitlines()[0]
        return reason if self.main is None or self.main.name in reason else f"{self.main.name}: {reason}"


Outcome: TypeAlias = Benched | NotBenched
OnDone: TypeAlias = Callable[[Outcome], None]


def shape_of(problem: Problem) -> Shape:
    """The shape for a single problem."""
    return Shape(problem.name, ONE_PROBLEM, problem)


def bench_shapes(
    catalog: Catalog,
    shapes: Sequence[Shape],
    options: BenchOptions | None = None,
    on_done: OnDone | None = None,
) -> list[Outcome]:
    """Time the best kernels of each shape on this machine, and record the medians in the catalog as tuning does.

    The medians of a shape are recorded together, and only if all are sound. A kernel that is wrong, does not compile or
    fails to launch is not timed, and a shape may have no kernel; the outcome says so. ``on_done`` is called with each
    outcome once it is recorded, so an interrupt loses no finished work.

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
        if timings and all(timing.measurement.sound for timing in timings):  # else noise would decide which one wins
            keep(catalog, shape.problem, device, timings)
        for outcome in found:
            done.append(outcome)
            if on_done is not None:
                on_done(outcome)
    catalog.forget()
    return done


def outcomes(catalog: Catalog, shapes: Sequence[Shape], options: BenchOptions) -> Iterator[list[Outcome]]:
    """Yield the outcomes of each shape as they are measured; nothing is recorded.

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
        # Random, not computed: the time of a launch does not depend on the values of a backward's O and LSE.
        inputs = draw_inputs(shape.problem, options.seed)
        outputs = make_outputs(shape.problem, inputs)
        expected = expected_of(shape.problem, options.arch, options.seed) if options.verify else None
    except CatalogError as error:
        yield NotBenched(shape, None, error)
        return
    ready = partial(deployed, inputs=inputs, outputs=outputs, policy=options.rule.policy)
    yield from _timed(shape, built, ready, expected, options.rule)


def _timed(
    shape: Shape,
    built: Mapping[str, tuple[Kernel, Plan]],
    ready: Callable[[Plan], Deployed],
    expected: Expected | None,
    rule: StopRule,
) -> Iterator[Outcome]:
    """The outcomes of a shape's built kernels by library key; the correct ones are timed alternately."""
    checks: dict[str, tuple[Check, ...]] = {}
    timed: dict[str, Deployed] = {}
    failures: dict[str, CatalogError] = {}
    for key, (_, plan) in built.items():
        try:
            checks[key] = () if expected is None else checks_of(plan, expected)
            if all(check.passed for check in checks[key]):
                timed[key] = ready(plan)
        except CatalogError as error:
            failures[key] = error
    measured, failed = measure_all(timed, rule)
    failures |= failed
    for key, (main, plan) in built.items():
        if key in failures:
            yield NotBenched(shape, main, failures[key])
        else:
            yield Benched(shape, main, plan.kernels, key, checks[key], measured.get(key))


def expected_of(problem: Problem, arch: str, seed: int = 0) -> Expected:
    """The reference result of the problem, or of a smaller one with the same traits.

    Raises:
        ProblemError: a run needs more memory than this machine has.
    """
    small = guarded_problem(problem, Limits(MOST_CHECKED_FLOPS))
    return Expected(small, make_inputs(small, seed), arch)


def checks_of(plan: Plan, expected: Expected) -> tuple[Check, ...]:
    """Run the kernels of ``plan`` on the problem of ``expected`` and check every output.

    Raises:
        CatalogError: as :meth:`Plan.run`.
    """
    checked = Plan(expected.problem, plan.arch, plan.kernels, plan.services)
    with paused():
        return tuple(expected.check(expected.run(checked)))
