"""Traits as words: ``hdim_q=128``, ``pipeline=qr_async``, ``lse=true``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from catalog.errors import UsageError
from catalog.messages import did_you_mean
from catalog.schema.traits import Trait, Traits

_TRUTH = {"0": False, "false": False, "1": True, "true": True}


def read_traits(words: Iterable[str], known: Traits) -> dict[str, Any]:
    """The traits that ``words`` state, each as ``trait=value``; booleans are 0, 1, true or false.

    Raises:
        UsageError: a word has another form, names no trait, has a value outside the domain, or repeats a trait.
    """
    traits: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f"{word!r} states no trait", hint=f"Write trait=value, as in family={known.families[0]}.")
        if name in traits:
            raise UsageError(f"{name} is stated twice: {shown(traits[name])} and {text}")
        traits[name] = _value(_trait(name, known), text)
    return traits


def read_family(text: str, known: Traits) -> str:
    """The family called ``text``.

    Raises:
        UsageError: there is none.
    """
    return str(_value(known["family"], text))


def shown(value: Any) -> str:
    """A value as spelled in an expression: booleans are 0 and 1."""
    return str(int(value) if isinstance(value, bool) else value)


def _trait(name: str, known: Traits) -> Trait:
    if name in known:
        return known[name]
    if name in known.identity:
        raise UsageError(
            f"{name} is not a trait", hint=f"Use its option: --arch, --revision or --{known.variant.replace('_', '-')}."
        )
    hint = "`catalog columns` lists every trait."
    raise UsageError(f"no trait is called {name!r}{did_you_mean(name, known)}", hint=hint)


def _value(trait: Trait, text: str) -> Any:
    if trait.kind == "bool" and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if trait.kind == "int" and re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        number = int(text)
        if number in trait.values or (trait.minimum is not None and number >= trait.minimum):
            return number
    if trait.kind == "text" and (not trait.values or text in trait.values):
        return text
    values = [str(value) for value in trait.values]
    digits = ", of at most 9 digits" if trait.kind == "int" and not values else ""
    meant = did_you_mean(text, values)
    raise UsageError(f"{trait.name}={text} is not allowed{meant}", hint=f"Allowed: {trait.domain}{digits}.")
