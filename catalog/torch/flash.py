"""Attention with the signatures of the package flash-attn: tokens before heads, causal masks from the bottom right."""

from __future__ import annotations

from operator import index

import torch

from catalog.errors import TensorError
from catalog.ops.attention.fields import MaskWord
from catalog.torch.calls import Layout, Options
from catalog.torch.inputs import rng_state
from catalog.torch.ops import forward

Window = tuple[int, int]
Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """Like ``flash_attn.flash_attn_func``, computed by the catalog's kernels; also on the CPU, and for float32.

    Differentiable once with respect to q, k and v. A row that sees no key yields zeros.

    Args:
        q: (batch, queries, heads, head dim), float32, float16 or bfloat16, with any strides.
        k: (batch, keys, heads of k, head dim), of the type of q; these heads divide those of q.
        v: (batch, keys, heads of k, head dim of the result), of the type of q.
        dropout_p: the probability that a weight is dropped, from 0 to 1, in steps of 1/256; 1 makes O zeros. The
            random numbers are the catalog's: PyTorch's generator gives their seed.
        softmax_scale: factor of the scores, positive; default 1 / sqrt(head dim).
        causal: query i sees the keys up to i + keys - queries.
        window_size: (left, right): query i sees the keys from i + keys - queries - left to i + keys - queries + right;
            -1 for no limit.
        softcap: c of c * tanh(score / c); 0: none. Without slopes, and with gradients without dropout.
        alibi_slopes: (heads,) or (batch, heads), float32: -slope * |i + keys - queries - j| is added to the scores.
        deterministic: whether gradients are bitwise identical in every run.
        return_attn_probs: whether to return more than O.

    Returns:
        O, (batch, queries, heads, head dim of v), of the type of q; with ``return_attn_probs`` (O, LSE, S_dmask). LSE
        is the log-sum-exp of the scores of each row, float32, (batch, heads, queries); it is differentiable once, as O
        is (in flash-attn it is not). S_dmask is None without dropout, otherwise the weights before dropout, of the type
        of q, (batch, heads, queries, keys), negative where dropped. PyTorch computes it, slowly: it is for tests.

    Raises:
        TensorError: shapes, types or devices of the tensors do not match, or no kernel accepts their type.
        ProblemError: an option is out of range.
        SelectionError: no kernel of the arch supports the call; the message says what is missing.
        UsageError: a gradient is wanted together with ``softcap`` and ``dropout_p``.
        DeviceError, BuildError, ToolchainError: as :meth:`catalog.runtime.plan.Plan.enqueue`.
    """
    slopes = slopes_of(alibi_slopes)
    options = options_of("bshd", k.shape[1], dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    state = rng_state(dropout_p, q.device)
    o, lse = forward(q, k, v, None, slopes, None, None, None, state, options)
    if not return_attn_probs:
        return o
    if state is None:
        return o, lse, None
    from catalog.torch.weights import signed_weights  # imports Dynamo, which takes more than a second

    return o, lse, signed_weights(q, k, slopes, None, state, options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Attended:
    """Like ``flash_attn.flash_attn_varlen_func``, computed by the catalog's kernels: for packed sequences.

    Arguments and errors are those of :func:`flash_attn_func`, with these differences.

    Args:
        q: (all queries, heads, head dim).
        k: (all keys, heads of k, head dim), or with ``block_table`` pages, (pages, page size, heads of k, head dim).
        v: as k, with the head dim of the result.
        cu_seqlens_q: int32, (batch + 1,): the first query of each sequence, and the end of the last one. The lengths
            are read on the CPU: of a GPU's tensor that waits for the GPU, a tensor on the CPU may be given instead.
        cu_seqlens_k: int32, (batch + 1,), likewise of the keys; with ``block_table`` its differences are the lengths.
        max_seqlen_q: the longest sequence; the lengths themselves are what counts.
        max_seqlen_k: likewise.
        dropout_p: as there, but 0 with ``block_table``.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: as there.
        alibi_slopes: as there.
        deterministic: as there.
        return_attn_probs: as there.
        block_table: int32, (batch, pages of the longest sequence): the pages of each sequence, in order. Without
            gradients.

    Returns:
        O, (all queries, heads, head dim of v), of the type of q; with ``return_attn_probs`` (O, LSE, S_dmask): LSE is
        float32, (heads, all queries), and S_dmask is padded with zeros to the longest sequence.

    Raises:
        TensorError: as there, or the starts are not ascending, or do not end with the last token.
        UsageError: a gradient is wanted together with ``softcap`` and ``dropout_p``; or, by backward, together with
            ``block_table``.
        ProblemError, SelectionError, DeviceError, BuildError, ToolchainError: as there.
    """
    if block_table is not None and dropout_p:
        raise TensorError("dropout_p cannot be combined with block_table: kernels over a paged cache have no dropout")
    slopes = slopes_of(alibi_slopes)
    options = options_of("packed", max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    state = rng_state(dropout_p, q.device)
    o, lse = forward(q, k, v, None, slopes, cu_seqlens_q, cu_seqlens_k, block_table, state, options)
    if not return_attn_probs:
        return o
    starts = cu_seqlens_q, cu_seqlens_k
    if state is None:
        return o, lse, None
    from catalog.torch.weights import signed_weights  # imports Dynamo, which takes more than a second

    return o, lse, signed_weights(q, k, slopes, starts, state, options)


def slopes_of(alibi_slopes: torch.Tensor | None) -> torch.Tensor | None:
    """The slopes as (1 or batch, heads)."""
    return alibi_slopes[None] if alibi_slopes is not None and alibi_slopes.dim() == 1 else alibi_slopes


def options_of(
    layout: Layout,
    keys: int,
    dropout: float,
    scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    deterministic: bool,
) -> Options:
    """The options of a call whose queries see up to ``keys`` keys."""
    left, right = map(index, window_size)  # also of tensors
    if causal:
        right = 0
    # All windows that hide nothing become the same one, so no additional kernel is compiled for them.
    left = -1 if left < 0 or left >= keys else left
    right = -1 if right < 0 else right
    mask: MaskWord = "no" if left < 0 and right < 0 else "bottom_right"
    return Options(layout, mask, left, right, scale, softcap, dropout, deterministic)
