"""Benchmarks of one problem: the speed of kernels, compared with this machine's peaks."""

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
    """The speed of a plan's kernels, all stages together.

    ``median_ms``, ``min_ms``, ``p10_ms`` and ``p90_ms`` are in milliseconds over ``runs`` launches; ``confidence`` is
    the precision of the median, see :class:`~catalog.runtime.measure.Measurement`. ``gflops`` is :attr:`Problem.flops`
    and ``gb_per_s`` is :attr:`Problem.traffic` over the median, both in 1e9 per second. The percentages refer to the
    measured :class:`~catalog.runtime.peaks.Peaks` and are None if none were measured; that of the bandwidth may exceed
    100 if the tensors stay in the caches between launches.
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
        """The values of :data:`COLUMNS`, rounded to the precision of a measurement."""
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
    """The kernels timed on a device, best candidate first, and the device's peaks if they were measured."""

    device: DeviceInfo
    peaks: Peaks | None
    benchmarks: tuple[Benchmark, ...]

    @property
    def about(self) -> str:
        """The peaks and the device, as a sentence."""
        cores = self.device.cores
        if self.peaks is None:
            return f"Timed by the clock of {self.device.name}, {self.device.arch}; its peaks were not measured."
        return (
            f"Measured peaks of {self.device.arch}, {counted(cores, 'thread')} of {self.device.name}: "
            f"{self.peaks.gflops:.1f} GFLOP/s in fp32, {self.peaks.gb_per_s:.1f} GB/s of reads."
        )


def _benchmark(benched: Benched, measured: Measurement, peaks: Peaks | None) -> Benchmark:
    problem = benched.shape.problem
    # FLOP and bytes per nanosecond equal 1e9 of them per second
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
    """Time the best kernels that answer ``problem``, each as the main stage of its own plan.

    Kernels that do not compile, are wrong, or fail to launch are left out. Nothing is recorded in the catalog.

    Args:
        catalog: the kernels, and the number of threads to use.
        problem: the problem to time.
        options: how to time; the arch is this machine's CPU or one of its GPUs, whose peaks are not measured.
        on_done: called with each outcome; by default it logs a warning for each kernel that is left out.

    Raises:
        CatalogError: as :meth:`Catalog.candidates` and :func:`~catalog.runtime.peaks.measure_peaks`; or no kernel could
            be timed, in which case this is the last one's error.
    """
    options = options or BenchOptions()
    catalog.candidates(problem, arch=options.arch, limit=1)  # raises with the reason if no kernel answers the problem
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
