"""Checks of kernels: one of each family built, asked what it is, run, and held against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, product
from types import MappingProxyType
from typing import Any

from catalog.build.builder import Artifact, BuildFailure
from catalog.build.describe import describe
from catalog.build.targets import target_of
from catalog.conformance.findings import Finding, failed, passed, skipped
from catalog.errors import CatalogError, ProblemError, SelectionError
from catalog.ops.attention.fields import Op
from catalog.ops.attention.inputs import make_inputs
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.stages import MAIN_STAGE
from catalog.runtime import tracing
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices import why_unavailable
from catalog.runtime.measuring import main_kernel
from catalog.runtime.plan import Plan
from catalog.runtime.validate import Check, Expected
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.kernel import Kernel

STEPS = ("built", "described", "run", "verified")

_MOST_TRIED = 24
"""Dtypes and head dims of a family that a small problem is tried with."""

_SIZES = {"batch": 2, "nhead_q": 4, "nhead_k": 2}
_LENGTHS = {"seqlen_q": 256}
_PACKED = {"seqlens_q": [256, 128], "nhead_q": 4, "nhead_k": 2}

_FORMS: Mapping[Op, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        "fwd": (_SIZES | _LENGTHS, _PACKED),
        "splitkv": (_SIZES | _LENGTHS, _PACKED, _SIZES | _LENGTHS | {"page_size": 128}),
        "pagedkv": tuple(
            sizes | {"page_size": page, "seqlen_k": 512} for sizes in (_SIZES | _LENGTHS, _PACKED) for page in (128, 16)
        ),
        "batch_prefill": tuple(
            _PACKED | {"page_size": page, "seqlen_k": 512, "kv_lookup_table": table}
            for page in (16, 1024, 1)
            for table in ("vllm", "sglang")
        ),
        "appendkv": (
            _SIZES | {"seqlen_q": 16, "seqlen_k": 256, "seqlen_new": 16},
            _SIZES | {"seqlen_q": 16, "seqlen_k": 256, "seqlen_new": 16, "page_size": 128},
        ),
        # A kernel would ignore an input that it does not know: those selected with a gradient of LSE must use it.
        "bwd": tuple(form | of_lse for of_lse in ({"dlse": True}, {}) for form in (_SIZES | _LENGTHS, _PACKED)),
    }
)
"""Small problems of each operation, in the order in which they are tried: no tile needs padding for their lengths."""


def kernel_findings(catalog: Catalog, spec: ArchSpec, jobs: int | None) -> Iterator[Finding]:
    """A row of each family, the one that a small problem selects: built, described, run and verified.

    Its mask implementation is the first of the spec's that the problem has kernels of which the headers compile.

    What this machine lacks for a step is said, and the step skipped.

    Raises:
        CatalogError: as :meth:`Catalog.select`, where it is not about one kernel.
    """
    arch = str(spec.arch)
    there = set(spec.families)
    plans: dict[Op, Plan] = {}
    for op, main in MAIN_STAGE.items():
        if main not in there:
            continue
        found = [plan for mask_impl in spec.variants if (plan := _plan(catalog, spec, mask_impl, op))]
        plan = next(
            (plan for plan in found if not any(map(catalog.refusal, plan.kernels))), found[0] if found else None
        )
        if plan is None:
            yield failed("selected", main.value, f"no small problem of {op} selects a row of it")
        else:
            plans[op] = plan
    unreached = there - {kernel.family for plan in plans.values() for kernel in plan.kernels}
    for family in sorted(unreached - {MAIN_STAGE[op] for op in MAIN_STAGE}):
        yield failed("selected", family, "no plan has a row of it as a stage")
    lacking = _no_toolchain(arch)
    kernels = {kernel.id: kernel for plan in plans.values() for kernel in plan.kernels}
    results: dict[str, Artifact | str] = {}
    if lacking is None:
        results = _built(catalog, kernels, jobs)
    for plan in plans.values():
        yield from _of_plan(plan, results, lacking)


def _plan(catalog: Catalog, spec: ArchSpec, mask_impl: str, op: Op) -> Plan | None:
    """The plan of a small problem of ``op``, all of whose kernels are fixed; None where none is answered."""
    family, arch = MAIN_STAGE[op], str(spec.arch)
    rows = catalog.connection.execute(
        "SELECT dtype, hdim_q, hdim_v FROM kernel WHERE arch = ? AND revision = ? AND space = ? AND mask_impl = ? "
        "AND family = ? AND hw_valid GROUP BY dtype, hdim_q, hdim_v ORDER BY hdim_q, min(dispatch_order)",
        (arch, spec.revision, spec.space, mask_impl, family),
    )
    for (dtype, hdim_q, hdim_v), form in islice(product(rows.fetchall(), _FORMS[op]), _MOST_TRIED * len(_FORMS[op])):
        try:
            problem = Problem(op=op, dtype=dtype, hdim_q=hdim_q, hdim_v=hdim_v, **form)
            plan = catalog.select(problem, arch=arch, revision=spec.revision, mask_impl=mask_impl)
            return catalog.plan(problem, main_kernel(plan))
        except (ProblemError, SelectionError):
            continue
    return None


def _no_toolchain(arch: str) -> str | None:
    """Why kernels of ``arch`` cannot be compiled here; None where they can."""
    try:
        target = target_of(arch)
        target.include_dirs()
        target.toolchain(arch).verify()
    except CatalogError as error:
        return error.message.splitlines()[0]
    return None


def _built(catalog: Catalog, kernels: Mapping[str, Kernel], jobs: int | None) -> dict[str, Artifact | str]:
    """The library of each kernel by id, or why there is none."""
    results: dict[str, Artifact | str] = {}

    def on_done(ended: Artifact | BuildFailure) -> None:
        if isinstance(ended, BuildFailure):
            results[ended.kernel.id] = str(ended.error)
        else:
            results[ended.kernel_id] = ended

    catalog.builder.build_many(kernels.values(), jobs, on_done)
    return results


def _of_plan(plan: Plan, results: Mapping[str, Artifact | str], lacking: str | None) -> Iterator[Finding]:
    """The steps of every stage of a plan; all stages run together."""
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
        # Read, not asked: a library for another machine cannot be loaded here.
        if describe(kernel).encode() in artifact.path.read_bytes():
            yield passed("described", kernel.family, "the library says its row")
        else:
            broken = True
            yield failed("described", kernel.family, f"{artifact.path} does not say its row as JSON")
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
            yield skipped("verified", family, "it has not run")
        return
    for family in families:
        yield passed("run", family, f"{result.time_ms:.3f} ms, {plan.problem.key}")
        wrong = [check for check in checks if not check.passed]
        yield (failed if wrong else passed)("verified", family, _errors(wrong or checks))


def _errors(checks: list[Check]) -> str:
    return ", ".join(
        f"{check.tensor} off by {check.max_error:.3g}, {check.tolerance_used:.1%} of what is allowed"
        for check in checks
    )
