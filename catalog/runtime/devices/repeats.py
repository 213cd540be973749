"""A call again, on other PyTorch tensors of a layout that was checked: what is left is to fill in the addresses.

And a call of another size: what is left is to check shapes and strides, and to fill in both.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from catalog.runtime.devices.abi import CatalogArgs
from catalog.runtime.devices.arguments import OFFSETS, POINTER, TENSOR, sized
from catalog.runtime.tensors import memory_bytes, results, zeroed_outputs
from catalog.runtime.workspace import Workspace
from catalog.schema.problem import Problem
from catalog.schema.problem_form import Form
from catalog.schema.problem_tensors import Strides, TensorForm, bytes_of_element

Maker = Callable[[], Any]
"""Makes a tensor."""

Given = Sequence[tuple[str, Any, tuple[int, ...], tuple[int, ...]]]
"""Name, dtype, shape and strides, in elements, of each of a call's tensors, and maybe more."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a device does for repeats.

    Attributes:
        output: what makes an output of a shape, of elements of that name; told whether it begins as zeros.
        scratch: what makes so many bytes.
        starts: the first tokens of a problem's packed sequences where kernels read them: addresses by their place in
            the argument struct, and what must be kept for that.
        start: starts the kernels on a pointer to arguments; what was kept for them comes along.
    """

    output: Callable[[tuple[int, ...], str, bool], Maker]
    scratch: Callable[[int], Maker]
    starts: Callable[[Problem], tuple[Mapping[str, int], tuple[Any, ...]]]
    start: Callable[[Any, tuple[Any, ...]], None]


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in the argument struct: where, in bytes; and what it must be at any size."""

    name: str
    offset: int
    form: TensorForm
    element_bytes: int
    zeroed: bool

    @property
    def resizable(self) -> bool:
        """Whether a shape, and a stride of 1 along the last axis, are all that is asked of it."""
        return self.form.contiguous <= 1 and not self.form.pool and self.form.role != "updated"


class _Frame:
    """What repeats of all sizes of a form have in common, with tensors of the same names."""

    def __init__(self, form: Form, given: Iterable[str], means: Means) -> None:
        names = tuple(given)
        zeroed = zeroed_outputs(form.blank, names)

        def place(name: str) -> _Place:
            tensor = form.tensors[name]
            return _Place(name, OFFSETS[tensor.slot], tensor, bytes_of_element(tensor.element), name in zeroed)

        self.means = means
        self.inputs = [place(name) for name in names]
        self.outputs = [place(name) for name in form.made]
        self.results = results(form, {name: name for name in (*names, *form.made)})
        self.resizable = all(each.resizable for each in self.inputs)


class Repeat:
    """Starts the kernels of a call on tensors of the layout that it was made for, and makes outputs each time."""

    __slots__ = ("_args", "_frame", "_inputs", "_kept", "_made", "_partials")

    def __init__(
        self, frame: _Frame, problem: Problem, args: CatalogArgs, kept: tuple[Any, ...], workspace: Workspace
    ) -> None:
        extents, output, scratch = problem.extents, frame.means.output, frame.means.scratch
        self._frame, self._args, self._kept = frame, args, kept
        self._inputs = [(place.name, place.offset) for place in frame.inputs]
        self._made = [
            (place.name, place.offset, output(place.form.shape(extents), place.form.element, place.zeroed))
            for place in frame.outputs
        ]
        self._partials = [(OFFSETS[slot], scratch(partial.bytes)) for slot, partial in workspace.partials.items()]

    @classmethod
    def of_call(
        cls,
        problem: Problem,
        args: CatalogArgs,
        kept: tuple[Any, ...],
        given: Iterable[str],
        workspace: Workspace,
        means: Means,
    ) -> Repeat:
        """What repeats a call.

        Args:
            problem: what the kernels compute.
            args: of the call, with outputs that were made; copied.
            kept: what they point to besides tensors and workspaces.
            given: the names of its tensors.
            workspace: what stages share.
            means: the device's.
        """
        frame = _Frame(problem.form, given, means)
        return cls(frame, problem, CatalogArgs.from_buffer_copy(args), kept, workspace)

    def resized(self, problem: Problem, layout: Given, workspace: Workspace) -> Repeat | None:
        """What repeats a call of a problem of the same form, on tensors of the same names and types.

        None where it is not certain that such a call would be taken: another shape, a strided innermost axis, tensors
        larger than this machine's memory. Then the checks of a first call must decide.
        """
        frame, extents = self._frame, problem.extents
        if not frame.resizable:
            return None
        args, total = sized(self._args, problem), 0
        for place, (_, _, shape, strides, *_) in zip(frame.inputs, layout, strict=True):
            tensor = place.form
            if shape != tensor.shape(extents) or (tensor.contiguous and strides[-1] != 1 and shape[-1] != 1):
                return None
            total += math.prod(shape) * place.element_bytes
            _write(args, place.offset, tensor.strides, strides)
        for place in frame.outputs:
            shape = place.form.shape(extents)
            total += math.prod(shape) * place.element_bytes
            _write(args, place.offset, place.form.strides, (*accumulate(shape[:0:-1], mul, initial=1),)[::-1])
        if total > memory_bytes():
            return None
        starts, kept = frame.means.starts(problem)
        for slot, address in starts.items():
            POINTER.pack_into(args, OFFSETS[slot], address)
        for slot, partial in workspace.partials.items():
            TENSOR.pack_into(args, OFFSETS[slot], 0, *partial.strides)
        args.num_splits = workspace.num_splits
        return Repeat(frame, problem, args, kept, workspace)

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
        self._frame.means.start(ctypes.byref(args), self._kept)
        return {result: tensors[name] for result, name in self._frame.results.items()}


def _write(args: CatalogArgs, offset: int, axes: Strides, strides: Sequence[int]) -> None:
    """The strides of a tensor, in elements, along the axes that a kernel strides along; 0 for one that it has not."""
    batch, nhead, seqlen = axes
    TENSOR.pack_into(
        args,
        offset,
        0,
        0 if batch is None else strides[batch],
        0 if nhead is None else strides[nhead],
        0 if seqlen is None else strides[seqlen],
        0,
    )
