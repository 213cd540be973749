"""The catalog's GEMM for PyTorch: linear and matmul against PyTorch's own in float64, gradients, compiled graphs."""

from __future__ import annotations

import re

import pytest
from conftest import missing

from catalog.errors import ArgumentError, SelectionError, TensorError, UsageError

try:
    import torch
except ImportError:
    missing("torch")

from torch import library
from torch.nn import functional
from torch_cases import check_gradients, close, leaves, normal

from catalog.torch import gemm, grouped_mm, linear, matmul
from catalog.torch.gemm import product

ACTIVATIONS = {None: lambda x: x, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}


def test_linear_is_pytorchs(monkeypatch):
    seen = []
    enqueue = gemm.enqueue
    monkeypatch.setattr(
        gemm, "enqueue", lambda problem, *rest: (seen.append(problem.layout), enqueue(problem, *rest))[1]
    )
    check_gradients(linear, functional.linear, leaves((3, 7, 20), (33, 20), (33,)))
    assert set(seen) >= {"rcr", "rrr", "crr"}
    x, weight, bias = leaves((2, 20), (33, 20), (33,))
    linear(x, weight, bias).sum().backward()
    assert weight.grad.is_contiguous()
    for activation, function in ACTIVATIONS.items():
        expected = function(functional.linear(x.double(), weight.double(), bias.double()))
        with torch.no_grad():
            close(linear(x, weight, bias, activation), expected)
        close(linear(x, weight, bias, activation), expected)
    with torch.autocast("cpu"):
        assert linear(x, weight, bias, "gelu").dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_linear_of_all_types_and_activations(dtype, activation):
    x, weight, bias = leaves((5, 9, 40), (70, 40), (70,), dtype=dtype)
    theirs = ACTIVATIONS[activation](functional.linear(x.double(), weight.double(), bias.double()))
    with torch.no_grad():
        fused = linear(x, weight, bias, activation)
    ours = linear(x, weight, bias, activation)
    tolerance = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for result in (fused, ours):
        torch.testing.assert_close(result.double(), theirs, rtol=tolerance, atol=tolerance)
    found, expected = (torch.autograd.grad(c.sum(), (x, weight, bias), retain_graph=True) for c in (ours, theirs))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((5,), (5,)),
        ((4, 5), (5,)),
        ((5,), (5, 6)),
        ((5,), (3, 5, 6)),
        ((2, 3, 4, 5), (5,)),
        ((2, 3, 4, 5), (5, 6)),
        ((4, 5), (2, 3, 5, 6)),
        ((2, 1, 4, 5), (3, 5, 6)),
        ((1, 4, 5), (1, 5, 6)),
        ((2, 0, 5), (5, 6)),
        ((0, 4, 5), (0, 5, 6)),
        ((2, 4, 0), (2, 0, 6)),
    ],
)
def test_matmul_broadcasts_as_pytorchs(a, b):
    a, b = normal(*a, seed=1), normal(*b, seed=2)
    ours, theirs = matmul(a, b), torch.matmul(a, b)
    assert ours.shape == theirs.shape
    close(ours, theirs.double())


def test_matmul_has_gradients():
    check_gradients(matmul, torch.matmul, leaves((2, 1, 4, 5), (3, 5, 6)))
    check_gradients(lambda a, b: matmul(a.mT, b.mT), lambda a, b: torch.matmul(a.mT, b.mT), leaves((5, 4), (6, 5)))
    a, b = leaves((2, 3, 4, 5), (5, 6))
    matmul(a.transpose(1, 2), b).sum().backward()
    close(b.grad, a.double().sum((0, 1, 2))[:, None].expand(5, 6))


