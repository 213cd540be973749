"""Checks of kernels: one of each family is built, described, run, and compared with the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from catalog.backends import target_of, why_unavailable
from catalog.build.builder import Artifact, BuildFailure
from catalog.build.describe import describe
from catalog.build.trials import Trials
from catalog.conformance.findings import Finding, failed, passed, skipped
from catalog.errors import CatalogError, ProblemError, SelectionError
from catalog.ops import operation
from catalog.ops.families import main_families, smoke_fields
from catalog.ops.protocol import Operation
from catalog.registry.views import rows_of
from catalog.runtime import tracing
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.runtime.plan import Plan
from catalog.runtime.validate import Check, Expected
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import Lineage, of_lineage

STEPS = ("built", "described", "run", "verified")

_MOST_TRIED = 24
"""Kernels of a family, of different traits, that small problems are made for."""


def kernel_findings(catalog: Catalog, spec: ArchSpec, jobs: int | None) -> Iterator[Finding]:
    """A row of each family, the one that a small problem selects: built, described, run and verified.

    Its mask implementation is the first of the spec's that the problem has kernels of which the headers compile.

    A step that needs something this machine lacks is skipped, with the reason.

    Raises:
        CatalogError: as :meth:`Catalog.select`, if the error is not about a single kernel.
    """
    arch = str(spec.arch)
    mains = [family for family in main_families(operation(spec.operation)) if family in spec.families]
    plans: list[Plan] = []
    for family in mains:
        found = [plan for variant in spec.variants if (plan := _plan(catalog, spec.lineage(variant), family))]
        plan = next(
            (plan for plan in found if not any(map(catalog.refusal, plan.kernels))), found[0] if found else None
        )
        if plan is None:
            yield failed("selected", str(family), "no small problem selects a row of it")
        else:
            plans.append(plan)
    reached = {kernel.family for plan in plans for kernel in plan.kernels}
    for family in sorted(set(spec.families) - reached - set(mains)):
        yield failed("selected", family, "no plan has a row of it as a stage")
    lacking = _no_toolchain(catalog, arch, operation(spec.operation))
    kernels = {kernel.id: kernel for plan in plans for kernel in plan.kernels}
    results: dict[str, Artifact | str] = {}
    if lacking is None:
        results = _built(catalog, kernels, jobs)
    for plan in plans:
        yield from _of_plan(plan, results, lacking)


def _plan(catalog: Catalog, lineage: Lineage, family: str) -> Plan | None:
    """The plan of a small problem with a main kernel of ``family``, all of whose kernels are fixed, if there is one."""
    of = operation(lineage.operation)
    traits = of.smoke_traits
    rows = catalog.connection.execute(
        f"SELECT {', '.join(traits)} FROM {rows_of(of.name)} WHERE {of_lineage()} AND family = :family AND hw_valid "
        f"GROUP BY {', '.join(traits)} ORDER BY {traits[0]}, min(dispatch_order)",
        {**lineage.parameters, "family": str(family)},
    )
    for row in islice(rows.fetchall(), _MOST_TRIED):
        for fields in smoke_fields(of, family, dict(zip(traits, row, strict=True))):
            try:
                problem = of.problem(**fields)
                (best,) = catalog.candidates(problem, **lineage.wanted.keywords, family=family, limit=1)
                return catalog.plan(problem, best.kernel)
            except (ProblemError, SelectionError):
                continue
    return None


def _no_toolchain(catalog: Catalog, arch: str, of: Operation) -> str | None:
    """Why kernels of ``arch`` cannot be compiled here; None if they can."""
    try:
        target = target_of(arch)
        target.headers_of((of,))
        Trials(catalog.builder.cache).verify(target.toolchain(arch))
    except CatalogError as error:
        return error.message.splitlines()[0]
    return None


def _built(catalog: Catalog, kernels: Mapping[str, Kernel], jobs: int | None) -> dict[str, Artifact | str]:
    """Each kernel's library or build error, by id."""
    results: dict[str, Artifact | str] = {}

    def on_done(ended: Artifact | BuildFailure) -> None:
        if isinstance(ended, BuildFailure):
            results[ended.kernel.id] = str(ended.error)
        else:
            results[ended.kernel_id] = ended

    catalog.builder.build_many(kernels.values(), jobs, on_done)
    return results


def _of_plan(plan: Plan, results: Mapping[str, Artifact | str], lacking: str | None) -> Iterator[Finding]:
    """The findings about every stage of a plan; all stages run together."""
    if lacking is not None:
        for kernel in plan.kernels:
            yield from (skipped(step, kernel.family, lacking) for step in STEPS)
        return
    broken = False
    for kernel in plan.kernels:
        artifact = results[kernel.id]
        if isinstance(artifact, str):
            broken = True
            yield failed("built", kernel.family, f"{kernel.name}: {artifact}")
            yield skipped("described", kernel.family, "it is not built")
            continue
        took = "in the cache" if artifact.cached else f"{artifact.compile_seconds:.1f} s"
        yield passed("built", kernel.family, f"{kernel.name}: {took}")
        # Read from the file: a library for another machine cannot be loaded here.
        if describe(kernel).encode() in artifact.path.read_bytes():
            yield passed("described", kernel.family, "the library describes its row")
        else:
            broken = True
            yield failed("described", kernel.family, f"{artifact.path} does not describe its row as JSON")
    yield from _ran(plan, "a stage is not built" if broken else why_unavailable(plan.arch))


def _ran(plan: Plan, reason: str | None) -> Iterator[Finding]:
    families: list[str] = [kernel.family for kernel in plan.kernels]
    if reason is not None:
        yield from (skipped(step, family, reason) for step in STEPS[2:] for family in families)
        return
    try:
        expected = Expected(plan.problem, make_inputs(plan.problem), plan.arch)
        with tracing.paused():
            result = expected.run(plan)
        checks = expected.check(result)
    except CatalogError as error:
        for family in families:
            yield failed("run", family, str(error))
            yield skipped("verified", family, "it did not run")
        return
    for family in families:
        yield passed("run", family, f"{result.time_ms:.3f} ms, {plan.problem.key}")
        wrong = [check for check in checks if not check.passed]
        yield (failed if wrong else passed)("verified", family, _errors(wrong or checks))


def _errors(checks: list[Check]) -> str:
    return ", ".join(
        f"{check.tensor} off by {check.max_error:.3g}, {check.tolerance_used:.1%} of the tolerance" for check in checks
    )
