"""Whether there is an NVIDIA GPU, by what the driver shows: asked at every selection, so without CUDA's runtime."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_DRIVER = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))
"""What there is with NVIDIA's driver: its device, which a container may hide, its version, or the device of WSL."""

INSTALL = "pip install 'cuda-bindings>=13'"
"""How to get cuda-bindings."""


def why_unavailable(arch: str) -> str | None:
    """Which part a kernel of the NVIDIA arch ``arch`` lacks here, driver or cuda-bindings; None: ask the runtime."""
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
    except ModuleNotFoundError:  # of a package on the way there
        return False
