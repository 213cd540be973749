"""The similarity of problems: whether they are of one kind, and the distance of their sizes.

Problems of one kind require the same traits, head dims and operation, so a kernel that answers one answers the other,
apart from padding. Their distance is Euclidean over the binary logarithms of their sizes: doubling the keys moves as
far as doubling the sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from catalog.ops.attention.stages import traits_of
from catalog.ops.attention.traits import TRAITS, Mode

if TYPE_CHECKING:
    from catalog.ops.attention.problem import Problem


def kind_of(problem: Problem) -> dict[str, Any]:
    """What problems of one kind have in common, as JSON values."""
    of_blocks = ("block_mask_q", "block_mask_kv")
    return {
        "op": problem.op,
        # Recorded kinds say nothing of later traits at their defaults.
        **{name: value for name, value in traits_of(problem).items() if name not in TRAITS.later or value},
        **{name: getattr(problem, name) for name in of_blocks if problem.block_masked},
        "mask": problem.kernel_mask.value,
        "hdim_q": problem.hdim_q,
        "hdim_v": problem.hdim_v,
        "page_size": problem.page_size,
        "layout": problem.layout,
    }


def kind_words(kind: Mapping[str, Any]) -> str:
    """A kind, the result of :func:`kind_of`, in words: operation, element type, head dims, mask, and features.

    Features that the kind does not use are left out.
    """
    fields = dict(kind)
    words = [fields.pop(name) for name in ("op", "dtype", "mode")]
    head = [str(fields.pop(name)) for name in ("hdim_q", "hdim_v")]
    words.append("d" + "x".join(dict.fromkeys(head)))
    mask, layout = fields.pop("mask"), fields.pop("layout")
    words += [word for word in (f"mask={mask}", layout) if word not in ("mask=no", "bhsd")]
    for name, value in fields.items():
        if value and value != "no":
            words.append(name if value is True else f"{name}={value}")
    return " ".join(words)


def coordinates_of(problem: Problem) -> tuple[float, ...]:
    """Coordinates of a problem, log2(1 + extent) each: sequences, key heads, query heads per key head, and the average
    number of queries and of keys in a sequence.
    """
    sequences = max(1, problem.batch)
    queries, keys = float(problem.seqlen_q), float(problem.seqlen_k)
    if problem.mode is Mode.GROUP:
        lengths = list(problem.sequences)
        queries = sum(length for length, _ in lengths) / sequences
        keys = sum(length for _, length in lengths) / sequences
    extents = (problem.batch, problem.nhead_k, problem.ratio, queries, keys)
    return tuple(math.log2(1 + extent) for extent in extents)


def steps_of(problem: Problem) -> tuple[int, ...]:
    """The coordinates of a problem rounded down: problems with equal steps differ at most twofold in each size."""
    extents, nhead_k = problem.extents, problem.nhead_k
    batch, queries, keys = extents["batch"], extents["seqlen_q"], extents["seqlen_k"]
    if problem.seqlens_q is not None and batch:
        queries = extents["tokens_q"] // batch
        keys = keys if problem.seqlens_k is None else extents["tokens_k"] // batch
    return (  # each unmeasured problem is counted by them
        (1 + batch).bit_length() - 1,
        (1 + nhead_k).bit_length() - 1,
        (1 + problem.nhead_q // nhead_k).bit_length() - 1,
        (1 + queries).bit_length() - 1,
        (1 + keys).bit_length() - 1,
    )


_MOST_DECODED = 16
"""Maximum number of queries of a sequence that count as decoding: one, or the guesses of speculative decoding."""


def circumstances_of(problem: Problem) -> dict[str, Any]:
    """What decides which implementation is the fastest: element type, head dims, longest keys, and the phase.

    The phase is ``train`` for a backward, ``decode`` for few queries of more keys, else ``prefill``.
    """
    few = problem.seqlen_q <= _MOST_DECODED and problem.seqlen_q < problem.seqlen_k
    return {
        "dtype": problem.dtype.value,
        "hdim": "x".join(dict.fromkeys(map(str, (problem.hdim_q, problem.hdim_v)))),
        "length": problem.seqlen_k,
        "phase": "train" if problem.op == "bwd" else "decode" if few else "prefill",
    }
