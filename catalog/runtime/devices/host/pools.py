"""The threads of host kernels: one pool for all launches of a process."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from catalog.forks import forks
from catalog.runtime.devices.host.arrays import imported_torch

if TYPE_CHECKING:
    from catalog.runtime.devices.loading import LoadedKernel

_OPENMP = re.compile(r"/lib(?:gomp|iomp5|omp)\b[^/]*$")
"""The files of OpenMP runtimes: GNU's, Intel's, LLVM's."""

_FUNCTIONS = ("GOMP_parallel", "omp_get_max_threads", "omp_get_thread_num")

_first: LoadedKernel | None = None


def adopt_pool(kernel: LoadedKernel) -> None:
    """Use the threads that the kernel's library brings along for all launches of this process, unless it has some."""
    global _first  # noqa: PLW0603 - a process has one pool
    if _first is None and kernel.pool is not None:
        _first = kernel


def process_pool() -> int | None:
    """The address of the ``catalog_pool`` of this process; None before the first library is loaded.

    Where PyTorch is imported, it has the threads of PyTorch's OpenMP runtime.
    """
    if _first is None:
        return None
    return _first.pool if imported_torch() is None else _beside_torch()


@cache
def _beside_torch() -> int | None:
    assert _first is not None  # noqa: S101 - asked by process_pool() only
    runtime = _runtime_of_torch()
    if runtime is None or _first.openmp_pool is None or forks():  # a forked child's runtime has lost its threads
        return _first.pool
    return _first.openmp_pool(*(ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS))


def _runtime_of_torch() -> ctypes.CDLL | None:
    """The OpenMP runtime that PyTorch computes with; None if that is not known, or has other functions."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return None
    loaded = {path for line in lines if _OPENMP.search(path := line.split(maxsplit=5)[-1])}
    home = str(Path(sys.modules["torch"].__file__ or "").parent)
    own = {path for path in loaded if path.startswith(home)}  # PyTorch's wheels bring theirs along, also in torch.libs
    if len(own or loaded) != 1:
        return None
    (path,) = own or loaded
    try:
        runtime = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    return runtime if all(hasattr(runtime, name) for name in _FUNCTIONS) else None
