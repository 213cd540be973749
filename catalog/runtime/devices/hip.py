"""AMD GPUs: what of them is missing on this machine."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

_DRIVER = Path("/dev/kfd")
_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")


def why_unavailable(arch: str) -> str:
    """What a kernel of the AMD arch ``arch`` lacks here: driver, GPU, HIP runtime, or the runtime's own support."""
    if not _DRIVER.exists():
        return (
            f"it needs an AMD GPU of arch {arch}, and there is none ({_DRIVER}, the amdgpu driver's device, is missing)"
        )
    archs = sorted(_present_archs())
    if arch not in archs:
        return f"it needs an AMD GPU of arch {arch}; the GPUs here are {', '.join(archs) or 'of no known arch'}"
    if ctypes.util.find_library("amdhip64") is None:
        return "the HIP runtime (libamdhip64.so, of ROCm) is missing"
    return "this version of the catalog lists and selects AMD kernels, but does not launch them"


def _present_archs() -> set[str]:
    """The archs of the GPUs that the driver lists; its gfx_target_version 90500 is gfx950."""
    archs = set()
    for node in _TOPOLOGY.glob("*/properties"):
        for line in node.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(" ")
            if name == "gfx_target_version" and int(value):
                major, minor, step = int(value) // 10000, int(value) // 100 % 100, int(value) % 100
                archs.add(f"gfx{major}{minor:x}{step:x}")
    return archs
