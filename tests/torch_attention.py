"""The same problems by PyTorch in float64: scaled_dot_product_attention and its autograd, a sequence at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from host_problems import Signature

from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.sequences import Sequence, sequences
from catalog.ops.attention.traits import Bias, Dtype
from catalog.runtime.tensors import Array


def expresses(signature: Signature) -> bool:
    """Whether PyTorch has the features: no soft cap, dropout, sinks or skipped sequences.

    Of gradients fp32 ones only: PyTorch takes the O that it has computed, a kernel the O that it is given, rounded.
    """
    traits = signature.traits
    if signature.op == "appendkv" or (signature.op == "bwd" and traits["dtype"] != Dtype.FP32.value):
        return False
    return not any(traits[name] for name in ("logits", "dropout", "sink", "skip_min_seqlen_q"))


def attention(torch: Any, problem: Problem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """O, or the gradients, where every query of a sequence sees a key; NaN elsewhere."""
    names = ("dq", "dk", "dv") if problem.op == "bwd" else ("o",)
    results: dict[str, Array] = {name: np.full(problem.shapes[name], np.nan) for name in names}
    for sequence in sequences(problem, inputs):
        q, k, v = (_stack(torch, sequence, name) for name in ("q", "k", "v"))
        mask = _mask(torch, sequence)
        if not sequence.seqlen_k or not bool(torch.isfinite(mask).any(-1).all()):
            continue
        tensors = [tensor.requires_grad_() for tensor in (q, k, v)]
        o = torch.nn.functional.scaled_dot_product_attention(
            *(tensor[None] for tensor in tensors), attn_mask=mask[None], scale=problem.softmax_scale, enable_gqa=True
        )[0]
        if problem.op != "bwd":
            sequence.tokens(results["o"], "q")[...] = o.detach().numpy()
            continue
        outputs, grads = [o], [sequence.tokens(inputs["do"], "q")]
        if problem.dlse:
            keys = k.repeat_interleave(problem.ratio, 0)
            outputs.append(torch.logsumexp(problem.softmax_scale * (q @ keys.mT) + mask, -1))
            grads.append(sequence.rows(inputs["dlse"]))
        doubles = [torch.from_numpy(np.ascontiguousarray(grad.astype(np.float64))) for grad in grads]
        for name, gradient in zip(names, torch.autograd.grad(outputs, tensors, doubles), strict=True):
            sequence.tokens(results[name], "q" if name == "dq" else "k")[...] = gradient.numpy()
    return results


def _stack(torch: Any, sequence: Sequence, name: str) -> Any:
    """(nhead, seqlen, hdim): K and V once for the query heads that share them."""
    heads = list(sequence.heads())
    step = 1 if name == "q" else sequence.problem.ratio
    return torch.from_numpy(np.stack([getattr(head, name) for head in heads[::step]]))


def _mask(torch: Any, sequence: Sequence) -> Any:
    """(nhead_q, seqlen_q, seqlen_k): the bias, -inf where a key is hidden."""
    problem, shape = sequence.problem, (sequence.seqlen_q, sequence.seqlen_k)
    diagonal = shape[1] - shape[0] if problem.mask == "bottom_right" else 0
    visible = torch.ones(shape, dtype=torch.bool)
    if problem.window_right >= 0:
        visible = visible.tril(diagonal + problem.window_right)
    if problem.window_left >= 0:
        visible = visible.triu(diagonal - problem.window_left)
    if problem.block_masked:
        named = torch.from_numpy(sequence.inputs["block_mask"][sequence.index] != 0)
        expanded = named.repeat_interleave(problem.block_mask_q, 1).repeat_interleave(problem.block_mask_kv, 2)
        visible = visible & expanded[:, : shape[0], : shape[1]]
    mask = torch.zeros(problem.nhead_q, *shape, dtype=torch.float64)
    if problem.bias is not Bias.NO:
        rows = slice(0, shape[0])
        biases = [np.broadcast_to(head.bias(rows), shape) for head in sequence.heads()]
        mask = torch.from_numpy(np.array(biases).reshape(mask.shape))
    return mask.masked_fill(~visible, -torch.inf)
