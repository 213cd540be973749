"""Attention to some blocks of keys: ``block_sparse_attention``, and its operators.

``catalog::block_sparse`` and its gradient, ``catalog::block_sparse_bwd``, take Q, K and V in one of the layouts of
:class:`~catalog.torch.calls.Options`, and the bitmap as uint8, (batch, query heads, blocks of queries, blocks of keys).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import library
from torch.nn.functional import pad

from catalog.errors import TensorError, UsageError
from catalog.ops.attention.problem import Problem
from catalog.torch import watchers
from catalog.torch.calls import HDIM_STEP, Layout, Shape, answer, arch_of, dtype_of, gradient_of, on_nvidia, sizes_of
from catalog.torch.dispatch import below, differentiable, last_derivative
from catalog.torch.inputs import autocast_all
from catalog.torch.ops import BACKWARD
from catalog.torch.sdpa import four_axes, has_tokens_first, with_positive_scale

_OPTIONS = "int block_q, int block_kv, str layout, bool causal, float? scale"
_library = library.Library("catalog", "FRAGMENT")
_library.define(
    f"block_sparse(Tensor q, Tensor k, Tensor v, Tensor block_mask, {_OPTIONS}) -> (Tensor o, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "block_sparse_bwd(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor block_mask, "
    f"{_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: torch.Tensor,
    *,
    block_size: tuple[int, int] = (128, 128),
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention of queries to the blocks of keys that ``block_mask`` shows. The work of other blocks is skipped.

    What :func:`torch.nn.functional.scaled_dot_product_attention` computes with ``block_mask`` expanded to queries and
    keys. Differentiable once with respect to query, key and value. A row that sees no key yields zeros. Under
    :class:`torch.autocast` tensors are cast as PyTorch's own function casts them. Tensors may have any strides; only
    tensors with a strided last axis are copied.

    Args:
        query: (..., heads, queries, head dim), float32, float16 or bfloat16. Leading axes are optional, and broadcast.
        key: (..., heads, keys, head dim), of the type of query.
        value: (..., heads, keys, head dim of the result), of the type of query.
        block_mask: bool or uint8, what broadcasts to (..., heads, blocks of queries, blocks of keys): a block that is
            False or 0 is not seen. Of a ``BlockMask`` of FlexAttention, all blocks full, it is ``to_dense() != 0``.
        block_size: the queries and keys of a block. On a CPU they are multiples of 16 and 32, on a GPU of a kernel's
            tile: (64, 64) and (128, 128) have kernels for all head dims.
        causal: query i sees the keys up to i, of those that ``block_mask`` shows.
        scale: factor of the scores; default 1 / sqrt(head dim).
        enable_gqa: key and value may have fewer heads than query, by a divisor.

    Returns:
        (..., heads, queries, head dim of value), of the type of query. In memory tokens come before heads where they
        do in query, else it is dense.

    Raises:
        TensorError: shapes, types or devices of the tensors do not match, or no kernel accepts their type.
        UsageError: a block has no queries or keys.
        ProblemError: an option is out of range.
        SelectionError: no kernel of the arch supports the call; the message says what is missing.
        DeviceError, BuildError, ToolchainError: as :meth:`catalog.runtime.plan.Plan.enqueue`.
    """
    if len(block_size) != 2 or min(block_size) < 1:
        raise UsageError(f"block_size is {block_size}: expected the queries and the keys of a block, each at least 1")
    query, key, value = autocast_all(query, key, value)
    query, key, value, batch = four_axes(query, key, value, enable_gqa)
    blocks = tuple(-(-tensor.shape[2] // size) for tensor, size in zip((query, key), block_size, strict=True))
    bitmap = _bitmap_of(block_mask, (*batch, *blocks)).reshape(*query.shape[:2], *blocks)
    hdim_q, hdim_v = query.shape[-1], value.shape[-1]
    if (hdim_q % HDIM_STEP or hdim_v % HDIM_STEP) and on_nvidia(query):
        query, key, value = (pad(tensor, (0, -tensor.shape[-1] % HDIM_STEP)) for tensor in (query, key, value))
        scale = 1 / math.sqrt(hdim_q) if scale is None else scale
    query, scale = with_positive_scale(query, scale)
    tokens_first = has_tokens_first(query)
    layout: Layout = "bshd" if tokens_first else "bhsd"
    if tokens_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    o = _forward(query, key, value, bitmap, *block_size, layout, causal, scale)[..., :hdim_v]
    if tokens_first:
        o = o.transpose(1, 2)
    return o if len(batch) == 2 else o.reshape(*batch, *o.shape[2:])


def _bitmap_of(block_mask: torch.Tensor, blocks: tuple[int, ...]) -> torch.Tensor:
    """The bitmap that kernels read, uint8, expanded to the axes ``blocks``.

    Raises:
        TensorError: it is neither bool nor uint8, or does not broadcast.
    """
    if block_mask.dtype not in (torch.bool, torch.uint8):
        raise TensorError(
            f"block_mask is {block_mask.dtype}: expected torch.bool or torch.uint8",
            hint="Say which blocks are seen: block_mask != 0.",
        )
    try:
        return block_mask.contiguous().view(torch.uint8).expand(blocks)
    except RuntimeError:
        raise TensorError(
            f"block_mask {tuple(block_mask.shape)} does not broadcast to (..., heads, blocks of queries, blocks of "
            f"keys), {blocks}"
        ) from None


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: torch.Tensor, *options: Any
) -> torch.Tensor:
    """O, by PyTorch's dispatcher only if something sees the call."""
    tensors = (q, k, v, block_mask)
    results: tuple[torch.Tensor, torch.Tensor]
    if not watchers.unwatched(tensors):
        results = torch.ops.catalog.block_sparse.default(*tensors, *options)
    elif watchers.has_gradient(tensors):
        results = _BlockSparse.apply(None, *tensors, *options)  # type: ignore[no-untyped-call]
    else:
        results = _run(*tensors, *options)
    return results[0]


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    problem = _problem_of(q.dtype, (q.shape, k.shape, v.shape), *options)
    results = answer(problem, arch_of(q.device), {"q": q, "k": k, "v": v, "block_mask": block_mask})
    return results["o"], results["lse"]


def _run_backward(
    grad_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    block_mask: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    forward = _problem_of(q.dtype, (q.shape, k.shape, v.shape), *options)
    problem = gradient_of(forward, dbias=False, dlse=False, deterministic=False)
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": grad_o, "block_mask": block_mask}
    results = answer(problem, arch_of(q.device), tensors)
    return results["dq"], results["dk"], results["dv"]


@lru_cache(maxsize=16_384)
def _problem_of(
    dtype: torch.dtype,
    shapes: tuple[Shape, Shape, Shape],
    block_q: int,
    block_kv: int,
    layout: Layout,
    causal: bool,
    scale: float | None,
) -> Problem:
    """The problem of a forward; from ``block_q`` on, the options of both operators in their order."""
    of_q, of_k, of_v = (sizes_of(shape, layout) for shape in shapes)
    return Problem(
        dtype=dtype_of(dtype),
        layout=layout,
        batch=of_q.batch,
        nhead_q=of_q.heads,
        nhead_k=of_k.heads,
        seqlen_q=of_q.tokens,
        seqlen_k=of_k.tokens,
        hdim_q=of_q.hdim,
        hdim_v=of_v.hdim,
        mask="top_left" if causal else "no",
        lse=True,
        scale=scale,
        block_mask_q=block_q,
        block_mask_kv=block_kv,
    )


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = sizes_of(q.shape, rest[3])
    lse = q.new_empty((sizes.batch, sizes.heads, sizes.tokens), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def _fake_backward(_: torch.Tensor, *tensors: Any) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors[:3])


class _BlockSparse(torch.autograd.Function):
    """The operator with its gradient; ``keys`` are the dispatcher's, None if it was bypassed."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = _run(*inputs) if keys is None else below(torch.ops.catalog.block_sparse.default, keys, inputs)
        ctx.save_for_backward(*inputs[:3], o, lse, inputs[3])
        ctx.options = inputs[4:]
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, grad_o: torch.Tensor, _: Any) -> tuple[Any, ...]:
        tensors = (grad_o, *ctx.saved_tensors)
        o = ctx.saved_tensors[3]
        bypasses = not torch.is_grad_enabled() and watchers.unwatched(tensors) and watchers.alike(grad_o, o)
        computed: Any = _run_backward if bypasses else torch.ops.catalog.block_sparse_bwd.default
        return None, *computed(*tensors, *ctx.options), None, *[None] * len(ctx.options)


_GRADIENT = last_derivative(torch.ops.catalog.block_sparse_bwd.default, "block-sparse attention", BACKWARD)

for _name, _kernel, _shapes, _function in (
    ("block_sparse", _run, _fake, _BlockSparse),
    ("block_sparse_bwd", _run_backward, _fake_backward, _GRADIENT),
):
    _op = getattr(torch.ops.catalog, _name).default
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    _library.impl(
        _name, differentiable(_function, _op, "block-sparse attention", BACKWARD), "Autograd", with_keyset=True
    )
    library.register_fake(f"catalog::{_name}", _shapes, lib=_library)
