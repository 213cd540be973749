"""Clock rates from libnvidia-ml, the management library of NVIDIA's driver, through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_MULTIPROCESSORS = 1  # NVML_CLOCK_SM
_SUCCESS = 0


def clock_mhz(bus_id: bytes) -> float | None:
    """The current clock rate in MHz of the GPU with this PCI bus id; None if the driver does not report it."""
    library = _library()
    if library is None:
        return None
    gpu, clock = c_void_p(), c_uint()
    if library.nvmlDeviceGetHandleByPciBusId_v2(c_char_p(bus_id), byref(gpu)) != _SUCCESS:
        return None
    if library.nvmlDeviceGetClockInfo(gpu, c_int(_MULTIPROCESSORS), byref(clock)) != _SUCCESS:
        return None
    return float(clock.value)


@cache
def _library() -> Any:
    """The initialised library; None if it is missing."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        return library if library.nvmlInit_v2() == _SUCCESS else None
    except (OSError, AttributeError):
        return None
