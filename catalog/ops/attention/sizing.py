"""Sizes of problems that are certain to be valid, so that a problem of a known form needs no validation.

The checks are stricter than the constructor, never looser, and agree with its results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from catalog.ops.attention.tensors import first_tokens, plain_extents
from catalog.schema.problem import MAX_SIZE, MAX_TOTAL

if TYPE_CHECKING:
    from catalog.ops.attention.problem import Problem

_Certain = tuple[Mapping[str, Any], int]
"""Sizes with the extents and lists that follow from them, and the product that bounds the bytes and the FLOP."""


def sizing_of(problem: Problem) -> Callable[[Mapping[str, Any]], Mapping[str, Any] | None]:
    """A function that returns all sizes of a problem like ``problem``, with its extents and lists, if certainly valid.

    It returns None for sizes that may be invalid, take defaults, or are not plain integers.
    """
    if problem.op == "appendkv" or problem.page_size:
        return lambda sizes: None  # their sizes limit each other, and features limit them
    find = _dense if problem.seqlens_q is None else _packed
    largest = MAX_TOTAL // _weight(problem)
    has_more_extents = problem.extents.keys() != plain_extents(0, 0, 0, 0, 0).keys()  # those of blocks

    def certain(sizes: Mapping[str, Any]) -> Mapping[str, Any] | None:
        found = find(sizes)
        if found is None or found[1] > largest:
            return None
        if has_more_extents:
            return {name: value for name, value in found[0].items() if name != "extents"}
        return found[0]

    return certain


def borrowing_of(problem: Problem) -> Callable[[Any], Mapping[str, Any] | None]:
    """A function that returns the sizes of another problem, with extents and lists, if they are certainly valid.

    The gradient of a forward has its sizes. It returns None if one of them is not of a kind that :func:`sizing_of`
    knows, or if one is packed and the other is not.
    """
    packed = problem.seqlens_q is not None
    names = (*problem.sizes, "extents", "lists") if packed else (*problem.sizes, "extents")
    largest = MAX_TOTAL // _weight(problem)
    plain = plain_extents(0, 0, 0, 0, 0).keys()
    known = problem.op != "appendkv" and not problem.page_size and problem.extents.keys() == plain

    def certain(other: Problem) -> Mapping[str, Any] | None:
        extents = other.extents
        if not known or extents.keys() != plain or (other.seqlens_q is not None) is not packed:
            return None
        if (extents["batch"] + 1) * (extents["tokens_q"] + 1) * (extents["tokens_k"] + 1) > largest:
            return None
        if packed:
            other.lists  # noqa: B018 - derived now, to be taken over
        fields = other.__dict__
        return {name: fields[name] for name in names}

    return certain


def _weight(problem: Problem) -> int:
    """Bytes of tensors or FLOP of a problem of this form, per unit of the product of its sizes, each plus one.

    No tensor has an axis twice, and no matrix product has a pair of tokens twice.
    """
    bytes_each: int = problem.form.bytes_at(defaultdict(lambda: 1))
    flops_each: int = 6 * problem.nhead_q * (problem.hdim_q + problem.hdim_v)
    return max(bytes_each, flops_each)


def _dense(sizes: Mapping[str, Any]) -> _Certain | None:
    if sizes.keys() != _BATCH_SIZES:
        return None
    for size in sizes.values():
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            return None
    batch, q, k = sizes["batch"], sizes["seqlen_q"], sizes["seqlen_k"]
    extents = plain_extents(batch, q, k, batch * q, k)
    whole = {"seqlens_q": None, "seqlens_k": None, "num_pages": None, **sizes, "extents": extents}
    return whole, (batch + 1) * (q + 1) * (k + 1)


def _packed(sizes: Mapping[str, Any]) -> _Certain | None:
    if len(sizes) != 2 or "seqlens_q" not in sizes or "seqlens_k" not in sizes:
        return None
    q, k = sizes["seqlens_q"], sizes["seqlens_k"]
    # Asked each time, of the tuple itself: one of bools or floats equals one of integers.
    if not _integers(q) or not (k is q or (_integers(k) and len(q) == len(k))):
        return None
    return _of_lengths(q, k)


def _integers(lengths: Any) -> bool:
    """Whether this is a tuple of at least one plain integer, and of nothing else."""
    if type(lengths) is not tuple or not lengths:
        return False
    for length in lengths:  # noqa: SIM110 - all() takes three times as long
        if type(length) is not int:
            return False
    return True


@lru_cache(maxsize=128)
def _of_lengths(q: tuple[int, ...], k: tuple[int, ...]) -> _Certain | None:
    """The sizes of packed sequences, which problems of several forms share."""
    tokens_q = tokens_k = sum(q)
    longest_q = longest_k = max(q)
    shortest = min(q)
    if k is not q:
        tokens_k, longest_k, shortest = sum(k), max(k), min(shortest, *k)
    if shortest < 0 or tokens_q > MAX_SIZE or tokens_k > MAX_SIZE:
        return None
    batch = len(q)
    whole = {
        "batch": batch,
        "seqlen_q": longest_q,
        "seqlen_k": longest_k,
        "num_pages": None,
        "seqlens_q": q,
        "seqlens_k": k,
        "extents": plain_extents(batch, longest_q, longest_k, tokens_q, tokens_k),
        "lists": first_tokens(q, k),
    }
    return whole, (batch + 1) * (tokens_q + 1) * (tokens_k + 1)


_BATCH_SIZES = frozenset({"batch", "seqlen_q", "seqlen_k"})
