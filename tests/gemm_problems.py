"""Random GEMM problems and tensors for kernels of our own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from catalog.ops import operation
from catalog.ops.gemm.problem import GemmProblem
from catalog.ops.gemm.traits import OF_GROUPS, scales_of
from catalog.runtime.catalog import Catalog
from catalog.runtime.elements import element_type
from catalog.runtime.here import resolve_arch
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import Array
from catalog.schema.kernel import Kernel
from catalog.settings import settings

SIZES = (0, 1, 2, 5, 7, 12, 13, 16, 17, 31, 33, 64, 100, 129, 193, 260)
DEPTHS = (*SIZES, 513, 2049)
POISON = 77
GEMM = operation("gemm")


def rows(catalog: Catalog, where: str, arch: str = "host") -> list[Kernel]:
    """GEMM kernels of an arch, universal ones first, in the order of its spec."""
    found = catalog.connection.execute(
        f"SELECT * FROM gemm_row WHERE arch = ? AND {where} ORDER BY family DESC, dispatch_order",
        (resolve_arch(arch),),
    )
    return [GEMM.kernel.from_row(row) for row in found]


def problem_of_row(kernel: Kernel, rng: random.Random) -> GemmProblem:
    """A problem that ``kernel`` answers, of any sizes and epilogue."""
    signature = kernel.signature
    scales = scales_of(signature.family)
    integers = signature.dtype == "int8" and scales == "no"
    columns = [n for n in SIZES if n <= 64] if kernel.algorithm.pipeline == "host_few_columns" else SIZES
    sizes: dict[str, Any] = {"m": rng.choice(SIZES), "n": rng.choice(columns), "k": rng.choice(DEPTHS)}
    if signature.family in OF_GROUPS.values():
        axis, groups = "m" if scales == "block" else rng.choice("mk"), rng.choices(SIZES, k=rng.choice((0, 1, 3, 8)))
        sizes |= {"groups": groups, "group_axis": axis, axis: sum(groups)}
    else:
        sizes |= {"batch": rng.choice((None, None, 0, 1, 3)), "k_batch": rng.choice((1, 1, 2, 5))}
    return GemmProblem(
        **sizes,
        dtype=signature.dtype.value,
        dtype_c=signature.dtype_c.value,
        scales=scales.value,
        layout=signature.layout.value[:3],
        num_d=signature.num_d,
        elementwise=signature.elementwise.value,
        alpha=1 if integers else rng.choice((1, 0.5, -3)),
        beta=rng.choice((0, 1)) if integers else rng.choice((0, 1, -0.25)),
        bias=rng.choice((False, True)),
        activation=rng.choice(("no", "relu") if integers else ("no", "relu", "gelu", "silu")),
    )


def tensors_of(problem: GemmProblem, rng: random.Random) -> tuple[dict[str, Array], Array, Array]:
    """Inputs with any strides and NaN between rows; C, of NaN unless it is an input; and the memory around C."""
    inputs = make_inputs(problem, rng.randrange(100))
    spread = {
        name: (array if array.ndim == 1 else _spread(array, rng, POISON if array.dtype.kind == "i" else np.nan)[0])
        for name, array in inputs.items()
    }
    if problem.batch and rng.random() < 0.3:  # one A for all products
        spread["a"] = np.broadcast_to(spread["a"][:1], spread["a"].shape)
    poison = POISON if problem.is_integer else np.nan
    made = inputs.get("c", np.full(problem.tensors["c"].shape, poison, element_type(problem, "c")))
    c, around = _spread(made, rng)
    return spread | ({"c": c} if problem.beta else {}), c, around


def is_intact(c: Array, around: Array) -> bool:
    """Whether nothing outside of ``c`` was written."""
    c[...] = POISON
    return bool(np.all(around == np.asarray(POISON, around.dtype)))


def _spread(array: Array, rng: random.Random, between: float = POISON) -> tuple[Array, Any]:
    """A copy with gaps between its rows and matrices, and the memory that it is in."""
    *outer, inner = array.shape
    gaps = [rng.choice((0, 1, 3)) for _ in outer]
    around = np.full(
        [*(extent + gap for extent, gap in zip(outer, gaps, strict=True)), inner + 2], between, array.dtype
    )
    view = around[(*(slice(extent) for extent in outer), slice(1, inner + 1))]
    view[...] = array
    return view, around


@contextmanager
def on_threads(number: int) -> Iterator[None]:
    """Plans made meanwhile launch on ``number`` threads."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CATALOG_NUM_THREADS", str(number))
        settings.cache_clear()
        yield
    settings.cache_clear()


def check(catalog: Catalog, kernel: Kernel, problems: int, *also: GemmProblem) -> float:
    """Run a kernel on drawn problems and numbers of threads; the largest share of a tolerance that was used."""
    rng, used = random.Random(kernel.name), 0.0  # noqa: S311
    for index, problem in enumerate([*(problem_of_row(kernel, rng) for _ in range(problems)), *also]):
        inputs, c, around = tensors_of(problem, rng)
        expected, allowed = (
            GEMM.reference(problem, inputs)["c"],
            GEMM.tolerances(problem, inputs)["c"],
        )
        with on_threads((1, 2, 5)[index % 3]):
            catalog.plan(problem, kernel).bind(inputs, outputs=None if problem.beta else {"c": c}).launch()
        share = allowed.used(c, expected)
        assert share <= 1, f"c is off by {share:.1f} of the tolerance: {problem.key} on {kernel.name}"
        assert is_intact(c, around)
        used = max(used, share)
    return used
