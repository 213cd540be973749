"""The operation convolution, as the rest of the catalog sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from catalog.ops.ck_templates import CkTemplates, TemplatedOperation
from catalog.ops.conv.arguments import ARGUMENTS
from catalog.ops.conv.benchmark import COLUMNS, columns_of
from catalog.ops.conv.kernel import ConvKernel
from catalog.ops.conv.names import NATIVE
from catalog.ops.conv.problem import PLANE, ConvProblem, family_of
from catalog.ops.conv.reach import REACH
from catalog.ops.conv.shrinks import SHRINKS
from catalog.ops.conv.traits import Family, Pipeline
from catalog.ops.protocol import RECEIPT
from catalog.schema.arithmetic import FLOAT32, Arithmetic
from catalog.schema.kernel import Kernel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from catalog.runtime.tolerance import Tolerance
    from catalog.schema.lineage import Lineage


class Conv(TemplatedOperation):
    """Grouped convolution and its gradients: rows of the dispatcher and of the tile engine, and our own for CPUs
    and NVIDIA GPUs.
    """

    name = "conv"
    about = "grouped convolution, forward and backward"
    kernel = ConvKernel
    main_space = "ck"
    index = ("family", "dtype", "ndim")
    parameters = (
        *("n", "c", "k", "g", "channels_in", "channels_out", "taps", "rows", "columns", "depth", "phases"),
        *("pointwise", "unit_stride", "filter_of_three", "dilated", "is_depthwise", "last", *PLANE),
        *REACH,
    )
    varying = ("depth", "phases", *REACH)
    listed = ("arch", "family", "dtype", "ndim", "pipeline", "built", "name")
    problem = ConvProblem
    headers = MappingProxyType({"kernels": Path(__file__).parent / "kernels"})
    arguments = ARGUMENTS
    lists = (RECEIPT, "direction", "dtype", "ndim")
    smoke_traits = ("dtype", "ndim", "layout")
    bench_fields = ("direction", *COLUMNS, "dtype", "layout")
    bench_traits = ("family", "pipeline", "scheduler", "epilogue")
    tile_axes = ("tile_m", "tile_n")
    shrinks = SHRINKS
    required = ("family", "direction", "ndim", "dtype")
    main_families = tuple(Family)

    def main_stage(self, problem: ConvProblem) -> Family:
        """As :func:`catalog.ops.conv.problem.family_of`."""
        return family_of(problem)

    def required_traits(self, problem: ConvProblem, family: str, lineage: Lineage) -> dict[str, Any]:
        """The direction, the number of spatial axes and the element type; rules of selection compare layouts."""
        return super().required_traits(problem, family, lineage) | {"ndim": problem.ndim}

    def parameter(self, problem: ConvProblem, name: str) -> Any:
        """An attribute of the problem, or a function of :data:`catalog.ops.conv.reach.REACH`."""
        return REACH[name](problem) if name in REACH else super().parameter(problem, name)

    def bench_values(self, problem: ConvProblem) -> Mapping[str, Any]:
        """The sizes and the geometry as in upstream's file; direction, element type and layout."""
        return {name: getattr(problem, name) for name in ("direction", "dtype", "layout")} | columns_of(problem)

    def work(self, problem: ConvProblem, kernel: ConvKernel, units: int) -> Mapping[str, float]:
        """As :func:`catalog.ops.conv.work.work_of` for kernels of our own."""
        if kernel.space != NATIVE:
            return super().work(problem, kernel, units)
        from catalog.ops.conv.work import work_of

        return work_of(problem, kernel, units)

    def instances(self, document: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]] | None:
        """As :func:`catalog.ops.conv.configurations.instances`."""
        from catalog.ops.conv.configurations import instances

        return instances(document)

    @property
    def templates(self) -> CkTemplates:
        """As :data:`catalog.ops.conv.kernels.ck.emit.TEMPLATES`."""
        from catalog.ops.conv.kernels.ck.emit import TEMPLATES

        return TEMPLATES

    def emit(self, kernel: Kernel, backend: str, memory: Path) -> str:
        """The output of the backend's emitter."""
        if backend == "cuda":
            from catalog.ops.conv.kernels.cuda.emit import emit as of_cuda

            return of_cuda(kernel)
        if backend == "host":
            from catalog.ops.conv.kernels.host.emit import emit as of_host

            return of_host(kernel)
        return super().emit(kernel, backend, memory)

    def reference(self, problem: ConvProblem, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """As :func:`catalog.ops.conv.reference.reference`."""
        from catalog.ops.conv.reference import reference

        return reference(problem, inputs)

    def tolerances(
        self, problem: ConvProblem, inputs: Mapping[str, NDArray[Any]], arithmetic: Arithmetic = FLOAT32
    ) -> dict[str, Tolerance]:
        """As :func:`catalog.ops.conv.reference.tolerances`."""
        from catalog.ops.conv.reference import tolerances

        return tolerances(problem, inputs, transforms=arithmetic.transforms_factors)

    def arithmetic(self, kernel: Kernel) -> Arithmetic:
        """Minimal filtering multiplies sums of elements."""
        return Arithmetic(transforms_factors=kernel.algorithm.pipeline is Pipeline.HOST_WINOGRAD)

    def draw(self, problem: ConvProblem, name: str, rng: np.random.Generator) -> NDArray[Any]:
        """Small integers for int8, otherwise standard normal."""
        if problem.dtype != "int8":
            return super().draw(problem, name, rng)
        drawn: NDArray[Any] = rng.integers(-8, 8, problem.shapes[name])
        return drawn

    def smoke_fields(self, family: str, traits: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """Channels that every vector divides, and a filter of extent 3, or of one element."""
        ndim = traits["ndim"]
        common: dict[str, Any] = {"n": 2, "dtype": traits["dtype"], "layout": traits["layout"], "size": (16,) * ndim}
        if family == Family.DEPTHWISE:
            return [common | {"c": 8, "k": 8, "g": 8, "filter": (3,) * ndim, "pad": (1,) * ndim}]
        common |= {"direction": family, "c": 64, "k": 64}
        three = {"filter": (3,) * ndim, "pad": (1,) * ndim}
        return [common | three, common | {"filter": (1,) * ndim}, common | three | {"c": 32, "k": 32, "g": 32}]


OPERATION = Conv()
