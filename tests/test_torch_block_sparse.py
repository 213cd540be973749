"""Block-sparse attention for PyTorch, against PyTorch's own in float64 with the mask expanded."""

from __future__ import annotations

import pytest
from conftest import missing, slow_but

from catalog.errors import ProblemError, SelectionError, TensorError, UsageError

try:
    import torch
except ImportError:
    missing("torch")

from torch import library
from torch_cases import attention64, close, leaves, normal

from catalog.torch import block_sparse, block_sparse_attention

QUERIES, KEYS = 150, 270


def drawn(*shape, seed=0):
    return normal(*shape, seed=seed) > 0


def expanded(block_mask, block_size, queries=QUERIES, keys=KEYS):
    rows = block_mask.bool().repeat_interleave(block_size[0], -2)[..., :queries, :]
    return rows.repeat_interleave(block_size[1], -1)[..., :keys]


def expected(query, key, value, block_mask, *, block_size, causal=False, **options):
    """Zeros where no key is seen, which PyTorch's own makes NaN."""
    mask = expanded(block_mask, block_size)
    if causal:
        mask = mask & torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()
    return attention64(*(t.double() for t in (query, key, value)), attn_mask=mask, **options).nan_to_num(0.0)


CASES = {
    "of every head": ((2, 4), (2, 4), {}),
    "shared, causal": ((2, 4), (), {"causal": True, "block_size": (32, 64)}),
    "of a sequence": ((2, 4), (2, 1), {"block_size": (64, 64), "scale": -0.3}),
    "groups of heads": ((2, 4), (4,), {"enable_gqa": True, "causal": True, "block_size": (16, 32)}),
    "more axes": ((2, 2, 3), (2, 1, 3), {"block_size": (64, 96)}),
    "no heads": ((), (), {"block_size": (64, 32)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", slow_but(["shared, causal", "groups of heads"], CASES))
def test_what_pytorch_computes_with_the_mask_expanded(case, dtype):
    leading, of_mask, options = CASES[case]
    options = {"block_size": (128, 128), **options}
    heads_k = (*leading[:-1], 2) if options.get("enable_gqa") else leading
    query = normal(*leading, QUERIES, 24, dtype=dtype)
    key, value = (normal(*heads_k, KEYS, 24, seed=seed, dtype=dtype) for seed in (1, 2))
    blocks = [-(-tokens // size) for tokens, size in zip((QUERIES, KEYS), options["block_size"], strict=True)]
    block_mask = drawn(*of_mask, *blocks, seed=3)
    wanted = expected(query, key, value, block_mask, **options)
    o = block_sparse_attention(query, key, value, block_mask, **options)
    assert o.shape == (*torch.broadcast_shapes(leading, of_mask), QUERIES, 24)
    close(o, wanted.expand(o.shape), dtype)
    close(block_sparse_attention(query, key, value, block_mask.byte() * 7, **options), wanted.expand(o.shape), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", slow_but(["groups of heads"], CASES))
def test_gradients_are_those_of_pytorch_with_the_mask_expanded(case, dtype):
    leading, of_mask, options = CASES[case]
    options = {"block_size": (128, 128), **options}
    heads_k = (*leading[:-1], 2) if options.get("enable_gqa") else leading
    shapes = ((*leading, QUERIES, 24), (*heads_k, KEYS, 24), (*heads_k, KEYS, 16))
    tensors = leaves(*shapes, dtype=dtype)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    blocks = [-(-tokens // size) for tokens, size in zip((QUERIES, KEYS), options["block_size"], strict=True)]
    block_mask = drawn(*of_mask, *blocks, seed=3)
    block_mask[..., 0] = True  # PyTorch's own makes gradients of rows without a key NaN
    o = block_sparse_attention(*tensors, block_mask, **options)
    grad_o = normal(*o.shape, seed=4, dtype=dtype)
    gradients = torch.autograd.grad(o, tensors, grad_o)
    wanted = torch.autograd.grad(expected(*doubles, block_mask, **options).expand(o.shape), doubles, grad_o.double())
    for gradient, double in zip(gradients, wanted, strict=True):
        assert gradient.dtype == dtype
        bound = (2e-4 if dtype == torch.float32 else 3e-2) * double.abs().max().item()
        torch.testing.assert_close(gradient.double(), double, rtol=0, atol=bound)


def test_rows_and_keys_that_see_nothing_have_gradients_of_zero():
    query, key, value = leaves((1, 1, 256, 24), (1, 1, 256, 24), (1, 1, 256, 24))
    block_mask = torch.tensor([[True, False], [False, False]])
    block_sparse_attention(query, key, value, block_mask).sum().backward()
    for tensor in (query, key, value):
        assert not tensor.grad[:, :, 128:].any()
    assert query.grad.any()
    assert value.grad.any()


def test_the_result_lies_in_memory_as_the_query_does():
    query, key, value = (normal(2, 100, 4, 24, seed=seed).transpose(1, 2) for seed in range(3))
    o = block_sparse_attention(query, key, value, torch.ones(1, 1, dtype=torch.bool))
    assert o.transpose(1, 2).is_contiguous()
    close(o, attention64(query.double(), key.double(), value.double()))


def test_head_dims_are_padded_where_kernels_need_it(monkeypatch):
    """As on an NVIDIA GPU."""
    tensors = leaves((1, 2, 100, 13), (1, 2, 100, 13), (1, 2, 100, 6))
    results = []
    for nvidia in (False, True):
        monkeypatch.setattr(block_sparse, "on_nvidia", lambda _, nvidia=nvidia: nvidia)
        o = block_sparse_attention(*tensors, torch.ones(1, 1, dtype=torch.bool))
        results.append([o, *torch.autograd.grad(o.sum(), tensors)])
    for padded, plain in zip(*results, strict=True):
        close(padded, plain.double())


@pytest.mark.slow
def test_a_compiled_graph_has_the_operators():
    tensors = leaves((1, 2, 100, 24), (1, 2, 100, 24), (1, 2, 100, 24))
    block_mask = torch.tensor([[True, False], [True, True]])

    def function(*inputs):
        return (block_sparse_attention(*inputs, block_size=(64, 64), causal=True) ** 2).sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for attend in (compiled, function):
        loss = attend(*tensors, block_mask)
        results.append([loss, *torch.autograd.grad(loss, tensors)])
    for in_graph, eager in zip(*results, strict=True):
        close(in_graph, eager.double())


@pytest.mark.slow
def test_the_operators_keep_pytorchs_rules():
    tensors = leaves((1, 2, 100, 24), (1, 2, 100, 24), (1, 2, 100, 24))
    bitmap = torch.tensor([[1, 0], [1, 1]], dtype=torch.uint8).expand(1, 2, 2, 2)
    options = (64, 64, "bhsd", True, None)
    fwd, bwd = torch.ops.catalog.block_sparse.default, torch.ops.catalog.block_sparse_bwd.default
    library.opcheck(fwd, (*tensors, bitmap, *options))
    o, lse = fwd(*tensors, bitmap, *options)
    saved = [tensor.detach() for tensor in (o, *tensors, o, lse)]
    library.opcheck(bwd, (*saved, bitmap, *options))


def test_there_is_one_derivative():
    query, key, value = leaves((1, 1, 100, 24), (1, 1, 100, 24), (1, 1, 100, 24))
    o = block_sparse_attention(query, key, value, torch.ones(1, 1, dtype=torch.bool))
    [gradient] = torch.autograd.grad((o * o).sum(), query, create_graph=True)
    with pytest.raises(UsageError, match="block-sparse attention has no second derivative"):
        gradient.sum().backward()


Q, SEEN = torch.zeros(1, 2, 100, 24), torch.ones(1, 1, dtype=torch.bool)
ERRORS = [
    (UsageError, r"block_size is \(0, 64\): ", (Q, Q, Q, SEEN), {"block_size": (0, 64)}),
    (TensorError, r"block_mask is torch.float32: .*\n.*block_mask != 0", (Q, Q, Q, SEEN.float()), {}),
    (TensorError, r"does not broadcast to .*, \(1, 2, 1, 1\)", (Q, Q, Q, SEEN.expand(2, 2)), {}),
    (TensorError, "float64: kernels accept", (Q.double(), Q.double(), Q.double(), SEEN), {}),
    (ProblemError, "scale=nan", (Q, Q, Q, SEEN), {"scale": float("nan")}),
    (SelectionError, r"mask_blocks_fit_tiles(.|\n)*flex_attention", (Q, Q, Q, SEEN), {"block_size": (100, 100)}),
]


@pytest.mark.parametrize(("kind", "message", "tensors", "options"), ERRORS, ids=[error[1][:18] for error in ERRORS])
def test_a_wrong_call_is_a_message(kind, message, tensors, options):
    with pytest.raises(kind, match=message):
        block_sparse_attention(*tensors, **options)
