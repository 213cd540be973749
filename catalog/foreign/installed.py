"""The foreign implementations of an operation: those that it knows itself, and those of other distributions.

Other distributions add theirs as entry points of the group ``catalog.implementations``, each an instance of
:class:`~catalog.ops.implementation.Implementation`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from catalog.errors import UsageError
from catalog.messages import did_you_mean
from catalog.ops import operation
from catalog.ops.implementation import Implementation

if TYPE_CHECKING:
    from catalog.plugins import Plugin

GROUP = "catalog.implementations"
"""The group of entry points."""


@functools.cache
def plugins() -> tuple[Plugin[Implementation], ...]:
    """The implementations of other distributions, looked up once; each unusable one is logged as a warning."""
    from catalog.plugins import find_plugins

    return find_plugins(GROUP, Implementation, _objection)


def _objection(_: str, one: Implementation, others: Sequence[Plugin[Implementation]]) -> str:
    """Why an implementation cannot be used beside the operation's own and ``others``; empty: it can."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,59}", one.name):
        return f"{one.name!r} cannot be the name of an implementation"
    taken = {other.name for other in operation(one.operation).implementations}
    taken |= {other.object.name for other in others if other.object and other.object.operation == one.operation}
    return f"there is another implementation called {one.name}" if one.name in taken else ""


def known(of: str) -> Mapping[str, Implementation]:
    """The implementations of an operation by name, installed or not.

    Raises:
        UsageError: there is no such operation.
    """
    own = operation(of).implementations
    others = (plugin.object for plugin in plugins() if plugin.object is not None and plugin.object.operation == of)
    return {one.name: one for one in (*own, *others)}


def installed(of: str) -> Mapping[str, Implementation]:
    """The implementations of an operation whose modules are installed, by name.

    Raises:
        UsageError: as :func:`known`.
    """
    return {name: one for name, one in known(of).items() if not one.missing}


def chosen(of: str, names: Iterable[str]) -> tuple[Implementation, ...]:
    """The installed implementations with these names.

    Raises:
        UsageError: one is unknown or not installed; the message names those that are.
    """
    there, usable = known(of), installed(of)
    hint = f"Installed for {of}: {', '.join(usable) or 'none'}."
    found = {}
    for name in names:
        if name not in there:
            raise UsageError(f"no implementation of {of} is called {name!r}{did_you_mean(name, there)}", hint=hint)
        if name not in usable:
            raise UsageError(f"{name} is not installed: the module {there[name].missing} is missing", hint=hint)
        found[name] = usable[name]
    return tuple(found.values())
