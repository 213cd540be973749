"""The arrays of a problem: checks of inputs and outputs, their strides, and the creation of outputs.

:attr:`Problem.tensors` describes a problem's tensors; fp8 is OCP's float8_e4m3fn, and bf8 is float8_e5m2. Most tensors
need a contiguous innermost axis; the other axes may have any strides. Nothing is copied implicitly: if the innermost
axis is strided, the error says how to copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from catalog.errors import TensorError
from catalog.ops import operation_of
from catalog.runtime.elements import element_type
from catalog.runtime.memory import check_room
from catalog.schema.problem import Problem
from catalog.schema.problem_form import Form
from catalog.schema.problem_tensors import Tensor

Array = NDArray[Any]


class Flags(Protocol):
    """The array flags that checks use."""

    @property
    def writeable(self) -> bool:
        """Whether the array may be written."""

    @property
    def aligned(self) -> bool:
        """Whether the array's address is a multiple of its element size."""


class Strided(Protocol):
    """The array attributes that checks use, for arrays in any memory; NumPy arrays have them.

    :func:`numpy.shares_memory` accepts such arrays.
    """

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, from NumPy or ml_dtypes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements along each axis."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbouring elements along each axis."""

    @property
    def flags(self) -> Flags:
        """The array's flags."""


AsArray = Callable[[Problem, str, Any], Strided]
"""Converts the value given for the named tensor to an array: :func:`numpy_array`, or a device's method ``array``."""


