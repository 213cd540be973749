"""The operation GEMM, as the rest of the catalog sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from catalog.ops.gemm.kernel import GemmKernel
from catalog.ops.gemm.names import implied
from catalog.ops.gemm.problem import GemmProblem
from catalog.ops.gemm.traits import Family
from catalog.ops.protocol import Operation
from catalog.schema.arguments import Arguments, Size

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from catalog.build.generators import Generator
    from catalog.runtime.tolerance import Tolerance
    from catalog.schema.lineage import Lineage


class Gemm(Operation):
    """General matrix multiplication, as rows of the tile engine and of the dispatcher; no backend builds them yet."""

    name = "gemm"
    about = "general matrix multiplication"
    kernel = GemmKernel
    main_space = "tile_engine"
    index = ("family", "dtype", "layout")
    parameters = ("m", "n", "k")
    listed = ("arch", "family", "dtype", "layout", "pipeline", "built", "name")
    problem = GemmProblem
    arguments = Arguments(
        about="The arguments of GEMM: C = f(A B, D...).",
        strides={"outer": "elements between rows, or between columns if the tensor is column-major"},
        tensors={
            "a": "(m, k)",
            "b": "(k, n)",
            "d0": "(m, n)",
            "d1": "(m, n)",
            "c": "(m, n)",
        },
        sizes=[Size("m"), Size("n"), Size("k")],
    )
    smoke_traits = ("dtype", "layout")
    bench_fields = ("m", "n", "k", "dtype", "layout")
    bench_traits = ("family", "pipeline", "scheduler", "epilogue")
    tile_axes = ("tile_m", "tile_n")
    compares_lists = True
    main_families = (Family.UNIVERSAL, Family.MULTI_D)

    def generator(self, root: Path, timeout: float) -> Generator:
        """As :func:`catalog.ops.gemm.upstream.find_tile_engine`."""
        from catalog.ops.gemm.upstream import find_tile_engine

        return find_tile_engine(root, timeout)

    def main_stage(self, problem: GemmProblem) -> Family:
        """The family with D tensors where the problem has any."""
        return Family.MULTI_D if problem.num_d else Family.UNIVERSAL

    def required_traits(self, problem: GemmProblem, family: str, lineage: Lineage) -> dict[str, Any]:
        """The signature that answers ``problem``; D tensors are row-major."""
        traits = super().required_traits(problem, family, lineage) | implied({"dtype": problem.dtype, "pipeline": ""})
        if family == Family.MULTI_D:
            traits["layout"] = f"{problem.layout}r"
        return {name: traits[name] for name in self.required}

    def reference(self, problem: GemmProblem, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The product in float64, then the function of the D tensors."""
        import numpy as np

        a, b = (inputs[name].astype(np.float64) for name in ("a", "b"))
        of_a, of_b, _ = problem.layout
        c = (a if of_a == "r" else a.T) @ (b if of_b == "r" else b.T)
        for i in range(problem.num_d):
            d = inputs[f"d{i}"].astype(np.float64)
            c = c + d if problem.elementwise == "MultiDAdd" else c * d
        return {"c": c}

    def tolerances(
        self, problem: GemmProblem, inputs: Mapping[str, NDArray[Any]], *, rounds_products: bool = False
    ) -> dict[str, Tolerance]:
        """A sum of k products in float32 is off by at most 4 sqrt(k) u times the sum of their absolute values.

        That is Higham and Mary's probabilistic bound with lambda = 4. Each D tensor adds a rounding in float32, and the
        result is rounded once to its type. Sums of int8 products are exact.
        """
        import numpy as np

        from catalog.runtime.tolerance import EXACT, ROUNDING, Tolerance

        if problem.dtype == "int8":
            return {"c": EXACT}
        magnitudes = {name: np.abs(array.astype(np.float64)) for name, array in inputs.items()}
        largest = self.reference(problem, magnitudes)["c"]
        unit, _ = ROUNDING["float32"]
        roundoff, smallest = ROUNDING[problem.tensors["c"].element]
        terms = 4 * math.sqrt(problem.k) + 2 * problem.num_d
        return {"c": Tolerance(terms * unit * largest + roundoff * smallest, roundoff)}

    def draw(self, problem: GemmProblem, name: str, rng: np.random.Generator) -> NDArray[Any]:
        """Small integers for int8, otherwise standard normal."""
        if problem.dtype != "int8":
            return super().draw(problem, name, rng)
        drawn: NDArray[Any] = rng.integers(-8, 8, problem.shapes[name])
        return drawn

    def smoke_fields(self, family: str, traits: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """Sizes that every tile divides."""
        fields = {"m": 768, "n": 768, "k": 768, "dtype": traits["dtype"], "layout": traits["layout"][:3]}
        if family == Family.MULTI_D:
            fields |= {"num_d": 2, "elementwise": "MultiDAdd"}
        return [MappingProxyType(fields)]


OPERATION = Gemm()