def test_strides_are_not_copied(monkeypatch):
    """Only matrices with no contiguous axis are: transposed ones are given as another layout."""

    def given(problem, device, tensors):
        inputs.update(tensors)
        return enqueue(problem, device, tensors)

    inputs, enqueue, wide = {}, gemm.enqueue, normal(3, 40, 50)
    monkeypatch.setattr(gemm, "enqueue", given)
    for a, b in (
        (wide[:, 2:9, 5:30], wide[:, 5:30, :11]),
        (wide.mT[:, :9, :30], wide[:, 5:35, :11]),
        (wide[0].T, wide[1]),
        (wide[1:2].expand(3, 40, 50), wide.mT),
        (wide.mT, wide[0]),  # one B for three column-major A
    ):
        close(matmul(a, b), torch.matmul(a.double(), b.double()))
        assert all(
            tensor.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr() for tensor in inputs.values()
        )
    close(matmul(wide[0, ::2, ::2], wide[1, :25, ::3]), torch.matmul(wide[0, ::2, ::2], wide[1, :25, ::3]).double())


@pytest.mark.slow
def test_the_operator_keeps_pytorchs_rules():
    op = torch.ops.catalog.gemm.default
    a, b, bias = leaves((4, 5), (5, 6), (6,))
    library.opcheck(op, (a, b, bias, "no"))
    library.opcheck(op, (a, b, None, "gelu"))
    library.opcheck(op, (*leaves((2, 4, 5), (2, 5, 6)), None, "no"))
    with torch.profiler.profile() as profile, torch.no_grad():
        product(a, b)
    assert "catalog::gemm" in {event.key for event in profile.key_averages()}
    with pytest.raises(UsageError, match=r"the catalog's product has no gradient in transforms of torch\.func"):
        torch.func.grad(lambda a: matmul(a, b).sum())(a.detach())
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(UsageError, match="the catalog's product has no forward-mode derivative"),
    ):
        matmul(torch.autograd.forward_ad.make_dual(a.detach(), a.detach()), b)


@pytest.mark.slow
def test_compiled_graphs_keep_the_operator():
    def layer(x, weight, bias):
        return matmul(linear(x, weight, bias, "gelu"), weight)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 8):
        tensors = leaves((2, rows, 20), (33, 20), (33,))
        assert torch.equal(compiled(*tensors), layer(*tensors))
        grads = [torch.autograd.grad(function(*tensors).sum(), tensors) for function in (compiled, layer)]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other)
    with torch.no_grad():
        assert torch.equal(compiled(*tensors), layer(*tensors))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: linear(x, x.T), "x is (4, 5) and weight is (5, 4): expected (..., in) and (out, in)"),
        (lambda x: linear(x, x, x), "weight is (4, 5) and bias is (4, 5): expected (out, in) and (out)"),
        (lambda x: linear(x, x.half()), "weight is torch.float16: expected torch.float32 as of x"),
        (lambda x: linear(x, x.to("meta")), "weight is on meta: expected cpu as of x"),
        (lambda x: matmul(x, x), "a is (4, 5) and b is (4, 5): expected (..., m, k) or (k), and (..., k, n) or (k)"),
        (lambda x: matmul(x[0, 0], x), "a is () and b is (4, 5): expected"),
        (lambda x: matmul(x.expand(2, 4, 5), x.T.expand(3, 5, 4)), "the axes before the last two do not broadcast"),
        (lambda x: matmul(x.double(), x.double().T), "tensors are torch.float64: kernels accept torch.float32"),
    ],
)
def test_bad_tensors_are_a_message(call, message):
    with pytest.raises(TensorError, match=re.escape(message)):
        call(normal(4, 5))


def test_other_bad_calls_are_a_message(monkeypatch):
    x = normal(4, 5)
    with pytest.raises(ArgumentError, match="activation='tanh' is not allowed"):
        linear(x, x, activation="tanh")
    monkeypatch.setattr(gemm, "arch_of", lambda device: "sm_75")
    with pytest.raises(SelectionError, match=r"there are no GEMM kernels for sm_75\n.*torch\.matmul may do"):
        linear(x, x)
    monkeypatch.setattr(gemm, "arch_of", lambda device: "sm_90")
    with pytest.raises(SelectionError, match=r"fp32(.|\n)*torch\.matmul may do"):
        linear(x, x)
    with pytest.raises(SelectionError, match=r"fp32(.|\n)*torch\.matmul may do"):
        grouped_mm(x, x.T[None], torch.tensor([4], dtype=torch.int32))


# Groups


