"""The argument struct of a problem, on whatever device its tensors are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from catalog.ops import operation_of
from catalog.runtime.elements import numpy_dtype
from catalog.runtime.tensors import element_strides
from catalog.schema.arguments import NUM_SPLITS, Arguments, Lists
from catalog.schema.problem import Problem
from catalog.schema.problem_form import Form


@dataclass(frozen=True, slots=True)
class Call:
    """A filled argument struct, with what its pointers point to kept alive."""

    args: Any
    pointer: Any = field(repr=False)
    kept: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Template:
    """The arguments of a problem but for the tensors' addresses, and where in the struct these go, in bytes.

    ``lists`` are :attr:`Problem.lists`, in host memory, as are their addresses.
    """

    arguments: Arguments
    args: Any
    lists: Lists
    offsets: tuple[int, ...]

    def fill(
        self,
        tensors: Mapping[str, Any],
        addresses: Iterable[int],
        workspace: Iterable[tuple[str, int, tuple[int, ...]]],
        num_splits: int,
        lists: Mapping[str, int],
    ) -> Any:
        """A copy with the addresses of the tensors, in the template's order.

        Args:
            tensors: those of the call, by name.
            addresses: theirs.
            workspace: the place in the struct, the address and the strides in elements of each partial result.
            num_splits: as the stages agreed.
            lists: the addresses of copies of ``lists``, where the kernel cannot read the host's.
        """
        arguments, offsets = self.arguments, self.arguments.offsets
        args = arguments.args.from_buffer_copy(self.args)
        for offset, address in zip(self.offsets, addresses, strict=True):
            arguments.address_format.pack_into(args, offset, address)
        for slot, address, strides in workspace:
            arguments.tensor_format.pack_into(args, offsets[slot], address, *strides)
        for name, address in lists.items():
            arguments.address_format.pack_into(args, offsets[name], address)
        for name, tensor in arguments.extents_of.items():
            if tensor in tensors:
                setattr(args, name, tensors[tensor].shape[0])
        if num_splits != 1:
            setattr(args, NUM_SPLITS, num_splits)
        return args


def arguments_of(problem: Problem) -> Arguments:
    """The argument struct of the problem's operation."""
    return operation_of(problem).arguments


def without_tensors(problem: Problem) -> Any:
    """The arguments of a problem but for all that is about its tensors."""
    arguments, extents = arguments_of(problem), problem.extents
    blank, sizes = _of_form(problem.form)
    args = arguments.args.from_buffer_copy(blank)
    numbers = [extents[size] if isinstance(size, str) else size for size in sizes]
    arguments.sizes_format.pack_into(args, arguments.sizes_offset, *numbers)
    return args


@lru_cache(maxsize=1024)
def _of_form(form: Form) -> tuple[Any, tuple[str | int, ...]]:
    """The arguments that problems of a form share, and their sizes as :meth:`Arguments.sizes_of`."""
    arguments = arguments_of(form.blank)
    scalars = {scalar.name: getattr(form.blank, scalar.attribute) or 0 for scalar in arguments.scalars}
    return arguments.new(**scalars), arguments.sizes_of(form.blank)


@lru_cache(maxsize=1024)
def template(problem: Problem, layout: tuple[tuple[str, tuple[int, ...]], ...]) -> Template:
    """The arguments for tensors with these names and strides, in bytes."""
    arguments, args, lists = arguments_of(problem), without_tensors(problem), problem.lists
    if lists:
        arguments.lists_format.pack_into(args, arguments.lists_offset, *lists.addresses)
    offsets = []
    for name, strides in layout:
        tensor = problem.tensors[name]
        offsets.append(arguments.offsets[tensor.slot])
        elements = element_strides(tensor, strides, numpy_dtype(tensor.element).itemsize)
        others = [0] * (arguments.most_strides - len(elements))
        arguments.tensor_format.pack_into(args, offsets[-1], 0, *elements, *others)
    return Template(arguments, args, lists, tuple(offsets))
