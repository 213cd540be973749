"""A convolution problem: one concrete call."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from catalog.errors import ProblemError
from catalog.ops.conv.names import types_of
from catalog.ops.conv.traits import Family
from catalog.schema.arguments import Lists
from catalog.schema.derived import derived
from catalog.schema.problem import Extent, Lengths, Listed, Problem, Size
from catalog.schema.problem_tensors import TensorForm

ELEMENTS: Mapping[str, str] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "int8",
    "int32": "int32",
}
"""NumPy's or ml_dtypes' name of each element type."""

AXES = 3
"""Maximum number of spatial axes. Kernels see all of them: missing ones come first and have extent 1."""

_Positive = Annotated[tuple[Extent, ...], Listed]


def _everywhere(value: int) -> Callable[[dict[str, Any]], tuple[int, ...]]:
    """The default of a field with a number for each spatial axis."""
    return lambda fields: (value,) * len(fields.get("size", ()))


class ConvProblem(Problem):
    """A concrete call: a grouped convolution of 1 to 3 spatial axes, or one of its gradients.

    ``output`` = ``input`` * ``weight``, as deep learning defines it: a cross-correlation. The direction says which of
    the three tensors is computed: ``output`` in forward, ``input`` in bwd_data, ``weight`` in bwd_weight; there,
    ``output`` is its gradient, and the result is that of the computed tensor.

    In the layout nhwgc, images are ``(n, *size, c)`` and weights ``(k, *filter, c / g)``; in ngchw, images are
    ``(n, c, *size)`` and weights ``(k, c / g, *filter)``. Groups divide the channels of images in order. Sums of int8
    are int32.

    Raises:
        ProblemError: a field is unknown, missing or outside its domain, or fields contradict each other.
    """

    operation = "conv"
    sizes = ("n", "c", "k", "size")
    always_in_key = ("direction", "dtype", "layout")

    direction: Literal["forward", "bwd_data", "bwd_weight"] = Field(
        "forward", description="tensor that is computed: output, or gradient of input or weight"
    )
    n: Size = Field(description="number of images")
    c: Extent = Field(description="channels of the input, of all groups")
    k: Extent = Field(description="channels of the output, of all groups")
    g: Extent = Field(1, description="number of groups that the channels are divided into")
    size: _Positive = Field(description="spatial extents of the input, integers from 1")
    filter: _Positive = Field(description="spatial extents of the filter, integers from 1")
    stride: _Positive = Field(default_factory=_everywhere(1), description="stride along each spatial axis, from 1")
    dilation: _Positive = Field(
        default_factory=_everywhere(1), description="distance of neighbours in the filter along each axis, from 1"
    )
    pad: Lengths = Field(
        default_factory=_everywhere(0), description="zeros before and after each spatial axis of the input, from 0"
    )
    dtype: Literal["fp32", "fp16", "bf16", "int8"] = Field("fp16", description="element type of input and weight")
    layout: Literal["nhwgc", "ngchw"] = Field(
        "nhwgc", description="whether channels come last (nhwgc) or before the extents (ngchw)"
    )

    def normalise(self) -> None:
        """Check that there is an output, and that groups divide the channels.

        Raises:
            ProblemError: fields contradict each other.
        """
        if not 1 <= self.ndim <= AXES:
            raise ProblemError(f"size has {self.ndim} extents", hint=f"There are 1 to {AXES} spatial axes.")
        for name in ("filter", "stride", "dilation", "pad"):
            if len(getattr(self, name)) != self.ndim:
                raise ProblemError(f"{name} has {len(getattr(self, name))} numbers, but size has {self.ndim}")
        for name in ("c", "k"):
            if getattr(self, name) % self.g:
                raise ProblemError(f"{name}={getattr(self, name)} is not a multiple of g={self.g}")
        for place, extent in enumerate(self.out):
            if extent < 1:
                reach = self.dilation[place] * (self.filter[place] - 1) + 1
                raise ProblemError(
                    f"the filter reaches over {reach} elements along axis {place}, the padded input has "
                    f"{self.size[place] + 2 * self.pad[place]}"
                )
        if self.dtype == "int8" and self.direction != "forward":
            raise ProblemError("int8 has no gradients", hint="Use a floating-point type, or direction forward.")

    @property
    def ndim(self) -> int:
        """Number of spatial axes."""
        return len(self.size)

    @derived
    def out(self) -> tuple[int, ...]:
        """Spatial extents of the output."""
        axes = zip(self.size, self.filter, self.stride, self.dilation, self.pad, strict=True)
        return tuple((size + 2 * pad - apart * (reach - 1) - 1) // step + 1 for size, reach, step, apart, pad in axes)

    @property
    def name(self) -> str:
        """As :func:`catalog.ops.conv.shape_names.name_of`."""
        from catalog.ops.conv.shape_names import name_of

        return name_of(self)

    def form_facts(self) -> dict[str, Any]:
        """The number of spatial axes."""
        return {"ndim": self.ndim}

    def kind_fields(self) -> dict[str, Any]:
        """All fields but the sizes, and the number of spatial axes."""
        return super().kind_fields() | self.form_facts()

    @property
    def coordinates(self) -> tuple[float, ...]:
        """Log2 of the images, the channels of a group and the positions of an image."""
        return tuple([math.log2(1 + extent) for extent in self._measures])

    @property
    def steps(self) -> tuple[int, ...]:
        """The coordinates rounded down."""
        return tuple([(1 + extent).bit_length() - 1 for extent in self._measures])

    @property
    def _measures(self) -> tuple[int, ...]:
        return (self.n, self.channels_in, self.channels_out, math.prod(self.out))

    @derived
    def extents(self) -> Mapping[str, int]:
        """Images, channels, spatial extents of the input and the output, and what rules of selection ask about them."""
        spatial = {f"in{axis}": extent for axis, extent in enumerate(self.size)}
        spatial |= {f"out{axis}": extent for axis, extent in enumerate(self.out)}
        return {"n": self.n, "c": self.c, "k": self.k, **spatial, **{name: getattr(self, name) for name in _VARYING}}

    @derived
    def lists(self) -> Lists:
        """The geometry, as kernels see it."""
        rows = (self.size, self.out, self.filter, self.stride, self.dilation)
        numbers = [number for row in rows for number in (*(1,) * (AXES - self.ndim), *row)]
        return Lists(geometry=array("i", [*numbers, *(0,) * (AXES - self.ndim), *self.pad]))

    def tensor_forms(self) -> Mapping[str, TensorForm]:
        """Input, weight and output, the computed one last; images may have any stride between them."""
        element = ELEMENTS[self.dtype]
        result = ELEMENTS[types_of(self.dtype)["dtype_out"]]

        def form(name: str, first: str, channels: str, spatial: tuple[str | int, ...], of: str) -> TensorForm:
            axes = (first, *spatial, channels) if self.last else (first, channels, *spatial)
            computed = name == _COMPUTED[self.direction]
            return TensorForm(axes, of, "output" if computed else "input", (0,), name, len(axes) - 1)

        axes = range(self.ndim)
        forms = {
            "input": form("input", "n", "c", tuple(f"in{axis}" for axis in axes), element),
            "weight": form("weight", "k", "channels_in", self.filter, element),
            "output": form("output", "n", "k", tuple(f"out{axis}" for axis in axes), result),
        }
        computed = forms.pop(_COMPUTED[self.direction])
        return forms | {computed.slot: computed}

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each product of elements."""
        return 2 * self.n * math.prod(self.out) * self.k * self.channels_in * math.prod(self.filter)

    # What rules of selection ask about a problem.

    @property
    def channels_in(self) -> int:
        """Input channels of a group."""
        return self.c // self.g

    @property
    def channels_out(self) -> int:
        """Output channels of a group."""
        return self.k // self.g

    @property
    def pointwise(self) -> bool:
        """Whether the filter has one element, without padding."""
        return set(self.filter) == {1} and not any(self.pad)

    @property
    def unit_stride(self) -> bool:
        """Whether all strides are 1."""
        return set(self.stride) == {1}

    @property
    def filter_of_three(self) -> bool:
        """Whether all extents of the filter are 3."""
        return set(self.filter) == {3}

    @property
    def is_depthwise(self) -> bool:
        """Whether each group has one input and one output channel."""
        return self.c == self.k == self.g

    @property
    def taps(self) -> int:
        """Elements of the filter."""
        return math.prod(self.filter)

    @property
    def phases(self) -> int:
        """Parts of the result that meet different elements of the filter: the gradient of an input has several.

        Each has a position: a stride beyond the extent makes no more of them, and without images there is one.
        """
        if self.direction != "bwd_data" or self.n == 0:
            return 1
        return math.prod(min(stride, size) for stride, size in zip(self.stride, self.size, strict=True))

    @property
    def last(self) -> bool:
        """Whether channels are the last axis."""
        return self.layout == "nhwgc"

    @property
    def dilated(self) -> bool:
        """Whether some dilation is not 1."""
        return set(self.dilation) != {1}

    @property
    def rows(self) -> int:
        """Rows of the product of a group."""
        if self.direction == "bwd_weight":
            return self.channels_out
        return self.n * math.prod(self.out if self.direction == "forward" else self.size)

    @property
    def columns(self) -> int:
        """Columns of the product of a group."""
        if self.direction == "forward":
            return self.channels_out
        return self.channels_in * (self.taps if self.direction == "bwd_weight" else 1)

    @property
    def depth(self) -> int:
        """Depth of the product of a group: the maximum number of products in a sum."""
        if self.direction == "bwd_weight":
            return self.n * math.prod(self.out)
        channels = self.channels_in if self.direction == "forward" else self.channels_out
        return channels * self.taps

    @property
    def plane(self) -> Mapping[str, int]:
        """Height and width, with 1 for a missing height: of input, output, filter, stride, padding and dilation."""
        named = {"": self.size, "out_": self.out, "filter_": self.filter, "step_": self.stride, "border_": self.pad}
        named |= {"apart_": self.dilation}
        words = {"": ("height", "width"), "out_": ("out_height", "out_width")}
        return {
            word: (1, *numbers)[place]
            for prefix, numbers in named.items()
            for word, place in zip(words.get(prefix, (f"{prefix}h", f"{prefix}w")), (-2, -1), strict=True)
        }


_VARYING = (
    *("channels_in", "channels_out", "rows", "columns", "is_depthwise"),
    *("height", "width", "out_height", "out_width"),
)
"""Parameters of selection rules that follow from the sizes."""

_COMPUTED = {"forward": "output", "bwd_data": "input", "bwd_weight": "weight"}

PLANE = (
    *("height", "width", "out_height", "out_width"),
    *("filter_h", "filter_w", "step_h", "step_w", "border_h", "border_w"),
    *("apart_h", "apart_w"),
)
"""Parameters of selection rules about the last two spatial axes."""


def _of_plane(word: str) -> property:
    return property(lambda problem: problem.plane[word])


for _word in PLANE:
    setattr(ConvProblem, _word, _of_plane(_word))


def family_of(problem: ConvProblem) -> Family:
    """The family whose kernels answer ``problem``."""
    direct = problem.direction == "forward" and problem.layout == "ngchw"
    return Family.DEPTHWISE if direct and problem.ndim == 2 and problem.is_depthwise else Family(problem.direction)
