"""Products of 8-bit matrices with scales: ``scaled_mm`` and ``scaled_grouped_mm``, and their operators.

A tensor's scale is passed as scales of rows. Passed as alpha, each value would be a problem of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import library

from catalog.errors import TensorError, UsageError
from catalog.ops.gemm.problem import BLOCK, GemmProblem
from catalog.ops.product_words import Dtype
from catalog.torch import watchers
from catalog.torch.calls import on_nvidia
from catalog.torch.gemm import DTYPES, Optional, enqueue, oriented
from catalog.torch.products import unshapely

Scaling = Literal["row", "block"]

EIGHT_BITS: Mapping[torch.dtype, Dtype] = MappingProxyType(
    {torch.float8_e4m3fn: Dtype.FP8, torch.float8_e5m2: Dtype.BF8, torch.int8: Dtype.INT8}
)

_library = library.Library("catalog", "FRAGMENT")
_TENSORS = "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b"
for _name, _more in {"scaled_mm": "Tensor? bias", "scaled_grouped_mm": "Tensor offs"}.items():
    _library.define(
        f"{_name}({_TENSORS}, {_more}, ScalarType out_dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
    )


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Like :func:`torch._scaled_mm`: the product of 8-bit matrices, each multiplied by its scales, plus a bias.

    The shapes of the scales say what they scale, each of A and B:

    - a tensor: one element;
    - rows of A, (m, 1) or (m), and columns of B, (1, n) or (n);
    - blocks of 1 x 128 of A, (m, ceil(k / 128)), and of 128 x 128 of B, (ceil(k / 128), ceil(n / 128)).

    One scale of a tensor goes together with either of the others. Sums are float32, or int32 for int8 within a row or a
    block; the result is rounded once. There are no gradients.

    Args:
        a: (m, k), float8_e4m3fn, float8_e5m2 or int8, with any strides.
        b: (k, n), of the type of a, with any strides.
        scale_a: float32; those of blocks are best contiguous.
        scale_b: float32; those of blocks are best the transpose of a contiguous tensor, as b usually is.
        bias: (n), of any floating-point type; it is rounded to out_dtype.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        (m, n), dense.

    Raises:
        TensorError: shapes, types or devices of the tensors do not match, or a scale of CPU tensors is not finite.
        UsageError: a tensor requires a gradient.
        SelectionError, DeviceError, BuildError, ToolchainError: as :func:`catalog.torch.linear`.
    """
    _check_types(a, b, scale_a, scale_b, out_dtype)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise unshapely(a=a, b=b, why="expected (m, k) and (k, n)")
    if bias is not None and (bias.shape != b.shape[1:] or bias.device != a.device):
        raise unshapely(b=b, bias=bias, why="expected (k, n) and (n), on one device")
    if bias is not None and not bias.is_floating_point():
        raise TensorError(f"bias is {bias.dtype}: expected a floating-point type")
    _check_no_gradient(a, b, scale_a, scale_b, bias)
    if not watchers.unwatched((a, b, scale_a, scale_b, bias)):
        result: torch.Tensor = torch.ops.catalog.scaled_mm.default(a, b, scale_a, scale_b, bias, out_dtype)
        return result
    return _run(a, b, scale_a, scale_b, bias, out_dtype)


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Groups of rows of A, each multiplied by its own matrix in B, as experts do: all in one launch.

    Group i ends at ``offs[i]`` and begins where the one before ends. Rows of the result after the last group are zeros.

    Args:
        a: (m, k), as of :func:`scaled_mm`.
        b: (groups, k, n), of the type of a.
        scale_a: as of :func:`scaled_mm`.
        scale_b: as of :func:`scaled_mm`, with a first axis of groups: (groups, 1, n) or (groups, n) for columns,
            (groups, ceil(k / 128), ceil(n / 128)) for blocks; or one element.
        offs: int32, (groups,), the ends of groups, ascending. Their values are read: a GPU's tensor is waited for.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        (m, n), dense.

    Raises:
        TensorError: as :func:`scaled_mm`, or offs do not ascend or exceed the rows.
        UsageError, SelectionError, DeviceError, BuildError, ToolchainError: as :func:`scaled_mm`.
    """
    _check_types(a, b, scale_a, scale_b, out_dtype)
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != b.shape[1]:
        raise unshapely(a=a, b=b, why="expected (m, k) and (groups, k, n)")
    if offs.dtype != torch.int32 or offs.shape != b.shape[:1]:
        raise TensorError(f"offs is {offs.dtype} {tuple(offs.shape)}: expected torch.int32 ({b.shape[0]},)")
    _check_no_gradient(a, b, scale_a, scale_b)
    if not watchers.unwatched((a, b, scale_a, scale_b)):
        result: torch.Tensor = torch.ops.catalog.scaled_grouped_mm.default(a, b, scale_a, scale_b, offs, out_dtype)
        return result
    return _run_groups(a, b, scale_a, scale_b, offs, out_dtype)


def _check_types(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> None:
    if a.dtype not in EIGHT_BITS:
        raise TensorError(f"a is {a.dtype}: expected {' or '.join(map(str, EIGHT_BITS))}")
    if out_dtype not in DTYPES:
        raise TensorError(f"out_dtype is {out_dtype}: expected {' or '.join(map(str, DTYPES))}")
    expected = {"b": (b, a.dtype), "scale_a": (scale_a, torch.float32), "scale_b": (scale_b, torch.float32)}
    for name, (tensor, dtype) in expected.items():
        if tensor.dtype != dtype:
            raise TensorError(f"{name} is {tensor.dtype}: expected {dtype}")
        if tensor.device != a.device:
            raise TensorError(f"{name} is on {tensor.device}: expected {a.device} as of a")


def _check_no_gradient(*tensors: Optional) -> None:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise UsageError(
            "the catalog's scaled product has no gradient", hint="Call it under torch.no_grad(), or detach the tensors."
        )


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: Optional,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    scaling, scales = _scales(a, b, scale_a, scale_b)
    of_a, a_given = oriented(a)
    of_b, b_given = oriented(b)
    given = {"a": a_given, "b": b_given, **scales}
    if bias is not None:
        given["bias"] = bias.detach().to(out_dtype).contiguous()
    divided = on_nvidia(a)
    sizes = (a.shape[0], b.shape[-1], a.shape[1])
    problem = _problem_of(a.dtype, out_dtype, scaling, f"{of_a}{of_b}r", sizes, bias=bias is not None, divided=divided)
    return enqueue(problem, a.device, given, instead="torch._scaled_mm")


def _run_groups(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    starts = [0, *offs.tolist()]
    used, rows = starts[-1], a.shape[0]
    if any(start > end for start, end in pairwise(starts)) or used > rows:
        raise TensorError(f"offs is {starts[1:]}: must ascend from 0, and end at {rows} at most")
    scaling, scales = _scales(a, b, scale_a, scale_b)
    c = a.new_empty((rows, b.shape[-1]), dtype=out_dtype)
    c[used:] = 0
    of_a, a_given = oriented(a[:used])
    of_b, b_given = oriented(b)
    groups = tuple(end - start for start, end in pairwise(starts))
    sizes = (used, b.shape[-1], a.shape[1])
    problem = _problem_of(a.dtype, out_dtype, scaling, f"{of_a}{of_b}r", sizes, groups=groups)
    given = {"a": a_given, "b": b_given, "scale_a": scales["scale_a"][:used], "scale_b": scales["scale_b"]}
    enqueue(problem, a.device, given, {"c": c[:used]}, instead="torch.nn.functional.scaled_grouped_mm")
    return c


def _scales(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> tuple[Scaling, dict[str, torch.Tensor]]:
    """What the scales scale, and the scales as kernels take them: dense, those of blocks of B by columns.

    Raises:
        TensorError: their shapes do not go together.
    """
    (m, k), (*groups, _, n) = a.shape, b.shape
    n_blocks, k_blocks = -(-n // BLOCK), -(-k // BLOCK)
    shapes: Mapping[Scaling, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "row": ((m,), (*groups, n)),
        "block": ((m, k_blocks), (*groups, n_blocks, k_blocks)),
    }
    scale_a, scale_b = scale_a.detach(), scale_b.detach()
    of_rows = (_is_one(scale_a) or scale_a.shape in ((m,), (m, 1))) and (
        _is_one(scale_b) or scale_b.shape in ((*groups, n), (*groups, 1, n))
    )
    of_blocks = (_is_one(scale_a) or scale_a.shape == (m, k_blocks)) and (
        _is_one(scale_b) or scale_b.shape == (*groups, k_blocks, n_blocks)
    )
    if not of_rows and not of_blocks:
        axis = "groups, " if groups else ""
        raise unshapely(
            scale_a=scale_a,
            scale_b=scale_b,
            why=f"for A of {tuple(a.shape)} and B of {tuple(b.shape)} expected one element; rows ({m}, 1) and "
            f"({axis}1, {n}); or blocks ({m}, {k_blocks}) and ({axis}{k_blocks}, {n_blocks})",
        )
    scaling: Scaling = "row" if of_rows else "block"
    if not of_rows and not _is_one(scale_b):
        scale_b = scale_b.mT
    pairs = zip(("scale_a", "scale_b"), (scale_a, scale_b), shapes[scaling], strict=True)
    return scaling, {name: _filled(scale, shape) for name, scale, shape in pairs}


def _is_one(scale: torch.Tensor) -> bool:
    return scale.numel() == 1


def _filled(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    filled = scale.reshape(()).expand(shape) if _is_one(scale) else scale.reshape(shape)
    return filled.contiguous()


@lru_cache(maxsize=16_384)
def _problem_of(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    scales: Scaling,
    layout: str,
    sizes: tuple[int, int, int],
    *,
    bias: bool = False,
    divided: bool = False,
    groups: tuple[int, ...] | None = None,
) -> GemmProblem:
    m, n, k = sizes
    fields: dict[str, Any] = {"m": m, "n": n, "k": k, "layout": layout, "bias": bias, "groups": groups}
    types = {"dtype": EIGHT_BITS[dtype], "dtype_c": DTYPES[out_dtype]}
    return GemmProblem(**fields, **types, scales=scales, k_batch=0 if divided else 1)


def _fake(a: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[-1]), dtype=others[-1])


for _name, _kernel in {"scaled_mm": _run, "scaled_grouped_mm": _run_groups}.items():
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    library.register_fake(f"catalog::{_name}", _fake, lib=_library)
