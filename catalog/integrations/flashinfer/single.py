"""Attention of one sequence, with FlashInfer's interface."""

from __future__ import annotations

import torch

from catalog.integrations.flashinfer.arguments import (
    Attended,
    KvLayout,
    converted,
    options_with,
    refuse,
    refuse_gradient,
    results,
    scale_of,
    tokens_first,
)
from catalog.integrations.flashinfer.positions import encoding_of, places, rotated
from catalog.integrations.flashinfer.scores import Batch, added_to, mask_of
from catalog.torch.cached import KvCache, attend
from catalog.torch.ops import forward


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
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Attended:
    """Like ``flashinfer.single_prefill_with_kv_cache``: the queries of one sequence over its K and V.

    Args:
        q: (queries, heads, head dim), float32, float16 or bfloat16.
        k: (keys, heads of k, head dim) in NHD, (heads of k, keys, head dim) in HND. If it has another type than q, such
            as float8_e4m3fn, it is converted.
        v: likewise, with the head dim of the result.
        scale_q: not supported; so are ``scale_k`` and ``scale_v``.
        scale_k: see there.
        scale_v: see there.
        o_dtype: the type of O; default: that of q.
        custom_mask: (queries, keys), bool, True for keys that are seen; then ``causal`` has no effect.
        packed_custom_mask: uint8, the same mask, eight elements a byte, row by row, the lowest bit first.
        causal: query i of n sees the keys up to the i-th of the last n.
        kv_layout: NHD or HND.
        pos_encoding_mode: NONE; ROPE_LLAMA: q and k are rotated by their positions, the queries' being the last ones,
            in float32, into copies; ALIBI: slope * (key - query) is added to the scores, both counted from the first,
            with the slopes of the ALiBi paper. With ``causal``, or for one query, kernels compute ALiBi; else it is
            a tensor of all scores, in the type of q.
        use_fp16_qk_reduction: no effect; sums are float32.
        sm_scale: factor of the scores, positive; default 1 / sqrt(head dim).
        window_left: keys that a query sees to the left of its own; -1 for all.
        logits_soft_cap: c of c * tanh(score / c); None or 0: none. Without ``custom_mask`` and ALIBI.
        rope_scale: positions are divided by it; default 1.
        rope_theta: base of the wave lengths; default 10000.
        backend: no effect.
        return_lse: whether to return (O, LSE).
        kv_cache_sf: not supported.
        k_scale: another factor of the scores.
        v_scale: a factor of O.

    Returns:
        O, (queries, heads, head dim of v), of the type of q; LSE is (queries, heads).

    Raises:
        UnsupportedArgumentError: no kernel follows an argument.
        ArgumentError: there is no such ``kv_layout`` or ``pos_encoding_mode``, or a mask has too many or too few
            elements.
        TensorError: shapes, types or devices of the tensors do not match, or no kernel accepts their type.
        ProblemError: an option is out of range.
        SelectionError: no kernel of the arch supports the call; the message says what is missing.
        DeviceError, BuildError, ToolchainError: as :meth:`catalog.runtime.plan.Plan.enqueue`.
    """
    refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    encoding = encoding_of(pos_encoding_mode, rope_scale, rope_theta)
    k, v = (converted(tokens_first(tensor, kv_layout), q.dtype) for tensor in (k, v))
    queries, keys = q.shape[:1], k.shape[:1]
    if encoding.rotates:
        q, k = rotated(q, places(queries, keys), encoding), rotated(k, places(keys), encoding)
    masks = mask_of(custom_mask, packed_custom_mask, queries, keys)
    scale = scale_of(sm_scale, q.shape[-1], k_scale)
    options = options_with("bshd", k.shape[0], scale, causal and masks is None, window_left, logits_soft_cap)
    batch = Batch(q.shape[1], queries, keys, k.shape[0])
    added = added_to(batch, masks, encoding.biases, options, q.dtype, q.device)
    bias = None if added.bias is None else added.bias[None]
    o, lse = forward(q[None], k[None], v[None], bias, added.slopes, None, None, None, None, options)
    return results(o[0], added.lse(lse[0].T), return_lse, v_scale, dtype=o_dtype)


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
    encoding = encoding_of(pos_encoding_mode, rope_scale, rope_theta)
    refuse_gradient(q, k, v)
    k, v = (converted(tokens_first(tensor, kv_layout), q.dtype) for tensor in (k, v))
    keys = k.shape[0]
    if encoding.rotates:
        q, k = rotated(q[None], torch.tensor([keys - 1]), encoding)[0], rotated(k, torch.arange(keys), encoding)
    scale = scale_of(sm_scale, q.shape[-1], q_scale, k_scale)
    options = options_with("bshd", keys, scale, False, window_left, logits_soft_cap)
    added = added_to(Batch(q.shape[0], (1,), (keys,), keys), None, encoding.biases, options, q.dtype, q.device)
    lengths = torch.full((1,), keys, dtype=torch.int32, device=q.device)
    o, lse = attend(q[None, None], KvCache(k[None], v[None], None), lengths, options, added.slopes)
    return results(o[0, 0], added.lse(lse[0].T)[0], return_lse, v_scale)
