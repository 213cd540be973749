"""Attention for PyTorch, against PyTorch's own.

Results are held against PyTorch's attention in float64. In float32 they may be 2e-5 apart, of inputs that are standard
normal; in bfloat16 2 % of their size and 0.02. Head dims are below 32 and never 32: all run on the kernels that are
padded to it, so that few are compiled.
"""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import missing
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.build.builder import Builder
from catalog.errors import CatalogError, ProblemError, SelectionError, TensorError, UsageError
from catalog.runtime.catalog import Catalog
from catalog.runtime.traces import read_trace
from catalog.runtime.tracing import trace

try:
    import torch
except ImportError:
    missing("torch")

from torch import library
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import bias as biases
from torch.utils._python_dispatch import TorchDispatchMode

from catalog.torch import calls, flash_attn_func, flash_attn_varlen_func, ops, scaled_dot_product_attention, watchers
from catalog.torch.calls import Options

TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2e-2, 2e-2)}
PLAIN = Options("bhsd", "no", -1, 0, None, 0.0, 0.0, False)
CAUSAL = Options("bhsd", "top_left", -1, 0, None, 0.0, 0.0, False)


def close(actual, expected, dtype=torch.float32):
    relative, absolute = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=relative, atol=absolute, check_dtype=False)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agree(tensors, options, dtype=torch.float32):
    """O and all gradients are PyTorch's; tensors are query, key, value and, if it is one to learn, the mask."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    o, expected = scaled_dot_product_attention(*leaves, **options), attention64(*doubles, **options)
    assert o.dtype == dtype
    close(o, expected, dtype)
    grad = normal(*o.shape, seed=7, dtype=dtype)
    gradients = torch.autograd.grad(o, leaves, grad)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        close(gradient, wanted, dtype)
    return o


def attention64(*doubles, **options):
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.double()
    with sdpa_kernel(SDPBackend.MATH):  # the other one gives NaN for a negative scale under a causal mask
        return functional.scaled_dot_product_attention(*doubles, **options)


# Every value of each stays on one of a few kernels: with and without a causal mask, with a bias, with a bias to learn.


@st.composite
def cases(draw):
    rank = draw(st.sampled_from([2, 3, 4, 4, 4, 5]))
    leading = tuple(draw(st.lists(st.integers(1, 3), min_size=max(0, rank - 3), max_size=max(0, rank - 3))))
    heads_k, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    gqa = rank > 2 and ratio > 1
    queries, keys = draw(st.integers(0, 40)), draw(st.integers(0, 300 if draw(st.booleans()) else 20))
    hdim, hdim_v = draw(st.sampled_from([1, 8, 16, 31])), draw(st.sampled_from([2, 16, 24]))
    shapes = {}
    for name, tokens, heads, size in (
        ("query", queries, heads_k * (ratio if gqa else 1), hdim),
        ("key", keys, heads_k, hdim),
        ("value", keys, heads_k, hdim_v),
    ):
        broadcast = rank > 3 and name != "query" and draw(st.integers(0, 4)) == 0
        before = tuple(1 for _ in leading) if broadcast else leading
        shapes[name] = (*before, *((heads,) if rank > 2 else ()), tokens, size)
    seed = draw(st.integers(0, 99))
    tensors = [normal(*shape, seed=seed + place) for place, shape in enumerate(shapes.values())]
    if rank == 4 and draw(st.booleans()):  # as projections leave them
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    elif draw(st.integers(0, 5)) == 0:  # strided along the head dim
        tensors = [tensor.mT.contiguous().mT for tensor in tensors]
    options = {"scale": draw(st.sampled_from([None, None, 0.3, -0.7, 0.0])), "enable_gqa": gqa}
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    if kind == "causal":
        options["is_causal"] = True
    if kind in ("bool", "float"):
        rows = (*shapes["query"][:-1], keys)
        dropped = draw(st.integers(0, max(0, len(rows) - 2)))
        shape = [1 if draw(st.integers(0, 3)) == 0 else extent for extent in rows[dropped:]]
        options["attn_mask"] = normal(*shape, seed=seed) < 0.6 if kind == "bool" else normal(*shape, seed=seed)
    return tensors, options


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_options_and_shapes_are_those_of_pytorch(case):
    agree(*case)


def test_bfloat16():
    agree([normal(2, 3, 20, 16, seed=seed) for seed in range(3)], {"is_causal": True}, torch.bfloat16)


@pytest.mark.slow  # two kernels of its own to compile
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_head_dims_up_to_512(dtype):
    shapes = ((1, 4, 40, 264), (1, 2, 50, 264), (1, 2, 50, 511))
    agree([normal(*shape, seed=seed) for seed, shape in enumerate(shapes)], {"enable_gqa": True}, dtype)


@pytest.mark.parametrize("shape", [(4, 7, 9), (2, 1, 1, 9), (7, 1)])
def test_a_mask_learns(shape):
    tensors = [normal(2, 4, 7, 8), normal(2, 4, 9, 8, seed=1), normal(2, 4, 9, 8, seed=2), normal(*shape, seed=3)]
    agree(tensors, {})


def test_a_mask_and_is_causal_both_hide():
    q, k, v = (normal(2, 2, 9, 8, seed=seed) for seed in range(3))
    mask = normal(9, 9, seed=4) < 0.5
    o = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
    close(o, attention64(q.double(), k.double(), v.double(), attn_mask=mask.tril()))


def test_rows_that_see_no_key_are_zeros_and_take_no_gradient():
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    o = agree([normal(1, 2, 6, 8, seed=seed) for seed in range(3)], {"attn_mask": mask})
    assert not o[:, :, 2].any()


@pytest.mark.parametrize(("made", "diagonal"), [(biases.causal_upper_left, 0), (biases.causal_lower_right, 4)])
def test_causal_biases(made, diagonal):
    q, k, v = normal(1, 2, 5, 8), normal(1, 2, 9, 8, seed=1), normal(1, 2, 9, 8, seed=2)
    seen = torch.ones(5, 9, dtype=torch.bool).tril(diagonal)
    o = scaled_dot_product_attention(q, k, v, attn_mask=made(5, 9))
    close(o, attention64(q.double(), k.double(), v.double(), attn_mask=seen))
    with pytest.raises(UsageError, match="together with a CausalBias"):
        scaled_dot_product_attention(q, k, v, attn_mask=made(5, 9), is_causal=True)


def test_the_result_lies_in_memory_as_the_query_does():
    qkv = normal(2, 20, 3, 4, 16)
    q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
    o = agree([q, k, v], {})
    assert o.shape == (2, 4, 20, 16)
    assert o.transpose(1, 2).is_contiguous()
    assert scaled_dot_product_attention(q.contiguous(), k, v).is_contiguous()


def test_gradients_agree_with_finite_differences():
    """float64 in, float32 inside: steps of 1e-2 and gradients within 1e-3, where float64 takes 1e-6 and 1e-5."""
    inputs = [normal(1, 2, 4, 3, seed=seed).double().requires_grad_() for seed in range(3)]

    def attention(*tensors):
        return scaled_dot_product_attention(*(tensor.float() for tensor in tensors), is_causal=True).double()

    assert torch.autograd.gradcheck(attention, inputs, eps=1e-2, atol=1e-3, rtol=1e-3)


def test_dropout_is_pytorchs_but_for_the_random_numbers():
    q, k = normal(2, 3, 30, 8), normal(2, 3, 24, 8, seed=1)
    v = torch.eye(24).expand(2, 3, 24, 24).clone()  # O is the weights
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    full = functional.scaled_dot_product_attention(q, k, v)
    torch.manual_seed(1)
    weights = scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    kept = (weights > 0).float()
    assert abs(kept.mean() - 0.75) < 0.03
    close(weights, full * kept / 0.75)
    grad = normal(*weights.shape, seed=5)
    for actual, expected in zip(
        torch.autograd.grad(weights, (q, k, v), grad),
        torch.autograd.grad(full * kept / 0.75, (q, k), grad),
        strict=False,
    ):
        close(actual, expected)
    torch.manual_seed(1)
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.25), weights)
    assert not torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.25), weights)


def test_a_dropout_of_1_gives_zeros_as_in_pytorch():
    leaves = [normal(2, 5, 5, 8, seed=seed).requires_grad_() for seed in range(3)]
    packed = [x.flatten(0, 1) for x in leaves]
    starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    lse = flash_attn_func(*leaves, return_attn_probs=True)[1]
    of_flash, same_lse, _ = flash_attn_func(*leaves, dropout_p=1.0, return_attn_probs=True)
    results = [
        scaled_dot_product_attention(*leaves, dropout_p=1.0),
        of_flash,
        flash_attn_varlen_func(*packed, starts, starts, 5, 5, dropout_p=1.0),
    ]
    for o in results:
        assert torch.equal(o, torch.zeros_like(o))
        assert not any(gradient.any() for gradient in torch.autograd.grad(o, leaves, torch.ones_like(o)))
    close(same_lse, lse)


def test_autocast_casts_as_for_pytorchs():
    q, k, v = (
        normal(1, 2, 6, 8, seed=seed, dtype=dtype) for seed, dtype in enumerate([torch.bfloat16] + [torch.float32] * 2)
    )
    with torch.autocast("cpu", torch.bfloat16):
        o = scaled_dot_product_attention(q, k, v, is_causal=True)
        expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert o.dtype == expected.dtype == torch.bfloat16
    close(o, expected, torch.bfloat16)


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
    expected, _ = flash64(q, k, v, bottom_right(5, 9), lambda scores: 0.5 * torch.tanh(scores / 0.5))
    close(flash_attn_func(q, k, v, softcap=0.5), expected)
    with pytest.raises(UsageError, match="no soft cap") as raised:
        flash_attn_func(q.requires_grad_(), k, v, softcap=0.5)
    assert "flex_attention" in str(raised.value)


STARTS_Q, STARTS_K = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 5, 5, 16], [0, 7, 11, 31]))


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
        flash_attn_varlen_func(q.clone().requires_grad_(), *pages, *starts, block_table=table)
    o = flash_attn_varlen_func(q, *pages, *starts, causal=True, block_table=table)
    close(o, flash_attn_varlen_func(q, k, v, *starts, causal=True))
    table[2, 1] = 10
    with pytest.raises(TensorError, match=r"block_table\[3\] is 10"):
        flash_attn_varlen_func(q, *pages, *starts, causal=True, block_table=table)


# What PyTorch asks of an operator.


def test_operators_keep_pytorchs_rules():
    q, k, v = (normal(2, 2, 5, 8, seed=seed) for seed in range(3))
    bias, nothing = normal(2, 2, 5, 5), [None] * 4
    fwd, bwd = torch.ops.catalog.fwd.default, torch.ops.catalog.bwd.default
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, bias)]
    library.opcheck(fwd, (*leaves[:3], None, *nothing, None, *CAUSAL))
    library.opcheck(fwd, (*leaves, *nothing, None, *PLAIN))
    o, lse = fwd(*leaves, *nothing, None, *PLAIN)
    saved = [tensor.detach() for tensor in (*leaves[:3], o, lse, bias)]
    for grad_lse in (None, lse.detach()):
        library.opcheck(bwd, (o.detach(), grad_lse, *saved, None, None, None, None, True, *PLAIN))
    packed = PLAIN._replace(layout="packed", mask="bottom_right")
    qkv = normal(16, 4, 8), normal(31, 2, 8), normal(31, 2, 8)
    library.opcheck(fwd, (*qkv, None, None, STARTS_Q, STARTS_K, None, None, *packed))


def test_modes_and_profiles_see_the_operators():
    """Where nobody watches, calls spare PyTorch's dispatcher; whoever watches sees them."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen, q = [], normal(1, 2, 5, 8).requires_grad_()
    plain = scaled_dot_product_attention(q, q, q)
    with Watching():
        watched = scaled_dot_product_attention(q, q, q)
        gradients = torch.autograd.grad(watched.sum(), q)
    assert {"catalog.fwd.default", "catalog.bwd.default"} <= set(seen)
    assert torch.equal(plain, watched)
    assert torch.equal(torch.autograd.grad(plain.sum(), q)[0], gradients[0])
    with torch.profiler.profile() as profile:
        scaled_dot_product_attention(q, q, q)
    assert "catalog::fwd" in {event.key for event in profile.key_averages()}
    batch = torch.stack([torch.ones(1, 2, 5, 8), torch.zeros(1, 2, 5, 8)])
    (pair,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q), q, batch, is_grads_batched=True)
    assert pair[0].isfinite().all()
    assert not pair[1].any()


