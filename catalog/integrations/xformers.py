"""xformers' ``memory_efficient_attention`` by the catalog's kernels; xformers need not be installed.

``from catalog.integrations.xformers import memory_efficient_attention`` takes xformers' own bias objects: it reads the
names of their classes and their attributes. Masks stay as few numbers as they are. Blocks become packed sequences,
padded and paged keys are read where they are, and keys with gaps are packed first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from catalog.errors import ArgumentError, TensorError, UnsupportedArgumentError
from catalog.ops.attention.fields import MaskWord
from catalog.torch.calls import Layout, Options
from catalog.torch.inputs import rng_state
from catalog.torch.ops import forward
from catalog.torch.sdpa import bias_of

_MASKS: Mapping[str, MaskWord] = MappingProxyType(
    {
        "LowerTriangularMask": "top_left",
        "LowerTriangularFromBottomRightMask": "bottom_right",
        "LowerTriangularFromBottomRightLocalAttentionMask": "bottom_right",
        "LocalAttentionFromBottomRightMask": "bottom_right",
        "BlockDiagonalMask": "no",
        "BlockDiagonalCausalMask": "top_left",
        "BlockDiagonalCausalFromBottomRightMask": "bottom_right",
        "BlockDiagonalCausalLocalAttentionMask": "top_left",
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask": "bottom_right",
        "BlockDiagonalPaddedKeysMask": "no",
        "BlockDiagonalCausalWithOffsetPaddedKeysMask": "bottom_right",
        "BlockDiagonalLocalAttentionPaddedKeysMask": "bottom_right",
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask": "bottom_right",
        "PagedBlockDiagonalPaddedKeysMask": "no",
        "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": "bottom_right",
        "BlockDiagonalGappyKeysMask": "no",
        "BlockDiagonalCausalWithOffsetGappyKeysMask": "bottom_right",
    }
)
"""The corner that the diagonal of a bias's blocks starts from, by the name of its class."""


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Like ``xformers.ops.memory_efficient_attention``, computed by the catalog's kernels; also on the CPU.

    Differentiable once with respect to query, key, value, and a tensor ``attn_bias``, except over padded or paged keys.

    Args:
        query: (batch, queries, heads, head dim), float32, float16 or bfloat16, with any strides; without heads, or
            (batch, queries, groups, heads of a group, head dim).
        key: (batch, keys, heads, head dim), likewise. Heads of a group that are one head expanded are not copied,
            unless a gradient is needed.
        value: as key, with the head dim of the result.
        attn_bias: a tensor that is added to the scores and broadcasts to (batch, heads, queries, keys), or a bias of
            ``xformers.ops.fmha.attn_bias``: of blocks, the batch is 1 and packed.
        p: the probability that a weight is dropped; 0 over padded or paged keys.
        scale: factor of the scores, positive; default 1 / sqrt(head dim).
        op: no effect: selection chooses.
        output_dtype: only the type of query.

    Returns:
        O, as query, with the head dim of value.

    Raises:
        UnsupportedArgumentError: no kernel follows the bias or another argument; also a NotImplementedError.
        ArgumentError: query, key and value do not fit the bias; also a ValueError.
        TensorError: shapes, types or devices of the tensors do not match, or no kernel accepts their type.
        ProblemError: an option is out of range.
        SelectionError: no kernel of the arch supports the call; the message says what is missing.
        DeviceError, BuildError, ToolchainError: as :meth:`catalog.runtime.plan.Plan.enqueue`.
    """
    if output_dtype not in (None, query.dtype):
        raise UnsupportedArgumentError(f"output_dtype is {output_dtype}: O has the type of query, {query.dtype}")
    q, k, v = _four_axes(query, key, value)
    name = type(attn_bias).__name__
    if attn_bias is None or name in _MASKS:
        if hasattr(attn_bias, "q_seqinfo"):
            o = _blocks(q, k, v, attn_bias, p, scale)
        else:
            options = _options("bshd", attn_bias, scale, p)
            o, _ = forward(q, k, v, None, None, None, None, None, rng_state(p, q.device), options)
    else:
        rows = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        bias = bias_of(_elements(attn_bias, rows, q), q.dtype, rows)
        o, _ = forward(q, k, v, bias, None, None, None, None, rng_state(p, q.device), _options("bshd", None, scale, p))
    return o.reshape(*query.shape[:-1], o.shape[-1])


def _four_axes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value as (batch, tokens, heads, head dim)."""
    axes = {query.dim(), key.dim(), value.dim()}
    if axes == {3}:
        return query[:, :, None], key[:, :, None], value[:, :, None]
    if axes == {4}:
        return query, key, value
    if axes == {5}:
        return query.flatten(2, 3), _heads(key), _heads(value)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
    raise TensorError(f"query, key and value are {shapes}: expected three to five axes each, and as many")


