"""The operator ``catalog::gemm``: its kernels, its shapes for tracing, its gradient.

``gemm(a, b, bias, activation)`` is f(A B + bias) of matrices, or of as many pairs of matrices as A and B have along a
first axis. It is functional, and its result is dense. A and B may have any strides: only one with no contiguous axis
is copied. Its gradients are products too, so it has derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import library

from catalog.errors import SelectionError, TensorError, UsageError
from catalog.ops.gemm.problem import GemmProblem
from catalog.ops.gemm.traits import Activation
from catalog.ops.product_words import Dtype
from catalog.runtime.catalog import Catalog
from catalog.schema.problem import Problem
from catalog.torch import watchers
from catalog.torch.calls import arch_of, on_nvidia
from catalog.torch.dispatch import below, differentiable

Optional = torch.Tensor | None

DTYPES: Mapping[torch.dtype, Dtype] = MappingProxyType(
    {torch.float32: Dtype.FP32, torch.float16: Dtype.FP16, torch.bfloat16: Dtype.BF16}
)
_FUNCTIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        Activation.RELU: torch.nn.functional.relu,
        Activation.GELU: torch.nn.functional.gelu,
        Activation.SILU: torch.nn.functional.silu,
    }
)
"""PyTorch's activations, which have gradients."""

BACKWARD = "Use backward() or torch.autograd.grad(); or torch.nn.functional.linear and torch.matmul."

