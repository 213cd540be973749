"""RMSNorm as an operation of the kernel catalog: y = x / sqrt(mean(x^2) + eps) * w, for each row of x."""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from catalog.build.describe import c_string
from catalog.ops.protocol import Operation
from catalog.runtime.tolerance import ROUNDING, Tolerance
from catalog.schema.arguments import Arguments, Scalar, Size
from catalog.schema.arithmetic import FLOAT32
from catalog.schema.grammar import Grammar
from catalog.schema.kernel import Kernel
from catalog.schema.name_parts import Extents, Target, Word
from catalog.schema.name_parts import Literal as Text
from catalog.schema.problem import Extent, Problem
from catalog.schema.problem_tensors import TensorForm
from catalog.schema.traits import Count, TraitModel, Traits, trait

HERE = Path(__file__).parent


class Signature(TraitModel):
    """What a kernel computes."""

    family: Literal["rmsnorm"] = trait("rmsnorm", "kernel family")
    dtype: Literal["fp32"] = trait("fp32", "element type of x, w and y")


class Algorithm(TraitModel):
    """How it computes it."""

    lanes: Count = trait(0, "partial sums of a row, which the compiler keeps in vector registers")


TRAITS = Traits(Signature, Algorithm)
NAME = (Text("rmsnorm"), Word("_", "dtype"), Extents("_l", ("lanes",)), Target(r"_\S+"))
GRAMMAR = Grammar(TRAITS, "rmsnorm", NAME)


class RmsNormKernel(Kernel):
    """A row of the catalog."""

    operation = "rmsnorm"
    traits = TRAITS
    signature: Signature
    algorithm: Algorithm

    @classmethod
    def grammar(cls, family, lineage):
        """All kernels are named alike."""
        return GRAMMAR


class RmsNormProblem(Problem):
    """A concrete call."""

    operation = "rmsnorm"
    sizes = ("rows", "columns")

    rows: Extent = Field(description="rows of x, an integer from 1")
    columns: Extent = Field(description="columns of x, an integer from 1")
    dtype: Literal["fp32"] = Field("fp32", description="element type")
    eps: Annotated[float, Field(gt=0)] = Field(1e-6, description="added to the mean of the squares")

    def tensor_forms(self):
        """X and y are strided along the rows; w is one row."""
        return {
            "x": TensorForm(("rows", "columns"), "float32", "input", (0,), "x"),
            "w": TensorForm(("columns",), "float32", "input", (None,), "w"),
            "y": TensorForm(("rows", "columns"), "float32", "output", (0,), "y"),
        }

    @property
    def flops(self):
        """A multiply-add and two multiplications for each element."""
        return 4 * self.rows * self.columns


class RmsNorm(Operation):
    """The operation."""

    name = "rmsnorm"
    about = "root mean square normalisation of rows"
    kernel, problem, specs = RmsNormKernel, RmsNormProblem, HERE / "specs"
    parameters = ("rows", "columns")
    listed = ("arch", "family", "dtype", "lanes", "built", "name")
    headers = {"rmsnorm": HERE / "include"}
    arguments = Arguments(
        about="The arguments of RMSNorm.",
        strides={"row": ""},
        tensors={"x": "(rows, columns)", "w": "(columns)", "y": "(rows, columns)"},
        sizes=[Size("rows"), Size("columns")],
        scalars=[Scalar("eps", "float32")],
    )

    def emit(self, kernel, backend, memory):
        """The source of a row: its traits for the header that implements all of them."""
        return f"""\
// {kernel.name}
{self.arguments.header}
#include "rmsnorm/rmsnorm.hpp"
CATALOG_ENTRY_POINTS({c_string(kernel)}, catalog::no_workspace(args, size), rmsnorm<{kernel.algorithm.lanes}>(args))
"""

    def reference(self, problem, inputs):
        """As the definition reads."""
        x, w = (inputs[name].astype(np.float64) for name in ("x", "w"))
        return {"y": x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + problem.eps) * w}

    def tolerances(self, problem, inputs, arithmetic=FLOAT32):
        """Each term of the mean is off by at most columns + 3 roundings, the root halves that, then come three more."""
        roundoff, smallest = ROUNDING["float32"]
        return {"y": Tolerance(smallest, ((problem.columns + 3) / 2 + 4) * roundoff)}

    def smoke_fields(self, family, traits):
        """Rows that no number of lanes divides."""
        return [{"rows": 5, "columns": 257, **traits}]


RMSNORM = RmsNorm()
