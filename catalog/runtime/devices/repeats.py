"""A call again, on other PyTorch tensors of a layout that was checked: what is left is to fill in the addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from catalog.runtime.devices.abi import CatalogArgs
from catalog.runtime.devices.arguments import OFFSETS, POINTER
from catalog.runtime.tensors import results, zeroed_outputs
from catalog.runtime.workspace import Workspace
from catalog.schema.problem import Problem
from catalog.schema.problem_tensors import Tensor

Maker = Callable[[], Any]
"""Makes a tensor."""


class Repeat:
    """Starts the kernels of a call on tensors of the layout that it was made for, and makes outputs each time.

    Args:
        problem: what the kernels compute.
        args: of a call of theirs on tensors of that layout, with outputs that were made; copied.
        kept: what they point to besides tensors and workspaces.
        given: the names of these tensors.
        workspace: what stages share.
        output: what makes an output; told whether it begins as zeros.
        scratch: what makes so many bytes.
        start: starts the kernels on a pointer to arguments.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        args: CatalogArgs,
        kept: object,
        given: Iterable[str],
        workspace: Workspace,
        output: Callable[[Tensor, bool], Maker],
        scratch: Callable[[int], Maker],
        start: Callable[[Any], None],
    ) -> None:
        tensors, names = problem.tensors, tuple(given)
        zeroed = zeroed_outputs(problem, names)
        self._args, self._kept, self._start = CatalogArgs.from_buffer_copy(args), kept, start
        self._inputs = [(name, OFFSETS[tensors[name].slot]) for name in names]
        self._made = [
            (name, OFFSETS[tensors[name].slot], output(tensors[name], name in zeroed)) for name in problem.made
        ]
        self._partials = [(OFFSETS[slot], scratch(partial.bytes)) for slot, partial in workspace.partials.items()]
        self._results = results(problem, {name: name for name in (*names, *problem.made)})

    def __call__(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Start the kernels on the tensors; the results, which they write.

        Raises:
            DeviceError: a kernel refuses the call or has no memory, or the device does not take the launch.
        """
        args, tensors = CatalogArgs.from_buffer_copy(self._args), dict(given)
        for name, offset in self._inputs:
            POINTER.pack_into(args, offset, tensors[name].data_ptr())
        for name, offset, make in self._made:
            tensor = tensors[name] = make()
            POINTER.pack_into(args, offset, tensor.data_ptr())
        rooms = []
        for offset, make in self._partials:
            rooms.append(make())
            POINTER.pack_into(args, offset, rooms[-1].data_ptr())
        self._start(ctypes.byref(args))
        return {result: tensors[name] for result, name in self._results.items()}
