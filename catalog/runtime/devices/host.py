"""The host CPU: kernels are shared libraries in this process, tensors are NumPy arrays."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from catalog.errors import DeviceError
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.devices.abi import ABI_VERSION, TENSORS, CatalogArgs
from catalog.runtime.tensors import Array, element_strides, numpy_dtype
from catalog.runtime.workspace import make_workspace
from catalog.schema.problem import Problem

HOST_ARCHES = ("x86_64_v4", "x86_64_v3", "aarch64")
"""Compile targets of host kernels, best first."""

_OK, _ABI_MISMATCH = 0, 1

_STATUS: Mapping[int, str] = MappingProxyType(
    {
        _ABI_MISMATCH: "it was built with another version of the argument struct",
        2: "the call is outside of what it was built for",
        3: "it could not allocate its scratch memory",
    }
)
"""What each catalog_status but OK means."""

_REBUILD = "build the kernel anew"


_TENSOR, _POINTER = struct.Struct("@Pqqqq"), struct.Struct("@P")
_OFFSETS = {name: getattr(CatalogArgs, name).offset for name in TENSORS}


@dataclass(frozen=True, slots=True)
class Call:
    """A filled argument struct, with what its pointers point to kept alive."""

    args: CatalogArgs
    pointer: Any = field(repr=False)
    tensors: tuple[Array, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class HostKernel:
    """A loaded library: the row that it was built from and its entry point."""

    id: str
    path: Path
    entry: Callable[[Any, None], int] = field(repr=False)


class HostDevice:
    """Loads, launches and times host kernels.

    Args:
        num_threads: threads of a kernel; 0: every core that the process may use.
    """

    def __init__(self, num_threads: int = 0) -> None:
        self.num_threads = num_threads
        self._kernels: dict[tuple[Path, str], HostKernel] = {}

    @property
    def device(self) -> DeviceInfo:
        """This CPU, with the threads that kernels use of it.

        Raises:
            DeviceError: no host arch runs on this CPU.
        """
        return DeviceInfo(resolve_host_arch(), _cpu_name(), self.threads)

    def load(self, path: Path, sha256: str, kernel_id: str) -> HostKernel:
        """The kernel in the library at ``path``, whose content has the digest ``sha256``; loaded once.

        Raises:
            DeviceError: the library does not load, lacks an entry point, has another ABI, or was built from a row other
                than ``kernel_id``.
        """
        kernel = self._kernels.get((path, sha256))
        if kernel is None:
            kernel = self._kernels[path, sha256] = _kernel(path, _open(path.absolute()))
        if kernel.id != kernel_id:
            raise DeviceError(f"{path} was built from row {kernel.id}, not from {kernel_id}", hint=_REBUILD)
        return kernel

    def call(self, problem: Problem, tensors: Mapping[str, Array], num_splits: int = 1) -> Call:
        """The argument struct of a problem with its checked tensors, inputs and outputs together.

        All stages of a plan take it. The call keeps the tensors alive and may be launched any number of times.
        """
        layout = tuple([(name, array.strides) for name, array in tensors.items()])
        template, seqstarts, offsets = _template(problem, layout)
        args = CatalogArgs.from_buffer_copy(template)
        args.num_threads = self.num_threads
        args.num_splits = num_splits
        for offset, array in zip(offsets, tensors.values(), strict=True):
            _POINTER.pack_into(args, offset, array.ctypes.data)
        if "kv_page_indices" in tensors:
            args.num_page_indices = len(tensors["kv_page_indices"])
        workspace = make_workspace(problem, num_splits)
        for slot, partial in workspace.items():
            _TENSOR.pack_into(args, _OFFSETS[slot], partial.array.ctypes.data, *partial.strides)
        kept = (*tensors.values(), *seqstarts, *(partial.array for partial in workspace.values()))
        return Call(args, ctypes.byref(args), kept)

    def launch(self, kernel: HostKernel, call: Call) -> None:
        """Run the kernel; on return the outputs are written.

        Raises:
            DeviceError: the kernel refuses the call or has no memory.
        """
        status = kernel.entry(call.pointer, None)
        if status != _OK:
            raise DeviceError(f"kernel {kernel.id}: {_STATUS.get(status, f'unknown status {status}')}")

    def time(self, kernels: Sequence[HostKernel], call: Call, launches: int) -> list[int]:
        """Nanoseconds of each of so many launches of the kernels, one after the other.

        Raises:
            DeviceError: as :meth:`launch`.
        """
        clock = time.perf_counter_ns
        durations = []
        for _ in range(launches):
            start = clock()
            for kernel in kernels:
                self.launch(kernel, call)
            durations.append(clock() - start)
        return durations

    @property
    def threads(self) -> int:
        """Threads that a kernel uses."""
        return self.num_threads or _usable_cores()


_opened: set[Path] = set()
"""Every library that this process has opened: the loader never forgets one."""


def _open(path: Path) -> ctypes.CDLL:
    """Load what is at ``path`` now.

    The loader knows libraries by name, so it would answer with the former file where a rebuilt one has replaced it:
    from the second time on, it is given another name of the file.
    """
    try:
        if path not in _opened:
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
            _opened.add(path)
            return library
        with tempfile.TemporaryDirectory() as folder:
            alias = Path(folder) / path.name
            alias.symlink_to(path)
            return ctypes.CDLL(str(alias), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise DeviceError(f"cannot load {path}: {error}", hint=_REBUILD) from None


def _kernel(path: Path, library: ctypes.CDLL) -> HostKernel:
    try:
        describe, entry = library.catalog_describe, library.catalog_launch
    except AttributeError as error:
        raise DeviceError(f"{path} is not a kernel: {error}", hint=_REBUILD) from None
    describe.restype = ctypes.c_char_p
    entry.argtypes, entry.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int32
    try:
        kernel_id = str(json.loads(describe())["id"])
    except (TypeError, ValueError, KeyError):
        raise DeviceError(f"{path} does not say which row it was built from: {describe()!r}", hint=_REBUILD) from None
    # No kernel runs a negative batch, but every kernel compares the ABI first.
    probe = CatalogArgs(struct_bytes=ctypes.sizeof(CatalogArgs), abi_version=ABI_VERSION, batch=-1)
    if entry(ctypes.byref(probe), None) == _ABI_MISMATCH:
        raise DeviceError(f"{path}: {_STATUS[_ABI_MISMATCH]}", hint=_REBUILD)
    return HostKernel(kernel_id, path, entry)


@lru_cache(maxsize=1024)
def _template(
    problem: Problem, layout: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[CatalogArgs, tuple[Array, ...], tuple[int, ...]]:
    """The arguments but for the addresses of tensors with these names and strides; the arrays that they point to; and
    where in the struct each tensor's address goes.
    """
    starts = {
        name: np.fromiter(accumulate(lengths, initial=0), np.int32, len(lengths) + 1)
        for name, lengths in (("seqstart_q", problem.seqlens_q), ("seqstart_k", problem.seqlens_k))
        if lengths is not None
    }
    args = CatalogArgs(
        struct_bytes=ctypes.sizeof(CatalogArgs),
        abi_version=ABI_VERSION,
        **{name: array.ctypes.data for name, array in starts.items()},
        batch=problem.batch,
        nhead_q=problem.nhead_q,
        nhead_k=problem.nhead_k,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        hdim_q=problem.hdim_q,
        hdim_v=problem.hdim_v,
        window_left=problem.window_left,
        window_right=problem.window_right,
        sink_size=problem.sink_size,
        min_seqlen_q=problem.min_seqlen_q,
        page_size=problem.page_size,
        num_pages=problem.num_pages or 0,
        pages_per_sequence=problem.pages_per_sequence if problem.paged else 0,
        seqlen_new=problem.seqlen_new or 0,
        rotary_dim=problem.rotary_dim or 0,
        block_scale_size_q=problem.block_scale_size_q,
        block_scale_size_kv=problem.block_scale_size_kv,
        mask_corner=problem.mask_corner,
        scale=problem.softmax_scale,
        logits_soft_cap=problem.logits_soft_cap or 0,
        p_drop=problem.dropout,
    )
    offsets = []
    for name, strides in layout:
        tensor = problem.tensors[name]
        offsets.append(_OFFSETS[tensor.slot])
        _TENSOR.pack_into(
            args, offsets[-1], 0, *element_strides(tensor, strides, numpy_dtype(tensor.element).itemsize), 0
        )
    return args, tuple(starts.values()), tuple(offsets)


def why_unavailable(arch: str) -> str | None:
    """Why kernels of ``arch`` cannot run on this CPU; None where they can."""
    if arch not in HOST_ARCHES:
        return f"{arch} is not a CPU: host archs are {', '.join(HOST_ARCHES)}"
    cpu = _archspec()
    target, host = cpu.TARGETS[arch], cpu.host()
    if target <= host:
        return None
    if target.family != host.family:
        return f"{arch} needs a CPU of family {target.family}: this one is {host.name}, family {host.family}"
    lacking = ", ".join(sorted(target.features - host.features))
    return f"{arch} needs {lacking}: this CPU, {host.name}, lacks them"


def resolve_host_arch() -> str:
    """The arch that ``host`` stands for: the best that this CPU runs.

    Raises:
        DeviceError: none runs; says which CPU was found.
    """
    for arch in HOST_ARCHES:
        if why_unavailable(arch) is None:
            return arch
    host = _archspec().host()
    raise DeviceError(
        f"no host arch runs on this CPU, {host.name} of family {host.family}",
        hint="\n".join(reason for reason in map(why_unavailable, HOST_ARCHES) if reason),
    )


def _archspec() -> Any:
    """archspec's CPU module, which takes its time to import; it remembers what it detected."""
    from archspec import cpu

    return cpu


@cache
def _cpu_name() -> str:
    """The product name, where the CPU tells it."""
    cpu = _archspec()
    return str(cpu.brand_string() or cpu.host().name)


@cache
def _usable_cores() -> int:
    """Cores that this process may run on; OpenMP too asks once."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