@pytest.mark.parametrize(
    "name",
    [
        "_any_requires_grad",
        "_dispatch_keys",
        "_get_tracing_state",
        "_len_torch_dispatch_stack",
        "_len_torch_function_stack",
        "_autograd._profiler_enabled",
        "_functorch.peek_interpreter_stack",
    ],
)
def test_without_a_private_function_of_pytorch_every_call_goes_through_the_dispatcher(name, monkeypatch):
    q = normal(1, 2, 5, 8).requires_grad_()
    (expected,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q).sum(), q)
    try:
        with monkeypatch.context() as lacking:
            lacking.delattr(f"torch._C.{name}")
            importlib.reload(watchers)
            assert not watchers.unwatched((q,))
            (gradient,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q).sum(), q)
    finally:
        importlib.reload(watchers)
    assert torch.equal(gradient, expected)
    assert watchers.unwatched((q,))


def test_compiled_whole_graphs_give_what_eager_gives():
    def model(x, mask):
        q, k, v = (each.transpose(1, 2) for each in x.sin().unflatten(-1, (3, 2, 8)).unbind(2))
        learned = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        dropped = scaled_dot_product_attention(q, k, v, dropout_p=1e-9, scale=0.5)
        tokens_first = (each.transpose(1, 2) for each in (q, k, v))
        causal, lse, _ = flash_attn_func(*tokens_first, causal=True, return_attn_probs=True)
        return (learned + dropped).cos().sum() + causal.sin().sum() + lse.sin().sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        x, mask = normal(2, tokens, 48).requires_grad_(), normal(2, 1, tokens, tokens).requires_grad_()
        actual, expected = compiled(x, mask), model(x, mask)
        close(actual, expected)
        for gradient, wanted in zip(
            torch.autograd.grad(actual, (x, mask)), torch.autograd.grad(expected, (x, mask)), strict=True
        ):
            close(gradient, wanted)


