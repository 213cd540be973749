"""The functions of flash-attn whose Q, K and V are parts of one tensor."""

from __future__ import annotations

from typing import Any

import torch

from catalog.errors import TensorError
from catalog.torch.flash import Attended, Window, flash_attn_func, flash_attn_varlen_func


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """Like :func:`flash_attn_func`, of one tensor that holds Q, K and V: they are views of it, nothing is copied.

    Args:
        qkv: (batch, tokens, 3, heads, head dim).
        dropout_p: as there.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: as there.
        alibi_slopes: as there.
        deterministic: as there.
        return_attn_probs: as there.

    Raises:
        TensorError: as there, or the tensor has other axes.
        ProblemError, SelectionError, UsageError, DeviceError, BuildError, ToolchainError: as there.
    """
    q, k, v = _parts(qkv, 3, "(batch, tokens, 3, heads, head dim)")
    rest: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *rest)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """Like :func:`flash_attn_func`, of one tensor that holds K and V.

    Args:
        q: (batch, queries, heads, head dim).
        kv: (batch, keys, 2, heads of K and V, head dim).
        dropout_p: as there.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: as there.
        alibi_slopes: as there.
        deterministic: as there.
        return_attn_probs: as there.

    Raises:
        TensorError: as there, or ``kv`` has other axes.
        ProblemError, SelectionError, UsageError, DeviceError, BuildError, ToolchainError: as there.
    """
    k, v = _parts(kv, 2, "(batch, keys, 2, heads, head dim)")
    rest: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *rest)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """Like :func:`flash_attn_varlen_func`, of one tensor that holds Q, K and V of packed sequences.

    Args:
        qkv: (all tokens, 3, heads, head dim).
        cu_seqlens: int32, (batch + 1,): the first token of each sequence, and the end of the last one.
        max_seqlen: the longest sequence; the lengths themselves are what counts.
        dropout_p: as there.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: as there.
        alibi_slopes: as there.
        deterministic: as there.
        return_attn_probs: as there.

    Raises:
        TensorError: as there, or ``qkv`` has other axes.
        ProblemError, SelectionError, UsageError, DeviceError, BuildError, ToolchainError: as there.
    """
    q, k, v = _parts(qkv, 3, "(tokens, 3, heads, head dim)")
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    rest: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *lengths, *rest)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
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
) -> Attended:
    """Like :func:`flash_attn_varlen_func`, of one tensor that holds K and V of packed sequences.

    Args:
        q: (all queries, heads, head dim).
        kv: (all keys, 2, heads of K and V, head dim).
        cu_seqlens_q: as there.
        cu_seqlens_k: as there.
        max_seqlen_q: as there.
        max_seqlen_k: as there.
        dropout_p: as there.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: as there.
        alibi_slopes: as there.
        deterministic: as there.
        return_attn_probs: as there.

    Raises:
        TensorError: as there, or ``kv`` has other axes.
        ProblemError, SelectionError, UsageError, DeviceError, BuildError, ToolchainError: as there.
    """
    k, v = _parts(kv, 2, "(keys, 2, heads, head dim)")
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rest: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *lengths, *rest)


def _parts(tensor: torch.Tensor, count: int, axes: str) -> tuple[torch.Tensor, ...]:
    """The parts along the axis before heads and head dim.

    Raises:
        TensorError: that axis is not as long as there are parts.
    """
    rank = axes.count(",") + 1
    if tensor.dim() != rank or tensor.shape[-3] != count:
        raise TensorError(f"a tensor is {tuple(tensor.shape)}: expected {axes}")
    return tensor.unbind(-3)
