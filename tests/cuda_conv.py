"""Convolution kernels of sm_90 on a real GPU, against the float64 reference: make test-cuda."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from conv_problems import problem_of_row, rows
from cuda_gpu import ARCH, build, need_gpu, wrong

from catalog.ops.conv.problem import ConvProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.schema.kernel import Kernel

need_gpu()

PARTS, DRAWN = 12, 8
PER_AXIS = ("size", "filter", "pad", "stride", "dilation")
SIZES = {1: (1037,), 2: (37, 29), 3: (9, 11, 13)}
LARGER: tuple[dict[str, Any], ...] = (
    {"n": 3, "c": 128, "k": 200, "pad": 1},
    {"n": 2, "c": 192, "k": 128, "g": 2, "stride": 2, "pad": 1},
    {"n": 2, "c": 264, "k": 64, "dilation": 2, "pad": 2},
    {"n": 2, "c": 6, "k": 72, "pad": 1, "stride": 2},
    {"n": 2, "c": 64, "k": 96, "g": 4, "pad": 1},
)
"""Several tiles for each block; groups and channels that are copied first."""

HALO: tuple[dict[str, Any], ...] = (
    {"n": 3, "c": 128, "k": 200, "pad": 1},
    {"n": 2, "c": 264, "k": 64, "dilation": 2, "pad": 2},
    {"n": 40, "c": 32, "k": 24, "filter": 5, "pad": 2},
    {"n": 2, "c": 6, "k": 70, "pad": 1},
    {"n": 2, "c": 160, "k": 36, "filter": 1},
    {"n": 3, "c": 40, "k": 48, "pad": 1, "stride": 2},
)
"""Several patches for each block; images without groups, and without strides but for the gradient of the input."""

NARROW: tuple[dict[str, Any], ...] = (
    {"n": 3, "c": 256, "k": 256, "g": 32, "pad": 1},
    {"n": 2, "c": 200, "k": 200, "g": 200, "pad": 1, "stride": 2},
    {"n": 2, "c": 96, "k": 96, "g": 3, "pad": 2, "dilation": 2},
    {"n": 2, "c": 100, "k": 100, "g": 25, "pad": 1},
    {"n": 2, "c": 72, "k": 72, "g": 36, "filter": 5, "pad": 2},
    {"n": 2, "c": 144, "k": 144, "g": 144, "filter": 5, "pad": 2, "stride": 2},
    {"n": 2, "c": 80, "k": 80, "g": 80, "filter": 7, "pad": 3},
    {"n": 33, "c": 512, "k": 512, "g": 128, "pad": 1},
    {"n": 3, "c": 128, "k": 128, "g": 32, "pad": 1, "size": 15},
    {"n": 3, "c": 72, "k": 72, "g": 72, "filter": 5, "pad": 2, "size": 17},
)
"""Several patches of several blocks of 64 channels; filters that have kernels of their own; strips with more rows than
shared memory holds, and images so small that their rows do not stream.
"""

OF_SEVERAL_TILES = {"sm90_wgmma": LARGER, "sm90_halo": HALO, "sm90_narrow": NARROW}


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    with Catalog(tmp_path_factory.mktemp("conv") / "catalog.db") as catalog:
        catalog.populate(ARCH, operation="conv")
        yield catalog


def cover(catalog: Catalog) -> list[Kernel]:
    """Every tile in every direction; numbers of axes and types take turns."""
    types = cycle(("bf16", "fp16", "fp16"))
    kernels = []
    for place, kernel in enumerate(rows(catalog, "dtype = 'bf16'", ARCH)):
        if place % 3 != kernel.signature.ndim % 3 and kernel.algorithm.pipeline != "sm90_narrow":
            continue
        name = kernel.name.replace("_bf16_", f"_{next(types)}_")
        kernels.append(rows(catalog, f"name = '{name}'", ARCH)[0])
    return kernels


def larger(kernel: Kernel) -> Iterator[ConvProblem]:
    signature = kernel.signature
    ndim = signature.ndim
    for sizes in OF_SEVERAL_TILES[kernel.algorithm.pipeline]:
        fields = {
            name: (value,) * ndim if isinstance(value, int) and name in PER_AXIS else value
            for name, value in ({"filter": 3, "size": SIZES[ndim]} | sizes).items()
        }
        yield ConvProblem(direction=signature.direction.value, dtype=signature.dtype.value, **fields)


def answers(catalog: Catalog, kernel: Kernel, problem: ConvProblem) -> bool:
    """Whether selection offers the kernel: all but those of sm90_halo answer every problem."""
    if kernel.algorithm.pipeline != "sm90_halo":
        return True
    return kernel.id in {one.kernel.id for one in catalog.candidates(problem, arch=ARCH, limit=1000, static=True)}


@pytest.mark.parametrize("number", range(PARTS))
def test_random_problems_of_every_tile_and_direction(catalog: Catalog, number: int) -> None:
    kernels = cover(catalog)[number::PARTS]
    build(catalog, kernels)
    failed = []
    for kernel in kernels:
        rng = random.Random(kernel.name)  # noqa: S311
        problems = [problem_of_row(kernel, rng) for _ in range(DRAWN)]
        answered = [problem for problem in (*problems, *larger(kernel)) if answers(catalog, kernel, problem)]
        assert len(answered) > DRAWN // 2
        for problem in answered:
            checks = wrong(catalog.plan(problem, kernel), make_inputs(problem, 1))
            failed += [(problem.key, kernel.name, check) for check in checks]
    assert not failed, failed[:5]


@pytest.mark.parametrize("size", [(13, 21), (25, 21)], ids=["patches", "rows"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("direction", ["forward", "bwd_data", "bwd_weight"])
def test_what_is_not_finite_stays_in_its_group(
    catalog: Catalog, direction: str, width: int, size: tuple[int, int]
) -> None:
    """Matrix instructions multiply channels of other groups by zero, which is not a number for infinity."""
    axes = {"size": size, "filter": (3, 3), "pad": (1, 1)}
    problem = ConvProblem(direction=direction, dtype="bf16", n=2, c=64, k=64, g=64 // width, **axes)
    (kernel,) = rows(
        catalog, f"pipeline = 'sm90_narrow' AND ndim = 2 AND dtype = 'bf16' AND direction = '{direction}'", ARCH
    )
    inputs, channel = make_inputs(problem, 1), 3
    for name in set(inputs) - {"weight"}:
        inputs[name][1, 5, 7, channel] = np.inf
    [made] = problem.made
    result = catalog.plan(problem, kernel).run(**inputs).outputs[made].astype(np.float32)
    others = np.arange(64) // width != channel // width
    if direction == "bwd_weight":
        assert np.isfinite(result[others]).all()
    else:
        met = np.zeros(size, bool)
        met[4:7, 6:9] = True
        assert np.isfinite(result[0]).all()
        assert np.isfinite(result[1][~met]).all()
        assert np.isfinite(result[1][..., others]).all()
        assert not np.isfinite(result[1][met][:, ~others]).any()