def test_parameters_threads_and_inference_mode():
    q, k, v = (torch.nn.Parameter(normal(1, 2, 5, 8, seed=seed)) for seed in range(3))
    expected = scaled_dot_product_attention(q, k, v)
    with torch.inference_mode():
        assert torch.equal(scaled_dot_product_attention(q, k, v), expected)
    other = threading.Thread(target=lambda: scaled_dot_product_attention(q, k, v).sum().backward())
    other.start()
    other.join()
    assert torch.equal(q.grad, torch.autograd.grad(expected.sum(), q)[0])


def test_new_lengths_need_no_builder_and_are_right(monkeypatch):
    """A cache that grows, and packed sequences of other lengths: nothing is settled anew, nothing is left unchecked."""

    def decode(length):
        q, k, v = (normal(1, 2, tokens, 16, seed=seed) for seed, tokens in enumerate((1, length, length)))
        with torch.no_grad():
            close(scaled_dot_product_attention(q, k, v), attention64(q.double(), k.double(), v.double()))

    def train(*lengths):
        tensors = [normal(sum(lengths), 2, 16, seed=seed).requires_grad_() for seed in range(3)]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        o = flash_attn_varlen_func(*tensors, starts, starts, max(lengths), max(lengths), causal=True)
        parts = [tensor.detach().double().requires_grad_() for tensor in tensors]
        alone = [
            attention64(*(part[None].transpose(1, 2) for part in one), is_causal=True).transpose(1, 2)[0]
            for one in zip(*(part.split(lengths) for part in parts), strict=True)
        ]
        close(o, torch.cat(alone))
        weights = normal(*o.shape, seed=9)
        wanted = torch.autograd.grad(torch.cat(alone), parts, weights.double())
        for gradient, expected in zip(torch.autograd.grad(o, tensors, weights), wanted, strict=True):
            close(gradient, expected)

    decode(3)
    train(3, 5)
    monkeypatch.setattr(Builder, "make", lambda *_: pytest.fail("a loaded kernel was settled again"))
    for length in (4, 5, 64, 65, 300):
        decode(length)
    train(4, 9)
    train(17, 1, 30)
    q, k, v = normal(1, 2, 1, 16), normal(1, 2, 11, 16), normal(1, 2, 12, 16)
    with torch.no_grad(), pytest.raises(TensorError, match="v is float32"):
        scaled_dot_product_attention(q, k, v)
    k = normal(1, 2, 16, 13).transpose(2, 3)  # strided along the head dim
    with torch.no_grad():
        close(scaled_dot_product_attention(q, k, k), attention64(q.double(), k.double(), k.double()))
    monkeypatch.undo()
    Catalog.default().forget()
    decode(6)


