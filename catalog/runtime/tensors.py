"""The NumPy arrays of a problem: made, checked, and described to a kernel.

Shapes are :attr:`Problem.shapes`. Q, K, V and O have the problem's dtype (fp8bf16: fp8 in, bf16 out; fp8 is OCP's
float8_e4m3fn, bf8 float8_e5m2); lse is float32 always. A kernel reads rows of the head dim: that axis must be
contiguous, the others may have any strides. Nothing is copied behind the caller's back; where the innermost axis is
strided, the error says how to copy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catalog.errors import TensorError
from catalog.schema.fields import Dtype, Mode
from catalog.schema.problem import Op, Problem

Array = NDArray[Any]

INPUTS: Mapping[Op, tuple[str, ...]] = MappingProxyType({"fwd": ("q", "k", "v")})
"""Names of an operation's inputs; what else :attr:`Problem.shapes` has is an output."""

_NUMPY_NAMES: Mapping[Dtype, tuple[str, str]] = MappingProxyType(
    {
        Dtype.FP32: ("float32", "float32"),
        Dtype.FP16: ("float16", "float16"),
        Dtype.BF16: ("bfloat16", "bfloat16"),
        Dtype.FP8: ("float8_e4m3fn", "float8_e4m3fn"),
        Dtype.BF8: ("float8_e5m2", "float8_e5m2"),
        Dtype.FP8FP16: ("float8_e4m3fn", "float16"),
        Dtype.FP8BF16: ("float8_e4m3fn", "bfloat16"),
        Dtype.FP8FP32: ("float8_e4m3fn", "float32"),
    }
)
"""NumPy's or ml_dtypes' name of the element type of Q, K, V and of O."""

_STRIDE_AXES: Mapping[str, tuple[int, int, int]] = MappingProxyType({"bhsd": (0, 1, 2), "bshd": (0, 2, 1)})
"""Axes of batch, head and sequence in a dense layout."""


def input_names(problem: Problem) -> tuple[str, ...]:
    """Names of the tensors that the problem reads, in the order of its shapes."""
    return INPUTS[problem.op]


def output_names(problem: Problem) -> tuple[str, ...]:
    """Names of the tensors that the problem writes: ``o``, and ``lse`` where asked for."""
    inputs = INPUTS[problem.op]
    return tuple(name for name in problem.shapes if name not in inputs)


@cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        element: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return element
    return np.dtype(name)


def element_type(problem: Problem, name: str) -> np.dtype[Any]:
    """The NumPy dtype of the problem's tensor ``name``."""
    if name == "lse":
        return _numpy_dtype("float32")
    of_input, of_output = _NUMPY_NAMES[problem.dtype]
    return _numpy_dtype(of_output if name == "o" else of_input)


def element_strides(problem: Problem, name: str, tensor: Array) -> tuple[int, int, int]:
    """(stride_batch, stride_nhead, stride_seqlen) of a checked tensor, in elements; stride_batch is 0 in group mode."""
    size, strides = tensor.itemsize, tensor.strides
    if problem.mode is Mode.GROUP:
        nhead, seqlen = (0, 1) if name == "lse" else (1, 0)
        return 0, strides[nhead] // size, strides[seqlen] // size
    batch, nhead, seqlen = _STRIDE_AXES["bhsd" if name == "lse" else problem.layout]
    return strides[batch] // size, strides[nhead] // size, strides[seqlen] // size


def make_inputs(problem: Problem, seed: int = 0) -> dict[str, Array]:
    """Standard normal inputs, equal for equal problems and seeds; each tensor draws from a generator of its own.

    Raises:
        TensorError: the problem's tensors are larger than this machine's memory.
    """
    _check_memory(problem)
    inputs: dict[str, Array] = {}
    for index, name in enumerate(input_names(problem)):
        values = np.random.default_rng([seed, index]).standard_normal(problem.shapes[name], dtype=np.float32)
        inputs[name] = values.astype(element_type(problem, name), copy=False)
    return inputs


def make_outputs(problem: Problem) -> dict[str, Array]:
    """Uninitialised arrays for the outputs.

    Raises:
        TensorError: the problem's tensors are larger than this machine's memory.
    """
    _check_memory(problem)
    return {name: np.empty(problem.shapes[name], element_type(problem, name)) for name in output_names(problem)}


def check_inputs(problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Array]:
    """The inputs in order, each with the shape, dtype and strides that a kernel takes.

    Raises:
        TensorError: names the tensor that is missing, superfluous, no NumPy array, of another shape or dtype, not
            aligned, or strided along its innermost axis; says what was given and what is expected.
    """
    return _checked(problem, input_names(problem), tensors)


def check_outputs(problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Array]:
    """The outputs in order, fit to be written to; they must not share memory with an input or with each other.

    Raises:
        TensorError: as :func:`check_inputs`, or a tensor is read-only or repeats elements (stride 0).
    """
    outputs = _checked(problem, output_names(problem), tensors)
    for name, tensor in outputs.items():
        if not tensor.flags.writeable:
            raise TensorError(f"{name} is read-only, and the kernel writes it")
        if any(stride == 0 and extent > 1 for stride, extent in zip(tensor.strides, tensor.shape, strict=True)):
            raise TensorError(f"{name} is a broadcast view: its elements share memory, and the kernel writes them")
    return outputs


def _checked(problem: Problem, names: Iterable[str], tensors: Mapping[str, Any]) -> dict[str, Array]:
    names = tuple(names)
    for name in tensors:
        if name not in names:
            raise TensorError(f"{name} is superfluous: expected {', '.join(names)}")
    for name in names:
        if tensors.get(name) is None:
            raise TensorError(f"{name} is missing: expected {_expected(problem, name)}")
        _check(problem, name, tensors[name])
    return {name: tensors[name] for name in names}


def _check(problem: Problem, name: str, tensor: Any) -> None:
    if not isinstance(tensor, np.ndarray):
        raise TensorError(
            f"{name} is a {type(tensor).__name__}: expected a NumPy array, {_expected(problem, name)}",
            hint="NumPy arrays of other libraries' CPU tensors: numpy.asarray(tensor), numpy.from_dlpack(tensor)",
        )
    if tensor.shape != problem.shapes[name] or tensor.dtype != element_type(problem, name):
        raise TensorError(f"{name} is {tensor.dtype} {tensor.shape}: expected {_expected(problem, name)}")
    if not tensor.flags.aligned:
        raise TensorError(f"{name} is not aligned to its {tensor.itemsize}-byte elements", hint=f"use {name}.copy()")
    if name != "lse" and tensor.size and tensor.shape[-1] > 1 and tensor.strides[-1] != tensor.itemsize:
        raise TensorError(
            f"{name} has a stride of {tensor.strides[-1]} bytes along the head dim: expected contiguous elements, "
            f"{tensor.itemsize} bytes apart",
            hint=f"use numpy.ascontiguousarray({name})",
        )


def _expected(problem: Problem, name: str) -> str:
    return f"{element_type(problem, name)} {problem.shapes[name]}"


@cache
def _memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_memory(problem: Problem) -> None:
    if problem.bytes > _memory_bytes():
        largest = max(problem.shapes, key=lambda name: math.prod(problem.shapes[name]))
        raise TensorError(
            f"the tensors need {problem.bytes:,} bytes, and this machine has {_memory_bytes():,} bytes of memory",
            hint=f"the largest is {largest}: {_expected(problem, largest)}",
        )