def _heads(tensor: torch.Tensor) -> torch.Tensor:
    """Key or value in groups with all heads in one axis; a head that was expanded is one head of many queries."""
    shared = tensor.stride(3) == 0 and not (torch.is_grad_enabled() and tensor.requires_grad)
    return tensor[:, :, :, 0] if shared else tensor.flatten(2, 3)


def _options(layout: Layout, bias: Any, scale: float | None, p: float) -> Options:
    """The options of a call under a bias of :data:`_MASKS`, or None."""
    mask = "no" if bias is None else _MASKS[type(bias).__name__]
    left, right = -1, -1
    if mask != "no":
        window = getattr(bias, "_window_size", None)
        left = getattr(bias, "window_left", -1) if window is None else window - 1
        right = getattr(bias, "window_right", 0)
    return Options(layout, mask, left, right, scale, 0.0, p, deterministic=False)


def _elements(bias: Any, rows: tuple[int, ...], q: torch.Tensor) -> torch.Tensor:
    """What a bias that kernels do not know adds to the scores, (batch, heads, queries, keys).

    Raises:
        UnsupportedArgumentError: it is a bias of blocks, or no bias of xformers.
    """
    materialize = getattr(bias, "materialize", None)
    if materialize is not None and not hasattr(bias, "q_seqinfo"):
        elements: torch.Tensor = materialize(rows, dtype=q.dtype, device=q.device)
        return elements
    if isinstance(bias, torch.Tensor) and materialize is None:
        return bias[:, None] if bias.dim() == 3 else bias  # without heads, as query
    raise UnsupportedArgumentError(
        f"no kernel follows attn_bias of type {type(bias).__name__}", hint="Pass its elements, a tensor, instead."
    )


class _Keys(NamedTuple):
    """K and V of a call with blocks: packed, or with a page table; ``starts`` are those of the packed tokens."""

    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    table: torch.Tensor | None


def _blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, p: float, scale: float | None
) -> torch.Tensor:
    """O of packed queries, (1, queries, heads, head dim)."""
    of_queries, of_keys = bias.q_seqinfo, bias.k_seqinfo
    starts = _starts(of_queries.seqstart_py)
    ends = (of_queries.seqstart_py[-1], k.shape[1] if hasattr(bias, "block_tables") else of_keys.seqstart_py[-1])
    if (q.shape[0], q.shape[1], k.shape[0], k.shape[1]) != (1, ends[0], 1, ends[1]):
        raise ArgumentError(
            f"query is {tuple(q.shape)} and key is {tuple(k.shape)}, and {type(bias).__name__} is of {ends[0]} packed "
            f"queries and {ends[1]} packed keys: expected a batch of 1"
        )
    keys = _keys(k[0], v[0], bias, starts if of_keys is of_queries else None)
    if keys.table is not None and p:
        raise UnsupportedArgumentError(f"p={p} over padded or paged keys: kernels that read these have no dropout")
    options = _options("packed", bias, scale, p)
    o, _ = forward(q[0], keys.k, keys.v, None, None, starts, keys.starts, keys.table, rng_state(p, q.device), options)
    return o[None]


def _keys(k: torch.Tensor, v: torch.Tensor, bias: Any, starts: torch.Tensor | None) -> _Keys:
    """The keys of each block; ``starts`` if they are those of the queries."""
    info = bias.k_seqinfo
    if not hasattr(info, "seqlen_py"):
        return _Keys(k, v, _starts(info.seqstart_py) if starts is None else starts, None)
    lengths = torch.tensor([0, *info.seqlen_py], dtype=torch.int32).cumsum(0).to(torch.int32)
    if hasattr(info, "padding"):
        if hasattr(bias, "block_tables"):
            size, table = bias.page_size, bias.block_tables.to(k.device, torch.int32).contiguous()
        else:  # each block is a page
            size, table = info.padding, torch.arange(len(info.seqlen_py), dtype=torch.int32, device=k.device)[:, None]
        if not size or len(k) % size:
            raise ArgumentError(f"key has {len(k)} tokens, which pages of {size} tokens do not divide")
        return _Keys(k.unflatten(0, (-1, size)), v.unflatten(0, (-1, size)), lengths, table)
    spans = zip(info.seqstart_py, info.seqlen_py, strict=False)  # the last start is an end
    places = torch.cat([torch.arange(first, first + length) for first, length in spans]).to(k.device)
    return _Keys(k[places], v[places], lengths, None)


def _starts(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
