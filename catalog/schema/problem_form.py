"""What problems have in common that differ only in their sizes: a model's layer at every length of its inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from catalog.schema.problem_tensors import TensorForm, bytes_of_element

if TYPE_CHECKING:
    from catalog.schema.problem import Problem

MOST_FORMS = 4096
"""Maximum number of forms cached in a process. Beyond it the cache is emptied, so equal forms may be two objects."""


class Form:
    """The fields of a problem except its sizes, in normal form, and what follows from them.

    Args:
        text: the operation and the fields as canonical JSON: equal forms have equal texts.
        blank: a problem with these fields and any sizes, without cached values.
    """

    def __init__(self, text: str, blank: Any) -> None:
        self.text = text
        self.blank = blank
        self.fields: Mapping[str, Any] = {**blank.__dict__, "form": self}
        self.names = set(type(blank).model_fields)
        self.sizes_of = _picker(type(blank).sizes)
        self._hash = hash(text)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Form) and self.text == other.text)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Form({self.text})"

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
    def _bytes(self) -> list[tuple[tuple[str, ...], int]]:
        """Pairs of axis names and the bytes, of all tensors that a run needs, for each element along these axes."""
        bytes_along: dict[tuple[str, ...], int] = {}
        for tensor in self.tensors.values():
            if not tensor.optional:
                named = tuple(sorted(axis for axis in tensor.axes if isinstance(axis, str)))
                fixed = math.prod(axis for axis in tensor.axes if isinstance(axis, int))
                bytes_along[named] = bytes_along.get(named, 0) + fixed * bytes_of_element(tensor.element)
        return list(bytes_along.items())

    def bytes_at(self, extents: Mapping[str, int]) -> int:
        """Bytes of all tensors that a run needs at these extents."""
        total = 0
        for axes, size in self._bytes:
            of_these = size
            for axis in axes:
                of_these *= extents[axis]
            total += of_these
        return total


_forms: dict[str, Form] = {}


def form_of(problem: Problem) -> Form:
    """The form of a problem; all problems of a form share the object."""
    fields = problem.key_fields(without=problem.sizes)
    text = canonical(fields | problem.form_facts() | {"operation": problem.operation})
    form = _forms.get(text)
    if form is None:
        if len(_forms) >= MOST_FORMS:
            _forms.clear()
        form = _forms.setdefault(text, Form(text, problem.without_caches()))
    return form


def _picker(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """What gives the values of these names as a tuple, as :func:`operator.itemgetter` does of two or more."""
    return itemgetter(*names) if len(names) > 1 else lambda fields: tuple(fields[name] for name in names)


def canonical(fields: Mapping[str, Any]) -> str:
    """JSON with sorted keys and no spaces: equal fields have equal texts."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))
