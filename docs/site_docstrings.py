"""Convert the roles in docstrings, which Python's documentation uses, into Markdown for the site."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function, Module, Object

ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`(~?)([\w.]+)`")


class Roles(Extension):
    """Replaces each :class:`~x.y.Z` by the name as code."""

    def on_module(self, *, mod: Module, **_: Any) -> None:
        """Convert the docstring of a module."""
        _mend(mod)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Convert the docstring of a class."""
        _mend(cls)

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Convert the docstring of a function or method."""
        _mend(func)


def _mend(thing: Object) -> None:
    if thing.docstring is not None:
        text = thing.docstring.value.replace("``", "`")
        thing.docstring.value = ROLE.sub(lambda role: f"`{_shown(role)}`", text)


def _shown(role: re.Match[str]) -> str:
    short, name = role.groups()
    return name.rpartition(".")[2] if short else name
