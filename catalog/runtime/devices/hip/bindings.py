"""libamdhip64, AMD's runtime: its location, and the functions that are called."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from types import MappingProxyType
from typing import Any

from catalog.errors import DeviceError
from catalog.settings import rocm_path

_SIGNATURES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # name: (result, *arguments); a c_int is a status. Pointers to results are passed by byref: c_void_p takes them.
        "hipGetErrorName": (c_char_p, c_int),
        "hipGetErrorString": (c_char_p, c_int),
        "hipGetLastError": (c_int,),
        "hipRuntimeGetVersion": (c_int, c_void_p),
        "hipGetDeviceCount": (c_int, c_void_p),
        "hipGetDevice": (c_int, c_void_p),
        "hipSetDevice": (c_int, c_int),
        "hipDeviceGetName": (c_int, c_char_p, c_int, c_int),
        "hipDeviceGetAttribute": (c_int, c_void_p, c_int, c_int),
        "hipGetDeviceProperties": (c_int, c_void_p, c_int),
        "hipGetDevicePropertiesR0600": (c_int, c_void_p, c_int),
        "hipDeviceTotalMem": (c_int, c_void_p, c_int),
        "hipMalloc": (c_int, c_void_p, c_size_t),
        "hipFree": (c_int, c_void_p),
        "hipMemcpyAsync": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_void_p),
        "hipMemsetAsync": (c_int, c_void_p, c_int, c_size_t, c_void_p),
        "hipPointerGetAttributes": (c_int, c_void_p, c_void_p),
        "hipStreamCreateWithFlags": (c_int, c_void_p, c_uint),
        "hipStreamIsCapturing": (c_int, c_void_p, c_void_p),
        "hipStreamBeginCapture": (c_int, c_void_p, c_int),
        "hipStreamEndCapture": (c_int, c_void_p, c_void_p),
        "hipGraphInstantiate": (c_int, c_void_p, c_void_p, c_void_p, c_char_p, c_size_t),
        "hipGraphLaunch": (c_int, c_void_p, c_void_p),
        "hipGraphDestroy": (c_int, c_void_p),
        "hipGraphExecDestroy": (c_int, c_void_p),
        "hipStreamSynchronize": (c_int, c_void_p),
        "hipStreamDestroy": (c_int, c_void_p),
        "hipEventCreateWithFlags": (c_int, c_void_p, c_uint),
        "hipEventRecord": (c_int, c_void_p, c_void_p),
        "hipEventSynchronize": (c_int, c_void_p),
        "hipEventElapsedTime": (c_int, c_void_p, c_void_p, c_void_p),
        "hipEventDestroy": (c_int, c_void_p),
    }
)

_MAPS = Path("/proc/self/maps")

_OPTIONAL = (
    *("hipGetDeviceProperties", "hipGetDevicePropertiesR0600", "hipStreamIsCapturing", "hipStreamBeginCapture"),
    *("hipStreamEndCapture", "hipGraphInstantiate", "hipGraphLaunch", "hipGraphDestroy", "hipGraphExecDestroy"),
)
"""Functions that some versions of ROCm lack."""


def open_library(path: Path | None) -> dict[str, Any]:
    """The functions of the library at ``path``, or of the first that is found.

    Raises:
        DeviceError: there is no library, none loads, or it is too old; the message says which.
    """
    library = _open(path)
    functions = {}
    for name, (result, *arguments) in _SIGNATURES.items():
        try:
            functions[name] = library[name]
        except AttributeError as error:
            if name in _OPTIONAL:
                continue
            raise DeviceError(f"the HIP runtime is unusable: {error}", hint="Install ROCm 5 or newer.") from None
        functions[name].restype, functions[name].argtypes = result, arguments
    return functions


def _open(path: Path | None) -> ctypes.CDLL:
    broken = None
    for candidate in map(str, _candidates() if path is None else [path]):
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            # The loader names the file that it could not open; if it is another one, a dependency is missing.
            if not str(error).startswith(f"{candidate}: cannot open"):
                broken = broken or f"cannot load the HIP runtime {candidate}: {error}"
    raise DeviceError(
        broken or f"the HIP runtime, {path or 'libamdhip64.so'}, is missing",
        hint="It is in package libamdhip64-5 of Debian and Ubuntu, and in hip-runtime-amd of AMD's ROCm. "
        "Set ROCM_PATH if ROCm is not in /opt/rocm.",
    )


def _candidates() -> Iterator[str | Path]:
    """Possible locations of the library, best first."""
    # A loaded copy comes first, such as the one in PyTorch: two copies do not know each other's memory.
    if _MAPS.exists():
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
        yield from dict.fromkeys(line[line.index("/") :] for line in lines if "/libamdhip64.so" in line)
    names = [f"libamdhip64.so{suffix}" for suffix in ("", ".7", ".6", ".5")]
    chosen = rocm_path()
    if chosen is not None:
        yield from (chosen / "lib" / name for name in names)
    yield from names
    yield from (Path("/opt/rocm/lib") / name for name in names)
