"""Backends of other distributions: instances of :class:`Backend`, named by entry points."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from catalog.backends.protocol import Backend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_log = logging.getLogger(__name__)

GROUP = "catalog.backends"
"""The group of entry points."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A backend of another distribution: ``title`` names it; ``broken`` says why it cannot be used, if it cannot."""

    title: str
    backend: Backend | None = None
    broken: str = ""


def find_plugins(built_in: Mapping[str, Backend]) -> tuple[Plugin, ...]:
    """The backends of other distributions; a warning is logged for each one that cannot be used.

    Args:
        built_in: built-in backends by name, which own their archs.
    """
    from importlib.metadata import entry_points

    found = tuple(_load(point, built_in) for point in entry_points(group=GROUP))
    for plugin in found:
        if plugin.broken:
            _log.warning("%s cannot be used: %s", plugin.title, plugin.broken)
    return found


def _load(point: EntryPoint, built_in: Mapping[str, Backend]) -> Plugin:
    whose = "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    title = f"backend {point.name} of {whose}"
    try:
        backend = point.load()
        if not isinstance(backend, Backend):
            return Plugin(title, broken=f"{point.value} is not a catalog.backends.Backend, but {backend!r}")
        taken = [
            f"{arch} is an arch of the built-in backend {name}"
            for name, other in built_in.items()
            for arch in backend.isas
            if other.owns(arch)
        ]
    except (Exception, SystemExit) as error:  # importing foreign code can raise anything
        return Plugin(title, broken=f"{type(error).__name__}: {error}")
    return Plugin(title, broken="; ".join(taken)) if taken else Plugin(title, backend)
