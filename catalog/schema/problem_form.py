"""What problems have in common that differ only in their sizes: a model's layer at every length of its inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from catalog.forks import Lock
from catalog.schema.problem_tensors import TensorForm, bytes_of_element

if TYPE_CHECKING:
    from catalog.schema.problem import Problem

MOST_FORMS = 4096
"""Maximum number of forms that a process keeps without a problem that has them; beyond it, it keeps none of these."""


class Form:
    """The fields of a problem except its sizes, in normal form, and what follows from them.

    Equal forms are one object (:func:`form_of`), so that looking them up compares no text.

    Args:
        text: the operation and the fields as canonical JSON: equal forms have equal texts.
        blank: a problem with these fields and any sizes, without cached values.
    """

    def __init__(self, text: str, blank: Any) -> None:
        self.text = text
        self.blank = blank
        self.fields: Mapping[str, Any] = dict(blank.__dict__)
        self._class: type[Problem] = type(blank)
        self.names = set(self._class.model_fields)
        self.divided: bool = blank.divided
        self.sizes_of = _picker(self._class.sizes)

    def __repr__(self) -> str:
        return f"Form({self.text})"

    @cached_property
    def certain_sizes(self) -> Callable[[Mapping[str, Any]], Mapping[str, Any] | None]:
        """As :meth:`Problem.sizing`."""
        sizing: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] = self.blank.sizing()
        return sizing

    @cached_property
    def borrowed_sizes(self) -> Callable[[Problem], Mapping[str, Any] | None]:
        """As :meth:`Problem.borrowing`."""
        borrowing: Callable[[Problem], Mapping[str, Any] | None] = self.blank.borrowing()
        return borrowing

    def resized(self, sizes: Mapping[str, Any]) -> Any:
        """As :meth:`Problem.resized`."""
        certain = self.certain_sizes(sizes)
        return self._constructed(sizes) if certain is None else self._of(certain)

    def like(self, other: Problem) -> Any:
        """The problem of this form with the sizes of another, from which it takes over what follows from them."""
        certain = self.borrowed_sizes(other)
        if certain is None:
            return self._constructed({name: getattr(other, name) for name in self._class.sizes})
        return self._of(certain)

    def _constructed(self, sizes: Mapping[str, Any]) -> Any:
        others = {name: value for name, value in self.blank.model_dump().items() if name not in self._class.sizes}
        return self._class(**{**others, **sizes})

    def _of(self, certain: Mapping[str, Any]) -> Any:
        fields = {**self.fields, **certain}
        fields["identity"] = self, *self.sizes_of(fields)
        # As pydantic's model_construct, without validation: the form's fields and these sizes are known to be valid.
        problem, assign = object.__new__(self._class), object.__setattr__
        assign(problem, "__dict__", fields)
        assign(problem, "__pydantic_fields_set__", self.names)
        assign(problem, "__pydantic_extra__", None)
        assign(problem, "__pydantic_private__", None)
        return problem

    @cached_property
    def tensors(self) -> Mapping[str, TensorForm]:
        """Every tensor of a run by name: inputs in the order of a call, then outputs."""
        forms: Mapping[str, TensorForm] = self.blank.tensor_forms()
        return forms

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """Names of the tensors that a run must be given, in the order of a call."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.role != "output" and not tensor.optional)

    @cached_property
    def accepted(self) -> tuple[str, ...]:
        """Names of the tensors that a run may be given, in the order of a call."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.role != "output")

    @cached_property
    def made(self) -> tuple[str, ...]:
        """Names of the tensors that a run allocates for its results."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.role == "output")

    @cached_property
    def kind(self) -> str:
        """What it shares with all problems that the same kernels answer, as canonical JSON."""
        return canonical(self.blank.kind_fields())

    @cached_property
    def _bytes(self) -> tuple[int, list[tuple[str, int]], list[tuple[tuple[str, ...], int]]]:
        """Bytes of all tensors that a run needs: a constant, by extent of one axis, by product of several axes."""
        bytes_along: dict[tuple[str, ...], int] = {}
        for tensor in self.tensors.values():
            if not tensor.optional:
                named = tuple(sorted(axis for axis in tensor.axes if isinstance(axis, str)))
                fixed = math.prod(axis for axis in tensor.axes if isinstance(axis, int))
                bytes_along[named] = bytes_along.get(named, 0) + fixed * bytes_of_element(tensor.element)
        constant = bytes_along.pop((), 0)
        single = [(axes[0], size) for axes, size in bytes_along.items() if len(axes) == 1]
        return constant, single, [(axes, size) for axes, size in bytes_along.items() if len(axes) > 1]

    def bytes_at(self, extents: Mapping[str, int]) -> int:
        """Bytes of all tensors that a run needs at these extents."""
        total, single, several = self._bytes
        for axis, size in single:
            total += size * extents[axis]
        for axes, size in several:
            of_these = size
            for axis in axes:
                of_these *= extents[axis]
            total += of_these
        return total


_forms: WeakValueDictionary[str, Form] = WeakValueDictionary()
_kept: list[Form] = []
_lock = Lock()


def form_of(problem: Problem) -> Form:
    """The form of a problem; all problems of a form share the object, in all threads."""
    fields = problem.key_fields(without=problem.sizes)
    text = canonical(fields | problem.form_facts() | {"operation": problem.operation})
    with _lock:
        form = _forms.get(text)
        if form is None:
            form = _forms[text] = Form(text, problem.without_caches())
            if len(_kept) >= MOST_FORMS:
                _kept.clear()
            _kept.append(form)
    return form


def _picker(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """A function that returns the values of these names as a tuple, like :func:`operator.itemgetter` of two or more."""
    return itemgetter(*names) if len(names) > 1 else lambda fields: tuple(fields[name] for name in names)


def canonical(fields: Mapping[str, Any]) -> str:
    """JSON with sorted keys and no spaces: equal fields have equal texts."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))
