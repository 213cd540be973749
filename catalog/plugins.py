"""What other distributions bring along: objects of a protocol, named by entry points."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plugin(Generic[T]):
    """An object of another distribution: ``title`` names it; ``broken`` says why it cannot be used, if it cannot.

    ``name`` is that of its entry point.
    """

    name: str
    title: str
    object: T | None = None
    broken: str = ""


Objection = Callable[[str, T, Sequence[Plugin[T]]], str]
"""Why an object with this entry point's name cannot be used beside others; empty if it can."""


@functools.cache
def entry_points_of(group: str) -> EntryPoints:
    """The entry points of a group, looked up once. Nothing is loaded."""
    return _all_entry_points()(group=group)


@functools.cache
def _all_entry_points() -> Callable[..., EntryPoints]:
    """Selects among the entry points of all distributions, which are looked up once: that takes milliseconds."""
    from importlib.metadata import entry_points

    return entry_points().select


def find_plugins(group: str, kind: type[Any], objection: Objection[T]) -> tuple[Plugin[T], ...]:
    """The objects of other distributions, by the names of their entry points.

    A warning is logged for each one that cannot be used.

    Args:
        group: that of their entry points.
        kind: what they are instances of.
        objection: why an object cannot be used beside the usable ones that were found before; empty: it can.
    """
    found: list[Plugin[T]] = []
    for point in sorted(entry_points_of(group), key=lambda point: point.name):
        found.append(_load(point, kind, objection, [plugin for plugin in found if plugin.object is not None]))
    for plugin in found:
        if plugin.broken:
            _log.warning("%s cannot be used: %s", plugin.title, plugin.broken)
    return tuple(found)


def _load(point: EntryPoint, kind: type[Any], objection: Objection[T], usable: Sequence[Plugin[T]]) -> Plugin[T]:
    whose = "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    title = f"{kind.__name__.lower()} {point.name} of {whose}"
    try:
        loaded = point.load()
        if not isinstance(loaded, kind):
            return Plugin(
                point.name, title, broken=f"{point.value} is not a {kind.__module__}.{kind.__name__}, but {loaded!r}"
            )
        broken = _not_a_path(loaded) or objection(point.name, loaded, usable)
    except (Exception, SystemExit) as error:  # importing foreign code can raise anything
        return Plugin(point.name, title, broken=f"{type(error).__name__}: {error}")
    return Plugin(point.name, title, None if broken else loaded, broken)


def _not_a_path(loaded: Any) -> str:
    """Which of the folders that an object names, if any, is not a path: its ``specs`` and its ``headers``."""
    folders = {"specs": getattr(loaded, "specs", None)} | {
        f"headers[{name!r}]": folder for name, folder in getattr(loaded, "headers", {}).items()
    }
    wrong = (name for name, folder in folders.items() if not isinstance(folder, Path | None))
    return next((f"{name} is not a pathlib.Path, but {folders[name]!r}" for name in wrong), "")
