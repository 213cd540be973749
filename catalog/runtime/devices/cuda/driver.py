"""Detection of NVIDIA GPUs by the driver's files; every selection does it, so it avoids loading CUDA's runtime."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_DRIVER = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))
"""Files of NVIDIA's driver: its device, which a container may hide, its version, and the device of WSL."""

INSTALL = "pip install 'cuda-bindings>=13'"
"""How to get cuda-bindings."""


def why_unavailable(arch: str) -> str | None:
    """What kernels of the NVIDIA arch ``arch`` lack on this machine, driver or cuda-bindings; None: ask the runtime."""
    if not any(path.exists() for path in _DRIVER):
        return (
            f"it needs an NVIDIA GPU of arch {arch}, and there is none "
            f"({_DRIVER[0]}, the device of NVIDIA's driver, is missing)"
        )
    if not _has_bindings():
        return f"it needs the Python package cuda-bindings: {INSTALL}"
    return None


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.runtime") is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
