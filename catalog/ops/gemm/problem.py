"""A GEMM problem: one concrete call, C = A B combined with D tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from catalog.errors import ProblemError
from catalog.ops.gemm.names import implied
from catalog.schema.problem import Extent, Integer, Problem
from catalog.schema.problem_tensors import TensorForm

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


class GemmProblem(Problem):
    """A concrete call: C = f(A B, D...), with A of m x k, B of k x n, C and the D tensors of m x n elements.

    ``layout`` has a letter for each of A, B and C: r is row-major, c column-major. D tensors are row-major.

    Raises:
        ProblemError: a field is unknown, missing or outside its domain, or fields contradict each other.
    """

    operation = "gemm"
    sizes = ("m", "n", "k")
    always_in_key = ("dtype", "layout")

    m: Extent = Field(description="rows of A and C, an integer from 1")
    n: Extent = Field(description="columns of B and C, an integer from 1")
    k: Extent = Field(description="columns of A and rows of B, an integer from 1")
    dtype: Literal["fp32", "fp16", "bf16", "fp8", "bf8", "int8"] = Field("fp16", description="element type of A and B")
    layout: Literal["rcr", "rrr", "crr", "ccr"] = Field("rcr", description="layouts of A, B and C")
    num_d: Annotated[int, Field(ge=0, le=2), Integer] = Field(0, description="number of D tensors")
    elementwise: Literal["PassThrough", "MultiDAdd", "MultiDMultiply"] = Field(
        "PassThrough", description="function that combines the product with the D tensors"
    )

    def normalise(self) -> None:
        """Check that there are D tensors exactly if a function combines them.

        Raises:
            ProblemError: only one of the two is stated.
        """
        if (self.num_d > 0) != (self.elementwise != "PassThrough"):
            raise ProblemError(
                f"num_d={self.num_d} and elementwise={self.elementwise} contradict each other",
                hint="D tensors are combined by MultiDAdd or MultiDMultiply; without D tensors use PassThrough.",
            )

    def tensor_forms(self) -> Mapping[str, TensorForm]:
        """A, B, the D tensors, then C; each is strided along its outer axis."""
        element = ELEMENTS[self.dtype]
        result = ELEMENTS[implied({"dtype": self.dtype, "pipeline": ""})["dtype_c"]]
        of_a, of_b, _ = self.layout
        a = ("m", "k") if of_a == "r" else ("k", "m")
        b = ("k", "n") if of_b == "r" else ("n", "k")
        forms = {
            "a": TensorForm(a, element, "input", (0,), "a"),
            "b": TensorForm(b, element, "input", (0,), "b"),
        }
        forms |= {f"d{i}": TensorForm(("m", "n"), result, "input", (0,), f"d{i}") for i in range(self.num_d)}
        return forms | {"c": TensorForm(("m", "n"), result, "output", (0,), "c")}

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each product."""
        return 2 * self.m * self.n * self.k
