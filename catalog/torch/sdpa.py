"""Attention with the signature of :func:`torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import math

import torch

from catalog.errors import ArgumentError, TensorError
from catalog.ops.attention.fields import MaskWord
from catalog.settings import settings
from catalog.torch.calls import Options
from catalog.torch.inputs import autocast_all, rng_state
from catalog.torch.ops import elsewhere, forward, forward_heads_first


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Like :func:`torch.nn.functional.scaled_dot_product_attention`, computed by the catalog's kernels.

    Differentiable once with respect to query, key, value and a float mask. A row that sees no key yields zeros. Under
    :class:`torch.autocast` tensors are cast as PyTorch's own function casts them. Tensors may have any strides; only
    tensors with a strided head dim are copied.

    With the setting ``CATALOG_ALLOW_FOREIGN``, calls without gradient, dropout and ``attn_mask`` go to another
    project's function where tuning found it faster, PyTorch's own among them.

    Args:
        query: (..., heads, queries, head dim), float32, float16 or bfloat16. Leading axes are optional, and broadcast.
        key: (..., heads, keys, head dim), of the type of query.
        value: (..., heads, keys, head dim of the result), of the type of query.
        attn_mask: what broadcasts to (..., heads, queries, keys): bool, True where a key is seen, or of the type of
            query, added to the scores; or a :class:`torch.nn.attention.bias.CausalBias`.
        dropout_p: the probability that a weight is dropped, from 0 to 1, in steps of 1/256; 1 makes the result zeros.
            The random numbers are the catalog's: PyTorch's generator gives their seed.
        is_causal: query i sees the keys up to i, of those that ``attn_mask`` shows.
        scale: factor of the scores; default 1 / sqrt(head dim).
        enable_gqa: key and value may have fewer heads than query, by a divisor.

    Returns:
        (..., heads, queries, head dim of value), of the type of query. In memory tokens come before heads where they
        do in query, else it is dense.

    Raises:
        TensorError: shapes, types or devices of the tensors do not match, or no kernel accepts their type.
        ProblemError: an option is out of range.
        SelectionError: no kernel of the arch supports the call; the message says what is missing.
        ArgumentError: ``is_causal`` is given together with a ``CausalBias``.
        DeviceError, BuildError, ToolchainError: as :meth:`catalog.runtime.plan.Plan.enqueue`.
    """
    mask, attn_mask = _mask_of(attn_mask, is_causal)
    query, key, value, attn_mask = autocast_all(query, key, value, attn_mask)
    query, key, value, batch = four_axes(query, key, value, enable_gqa)
    bias = None
    if attn_mask is not None:
        rows = (*batch, query.shape[2], key.shape[2])
        bias = bias_of(attn_mask, query.dtype, rows).reshape(*query.shape[:2], *rows[-2:])
    query, scale = with_positive_scale(query, scale)
    tokens_first = has_tokens_first(query)
    options = Options("bshd" if tokens_first else "bhsd", mask, -1, 0, scale, 0.0, dropout_p, False)
    # First: torch.compile cannot trace the reading of settings.
    foreign = not torch.compiler.is_compiling() and settings().allow_foreign and bias is None and not dropout_p
    o = None
    if foreign:
        tensors = (query, key, value)
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors) if tokens_first else tensors
        o = elsewhere(q, k, v, options)
    if o is None:
        state = rng_state(dropout_p, query.device)
        if tokens_first:
            o, _ = forward_heads_first(query, key, value, bias, state, options)
        else:
            o, _ = forward(query, key, value, bias, None, None, None, None, state, options)
    if tokens_first:
        o = o.transpose(1, 2)
    return o if len(batch) == 2 else o.reshape(*batch, *o.shape[2:])


def with_positive_scale(query: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float | None]:
    """A query and a scale with the same products, of which kernels know the scale."""
    if scale is not None and scale <= 0:
        return (-query, -scale) if scale < 0 else (query * 0, 1.0)
    return query, scale


def has_tokens_first(query: torch.Tensor) -> bool:
    """Whether tokens come before heads in Q's memory, and so in O's: merging the heads into one axis copies nothing."""
    return query.shape[2] > 1 and query.stride(1) < query.stride(2)