def grouped64(a, b, offs):
    """The definition: a list of products."""
    starts, ends = [0, *offs.tolist()[:-1]], offs.tolist()
    pieces = list(zip(range(len(ends)), starts, ends, strict=True))
    if a.dim() == 3:
        parts = [a[i] @ b[:, start:end] for i, start, end in pieces]
        return torch.cat([*parts, b.new_zeros(a.shape[1], b.shape[1] - ends[-1])], -1)
    if b.dim() == 3:
        parts = [a[start:end] @ b[i] for i, start, end in pieces]
        return torch.cat([*parts, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])
    return torch.stack([a[:, start:end] @ b[start:end] for i, start, end in pieces])


OFFS = torch.tensor([3, 3, 40, 41], dtype=torch.int32)


def test_every_call_may_have_another_number_of_groups():
    for ends in ([3, 9], [3, 9], [2, 5, 9], [9]):
        a, b, offs = normal(9, 5), normal(len(ends), 5, 6), torch.tensor(ends, dtype=torch.int32)
        close(grouped_mm(a, b, offs), grouped64(a.double(), b.double(), offs))


@pytest.mark.parametrize(("a", "b"), [((44, 5), (4, 5, 6)), ((4, 5, 6), (6, 44)), ((5, 41), (41, 6))])
def test_groups_have_gradients(a, b):
    tensors = leaves(a, b)
    check_gradients(lambda a, b: grouped_mm(a, b, OFFS), lambda a, b: grouped64(a, b, OFFS), tensors)
    if a[-1] == 5:  # weights stored as (out, in): their gradient is dense
        weights = normal(4, 6, 5).requires_grad_()
        theirs = grouped64(tensors[0].double(), weights.double().mT, OFFS)
        close(grouped_mm(tensors[0], weights.mT, OFFS), theirs)
        grouped_mm(tensors[0], weights.mT, OFFS).sum().backward()
        assert weights.grad.is_contiguous()


@pytest.mark.slow
def test_groups_are_pytorchs():
    """PyTorch's own takes bfloat16 and strides of 16 bytes."""
    a, b = normal(44, 16, dtype=torch.bfloat16), normal(4, 16, 24, dtype=torch.bfloat16, seed=1)
    offs = torch.tensor([3, 3, 40, 44], dtype=torch.int32)
    close(grouped_mm(a, b, offs), functional.grouped_mm(a, b, offs=offs).double(), torch.bfloat16)
    close(grouped_mm(b, b.mT), functional.grouped_mm(b, b.mT).double(), torch.bfloat16)
    library.opcheck(torch.ops.catalog.grouped_mm.default, (*leaves((44, 5), (4, 5, 6)), OFFS))
    library.opcheck(torch.ops.catalog.grouped_mm.default, (*leaves((5, 41), (41, 6)), OFFS))
    compiled = torch.compile(grouped_mm, fullgraph=True, backend="aot_eager")
    tensors = leaves((44, 5), (4, 5, 6))
    grads = [
        torch.autograd.grad(function(*tensors, OFFS).square().sum(), tensors) for function in (compiled, grouped_mm)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: grouped_mm(x, x, OFFS), "mat_a is (4, 5) and mat_b is (4, 5): expected (m, k)"),
        (lambda x: grouped_mm(x, x.T), "offs are needed unless both have an axis of groups"),
        (lambda x: grouped_mm(x[None], x.T.expand(2, 5, 4)), "expected as many matrices"),
        (lambda x: grouped_mm(x, x.T.expand(2, 5, 4), OFFS), "and offs is (4,): expected an end for each group"),
        (
            lambda x: grouped_mm(x, x.T.expand(4, 5, 4), OFFS),
            "offs is [3, 3, 40, 41]: must ascend from 0, and end at 4",
        ),
        (lambda x: grouped_mm(x, x.T, OFFS.flip(0)), "offs is [41, 40, 3, 3]: must ascend"),
        (lambda x: grouped_mm(x, x.T, OFFS.long()), "offs is torch.int64 (4,): expected torch.int32 (groups,)"),
    ],
)
def test_bad_groups_are_a_message(call, message):
    with pytest.raises(TensorError, match=re.escape(message)):
        call(normal(4, 5))
