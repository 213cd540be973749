"""Inputs for tests of functions for PyTorch, the same computed in float64, and how far results may be apart.

In float32 they may be 2e-5 apart, of inputs that are standard normal; in bfloat16 2 % of their size and 0.02.
"""

from __future__ import annotations

import math

from conftest import missing

try:
    import torch
except ImportError:
    missing("torch")

from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2e-2, 2e-2)}


def close(actual, expected, dtype=torch.float32):
    relative, absolute = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=relative, atol=absolute, check_dtype=False)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaves(*shapes, dtype=torch.float32):
    return [normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def check_gradients(function, expected, tensors):
    """Results, first and second derivatives of a function, and of another one in float64."""
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    ours, theirs = function(*tensors), expected(*doubles)
    assert ours.shape == theirs.shape
    assert ours.dtype == tensors[0].dtype
    close(ours, theirs, ours.dtype)
    grads = [
        torch.autograd.grad((c * c).sum(), of, create_graph=True) for c, of in ((ours, tensors), (theirs, doubles))
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-3, atol=2e-3 * other.abs().max().item())
    seconds = [
        torch.autograd.grad(sum(grad.sum() for grad in first), of)
        for first, of in zip(grads, (tensors, doubles), strict=True)
    ]
    for one, other in zip(*seconds, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-3, atol=2e-3 * other.abs().max().item())


def attention64(*doubles, **options):
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.double()
    with sdpa_kernel(SDPBackend.MATH):  # the other one gives NaN for a negative scale under a causal mask
        return functional.scaled_dot_product_attention(*doubles, **options)


def bottom_right(queries, keys, left=-1, right=-1):
    """Which keys flash-attn's windows show."""
    at = torch.arange(queries)[:, None] + keys - queries
    other = torch.arange(keys)
    return ((left < 0) | (other >= at - left)) & ((right < 0) | (other <= at + right))


def flash64(q, k, v, seen, scores=lambda scores: scores):
    """O and LSE in float64, of tensors with tokens before heads."""
    ratio = q.shape[2] // k.shape[2]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    scores = scores(q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), torch.logsumexp(scores, -1)


STARTS_Q, STARTS_K = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 5, 5, 16], [0, 7, 11, 31]))
