"""Calls like one that was checked: on other PyTorch tensors, of the same names and types, of any sizes.

What a first call settles (kernels, features, which tensors there are) holds for every problem of the same form. What
is left is one look at each tensor: whether it is what the sizes ask for, and where it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter, itemgetter
from struct import Struct
from typing import Any

from catalog.errors import DeviceError
from catalog.runtime.devices.arguments import arguments_of
from catalog.runtime.devices.known_call import IN_ORDER, KnownCall, Order
from catalog.runtime.devices.loading import LoadedKernel
from catalog.runtime.tensors import results, zeroed_outputs
from catalog.schema.problem import Problem
from catalog.schema.problem_form import Form
from catalog.schema.problem_tensors import Axis, Shape, Strides, TensorForm, bytes_of_element
from catalog.schema.workspace import NO_WORKSPACE, Workspace

Maker = Callable[..., Any]
"""Makes a tensor of these extents: PyTorch reads numbers faster than a tuple."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a device does for fast paths.

    Attributes:
        torch: PyTorch's module.
        where: an attribute of PyTorch's tensors that says where they are, and its value of those that kernels take.
        output: what makes outputs of elements of that name; the flag says whether they begin as zeros.
        scratch: makes workspaces of a number of bytes.
        lists: :attr:`Problem.lists` where kernels read them: the addresses, in the order of the argument struct and 0
            for those that there are not, and what must be kept for that.
        start: starts kernels on a pointer to arguments, or their address; what was kept for them comes along.
        entries: the addresses of the kernels' entry points, given what was kept, if ``start`` only calls them.
        repeats: whether a call that kernels reject may be repeated with the checks of a first call, which say more.
    """

    torch: Any
    where: tuple[str, Any]
    output: Callable[[str, bool], Maker]
    scratch: Callable[[int], Any]
    lists: Callable[[Problem], tuple[Sequence[int], tuple[Any, ...]]]
    start: Callable[[Sequence[LoadedKernel], Any, tuple[Any, ...]], None]
    entries: Callable[[Sequence[LoadedKernel], tuple[Any, ...]], Sequence[int]]
    repeats: bool = False


def plain_tensors(torch: Any, given: Mapping[str, Any]) -> bool:
    """Whether all are tensors of PyTorch's, and of no subclass; ``torch`` is None where the process has it not."""
    return torch is not None and all(type(value) is torch.Tensor for value in given.values())


class FastPath:
    """Starts kernels on tensors of certain names, and makes outputs each time, for all problems of a form.

    Its calls differ in sizes and addresses only: it keeps nothing of any, and takes sizes that it never saw as fast as
    others.

    Args:
        kernels: loaded.
        form: of the problems.
        names: those of the tensors that are given, in their order.
        args: of a call that was checked; they are copied.
        means: what the device does for it.
    """

    def __init__(
        self, kernels: tuple[LoadedKernel, ...], form: Form, names: Iterable[str], args: Any, means: Means
    ) -> None:
        names = tuple(names)
        tensors, zeroed = form.tensors, zeroed_outputs(form, names)
        result = {name: result for result, name in results(form, {name: name for name in tensors}).items()}
        shapes, arguments = _Shapes(form), arguments_of(form.blank)
        offsets = arguments.offsets
        torch, (where, here) = means.torch, means.where
        facts = {
            element: (torch.Tensor, getattr(torch, element), here, torch.strided)
            for element in {tensors[name].element for name in names}
        }
        self.kernels = kernels
        self._copy, self._offsets, self._tensor = arguments.args.from_buffer_copy, offsets, arguments.tensor_format
        self._args = self._copy(args)
        self._means = means
        self._facts = attrgetter("__class__", "dtype", where, "layout")
        self._inputs = [
            (
                facts[tensor.element],
                bytes_of_element(tensor.element),
                shapes.of(tensor),
                tensor.pool,
                tensor.role == "updated",
                *_dense_strides(tensor.axes, tensor.contiguous),
                *_writer(tensor.strides),
                offsets[tensor.slot],
            )
            for tensor in (tensors[name] for name in names)
        ]
        self._outputs = [
            (
                result[name],
                shapes.of(tensors[name]),
                _made_of(means.output(tensors[name].element, name in zeroed), tensors[name]),
                *_writer(tensors[name].strides),
                offsets[tensors[name].slot],
            )
            for name in form.made
        ]
        self._updated = [name for name in names if tensors[name].role == "updated"]
        sizes = shapes.pick(arguments.sizes_of(form.blank))
        self._sizes = sizes, arguments.sizes_format.pack_into, arguments.sizes_offset
        self._constants = shapes.constants
        self._divided = form.divided
        self._lists = (arguments.lists_format.pack_into, arguments.lists_offset) if form.blank.lists else None
        self._counted = [(name, tensor) for name, tensor in arguments.extents_of.items() if tensor in names]

    def __call__(
        self,
        problem: Problem,
        given: Mapping[str, Any],
        workspace_of: Callable[[Any], Workspace],
        differentiated: bool = False,
        *,
        order: Order = IN_ORDER,
        keep: Callable[[KnownCall], None] | None = None,
    ) -> dict[str, Any] | None:
        """Start the kernels on the tensors; the results, which they write.

        None where a tensor is not certainly one that they take, or they reject a length or an index: then the checks of
        a first call must decide. Whether there is memory for it was asked when the plan of the problem was selected.

        Args:
            problem: of the form.
            given: the tensors, in the order of the names.
            workspace_of: what the stages share, given arguments with the problem's sizes.
            differentiated: whether the caller computes gradients, so that tensors may require them.
            order: that of the tensors of later calls like this one.
            keep: takes what repeats this call in that order, unless it failed.

        Raises:
            DeviceError: a kernel refuses the call or has no memory, or the device does not take the launch.
        """
        means, args = self._means, self._copy(self._args)
        sizes, facts_of = (*problem.extents.values(), *self._constants), self._facts
        for tensor, wanted in zip(given.values(), self._inputs, strict=True):
            facts, itemsize, shape_of, pool, updated, inner, dense, strides_of, write, offset = wanted
            if type(tensor) is not facts[0] or facts_of(tensor) != facts or tensor.is_neg():
                return None
            if tensor.requires_grad and not differentiated:
                return None
            shape, strides, address = tensor.shape, tensor.stride(), tensor.data_ptr()
            if (
                (shape != shape_of(sizes) and not (pool and len(shape) == 1))
                or inner(strides) != (dense or _strides_of(inner(shape)))
                or (updated and 0 in strides)
                or not address  # of a tensor without elements, which kernels would take for an absent one
                or address % itemsize
            ):
                return None
            write(args, offset, address, *strides_of(strides))
        made = {}
        for name, shape_of, make, strides_of, write, offset in self._outputs:
            tensor = made[name] = make(*shape_of(sizes))
            write(args, offset, tensor.data_ptr(), *strides_of(tensor.stride()))
        sizes_of, write, offset = self._sizes
        write(args, offset, *sizes_of(sizes))
        workspace = NO_WORKSPACE
        if self._divided:
            rooms, workspace = [], workspace_of(args)
            for slot, part in workspace.partials.items():
                rooms.append(means.scratch(part.bytes))
                self._tensor.pack_into(args, self._offsets[slot], rooms[-1].data_ptr(), *part.strides)
            args.num_splits = workspace.num_splits
        for name, tensor in self._counted:
            setattr(args, name, given[tensor].shape[0])
        kept: tuple[Any, ...] = ()
        if self._lists is not None:
            write, offset = self._lists
            addresses, kept = means.lists(problem)
            write(args, offset, *addresses)
        try:
            means.start(self.kernels, ctypes.byref(args), kept)
        except DeviceError:
            if not means.repeats:
                raise
            return None
        if keep is not None:
            keep(self._known(args, sizes, given, workspace, kept, order=order))
        return {**made, **{name: given[name] for name in self._updated}} if self._updated else made

    def _known(
        self,
        args: Any,
        sizes: Shape,
        given: Mapping[str, Any],
        workspace: Workspace,
        kept: tuple[Any, ...],
        *,
        order: Order,
    ) -> KnownCall:
        """An object that repeats a call with these arguments and sizes."""
        means, kernels = self._means, self.kernels
        return KnownCall(
            means,
            args,
            lambda address: means.start(kernels, address, kept),
            entries=means.entries(kernels, kept),
            inputs=[
                (name, tensor, wanted[-1]) for (name, tensor), wanted in zip(given.items(), self._inputs, strict=True)
            ],
            outputs=[
                (name, partial(make, *shape_of(sizes)), offset) for name, shape_of, make, _, _, offset in self._outputs
            ],
            order=order,
            updated=self._updated,
            partials=[(self._offsets[slot], part.bytes) for slot, part in workspace.partials.items()],
        )


