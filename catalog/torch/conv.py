"""Convolutions with the signatures of :func:`torch.nn.functional.conv1d` and its like, and their operator.

``catalog::conv(input, weight, output, size, filter, stride, pad, dilation, g)`` computes the tensor that is None of the
three from the other two: the output, or the gradient of the input or of the weight, where ``output`` is its gradient.
The sum of products of all three is linear in each, so the gradients of one are the others: it has derivatives of any
order. Images whose channels are dense (``torch.channels_last``) and others are computed in place, and so is the result;
on NVIDIA GPUs others are copied, and the result's channels are dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import library

from catalog.errors import ArgumentError, TensorError
from catalog.ops.conv.problem import ConvProblem
from catalog.torch import watchers
from catalog.torch.calls import on_nvidia
from catalog.torch.dispatch import below, differentiable
from catalog.torch.gemm import Optional, enqueue, word_of
from catalog.torch.inputs import autocast_all
from catalog.torch.products import check_alike, unshapely

Extents = int | Sequence[int]

_DIRECTIONS = {"input": "bwd_data", "weight": "bwd_weight", "output": "forward"}
_BACKWARD = "Use backward() or torch.autograd.grad(); or torch.nn.functional.conv2d and its like."

_library = library.Library("catalog", "FRAGMENT")
_library.define(
    "conv(Tensor? input, Tensor? weight, Tensor? output, SymInt[] size, SymInt[] filter, int[] stride, int[] pad, "
    "int[] dilation, SymInt g) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def conv1d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional = None,
    stride: Extents = 1,
    padding: Extents | str = 0,
    dilation: Extents = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Like :func:`torch.nn.functional.conv1d`, computed by the catalog's kernels; see :func:`conv2d`.

    Raises:
        TensorError, ArgumentError, ProblemError, SelectionError, DeviceError, BuildError, ToolchainError: as
            :func:`conv2d`.
    """
    return _convolve(1, (input, weight, bias), stride, padding, dilation, groups)


def conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional = None,
    stride: Extents = 1,
    padding: Extents | str = 0,
    dilation: Extents = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Like :func:`torch.nn.functional.conv2d`, computed by the catalog's kernels.

    Differentiable any number of times with respect to input, weight and bias, by the catalog's kernels. Under
    :class:`torch.autocast` tensors are cast as PyTorch's own function casts them. Sums are float32; the result is
    rounded once, and again where PyTorch adds the bias.

    Args:
        input: (n, c, h, w) or (c, h, w), float32, float16 or bfloat16. Kernels for channels_last are the faster ones.
        weight: (k, c / groups, filter h, filter w), of the type of input; copied if its memory format differs.
        bias: (k), of the type of input.
        stride: of each axis, or of all.
        padding: zeros before and after each axis, or all; "valid" for none, "same" for an output as large as the input.
        dilation: distance of neighbours in the filter along each axis, or all.
        groups: number of groups that the channels are divided into.

    Returns:
        (n, k, out h, out w) or (k, out h, out w), of the type and in the memory format of input; on NVIDIA GPUs in
        channels_last.

    Raises:
        TensorError: shapes, types or devices of the tensors do not match, or no kernel accepts their type.
        ArgumentError: another argument is outside its domain.
        ProblemError: the filter does not fit into the padded input.
        SelectionError: the device's arch has no convolution kernels for such tensors and such a geometry.
        DeviceError, BuildError, ToolchainError: as :meth:`catalog.runtime.plan.Plan.enqueue`.
    """
    return _convolve(2, (input, weight, bias), stride, padding, dilation, groups)


def conv3d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional = None,
    stride: Extents = 1,
    padding: Extents | str = 0,
    dilation: Extents = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Like :func:`torch.nn.functional.conv3d`, computed by the catalog's kernels; see :func:`conv2d`.

    Raises:
        TensorError, ArgumentError, ProblemError, SelectionError, DeviceError, BuildError, ToolchainError: as
            :func:`conv2d`.
    """
    return _convolve(3, (input, weight, bias), stride, padding, dilation, groups)


