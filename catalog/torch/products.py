"""Products of matrices with the signatures of :func:`torch.nn.functional.linear` and :func:`torch.matmul`."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch

from catalog.errors import ArgumentError, TensorError
from catalog.ops.gemm.traits import Activation
from catalog.torch.gemm import product
from catalog.torch.inputs import autocast_all

_ACTIVATIONS = tuple(word.value for word in Activation)
"""A tuple, because torch.compile of PyTorch 2.11 cannot trace a list of an enumeration."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Literal["relu", "gelu", "silu"] | None = None,
) -> torch.Tensor:
    """Like :func:`torch.nn.functional.linear`, computed by the catalog's kernels, with an optional activation.

    Without gradients the activation is part of the kernel; otherwise PyTorch's own follows. Differentiable any number
    of times with respect to x, weight and bias, by the catalog's kernels. Under :class:`torch.autocast` tensors are
    cast as PyTorch's own function casts them. Sums are float32, the result is rounded once.

    Args:
        x: (..., in), float32, float16 or bfloat16, with any strides.
        weight: (out, in), of the type of x, with any strides.
        bias: (out), of the type of x.
        activation: function applied to the result; gelu is the one with the error function.

    Returns:
        (..., out), of the type of x, dense.

    Raises:
        TensorError: shapes, types or devices of the tensors do not match, or no kernel accepts their type.
        ArgumentError: there is no such activation.
        SelectionError: the device's arch has no GEMM kernels.
        DeviceError, BuildError, ToolchainError: as :meth:`catalog.runtime.plan.Plan.enqueue`.
    """
    function = "no" if activation is None else activation
    if function not in _ACTIVATIONS:
        words = ", ".join(word for word in _ACTIVATIONS if word != "no")
        raise ArgumentError(f"activation={activation!r} is not allowed", hint=f"Allowed: None, {words}.")
    x, weight, bias = autocast_all(x, weight, bias)
    check_alike(x=x, weight=weight, bias=bias)
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise unshapely(x=x, weight=weight, why="expected (..., in) and (out, in)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise unshapely(weight=weight, bias=bias, why="expected (out, in) and (out)")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return product(rows, weight.t(), bias, function).reshape(*x.shape[:-1], weight.shape[0])


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Like :func:`torch.matmul`, computed by the catalog's kernels: leading axes broadcast, vectors are allowed.

    Differentiable any number of times, by the catalog's kernels. Under :class:`torch.autocast` tensors are cast as
    PyTorch's own function casts them. Sums are float32, the result is rounded once. Matrices may have any strides.
    Neither transposed nor repeated ones are copied, unless several leading axes do not combine into one.

    Args:
        a: (..., m, k) or (k), float32, float16 or bfloat16.
        b: (..., k, n) or (k), of the type of a.

    Returns:
        (..., m, n) without the axes that vectors lack, of the type of a, dense.

    Raises:
        TensorError, SelectionError, DeviceError, BuildError, ToolchainError: as :func:`linear`.
    """
    a, b = autocast_all(a, b)
    check_alike(a=a, b=b)
    if a.dim() < 1 or b.dim() < 1 or a.shape[-1] != b.shape[max(b.dim() - 2, 0)]:
        raise unshapely(a=a, b=b, why="expected (..., m, k) or (k), and (..., k, n) or (k)")
    left, right = (a if a.dim() > 1 else a[None]), (b if b.dim() > 1 else b[:, None])
    try:
        leading = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except RuntimeError:
        raise unshapely(a=a, b=b, why="the axes before the last two do not broadcast") from None
    m, k, n = *left.shape[-2:], right.shape[-1]
    if _is_one(left, right):
        c = product(left.reshape(math.prod(left.shape[:-1]), k), right.reshape(k, n))
    else:
        batch = math.prod(leading)
        c = product(left.expand(*leading, m, k).reshape(batch, m, k), right.expand(*leading, k, n).reshape(batch, k, n))
    rows, columns = ((m,) if a.dim() > 1 else ()), ((n,) if b.dim() > 1 else ())
    return c.reshape((*leading, *rows, *columns))


def _is_one(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether A B is better a single product of all rows of A than one for each matrix of A.

    The gradient of B is then a single product as well. Without it, A is not copied for that.
    """
    if math.prod(b.shape[:-2]) != 1:
        return False
    axes = [(size, step) for size, step in zip(a.shape[:-1], a.stride()[:-1], strict=True) if size != 1]
    combine = all(step == size * inner for (_, step), (size, inner) in pairwise(axes))
    return combine or (torch.is_grad_enabled() and b.requires_grad)


def check_alike(**tensors: torch.Tensor | None) -> None:
    """Check that all tensors have the type and the device of the first one.

    Raises:
        TensorError: one has not.
    """
    (first, one), *others = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    for name, tensor in others:
        for what in ("dtype", "device"):
            found, expected = getattr(tensor, what), getattr(one, what)
            if found != expected:
                where = "is on" if what == "device" else "is"
                raise TensorError(f"{name} {where} {found}: expected {expected} as of {first}")


def unshapely(*, why: str, **tensors: torch.Tensor) -> TensorError:
    """The error of tensors whose shapes do not go together."""
    shapes = " and ".join(f"{name} is {tuple(tensor.shape)}" for name, tensor in tensors.items())
    return TensorError(f"{shapes}: {why}")
