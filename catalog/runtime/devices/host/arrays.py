"""Arrays of other libraries in the CPU's memory, as NumPy arrays on the same memory: nothing is ever copied.

PyTorch's tensors are taken directly, all others by ``__dlpack__``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from catalog.errors import TensorError
from catalog.runtime.devices.dlpack import CPU, ELEMENT_NAMES, shared
from catalog.runtime.devices.gpu.arrays import MEMORIES
from catalog.runtime.elements import numpy_dtype
from catalog.runtime.memory import check_room
from catalog.runtime.tensors import Array, zeroed_outputs
from catalog.schema.problem import Problem

_READABLE = (CPU, 3, 11)
"""DLPack's numbers of memory that the CPU reads like its own: its own, and that pinned by CUDA or HIP."""

_WORDS = {1: "uint8", 2: "int16"}
"""PyTorch's types of so many bytes that NumPy has too: what elements that it lacks are handed over as."""


def host_array(name: str, value: Any) -> Array | None:
    """The NumPy array that ``value``, given as the tensor ``name``, is; None where it is no array of any library.

    Its memory is the value's, and it keeps that alive.

    Raises:
        TensorError: it is in a GPU's memory, cannot be shared without a copy, or has elements that no kernel takes.
    """
    if isinstance(value, np.ndarray):
        return value
    torch = imported_torch()
    if torch is not None and isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return _of_torch(torch, name, value)
    if not (hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")):
        return None
    try:
        kind = int(value.__dlpack_device__()[0])
        if kind not in _READABLE:
            raise TensorError(
                f"{name} is in memory of {MEMORIES.get(kind, f'device type {kind}')}: expected the CPU's",
                hint=f"Copy it there, PyTorch: {name}.cpu(), CuPy: {name}.get(); or select for the GPU's arch.",
            )
        capsule = _capsule(value)
    except TensorError:
        raise
    except Exception as error:  # each library raises its own
        raise TensorError(
            f"{name}, a {type(value).__name__}, cannot be shared without a copy: {error}",
            hint=f"Copy it yourself: numpy.array({name})",
        ) from None
    array = shared(name, capsule)
    return np.asarray(array).view(array.dtype)


def host_outputs(problem: Problem, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Tensors of PyTorch's for the outputs, where an input is one; else None.

    Raises:
        ProblemError: what a run makes is larger than this machine's memory.
    """
    torch = imported_torch()
    if torch is None or not any(isinstance(value, torch.Tensor) for value in given.values()):
        return None
    check_room(problem)
    zeroed = zeroed_outputs(problem.form, inputs)
    return {
        name: (torch.zeros if name in zeroed else torch.empty)(
            problem.tensors[name].shape, dtype=getattr(torch, problem.tensors[name].element), device="cpu"
        )
        for name in problem.made
    }


def imported_torch() -> Any:
    """The module torch, where the process has it, else None; one that is being imported has no tensors yet."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None


def _of_torch(torch: Any, name: str, tensor: Any) -> Array:
    if tensor.requires_grad:
        raise TensorError(
            f"{name} cannot be shared: it requires a gradient, of which a plan knows nothing",
            hint=f"Use {name}.detach(), or catalog.torch, whose functions have gradients.",
        )
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        raise TensorError(
            f"{name} cannot be shared: it is sparse, or a lazily negated view",
            hint=f"Copy it yourself: {name}.to_dense(), {name}.resolve_neg()",
        )
    element = _element(tensor.dtype)
    if element is None:
        raise TensorError(f"{name} has elements that no kernel takes: {tensor.dtype}")
    array: Array
    try:
        array = tensor.numpy()
    except TypeError:  # NumPy itself has no such elements
        array = tensor.view(getattr(torch, _WORDS[element.itemsize])).numpy().view(element)
    return array


@cache
def _element(dtype: Any) -> np.dtype[Any] | None:
    """NumPy's or ml_dtypes' dtype of PyTorch's; None for one that no kernel takes."""
    name = str(dtype).removeprefix("torch.")
    return numpy_dtype(name) if name in ELEMENT_NAMES else None


def _capsule(value: Any) -> object:
    """The capsule of an array, one that tells whether it may be written where its library knows how."""
    try:
        return value.__dlpack__(max_version=(1, 0), copy=False)
    except TypeError:  # of an older version of the protocol, whose capsules never copy
        return value.__dlpack__()
