"""PyTorch's own attention replaced for a whole program: what kernels support runs on them, the rest is counted."""

from __future__ import annotations

import pytest
from conftest import missing

from catalog.errors import SelectionError, TensorError

try:
    import torch
except ImportError:
    missing("torch")

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch_cases import attention64, close, normal

from catalog import torch as ours

OWN = functional.scaled_dot_product_attention


def test_a_program_runs_on_the_kernels():
    """Modules of PyTorch call the function too; a gradient comes back through it."""
    q = normal(2, 2, 7, 16).requires_grad_()
    attention = nn.MultiheadAttention(32, 2, batch_first=True).eval()
    x = normal(2, 9, 32)
    expected = attention(x, x, x, need_weights=False)[0]
    with ours.installed(strict=True):
        o = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        close(attention(x, x, x, need_weights=False)[0], expected)
        assert ours.report() == ours.support.Report(catalog=2)
    double = q.detach().double().requires_grad_()
    close(o, attention64(double, double, double, is_causal=True))
    (gradient,) = torch.autograd.grad(o.sum(), q)
    (wanted,) = torch.autograd.grad(attention64(double, double, double, is_causal=True).sum(), double)
    close(gradient, wanted)
    assert functional.scaled_dot_product_attention is OWN


def test_what_no_kernel_supports_goes_to_pytorch_and_is_counted():
    q, doubles = normal(1, 2, 5, 16), torch.ones(1, 2, 5, 16, dtype=torch.float64)
    nested = torch.nested.nested_tensor([normal(2, 3, 16), normal(2, 4, 16)])
    with ours.installed():
        for tensor in (doubles, nested, q, doubles):
            o = functional.scaled_dot_product_attention(tensor, tensor, tensor)
            assert (o.dtype, o.is_nested) == (tensor.dtype, tensor.is_nested)
        with pytest.raises(RuntimeError, match="must match the size"):  # PyTorch's own error
            functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(3, 3, dtype=torch.bool))
        seen = ours.report()
    assert (seen.catalog, seen.pytorch) == (1, 4)
    first, calls = next(iter(seen.reasons.items()))
    assert calls == 2
    assert "float64" in first
    assert str(seen).startswith("1 calls by the catalog's kernels, 4 by PyTorch's own attention\n")
    with ours.installed(strict=True), pytest.raises(SelectionError, match="float64"):
        functional.scaled_dot_product_attention(doubles, doubles, doubles)
    with ours.installed(strict=True), pytest.raises(TensorError, match="does not broadcast"):
        functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(3, 3, dtype=torch.bool))


class Watcher(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_a_default_device_does_not_matter_and_other_modes_do():
    q = normal(1, 2, 5, 16)
    with ours.installed(), torch.device("cpu"):
        functional.scaled_dot_product_attention(q, q, q)
        with Watcher():
            functional.scaled_dot_product_attention(q, q, q)
        seen = ours.report()
    assert seen == ours.support.Report(1, 1, {"calls are overridden by Watcher": 1})


def test_install_lasts_until_uninstall():
    try:
        ours.install()
        with ours.installed(strict=True):
            inner = functional.scaled_dot_product_attention
        assert functional.scaled_dot_product_attention not in (OWN, inner)
    finally:
        ours.uninstall()
    ours.uninstall()
    assert functional.scaled_dot_product_attention is OWN


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_traced_graph_keeps_the_kernels_where_there_are_some(dynamic):
    q = normal(1, 2, 9, 16)

    def model(q):
        o = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return o, functional.scaled_dot_product_attention(q.double(), q.double(), q.double())

    with ours.installed():
        o, double = torch.compile(model, fullgraph=True, dynamic=dynamic)(q)
        seen = ours.report()
    assert seen.catalog == seen.pytorch >= 1  # tracing may start again
    close(o, attention64(*(q.double(),) * 3, is_causal=True))
    torch.testing.assert_close(double, attention64(*(q.double(),) * 3))


def test_stacked_tensors_are_flash_attns():
    """Q, K and V in one tensor: results and gradients are those of three."""
    qkv = normal(2, 9, 3, 2, 16).requires_grad_()
    q, k, v = qkv.unbind(2)
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    results = [
        ours.flash_attn_func(q, k, v, causal=True),
        ours.flash_attn_qkvpacked_func(qkv, causal=True),
        ours.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True),
        ours.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), starts, 9, causal=True).unflatten(0, (2, 9)),
        ours.flash_attn_varlen_kvpacked_func(
            q.flatten(0, 1), qkv.flatten(0, 1)[:, 1:], starts, starts, 9, 9, causal=True
        ).unflatten(0, (2, 9)),
    ]
    gradients = [torch.autograd.grad(o.square().sum(), qkv)[0] for o in results]
    for o, gradient in zip(results[1:], gradients[1:], strict=True):
        close(o, results[0])
        close(gradient, gradients[0])
    with pytest.raises(TensorError, match=r"expected \(batch, tokens, 3, heads, head dim\)"):
        ours.flash_attn_qkvpacked_func(qkv[:, :, 1:])
