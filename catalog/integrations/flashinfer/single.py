"""Attention of one sequence, with FlashInfer's interface."""

from __future__ import annotations

import torch

from catalog.integrations.flashinfer.arguments import (
    Attended,
    KvLayout,
    options_with,
    refuse,
    refuse_encoding,
    refuse_gradient,
    results,
    same_type,
    scale_of,
    tokens_first,
)
from catalog.torch.cached import KvCache, attend
from catalog.torch.ops import forward
from catalog.torch.sdpa import bias_of


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: KvLayout = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Attended:
    """Like ``flashinfer.single_prefill_with_kv_cache``: the queries of one sequence over its K and V.

    Args:
        q: (queries, heads, head dim), float32, float16 or bfloat16.
        k: (keys, heads of k, head dim) in NHD, (heads of k, keys, head dim) in HND.
        v: likewise, with the head dim of the result.
        scale_q: not supported; so are ``scale_k`` and ``scale_v``.
        scale_k: see there.
        scale_v: see there.
        o_dtype: the type of q.
        custom_mask: (queries, keys), bool, True for keys that are seen; then ``causal`` has no effect.
        packed_custom_mask: not supported.
        causal: query i of n sees the keys up to the i-th of the last n.
        kv_layout: NHD or HND.
        pos_encoding_mode: only NONE.
        use_fp16_qk_reduction: no effect; sums are float32.
        sm_scale: factor of the scores, positive; default 1 / sqrt(head dim).
        window_left: keys that a query sees to the left of its own; -1 for all.
        logits_soft_cap: c of c * tanh(score / c); None or 0: none. Without ``custom_mask``.
        rope_scale: no effect without a position encoding.
        rope_theta: likewise.
        backend: no effect.
        return_lse: whether to return (O, LSE).

    Returns:
        O, (queries, heads, head dim of v), of the type of q; LSE is (queries, heads).

    Raises:
        UnsupportedArgumentError: no kernel follows an argument.
        ArgumentError: ``kv_layout`` is neither NHD nor HND.
        TensorError: shapes, types or devices of the tensors do not match, or no kernel accepts their type.
        ProblemError: an option is out of range.
        SelectionError: no kernel of the arch supports the call; the message says what is missing.
        DeviceError, BuildError, ToolchainError: as :meth:`catalog.runtime.plan.Plan.enqueue`.
    """
    refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, packed_custom_mask=packed_custom_mask)
    refuse_encoding(pos_encoding_mode)
    same_type("o_dtype", o_dtype, q.dtype)
    k, v = (tokens_first(tensor, kv_layout) for tensor in (k, v))
    seen_by_mask = custom_mask is not None
    options = options_with("bshd", k.shape[0], sm_scale, causal and not seen_by_mask, window_left, logits_soft_cap)
    bias = None
    if custom_mask is not None:
        bias = bias_of(custom_mask.bool(), q.dtype, (1, q.shape[1], q.shape[0], k.shape[0]))
    o, lse = forward(q[None], k[None], v[None], bias, None, None, None, None, None, options)
    return results(o[0], lse[0].T, return_lse)


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: KvLayout = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Attended:
    """Like ``flashinfer.single_decode_with_kv_cache``: one query over the K and V of its sequence.

    The keys are divided among cores or multiprocessors. Arguments and errors are those of
    :func:`single_prefill_with_kv_cache`, with these differences.

    Args:
        q: (heads, head dim).
        k: as there.
        v: as there.
        kv_layout: as there.
        pos_encoding_mode: as there.
        use_tensor_cores: no effect.
        q_scale: another factor of the scores.
        k_scale: likewise.
        v_scale: a factor of O.
        window_left: as there.
        logits_soft_cap: as there.
        sm_scale: as there.
        rope_scale: as there.
        rope_theta: as there.
        return_lse: as there.

    Returns:
        O, (heads, head dim of v), of the type of q; LSE is (heads,).

    Raises:
        UsageError: a gradient is wanted.
    """
    refuse_encoding(pos_encoding_mode)
    refuse_gradient(q, k, v)
    k, v = (tokens_first(tensor, kv_layout) for tensor in (k, v))
    scale = scale_of(sm_scale, q.shape[-1], q_scale, k_scale)
    options = options_with("bshd", k.shape[0], scale, False, window_left, logits_soft_cap)
    lengths = torch.full((1,), k.shape[0], dtype=torch.int32, device=q.device)
    o, lse = attend(q[None, None], KvCache(k[None], v[None], None), lengths, options)
    return results(o[0, 0], lse[0, :, 0], return_lse, v_scale)
