"""Detection of AMD GPUs by the driver's files; every selection does it, so it avoids loading HIP's runtime."""

from __future__ import annotations

from pathlib import Path

_DRIVER = Path("/dev/kfd")
_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")


def why_unavailable(arch: str) -> str | None:
    """What kernels of the AMD arch ``arch`` lack on this machine, driver or GPU; None: ask the runtime."""
    if not _DRIVER.exists():
        return (
            f"it needs an AMD GPU of arch {arch}, and there is none ({_DRIVER}, the amdgpu driver's device, is missing)"
        )
    archs = sorted(_present_archs())
    if arch not in archs:
        return f"it needs an AMD GPU of arch {arch}; the GPUs here are {', '.join(archs) or 'of no known arch'}"
    return None


def _present_archs() -> set[str]:
    """The archs of the GPUs that the driver lists; its gfx_target_version 90500 means gfx950."""
    archs = set()
    for node in _TOPOLOGY.glob("*/properties"):
        for line in node.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(" ")
            if name == "gfx_target_version" and int(value):
                major, minor, step = int(value) // 10000, int(value) // 100 % 100, int(value) % 100
                archs.add(f"gfx{major}{minor:x}{step:x}")
    return archs
