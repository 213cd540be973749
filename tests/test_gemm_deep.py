"""GEMM kernels of the host: products whose K is deep, and those of a narrow B."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from conftest import slow_but
from gemm_problems import check, on_threads, rows

from catalog.ops import operation
from catalog.ops.gemm.problem import GemmProblem
from catalog.ops.gemm.traits import scales_of
from catalog.runtime.catalog import Catalog
from catalog.runtime.here import resolve_arch
from catalog.runtime.inputs import make_inputs

SEED = 2026
DTYPES = ("fp32", "fp16", "bf16", "fp8", "bf8", "int8")
LAYOUTS = ("rcr", "rrr", "crr", "ccr")
GEMM = operation("gemm")


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    with Catalog(tmp_path_factory.mktemp("gemm") / "catalog.db") as catalog:
        catalog.populate(resolve_arch("host"), operation="gemm")
        yield catalog


@pytest.mark.parametrize(
    ("dtype", "layout"), slow_but([("fp32", "rrr"), ("bf16", "crr")], product(DTYPES, ("rrr", "crr", "rcr")))
)
def test_streams_of_a_narrow_b(catalog: Catalog, dtype: str, layout: str) -> None:
    """Rows of B are read beyond their ends, where NaN is; and fewer columns than are multiplied at a time."""
    kernel = rows(catalog, f"dtype = '{dtype}' AND layout = '{layout}' AND pipeline = 'host_stream'")[0]
    sizes = product((1, 5, 16, 19), (1, 3, 7, 16, 31, 45), (1100,))
    fields = {"dtype": dtype, "dtype_c": kernel.signature.dtype_c.value, "layout": layout}
    check(catalog, kernel, 0, *(GemmProblem(m=m, n=n, k=k, **fields) for m, n, k in sizes))


@pytest.mark.parametrize(
    ("dtype", "layout", "family", "pipeline"),
    slow_but(
        [("fp32", "crr", "universal", "host_stream"), ("int8", "rcr", "blockscale", "host_panel")],
        [
            *product(("fp32", "bf16"), LAYOUTS, ("universal",), ("host_panel", "host_stream", "host_few_columns")),
            *product(("fp8", "int8"), LAYOUTS[:1], ("rowwise", "blockscale"), ("host_panel", "host_stream")),
        ],
    ),
)
def test_a_deep_k_is_divided_by_the_sizes_alone(
    catalog: Catalog, dtype: str, layout: str, family: str, pipeline: str
) -> None:
    """Parts are at least 8,192 deep, or 4,096 if C is larger: the same bits as with that k_batch on any threads."""
    wanted = f"dtype = '{dtype}' AND layout = '{layout}' AND family = '{family}' AND pipeline = '{pipeline}'"
    kernel = rows(catalog, wanted)[0]
    fields: dict[str, Any] = {"dtype": dtype, "dtype_c": kernel.signature.dtype_c.value, "layout": layout}
    fields |= {"scales": scales_of(kernel.signature.family).value, "alpha": 0.5, "beta": -2, "activation": "silu"}
    divided = {(13, 6, 24_600): 3, (1, 1, 17_000): 2, (40, 30, 8_200): 2, (600, 30, 16_384): 1}
    for ((m, n, k), parts), batch in product(divided.items(), (None, 3)):
        problem = GemmProblem(m=m, n=n, k=k, batch=batch, bias=True, **fields)
        inputs = make_inputs(problem, SEED)
        expected, allowed = GEMM.reference(problem, inputs)["c"], GEMM.tolerances(problem, inputs)["c"]
        stated = problem.model_copy(update={"k_batch": parts})
        first = catalog.plan(stated, kernel).run({**inputs, "c": inputs["c"].copy()}).outputs["c"]
        assert allowed.used(first, expected) <= 1
        for threads in (1, 2, 3):
            with on_threads(threads):
                again = catalog.plan(problem, kernel).run({**inputs, "c": inputs["c"].copy()}).outputs["c"]
            np.testing.assert_array_equal(again, first)


def test_an_infinity_in_a_deep_k_stays_in_its_row(catalog: Catalog) -> None:
    kernel = rows(catalog, "dtype = 'fp32' AND layout = 'rcr' AND pipeline = 'host_stream'")[0]
    a, b = np.ones((3, 20_000), np.float32), np.ones((2, 20_000), np.float32)
    a[0, 19_999], a[1, 5], a[1, 15_000] = np.inf, np.inf, -np.inf
    c = catalog.plan(GemmProblem(m=3, n=2, k=20_000, dtype="fp32"), kernel).run(a=a, b=b).outputs["c"]
    assert np.isposinf(c[0]).all()
    assert np.isnan(c[1]).all()
    assert (c[2] == 20_000).all()
