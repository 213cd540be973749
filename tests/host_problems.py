"""Random problems for kernels of our own: signatures are rows of the catalog, sizes and tensors are drawn.

Every two values of two traits that some row has together are in some signature; ops that share fwd's code have not
every data type with each of the traits that they share, too. A kernel is compiled for each, so signatures are few;
problems of one signature run on one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from hypothesis import strategies as st

from catalog.ops.attention.fields import ELEMENTS, Op
from catalog.ops.attention.inputs import forward_of
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.answers import reference
from catalog.ops.attention.stages import MAIN_STAGE, STAGES
from catalog.ops.attention.traits import TRAITS, KvLookupTable, KvMemoryLayout, Mode, Pipeline, Qscale, Rope
from catalog.runtime.catalog import Catalog
from catalog.runtime.elements import element_type
from catalog.runtime.here import resolve_arch
from catalog.runtime.inputs import draw_inputs as draw_plain
from catalog.runtime.tensors import Array
from catalog.schema.problem_tensors import bytes_of_element

SEED = 2026
OPS: tuple[Op, ...] = tuple(STAGES)
SEQLENS = (0, 1, 2, 7, 16, 31, 33, 64, 100, 129, 200, 257)
WINDOWS = ((0, 0), (5, 0), (0, 3), (31, 33), (64, -1), (300, 2), (2**31 - 1, 0))

HEAD_DIMS: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (32, 32): ((1, 1), (31, 7), (32, 5), (16, 32)),
    (64, 64): ((40, 40), (64, 33), (48, 64)),
    (96, 96): ((72, 72), (65, 96), (96, 96), (80, 80)),
    (128, 128): ((100, 128), (128, 97), (112, 100)),
    (192, 128): ((136, 104), (192, 1), (176, 128)),
    (256, 256): ((256, 129), (200, 200), (208, 256)),
    (512, 512): ((257, 300), (512, 511), (320, 320), (400, 512)),
    (576, 512): ((576, 512), (513, 300)),
}
"""The head dims of problems that padded kernels of each size answer, the next smaller ones do not."""

LATENT = 512
"""Head dims above it are those of latent attention, where V may be the beginning of K."""

VECTOR = 8
"""Head dims of kernels that are padded to whole vectors are multiples of it; of 16 where elements have 8 bits."""

SHARED_WITH_FWD: Collection[str] = {
    *("mode", "hdim_q", "hdim_v", "pad_d", "mask", "bias", "lse", "dropout", "logits", "sink", "skip_min_seqlen_q")
}
"""Traits whose code is the same in fwd and in the ops that read a cache: fwd pairs them with every data type."""

READ_A_CACHE: tuple[Op, ...] = ("splitkv", "pagedkv", "batch_prefill")

_TRAITS = (*(t.name for t in TRAITS.values() if t.group == "signature" and t.name != "family"), "pad_d")


@dataclass(frozen=True)
class Signature:
    """What the problems of one plan have in common: traits of its main stage."""

    op: Op
    traits: Mapping[str, Any]

    @property
    def exact(self) -> bool:
        return not self.traits["pad_d"]


def pairwise_cover(rows: Sequence[tuple[Any, ...]], apart: Collection[frozenset[int]] = ()) -> list[tuple[Any, ...]]:
    """Some of the rows, such that every pair of values that a row has in two columns is in one of them.

    Pairs of the columns ``apart`` do not count.
    """

    columns = [pair for pair in combinations(range(len(rows[0])), 2) if frozenset(pair) not in apart]
    number: dict[Any, int] = {}
    pairs = np.array([[number.setdefault((i, j, row[i], row[j]), len(number)) for i, j in columns] for row in rows])
    holders = np.bincount(pairs.ravel())
    missing, chosen = np.ones(len(number), dtype=bool), []
    for pair in np.argsort(holders, kind="stable"):  # the rarest first
        if missing[pair]:
            candidates = np.flatnonzero((pairs == pair).any(axis=1))
            best = candidates[missing[pairs[candidates]].sum(axis=1).argmax()]
            chosen.append(rows[best])
            missing[pairs[best]] = False
    return chosen


def signatures(catalog: Catalog, op: Op, arch: str = "host") -> tuple[Signature, ...]:
    """Signatures of the op's main stage on an arch that cover all pairs of traits."""
    catalog.populate(arch)
    rows = catalog.connection.execute(
        f"SELECT DISTINCT {', '.join(_TRAITS)} FROM attention_row WHERE family = ? AND arch = ?",
        (MAIN_STAGE[op].value, resolve_arch(arch)),
    ).fetchall()
    varying = [i for i in range(len(_TRAITS)) if len({row[i] for row in rows}) > 1]
    reduced = {tuple(row[i] for i in varying): tuple(row) for row in rows}
    columns = [_TRAITS[i] for i in varying]
    shared = [name for name in columns if name in SHARED_WITH_FWD and op in READ_A_CACHE]
    cover = pairwise_cover(sorted(reduced), [frozenset(map(columns.index, ("dtype", name))) for name in shared])
    return tuple(Signature(op, dict(zip(_TRAITS, reduced[key], strict=True))) for key in cover)


