"""Products of groups, such as the tokens of each expert: ``grouped_mm`` and its operator ``catalog::grouped_mm``.

``grouped_mm(a, b, offs)`` of the operator has two forms: B has a matrix for each group of rows of A, or it is a single
matrix, and groups divide the columns of A and the rows of B. The gradients of each are products of the two forms.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import library

from catalog.errors import TensorError
from catalog.ops.gemm.problem import GemmProblem
from catalog.torch import watchers
from catalog.torch.dispatch import below, differentiable
from catalog.torch.gemm import BACKWARD, Optional, enqueue, is_dense, oriented, product, word_of
from catalog.torch.inputs import autocast_all
from catalog.torch.products import check_alike, unshapely

_library = library.Library("catalog", "FRAGMENT")
_library.define("grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def grouped_mm(mat_a: torch.Tensor, mat_b: torch.Tensor, offs: Optional = None) -> torch.Tensor:
    """Like :func:`torch.nn.functional.grouped_mm`, computed by the catalog's kernels: all groups in one launch.

    Group i ends at ``offs[i]`` and begins where the one before ends. It is a group of

    - rows of ``mat_a``, (m, k), multiplied by ``mat_b[i]``, (groups, k, n): the result is (m, n);
    - columns of ``mat_b``, (k, n), which ``mat_a[i]``, (groups, m, k), multiplies: the result is (m, n);
    - columns of ``mat_a``, (m, k), and rows of ``mat_b``, (k, n): the result is (groups, m, n).

    Two batches of matrices are multiplied without ``offs``. Rows or columns of the result after the last group are
    zeros. Differentiable any number of times. Sums are float32, the result is rounded once.

    Args:
        mat_a: float32, float16 or bfloat16; only a matrix with no contiguous axis is copied.
        mat_b: of the type of mat_a.
        offs: int32, (groups,), the ends of groups, ascending. Their values are read: a GPU's tensor is waited for.

    Raises:
        TensorError: shapes, types or devices of the tensors do not match, no kernel accepts their type, or offs do not
            ascend or exceed the axis.
        SelectionError, DeviceError, BuildError, ToolchainError: as :func:`catalog.torch.linear`.
    """
    mat_a, mat_b = autocast_all(mat_a, mat_b)
    check_alike(mat_a=mat_a, mat_b=mat_b)
    axes = (mat_a.dim(), mat_b.dim())
    if not {*axes} <= {2, 3} or mat_a.shape[-1] != mat_b.shape[-2]:
        raise unshapely(mat_a=mat_a, mat_b=mat_b, why="expected (m, k) or (groups, m, k), and (k, n) or (groups, k, n)")
    if (offs is None) != (axes == (3, 3)):
        raise unshapely(mat_a=mat_a, mat_b=mat_b, why="offs are needed unless both have an axis of groups")
    if offs is None:
        if mat_a.shape[0] != mat_b.shape[0]:
            raise unshapely(mat_a=mat_a, mat_b=mat_b, why="expected as many matrices")
        return product(mat_a, mat_b)
    if offs.dtype != torch.int32 or offs.dim() != 1:
        raise TensorError(f"offs is {offs.dtype} {tuple(offs.shape)}: expected torch.int32 (groups,)")
    groups = next((tensor.shape[0] for tensor in (mat_a, mat_b) if tensor.dim() == 3), offs.shape[0])
    if groups != offs.shape[0]:
        raise unshapely(mat_a=mat_a, mat_b=mat_b, offs=offs, why="expected an end for each group")
    if mat_a.dim() == 3:
        return _grouped(mat_b.mT, mat_a.mT, offs).mT
    return _grouped(mat_a, mat_b, offs)


def _grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``catalog::grouped_mm``; uses PyTorch's dispatcher only if needed."""
    tensors = (a, b, offs)
    if not watchers.unwatched((a, b)) or watchers.has_gradient(tensors):
        result: torch.Tensor = torch.ops.catalog.grouped_mm.default(*tensors)
        return result
    return _run(*tensors)


def _run(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    ends = offs.tolist()
    axis, size = ("m", a.shape[0]) if b.dim() == 3 else ("k", a.shape[1])
    starts = [0, *ends]
    if any(start > end for start, end in pairwise(starts)) or starts[-1] > size:
        raise TensorError(f"offs is {ends}: must ascend from 0, and end at {size} at most")
    groups = tuple(end - start for start, end in pairwise(starts))
    c = a.new_empty(_shape(a, b, offs))
    used = starts[-1]
    if axis == "m":
        a = a[:used]
        c[used:] = 0
    else:
        a, b = a[:, :used], b[:used]
    of_a, a_given = oriented(a)
    of_b, b_given = oriented(b)
    problem = _problem_of(a.dtype, f"{of_a}{of_b}r", groups, axis, a.shape[0], b.shape[-1], a.shape[1])
    enqueue(problem, a.device, {"a": a_given, "b": b_given}, {"c": c[:used] if axis == "m" else c})
    return c


@lru_cache(maxsize=4096)
def _problem_of(
    dtype: torch.dtype, layout: str, groups: tuple[int, ...], axis: str, m: int, n: int, k: int
) -> GemmProblem:
    fields: dict[str, Any] = {"layout": layout, "groups": groups, "group_axis": axis, "m": m, "n": n, "k": k}
    return GemmProblem(dtype=word_of(dtype), **fields)


def _shape(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> tuple[int, ...]:
    groups = () if b.dim() == 3 else (offs.shape[0],)
    return (*groups, a.shape[0], b.shape[-1])


def _fake(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return a.new_empty(_shape(a, b, offs))


class _Groups(torch.autograd.Function):
    """The products with their gradients; ``keys`` are the dispatcher's."""

    @staticmethod
    def forward(ctx: Any, keys: Any, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b, offs)
        c: torch.Tensor = below(torch.ops.catalog.grouped_mm.default, keys, (a, b, offs))
        return c

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Optional, ...]:
        a, b, offs = ctx.saved_tensors
        _, for_a, for_b, _ = ctx.needs_input_grad
        da = db = None
        if for_a:
            da = _grouped(grad, b.mT, offs) if b.dim() == 3 else _grouped(b, grad.mT, offs).mT
        if for_b and b.dim() == 3:  # with the strides of B
            by_columns = is_dense(b, -2) and not is_dense(b, -1)
            db = _grouped(grad.mT, a, offs).mT if by_columns else _grouped(a.mT, grad, offs)
        elif for_b:
            db = _grouped(a.mT, grad, offs)
        return None, da, db, None


_op = torch.ops.catalog.grouped_mm.default
_library.impl("grouped_mm", _run, "CompositeExplicitAutograd")
_library.impl("grouped_mm", differentiable(_Groups, _op, "product", BACKWARD), "Autograd", with_keyset=True)
library.register_fake("catalog::grouped_mm", _fake, lib=_library)
