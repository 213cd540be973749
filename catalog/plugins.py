"""What other distributions bring along: objects of a protocol, named by entry points."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plugin(Generic[T]):
    """An object of another distribution: ``title`` names it; ``broken`` says why it cannot be used, if it cannot."""

    title: str
    object: T | None = None
    broken: str = ""


def find_plugins(group: str, kind: type[Any], objection: Callable[[T, Sequence[T]], str]) -> tuple[Plugin[T], ...]:
    """The objects of other distributions, by the names of their entry points.

    A warning is logged for each one that cannot be used.

    Args:
        group: that of their entry points.
        kind: what they are instances of.
        objection: why an object cannot be used beside the usable ones that were found before; empty: it can.
    """
    from importlib.metadata import entry_points

    found: list[Plugin[T]] = []
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        usable = [plugin.object for plugin in found if plugin.object is not None]
        found.append(_load(point, kind, objection, usable))
    for plugin in found:
        if plugin.broken:
            _log.warning("%s cannot be used: %s", plugin.title, plugin.broken)
    return tuple(found)


def _load(
    point: EntryPoint, kind: type[Any], objection: Callable[[T, Sequence[T]], str], usable: Sequence[T]
) -> Plugin[T]:
    whose = "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    title = f"{kind.__name__.lower()} {point.name} of {whose}"
    try:
        loaded = point.load()
        if not isinstance(loaded, kind):
            return Plugin(title, broken=f"{point.value} is not a {kind.__module__}.{kind.__name__}, but {loaded!r}")
        broken = objection(loaded, usable)
    except (Exception, SystemExit) as error:  # importing foreign code can raise anything
        return Plugin(title, broken=f"{type(error).__name__}: {error}")
    return Plugin(title, broken=broken) if broken else Plugin(title, loaded)
