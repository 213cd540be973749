"""How fast kernels are on this machine, beside what it reaches at best."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from catalog.errors import BuildError
from catalog.runtime.devices import is_amd
from catalog.runtime.measure import StopRule, measure
from catalog.runtime.peaks import Peaks, measure_peaks

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.devices import DeviceInfo
    from catalog.runtime.plan import Plan
    from catalog.schema.problem import Problem

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The speed of the kernels of a plan, all stages together.

    ``median_ms``, ``min_ms``, ``p10_ms`` and ``p90_ms`` are of the times of ``runs`` launches, in milliseconds: see
    :mod:`catalog.runtime.measure`. ``gflops`` counts :attr:`Problem.flops` and ``gb_per_s`` :attr:`Problem.bytes`, both
    in 1e9 a second, over the median. Their percentages are of the measured :class:`~catalog.runtime.peaks.Peaks`, None
    where none were measured; that of the bandwidth may exceed 100 where the tensors stay in the caches from launch to
    launch.
    """

    median_ms: float
    min_ms: float
    p10_ms: float
    p90_ms: float
    runs: int
    gflops: float
    percent_of_peak: float | None
    gb_per_s: float
    percent_of_bandwidth: float | None
    kernels: tuple[str, ...]

    @property
    def row(self) -> tuple[Any, ...]:
        """The values of :data:`COLUMNS`, rounded to what a measurement is good for."""
        return (
            round(self.median_ms, 4),
            round(self.min_ms, 4),
            round(self.p10_ms, 4),
            round(self.p90_ms, 4),
            self.runs,
            round(self.gflops, 1),
            None if self.percent_of_peak is None else round(self.percent_of_peak, 1),
            round(self.gb_per_s, 2),
            None if self.percent_of_bandwidth is None else round(self.percent_of_bandwidth, 1),
            " -> ".join(self.kernels),
        )


COLUMNS = tuple(field.name for field in fields(Benchmark))


@dataclass(frozen=True, slots=True)
class Report:
    """The kernels that were timed on a device, best candidate first, and what it reaches, if that was measured."""

    device: DeviceInfo
    peaks: Peaks | None
    benchmarks: tuple[Benchmark, ...]

    @property
    def about(self) -> str:
        """The peaks and what they are of, as a sentence."""
        cores = self.device.cores
        if self.peaks is None:
            return f"Timed by the clock of {self.device.name}, {self.device.arch}; its peaks are not measured."
        return (
            f"Measured peaks of {self.device.arch}, {cores} thread{'s' * (cores > 1)} of {self.device.name}: "
            f"{self.peaks.gflops:.1f} GFLOP/s in fp32, {self.peaks.gb_per_s:.1f} GB/s of reads."
        )


def bench(plan: Plan, peaks: Peaks | None, rule: StopRule | None = None, *, seed: int = 0) -> Benchmark:
    """Time a plan on seeded random inputs, after a warm-up.

    Args:
        plan: of a problem on this machine.
        peaks: of the same arch and threads; None: unknown.
        rule: when enough launches are timed.
        seed: of the inputs.

    Raises:
        DeviceError, BuildError, ToolchainError: as :meth:`Plan.bind`.
    """
    measured = measure(plan.bind(seed=seed), rule)
    # FLOP and bytes a nanosecond are 1e9 of them a second
    gflops, gb_per_s = (total / measured.median_ms / 1e6 for total in (plan.problem.flops, plan.problem.bytes))
    return Benchmark(
        median_ms=measured.median_ms,
        min_ms=measured.min_ms,
        p10_ms=measured.p10_ms,
        p90_ms=measured.p90_ms,
        runs=measured.n,
        gflops=gflops,
        percent_of_peak=None if peaks is None else 100 * gflops / peaks.gflops,
        gb_per_s=gb_per_s,
        percent_of_bandwidth=None if peaks is None else 100 * gb_per_s / peaks.gb_per_s,
        kernels=tuple(kernel.name for kernel in plan.kernels),
    )


def bench_problem(
    catalog: Catalog,
    problem: Problem,
    *,
    arch: str = "host",
    candidates: int = 1,
    runs: int = 10,
    cold: bool = False,
) -> Report:
    """Time the ``candidates`` best kernels that answer ``problem``, each as the main stage of a plan of its own.

    One that does not compile is left out, with a warning.

    Args:
        catalog: where the kernels are, with the threads to use.
        problem: what they compute.
        arch: of this machine's CPU, or of a GPU here, whose peaks are not measured.
        candidates: how many kernels at most.
        runs: launches that are timed at the least.
        cold: empty the device's caches before every launch.

    Raises:
        CatalogError: as :meth:`Catalog.candidates`, :func:`~catalog.runtime.peaks.measure_peaks` and :func:`bench`.
    """
    found = catalog.candidates(problem, arch=arch, limit=candidates)
    plans = [catalog.plan(problem, candidate.kernel) for candidate in found]
    device = catalog.device(plans[0].arch)
    peaks = None if is_amd(plans[0].arch) else measure_peaks(catalog.builder, plans[0].arch, device.threads)
    rule = StopRule(least=runs, cold=cold)
    benchmarks = []
    failure: BuildError | None = None
    for plan in plans:
        try:
            benchmarks.append(bench(plan, peaks, rule))
        except BuildError as error:
            failure = error
            _log.warning("%s", error.message)
    if failure is not None and not benchmarks:
        raise failure
    return Report(catalog.device_info(plans[0].arch), peaks, tuple(benchmarks))