def _made_of(make: Maker, tensor: TensorForm) -> Maker:
    """A function that makes the tensor from its extents, if any."""
    return make if tensor.axes else partial(make, ())


class _Shapes:
    """Shapes of a form's tensors: each picks its own of a problem's extents, followed by ``constants``."""

    def __init__(self, form: Form) -> None:
        self._places: dict[Axis, int] = {name: place for place, name in enumerate(form.blank.extents)}

    @property
    def constants(self) -> tuple[int, ...]:
        """The extents that all problems of the form share."""
        return tuple(axis for axis in self._places if isinstance(axis, int))

    def of(self, tensor: TensorForm) -> Callable[[Shape], Shape]:
        """A function that picks the shape of the tensor."""
        return self.pick(tensor.axes)

    def pick(self, axes: tuple[Axis, ...]) -> Callable[[Shape], Shape]:
        """A function that picks these extents, some of which are names."""
        return _picker(tuple([self._places.setdefault(axis, len(self._places)) for axis in axes]))


# What tensors have in common is one object: the processor has it at hand for the next tensor.


@cache
def _picker(places: tuple[int, ...]) -> Callable[[Shape], Shape]:
    """A function that returns the elements at these places as a tuple, like :func:`operator.itemgetter` of several."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


@cache
def _dense_strides(axes: tuple[Axis, ...], contiguous: int) -> tuple[Callable[[Shape], Any], Any]:
    """A function that picks the strides of the last axes, and their dense values; these are empty if extents vary."""
    if contiguous == 1:
        return itemgetter(-1), 1  # for most tensors, and faster
    last = axes[len(axes) - contiguous :]
    fixed = tuple(axis for axis in last if isinstance(axis, int))
    return itemgetter(slice(len(axes) - contiguous, None)), _strides_of(fixed) if len(fixed) == contiguous else ()


def _strides_of(extents: Shape) -> Shape:
    """The strides of dense axes."""
    strides, step = [], 1
    for extent in reversed(extents):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


@cache
def _writer(strides: Strides) -> tuple[Callable[[Shape], Shape], Callable[..., None]]:
    """Functions that pick the strides of a tensor that kernels read, and that write them after its address.

    The second one writes zeros for axes that the tensor lacks.
    """
    format_ = "@P" + "".join("8x" if axis is None else "q" for axis in strides)
    return _picker(tuple([axis for axis in strides if axis is not None])), Struct(format_).pack_into
