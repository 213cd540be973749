"""The operation GEMM, as the rest of the catalog sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from catalog.errors import TensorError
from catalog.ops.ck_templates import CkTemplates, TemplatedOperation
from catalog.ops.gemm.arguments import ARGUMENTS
from catalog.ops.gemm.kernel import GemmKernel
from catalog.ops.gemm.names import NATIVE, implied
from catalog.ops.gemm.problem import GemmProblem
from catalog.ops.gemm.shrinks import SHRINKS
from catalog.ops.gemm.traits import OF_GROUPS, ONE_PRODUCT, Family, Scales, scales_of
from catalog.schema.arithmetic import FLOAT32, Arithmetic
from catalog.schema.kernel import Kernel
from catalog.schema.workspace import Partial, Workspace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from catalog.build.generators import Generator
    from catalog.runtime.tolerance import Tolerance
    from catalog.schema.lineage import Lineage


class Gemm(TemplatedOperation):
    """General matrix multiplication: rows of the tile engine and of the dispatcher, and kernels of our own for CPUs and
    NVIDIA GPUs.
    """

    name = "gemm"
    about = "general matrix multiplication"
    kernel = GemmKernel
    main_space = "tile_engine"
    index = ("family", "dtype", "layout")
    parameters = ("m", "n", "k", "products", "k_batch", "group_axis_number")
    listed = ("arch", "family", "dtype", "layout", "pipeline", "built", "name")
    problem = GemmProblem
    headers = MappingProxyType({"kernels": Path(__file__).parent / "kernels"})
    arguments = ARGUMENTS
    smoke_traits = ("dtype", "layout", "dtype_c")
    bench_fields = ("m", "n", "k", "batch", "k_batch", "dtype", "layout", "scales")
    bench_traits = ("family", "pipeline", "scheduler", "epilogue")
    tile_axes = ("tile_m", "tile_n")
    lists = ("family", "dtype", "layout")
    shrinks = SHRINKS
    main_families = (
        Family.UNIVERSAL,
        Family.MULTI_D,
        Family.GROUPED,
        Family.ROWWISE,
        Family.BLOCKSCALE,
        Family.GROUPED_ROWWISE,
        Family.GROUPED_BLOCKSCALE,
    )
    kernels_check_values = True

    def generator(self, root: Path, timeout: float) -> Generator:
        """As :func:`catalog.ops.gemm.upstream.find_tile_engine`."""
        from catalog.ops.gemm.upstream import find_tile_engine

        return find_tile_engine(root, timeout)

    def main_stage(self, problem: GemmProblem) -> Family:
        """The family of groups, of D tensors or of scales where the problem has any."""
        if problem.num_d:
            return Family.MULTI_D
        return (ONE_PRODUCT if problem.groups is None else OF_GROUPS)[Scales(problem.scales)]

    def required_traits(self, problem: GemmProblem, family: str, lineage: Lineage) -> dict[str, Any]:
        """The signature that answers ``problem``; D tensors are row-major."""
        traits = super().required_traits(problem, family, lineage) | implied({"dtype": problem.dtype, "pipeline": ""})
        traits["dtype_c"] = problem.type_of_c
        traits["general"] = problem.is_general or lineage.space == NATIVE
        if problem.num_d:
            traits["layout"] = f"{problem.layout}r"
        return {name: traits[name] for name in self.required}

    def work(self, problem: GemmProblem, kernel: GemmKernel, units: int) -> Mapping[str, float]:
        """As :func:`catalog.ops.gemm.work.work_of`."""
        from catalog.ops.gemm.work import work_of

        return work_of(problem, kernel, units)

    def splits(self, problem: GemmProblem, kernels: Sequence[Kernel], threads: int, *, whole_waves: bool) -> int:
        """As :func:`catalog.ops.gemm.parts.parts_of`."""
        from catalog.ops.gemm.parts import parts_of

        return parts_of(problem, kernels[0].algorithm, threads, whole_waves=whole_waves)

    def stated_splits(self, problem: GemmProblem) -> int:
        """Its ``k_batch``."""
        return problem.k_batch

    def partial_bytes(self, problem: GemmProblem, num_splits: int) -> Mapping[str, int]:
        """The sums of each part of K."""
        return {"c_acc": 4 * num_splits * problem.products * problem.m * problem.n} if num_splits > 1 else {}

    def workspace(self, problem: GemmProblem, num_splits: int, insisting: Sequence[Any] = ()) -> Workspace:
        """What the kernel asks for."""
        needed = max((one.c_acc for one in insisting), default=0)
        strides = (problem.m * problem.n, problem.n)
        return Workspace(num_splits, {"c_acc": Partial(needed, strides)} if needed else {})

    @property
    def templates(self) -> CkTemplates:
        """As :data:`catalog.ops.gemm.kernels.ck.emit.TEMPLATES`."""
        from catalog.ops.gemm.kernels.ck.emit import TEMPLATES

        return TEMPLATES

    def emit(self, kernel: Kernel, backend: str, memory: Path) -> str:
        """The output of the backend's emitter."""
        if backend == "cuda":
            from catalog.ops.gemm.kernels.cuda.emit import emit as of_cuda

            return of_cuda(kernel)
        if backend == "host":
            from catalog.ops.gemm.kernels.host.emit import emit as of_host

            return of_host(kernel)
        return super().emit(kernel, backend, memory)

    def check_values(self, problem: GemmProblem, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Check that scales are finite.

        Raises:
            TensorError: one is NaN or infinite; the message says which.
        """
        import numpy as np

        for name in ("scale_a", "scale_b"):
            scales = tensors.get(name)
            if scales is None or np.isfinite(scales).all():
                continue
            place = tuple(int(axis[0]) for axis in np.nonzero(~np.isfinite(scales)))
            where = ", ".join(map(str, place))
            raise TensorError(f"{name}[{where}] is {scales[place]}: scales must be finite")

    def reference(self, problem: GemmProblem, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """As :func:`catalog.ops.gemm.reference.reference`."""
        from catalog.ops.gemm.reference import reference

        return reference(problem, inputs)

    def tolerances(
        self, problem: GemmProblem, inputs: Mapping[str, NDArray[Any]], arithmetic: Arithmetic = FLOAT32
    ) -> dict[str, Tolerance]:
        """As :func:`catalog.ops.gemm.reference.tolerances`."""
        from catalog.ops.gemm.reference import tolerances

        return tolerances(problem, inputs, fp8_sum_bits=arithmetic.fp8_sum_bits)

    def foreign_problem(self, form: str, table: str, fields: Mapping[str, Any]) -> GemmProblem | None:
        """As :func:`catalog.ops.gemm.foreign.problem_of_table`; tables of other formats state none."""
        from catalog.ops.gemm.foreign import problem_of_table

        return problem_of_table(table, fields) if form == "aiter-csv" else None

    def foreign_fields(self, form: str, table: str, problem: GemmProblem) -> Mapping[str, str] | None:
        """As :func:`catalog.ops.gemm.foreign.fields_of_table`."""
        from catalog.ops.gemm.foreign import fields_of_table

        return fields_of_table(table, problem) if form == "aiter-csv" else None

    def draw(self, problem: GemmProblem, name: str, rng: np.random.Generator) -> NDArray[Any]:
        """Small integers for int8, scales from 1/8 to 1; otherwise standard normal."""
        drawn: NDArray[Any]
        if name in ("scale_a", "scale_b"):
            drawn = rng.uniform(0.125, 1, problem.shapes[name])
            return drawn
        if problem.dtype != "int8":
            return super().draw(problem, name, rng)
        drawn = rng.integers(-8, 8, problem.shapes[name])
        return drawn

    def smoke_fields(self, family: str, traits: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """Sizes that every tile divides."""
        fields: dict[str, Any] = {
            "m": 768,
            "n": 768,
            "k": 768,
            "dtype": traits["dtype"],
            "layout": traits["layout"][:3],
            "dtype_c": traits["dtype_c"],
            "scales": str(scales_of(family)),
        }
        if family == Family.MULTI_D:
            fields |= {"num_d": 2, "elementwise": "MultiDAdd"}
        if family in OF_GROUPS.values():
            fields |= {"groups": (256, 0, 384, 128)}
        return [MappingProxyType(fields)]


OPERATION = Gemm()
