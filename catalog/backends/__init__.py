"""Backends: the kinds of devices that kernels are compiled for and run on, each the owner of some archs.

The built-in ones are :data:`HIP`, :data:`CUDA` and :data:`HOST`. Other distributions have theirs as entry points of the
group ``catalog.backends``, each an instance of :class:`Backend`; they are looked for only where an arch is no built-in
backend's, or where archs are listed. What a backend is made of is imported when it is first asked for.

What builds and runs kernels does not import this package: it is given the target, the toolset or the device it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from catalog.backends.cuda import CUDA
from catalog.backends.hip import HIP
from catalog.backends.host import HOST
from catalog.backends.protocol import Backend, GpuBackend
from catalog.errors import BackendError, BuildError
from catalog.ops import DEFAULT, operation
from catalog.settings import data_dir

if TYPE_CHECKING:
    from catalog.build.export.toolset import Toolset
    from catalog.build.targets import Target
    from catalog.plugins import Plugin

__all__ = [
    "CUDA",
    "HIP",
    "HOST",
    "Backend",
    "GpuBackend",
    "backend_of",
    "backends",
    "plugins",
    "spec_folders",
    "target_of",
    "toolset_of",
    "why_unavailable",
]

GROUP = "catalog.backends"
"""The group of entry points."""

_BUILT_IN: Mapping[str, Backend] = MappingProxyType({"hip": HIP, "cuda": CUDA, "host": HOST})
"""By name; the host's archs are in a file, so that it is asked last."""


@functools.cache
def plugins() -> tuple[Plugin[Backend], ...]:
    """The backends of other distributions, looked for once; for each one that cannot be used, a warning is logged."""
    from catalog.plugins import find_plugins

    return find_plugins(GROUP, Backend, lambda backend, _: "; ".join(_taken(backend)))


def _taken(backend: Backend) -> Iterator[str]:
    """The archs of a backend that are a built-in one's."""
    for name, other in _BUILT_IN.items():
        yield from (f"{arch} is an arch of the built-in backend {name}" for arch in backend.isas if other.owns(arch))


def backends() -> tuple[Backend, ...]:
    """All that can be used, the built-in ones first."""
    return (*_BUILT_IN.values(), *(plugin.object for plugin in plugins() if plugin.object is not None))


def backend_of(arch: str) -> Backend:
    """The backend that owns ``arch``; :data:`HOST`, which says that it is no CPU, where none does.

    Raises:
        BackendError: two do.
        SpecError: a file of facts is missing or malformed.
    """
    built_in = _built_in(arch)
    if built_in is not None:
        return built_in
    owners = {plugin.title: plugin.object for plugin in plugins() if plugin.object and plugin.object.owns(arch)}
    if len(owners) > 1:
        raise BackendError(
            f"{arch} is an arch of {len(owners)} backends: {'; '.join(owners)}", hint="Uninstall all but one of them."
        )
    return next(iter(owners.values()), HOST)


def _built_in(arch: str) -> Backend | None:
    return next((backend for backend in _BUILT_IN.values() if backend.owns(arch)), None)


def target_of(arch: str) -> Target:
    """The target that builds for ``arch``.

    Raises:
        BuildError: none does.
        BackendError, SpecError: as :func:`backend_of`.
    """
    backend = backend_of(arch)
    if arch not in backend.isas:
        raise BuildError(f"kernels for {arch} cannot be built yet", hint="catalog doctor lists the arches that can")
    return backend.target(arch)


def toolset_of(arch: str) -> Toolset:
    """What another build compiles with for ``arch``.

    Raises:
        ToolchainError: there is no compiler here, and the backend does not say what it is called.
        BackendError, SpecError: as :func:`backend_of`.
    """
    return backend_of(arch).toolset(arch)


def why_unavailable(arch: str) -> str | None:
    """Why kernels of ``arch`` cannot run on this machine, as a part of a sentence; None where they can.

    Raises:
        BackendError, SpecError: as :func:`backend_of`.
    """
    return backend_of(arch).why_unavailable(arch)


def spec_folders(arch: str | None = None, of: str = DEFAULT) -> tuple[Path, ...]:
    """The folders of specs of an operation, first that of the settings: those where ``arch`` may have one, None: all.

    Raises:
        UsageError: there is no such operation.
    """
    brought = operation(of).specs
    if brought is not None:
        return (brought,)
    own = data_dir() / "arch_specs"
    if arch is not None and _built_in(arch) is not None:
        return (own,)
    return (own, *(backend.specs for backend in backends() if backend.specs is not None))
