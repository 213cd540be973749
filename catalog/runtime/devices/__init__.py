"""One module a kind of device: memory, streams, clocks. What they have in common is here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a timing is tied to: the same kernel is measured anew where any of these differs.

    ``arch`` is the catalog's name of the compile target, ``name`` the product's, ``cores`` what a kernel may use of it:
    CPU threads, compute units, multiprocessors.
    """

    arch: str
    name: str
    cores: int


def why_unavailable(arch: str) -> str | None:
    """Why kernels of ``arch`` cannot run on this machine; None where they can."""
    from catalog.runtime.devices import hip, host

    return hip.why_unavailable(arch) if arch.startswith("gfx") else host.why_unavailable(arch)
