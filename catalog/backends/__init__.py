"""Backends: the kinds of devices that kernels are compiled for and run on, each the owner of some archs.

The built-in ones are :data:`HIP`, :data:`CUDA` and :data:`HOST`. Other distributions add theirs as entry points of the
group ``catalog.backends``, each an instance of :class:`Backend`. Entry points are loaded only to find the owner of an
arch that no built-in backend owns, or to list archs. The parts of a backend are imported on first use.

Code that builds and runs kernels does not import this package: its caller passes the target, toolset or device.
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
"""By name. The host comes last because its archs must be read from a file."""


@functools.cache
def plugins() -> tuple[Plugin[Backend], ...]:
    """The backends of other distributions, looked up once; a warning is logged for each one that cannot be used."""
    from catalog.plugins import find_plugins

    return find_plugins(GROUP, Backend, lambda _, backend, others: "; ".join(_taken(backend)))


def _taken(backend: Backend) -> Iterator[str]:
    """The archs of a backend that are a built-in one's."""
    for name, other in _BUILT_IN.items():
        yield from (f"{arch} is an arch of the built-in backend {name}" for arch in backend.isas if other.owns(arch))


def backends() -> tuple[Backend, ...]:
    """All usable backends, the built-in ones first."""
    return (*_BUILT_IN.values(), *(plugin.object for plugin in plugins() if plugin.object is not None))


def backend_of(arch: str) -> Backend:
    """The backend that owns ``arch``; if none does, :data:`HOST`, whose errors say that ``arch`` is not a CPU.

    Raises:
        BackendError: two backends own it.
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


@functools.lru_cache(maxsize=1024)
def _built_in(arch: str) -> Backend | None:
    return next((backend for backend in _BUILT_IN.values() if backend.owns(arch)), None)


def target_of(arch: str) -> Target:
    """The target that builds kernels for ``arch``.

    Raises:
        BuildError: no backend builds them.
        BackendError, SpecError: as in :func:`backend_of`.
    """
    backend = backend_of(arch)
    if arch not in backend.isas:
        raise BuildError(f"kernels for {arch} cannot be built yet", hint="catalog doctor lists the archs that can")
    return backend.target(arch)


def toolset_of(arch: str) -> Toolset:
    """The compiler and flags for building kernels of ``arch`` elsewhere.

    Raises:
        ToolchainError: there is no compiler here, and the backend does not name one.
        BackendError, SpecError: as in :func:`backend_of`.
    """
    return backend_of(arch).toolset(arch)


def why_unavailable(arch: str) -> str | None:
    """Why kernels of ``arch`` cannot run on this machine, as a part of a sentence; None where they can.

    Raises:
        BackendError, SpecError: as in :func:`backend_of`.
    """
    return backend_of(arch).why_unavailable(arch)


def spec_folders(arch: str | None = None, of: str = DEFAULT) -> tuple[Path, ...]:
    """The folders with an operation's specs of ``arch`` (None: of any arch), the one from the settings first.

    Raises:
        UsageError: there is no such operation.
    """
    brought = operation(of).specs
    if brought is not None:
        return (brought,)
    own = data_dir() / "arch_specs"
    if of != DEFAULT:
        return (own / of,)
    if arch is not None and _built_in(arch) is not None:
        return (own,)
    return (own, *(backend.specs for backend in backends() if backend.specs is not None))
