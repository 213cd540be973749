"""Building blocks of messages: counts, lists, similar words, and what a malformed field should have been.

A message starts in lower case and has no full stop, because it follows ``Error: `` or the name of a file, a field or
a kernel. Its hint is a sentence, or ends with a command to run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

_IRREGULAR = {"library": "libraries", "family": "families", "process": "processes"}

_AS_NEAR = 0.1
"""A word is also suggested if its likeness is within this of the most similar word's."""

_EXPECTED = {
    "missing": "missing",
    "extra_forbidden": "unknown field",
    "bool": "expected true or false",
    "int": "expected an integer",
    "float": "expected a number",
    "finite": "expected a finite number",
    "string": "expected text",
    "list": "expected a list",
    "tuple": "expected a list",
    "dict": "expected an object",
    "model": "expected an object",
    "path": "expected a path",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "too_short": "must have at least {min_length}",
    "too_long": "must have at most {max_length}",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length:,} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "literal_error": "expected {expected}",
    "enum": "expected {expected}",
    "value_error": "{error}",
    "json_invalid": "not JSON: {error}",
}
"""What is wrong with a field, by the type of pydantic's failure or by the part of it before the first ``_``."""


def counted(number: int, noun: str) -> str:
    """``1 kernel``, ``2,345 kernels``, ``0 new libraries``."""
    before, _, last = noun.rpartition(" ")
    plural = f"{before} {_IRREGULAR.get(last, f'{last}s')}".lstrip()
    return f"{number:,} {noun if number == 1 else plural}"


def subject(number: int, noun: str) -> str:
    """``1 kernel is``, ``2,345 kernels are``."""
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


def either(words: Sequence[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def near(word: str, known: Iterable[object]) -> str:
    """A suggestion for ``word``: ``did you mean a or b?``, or an empty string if no known word is similar."""
    word = word.strip().lower()
    close = get_close_matches(word, [str(name) for name in known], n=3)
    likeness = [SequenceMatcher(None, name, word).ratio() for name in close]
    as_near = [name for name, ratio in zip(close, likeness, strict=True) if ratio > likeness[0] - _AS_NEAR]
    return f"did you mean {either(as_near)}?" if close else ""


def did_you_mean(word: str, known: Iterable[object]) -> str:
    """:func:`near` as the end of a message, after a semicolon."""
    question = near(word, known)
    return f"; {question}" if question else ""


def expected(failure: Mapping[str, Any]) -> str:
    """What is wrong with a field, from one of the failures that pydantic reports."""
    kind = failure["type"]
    words = _EXPECTED.get(kind) or _EXPECTED.get(kind.partition("_")[0])
    return str(failure["msg"]) if words is None else words.format(**failure.get("ctx", {}))


def without_password(text: str) -> str:
    """``text`` without the user and the password of a URL."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)