# Problems


@st.composite
def problems(draw: st.DrawFn, of: Sequence[Signature]) -> Problem:
    """A problem of one of the signatures."""
    return Problem(**problem_fields(draw(st.sampled_from(of)), lambda *values: draw(st.sampled_from(values))))


def problem_fields(signature: Signature, pick: Callable[..., Any]) -> dict[str, Any]:
    """Fields of a problem; ``pick`` chooses among its arguments."""
    traits, op = signature.traits, signature.op
    hdim_q, hdim_v = _head_dims(signature, pick)
    nhead_k = pick(1, 2, 3)
    fields: dict[str, Any] = {
        "op": op,
        "dtype": traits["dtype"],
        "hdim_q": hdim_q,
        "hdim_v": hdim_v,
        "nhead_k": nhead_k,
        "nhead_q": nhead_k * pick(1, 2, 4),
    }
    fields |= _sizes(traits["mode"], _page_sizes(op, traits), pick)
    if op == "appendkv":
        return fields | _append(traits, fields, pick)
    fields |= _mask(traits["mask"], bool(traits["sink"]), pick)
    fields |= {"scale": pick(None, None, 0.3 * hdim_q**-0.5, 2 * hdim_q**-0.5), "bias": traits["bias"]}
    if traits["bias"] != "no":
        fields["bias_dims"] = pick("1h", "bh") if traits["bias"] == "alibi" else pick("11", "1h", "bh")
    if traits["dropout"]:
        fields |= {
            "dropout": pick(0.1, 0.5, 0.9),
            "randval": bool(traits["store_randval"]) if op == "bwd" else pick(True, False),
        }
    if traits["logits"]:
        fields["logits_soft_cap"] = pick(0.5, 5.0, 30.0)
    if traits["block_mask"]:
        fields |= _block_mask(op, traits, pick)
    if op == "bwd":
        return fields | {name: bool(traits[name]) for name in ("dbias", "deterministic")} | {"dlse": pick(False, True)}
    fields |= {"lse": bool(traits["lse"]) if op != "splitkv" else pick(True, False), "qscale": traits["qscale"]}
    if traits["qscale"] == Qscale.BLOCKSCALE.value:
        tile = traits.get("tile_n0") or 16
        fields |= {"block_scale_size_q": pick(1, 32, 100), "block_scale_size_kv": pick(tile, 2 * tile, 512)}
    if traits["skip_min_seqlen_q"]:
        fields["min_seqlen_q"] = pick(1, 7, 100)
    if op == "splitkv":
        fields["num_splits"] = pick(0, 1, 2, 3, 7)
    if op == "batch_prefill":
        fields |= {name: traits[name] for name in ("kv_memory_layout", "kv_lookup_table")}
    return fields


