"""The columns of a benchmark's file that state a convolution: those of upstream's benchmark, for one to three axes.

Source: CK, tile_engine/ops/grouped_conv: kernel, N, C, K, G, Hi, Wi, Y, X, stride_h, stride_w, pad_h, pad_w,
latency_ms, tflops. The columns of depth and of dilations are named alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from catalog.ops.conv.problem import ConvProblem

_OF_AXES: Mapping[str, tuple[tuple[str, ...], int]] = {
    "size": (("Di", "Hi", "Wi"), 1),
    "filter": (("Z", "Y", "X"), 1),
    "stride": (("stride_d", "stride_h", "stride_w"), 1),
    "pad": (("pad_d", "pad_h", "pad_w"), 0),
    "dilation": (("dilation_d", "dilation_h", "dilation_w"), 1),
}
"""The columns of a field with a number for each axis, and the number of an axis that a problem lacks."""

_CHANNELS = {"N": "n", "C": "c", "K": "k", "G": "g"}

COLUMNS = (*_CHANNELS, *(name for names, _ in _OF_AXES.values() for name in names))
"""The columns, in order."""


def columns_of(problem: ConvProblem) -> dict[str, int]:
    """The values of :data:`COLUMNS`."""
    values = {column: getattr(problem, name) for column, name in _CHANNELS.items()}
    for field, (names, missing) in _OF_AXES.items():
        numbers = getattr(problem, field)
        values |= zip(names, (*(missing,) * (len(names) - len(numbers)), *numbers), strict=True)
    return values
