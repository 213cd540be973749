"""GEMM kernels of sm_90 on a real GPU, against the float64 reference and PyTorch: make test-cuda."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle

import pytest
from cuda_gpu import ARCH, build, need_gpu, wrong
from gemm_problems import problem_of_row, rows

from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.schema.kernel import Kernel

need_gpu()

PARTS, DRAWN = 4, 12
LARGER = ((1000, 1544, 520), (200, 328, 4096), (9, 520, 8192), (333, 257, 1031))
"""Several tiles, a part of the depth for each block of a cluster, and rows that TMA cannot read."""


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    with Catalog(tmp_path_factory.mktemp("gemm") / "catalog.db") as catalog:
        catalog.populate(ARCH, operation="gemm")
        yield catalog


def cover(catalog: Catalog) -> list[Kernel]:
    """Every tile with every layout; types and D tensors take turns."""
    types = cycle(("bf16", "fp16"))
    plain = [kernel for kernel in rows(catalog, "num_d = 0", ARCH) if kernel.signature.dtype == "bf16"]
    combined = cycle(rows(catalog, "num_d > 0", ARCH)[::37])
    kernels = []
    for kernel, dtype in zip(plain, types, strict=False):
        same = f"num_d = 0 AND dtype = '{dtype}' AND name = '{kernel.name.replace('_bf16_', f'_{dtype}_')}'"
        kernels.append(rows(catalog, same, ARCH)[0])
        if len(kernels) % 4 == 0:
            kernels.append(next(combined))
    return kernels


@pytest.mark.parametrize("number", range(PARTS))
def test_random_problems_of_every_tile_and_layout(catalog: Catalog, number: int) -> None:
    kernels = cover(catalog)[number::PARTS]
    build(catalog, kernels)
    failed = []
    for kernel in kernels:
        rng = random.Random(kernel.name)  # noqa: S311
        problems = [problem_of_row(kernel, rng) for _ in range(DRAWN)]
        for m, n, k in LARGER:
            fields = problem_of_row(kernel, rng).model_dump() | {"m": m, "n": n, "k": k, "batch": None}
            problems.append(GemmProblem(**fields))
        for problem in problems:
            checks = wrong(catalog.plan(problem, kernel), make_inputs(problem, 1))
            failed += [(problem.key, kernel.name, check) for check in checks]
    assert not failed, failed[:5]


@pytest.mark.parametrize("inner", [128, 131])
def test_linear_and_its_gradients_are_pytorchs(inner: int) -> None:
    torch = pytest.importorskip("torch")
    from catalog.torch import linear, matmul

    def leaves() -> list[object]:
        shapes = ((3, 70, inner), (264, inner), (264,))
        return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]

    x, weight, bias = leaves()
    ours, theirs = linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias)
    grad = torch.randn_like(theirs)
    pairs = [(ours, theirs), (matmul(x, weight.mT), torch.matmul(x, weight.mT))]
    for function in (linear, torch.nn.functional.linear):
        pairs.append(torch.autograd.grad(function(x, weight, bias), (x, weight, bias), grad))
    mine, expected = pairs.pop(-2), pairs.pop(-1)
    for actual, wanted in [*pairs, *zip(mine, expected, strict=True)]:
        assert (actual.float() - wanted.float()).norm() < 1e-2 * wanted.float().norm()
    with torch.no_grad():
        fused = linear(x[..., 1:], weight[:, 1:], bias, activation="gelu")
        exact = torch.nn.functional.gelu(torch.nn.functional.linear(x[..., 1:], weight[:, 1:], bias))
    assert (fused.float() - exact.float()).norm() < 1e-2 * exact.float().norm()