def _head_dims(signature: Signature, pick: Callable[..., Any]) -> tuple[int, int]:
    traits = signature.traits
    kernel = traits["hdim_q"], traits["hdim_v"]
    if signature.exact:
        return kernel
    allowed = HEAD_DIMS[kernel]
    if signature.op == "appendkv":
        smaller = (pair for pairs in HEAD_DIMS.values() for pair in pairs if pair[0] > 1)
        allowed = tuple(pair for pair in smaller if pair[0] <= kernel[0] and pair[1] <= kernel[1])
    if traits["pad_d"] == VECTOR:
        vector = 16 // bytes_of_element(ELEMENTS[traits["dtype"]].kv)
        whole = (tuple(-(-hdim // vector) * vector for hdim in pair) for pair in allowed)
        allowed = (kernel, *dict.fromkeys(pair for pair in whole if pair <= kernel))
    if traits["kv_memory_layout"] == KvMemoryLayout.VECTORIZED.value:
        allowed = tuple(pair for pair in allowed if pair[0] % 16 == 0)
    return tuple(pick(*allowed))


def _page_sizes(op: Op, traits: Mapping[str, Any]) -> tuple[int, ...]:
    """Of caches that the kernel reads; none for dense ones."""
    if not traits["paged_kv"]:
        return ()
    if traits.get("pipeline") == Pipeline.SM90_WGMMA.value:
        return 8, 16, 48, 64, 1024
    return (16, 64, 1024) if op == "batch_prefill" else (1, 16, 64, 1024)


def _sizes(mode: str, pages: tuple[int, ...], pick: Callable[..., Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    if mode == Mode.GROUP.value:
        sizes["seqlens_q"] = [pick(*SEQLENS) for _ in range(pick(1, 2, 4))]
        if not pages:
            sizes["seqlens_k"] = pick(sizes["seqlens_q"], [pick(*SEQLENS) for _ in sizes["seqlens_q"]])
    else:
        sizes |= {"batch": pick(1, 2, 3), "seqlen_q": pick(*SEQLENS), "layout": pick("bhsd", "bshd")}
    if pages or mode == Mode.BATCH.value:
        sizes["seqlen_k"] = pick(*SEQLENS)
    if pages:
        sizes["page_size"] = pick(*pages)
    return sizes


def _mask(mask: str, sink: bool, pick: Callable[..., Any]) -> dict[str, Any]:
    if mask == "no":
        return {}
    corner = {"mask": pick("top_left", "bottom_right")}
    if mask == "causal":
        return corner
    windows = [window for window in WINDOWS if window[0] >= 0]
    return corner | {"window": pick(*windows)} | ({"sink_size": pick(1, 4, 40)} if sink else {})


def _block_mask(op: Op, traits: Mapping[str, Any], pick: Callable[..., Any]) -> dict[str, Any]:
    """Blocks of whole tiles, if the traits have a tile, or of whole steps of a host kernel.

    A backward hides the blocks of 64 keys of a tile one by one.
    """
    keys = traits.get("tile_n0", 32)
    return {
        "block_mask_q": traits.get("tile_m0", 16) * pick(1, 2, 5),
        "block_mask_kv": (min(keys, 64) if op == "bwd" else keys) * pick(1, 2, 5),
    }


def _append(traits: Mapping[str, Any], fields: Mapping[str, Any], pick: Callable[..., Any]) -> dict[str, Any]:
    room = fields["seqlen_k"]
    appended: dict[str, Any] = {"seqlen_new": pick(*(n for n in (0, 1, 5, 33) if n <= room)), "rope": traits["rope"]}
    appended |= {"seqlen_q": pick(*(n for n in (0, 1, 5, 33) if n <= room)), "mask": pick("no", "causal")}
    if traits["rope"] != Rope.NO.value:
        appended["rotary_dim"] = pick(None, 2, fields["hdim_q"] // 4 * 2 or 2)
    return appended


# Tensors


def draw_inputs(problem: Problem, seed: int) -> dict[str, Array]:
    """Inputs with all that :func:`draw_plain` leaves simple: ragged lengths, optional tensors, infinite biases, and
    memory with gaps or backwards."""
    rng = np.random.default_rng([SEED, seed])
    inputs = draw_plain(problem, seed)
    if "bias" in inputs:
        inputs["bias"][rng.random(inputs["bias"].shape) < 0.1] = -np.inf
    inputs |= _optional(problem, rng)
    if problem.paged:
        _shorten(problem, inputs, rng)
    if problem.op == "bwd":
        inputs |= _forward(problem, inputs)
    if "dlse" in inputs:  # what is constant has no gradient, whatever is said of it
        inputs["dlse"][np.isneginf(inputs["lse"])] = np.nan
    stored = {name: _stored(name, problem, array, seed + index) for index, (name, array) in enumerate(inputs.items())}
    if problem.hdim_q > LATENT and seed % 2:
        for k, v in (("k", "v"), ("k_cache", "v_cache")):
            if k in stored:
                stored[v] = stored[k][..., : problem.hdim_v]
    return stored


def poison_last_block(problem: Problem, inputs: Mapping[str, Array]) -> Array:
    """Write NaN to the last block of keys and values of a block mask; whether a row of O does not attend to it."""
    last = (problem.seqlen_k - 1) // problem.block_mask_kv
    rows = np.repeat(inputs["block_mask"][..., last] == 0, problem.block_mask_q, axis=2)[:, :, : problem.seqlen_q]
    for name in ("k", "v"):
        tokens = inputs[name] if problem.layout == "bhsd" else inputs[name].swapaxes(1, 2)
        tokens[:, :, last * problem.block_mask_kv :] = np.nan
    return rows if problem.layout == "bhsd" else rows.swapaxes(1, 2)


def _optional(problem: Problem, rng: np.random.Generator) -> dict[str, Array]:
    drawn: dict[str, Array] = {}
    for name, tensor in problem.tensors.items():
        if not tensor.optional or rng.random() < 0.5:
            continue
        if name == "sink":
            drawn[name] = rng.normal(0, 2, tensor.shape).astype(np.float32)
        elif name == "rng_state":
            drawn[name] = rng.integers(0, 2**64, 2, dtype=np.uint64)
        elif name.endswith("_descale"):
            drawn[name] = rng.uniform(0.5, 1.5, tensor.shape).astype(np.float32)
        else:
            stored = [lengths[name == "seqlens_k"] for lengths in problem.sequences]
            drawn[name] = rng.integers(0, np.array(stored, np.int64) + 1).astype(np.int32)
    return drawn


def _shorten(problem: Problem, inputs: dict[str, Array], rng: np.random.Generator) -> None:
    """Sequences of different lengths, and page tables that hold nothing behind them."""
    if "seqlens_k" in inputs:
        room = problem.seqlen_k - problem.appended
        inputs["seqlens_k"] = rng.integers(0, room + 1, problem.batch).astype(np.int32)
        used = -(-(inputs["seqlens_k"] + (problem.seqlen_new or 0)) // problem.page_size)
        inputs["block_table"][np.arange(problem.pages_per_sequence) >= used[:, np.newaxis]] = -1
    elif problem.kv_lookup_table is KvLookupTable.SGLANG:
        lengths = rng.integers(0, problem.seqlen_k + 1, problem.batch)
        pages = -(-lengths // problem.page_size)
        inputs["kv_indptr"] = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
        inputs["kv_last_page_lens"] = ((lengths - 1) % problem.page_size + 1).astype(np.int32)
        inputs["kv_page_indices"] = inputs["kv_page_indices"][: pages.sum() + 3]


def _forward(problem: Problem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    forward = forward_of(problem)
    results = reference(forward, {name: inputs[name] for name in forward.tensors if name in inputs})
    return {name: results[name].astype(element_type(problem, name)) for name in ("o", "lse")}


def _stored(name: str, problem: Problem, array: Array, way: int) -> Array:
    """The same elements, dense, with gaps, or backwards along the axes that may be strided."""
    free = array.ndim - problem.tensors[name].contiguous
    if way % 3 == 0 or free < 1 or problem.tensors[name].role == "updated":
        return array
    if way % 3 == 1:
        wide = np.zeros((*(2 * extent for extent in array.shape[:free]), *array.shape[free:]), array.dtype)
        view = wide[(slice(None, None, 2),) * free]
        view[...] = array
        return view
    flip = (slice(None, None, -1),) * free
    return np.ascontiguousarray(array[flip])[flip]