_library = library.Library("catalog", "FRAGMENT")
_library.define("gemm(Tensor a, Tensor b, Tensor? bias, str activation) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def product(a: torch.Tensor, b: torch.Tensor, bias: Optional = None, activation: str = "no") -> torch.Tensor:
    """``catalog::gemm``: f(A B + bias), of the type of A; uses PyTorch's dispatcher only if needed.

    Args:
        a: (m, k) or (batch, m, k).
        b: (k, n) or (batch, k, n), of the type of A.
        bias: (n), of the type of A.
        activation: a word of :class:`~catalog.ops.gemm.traits.Activation`.

    Raises:
        SelectionError, TensorError, ProblemError, DeviceError, BuildError, ToolchainError: as
            :func:`catalog.torch.linear`.
    """
    tensors = (a, b, bias)
    if not watchers.unwatched(tensors) or watchers.has_gradient(tensors):
        result: torch.Tensor = torch.ops.catalog.gemm.default(a, b, bias, activation)
        return result
    return _run(a, b, bias, activation)


def _run(a: torch.Tensor, b: torch.Tensor, bias: Optional, activation: str) -> torch.Tensor:
    of_a, a_given = oriented(a)
    of_b, b_given = oriented(b)
    divided = on_nvidia(a)
    problem = _problem_of(a.dtype, f"{of_a}{of_b}r", a.shape, b.shape[-1], bias is not None, activation, divided)
    given = {"a": a_given, "b": b_given}
    if bias is not None:
        given["bias"] = bias.detach().contiguous()
    return enqueue(problem, a.device, given)


def _fake(a: torch.Tensor, b: torch.Tensor, bias: Optional, activation: str) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


@lru_cache(maxsize=16_384)
def _problem_of(
    dtype: torch.dtype, layout: str, a: tuple[int, ...], n: int, bias: bool, activation: str, divided: bool
) -> GemmProblem:
    """The problem of a product of A, (m, k) or (batch, m, k), with n columns.

    If K may be ``divided``, the catalog chooses into how many parts.

    Raises:
        TensorError: kernels do not take the dtype.
        ProblemError: as :class:`GemmProblem`.
    """
    *batch, m, k = a
    fields: dict[str, Any] = {"m": m, "n": n, "k": k, "bias": bias, "activation": activation, "layout": layout}
    return GemmProblem(dtype=word_of(dtype), batch=batch[0] if batch else None, k_batch=0 if divided else 1, **fields)


def word_of(dtype: torch.dtype) -> Dtype:
    """The catalog's name of an element type.

    Raises:
        TensorError: kernels do not take it.
    """
    word = DTYPES.get(dtype)
    if word is None:
        hint = "Pass .float() tensors, and call .double() on the result." if dtype == torch.float64 else None
        raise TensorError(f"tensors are {dtype}: kernels accept {', '.join(map(str, DTYPES))}", hint=hint)
    return word


def oriented(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The layout of matrices, and the tensor as it is given for it: transposed if they are column-major."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if is_dense(tensor, -1):
        return "r", tensor
    return ("c", tensor.mT) if is_dense(tensor, -2) else ("r", tensor.contiguous())


def is_dense(tensor: torch.Tensor, axis: int) -> bool:
    """Whether elements are contiguous along an axis."""
    return tensor.stride(axis) == 1 or tensor.size(axis) <= 1


def enqueue(
    problem: Problem,
    device: torch.device,
    given: Mapping[str, torch.Tensor],
    into: Mapping[str, torch.Tensor] | None = None,
    *,
    what: str = "GEMM",
    instead: str = "torch.nn.functional.linear or torch.matmul",
) -> torch.Tensor:
    """The only result of a problem: a new tensor, or the one given; on a GPU its current stream writes it.

    ``what`` it computes and what may be used ``instead`` are for messages.

    Raises:
        SelectionError: no kernel of the device's arch answers the problem.
        TensorError, DeviceError, BuildError, ToolchainError: as :meth:`catalog.runtime.plan.Plan.enqueue`.
    """
    arch = arch_of(device)
    try:
        plan = Catalog.select(problem, arch=arch)
    except SelectionError as error:
        raise SelectionError(error.message, hint=f"{error.hint}\nInstead: {instead} may do.") from None
    except UsageError:  # no spec names the arch
        hint = f"Use CPU tensors; or {instead} may do."
        raise SelectionError(f"tensors are on {device}: there are no {what} kernels for {arch}", hint=hint) from None
    result: torch.Tensor
    (result,) = plan.enqueue(given, outputs=into).values()
    return result


class _Product(torch.autograd.Function):
    """A B + bias with its gradient; ``keys`` are the dispatcher's."""

    @staticmethod
    def forward(ctx: Any, keys: Any, a: torch.Tensor, b: torch.Tensor, bias: Optional, activation: str) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        c: torch.Tensor = below(torch.ops.catalog.gemm.default, keys, (a, b, bias, activation))
        return c

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Optional, ...]:
        a, b = ctx.saved_tensors
        _, for_a, for_b, for_bias, _ = ctx.needs_input_grad
        da = _like(a, grad, b.mT) if for_a else None
        db = _like(b, a.mT, grad) if for_b else None
        return None, da, db, grad.flatten(0, -2).sum(0) if for_bias else None, None


def _like(tensor: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B, with matrices that are column-major where those of ``tensor`` are: the gradient of a weight is dense."""
    return product(a, b) if is_dense(tensor, -1) or not is_dense(tensor, -2) else product(b.mT, a.mT).mT


def _activated(kernel: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """The kernel for autograd, with PyTorch's activation and its gradient after a product that is differentiated."""

    def activated(keys: Any, a: torch.Tensor, b: torch.Tensor, bias: Optional, activation: str) -> torch.Tensor:
        result: torch.Tensor
        differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, bias))
        if differentiated and activation in _FUNCTIONS:
            result = _FUNCTIONS[Activation(activation)](kernel(keys, a, b, bias, "no"))
        else:
            result = kernel(keys, a, b, bias, activation)
        return result

    return activated


_op = torch.ops.catalog.gemm.default
_library.impl("gemm", _run, "CompositeExplicitAutograd")
_library.impl("gemm", _activated(differentiable(_Product, _op, "product", BACKWARD)), "Autograd", with_keyset=True)
library.register_fake("catalog::gemm", _fake, lib=_library)
