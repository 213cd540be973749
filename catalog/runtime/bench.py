"""How fast kernels are on this machine, beside what it reaches at best."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from catalog.backends import HOST, backend_of
from catalog.messages import counted
from catalog.runtime.bench_shapes import Benched, BenchOptions, NotBenched, OnDone, Outcome, outcomes, shape_of
from catalog.runtime.peaks import Peaks, measure_peaks

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.devices import DeviceInfo
    from catalog.runtime.measure import Measurement
    from catalog.schema.problem import Problem

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The speed of the kernels of a plan, all stages together.

    ``median_ms``, ``min_ms``, ``p10_ms`` and ``p90_ms`` are in milliseconds, over ``runs`` launches, and ``confidence``
    says how precise the median is: see :class:`~catalog.runtime.measure.Measurement`. ``gflops`` counts
    :attr:`Problem.flops` and ``gb_per_s`` :attr:`Problem.traffic`, both in 1e9 a second, over the median. Their
    percentages are of the measured :class:`~catalog.runtime.peaks.Peaks`, None where none were measured; that of the
    bandwidth may exceed 100 where the tensors stay in the caches from launch to launch.
    """

    median_ms: float
    min_ms: float
    p10_ms: float
    p90_ms: float
    confidence: str
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
            self.confidence,
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
            f"Measured peaks of {self.device.arch}, {counted(cores, 'thread')} of {self.device.name}: "
            f"{self.peaks.gflops:.1f} GFLOP/s in fp32, {self.peaks.gb_per_s:.1f} GB/s of reads."
        )


def _benchmark(benched: Benched, measured: Measurement, peaks: Peaks | None) -> Benchmark:
    problem = benched.shape.problem
    # FLOP and bytes a nanosecond are 1e9 of them a second
    gflops, gb_per_s = (total / measured.median_ms / 1e6 for total in (problem.flops, problem.traffic))
    return Benchmark(
        median_ms=measured.median_ms,
        min_ms=measured.min_ms,
        p10_ms=measured.p10_ms,
        p90_ms=measured.p90_ms,
        confidence=measured.confidence,
        runs=measured.n,
        gflops=gflops,
        percent_of_peak=None if peaks is None else 100 * gflops / peaks.gflops,
        gb_per_s=gb_per_s,
        percent_of_bandwidth=None if peaks is None else 100 * gb_per_s / peaks.gb_per_s,
        kernels=tuple(kernel.name for kernel in benched.stages),
    )


def _warn(outcome: Outcome) -> None:
    if not outcome.timed:
        _log.warning("%s", outcome.about)


def bench_problem(
    catalog: Catalog, problem: Problem, options: BenchOptions | None = None, on_done: OnDone = _warn
) -> Report:
    """Time the best kernels that answer ``problem``, each as the main stage of a plan of its own.

    One that does not compile, is wrong or whose launch fails is left out. Nothing is recorded in the catalog.

    Args:
        catalog: where the kernels are, with the threads to use.
        problem: what they compute.
        options: how; the arch is this machine's CPU, or a GPU here, whose peaks are not measured.
        on_done: hears of each kernel; by default it warns of those that are left out.

    Raises:
        CatalogError: as :meth:`Catalog.candidates` and :func:`~catalog.runtime.peaks.measure_peaks`; or no kernel could
            be timed, and the last one's error says why.
    """
    options = options or BenchOptions()
    catalog.candidates(problem, arch=options.arch, limit=1)  # before a device is looked for: says why there is none
    device = catalog.device_info(options.arch)
    threads = catalog.device(device.arch).threads
    peaks = measure_peaks(catalog.builder, device.arch, threads) if backend_of(device.arch) is HOST else None
    (done,) = outcomes(catalog, [shape_of(problem)], options)
    for outcome in done:
        on_done(outcome)
    errors = [outcome.error for outcome in done if isinstance(outcome, NotBenched)]
    if len(errors) == len(done):
        raise errors[-1]
    benchmarks = (
        _benchmark(outcome, outcome.measurement, peaks)
        for outcome in done
        if isinstance(outcome, Benched) and outcome.measurement is not None
    )
    return Report(device, peaks, tuple(benchmarks))
