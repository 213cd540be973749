"""The functions of flash-attn by the catalog's kernels, against the same in float64.

Head dims are below 32, as in test_torch.py: few kernels are compiled.
"""

from __future__ import annotations

import math

import pytest
from conftest import missing

from catalog.errors import TensorError, UsageError

try:
    import torch
except ImportError:
    missing("torch")

from torch_cases import STARTS_K, STARTS_Q, bottom_right, close, flash64, normal

from catalog.torch import flash_attn_func, flash_attn_varlen_func


@pytest.mark.parametrize("queries", [5, 17, 24])
@pytest.mark.parametrize(("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (True, (4, 9)), (False, (3, 2))])
def test_flash_attention(queries, causal, window):
    q, k, v = normal(2, queries, 4, 8), normal(2, 17, 2, 8, seed=1), normal(2, 17, 2, 16, seed=2)
    o, lse, nothing = flash_attn_func(q, k, v, causal=causal, window_size=window, return_attn_probs=True)
    expected, expected_lse = flash64(q, k, v, bottom_right(queries, 17, window[0], 0 if causal else window[1]))
    assert nothing is None
    assert o.is_contiguous()
    close(o, expected)
    close(lse, expected_lse)
    assert torch.equal(flash_attn_func(q, k, v, causal=causal, window_size=window), o)


@pytest.mark.parametrize("of", [("o",), ("lse",), ("o", "lse")], ids=" and ".join)
@pytest.mark.parametrize("queries", [5, 13])  # of 13, the first four see no key: their LSE is -inf
def test_the_gradients_of_flash_attention(queries, of):
    leaves = [tensor.requires_grad_() for tensor in (normal(2, queries, 4, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8))]
    actual = dict(zip(("o", "lse"), flash_attn_func(*leaves, causal=True, return_attn_probs=True), strict=False))
    expected = dict(zip(("o", "lse"), flash64(*leaves, bottom_right(queries, 9, right=0)), strict=True))
    grads = [normal(*actual[name].shape, seed=3) for name in of]
    wanted = torch.autograd.grad(
        [expected[name] for name in of], leaves, [grad.double() for grad in grads], materialize_grads=True
    )
    if "lse" in of:
        grads[-1][actual["lse"].isneginf()] = torch.inf  # what is constant has no derivative, whatever it is used for
    for gradient, right in zip(torch.autograd.grad([actual[name] for name in of], leaves, grads), wanted, strict=True):
        close(gradient, right)


def attend_with_sink(sink, o, lse):
    """O as if each row had one more logit, its head's, without a value."""
    return o * torch.sigmoid(lse - sink[:, None]).transpose(-1, -2)[..., None].to(o.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_that_is_made_of_lse_trains_as_a_sink(dtype):
    shapes = ((2, 13, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    q, k, v = (normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes))
    sink = normal(4, seed=5).requires_grad_()
    o = attend_with_sink(sink, *flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2])

    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    sink64 = sink.detach().double().requires_grad_()
    k2, v2 = (x.transpose(1, 2).repeat_interleave(2, 1) for x in (k64, v64))
    scores = (q64.transpose(1, 2) @ k2.mT / math.sqrt(8)).masked_fill(~bottom_right(13, 9, right=0), -torch.inf)
    logits = torch.cat([scores, sink64.view(1, 4, 1, 1).expand(2, 4, 13, 1)], -1)
    expected = (torch.softmax(logits, -1)[..., :-1] @ v2).transpose(1, 2)
    close(o, expected, dtype)
    grad = normal(*o.shape, seed=7, dtype=dtype)
    wanted = torch.autograd.grad(expected, (q64, k64, v64, sink64), grad.double())
    for gradient, right in zip(torch.autograd.grad(o, (q, k, v, sink), grad), wanted, strict=True):
        close(gradient, right, dtype)


@pytest.mark.parametrize("per_sequence", [False, True])
def test_slopes(per_sequence):
    q, k, v = normal(2, 5, 4, 8), normal(2, 9, 4, 8, seed=1), normal(2, 9, 4, 8, seed=2)
    slopes = torch.rand(2, 4) if per_sequence else torch.rand(4)
    distance = (torch.arange(5)[:, None] + 4 - torch.arange(9)).abs()
    expected, _ = flash64(
        q, k, v, bottom_right(5, 9, right=0), lambda scores: scores - slopes.view(-1, 4, 1, 1) * distance
    )
    close(flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes), expected)


def test_soft_cap():
    q, k, v = normal(2, 5, 4, 8), normal(2, 9, 4, 8, seed=1), normal(2, 9, 4, 8, seed=2)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    expected, _ = flash64(*leaves, bottom_right(5, 9), lambda scores: 0.5 * torch.tanh(scores / 0.5))
    o = flash_attn_func(*leaves, softcap=0.5)
    close(o, expected)
    grad = normal(*o.shape, seed=3)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    for gradient, right in zip(torch.autograd.grad(o, leaves, grad), wanted, strict=True):
        close(gradient, right)
    with pytest.raises(UsageError, match="no dropout together with a soft cap") as raised:
        flash_attn_func(*leaves, softcap=0.5, dropout_p=0.5)
    assert "flex_attention" in str(raised.value)


def test_packed_sequences_are_each_for_itself():
    leaves = [tensor.requires_grad_() for tensor in (normal(16, 4, 8), normal(31, 2, 8, seed=1), normal(31, 2, 8))]
    q, k, v = leaves
    options = (STARTS_Q, STARTS_K, 11, 20)
    o, lse, _ = flash_attn_varlen_func(*leaves, *options, causal=True, return_attn_probs=True)
    assert lse.shape == (4, 16)
    parts = [
        flash64(
            q[None, STARTS_Q[i] : STARTS_Q[i + 1]],
            *(x[None, STARTS_K[i] : STARTS_K[i + 1]] for x in (k, v)),
            bottom_right(int(STARTS_Q[i + 1] - STARTS_Q[i]), int(STARTS_K[i + 1] - STARTS_K[i]), right=0),
        )
        for i in range(3)
    ]
    expected = torch.cat([part[0][0] for part in parts])
    close(o, expected)
    close(lse, torch.cat([part[1][0] for part in parts], 1))
    expected_lse = torch.cat([part[1][0] for part in parts], 1)
    grads = normal(*o.shape, seed=3), normal(*lse.shape, seed=4)
    wanted = torch.autograd.grad((expected, expected_lse), leaves, [grad.double() for grad in grads])
    for gradient, right in zip(torch.autograd.grad((o, lse), leaves, grads), wanted, strict=True):
        close(gradient, right)


def kept(weights, dropout):
    """What the kernel multiplies by V: kept weights are positive."""
    return weights.clamp(min=0).double() / (1 - dropout)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softmax_scale": 0.5},
        {"window_size": (3, 2), "softcap": 0.5},
        {"alibi_slopes": torch.rand(4)},
        {"alibi_slopes": 10 * torch.rand(4), "causal": True},
    ],
    ids=["plain", "mask", "window", "slopes", "slopes and mask"],
)
def test_weights_show_what_dropout_drops(options):
    q, k, v = normal(2, 13, 4, 8), normal(2, 9, 2, 8, seed=1), normal(2, 9, 2, 8, seed=2)
    o, lse, weights = flash_attn_func(q, k, v, dropout_p=0.25, return_attn_probs=True, **options)
    assert weights.shape == (2, 4, 13, 9)
    close(o, (kept(weights, 0.25) @ v.double().repeat_interleave(2, 2).transpose(1, 2)).transpose(1, 2))
    close(weights.abs().sum(-1), lse.isfinite())  # rows that see keys have weights whose sum is 1
    assert 0.1 < (weights < 0).sum() / (weights != 0).sum() < 0.4