def _mask_of(attn_mask: torch.Tensor | None, is_causal: bool) -> tuple[MaskWord, torch.Tensor | None]:
    """The mask that kernels know, and the elementwise one beside it."""
    if attn_mask is not None and type(attn_mask) is not torch.Tensor:
        from torch.nn.attention.bias import CausalBias, CausalVariant  # imports Dynamo, which takes more than a second

        if isinstance(attn_mask, CausalBias):
            if is_causal:
                raise ArgumentError("is_causal cannot be combined with a CausalBias", hint="Omit one of them.")
            return ("top_left" if attn_mask.variant is CausalVariant.UPPER_LEFT else "bottom_right"), None
    return ("top_left" if is_causal else "no"), attn_mask


def four_axes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The tensors as (batch, heads, tokens, head dim), views where strides allow; and all axes of the result but two.

    Raises:
        TensorError: their shapes do not go together.
    """
    of_q, of_k, of_v = shapes = (query.shape, key.shape, value.shape)
    same_batch = len(of_q) == len(of_k) == len(of_v) == 4 and of_q[0] == of_k[0] == of_v[0]
    if same_batch and of_k[1] == of_v[1] and (of_q[1] == of_k[1] or enable_gqa):
        if of_k[1] == 0 or of_q[1] % of_k[1]:
            raise _unshapely(query, key, value, "the number of heads of key must divide that of query")
        return query, key, value, (of_q[0], of_q[1])
    tensors = (query, key, value)
    heads = [shape[-3] if len(shape) > 2 else 1 for shape in shapes]
    if min(query.dim(), key.dim(), value.dim()) < (3 if enable_gqa else 2):
        raise _unshapely(*tensors, "expected (..., heads, tokens, head dim)")
    if enable_gqa and (heads[1] != heads[2] or heads[1] == 0 or heads[0] % heads[1]):
        raise _unshapely(*tensors, "key and value must have as many heads, which divide those of query")
    try:
        leading = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
        most = torch.broadcast_shapes(*((count,) for count in heads))[0] if not enable_gqa else heads[0]
    except RuntimeError:
        raise _unshapely(
            *tensors, "the axes before the last two do not broadcast (heads are grouped by enable_gqa)"
        ) from None
    flat = math.prod(leading)
    shaped = [
        tensor.expand(*leading, count if enable_gqa else most, *tensor.shape[-2:]).reshape(
            flat, count if enable_gqa else most, *tensor.shape[-2:]
        )
        for tensor, count in zip(tensors, heads, strict=True)
    ]
    has_heads = max(query.dim(), key.dim(), value.dim()) > 2
    return shaped[0], shaped[1], shaped[2], (*leading, most) if has_heads else ()


def _unshapely(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, why: str) -> TensorError:
    shapes = ", ".join(
        f"{name} {tuple(tensor.shape)}" for name, tensor in (("query", query), ("key", key), ("value", value))
    )
    return TensorError(f"{shapes}: {why}")


def bias_of(attn_mask: torch.Tensor, dtype: torch.dtype, rows: tuple[int, ...]) -> torch.Tensor:
    """What a mask adds to the scores, expanded to the axes ``rows``, its innermost axis dense.

    Raises:
        TensorError: the mask is neither bool nor of the type ``dtype``, or does not broadcast.
    """
    if attn_mask.dtype == torch.bool:
        seen = torch.zeros(attn_mask.shape, dtype=dtype, device=attn_mask.device)
        attn_mask = seen.masked_fill(attn_mask.logical_not(), -torch.inf)
    elif attn_mask.dtype != dtype:
        raise TensorError(
            f"attn_mask is {attn_mask.dtype}: expected torch.bool, or {dtype} as query is",
            hint="Cast it: attn_mask.to(query.dtype). Values that are too large become infinite.",
        )
    try:
        if attn_mask.dim() == 0 or attn_mask.shape[-1] != rows[-1]:
            attn_mask = attn_mask.expand(*attn_mask.shape[:-1], rows[-1])
        return attn_mask.contiguous().expand(rows)
    except RuntimeError:
        shape = tuple(attn_mask.shape)
        raise TensorError(f"attn_mask {shape} does not broadcast to (..., heads, queries, keys), {rows}") from None
