"""Detection of anything that observes a call, which must then go through PyTorch's dispatcher.

Only private functions of PyTorch report this. If a release lacks one of them, every call goes through the dispatcher.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

try:
    from torch._C import (
        _any_requires_grad,
        _dispatch_keys,
        _get_tracing_state,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._autograd import _profiler_enabled
    from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack

    _supported = hasattr(forward_ad, "_current_level")
except ImportError:
    _supported = False

Optional = torch.Tensor | None


def unwatched(tensors: tuple[Optional, ...]) -> bool:
    """Whether the dispatcher would call only our own kernels or their gradients, and nothing else would see the call.

    That holds for plain tensors outside of all modes, transforms, traces and profiles. The dispatcher takes 50 us to
    get through two kernels in Python, this check 2 us.
    """
    if torch.compiler.is_compiling() or not _supported:  # first: compiled code must keep the operators
        return False
    if (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or _profiler_enabled()
        or forward_ad._current_level >= 0
    ):
        return False
    on_cpu = None
    for tensor in tensors:
        if tensor is None:
            continue
        if on_cpu is None:
            on_cpu = tensor.is_cpu
        if type(tensor) is not torch.Tensor or tensor.is_cpu is not on_cpu or tensor.is_neg():
            return False
        if is_functorch_wrapped_tensor(tensor):  # left over from a transform that has ended
            return False
        if not on_cpu and not tensor.is_cuda:
            return False
    return True


def has_gradient(tensors: tuple[Optional, ...]) -> bool:
    """Whether an unwatched call on these tensors is differentiated."""
    return torch.is_grad_enabled() and _any_requires_grad(*tensors)


def alike(gradient: torch.Tensor, o: torch.Tensor) -> bool:
    """Whether the gradient of an unwatched call has the shape and kind of O.

    :func:`torch.autograd.grad` makes a batch of several gradients look like one.
    """
    return bool(_dispatch_keys(gradient).raw_repr() == _dispatch_keys(o).raw_repr())


def transformed() -> bool:
    """Whether a transform of :mod:`torch.func` is active, as far as PyTorch reports it."""
    return _supported and peek_interpreter_stack() is not None