def _convolve(
    ndim: int, tensors: tuple[Any, ...], stride: Extents, padding: Extents | str, dilation: Extents, groups: int
) -> torch.Tensor:
    """``stride``, ``padding`` and ``dilation`` as callers may state them; a problem has a number for each axis."""
    x, weight, bias = autocast_all(*tensors)
    check_alike(input=x, weight=weight, bias=bias)
    if x.dim() == ndim + 1:
        whole: torch.Tensor = _convolve(ndim, (x[None], weight, bias), stride, padding, dilation, groups)
        return whole[0]
    if x.dim() != ndim + 2 or weight.dim() != ndim + 2:
        raise unshapely(input=x, weight=weight, why=f"expected (n, c) and (k, c / groups), with {ndim} extents each")
    if groups < 1 or weight.shape[0] % groups:
        raise ArgumentError(f"groups={groups} does not divide the {weight.shape[0]} output channels")
    if x.shape[1] != weight.shape[1] * groups:
        raise unshapely(input=x, weight=weight, why=f"expected (n, c) and (k, c / {groups})")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise unshapely(weight=weight, bias=bias, why="expected (k, c / groups) and (k)")
    strides, apart = _of_axes("stride", stride, ndim, 1), _of_axes("dilation", dilation, ndim, 1)
    if isinstance(padding, str):
        x, pads = _padded(x, padding, weight.shape[2:], strides, apart)
    else:
        pads = _of_axes("padding", padding, ndim, 0)
    y = _conv(x, weight, None, list(x.shape[2:]), list(weight.shape[2:]), strides, pads, apart, groups)
    return y if bias is None else y + bias.reshape(-1, *(1,) * ndim)


def _of_axes(name: str, value: Any, ndim: int, least: int) -> list[int]:
    """A number for each axis.

    Raises:
        ArgumentError: there are others than ``ndim`` or one, or one is less than ``least``.
    """
    numbers = [value] * ndim if isinstance(value, int) else list(value)
    if len(numbers) == 1:
        numbers *= ndim
    if len(numbers) != ndim or any(number < least for number in numbers):
        raise ArgumentError(f"{name}={value!r}: expected an integer from {least}, or {ndim} of them")
    return numbers


