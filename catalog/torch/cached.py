"""Attention over a K/V cache, dense or in pages: :func:`flash_attn_with_kvcache`, and the steps that it consists of.

Without gradients, and not traced by :func:`torch.compile`, whose graphs break at a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from catalog.errors import ArgumentError, SelectionError, TensorError, UsageError
from catalog.ops.attention.problem import Problem
from catalog.runtime.catalog import Catalog
from catalog.torch.calls import Elements, Options, Shape, arch_of, dtype_of, elements_of, in_place, ready, splits_keys
from catalog.torch.flash import Window, options_of, slopes_of

Rope = Literal["no", "inter", "half"]
Slopes = Literal["no", "1h", "bh"]


class KvCache(NamedTuple):
    """K and V that grow: (sequences, capacity, heads, head dim), or with a page table (pages, page size, heads, ...).

    ``table`` is int32, (sequences, pages of a sequence): its pages in order. Pages that no token is in are not read.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None

    @property
    def capacity(self) -> int:
        """The number of tokens that a sequence has room for."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    @property
    def paging(self) -> tuple[int, int]:
        """Tokens of a page, and the number of pages; zeros of a dense cache."""
        return (0, 0) if self.table is None else (self.k.shape[1], self.k.shape[0])

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Its tensors by the names of a problem that only reads it."""
        if self.table is None:
            return [("k", self.k), ("v", self.v)]
        return [("k_cache", self.k), ("v_cache", self.v), ("block_table", self.table)]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Like ``flash_attn.flash_attn_with_kvcache``, computed by the catalog's kernels; also on the CPU, and for float32.

    With ``k`` and ``v``, these tokens are first written into the cache, in place, behind those that it has. Then every
    query attends to the tokens of its sequence, the new ones included. Without gradients.

    Args:
        q: (batch, queries, heads, head dim), float32, float16 or bfloat16, with any strides.
        k_cache: (sequences, capacity, heads of k, head dim), or with ``block_table`` pages, (pages, page size, heads of
            k, head dim), of the type of q, or float8_e4m3fn where q has 16 bits. Only its innermost axis must be dense.
        v_cache: as k_cache, with the head dim of the result.
        k: (batch, new tokens, heads of k, head dim), what is written behind the tokens of ``k_cache``.
        v: likewise of ``v_cache``.
        rotary_cos: (at least the capacity, half of the rotated elements), of the type of q: k and q are rotated by
            their positions. Queries have successive positions from the end of the cached tokens on, if ``causal`` or a
            window is given; else all have the first of these. Needs k.
        rotary_sin: likewise.
        cache_seqlens: int32, (batch,), or one number: the tokens that each sequence has before ``k``; default: the
            capacity, without ``k``.
        cache_batch_idx: (batch,), the sequence of the cache that each of q's is; default: the first ones, in order.
        cache_leftpad: not supported.
        block_table: int32, (batch, pages of a sequence): the pages of each sequence, in order; of any page size.
        softmax_scale: factor of the scores, positive; default 1 / sqrt(head dim).
        causal: query i of n sees the tokens up to the i-th of the last n.
        window_size: (left, right), as of :func:`~catalog.torch.flash_attn_func`, from the last tokens.
        softcap: c of c * tanh(score / c); 0: none. Without slopes.
        rotary_interleaved: whether neighbouring elements are a pair, as in GPT-J; else the halves, as in GPT-NeoX.
        alibi_slopes: (heads,) or (batch, heads), float32.
        num_splits: parts that the tokens are divided into, which are computed in parallel; 1: none; 0: chosen.
        return_softmax_lse: whether to return (O, LSE).
        k_descale: float32, (1,): the factor of a k_cache of float8_e4m3fn, by which k is divided; default: 1.
        v_descale: likewise of v_cache.

    Returns:
        O, (batch, queries, heads, head dim of v), of the type of q; LSE is float32, (batch, heads, queries). With
        slopes and a causal mask without window, LSE is that of scores with slope * j added, as in flash-attn.

    Raises:
        TensorError: shapes, types or devices of the tensors do not match, no kernel accepts their type, or on the CPU,
            a length or a page number is out of range.
        ArgumentError: arguments that belong together are not given together, or exclude each other.
        UsageError: a gradient is wanted.
        SelectionError: no kernel of the arch supports the call; the message says what is missing.
        ProblemError, DeviceError, BuildError, ToolchainError: as :func:`~catalog.torch.flash_attn_func`.
    """
    if cache_leftpad is not None:
        raise SelectionError(
            "no kernel skips padding on the left of a cache (cache_leftpad)",
            hint="Start each sequence at the first token of its row, or use pages: block_table.",
        )
    _check_together(k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_cache, v_cache, k, v) if x is not None):
        raise UsageError("attention over a cache has no gradient", hint="Use torch.no_grad(), or flash_attn_func.")
    if q.dim() != 4 or k_cache.dim() != 4 or v_cache.dim() != 4:
        raise TensorError(
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}: expected (batch, "
            "tokens, heads, head dim), and of a paged cache (pages, page size, heads, head dim)"
        )
    descales = _descales_of(k_cache, k_descale, v_descale)
    store = _cache_of(q.shape[0], k_cache, v_cache, cache_batch_idx, block_table)
    lengths = _lengths_of(cache_seqlens, q, store.capacity)
    keys = store.capacity
    options = options_of("bshd", keys, 0.0, softmax_scale, causal, window_size, softcap, deterministic=False)
    if k is not None and v is not None:
        rotary = None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin)
        rope: Rope = "inter" if rotary_interleaved else "half"
        q = append(q, store, k, v, lengths, rotary, rope=rope, options=options, descales=descales)
        lengths = lengths + k.shape[1]
    o, lse = attend(q, store, lengths, options, slopes_of(alibi_slopes), num_splits, descales)
    return (o, lse) if return_softmax_lse else o


def append(
    q: torch.Tensor,
    store: KvCache,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    rope: Rope,
    options: Options,
    descales: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor:
    """Write k and v into a cache, behind ``lengths`` tokens of each sequence; return q, rotated if k is.

    Args:
        q: (batch, queries, heads, head dim).
        store: the cache, which is written in place.
        k: (batch, new tokens, heads of k, head dim).
        v: likewise.
        lengths: int32, (batch,).
        rotary: cosines and sines, (at least the capacity, half of the rotated elements); None: nothing is rotated.
        rope: which elements are a pair.
        options: their mask says whether queries have successive positions.
        descales: as of :func:`attend`; k and v are divided by them.

    Raises:
        TensorError, ProblemError, SelectionError, DeviceError, BuildError, ToolchainError: as
            :func:`flash_attn_with_kvcache`.
    """
    problem = _append_problem(
        q.shape,
        store.v.shape[-1],
        store.k.shape[2],
        store.capacity,
        store.paging,
        k.shape[1],
        elements_of(q.dtype, store.k.dtype),
        "no" if rotary is None else rope,
        0 if rotary is None else 2 * rotary[0].shape[-1],
        "no" if options.mask == "no" else "bottom_right",
    )
    arch = arch_of(q.device)
    tensors = {
        "q": ready(q, arch),
        "k_cache": in_place("k_cache", store.k, arch),
        "v_cache": in_place("v_cache", store.v, arch),
        "k_new": ready(k, arch),
        "v_new": ready(v, arch),
        "seqlens_k": lengths,
        **descales,
    }
    if store.table is not None:
        tensors["block_table"] = store.table
    if rotary is not None:
        for name, table in zip(("rotary_cos", "rotary_sin"), rotary, strict=True):
            if table.dim() != 2 or table.shape[0] < store.capacity:
                raise TensorError(
                    f"{name} is {tuple(table.shape)}: expected (positions, half of the rotated elements), with "
                    f"at least the {store.capacity} positions of the cache"
                )
            tensors[name] = table[: store.capacity].contiguous()
    rotated: torch.Tensor = Catalog.select(problem, arch=arch).enqueue(tensors)["q"]
    return rotated


def attend(
    q: torch.Tensor,
    store: KvCache,
    lengths: torch.Tensor,
    options: Options,
    slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    descales: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of queries over the first ``lengths`` tokens of each sequence of a cache.

    Args:
        q: (batch, queries, heads, head dim).
        store: the cache.
        lengths: int32, (batch,).
        options: the layout is ``bshd``.
        slopes: (1 or batch, heads), float32.
        num_splits: as of :func:`flash_attn_with_kvcache`.
        descales: the factors of a cache of fp8, ``k_descale`` and ``v_descale``, float32, (1,); none: 1.

    Raises:
        TensorError, ProblemError, SelectionError, DeviceError, BuildError, ToolchainError: as
            :func:`flash_attn_with_kvcache`.
    """
    axes: Slopes = "no" if slopes is None else "1h" if slopes.shape[0] == 1 else "bh"
    elements = elements_of(q.dtype, store.k.dtype)
    problem = attention_problem(q.shape, store, elements, q.device, options, axes, num_splits, scaled=bool(descales))
    arch = arch_of(q.device)
    tensors = {name: ready(tensor, arch) for name, tensor in (("q", q), *store.named)}
    if slopes is not None:
        tensors["alibi_slopes"] = slopes
    results = Catalog.select(problem, arch=arch).enqueue({**tensors, **descales, "seqlens_k": lengths})
    return results["o"], results["lse"]


