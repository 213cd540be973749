"""Kernels of operators for autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from catalog.errors import UsageError
from catalog.torch import watchers


def below(op: Any, keys: Any, inputs: tuple[Any, ...]) -> Any:
    """Call the operator as the dispatcher does after autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys & torch._C._after_autograd_keyset, *inputs)


def differentiable(function: type[torch.autograd.Function], op: Any, what: str, hint: str) -> Callable[..., Any]:
    """An operator's kernel for autograd.

    PyTorch's own ``register_autograd`` makes a similar one that takes 100 us more: it reads the schema at each call.

    Args:
        function: takes the dispatcher's keys, then the inputs.
        op: the operator.
        what: what it computes, for messages.
        hint: the hint of messages about derivatives that it lacks.
    """

    def kernel(keys: Any, *inputs: Any) -> Any:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        _check_tangents(tensors, what, hint)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            if watchers.transformed():
                raise UsageError(f"the catalog's {what} has no gradient in transforms of torch.func", hint=hint)
            return function.apply(keys, *inputs)
        return below(op, keys, inputs)

    return kernel


def last_derivative(op: Any, what: str, hint: str) -> type[torch.autograd.Function]:
    """The autograd function of an operator that computes gradients, which have no gradient of their own.

    Args:
        op: the operator.
        what: what the gradients are of, for messages.
        hint: the hint of messages about second derivatives.
    """

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
            gradients: tuple[torch.Tensor, ...] = below(op, keys, inputs)
            return gradients

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            raise UsageError(f"the catalog's {what} has no second derivative", hint=hint)

    return Gradient


def _check_tangents(tensors: Iterable[torch.Tensor], what: str, hint: str) -> None:
    """Check that no tensor has a forward-mode tangent, which would be lost.

    Raises:
        UsageError: one has.
    """
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise UsageError(f"the catalog's {what} has no forward-mode derivative", hint=hint)
