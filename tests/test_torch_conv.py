"""The catalog's convolutions for PyTorch: against PyTorch's own in float64, gradients, compiled graphs, messages."""

from __future__ import annotations

import re

import pytest
from conftest import missing

from catalog.errors import ArgumentError, ProblemError, TensorError

try:
    import torch
except ImportError:
    missing("torch")

from torch import library
from torch.nn import functional
from torch_cases import check_gradients, close, leaves, normal

from catalog.torch import conv1d, conv2d, conv3d

GEOMETRY = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2}


def in_channels_last(tensor):
    return tensor.detach().contiguous(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.slow
def test_conv2d_is_pytorchs_with_gradients():
    """Of any order; results have the strides of PyTorch's."""
    x, weight, bias = leaves((2, 6, 9, 8), (8, 3, 3, 2), (8,))
    x, weight = in_channels_last(x), in_channels_last(weight)
    check_gradients(
        lambda *tensors: conv2d(*tensors, **GEOMETRY),
        lambda *tensors: functional.conv2d(*tensors, **GEOMETRY),
        (x, weight, bias),
    )
    y = conv2d(x, weight, bias, **GEOMETRY)
    assert y.stride() == functional.conv2d(x, weight, bias, **GEOMETRY).stride()
    for tensor, gradient in zip((x, weight), torch.autograd.grad(y.sum(), (x, weight)), strict=True):
        assert gradient.stride() == tensor.stride()
    with torch.autocast("cpu"):
        assert conv2d(x, weight, bias, **GEOMETRY).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs", "size"), [(conv1d, functional.conv1d, (9,)), (conv3d, functional.conv3d, (4, 5, 6))]
)
def test_other_axes_and_forms_of_arguments(ours, theirs, size):
    """Contiguous images, one number for all axes, padding in words, one image."""
    x, weight = normal(2, 4, *size), normal(6, 2, *(2,) * len(size))
    for options in ({"padding": "same"}, {"padding": "valid", "stride": 2}, {"padding": 1, "dilation": 2}):
        expected = theirs(x.double(), weight.double(), groups=2, **options)
        close(ours(x, weight, groups=2, **options), expected)
        close(ours(x[1], weight, groups=2, **options), expected[1])


@pytest.mark.slow
def test_the_operator_is_whole_and_compiles():
    x, weight = (in_channels_last(tensor) for tensor in leaves((2, 6, 9, 8), (8, 3, 3, 2)))
    library.opcheck(torch.ops.catalog.conv.default, (x, weight, None, [9, 8], [3, 2], [2, 1], [1, 2], [1, 2], 2))
    compiled = torch.compile(lambda *tensors: conv2d(*tensors, **GEOMETRY).relu(), fullgraph=True, backend="aot_eager")
    close(compiled(x, weight), functional.conv2d(x, weight, **GEOMETRY).relu())
    compiled(x, weight).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stride": 0}, ArgumentError, "stride=0: expected an integer from 1, or 2 of them"),
        ({"padding": (1, 2, 3)}, ArgumentError, "padding=(1, 2, 3): expected an integer from 0, or 2 of them"),
        ({"padding": "full"}, ArgumentError, "padding='full' is not allowed"),
        ({"padding": "same", "stride": 2}, ArgumentError, 'padding="same" needs a stride of 1'),
        ({"groups": 3}, ArgumentError, "groups=3 does not divide the 8 output channels"),
        ({"groups": 4}, TensorError, "weight is (8, 3, 3, 2): expected (n, c) and (k, c / 4)"),
        ({"dilation": 9}, ProblemError, "the filter reaches over 19 elements along axis 0, the padded input has 9"),
        ({"bias": torch.ones(3)}, TensorError, "bias is (3,): expected"),
        ({"bias": torch.ones(8).double()}, TensorError, "bias is torch.float64: expected torch.float32"),
    ],
)
def test_a_wrong_call_is_a_message(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        conv2d(torch.ones(2, 6, 9, 8), torch.ones(8, 3, 3, 2), **{"groups": 2, **options})
