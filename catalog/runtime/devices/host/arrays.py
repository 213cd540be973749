"""Arrays of other libraries in CPU memory, as NumPy arrays on the same memory; nothing is ever copied.

PyTorch tensors are converted directly, all others through ``__dlpack__``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from catalog.errors import TensorError
from catalog.runtime.devices.dlpack import CPU, dtype_of_torch, shared
from catalog.runtime.devices.gpu.arrays import MEMORIES
from catalog.runtime.memory import check_room
from catalog.runtime.tensors import Array, zeroed_outputs
from catalog.schema.problem import Problem

_READABLE = (CPU, 3, 11)
"""DLPack's types of memory that the CPU can read: its own, and memory pinned by CUDA or HIP."""

_WORDS = {1: "uint8", 2: "int16"}
"""PyTorch dtypes by size in bytes that NumPy has too; elements of types that NumPy lacks are passed as these."""


def host_array(name: str, value: Any) -> Array | None:
    """``value``, given as the tensor ``name``, as a NumPy array; None if it is not an array of any library.

    The array shares the value's memory and keeps it alive.

    Raises:
        TensorError: it is in a GPU's memory, cannot be shared without a copy, or has elements that no kernel accepts.
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
                hint=f"Copy it with {name}.cpu() (PyTorch) or {name}.get() (CuPy), or select for the GPU's arch.",
            )
        capsule = _capsule(value)
    except TensorError:
        raise
    except Exception as error:  # each library raises its own exceptions
        raise TensorError(
            f"{name}, a {type(value).__name__}, cannot be shared without a copy: {error}",
            hint=f"Copy it yourself: numpy.array({name})",
        ) from None
    array = shared(name, capsule)
    return np.asarray(array).view(array.dtype)


def host_outputs(problem: Problem, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Make PyTorch tensors for the outputs if an input is one; else return None.

    Raises:
        ProblemError: the run would allocate more memory than this machine has.
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
    """The module torch if it is imported completely, else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None


def _of_torch(torch: Any, name: str, tensor: Any) -> Array:
    if tensor.requires_grad:
        raise TensorError(
            f"{name} cannot be shared: it requires a gradient, which plans do not compute",
            hint=f"Use {name}.detach(), or the functions of catalog.torch, which have gradients.",
        )
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        raise TensorError(
            f"{name} cannot be shared: it is sparse, or a lazily negated view",
            hint=f"Copy it yourself: {name}.to_dense(), {name}.resolve_neg()",
        )
    element = dtype_of_torch(tensor.dtype)
    if element is None:
        raise TensorError(f"{name} has elements that no kernel accepts: {tensor.dtype}")
    array: Array
    try:
        array = tensor.numpy()
    except TypeError:  # an element type that NumPy itself lacks
        array = tensor.view(getattr(torch, _WORDS[element.itemsize])).numpy().view(element)
    return array


def _capsule(value: Any) -> object:
    """The DLPack capsule of an array, a versioned one if the library supports it: it says whether it is read-only."""
    try:
        return value.__dlpack__(max_version=(1, 0), copy=False)
    except TypeError:  # an older version of the protocol, which never copies
        return value.__dlpack__()
