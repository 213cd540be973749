"""Attention for PyTorch, against PyTorch's own in float64.

Head dims are below 32 and never 32: all run on the kernels that are padded to it, so that few are compiled.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from conftest import missing
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.errors import CatalogError, ProblemError, SelectionError, TensorError, UsageError

try:
    import torch
except ImportError:
    missing("torch")

from torch.nn import functional
from torch.nn.attention import bias as biases
from torch_cases import TOLERANCE, attention64, close, normal

from catalog.torch import flash_attn_func, flash_attn_varlen_func, scaled_dot_product_attention


def test_attention_imports_no_dynamo():
    """It takes longer than the rest of PyTorch."""
    code = (
        "import sys, torch, catalog.torch as ours; q = torch.randn(1, 2, 8, 24, requires_grad=True)\n"
        "ours.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


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
    with pytest.raises(UsageError, match="cannot be combined with a CausalBias"):
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


Q = torch.zeros(1, 2, 5, 8)
ERRORS = [
    (TensorError, r"float64: kernels accept torch.float32.*\n.*\.float\(\)", lambda: (Q.double(),) * 3, {}),
    (TensorError, r"k is float32 \(1, 2, 5, 7\): expected", lambda: (Q, torch.zeros(1, 2, 5, 7), Q), {}),
    (TensorError, "v is bfloat16", lambda: (Q, Q, Q.bfloat16()), {}),
    (TensorError, "number of heads of key must divide", lambda: (Q, Q[:, :0], Q[:, :0]), {"enable_gqa": True}),
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
