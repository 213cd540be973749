"""Docstrings as the site shows them: the roles of Python's docs become links."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function, Module, Object

ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`(~?)([\w.]+)`")


class Roles(Extension):
    """Turns each :class:`~x.y.Z` into a link to what it names, where that has a place on the site."""

    def on_module(self, *, mod: Module, **_: Any) -> None:
        """Of a module."""
        _mend(mod)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Of a class."""
        _mend(cls)

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Of a function or method."""
        _mend(func)


def _mend(thing: Object) -> None:
    if thing.docstring is not None:
        text = thing.docstring.value.replace("``", "`")
        thing.docstring.value = ROLE.sub(lambda role: f"`{_shown(role)}`", text)


def _shown(role: re.Match[str]) -> str:
    short, name = role.groups()
    return name.rpartition(".")[2] if short else name
