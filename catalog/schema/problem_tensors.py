"""The tensors of a problem: name, role, shape, element type, and the axes that kernels stride along.

A :class:`TensorForm` describes a tensor without sizes, for all problems of a
:class:`~catalog.schema.problem_form.Form`. Its axes are fixed extents, or names of the extents that vary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Shape = tuple[int, ...]
Axis = int | str
Role = Literal["input", "output", "updated"]
Strides = tuple[int | None, ...]

_BITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a run.

    Attributes:
        shape: its extents; the first extent of a pool is the maximum that is used.
        element: NumPy's or ml_dtypes' name of the element type.
        role: an updated input is written in place, and is also an output.
        strides: the axes that a kernel strides along, in the order of the argument struct; None where the tensor lacks
            the axis, or all indices along it share the elements.
        slot: its place in the argument struct.
        contiguous: how many of the last axes are dense.
        optional: whether an input may be absent.
        pool: whether the first axis may have any extent.
    """

    shape: Shape
    element: str
    role: Role
    strides: Strides
    slot: str
    contiguous: int = 1
    optional: bool = False
    pool: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * bytes_of_element(self.element)


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A :class:`Tensor` without its sizes.

    Each of ``axes`` is an extent, or a name of :attr:`~catalog.schema.problem.Problem.extents`. ``result`` names what a
    run writes here, where that differs from the tensor's own name.
    """

    axes: tuple[Axis, ...]
    element: str
    role: Role
    strides: Strides
    slot: str
    contiguous: int = 1
    optional: bool = False
    pool: bool = False
    result: str = ""

    def shape(self, extents: Mapping[str, int]) -> Shape:
        """The shape at these extents."""
        return shape_of(self.axes, extents)

    def tensor(self, extents: Mapping[str, int]) -> Tensor:
        """The tensor at these extents."""
        return Tensor(
            self.shape(extents),
            self.element,
            self.role,
            self.strides,
            self.slot,
            self.contiguous,
            self.optional,
            self.pool,
        )


def shape_of(axes: tuple[Axis, ...], extents: Mapping[str, int]) -> Shape:
    """The shape of ``axes`` at these extents."""
    return tuple([axis if isinstance(axis, int) else extents[axis] for axis in axes])


@cache
def bytes_of_element(element: str) -> int:
    """Bytes of an element, from the number of bits in NumPy's or ml_dtypes' name of its type.

    Raises:
            ValueError: the name states no number of bits.
    """
    bits = _BITS.search(element)
    if bits is None or int(bits[0]) % 8:
        raise ValueError(f"{element!r} is not an element type of whole bytes, such as float16")
    return int(bits[0]) // 8
