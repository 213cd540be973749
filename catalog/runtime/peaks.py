"""Measured peak speeds of this machine, the scale for the speed of a kernel."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.errors import DeviceError
from catalog.runtime.devices.host.device import why_unavailable
from catalog.runtime.devices.loading import open_library

if TYPE_CHECKING:
    from catalog.build.builder import Builder

PEAK_PROBE = '#include "host/peaks.hpp"\n'
"""The C++ source of the library that measures what the CPU reaches at best."""

_LEAST_BUFFER_BYTES = 256 << 20
_BUFFER_PER_CACHE = 4
"""The buffer is this many times larger than the caches, so that reads come from memory."""

_NO_MEMORY = 3  # of catalog_status
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peak speeds of a CPU with a given number of threads.

    ``gflops`` is the rate of fp32 fused multiply-adds between registers, two FLOP each, in 1e9 FLOP/s: the sum over
    threads of the median of each thread's blocks. Kernels of every dtype compute in fp32. ``gb_per_s`` is the rate of
    sequential reads from a buffer larger than all caches, in 1e9 bytes/s: the best of several passes of all threads.
    """

    gflops: float
    gb_per_s: float


def measure_peaks(builder: Builder, arch: str, threads: int) -> Peaks:
    """Measure the peaks of ``threads`` threads of this CPU with the instructions of ``arch``; takes about 0.6 s.

    The probe is compiled once, with the flags of the kernels of ``arch``, into the cache of ``builder``.

    Raises:
        DeviceError: this machine does not run ``arch`` or lacks memory for the buffer, or the probe does not load.
        BuildError: the probe does not compile.
        ToolchainError: there is no usable compiler.
    """
    reason = why_unavailable(arch)
    if reason is not None:
        raise DeviceError(
            f"the peaks of {arch} cannot be measured on this machine: {reason}",
            hint="--arch host is this machine's CPU.",
        )
    artifact = builder.build_helper("peak probe", arch, PEAK_PROBE)
    probe = open_library(artifact.path, artifact.sha256)
    buffer_bytes = max(_LEAST_BUFFER_BYTES, _BUFFER_PER_CACHE * _cache_bytes(threads))
    flops = _rate(probe.catalog_peak_flops, threads)
    bandwidth = _rate(probe.catalog_peak_bandwidth, threads, ctypes.c_int64(buffer_bytes))
    return Peaks(flops / 1e9, bandwidth / 1e9)


def _rate(function: Any, *arguments: Any) -> float:
    rate = ctypes.c_double()
    status = function(*arguments, ctypes.byref(rate))
    if status == _NO_MEMORY:
        raise DeviceError("the memory bandwidth cannot be measured: there is not enough free memory")
    if status:
        raise DeviceError(f"{function.__name__}{arguments} returned status {status}")
    return rate.value


def _cache_bytes(threads: int) -> int:
    """Maximum bytes of the third-level caches that ``threads`` threads use; 0 if the system does not report it."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for cache in _CPUS.glob("cpu[0-9]*/cache/index3"):
            size = (cache / "size").read_text().strip()  # for example 32768K
            sizes[(cache / "shared_cpu_list").read_text()] = int(size.removesuffix("K")) << 10
    return sum(sorted(sizes.values())[-threads:])
