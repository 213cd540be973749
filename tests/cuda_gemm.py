"""GEMM kernels of sm_90 on a real GPU, against the float64 reference: make test-cuda."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
from cuda_gpu import ARCH, build, need_gpu, wrong
from gemm_problems import problem_of_row, rows

from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.schema.kernel import Kernel

need_gpu()

PARTS, DRAWN = 16, 12
LARGER: tuple[dict[str, Any], ...] = (
    {"m": 1000, "n": 1544, "k": 520, "k_batch": 0},
    {"m": 2100, "n": 4104, "k": 136, "k_batch": 1, "beta": 0, "bias": False, "activation": "no"},
    {"m": 200, "n": 328, "k": 4096, "k_batch": 8},
    {"m": 9, "n": 520, "k": 8192, "k_batch": 0},
    {"m": 333, "n": 257, "k": 1031, "k_batch": 3},
)
"""Several tiles for each block, the second stored by TMA; parts of K in clusters; rows that TMA cannot read."""

LARGER_GROUPS: tuple[dict[str, Any], ...] = (
    {"groups": (300, 0, 5, 129, 800), "m": 1234, "n": 520, "k": 264},
    {"groups": (64, 936, 0, 1000), "m": 2000, "n": 392, "k": 512, "beta": 0, "bias": False, "activation": "no"},
    {"groups": (1,) * 40, "m": 40, "n": 264, "k": 1031},
)
"""Groups that end within a tile, the second stored by TMA."""

SAMPLED = {
    "universal": 23,
    "multi_d": 89,
    "rowwise": 29,
    "blockscale": 29,
    "grouped": 29,
    "grouped_rowwise": 29,
    "grouped_blockscale": 29,
}
"""Every n-th row is run: prime numbers, so that these have all tiles, layouts and types."""

BYTES = ("fp8", "bf8", "int8")


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    with Catalog(tmp_path_factory.mktemp("gemm") / "catalog.db") as catalog:
        catalog.populate(ARCH, operation="gemm")
        yield catalog


def sampled(catalog: Catalog) -> list[Kernel]:
    """Some rows of 8 bits, of groups and with scales."""
    return [
        kernel
        for family, step in SAMPLED.items()
        for kernel in rows(catalog, f"family = '{family}' AND (dtype IN {BYTES} OR family = 'grouped')", ARCH)[::step]
    ]


def cover(catalog: Catalog) -> list[Kernel]:
    """Every tile with every layout; types and D tensors take turns."""
    types = cycle(("bf16", "fp16"))
    plain = [kernel for kernel in rows(catalog, "family = 'universal'", ARCH) if kernel.signature.dtype == "bf16"]
    combined = cycle(rows(catalog, "num_d > 0 AND dtype IN ('fp16', 'bf16')", ARCH)[::37])
    kernels = []
    for kernel, dtype in zip(plain, types, strict=False):
        same = f"family = 'universal' AND dtype = '{dtype}' AND name = '{kernel.name.replace('_bf16_', f'_{dtype}_')}'"
        kernels.append(rows(catalog, same, ARCH)[0])
        if len(kernels) % 4 == 0:
            kernels.append(next(combined))
    return list({kernel.id: kernel for kernel in kernels}.values())


@pytest.mark.parametrize("number", range(PARTS))
def test_random_problems_of_every_tile_and_layout(catalog: Catalog, number: int) -> None:
    kernels = [*cover(catalog), *sampled(catalog)][number::PARTS]
    build(catalog, kernels)
    failed = []
    for kernel in kernels:
        rng = random.Random(kernel.name)  # noqa: S311
        problems = [problem_of_row(kernel, rng) for _ in range(DRAWN)]
        other, larger = (
            ({"group_axis": "m"}, LARGER_GROUPS) if problems[0].groups is not None else ({"batch": None}, LARGER)
        )
        problems += [GemmProblem(**problem_of_row(kernel, rng).model_dump() | other | one) for one in larger]
        if kernel.signature.dtype in BYTES:
            problems = [problem for problem in problems if problem.group_axis == "m"]
        for problem in problems:
            checks = wrong(catalog.plan(problem, kernel), make_inputs(problem, 1))
            failed += [(problem.key, kernel.name, check) for check in checks]
    assert not failed, failed[:5]