def test_weights_of_packed_sequences():
    q, k, v = normal(16, 4, 8), normal(31, 2, 8, seed=1), normal(31, 2, 8, seed=2)
    starts = (STARTS_Q, STARTS_K, 11, 20)
    o, _, weights = flash_attn_varlen_func(q, k, v, *starts, dropout_p=0.5, causal=True, return_attn_probs=True)
    assert weights.shape == (3, 4, 11, 20)
    for padded, ours, values in zip(weights, o.split([5, 0, 11]), v.split([7, 4, 20]), strict=True):
        of_one = kept(padded[:, : len(ours), : len(values)], 0.5)
        close(ours, (of_one @ values.double().repeat_interleave(2, 1).transpose(0, 1)).transpose(0, 1))


def test_packed_queries_over_a_paged_cache():
    q, k, v = normal(16, 4, 8), normal(31, 2, 8, seed=1), normal(31, 2, 8, seed=2)
    table = torch.tensor([[3, 9, 0], [1, 9, 9], [5, 2, 4]], dtype=torch.int32)
    pages = torch.full((2, 10, 8, 2, 8), torch.nan)
    for i in range(3):
        length = int(STARTS_K[i + 1] - STARTS_K[i])
        for token in range(length):
            for cache, x in zip(pages, (k, v), strict=True):
                cache[table[i, token // 8], token % 8] = x[STARTS_K[i] + token]
    starts = (STARTS_Q, STARTS_K, 11, 20)
    with pytest.raises(UsageError, match="paged cache has no gradient"):
        flash_attn_varlen_func(q.clone().requires_grad_(), *pages, *starts, block_table=table).sum().backward()
    o = flash_attn_varlen_func(q, *pages, *starts, causal=True, block_table=table)
    close(o, flash_attn_varlen_func(q, k, v, *starts, causal=True))
    table[2, 1] = 10
    with pytest.raises(TensorError, match=r"block_table\[3\] is 10"):
        flash_attn_varlen_func(q, *pages, *starts, causal=True, block_table=table)


def test_errors_of_the_functions_of_flash_attention():
    q = normal(16, 4, 8)
    with pytest.raises(TensorError, match=r"expected \(batch, tokens, heads, head dim\)"):
        flash_attn_func(q, q, q)
    with pytest.raises(TensorError, match="must ascend from 0"):
        flash_attn_varlen_func(q, q, q, STARTS_Q.flip(0), STARTS_Q, 11, 11)
    with pytest.raises(TensorError, match="expected int32"):
        flash_attn_varlen_func(q, q, q, STARTS_Q.long(), STARTS_Q, 11, 11)
    with pytest.raises(TensorError, match="q is float32"):
        flash_attn_varlen_func(q[:15], q, q, STARTS_Q, STARTS_Q, 11, 11)
    with pytest.raises(TensorError, match="no dropout"):
        flash_attn_varlen_func(q, q, q, STARTS_Q, STARTS_Q, 11, 11, dropout_p=0.1, block_table=STARTS_Q)
