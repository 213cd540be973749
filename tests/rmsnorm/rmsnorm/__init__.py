"""RMS normalisation, an operation of another distribution: y = x / sqrt(mean(x^2) + eps) * gain, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from catalog.build.describe import c_string
from catalog.ops.protocol import Operation
from catalog.runtime.tolerance import ROUNDING, Tolerance
from catalog.schema.arguments import Arguments, Scalar, Size
from catalog.schema.grammar import Grammar
from catalog.schema.kernel import Kernel
from catalog.schema.name_parts import Extents, Target, Word
from catalog.schema.name_parts import Literal as Text
from catalog.schema.problem import Extent, Problem
from catalog.schema.problem import Size as Count
from catalog.schema.problem_tensors import TensorForm
from catalog.schema.traits import TraitModel, Traits, trait

HERE = Path(__file__).parent


class Signature(TraitModel):
    family: Literal["forward"] = Field(description="kernel family")
    dtype: Literal["fp32"] = Field(description="element type of the rows")


class Algorithm(TraitModel):
    lanes: Literal[1, 4, 8, 16] = trait(1, "elements of a row that are summed side by side")


TRAITS = Traits(Signature, Algorithm)


class RmsNormKernel(Kernel):
    operation = "rmsnorm"
    traits = TRAITS

    signature: Signature
    algorithm: Algorithm

    @classmethod
    def grammar(cls, family: str, revision: str) -> Grammar:
        return GRAMMAR


class RmsNormProblem(Problem):
    operation = "rmsnorm"
    sizes = ("rows",)

    rows: Count = Field(description="rows of x")
    columns: Extent = Field(description="elements of a row")
    dtype: Literal["fp32"] = Field("fp32", description="element type")
    eps: Annotated[float, Field(ge=0)] = Field(1e-5, description="what is added to the mean of squares")

    def tensor_forms(self) -> Mapping[str, TensorForm]:
        return {
            "x": TensorForm(("rows", self.columns), "float32", "input", (0,), "x"),
            "gain": TensorForm((self.columns,), "float32", "input", (None,), "gain"),
            "y": TensorForm(("rows", self.columns), "float32", "output", (0,), "y"),
        }

    @property
    def flops(self) -> int:
        return 4 * self.rows * self.columns


class RmsNorm(Operation):
    name = "rmsnorm"
    about = "RMS normalisation of rows"
    kernel = RmsNormKernel
    problem = RmsNormProblem
    specs = HERE / "specs"
    headers = MappingProxyType({"rmsnorm": HERE / "kernels"})
    parameters = ("rows", "columns")
    arguments = Arguments(
        about="The arguments of RMS normalisation.",
        strides={"row": ""},
        tensors={"x": "(rows, columns)", "gain": "(columns)", "y": "(rows, columns)"},
        sizes=(Size("rows"), Size("columns")),
        scalars=(Scalar("eps", "float32", "what is added to the mean of squares"),),
    )

    def emit(self, kernel: Kernel, backend: str, memory: Path) -> str:
        if backend != "host":
            return super().emit(kernel, backend, memory)
        launch = f"rmsnorm::launch<{kernel.algorithm.lanes}>(args)"
        return f"""\
#include "rmsnorm/rmsnorm.hpp"
CATALOG_ENTRY_POINTS({c_string(kernel)}, catalog::no_workspace(args, size), {launch})
"""

    def reference(self, problem: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        x = inputs["x"].astype(np.float64)
        scale = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + problem.eps)
        return {"y": x * scale * inputs["gain"].astype(np.float64)}

    def tolerances(self, problem: Any, inputs: Mapping[str, Any], *, rounds_products: bool = False) -> dict[str, Any]:
        """A sum of squares in float32, a few roundings, and that of the result."""
        unit, smallest = ROUNDING[problem.tensors["y"].element]
        return {"y": Tolerance(unit * smallest, unit + (4 * problem.columns**0.5 + 8) * 2.0**-24)}

    def smoke_fields(self, family: str, traits: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"rows": 37, "columns": 1000, **traits}


GRAMMAR = Grammar(
    TRAITS,
    "forward",
    (Text("rmsnorm"), Word("_", "dtype"), Extents("_l", ("lanes",)), Target(r"(?:_\w+)?")),
)
RMSNORM = RmsNorm()