def test_a_misaligned_tensor_is_refused_each_time():
    q, k, v = (normal(1, 2, 5, 8, seed=seed) for seed in range(3))
    bytes_ = torch.zeros(q.nbytes + 1, dtype=torch.uint8)
    scaled_dot_product_attention(q, k, v)
    odd = torch.from_numpy(np.ndarray(q.shape, np.float32, bytes_.numpy(), 1))
    for _ in range(2):
        with pytest.raises(TensorError, match="not aligned"):
            scaled_dot_product_attention(odd, k, v)


def test_gpu_tensors_are_copied_where_rows_are_not_vectors():
    dense = normal(2, 3, 5, 8, dtype=torch.bfloat16)
    assert calls._vectors(dense) is dense
    assert calls._vectors(dense[..., :4]).data_ptr() == dense.data_ptr()
    for view in (dense[..., 1:], dense.mT, dense.flatten()[: 2 * 3 * 5 * 7].view(2, 3, 5, 7)):
        copy = calls._vectors(view)
        assert copy.is_contiguous()
        assert torch.equal(copy, view)


Q = torch.zeros(1, 2, 5, 8)
ERRORS = [
    (TensorError, r"float64: kernels take torch.float32.*\n.*\.float\(\)", lambda: (Q.double(),) * 3, {}),
    (TensorError, r"k is float32 \(1, 2, 5, 7\): expected", lambda: (Q, torch.zeros(1, 2, 5, 7), Q), {}),
    (TensorError, "v is bfloat16", lambda: (Q, Q, Q.bfloat16()), {}),
    (TensorError, "heads of key must divide", lambda: (Q, Q[:, :0], Q[:, :0]), {"enable_gqa": True}),
    (TensorError, "as many heads", lambda: (Q, Q, Q[:, :1]), {"enable_gqa": True}),
    (TensorError, "do not broadcast", lambda: (Q, torch.zeros(1, 3, 5, 8), Q), {}),
    (TensorError, "expected .*heads, tokens, head dim", lambda: (Q[0, 0, 0],) * 3, {}),
    (TensorError, "attn_mask is torch.int32.*\n.*query.dtype", lambda: (Q, Q, Q), {"attn_mask": Q[0, 0, :, :5].int()}),
    (TensorError, "does not broadcast", lambda: (Q, Q, Q), {"attn_mask": torch.zeros(4, 5)}),
    (ProblemError, "dropout=1.5: .* from 0 to 1$", lambda: (Q, Q, Q), {"dropout_p": 1.5}),
    (ProblemError, "scale=nan", lambda: (Q, Q, Q), {"scale": math.nan}),
    (SelectionError, r"hdim_q_fits(.|\n)*Instead: torch", lambda: (torch.zeros(1, 1, 2, 513),) * 3, {}),
]