def attention_problem(
    q: Shape,
    store: KvCache,
    dtype: Elements,
    device: torch.device,
    options: Options,
    slopes: Slopes = "no",
    num_splits: int = 0,
    scaled: bool = False,
) -> Problem:
    """The problem that :func:`attend` poses for these shapes; ``slopes`` are the axes that slopes have.

    ``scaled``: K and V have factors.

    Raises:
        TensorError: no kernel accepts the type.
        ProblemError: sizes or options are outside of what a problem may have.
    """
    heads_k = store.k.shape[2]
    few = num_splits == 0 and splits_keys(device, q[0], q[1] * q[2], heads_k)
    splits = num_splits if num_splits > 1 else 0 if few else 1
    sizes = (q, store.v.shape[-1], heads_k, store.capacity, store.paging)
    return _attend_problem(*sizes, dtype, slopes, splits, options, scaled)


def _check_together(
    k: Any, v: Any, rotary_cos: Any, rotary_sin: Any, cache_seqlens: Any, cache_batch_idx: Any, block_table: Any
) -> None:
    """Check that arguments which belong together are given together.

    Raises:
        ArgumentError: they are not.
    """
    if (k is None) != (v is None):
        raise ArgumentError("k and v are the new tokens: give both, or neither")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ArgumentError("rotary_cos and rotary_sin belong together: give both, or neither")
    if rotary_cos is not None and k is None:
        raise ArgumentError("rotary_cos needs k and v: only new tokens are rotated, and the queries with them")
    if k is not None and cache_seqlens is None:
        raise ArgumentError("k needs cache_seqlens, the number of tokens that precede the new ones")
    if cache_batch_idx is not None and block_table is not None:
        raise ArgumentError("cache_batch_idx cannot be combined with block_table, which says where each sequence is")


