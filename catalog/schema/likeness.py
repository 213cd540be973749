"""How alike two problems are: the same in kind, and how far apart in size.

Problems of one kind ask for the same traits, head dims and operation, so that a kernel that answers one answers the
other, padding aside. Their distance is Euclidean over the binary logarithms of their sizes: twice the keys is as far as
twice the sequences.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from catalog.schema.fields import Mode
from catalog.schema.stages import traits_of

if TYPE_CHECKING:
    from catalog.schema.problem import Problem

SIZES = ("sequences", "heads", "ratio", "queries", "keys")
"""What of a problem is a size: how many sequences, key heads, query heads a key head, and how many queries and keys a
sequence has on average."""


def kind_of(problem: Problem) -> str:
    """What two problems of one kind have in common, as canonical JSON."""
    kind = {
        "op": problem.op,
        **traits_of(problem),
        "mask": problem.kernel_mask.value,
        "hdim_q": problem.hdim_q,
        "hdim_v": problem.hdim_v,
        "page_size": problem.page_size,
        "layout": problem.layout,
    }
    return json.dumps(kind, sort_keys=True, separators=(",", ":"))


def kind_words(kind: str) -> str:
    """A kind, as :func:`kind_of` gives it, in words: operation, element type, head dims, mask, and what is asked for.

    Features that the kind does without are left out.
    """
    fields = json.loads(kind)
    words = [fields.pop(name) for name in ("op", "dtype", "mode")]
    head = [str(fields.pop(name)) for name in ("hdim_q", "hdim_v")]
    words.append("d" + "x".join(dict.fromkeys(head)))
    mask, layout = fields.pop("mask"), fields.pop("layout")
    words += [word for word in (f"mask={mask}", layout) if word not in ("mask=no", "bhsd")]
    for name, value in fields.items():
        if value and value != "no":
            words.append(name if value is True else f"{name}={value}")
    return " ".join(words)


def size_of(problem: Problem) -> tuple[float, ...]:
    """The coordinates of a problem, one for each of :data:`SIZES`: log2(1 + extent)."""
    sequences = max(1, problem.batch)
    queries, keys = float(problem.seqlen_q), float(problem.seqlen_k)
    if problem.mode is Mode.GROUP:
        lengths = list(problem.sequences)
        queries = sum(length for length, _ in lengths) / sequences
        keys = sum(length for _, length in lengths) / sequences
    extents = (problem.batch, problem.nhead_k, problem.ratio, queries, keys)
    return tuple(math.log2(1 + extent) for extent in extents)


def steps_of(problem: Problem) -> tuple[int, ...]:
    """The coordinates of a problem, rounded down: no size of problems that share them is more than twice another's."""
    sequences = max(1, problem.batch)
    queries, keys = problem.seqlen_q, problem.seqlen_k
    if problem.seqlens_q is not None:
        queries = problem.extents["tokens_q"] // sequences
        keys = keys if problem.seqlens_k is None else problem.extents["tokens_k"] // sequences
    extents = (problem.batch, problem.nhead_k, problem.ratio, queries, keys)
    return tuple([(1 + extent).bit_length() - 1 for extent in extents])


def bucket_of(problem: Problem) -> str:
    """The name of a problem's bucket, shared by problems of one kind and about the same size."""
    return f"{','.join(map(str, steps_of(problem)))} {problem.form.kind}"


def bucket_sql(problem: str) -> str:
    """:func:`bucket_of` in SQL, of the row ``problem`` of table ``problem``."""
    return " || ',' || ".join(f"CAST({problem}.{name} AS INTEGER)" for name in SIZES) + f" || ' ' || {problem}.kind"
