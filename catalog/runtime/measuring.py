"""Steps shared by tuning and benchmarks: building kernels before anything is timed, and recording timings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from catalog.errors import SelectionError
from catalog.ops.families import main_stage
from catalog.registry.timings import Timing, record

if TYPE_CHECKING:
    from catalog.build.pools import Pool
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.devices import DeviceInfo
    from catalog.runtime.plan import Plan
    from catalog.schema.kernel import Kernel
    from catalog.schema.problem import Problem

BUILT_AT_ONCE = 16
"""Problems whose kernels are compiled together before the first is timed; nothing is compiled during timing."""


def prepared(
    catalog: Catalog,
    problems: Iterable[Problem],
    *,
    arch: str,
    candidates: int,
    static: bool = False,
    jobs: int | None = None,
    pool: Pool | None = None,
    revision: str | None = None,
) -> Iterator[tuple[Problem, list[Plan] | SelectionError]]:
    """Yield each problem with plans for its best ``candidates`` kernels, or with the reason why it has none.

    The kernels of :data:`BUILT_AT_ONCE` problems are compiled before the first of these problems is yielded. A kernel
    that does not compile fails again when its plan is built.

    Args:
        catalog: the catalog with the kernels.
        problems: the problems, consumed as needed.
        arch: the kernels' arch.
        candidates: maximum number of kernels per problem.
        static: use the static order and ignore measurements.
        jobs: number of parallel compilers; None: one per core.
        pool: compiles on other machines; None: compile on this machine.
        revision: the kernels' revision; None: the arch's own.

    Raises:
        UsageError, SpecError, RegistryError, DeviceError: as :meth:`Catalog.candidates`.
        ClusterError: the machines of ``pool`` are gone.
    """
    waiting = iter(problems)
    while together := list(islice(waiting, BUILT_AT_ONCE)):
        found: list[tuple[Problem, list[Plan] | SelectionError]] = []
        for problem in together:
            try:
                best = catalog.candidates(problem, arch=arch, revision=revision, limit=candidates, static=static)
                found.append((problem, [catalog.plan(problem, candidate.kernel) for candidate in best]))
            except SelectionError as error:
                found.append((problem, error))
        plans = (plan for _, of in found if not isinstance(of, SelectionError) for plan in of)
        kernels = {kernel.id: kernel for plan in plans for kernel in plan.kernels}
        catalog.builder.build_many(kernels.values(), jobs, pool=pool)
        yield from found


def main_kernel(plan: Plan) -> Kernel:
    """The kernel of ``plan`` that does most of the work; timings of all stages together are recorded with it."""
    return plan.kernels[main_stage(plan.problem, plan.kernels)]


def library_key(plan: Plan, kernel: Kernel) -> str:
    """The content key of the library of ``kernel``, a stage of ``plan``; compiled unless it is in the cache.

    Raises:
        BuildError, ToolchainError: as :meth:`Plan.build`.
    """
    return next(artifact.key for artifact in plan.build() if artifact.kernel_id == kernel.id)


def keep(catalog: Catalog, problem: Problem, device: DeviceInfo, timings: Iterable[Timing]) -> None:
    """Record timings of one problem on one device, all of them or none.

    Raises:
        RegistryError: the catalog cannot be written.
    """
    with catalog.writing() as connection:
        record(connection, problem, device, timings)