@pytest.mark.parametrize(("kind", "message", "tensors", "options"), ERRORS, ids=[error[1][:18] for error in ERRORS])
def test_errors_say_what_to_use_instead(kind, message, tensors, options):
    with pytest.raises(kind, match=message) as raised:
        scaled_dot_product_attention(*tensors(), **options)
    assert isinstance(raised.value, RuntimeError)


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        ((Q, Q[..., :7], Q), {}),
        ((Q, Q, Q.bfloat16()), {}),
        ((Q, Q[:, :1].expand(1, 3, 5, 8), Q), {}),
        ((Q, Q.to("meta"), Q), {}),
        ((Q, Q, Q), {"attn_mask": torch.zeros(4, 5)}),
        ((Q, Q, Q), {"dropout_p": 1.5}),
        ((Q, Q, Q), {"attn_mask": biases.causal_upper_left(5, 5), "is_causal": True}),
    ],
)
def test_errors_are_of_the_types_of_pytorchs_own(tensors, options):
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        functional.scaled_dot_product_attention(*tensors, **options)
    with pytest.raises(theirs.type) as raised:
        scaled_dot_product_attention(*tensors, **options)
    assert isinstance(raised.value, CatalogError)


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


def test_derivatives_that_are_not_there_are_refused():
    q = normal(1, 2, 5, 8)

    def attention(q):
        return scaled_dot_product_attention(q, q, q).sum()

    with pytest.raises(UsageError, match="no forward-mode derivative"):
        torch.func.jvp(attention, (q,), (q,))
    with pytest.raises(UsageError, match=r"transforms of torch\.func\n.*backward"):
        torch.func.grad(attention)(q)
    leaf = q.requires_grad_()
    (gradient,) = torch.autograd.grad(attention(leaf), leaf, create_graph=True)
    with pytest.raises(UsageError, match=r"no second derivative\n.*MATH"):
        gradient.sum().backward()


