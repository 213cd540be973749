"""What the stages of a plan hand to each other: how many splits there are, and the arrays of partial results."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Partial(NamedTuple):
    """Float32 partial results, dense: bytes, and strides in elements, in the order of the argument struct."""

    bytes: int
    strides: tuple[int, ...]


class Workspace(NamedTuple):
    """What the stages of a plan share: the parts that the work is divided into, and partial results by their place in
    the argument struct, which begin uninitialised.
    """

    num_splits: int = 1
    partials: Mapping[str, Partial] = MappingProxyType({})


NO_WORKSPACE = Workspace()
"""That of a single stage."""
