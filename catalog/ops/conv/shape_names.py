"""Short names of convolutions, for people: ``conv-n32-c64-k128-56x56-f3x3-s2x2-p1x1-fp16-nhwgc``.

Different problems have different names, and a name depends only on its problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from catalog.ops.conv.problem import ConvProblem

_OF_AXES = {"f": "filter", "s": "stride", "p": "pad", "d": "dilation"}


def name_of(problem: ConvProblem) -> str:
    """The name of ``problem``, of letters, digits, ``-`` and ``_``.

    ``n`` images of ``c`` channels, ``k`` output channels, ``g`` groups; the extents of the input; ``f`` the filter,
    ``s`` strides, ``p`` pads and ``d`` dilations along each axis. Groups, strides, pads and dilations are left out
    where they are those of a dense convolution.
    """
    return "-".join(_parts(problem))


def _parts(problem: ConvProblem) -> Iterator[str]:
    yield "conv" if problem.direction == "forward" else f"conv_{problem.direction}"
    yield from (f"{name}{getattr(problem, name)}" for name in "nck")
    if problem.g != 1:
        yield f"g{problem.g}"
    yield "x".join(map(str, problem.size))
    plain = {"stride": {1}, "pad": {0}, "dilation": {1}}
    for letter, field in _OF_AXES.items():
        numbers = getattr(problem, field)
        if set(numbers) != plain.get(field):
            yield letter + "x".join(map(str, numbers))
    yield problem.dtype
    yield problem.layout
