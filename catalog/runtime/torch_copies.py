"""PyTorch tensors with the contents of NumPy arrays, on the device of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from catalog.errors import UsageError
from catalog.extras import how_to_install
from catalog.schema.problem import Problem

if TYPE_CHECKING:
    from catalog.runtime.devices import Device
    from catalog.runtime.tensors import Array


def has_torch() -> bool:
    """Whether PyTorch is installed. It is not imported."""
    return find_spec("torch") is not None


def torch_copies(problem: Problem, arrays: Mapping[str, Array], device: Device[Any]) -> dict[str, Any]:
    """Copies of a problem's arrays as PyTorch tensors on ``device``.

    Raises:
        UsageError: PyTorch is not installed.
    """
    if not has_torch():
        raise UsageError("no PyTorch is installed", hint=how_to_install("torch"))
    torch = import_module("torch")
    tensors = {}
    for name, array in arrays.items():
        element = getattr(torch, problem.tensors[name].element)
        bits = np.ascontiguousarray(array).view(f"int{8 * array.itemsize}").copy()  # NumPy's word for any element
        tensors[name] = torch.from_numpy(bits).view(element).to(device.place)
    return tensors


@contextmanager
def same_threads(device: Device[Any]) -> Iterator[None]:
    """Let PyTorch's functions on the host use as many threads as the device's kernels, inside a ``with`` block."""
    torch = import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(before if device.queues else device.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numpy_copy(problem: Problem, name: str, tensor: Any) -> Array:
    """The contents of a PyTorch tensor, a result called ``name``, as a NumPy array of the problem's element type."""
    from catalog.runtime.elements import numpy_dtype

    element = next(one.element for key, one in problem.form.tensors.items() if (one.result or key) == name)
    torch = import_module("torch")
    bits = tensor.detach().to("cpu", dtype=getattr(torch, element)).contiguous()
    array: Array = bits.view(getattr(torch, f"int{8 * bits.element_size()}")).numpy().view(numpy_dtype(element))
    return array
