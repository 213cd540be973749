"""A GEMM problem: one concrete call."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from catalog.errors import ProblemError
from catalog.ops.gemm.names import implied
from catalog.ops.gemm.traits import Activation
from catalog.schema.problem import Integer, Problem, Size
from catalog.schema.problem_tensors import Axis, Role, Strides, TensorForm

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


_Factor = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class GemmProblem(Problem):
    """A concrete call: C = f(alpha A B + beta C + bias), combined with D tensors.

    A is m x k, B is k x n; C and the D tensors are m x n, the bias has n elements. With a ``batch``, each but the bias
    has as many of these matrices along a first axis. ``layout`` has a letter for each of A, B and C: r is row-major, c
    column-major; a column-major matrix is given as its transpose. D tensors are row-major. C is an input, updated in
    place, if beta is not 0. Sums of int8 are int32.

    Raises:
        ProblemError: a field is unknown, missing or outside its domain, or fields contradict each other.
    """

    operation = "gemm"
    sizes = ("m", "n", "k")
    always_in_key = ("dtype", "layout")

    m: Size = Field(description="rows of A and C")
    n: Size = Field(description="columns of B and C")
    k: Size = Field(description="columns of A and rows of B")
    dtype: Literal["fp32", "fp16", "bf16", "fp8", "bf8", "int8"] = Field("fp16", description="element type of A and B")
    layout: Literal["rcr", "rrr", "crr", "ccr"] = Field("rcr", description="layouts of A, B and C")
    num_d: Annotated[int, Field(ge=0, le=2), Integer] = Field(0, description="number of D tensors")
    elementwise: Literal["PassThrough", "MultiDAdd", "MultiDMultiply"] = Field(
        "PassThrough", description="function that combines the product with the D tensors"
    )
    batch: Size | None = Field(None, description="number of products; without it, tensors have no such axis")
    alpha: _Factor = Field(1.0, description="factor of A B, a finite float32")
    beta: _Factor = Field(0.0, description="factor of the previous C, a finite float32")
    bias: bool = Field(False, description="whether a bias is added to each row of the product")
    activation: Literal["no", "relu", "gelu", "silu"] = Field(
        "no", description="function applied to the product and its bias, before D tensors are combined"
    )

    def normalise(self) -> None:
        """Check that D tensors come with a function that combines them, and that integers stay integers.

        Raises:
            ProblemError: fields contradict each other.
        """
        if self.dtype == "int8" and not (
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

    def tensor_forms(self) -> Mapping[str, TensorForm]:
        """A, B, the bias, the D tensors, then C; matrices are strided along their outer axis and that of the batch."""
        element = ELEMENTS[self.dtype]
        result = ELEMENTS[implied({"dtype": self.dtype, "pipeline": ""})["dtype_c"]]
        of_a, of_b, _ = self.layout
        first: tuple[Axis, ...] = () if self.batch is None else (self.batch,)
        strides: Strides = (None, 0) if self.batch is None else (0, 1)

        def matrix(name: str, *axes: str, of: str = result, role: Role = "input") -> dict[str, TensorForm]:
            return {name: TensorForm((*first, *axes), of, role, strides, name)}

        forms = matrix("a", *(("m", "k") if of_a == "r" else ("k", "m")), of=element)
        forms |= matrix("b", *(("k", "n") if of_b == "r" else ("n", "k")), of=element)
        if self.bias:
            forms["bias"] = TensorForm(("n",), result, "input", (None, None), "bias")
        for i in range(self.num_d):
            forms |= matrix(f"d{i}", "m", "n")
        return forms | matrix("c", "m", "n", role="updated" if self.beta else "output")

    @property
    def products(self) -> int:
        """How many products there are."""
        return 1 if self.batch is None else self.batch

    @property
    def activation_number(self) -> int:
        """The activation as in the argument struct."""
        return list(Activation).index(Activation(self.activation))

    @property
    def is_general(self) -> bool:
        """Whether a kernel must take a batch, factors, a bias or an activation."""
        stated = (self.batch, self.alpha, self.beta, self.bias, self.activation)
        return stated != (None, 1, 0, False, Activation.NO)

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each product of elements."""
        return 2 * self.products * self.m * self.n * self.k
