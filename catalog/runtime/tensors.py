"""The arrays of a problem: checked, described to a kernel, and made where they are outputs.

What tensors a problem has is :attr:`Problem.tensors`, where fp8 is OCP's float8_e4m3fn, and bf8 float8_e5m2. Of most
tensors the innermost axis must be contiguous, and the others may have any strides. Nothing is copied behind the
caller's back; where the innermost axis is strided, the error says how to copy.
"""

from __future__ import annotations

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
    """What checks ask of the flags of an array."""

    @property
    def writeable(self) -> bool:
        """Whether it may be written."""

    @property
    def aligned(self) -> bool:
        """Whether its elements are where the hardware wants such elements."""


class Strided(Protocol):
    """What checks ask of an array, in whatever memory; NumPy's have it, and :func:`numpy.shares_memory` takes it."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's or ml_dtypes'."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from element to element along each axis."""

    @property
    def flags(self) -> Flags:
        """What may be done with it."""


AsArray = Callable[[Problem, str, Any], Strided]
"""Makes an array of what was given as a tensor of that name: :func:`numpy_array`, or a device's method ``array``."""


def results(form: Form, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors that a run has written, by the names of its results."""
    return {tensor.result or name: tensors[name] for name, tensor in form.tensors.items() if tensor.role != "input"}


def element_strides(tensor: Tensor, strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides of the argument struct, in elements, of an array with these strides in bytes.

    0 stands for an axis that it has not.
    """
    return tuple([0 if axis is None else strides[axis] // itemsize for axis in tensor.strides])


def zeroed_outputs(form: Form, inputs: Collection[str]) -> frozenset[str]:
    """The outputs that kernels do not fill completely, given inputs of these names: they begin as zeros."""
    return operation_of(form.blank).zeroed_outputs(form, inputs)


def make_outputs(problem: Problem, inputs: Mapping[str, Any] | None = None) -> dict[str, Array]:
    """Arrays for the outputs: zeros where kernels leave some elements alone, else uninitialised.

    Raises:
        ProblemError: what a run makes is larger than this machine's memory.
    """
    check_room(problem)
    zeroed = zeroed_outputs(problem.form, inputs or ())
    return {
        name: (np.zeros if name in zeroed else np.empty)(problem.shapes[name], element_type(problem, name))
        for name in problem.made
    }


def numpy_array(problem: Problem, name: str, value: Any) -> Array:
    """``value``, which is given as the tensor ``name`` and is a NumPy array.

    Raises:
        TensorError: it is not.
    """
    if not isinstance(value, np.ndarray):
        raise TensorError(
            f"{name} is a {type(value).__name__}: expected a NumPy array, {_expected(problem, name)}",
            hint="Arrays of other libraries, in memory of the device, are taken too: what has __dlpack__.",
        )
    return value


def check_inputs(problem: Problem, tensors: Mapping[str, Any], as_array: AsArray = numpy_array) -> dict[str, Strided]:
    """The inputs in order, each with the shape, dtype and strides that a kernel takes; of optional ones those given.

    Raises:
        TensorError: names the tensor that is missing, superfluous, no array, of another shape or dtype, not aligned, or
            strided along its innermost axis; says what was given and what is expected. Or lengths and page numbers in
            NumPy arrays are outside of the tensors that they speak of; or a tensor that is to be updated cannot be
            written.
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
    operation_of(problem).check_indices(problem, arrays)
    return checked


def check_outputs(problem: Problem, tensors: Mapping[str, Any], as_array: AsArray = numpy_array) -> dict[str, Strided]:
    """The outputs in order, fit to be written to; they must not share memory with an input or with each other.

    Raises:
        TensorError: as :func:`check_inputs`, or a tensor is read-only or repeats elements (stride 0).
    """
    outputs = _checked(problem, problem.made, tensors, problem.made, as_array)
    for name, array in outputs.items():
        _check_writable(name, array.flags.writeable, array.shape, array.strides)
    return outputs


def _check_writable(name: str, writable: bool, shape: Sequence[int], strides: Sequence[int]) -> None:
    """A kernel may write each element of the tensor ``name`` on its own.

    Raises:
        TensorError: the tensor is read-only or repeats elements (stride 0).
    """
    if not writable:
        raise TensorError(f"{name} is read-only, and the kernel writes it")
    repeats = any(stride == 0 and extent > 1 for stride, extent in zip(strides, shape, strict=True))
    if repeats and 0 not in shape:
        raise TensorError(f"{name} is a broadcast view: its elements share memory, and the kernel writes them")


def _check_names(problem: Problem, names: Sequence[str], tensors: Mapping[str, Any], known: Sequence[str]) -> None:
    """Each of ``names`` is there, and nothing but ``known`` tensors.

    Raises:
        TensorError: names the tensor that is missing or superfluous.
    """
    for name in tensors:
        if name not in known:
            raise TensorError(f"{name} is superfluous: expected {', '.join(known)}")
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
                hint=f"Use {name}.copy(), PyTorch: {name}.clone().",
            )
    return checked


@lru_cache(maxsize=4096)  # of a caller's tensors the addresses change, and hardly ever more
def _check_layout(
    problem: Problem, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """The tensor ``name`` may have this dtype and shape, and these strides in bytes.

    Raises:
        TensorError: it may not; says what is expected.
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
                hint=f"Use numpy.ascontiguousarray({name}), PyTorch: {name}.contiguous().",
            )
        dense *= shape[axis]


def _expected(problem: Problem, name: str) -> str:
    return f"{element_type(problem, name)} {problem.tensors[name].shape}"
