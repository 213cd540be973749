"""A GEMM problem: one concrete call."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from catalog.errors import ProblemError
from catalog.ops.gemm.names import type_of_c
from catalog.ops.gemm.traits import Activation
from catalog.schema.arguments import NO_LISTS, Lists
from catalog.schema.derived import derived
from catalog.schema.problem import Integer, Lengths, Problem, Size
from catalog.schema.problem_tensors import Axis, Role, TensorForm

_LARGEST = (2 - 2.0**-23) * 2.0**127
"""The largest float32."""

ELEMENTS: Mapping[str, str] = MappingProxyType(
    {
        "fp32": "float32",
        "fp16": "float16",
        "bf16": "bfloat16",
        "fp8": "float8_e4m3fn",
        "bf8": "float8_e5m2",
        "int8": "int8",
        "int32": "int32",
    }
)
"""NumPy's or ml_dtypes' name of each element type."""


BLOCK = 128
"""Extent of a block of :attr:`~catalog.ops.gemm.traits.Scales.BLOCK`, of each axis that has blocks."""

_EIGHT_BITS = ("fp8", "bf8", "int8")
_FLOATS = ("fp16", "bf16", "fp32")
_Factor = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


def _extent(axis: str) -> Callable[[dict[str, Any]], Any]:
    """The default of an axis: the sum of its groups."""

    def total(fields: dict[str, Any]) -> int:
        groups: tuple[int, ...] | None = fields.get("groups", ())
        if groups is None or fields.get("group_axis", axis) != axis:
            raise ProblemError(f"a problem needs {axis}: {_AXES[axis]}")
        return sum(groups)

    return total


_AXES = MappingProxyType({"m": "rows of A and C", "k": "columns of A and rows of B"})


class GemmProblem(Problem):
    """A concrete call: C = f(alpha A B + beta C + bias), combined with D tensors.

    A is m x k, B is k x n; C and the D tensors are m x n, the bias has n elements. With a ``batch``, each but the bias
    has as many of these matrices along a first axis. ``layout`` has a letter for each of A, B and C: r is row-major, c
    column-major; a column-major matrix is given as its transpose. D tensors are row-major. C is an input, updated in
    place, if beta is not 0. Sums of int8 are int32, and so is C without scales.

    ``scales`` are factors of 8-bit A and B, two float32 tensors of the call. Of rows of A and columns of B (``row``):
    scale_a has m elements, scale_b n. Of blocks (``block``): scale_a is m x ceil(k / 128), scale_b ceil(n / 128) x
    ceil(k / 128); the sum of each 128 products is scaled, and these are added in float32. Scales have the first axis
    that their matrix has. One scale of a whole tensor is part of alpha.

    C, the bias and the D tensors are of type ``dtype_c``.

    ``groups`` are the extents of groups along an axis, which they fill: m (the rows of each expert, which has its own
    matrix in a B of groups x k x n), or k (C is groups x m x n, a matrix for each group).

    Raises:
        ProblemError: a field is unknown, missing or outside its domain, or fields contradict each other.
    """

    operation = "gemm"
    sizes = ("m", "n", "k", "groups")
    always_in_key = ("dtype", "layout")

    groups: Lengths | None = Field(None, description="extents of groups along group_axis, integers from 0")
    group_axis: Literal["m", "k"] = Field("m", description="axis that groups divide")
    m: Size = Field(default_factory=_extent("m"), description=_AXES["m"])
    n: Size = Field(description="columns of B and C")
    k: Size = Field(default_factory=_extent("k"), description=_AXES["k"])
    dtype: Literal["fp32", "fp16", "bf16", "fp8", "bf8", "int8"] = Field("fp16", description="element type of A and B")
    dtype_c: Literal["fp32", "fp16", "bf16", "int32"] | None = Field(
        None, description="element type of C, where it is not the usual one, for 8-bit floats and for int8 with scales"
    )
    scales: Literal["no", "row", "block"] = Field(
        "no", description="float32 factors of A and B: of rows and columns, or of 128 of K and 128 columns"
    )
    layout: Literal["rcr", "rrr", "crr", "ccr"] = Field("rcr", description="layouts of A, B and C")
    num_d: Annotated[int, Field(ge=0, le=2), Integer] = Field(0, description="number of D tensors")
    elementwise: Literal["PassThrough", "MultiDAdd", "MultiDMultiply"] = Field(
        "PassThrough", description="function that combines the product with the D tensors"
    )
    batch: Size | None = Field(None, description="number of products; without it, tensors have no such axis")
    k_batch: Annotated[int, Field(ge=0, le=1024), Integer] = Field(
        1, description="parts of K, whose sums are added in order; 0 to choose"
    )
    alpha: _Factor = Field(1.0, description="factor of A B, a finite float32")
    beta: _Factor = Field(0.0, description="factor of the previous C, a finite float32")
    bias: bool = Field(False, description="whether a bias is added to each row of the product")
    activation: Literal["no", "relu", "gelu", "silu"] = Field(
        "no", description="function applied to the product and its bias, before D tensors are combined"
    )

    def normalise(self) -> None:
        """Check that the fields agree: D tensors and elementwise, integer epilogues, scales, groups.

        Raises:
            ProblemError: fields contradict each other.
        """
        self._normalise_scales()
        if self.is_integer and not (
            self.alpha == 1 and self.beta in (0, 1) and self.activation in ("no", Activation.RELU)
        ):
            raise ProblemError(
                f"sums of int8 are int32: alpha={self.alpha:g}, beta={self.beta:g}, activation={self.activation} "
                "would round them",
                hint="Use alpha=1, beta=0 or 1, and no activation or relu.",
            )
        if (self.num_d > 0) != (self.elementwise != "PassThrough"):
            raise ProblemError(
                f"num_d={self.num_d} and elementwise={self.elementwise} contradict each other",
                hint="D tensors are combined by MultiDAdd or MultiDMultiply; without D tensors use PassThrough.",
            )

        if self.groups is None:
            self.set_fields(group_axis="m")
            return
        extent, total = getattr(self, self.group_axis), sum(self.groups)
        if total != extent:
            raise ProblemError(f"groups add up to {total}, but {self.group_axis}={extent}")
        if self.batch is not None or self.num_d or self.k_batch != 1:
            what = "a batch" if self.batch is not None else "D tensors" if self.num_d else "k_batch"
            raise ProblemError(f"groups cannot be combined with {what}", hint="Compute one after the other.")

    def _normalise_scales(self) -> None:
        if self.has_scales and self.dtype not in _EIGHT_BITS:
            raise ProblemError(
                f"scales={self.scales}: {self.dtype} has no scales",
                hint=f"8-bit types have: {', '.join(_EIGHT_BITS)}. One factor of a whole tensor is alpha.",
            )
        if self.has_scales and self.num_d:
            raise ProblemError("scales cannot be combined with D tensors", hint="Compute one after the other.")
        if self.scales == "block" and self.groups is not None and self.group_axis == "k":
            raise ProblemError(
                "groups along k cannot have scales of blocks: a block would belong to two groups",
                hint="Use scales of rows, or groups along m.",
            )
        if self.dtype_c == self._usual_c:
            self.set_fields(dtype_c=None)
        chosen = self.has_scales or self.dtype in ("fp8", "bf8")
        if self.dtype_c is not None and not (chosen and self.dtype_c in _FLOATS):
            raise ProblemError(
                f"dtype_c={self.dtype_c}: C of {self.dtype} is {' or '.join(_FLOATS) if chosen else self._usual_c}",
                hint="C has a choice of types for fp8 and bf8, and for int8 with scales.",
            )

    @property
    def has_scales(self) -> bool:
        """Whether A and B have scales."""
        return self.scales != "no"

    @property
    def _usual_c(self) -> str:
        return "fp16" if self.has_scales else type_of_c(self.dtype)

    @property
    def type_of_c(self) -> str:
        """The element type of C, the bias and the D tensors."""
        return self.dtype_c or self._usual_c

    @property
    def is_integer(self) -> bool:
        """Whether C has the integers that its sums are."""
        return self.dtype == "int8" and not self.has_scales

    def form_facts(self) -> dict[str, Any]:
        """Whether there are groups."""
        return {} if self.groups is None else {"groups": True}

    def kind_fields(self) -> dict[str, Any]:
        """All fields but the sizes, and whether there are groups."""
        return super().kind_fields() | self.form_facts()

    @derived
    def extents(self) -> Mapping[str, int]:
        """M, N, K, the number of products if there are groups, and the blocks of N and K if these have scales."""
        extents = self._measures
        if self.scales == "block":
            extents |= {"n_blocks": -(-self.n // BLOCK), "k_blocks": -(-self.k // BLOCK)}
        return extents

    @property
    def _measures(self) -> dict[str, int]:
        extents = {name: getattr(self, name) for name in ("m", "n", "k")}
        return extents if self.groups is None else extents | {"products": self.products}

    @property
    def coordinates(self) -> tuple[float, ...]:
        """Log2 of M, N, K, and of the number of products if there are groups."""
        return tuple([math.log2(1 + extent) for extent in self._measures.values()])

    @property
    def steps(self) -> tuple[int, ...]:
        """The coordinates rounded down."""
        return tuple([(1 + extent).bit_length() - 1 for extent in self._measures.values()])

    @derived
    def lists(self) -> Lists:
        """The starts of the groups."""
        return NO_LISTS if self.groups is None else Lists(starts=array("i", accumulate(self.groups, initial=0)))

    def tensor_forms(self) -> Mapping[str, TensorForm]:
        """A, B, the scales, the bias, the D tensors, then C.

        Matrices are strided along their outer axis and that of the batch.
        """
        element, result = ELEMENTS[self.dtype], ELEMENTS[self.type_of_c]
        of_a, of_b, _ = self.layout
        without: tuple[str, ...] = () if self.groups is None else {"m": ("a", "c"), "k": ("a", "b")}[self.group_axis]
        outermost: Axis | None = self.batch if self.groups is None else "products"

        def matrix(name: str, *axes: str, of: str = result, role: Role = "input") -> dict[str, TensorForm]:
            of_batch = None if outermost is None or name.removeprefix("scale_") in without else outermost
            outer = None if len(axes) < 2 else 0 if of_batch is None else 1
            if of_batch is None:
                return {name: TensorForm(axes, of, role, (None, outer), name)}
            return {name: TensorForm((of_batch, *axes), of, role, (0, outer), name)}

        forms = matrix("a", *(("m", "k") if of_a == "r" else ("k", "m")), of=element)
        forms |= matrix("b", *(("k", "n") if of_b == "r" else ("n", "k")), of=element)
        if self.has_scales:
            in_blocks = self.scales == "block"
            forms |= matrix("scale_a", "m", *(("k_blocks",) if in_blocks else ()), of="float32")
            forms |= matrix("scale_b", *(("n_blocks", "k_blocks") if in_blocks else ("n",)), of="float32")
        if self.bias:
            forms["bias"] = TensorForm(("n",), result, "input", (None, None), "bias")
        for i in range(self.num_d):
            forms |= matrix(f"d{i}", "m", "n")
        return forms | matrix("c", "m", "n", role="updated" if self.beta else "output")

    @property
    def products(self) -> int:
        """How many products there are."""
        if self.groups is not None:
            return len(self.groups)
        return 1 if self.batch is None else self.batch

    @property
    def group_axis_number(self) -> int:
        """The axis of groups as in the argument struct."""
        return list(_AXES).index(self.group_axis)

    @property
    def activation_number(self) -> int:
        """The activation as in the argument struct."""
        return list(Activation).index(Activation(self.activation))

    @property
    def divided(self) -> bool:
        """Whether kernels may need a workspace: for sums of parts of K, or on GPUs to describe groups."""
        return self.k_batch != 1 or self.groups is not None

    @property
    def is_general(self) -> bool:
        """Whether a kernel must take factors, a bias, an activation or groups along K."""
        stated = (self.group_axis, self.alpha, self.beta, self.bias, self.activation)
        return stated != ("m", 1, 0, False, Activation.NO)

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each product of elements."""
        return 2 * (1 if self.batch is None else self.batch) * self.m * self.n * self.k
