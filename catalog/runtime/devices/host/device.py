"""The host CPU as a device: kernels are shared libraries in this process, tensors are arrays in its memory."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from catalog.build.toolchains import host_facts
from catalog.errors import DeviceError, SpecError, UsageError
from catalog.ops import operation_of
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.devices.arguments import Call, template
from catalog.runtime.devices.fast_path import Means, plain_tensors
from catalog.runtime.devices.host.arrays import host_array, host_outputs, imported_torch
from catalog.runtime.devices.host.calls import HostCall, host_means, start
from catalog.runtime.devices.host.pools import adopt_pool, process_pool
from catalog.runtime.devices.loading import Libraries, LoadedKernel
from catalog.runtime.tensors import Array, make_outputs, numpy_array
from catalog.schema.problem import Problem
from catalog.schema.problem_form import Form
from catalog.schema.workspace import NO_WORKSPACE, Workspace
from catalog.settings import data_dir
from catalog.threads import checked, default_threads

_FLOODS = 2
_LARGE_CACHE = 64 << 20
_CPU_FREQUENCIES = Path("/sys/devices/system/cpu")
_CPU_INFO = Path("/proc/cpuinfo")
_THREADS = "/proc/self/task"
_GET_VECTOR_LENGTH = 51
"""PR_SVE_GET_VL of prctl(2): bytes, and flags above them."""
_VECTOR_LENGTH_MASK = 0xFFFF


class HostDevice:
    """Loads, launches and times host kernels.

    Args:
        num_threads: threads of a kernel, at most :func:`catalog.threads.most_threads`; 0: ``OMP_NUM_THREADS``, else one
            per core that the process may use.

    Raises:
        UsageError: ``num_threads`` is out of range.
    """

    def __init__(self, num_threads: int = 0) -> None:
        self._threads = checked(num_threads) or default_threads()
        self._libraries = Libraries()

    @property
    def device(self) -> DeviceInfo:
        """This CPU, with the number of threads that kernels use.

        Raises:
            DeviceError: no host arch runs on this CPU.
        """
        return DeviceInfo(resolve_host_arch(), cpu_name(), self.threads)

    @property
    def identity(self) -> Mapping[str, Any]:
        """The number of its threads; there is only one host."""
        return {"num_threads": self.threads}

    @property
    def place(self) -> str:
        """PyTorch's name of the host."""
        return "cpu"

    @property
    def queues(self) -> bool:
        """Always false: a host kernel is done when its launch returns."""
        return False

    def on_host(self, array: Array) -> Array:
        """``array`` itself."""
        return array

    def beside(self, tensors: Mapping[str, Any]) -> HostDevice:
        """This device: there is one host."""
        return self

    def array(self, problem: Problem, name: str, value: Any) -> Array:
        """``value``, a NumPy array, PyTorch tensor or object with ``__dlpack__``, as a NumPy array on its memory.

        Raises:
            TensorError: it is not an array, is in a GPU's memory, cannot be shared without a copy, or has elements that
                no kernel accepts.
        """
        array = host_array(name, value)
        return numpy_array(problem, name, value) if array is None else array

    def outputs(self, problem: Problem, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make arrays for the outputs: PyTorch tensors if an input is one, else NumPy arrays.

        Raises:
            ProblemError: the run would allocate more memory than this machine has.
        """
        made = host_outputs(problem, inputs, given)
        return make_outputs(problem, inputs) if made is None else made

    def means(self, form: Form, given: Mapping[str, Any]) -> Means | None:
        """As :meth:`Device.means`; None also with lengths or indices that kernels may not check themselves."""
        unchecked = not operation_of(form.blank).kernels_check_values and any(
            form.tensors[name].element == "int32" for name in given
        )
        return None if unchecked or not plain_tensors(imported_torch(), given) else host_means()

    def load(self, path: Path, sha256: str, kernel_id: str) -> LoadedKernel:
        """As :meth:`Libraries.load`."""
        kernel = self._libraries.load(path, sha256, kernel_id)
        adopt_pool(kernel)
        return kernel

    def call(self, problem: Problem, tensors: Mapping[str, Array], workspace: Workspace = NO_WORKSPACE) -> HostCall:
        """The argument struct of a problem with its checked tensors, inputs and outputs together.

        All stages of a plan share it. The call keeps the tensors alive and can be launched any number of times.
        """
        layout = tuple([(name, array.strides) for name, array in tensors.items()])
        filled = template(problem, layout)
        partials = [
            (slot, np.empty(-(-partial.bytes // 4), np.float32), partial.strides)
            for slot, partial in workspace.partials.items()
        ]
        args = filled.fill(
            tensors,
            [array.ctypes.data for array in tensors.values()],
            [(slot, array.ctypes.data, strides) for slot, array, strides in partials],
            workspace.num_splits,
            {},
        )
        args.num_threads, args.pool = self.threads, process_pool()
        kept = (*tensors.values(), *(array for _, array, _ in partials))
        return HostCall(args, ctypes.byref(args), kept, (filled.lists,))

    def once(self, problem: Problem, tensors: Mapping[str, Array], workspace: Workspace = NO_WORKSPACE) -> HostCall:
        """As :meth:`call`."""
        return self.call(problem, tensors, workspace)

    def launch(self, kernel: LoadedKernel, call: Call) -> None:
        """Run the kernel; when it returns, the outputs are written.

        Raises:
            DeviceError: the kernel rejects the call or runs out of memory.
        """
        start((kernel,), call.pointer)

    def run(self, kernels: Sequence[LoadedKernel], call: Call) -> None:
        """Run the kernels in order; when it returns, the outputs are written.

        Raises:
            DeviceError: as :meth:`launch`.
        """
        start(kernels, call.pointer)

    def enqueue(self, kernels: Sequence[LoadedKernel], call: Call, stream: Any = None) -> None:
        """As :meth:`run`: the host has no streams.

        Raises:
            UsageError: a stream is given.
            DeviceError: as :meth:`launch`.
        """
        if stream is not None:
            raise UsageError("host kernels take no stream: they run before the call returns")
        self.run(kernels, call)

    def time(self, kernels: Sequence[LoadedKernel], call: Call, launches: int, *, cold: bool = False) -> list[int]:
        """Launch the kernels ``launches`` times; return the nanoseconds of each.

        ``cold`` empties the caches before each launch, by writing to more memory than they hold.

        Raises:
            DeviceError: as :meth:`launch`.
        """
        return self.timed(self.replayed(kernels, call), launches, cold=cold)

    def replayed(self, kernels: Sequence[LoadedKernel], call: Call) -> Callable[[], object]:
        """A function that runs the kernels in order: the host has no graphs.

        Selecting and binding are not part of it, as they are not part of a graph.
        """

        def launch() -> None:
            start(kernels, call.pointer)  # not the pointer alone: the call keeps the tensors alive

        return launch

    def timed(self, start: Callable[[], object], launches: int, *, cold: bool = False) -> list[int]:
        """As :meth:`Device.timed`, by the monotonic clock.

        Raises:
            DeviceError: as :meth:`launch`.
        """
        clock = time.perf_counter_ns
        durations = []
        for _ in range(launches):
            if cold:
                self._flood += 1
            began = clock()
            start()
            durations.append(clock() - began)
        return durations

    def awaited(self, start: Callable[[], object], launches: int, *, cold: bool = False) -> list[int]:
        """As :meth:`timed`: work on the host is done when its call returns."""
        return self.timed(start, launches, cold=cold)

    @property
    def capturing(self) -> bool:
        """Always false: the host has no graphs."""
        return False

    @cached_property
    def _flood(self) -> Array:
        return np.zeros(_FLOODS * _cache_bytes(), np.uint8)

    def waits(self) -> Mapping[str, int]:
        """Nanoseconds for which each thread of this process was ready to run while others had the cores.

        Empty if the system does not report it, which only Linux does.
        """
        return _waits()

    def clock_mhz(self) -> float | None:
        """The mean of the cores' current clock rates in MHz; None if the system does not report them."""
        return _clock_mhz()

    @property
    def threads(self) -> int:
        """The number of threads that a kernel uses."""
        return self._threads


def host_archs() -> tuple[str, ...]:
    """Compile targets of host kernels, best first.

    Raises:
        SpecError: ``data/toolchains/host.json`` is missing or malformed.
    """
    return tuple(host_facts().arches)


def why_unavailable(arch: str) -> str | None:
    """Why kernels of ``arch`` cannot run on this CPU; None if they can.

    Raises:
        SpecError: ``data/toolchains/host.json`` is missing or malformed, or names a CPU that archspec does not know.
    """
    facts = host_facts().arches.get(arch)
    if facts is None:
        return f"{arch} is not a CPU arch: host archs are {', '.join(host_archs())}"
    cpu, needed = _archspec(), facts.cpu or arch
    if needed not in cpu.TARGETS:
        raise SpecError(
            f"{data_dir() / 'toolchains' / 'host.json'}: arches.{arch}.cpu: archspec knows no CPU {needed!r}",
            hint='"cpu" names the oldest CPU that runs the arch: x86_64_v3, zen3, neoverse_v1, ...',
        )
    target, host = cpu.TARGETS[needed], cpu.host()
    if target <= host:
        if facts.vector_bits in (None, found := sve_bits()):
            return None
        has = f"{found} bits" if found else "no SVE"
        return f"{arch} needs SVE with vectors of {facts.vector_bits} bits: this CPU, {host.name}, has {has}"
    if target.family != host.family:
        return f"{arch} needs a CPU of family {target.family}: this one is {host.name}, family {host.family}"
    lacking = ", ".join(sorted(target.features - host.features))
    return f"{arch} needs {lacking}, which this CPU, {host.name}, lacks"


def resolve_host_arch() -> str:
    """The arch that ``host`` stands for: the best one that this CPU runs.

    Raises:
        DeviceError: none runs; the message names the CPU.
        SpecError: as :func:`why_unavailable`.
    """
    for arch in host_archs():
        if why_unavailable(arch) is None:
            return arch
    host = _archspec().host()
    raise DeviceError(
        f"no host arch runs on this CPU, {host.name} of family {host.family}",
        hint="\n".join(reason for reason in map(why_unavailable, host_archs()) if reason),
    )


@cache
def cpu_features() -> frozenset[str]:
    """The instruction sets and other features that this CPU reports, under archspec's names: ``avx512_bf16``, ``sve``.

    Empty on a system that reports none.
    """
    from archspec.cpu.detect import detected_info

    return frozenset(detected_info().features)


@cache
def sve_bits() -> int:
    """The length of SVE's vectors in this process, in bits; 0 on a CPU or a system without SVE."""
    if sys.platform != "linux" or platform.machine() != "aarch64":
        return 0
    length = ctypes.CDLL(None).prctl(_GET_VECTOR_LENGTH)
    return 0 if length < 0 else 8 * (length & _VECTOR_LENGTH_MASK)


def _archspec() -> Any:
    """archspec's CPU module, imported lazily because that takes long; it caches the detected CPU."""
    from archspec import cpu

    return cpu


@cache
def _cache_bytes() -> int:
    """Bytes of the last-level cache."""
    names = [name for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE") if name in os.sysconf_names]
    return max([size for size in map(os.sysconf, names) if size > 0], default=_LARGE_CACHE)


def _waits() -> dict[str, int]:
    """Nanoseconds that each thread has spent in run queues: the second number of its schedstat."""
    waits = {}
    with suppress(OSError):
        for thread in os.listdir(_THREADS):
            with suppress(OSError, IndexError), open(f"{_THREADS}/{thread}/schedstat", "rb", buffering=0) as file:
                waits[thread] = int(file.read().split()[1])
    return waits


def _clock_mhz() -> float | None:
    """The mean clock rate: Linux reports it in /proc/cpuinfo on x86, through cpufreq in kHz elsewhere."""
    clocks = [int(path.read_text()) / 1e3 for path in _CPU_FREQUENCIES.glob("cpu[0-9]*/cpufreq/scaling_cur_freq")]
    if not clocks and _CPU_INFO.exists():
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return sum(clocks) / len(clocks) if clocks else None


@cache
def cpu_name() -> str:
    """The CPU's product name, if it reports one."""
    cpu = _archspec()
    return str(cpu.brand_string() or cpu.host().name)