def results(form: Form, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors that a run writes, by result name."""
    return {tensor.result or name: tensors[name] for name, tensor in form.tensors.items() if tensor.role != "input"}


def element_strides(tensor: Tensor, strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides of the argument struct, in elements, of an array with these strides in bytes.

    An axis that the tensor lacks has stride 0.
    """
    return tuple([0 if axis is None else strides[axis] // itemsize for axis in tensor.strides])


def zeroed_outputs(form: Form, inputs: Collection[str]) -> frozenset[str]:
    """The outputs that kernels do not fill completely, given inputs of these names; they start as zeros."""
    return operation_of(form.blank).zeroed_outputs(form, inputs)


def make_outputs(problem: Problem, inputs: Mapping[str, Any] | None = None) -> dict[str, Array]:
    """Make arrays for the outputs: zeros if kernels do not write every element, else uninitialised.

    Raises:
        ProblemError: the run would allocate more memory than this machine has.
    """
    check_room(problem)
    zeroed = zeroed_outputs(problem.form, inputs or ())
    return {
        name: _make(problem.shapes[name], element_type(problem, name), np.zeros if name in zeroed else np.empty)
        for name in problem.made
    }


_LINE = 64
"""Bytes of a line of most caches, and of the widest vectors."""
_LARGE = 1 << 20
"""Bytes of arrays for which it pays to begin with a line; those of NumPy's begin anywhere."""


def _make(shape: tuple[int, ...], dtype: np.dtype[Any], make: Callable[..., Array]) -> Array:
    """An array by ``np.empty`` or ``np.zeros``; large ones begin with a line, so that kernels can store whole lines."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return make(shape, dtype)
    memory = make(size + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return memory[begin : begin + size].view(dtype).reshape(shape)


def numpy_array(problem: Problem, name: str, value: Any) -> Array:
    """Return ``value``, given as the tensor ``name``, if it is a NumPy array.

    Raises:
        TensorError: it is not a NumPy array.
    """
    if not isinstance(value, np.ndarray):
        raise TensorError(
            f"{name} is a {type(value).__name__}: expected a NumPy array, {_expected(problem, name)}",
            hint="Arrays of other libraries in the device's memory are accepted if they have __dlpack__.",
        )
    return value


def check_inputs(problem: Problem, tensors: Mapping[str, Any], as_array: AsArray = numpy_array) -> dict[str, Strided]:
    """Check the inputs, and return them in order with the required shape, dtype and strides; optional ones if given.

    Raises:
        TensorError: a tensor is missing, unexpected, not an array, of another shape or dtype, not aligned, or strided
            along its innermost axis; the message names it, the given and the expected value. Or lengths or page
            numbers in NumPy arrays exceed the tensors they refer to, or a tensor that is updated in place is read-only.
    """
    given = {name: value for name, value in tensors.items() if value is not None}
    wanted = problem.needed
    if not given.keys() <= set(wanted):
        wanted = tuple(name for name in problem.accepted if name in given or name in problem.needed)
    checked = _checked(problem, wanted, given, problem.accepted, as_array)
    for name, array in checked.items():
        if problem.tensors[name].role == "updated":
            _check_writable(name, array.flags.writeable, array.shape, array.strides)
    arrays = {name: array for name, array in checked.items() if isinstance(array, np.ndarray)}
    operation_of(problem).check_values(problem, arrays)
    return checked


def check_outputs(problem: Problem, tensors: Mapping[str, Any], as_array: AsArray = numpy_array) -> dict[str, Strided]:
    """Check that the outputs can be written, and return them in order; they may still share memory.

    Raises:
        TensorError: as :func:`check_inputs`, or a tensor is read-only or overlaps itself.
    """
    outputs = _checked(problem, problem.made, tensors, problem.made, as_array)
    for name, array in outputs.items():
        _check_writable(name, array.flags.writeable, array.shape, array.strides)
    return outputs


def _check_writable(name: str, writable: bool, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Check that a kernel can write each element of the tensor ``name`` separately.

    Raises:
        TensorError: the tensor is read-only or overlaps itself.
    """
    if not writable:
        raise TensorError(f"{name} is read-only, but the kernel writes to it")
    if 0 not in shape and _overlaps(shape, strides):
        raise TensorError(f"{name} is a broadcast view or overlaps itself: the kernel would write elements twice")


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a step along some axis is no longer than what the axes of shorter steps span."""
    axes = sorted((abs(stride), extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1)
    span = 0
    for stride, extent in axes:
        if stride <= span:
            return True
        span += stride * (extent - 1)
    return False


def _check_names(problem: Problem, names: Sequence[str], tensors: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that all ``names`` are given, and only ``known`` tensors.

    Raises:
        TensorError: a tensor is missing or unexpected.
    """
    for name in tensors:
        if name not in known:
            raise TensorError(f"{name} is not a tensor of this problem: expected {', '.join(known)}")
    for name in names:
        if tensors.get(name) is None:
            raise TensorError(f"{name} is missing: expected {_expected(problem, name)}")


def _checked(
    problem: Problem, names: Sequence[str], tensors: Mapping[str, Any], known: Sequence[str], as_array: AsArray
) -> dict[str, Strided]:
    _check_names(problem, names, tensors, known)
    checked = {}
    for name in names:
        array = checked[name] = as_array(problem, name, tensors[name])
        _check_layout(problem, name, array.dtype, array.shape, array.strides)
        if not array.flags.aligned:
            raise TensorError(
                f"{name} is not aligned to its {array.dtype.itemsize}-byte elements",
                hint=f"Use {name}.copy(); with PyTorch {name}.clone().",
            )
    return checked


@lru_cache(maxsize=4096)  # a caller's tensors hardly ever differ in more than their addresses
def _check_layout(
    problem: Problem, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Check the dtype, shape and strides in bytes of the tensor ``name``.

    Raises:
        TensorError: one of them is wrong; the message says what is expected.
    """
    tensor = problem.tensors[name]
    fits = shape == tensor.shape or (tensor.pool and len(shape) == 1)
    if not fits or dtype != element_type(problem, name):
        raise TensorError(f"{name} is {dtype} {shape}: expected {_expected(problem, name)}")
    dense = dtype.itemsize
    for axis in reversed(range(len(shape) - tensor.contiguous, len(shape))):
        if 0 not in shape and shape[axis] > 1 and strides[axis] != dense:
            raise TensorError(
                f"{name} has a stride of {strides[axis]} bytes along "
                f"{'its last axis' if tensor.contiguous == 1 else f'axis {axis}'}: expected contiguous elements, "
                f"{dense} bytes apart",
                hint=f"Use numpy.ascontiguousarray({name}); with PyTorch {name}.contiguous().",
            )
        dense *= shape[axis]


def _expected(problem: Problem, name: str) -> str:
    return f"{element_type(problem, name)} {problem.tensors[name].shape}"
