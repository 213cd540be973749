"""A call again, on other PyTorch tensors of a layout that was checked: what is left is to fill in the addresses.

And a call of another size: what is left is to check shapes and strides, and to fill in both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from catalog.runtime.devices.abi import CatalogArgs
from catalog.runtime.devices.arguments import OFFSETS, POINTER, TENSOR, sized
from catalog.runtime.tensors import results, zeroed_outputs
from catalog.schema.problem import Problem
from catalog.schema.problem_form import Form
from catalog.schema.problem_tensors import Axis, Shape, TensorForm, shape_of
from catalog.schema.workspace import Workspace

Maker = Callable[[Shape], Any]
"""Makes a tensor of a shape."""

Given = Sequence[tuple[Any, ...]]
"""Name, dtype, shape and strides, in elements, of each of a call's tensors, and maybe more."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a device does for repeats.

    Attributes:
        output: what makes outputs of elements of that name; told whether they begin as zeros.
        scratch: makes so many bytes.
        starts: the first tokens of a problem's packed sequences where kernels read them: addresses by their place in
            the argument struct, and what must be kept for that.
        start: starts the kernels on a pointer to arguments; what was kept for them comes along.
    """

    output: Callable[[str, bool], Maker]
    scratch: Callable[[int], Any]
    starts: Callable[[Problem], tuple[Mapping[str, int], tuple[Any, ...]]]
    start: Callable[[Any, tuple[Any, ...]], None]


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in the argument struct: where, in bytes; and what it must be at any size."""

    name: str
    offset: int
    axes: tuple[Axis, ...]
    innermost_dense: bool
    pick: Callable[[Shape], tuple[int, int, int, int]]
    """Of the strides along all axes and a 0 behind them, those that a kernel reads; the 0 for axes that it has not."""

    @classmethod
    def of(cls, form: Form, name: str) -> _Place:
        """Of the tensor ``name`` of problems of a form."""
        tensor = form.tensors[name]
        zero = len(tensor.axes)
        picked = [zero if axis is None else axis for axis in (*tensor.strides, None)]  # no axis is that of splits
        return cls(name, OFFSETS[tensor.slot], tensor.axes, tensor.contiguous > 0, itemgetter(*picked))


def dense_strides(shape: Shape) -> list[int]:
    """Strides of a dense array, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    strides.reverse()
    return strides


class Frame:
    """What repeats of all sizes of a form have in common.

    Args:
        form: of the problems.
        given: the names of the tensors.
        means: what the device does for it.
    """

    def __init__(self, form: Form, given: Iterable[str], means: Means) -> None:
        names = tuple(given)
        zeroed = zeroed_outputs(form, names)
        self.means = means
        self.inputs = [_Place.of(form, name) for name in names]
        self.outputs = [_Place.of(form, name) for name in form.made]
        self.makers = [means.output(form.tensors[name].element, name in zeroed) for name in form.made]
        self.results = tuple(results(form, {name: name for name in (*names, *form.made)}).items())
        self.resizable = all(_is_resizable(form.tensors[name]) for name in names)
        self._axes = tuple(dict.fromkeys(place.axes for place in (*self.inputs, *self.outputs)))

    def shapes(self, extents: Mapping[str, int]) -> dict[tuple[Axis, ...], Shape]:
        """Shapes by axes, at these extents."""
        return {axes: shape_of(axes, extents) for axes in self._axes}


def _is_resizable(tensor: TensorForm) -> bool:
    """Whether a shape, and a stride of 1 along the last axis, are all that is asked of it."""
    return tensor.contiguous <= 1 and not tensor.pool and tensor.role != "updated"


class Repeat:
    """Starts the kernels of a call on tensors of the layout that it was made for, and makes outputs each time.

    Args:
        frame: what it has in common with others.
        args: of a call on tensors of that layout, with outputs that were made; not to be changed any more.
        kept: what they point to besides tensors and workspaces.
        shapes: of the outputs.
        workspace: what stages share.
    """

    __slots__ = ("_args", "_frame", "_kept", "_shapes", "_workspace")

    def __init__(
        self, frame: Frame, args: CatalogArgs, kept: tuple[Any, ...], shapes: Sequence[Shape], workspace: Workspace
    ) -> None:
        self._frame, self._args, self._kept = frame, args, kept
        self._shapes, self._workspace = shapes, workspace

    @classmethod
    def of_call(
        cls, frame: Frame, problem: Problem, args: CatalogArgs, kept: tuple[Any, ...], workspace: Workspace
    ) -> Repeat:
        """What repeats a call of ``problem``, with its arguments, which are copied."""
        shapes = [shape_of(place.axes, problem.extents) for place in frame.outputs]
        return cls(frame, CatalogArgs.from_buffer_copy(args), kept, shapes, workspace)

    def resized(self, problem: Problem, layout: Given, workspace: Workspace) -> Repeat | None:
        """What repeats a call of a problem of the same form, on tensors of the same names and types.

        None where it is not certain that such a call would be taken: another shape, a strided innermost axis. Then the
        checks of a first call must decide. Whether there is memory for it was asked when its plan was selected.
        """
        frame = self._frame
        if not frame.resizable:
            return None
        args, write, shapes = sized(self._args, problem), TENSOR.pack_into, frame.shapes(problem.extents)
        for place, given in zip(frame.inputs, layout, strict=True):
            shape, strides = given[2], given[3]
            if shape != shapes[place.axes]:
                return None
            if strides[-1] != 1 and shape[-1] != 1 and place.innermost_dense:
                return None
            write(args, place.offset, 0, *place.pick((*strides, 0)))
        outputs = [shapes[place.axes] for place in frame.outputs]
        for place, shape in zip(frame.outputs, outputs, strict=True):
            write(args, place.offset, 0, *place.pick((*dense_strides(shape), 0)))
        kept: tuple[Any, ...] = ()
        if problem.seqlens_q is not None:
            starts, kept = frame.means.starts(problem)
            for slot, address in starts.items():
                POINTER.pack_into(args, OFFSETS[slot], address)
        for slot, partial in workspace.partials.items():
            write(args, OFFSETS[slot], 0, *partial.strides)
        args.num_splits = workspace.num_splits
        return Repeat(frame, args, kept, outputs, workspace)

    def __call__(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Start the kernels on the tensors; the results, which they write.

        Raises:
            DeviceError: a kernel refuses the call or has no memory, or the device does not take the launch.
        """
        frame, args, tensors = self._frame, CatalogArgs.from_buffer_copy(self._args), dict(given)
        write = POINTER.pack_into
        for place in frame.inputs:
            write(args, place.offset, tensors[place.name].data_ptr())
        for place, make, shape in zip(frame.outputs, frame.makers, self._shapes, strict=True):
            tensor = tensors[place.name] = make(shape)
            write(args, place.offset, tensor.data_ptr())
        rooms = []
        for slot, partial in self._workspace.partials.items():
            rooms.append(frame.means.scratch(partial.bytes))
            write(args, OFFSETS[slot], rooms[-1].data_ptr())
        frame.means.start(ctypes.byref(args), self._kept)
        return {result: tensors[name] for result, name in frame.results}