def _descales_of(
    k_cache: torch.Tensor, k_descale: torch.Tensor | None, v_descale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The factors of a cache, by name: of K and of V, or none.

    Raises:
        ArgumentError: the cache cannot have factors.
    """
    if k_cache.dtype != torch.float8_e4m3fn and (k_descale is not None or v_descale is not None):
        raise ArgumentError(
            f"k_descale and v_descale are factors of a cache of float8_e4m3fn, and this is {k_cache.dtype}"
        )
    if k_descale is None and v_descale is None:
        return {}
    one = torch.ones(1, dtype=torch.float32, device=k_cache.device)
    return {
        "k_descale": one if k_descale is None else k_descale.reshape(-1),
        "v_descale": one if v_descale is None else v_descale.reshape(-1),
    }


def _cache_of(
    batch: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_batch_idx: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> KvCache:
    """The cache of ``batch`` sequences. Chosen sequences of a dense one are pages, each as long as a sequence."""
    if cache_batch_idx is not None:
        block_table = cache_batch_idx[:, None]
    if block_table is not None:
        if block_table.dim() != 2 or block_table.shape[0] != batch:
            raise TensorError(
                f"the cache has places for {tuple(block_table.shape[:1])} sequences, q has {batch}: expected "
                "block_table (batch, pages), or cache_batch_idx (batch,)"
            )
        return KvCache(k_cache, v_cache, block_table.to(torch.int32).contiguous())
    if min(k_cache.shape[0], v_cache.shape[0]) < batch:
        raise TensorError(f"q has {batch} sequences, the cache has {k_cache.shape[0]}")
    return KvCache(k_cache[:batch], v_cache[:batch], None)


def _lengths_of(cache_seqlens: int | torch.Tensor | None, q: torch.Tensor, capacity: int) -> torch.Tensor:
    """(batch,), int32."""
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens.to(torch.int32)
    length = capacity if cache_seqlens is None else cache_seqlens
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def _paged(page_size: int, num_pages: int) -> dict[str, int]:
    return {"page_size": page_size, "num_pages": num_pages} if page_size else {}


@lru_cache(maxsize=4096)
def _append_problem(
    q: Shape,
    hdim_v: int,
    nhead_k: int,
    capacity: int,
    paging: tuple[int, int],
    new: int,
    dtype: Elements,
    rope: Rope,
    rotary_dim: int,
    mask: Literal["no", "bottom_right"],
) -> Problem:
    rotated = {"rope": rope, "rotary_dim": rotary_dim} if rope != "no" else {}
    return Problem(
        op="appendkv",
        dtype=dtype_of(dtype),
        batch=q[0],
        seqlen_q=q[1],
        seqlen_k=capacity,
        seqlen_new=new,
        nhead_q=q[2],
        nhead_k=nhead_k,
        hdim_q=q[3],
        hdim_v=hdim_v,
        mask=mask,
        layout="bshd",
        **_paged(*paging),
        **rotated,
    )


@lru_cache(maxsize=4096)
def _attend_problem(
    q: Shape,
    hdim_v: int,
    nhead_k: int,
    capacity: int,
    paging: tuple[int, int],
    dtype: Elements,
    slopes: Slopes,
    num_splits: int,
    options: Options,
    scaled: bool,
) -> Problem:
    split = num_splits != 1
    return Problem(
        op="splitkv" if split else "pagedkv" if paging[0] else "fwd",
        dtype=dtype_of(dtype),
        batch=q[0],
        seqlen_q=q[1],
        seqlen_k=capacity,
        nhead_q=q[2],
        nhead_k=nhead_k,
        hdim_q=q[3],
        hdim_v=hdim_v,
        mask=options.mask,
        window=None if options.mask == "no" else (options.left, options.right),
        scale=options.scale,
        logits_soft_cap=options.soft_cap or None,
        bias="no" if slopes == "no" else "alibi",
        bias_dims="1h" if slopes == "no" else slopes,
        qscale="pertensor" if scaled else "no",
        lse=True,
        layout="bshd",
        **_paged(*paging),
        **({"num_splits": num_splits} if split else {}),
    )
