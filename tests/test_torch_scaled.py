"""Scaled products for PyTorch, compared with torch._scaled_mm and with matrices of scaled elements in float64."""

import pytest
from conftest import missing

from catalog.errors import TensorError, UsageError

try:
    import torch
except ImportError:
    missing("torch")

from torch import library

from catalog.torch import scaled_grouped_mm, scaled_mm

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def tolerance(a, b, out_dtype):
    """Of float32 sums in any order, usually: unit roundoff times sqrt(k) times the sum of magnitudes; then rounded."""
    sums = (a.double().abs() @ b.double().abs()).max().item()
    unit = torch.finfo(torch.float32).eps / 2
    return {"rtol": torch.finfo(out_dtype).eps, "atol": unit * a.shape[-1] ** 0.5 * sums}


def eight_bits(*shape, dtype=torch.float8_e4m3fn, seed=0):
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * (20 if dtype == torch.int8 else 1)
    return drawn.to(dtype)


def scaled(matrix, blocks):
    """Matrices in float64, each block of 128 x 128, or fewer rows, multiplied by its scale."""
    rows, columns = matrix.shape[-2:]
    of_rows = blocks.shape[-2] if blocks.shape[-2] == rows else -(-rows // 128)
    assert blocks.shape[-2] == of_rows
    spread = blocks.double().repeat_interleave(128, -1)[..., :columns]
    return matrix.double() * (spread if of_rows == rows else spread.repeat_interleave(128, -2)[..., :rows, :])


@pytest.mark.slow
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_scales_of_tensors_and_of_rows_are_pytorchs(dtype, out_dtype):
    a, weight = eight_bits(5, 304, dtype=dtype), eight_bits(144, 304, dtype=dtype, seed=1)
    bias = torch.randn(144).to(out_dtype) if out_dtype != torch.float32 else None
    of_tensors = torch.tensor(0.5), torch.tensor(0.25)
    of_rows = torch.rand(5, 1), torch.rand(1, 144)
    allowed = tolerance(a, weight.t(), out_dtype)
    for scales, added in ((of_tensors, bias), (of_rows, None)):
        ours = scaled_mm(a, weight.t(), *scales, added, out_dtype)
        theirs = torch._scaled_mm(a, weight.t(), *scales, bias=added, out_dtype=out_dtype)
        torch.testing.assert_close(ours, theirs, **allowed)
    mixed = scaled_mm(a, weight.t(), of_rows[0].flatten(), of_tensors[1], out_dtype=out_dtype)
    expected = (a.double() * of_rows[0]) @ weight.double().t() * of_tensors[1]
    torch.testing.assert_close(mixed, expected.to(out_dtype), **allowed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_blocks(dtype):
    """Weights as DeepSeek-V3 stores them: (out, in), with a scale for each block of 128 x 128."""
    a, weight = eight_bits(40, 300, dtype=dtype), eight_bits(140, 300, dtype=dtype, seed=1)
    scale_a, of_weight, bias = torch.rand(40, 3), torch.rand(2, 3), torch.randn(140)
    c = scaled_mm(a, weight.t(), scale_a, of_weight.t(), bias, out_dtype=torch.float32)
    expected = scaled(a, scale_a) @ scaled(weight, of_weight).mT + bias
    torch.testing.assert_close(c.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_groups(blocks):
    a, weight, offs = eight_bits(9, 200), eight_bits(3, 140, 200, seed=1), torch.tensor([2, 2, 7], dtype=torch.int32)
    scale_a = torch.rand(9, 2 if blocks else 1)
    of_weight = torch.rand(3, 2, 2) if blocks else torch.rand(3, 140, 1)
    c = scaled_grouped_mm(a, weight.mT, scale_a, of_weight.mT, offs, torch.float32)
    for (start, end), matrix, scales in zip(((0, 2), (2, 2), (2, 7)), weight, of_weight, strict=True):
        rows = slice(start, end)
        if blocks:
            expected = scaled(a[rows], scale_a[rows]) @ scaled(matrix, scales).mT
        else:
            expected = (a[rows].double() * scale_a[rows]) @ (matrix.double() * scales).mT
        torch.testing.assert_close(c[rows].double(), expected, rtol=1e-4, atol=1e-4)
    assert (c[7:] == 0).all()


@pytest.mark.slow
def test_a_compiled_graph_has_the_operator():
    a, weight = eight_bits(4, 256), eight_bits(128, 256, seed=1)
    scales = torch.rand(4, 2), torch.rand(2, 1)
    compiled = torch.compile(lambda *inputs: scaled_mm(*inputs) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, weight.t(), *scales), scaled_mm(a, weight.t(), *scales) + 1)
    op = torch.ops.catalog.scaled_mm.default
    library.opcheck(op, (a, weight.t(), *scales, None, torch.bfloat16), test_utils="test_faketensor")


A, B, ROWS, COLUMNS = eight_bits(4, 256), eight_bits(256, 130), torch.rand(4, 1), torch.rand(1, 130)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((A.float(), B, ROWS, COLUMNS), "a is torch.float32: expected torch.float8_e4m3fn or"),
        ((A, B.view(torch.int8), ROWS, COLUMNS), "b is torch.int8: expected torch.float8_e4m3fn"),
        ((A, B, ROWS.double(), COLUMNS), "scale_a is torch.float64: expected torch.float32"),
        ((A, B[1:], ROWS, COLUMNS), r"a is \(4, 256\) and b is \(255, 130\): expected \(m, k\) and \(k, n\)"),
        ((A, B, ROWS, torch.rand(2, 1)), r"or blocks \(4, 2\) and \(2, 2\)"),
        ((A, B, ROWS, COLUMNS, torch.rand(4)), r"b is \(256, 130\) and bias is \(4,\)"),
        (
            (A, B, ROWS, COLUMNS, torch.ones(130, dtype=torch.int32)),
            "bias is torch.int32: expected a floating-point type",
        ),
        (
            (A, B, ROWS, COLUMNS, torch.ones(130, dtype=torch.bool)),
            "bias is torch.bool: expected a floating-point type",
        ),
        ((A, B, ROWS, COLUMNS, None, torch.int8), "out_dtype is torch.int8"),
    ],
)
def test_a_wrong_call_is_a_message(arguments, message):
    with pytest.raises(TensorError, match=message):
        scaled_mm(*arguments)


def test_a_gradient_is_refused():
    with pytest.raises(UsageError, match="has no gradient"):
        scaled_mm(A, B, ROWS.clone().requires_grad_(), COLUMNS)