def _padded(
    x: torch.Tensor, padding: str, reach: Sequence[int], stride: list[int], dilation: list[int]
) -> tuple[torch.Tensor, list[int]]:
    """The input and its padding for "valid" or "same"; an odd number of zeros is added to the input itself."""
    if padding not in ("valid", "same"):
        raise ArgumentError(f"padding={padding!r} is not allowed", hint='Allowed: numbers, "valid", "same".')
    if padding == "valid":
        return x, [0] * len(reach)
    if set(stride) != {1}:
        raise ArgumentError(f'padding="same" needs a stride of 1, not {stride}')
    zeros = [apart * (extent - 1) for apart, extent in zip(dilation, reach, strict=True)]
    if any(number % 2 for number in zeros):
        after = [word for number in reversed(zeros) for word in (0, number % 2)]
        x = torch.nn.functional.pad(x, after)
    return x, [number // 2 for number in zeros]


def _conv(input: Optional, weight: Optional, output: Optional, *geometry: Any) -> torch.Tensor:
    """``catalog::conv``; uses PyTorch's dispatcher only if needed."""
    tensors = (input, weight, output)
    if not watchers.unwatched(tensors) or watchers.has_gradient(tensors):
        result: torch.Tensor = torch.ops.catalog.conv.default(*tensors, *geometry)
        return result
    return _run(*tensors, *geometry)


def _run(input: Optional, weight: Optional, output: Optional, *geometry: Any) -> torch.Tensor:
    tensors = {"input": input, "weight": weight, "output": output}
    *lists, groups = geometry
    missing = _missing(tensors)
    image, *channels = _image_and_channels(tensors, groups)
    last = _is_last(tensors)
    fields = (_DIRECTIONS[missing], last, image.shape[0], *channels, groups)
    problem = _problem_of(image.dtype, fields, tuple(map(tuple, lists)))
    given = {name: _dense(tensor.detach(), last) for name, tensor in tensors.items() if tensor is not None}
    instead = "torch.nn.functional.conv2d and its like"
    result = enqueue(problem, image.device, given, what="convolution", instead=instead)
    return result.movedim(-1, 1) if last else result


def _fake(input: Optional, weight: Optional, output: Optional, *geometry: Any) -> torch.Tensor:
    tensors = {"input": input, "weight": weight, "output": output}
    size, reach, stride, pad, dilation, groups = geometry
    missing = _missing(tensors)
    image, c, k = _image_and_channels(tensors, groups)
    axes = zip(size, reach, stride, dilation, pad, strict=True)
    out = [(extent + 2 * zeros - apart * (taps - 1) - 1) // step + 1 for extent, taps, step, apart, zeros in axes]
    shapes = {"input": (image.shape[0], c, size), "weight": (k, c // groups, reach), "output": (image.shape[0], k, out)}
    first, channels, extents = shapes[missing]
    if _is_last(tensors):
        return image.new_empty((first, *extents, channels)).movedim(-1, 1)
    return image.new_empty((first, channels, *extents))


def _missing(tensors: Mapping[str, Optional]) -> str:
    """The tensor that is computed.

    Raises:
        TensorError: not one of the tensors is None, but several or none.
    """
    names = [name for name, tensor in tensors.items() if tensor is None]
    if len(names) != 1:
        raise TensorError(f"{len(tensors) - len(names)} tensors are given: expected two of {', '.join(tensors)}")
    return names[0]


def _image_and_channels(tensors: Mapping[str, Any], groups: int) -> tuple[torch.Tensor, int, int]:
    """An image that is given, and the channels of the input and of the output."""
    x, weight, y = tensors.values()
    c = weight.shape[1] * groups if x is None else x.shape[1]
    return (y if x is None else x), c, weight.shape[0] if y is None else y.shape[1]


@lru_cache(maxsize=16_384)
def _problem_of(dtype: torch.dtype, fields: tuple[Any, ...], geometry: tuple[tuple[int, ...], ...]) -> ConvProblem:
    direction, last, n, c, k, g = fields
    of_axes: dict[str, Any] = dict(zip(("size", "filter", "stride", "pad", "dilation"), geometry, strict=True))
    layout: Any = "nhwgc" if last else "ngchw"
    return ConvProblem(direction=direction, n=n, c=c, k=k, g=g, dtype=word_of(dtype).value, layout=layout, **of_axes)


def _is_last(tensors: Mapping[str, Optional]) -> bool:
    """Whether channels are contiguous, and not the last axis, in a tensor that is given: as PyTorch decides.

    On NVIDIA GPUs all tensors are taken so: kernels have no other layout.
    """
    given = [tensor[:1] for tensor in tensors.values() if tensor is not None]
    return on_nvidia(given[0]) or any(one.movedim(1, -1).is_contiguous() and not one.is_contiguous() for one in given)


def _dense(tensor: torch.Tensor, last: bool) -> torch.Tensor:
    """The tensor in a kernel's order of axes, copied only if an axis but the first is strided."""
    ordered = tensor.movedim(1, -1) if last else tensor
    return ordered if ordered[:1].is_contiguous() else ordered.contiguous()


class _Convolution(torch.autograd.Function):
    """The operator with its gradients; ``keys`` are the dispatcher's."""

    @staticmethod
    def forward(ctx: Any, keys: Any, input: Optional, weight: Optional, output: Optional, *geometry: Any) -> Any:
        ctx.save_for_backward(input, weight, output)
        ctx.geometry = geometry
        return below(torch.ops.catalog.conv.default, keys, (input, weight, output, *geometry))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Optional, ...]:
        tensors = ctx.saved_tensors
        gradients: list[Optional] = []
        for place, tensor in enumerate(tensors):
            if tensor is None or not ctx.needs_input_grad[1 + place]:
                gradients.append(None)
                continue
            given = [grad if other is None else other for other in tensors]
            given[place] = None
            gradients.append(_conv(*given, *ctx.geometry))
        return None, *gradients, *(None,) * len(ctx.geometry)


_op = torch.ops.catalog.conv.default
_library.impl("conv", _run, "CompositeExplicitAutograd")
_library.impl("conv", differentiable(_Convolution, _op, "convolution", _BACKWARD), "Autograd", with_keyset=True)
library.register_fake("catalog::conv", _fake, lib=_library)
