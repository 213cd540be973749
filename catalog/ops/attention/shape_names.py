"""Short names of problems and kernels, for people: ``b2-h32x8-s1024-d128-fp16-causal``.

A name states everything that distinguishes a problem from others: different problems have different names, and a name
depends only on its problem.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from catalog.ops.attention.problem import Problem

_IN_WORDS = frozenset(
    {
        *("op", "batch", "nhead_q", "nhead_k", "seqlen_q", "seqlen_k", "seqlens_q", "seqlens_k", "hdim_q", "hdim_v"),
        *("dtype", "mask", "window", "sink_size", "bias", "bias_dims", "qscale", "num_pages", "layout", "rope"),
        *("kv_memory_layout", "kv_lookup_table"),
    }
)
"""Fields that :func:`_parts` writes in a special form; every other field is its code followed by its value."""

_CODES = {
    "page_size": "page",
    "logits_soft_cap": "cap",
    "min_seqlen_q": "minq",
    "num_splits": "splits",
    "seqlen_new": "new",
    "rotary_dim": "rot",
    "block_scale_size_q": "qblock",
    "block_scale_size_kv": "kvblock",
    "block_mask_q": "maskq",
    "block_mask_kv": "maskkv",
}

_LISTED = 4
"""Maximum number of runs of equal lengths in a name; more lengths are written as their sum and a digest."""


def name_of(problem: Problem) -> str:
    """The name of ``problem``, of letters, digits, ``-``, ``_``, ``.``, ``+`` and ``~``.

    ``b`` sequences of ``s`` queries, or queries by keys where these differ. Packed sequences are ``q`` and, where the
    keys differ, ``k``: the lengths separated by ``_``, ``8x64`` for eight times 64, or for many lengths the sum and a
    digest. ``h`` is query heads by key heads, ``d`` the head dims of Q and V. Features follow.
    """
    return "-".join(_parts(problem))


def _parts(problem: Problem) -> Iterator[str]:
    if problem.op != "fwd":
        yield problem.op
    yield f"b{problem.batch}"
    yield f"h{_pair(problem.nhead_q, problem.nhead_k)}"
    yield from _lengths(problem)
    yield f"d{_pair(problem.hdim_q, problem.hdim_v)}"
    yield problem.dtype.value
    yield from _mask(problem)
    yield from (
        word
        for word in (problem.bias.value, problem.qscale.value, problem.rope.value, problem.layout)
        if word not in ("no", "bhsd")
    )
    if problem.bias_dims != "1h":
        yield f"bias{problem.bias_dims}"
    yield from (word.value for word in (problem.kv_memory_layout, problem.kv_lookup_table) if word is not None)
    if problem.num_pages is not None and problem.num_pages != problem.batch * problem.pages_per_sequence:
        yield f"pages{problem.num_pages}"
    for field, info in type(problem).model_fields.items():
        value = getattr(problem, field)
        if field not in _IN_WORDS and value != info.default:
            yield _feature(_CODES.get(field, field), value)


def _feature(code: str, value: Any) -> str:
    return code if value is True else f"{code}{value}"


def _pair(first: int, second: int) -> str:
    return str(first) if first == second else f"{first}x{second}"


def _lengths(problem: Problem) -> Iterator[str]:
    if problem.seqlens_q is None:
        yield f"s{_pair(problem.seqlen_q, problem.seqlen_k)}"
        return
    yield f"q{_packed(problem.seqlens_q)}"
    if problem.seqlens_k is None:
        yield f"k{problem.seqlen_k}"
    elif problem.seqlens_k != problem.seqlens_q:
        yield f"k{_packed(problem.seqlens_k)}"


def _packed(lengths: tuple[int, ...]) -> str:
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    if len(runs) <= _LISTED:
        return "_".join(str(length) if count == 1 else f"{count}x{length}" for length, count in runs)
    digest = hashlib.sha256(",".join(map(str, lengths)).encode()).hexdigest()
    return f"{sum(lengths)}~{digest[:8]}"


def _mask(problem: Problem) -> Iterator[str]:
    if problem.mask == "no":
        return
    corner = {"top_left": "causal", "bottom_right": "bottomright"}[problem.mask]
    if problem.window is None:
        yield corner
    else:
        sides = "_".join("all" if side < 0 else str(side) for side in problem.window)
        yield f"window{sides}" if problem.mask == "bottom_right" else f"topleft{sides}"
    if problem.sink_size:
        yield f"sink{problem.sink_size}"


SHORT_TRAITS = (
    *("pipeline", "tile_m0", "tile_n0", "tile_k0", "tile_n1", "tile_k1", "warp_m0", "warp_n0", "warp_k0"),
    *("pad_s", "pad_sk", "pad_d", "pad_dv"),
)
"""The traits used in :func:`short_name`."""


def short_name(traits: Mapping[str, Any]) -> str:
    """A few words that distinguish kernels of one signature: pipeline, tile, padded axes."""
    tile = "x".join(str(traits[f"tile_{name}"]) for name in ("m0", "n0", "k0", "n1", "k1"))
    warp = "x".join(str(traits[f"warp_{name}"]) for name in ("m0", "n0", "k0"))
    padded = "+".join(name for name in ("s", "sk", "d", "dv") if traits[f"pad_{name}"])
    words = [traits["pipeline"], tile, f"w{warp}", f"p{padded}" if padded else ""]
    return " ".join(word for word in words if word)


def lengths_of(problem: Problem) -> Iterator[tuple[str, int]]:
    """The groups of problems that differ only in length to which a problem belongs, with its length in each.

    In the group with as many queries as keys, one length stands for both. In the group with a fixed number of queries,
    the length is that of the keys. Packed sequences have many lengths and belong to no group, nor do problems without
    keys.
    """
    if problem.seqlens_q is not None or problem.seqlen_k == 0:
        return
    name = re.sub(r"-s\d+(x\d+)?-", "-{}-", name_of(problem), count=1)
    if problem.seqlen_q == problem.seqlen_k:
        yield name.format("s*"), problem.seqlen_k
    yield name.format(f"s{problem.seqlen_q}x*"), problem.seqlen_k
