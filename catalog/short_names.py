"""Shortening of long names shown side by side: the parts that differ, and the parts in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import and_

GAP = "…"
"""Stands for omitted words."""


def shortened(names: Sequence[str]) -> tuple[list[str], str]:
    """Return the words of each name that not all ``names`` share, and the words that all share; ``_`` separates words.

    Equal names stay whole and have no common part.
    """
    words = [name.split("_") for name in names]
    shared = reduce(and_, map(Counter, words)) if words else Counter[str]()
    if all(Counter(own) == shared for own in words):
        return list(names), ""
    kept = [_without(own, shared) for own in words]
    return [_joined(own).strip(GAP) or GAP for own in kept], _joined(_without(words[0], Counter(words[0]) - shared))


def _without(words: Sequence[str], dropped: Counter[str]) -> list[str | None]:
    """The words, with None in place of those in ``dropped``, each as often as ``dropped`` counts it."""
    left = Counter(dropped)
    kept: list[str | None] = []
    for word in words:
        left[word] -= 1
        kept.append(None if left[word] >= 0 else word)
    return kept


def _joined(words: Sequence[str | None]) -> str:
    text = "_".join(GAP if word is None else word for word in words)
    while f"{GAP}_{GAP}" in text:
        text = text.replace(f"{GAP}_{GAP}", GAP)
    return text.replace(f"_{GAP}", GAP).replace(f"{GAP}_", GAP)
