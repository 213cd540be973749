"""What the stages of a plan share: the number of splits, and the arrays of partial results."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Partial(NamedTuple):
    """A dense float32 array of partial results: its bytes, and strides in elements in the order of the struct."""

    bytes: int
    strides: tuple[int, ...]


class Workspace(NamedTuple):
    """What the stages of a plan share: the number of parts that the work is divided into, and the partial results by
    their slot in the argument struct. The arrays are uninitialised at first.
    """

    num_splits: int = 1
    partials: Mapping[str, Partial] = MappingProxyType({})


NO_WORKSPACE = Workspace()
"""The workspace of a plan with a single stage."""