def test_tensors_of_several_devices_are_refused():
    q, meta = normal(1, 2, 5, 8), torch.zeros(1, 2, 5, 8, device="meta")
    scaled_dot_product_attention(q, q, q)
    assert scaled_dot_product_attention(meta, meta, meta).is_meta
    with pytest.raises(TensorError, match="on cpu and meta: expected one device"):
        scaled_dot_product_attention(q, meta, q)


def test_negated_views_are_taken_for_what_they_are():
    q, k, v = (normal(1, 2, 5, 8, seed=seed) for seed in range(3))
    assert torch.equal(scaled_dot_product_attention(torch._neg_view(q), k, v), scaled_dot_product_attention(-q, k, v))


def test_the_catalog_alone_does_not_import_pytorch():
    program = "import sys, catalog, catalog.runtime.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_operators_have_the_arguments_that_options_have():
    assert [argument.name for argument in torch.ops.catalog.fwd.default._schema.arguments][ops._TENSORS :] == [
        *Options._fields
    ]


def test_a_trace_has_every_call_and_its_gradient(tmp_path):
    query, key, value = (normal(1, 2, 20, 16, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    scaled_dot_product_attention(query, key, value)  # makes the layout known
    with trace(tmp_path / "calls.jsonl", tensors=True):
        for _ in range(3):
            scaled_dot_product_attention(query, key, value)
        scaled_dot_product_attention(query.requires_grad_(), key, value).sum().backward()
    found = read_trace(tmp_path / "calls.jsonl").used
    assert sum(used.calls for used in found if used.problem.op == "fwd") == 4
    assert [used.calls for used in found if used.problem.op == "bwd"] == [1]
    for used in found:
        (recording,) = used.recordings
        assert np.array_equal(recording.load(used.problem)["q"].astype(np.float32), query.detach().float().numpy())
