"""GEMM rows of sm_90 without a GPU: which are there, which are selected, and that one compiles."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from cuda_resources import assert_fits
from gemm_problems import rows

from catalog.errors import BuildError, SelectionError
from catalog.ops import operation
from catalog.ops.gemm.arguments import ARGUMENTS
from catalog.ops.gemm.cluster_time import cluster_work, parts_in_clusters
from catalog.ops.gemm.problem import GemmProblem
from catalog.ops.product_words import Dtype
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.arguments import template
from catalog.runtime.splits import wanted_splits


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    with Catalog(tmp_path_factory.mktemp("gemm_cuda") / "catalog.db") as catalog:
        catalog.populate("sm_90", operation="gemm")
        yield catalog


def test_stages_fill_the_shared_memory_of_a_block(catalog: Catalog) -> None:
    kernels = rows(catalog, "num_d = 0", "sm_90")
    assert {(kernel.signature.dtype.value, kernel.signature.layout.value) for kernel in kernels} == {
        (dtype, layout) for dtype in ("bf16", "fp16", "fp8", "bf8", "int8") for layout in ("rcr", "rrr", "crr", "ccr")
    }
    for kernel in kernels:
        tile, narrow = kernel.algorithm, kernel.signature.dtype in ("fp8", "bf8", "int8")
        stages = tile.num_stages * (tile.tile_m + tile.tile_n) * tile.tile_k * (1 if narrow else 2)
        assert tile.num_stages >= 2
        assert stages < 232_448, kernel.name


def test_groups_have_as_many_stages_in_every_layout(catalog: Catalog) -> None:
    stages: dict[str, set[tuple[Any, ...]]] = {"r": set(), "c": set()}
    for kernel in rows(catalog, "family = 'grouped'", "sm_90"):
        tile, signature = kernel.algorithm, kernel.signature
        stages[signature.layout[0]].add((signature.dtype, tile.tile_m, tile.tile_n, tile.tile_k, tile.num_stages))
    assert stages["c"] == stages["r"], "a column-major A of groups is transposed first"


@pytest.mark.parametrize(
    ("size", "asked", "tile", "parts"),
    [
        ((4096, 4096, 4096), 0, (128, 256), 1),
        ((1024, 1024, 1024), 0, (128, 64), 1),
        ((256, 4096, 4096), 0, (128, 64), 1),
        ((256, 4096, 4096), 1, (128, 64), 1),
        ((256, 4096, 4096), 5, (128, 160), 5),
        ((64, 4096, 14336), 0, (48, 64), 1),
        ((16, 14336, 4096), 0, (16, 128), 1),
        ((1, 4096, 4096), 0, (8, 64), 2),
        ((1, 1, 0), 0, (128, 64), 1),
        ((2912, 1024, 4152), 0, (128, 256), 1),
        ((7376, 928, 4104), 0, (128, 256), 1),
        ((557, 1024, 14336), 0, (80, 64), 1),
    ],
)
def test_tiles_and_parts_of_k_fit_the_problem(
    catalog: Catalog, size: tuple[int, int, int], asked: int, tile: tuple[int, int], parts: int
) -> None:
    m, n, k = size
    problem = GemmProblem(m=m, n=n, k=k, dtype="bf16", k_batch=asked)
    (kernel,) = catalog.select(problem, arch="sm_90").kernels
    assert (kernel.algorithm.tile_m, kernel.algorithm.tile_n) == tile
    assert wanted_splits(problem, (kernel,), 132) == parts


def test_rows_of_k_take_as_long_to_load_for_few_rows_of_c(catalog: Catalog) -> None:
    """As in the gradient of a narrow layer's weight: with tiles of 8 rows it takes 1.7 times as long."""
    problem = GemmProblem(m=16, n=4096, k=8192, layout="crr", dtype="bf16", k_batch=0)
    (kernel,) = catalog.select(problem, arch="sm_90").kernels
    assert kernel.algorithm.tile_m == 16


@pytest.mark.parametrize("asked", [0, 1, 3, 8])
@pytest.mark.parametrize(
    ("size", "layout"),
    [((406, 7168, 5120), "rrr"), ((2606, 9622, 1024), "rcr"), ((3, 1483, 12345), "crr"), ((130, 520, 64), "ccr")],
)
def test_static_order_and_parts_of_k_are_of_one_model(
    catalog: Catalog, size: tuple[int, int, int], layout: str, asked: int
) -> None:
    m, n, k = size
    check_order(catalog, GemmProblem(m=m, n=n, k=k, layout=layout, dtype="bf16", k_batch=asked))


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "fp8", "m": 130, "k": 5000, "layout": "rrr", "scales": "block", "k_batch": 0},
        {"dtype": "fp8", "groups": (100, 0, 7, 93), "k": 1096, "layout": "ccr"},
        {"dtype": "bf16", "groups": (100, 0, 7, 93), "k": 1096, "layout": "rrr"},
        {"dtype": "bf16", "groups": (100, 0, 7, 93), "k": 1096, "layout": "crr"},
        {"dtype": "bf16", "groups": (100, 0, 7, 93), "m": 1000, "group_axis": "k"},
    ],
)
def test_static_order_of_8_bits_and_groups_is_of_the_same_model(catalog: Catalog, fields: dict[str, Any]) -> None:
    check_order(catalog, GemmProblem(n=520, **fields))


def test_clusters_share_the_loads_of_the_largest_products_without_parts_of_k(catalog: Catalog) -> None:
    problem = GemmProblem(m=16384, n=4096, k=4096, dtype="bf16")
    (kernel,) = catalog.select(problem, arch="sm_90").kernels
    assert (kernel.algorithm.cluster_m, kernel.algorithm.tile_m, kernel.algorithm.tile_n) == (2, 128, 256)
    assert "_c2_" in kernel.name
    in_parts = catalog.candidates(problem.model_copy(update={"k_batch": 2}), arch="sm_90", limit=100, static=True)
    assert in_parts
    assert all(candidate.kernel.algorithm.cluster_m == 1 for candidate in in_parts)


def check_order(catalog: Catalog, problem: GemmProblem) -> None:
    """The times of a problem's rows ascend."""
    asked = problem.k_batch

    def time_of(kernel: Any) -> float:
        parts = {0: parts_in_clusters(problem, kernel.algorithm, 132), 3: 2}.get(asked, asked)
        return cluster_work(problem, kernel.algorithm, parts, 132).time

    ordered = catalog.candidates(problem, arch="sm_90", limit=100, static=True)
    times = [time_of(candidate.kernel) for candidate in ordered]
    assert len(times) > 10
    assert all(time <= then * (1 + 1e-12) for time, then in pairwise(times))


def test_types_without_rows_are_refused(catalog: Catalog) -> None:
    with pytest.raises(SelectionError, match="dtype"):
        catalog.select(GemmProblem(m=8, n=8, k=8, dtype="fp32"), arch="sm_90")
    kernel = rows(catalog, "num_d = 0", "sm_90")[0]
    wide = kernel.model_copy(update={"signature": kernel.signature.model_copy(update={"dtype": Dtype.FP32})})
    with pytest.raises(BuildError, match="NVIDIA has no GEMM kernels for dtype = fp32"):
        operation("gemm").emit(wide, "cuda", catalog.path)


@pytest.mark.parametrize(
    ("fields", "tile"),
    [
        ({"m": 8192, "dtype": "fp8"}, (128, 256)),
        ({"m": 64, "dtype": "fp8", "scales": "row", "dtype_c": "bf16", "k_batch": 0}, (64, 64)),
        ({"m": 4096, "dtype": "int8", "scales": "block"}, (128, 256)),
        ({"groups": (256,) * 64, "dtype": "bf16"}, (128, 256)),
        ({"groups": (8,) * 64, "dtype": "fp8", "scales": "block"}, (64, 256)),
        ({"groups": (256,) * 64, "group_axis": "k", "m": 4096, "dtype": "fp16", "layout": "crr"}, (128, 256)),
    ],
)
def test_eight_bits_scales_and_groups_have_rows(
    catalog: Catalog, fields: dict[str, Any], tile: tuple[int, int]
) -> None:
    axes = {"n": 4096, "k": 4096} if fields.get("group_axis") != "k" else {"n": 4096}
    problem = GemmProblem(**axes | fields)
    (kernel,) = catalog.select(problem, arch="sm_90").kernels
    assert (kernel.algorithm.tile_m, kernel.algorithm.tile_n) == tile


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"m": 2**30 + 1, "n": 8, "k": 8}, "countable_extents"),
        ({"m": 8, "n": 8, "k": 2**31 - 1}, "countable_extents"),
        ({"m": 1, "n": 1, "k": 1, "batch": 2**30 + 1}, "countable_extents"),
        ({"m": 1, "n": 2**30, "k": 1, "batch": 64}, "countable_tiles"),
        ({"n": 2**20, "k": 1, "groups": [1] * 2**15}, "countable_tiles"),
    ],
)
def test_what_a_launch_cannot_count_is_refused(catalog: Catalog, fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(SelectionError, match=rule):
        catalog.select(GemmProblem(dtype="bf16", **fields), arch="sm_90")


def test_tiles_are_large_where_small_ones_are_too_many(catalog: Catalog) -> None:
    wide = GemmProblem(m=1, n=2**30, k=1, batch=12, dtype="bf16")
    assert catalog.select(wide, arch="sm_90").kernels[0].algorithm.tile_n >= 192


def test_groups_of_k_are_not_of_8_bits(catalog: Catalog) -> None:
    problem = GemmProblem(groups=(256, 512), group_axis="k", m=64, n=64, dtype="fp8")
    with pytest.raises(SelectionError, match="tensor cores read elements of 8 bits along K alone"):
        catalog.select(problem, arch="sm_90")


@pytest.mark.usefixtures("nvcc")
@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"m": 4096, "dtype": "bf16"},
        {"m": 300, "dtype": "bf16", "layout": "rrr"},
        {"m": 8192, "dtype": "fp8", "scales": "block"},
        {"m": 100, "dtype": "int8", "layout": "rrr", "scales": "row"},
        {"groups": (256,) * 64, "dtype": "bf16"},
        {"groups": (8,) * 64, "dtype": "bf16", "layout": "crr"},
    ],
)
def test_rows_with_clusters_groups_and_scales_compile_without_spills(catalog: Catalog, fields: dict[str, Any]) -> None:
    (kernel,) = catalog.select(GemmProblem(n=4096, k=4096, **fields), arch="sm_90").kernels
    catalog.build(kernel)
    assert_fits(catalog, kernel, "gemm")


@pytest.mark.usefixtures("nvcc")
@pytest.mark.slow
@pytest.mark.parametrize(("m", "num_d"), [(1000, 0), (8, 2)])
def test_selected_rows_compile_without_spills(catalog: Catalog, m: int, num_d: int) -> None:
    combined = "MultiDAdd" if num_d else "PassThrough"
    problem = GemmProblem(m=m, n=4096, k=4096, dtype="bf16", num_d=num_d, elementwise=combined)
    (kernel,) = catalog.select(problem, arch="sm_90").kernels
    library = ctypes.CDLL(str(catalog.build(kernel).path))
    library.catalog_describe.restype = ctypes.c_char_p
    assert json.loads(library.catalog_describe())["id"] == kernel.id
    assert library.catalog_launch(None, None) == 2, "no arguments"
    args, needed = template(problem, ()).fill({}, (), (), 8, {}), ARGUMENTS.workspace()
    for asked, parts in ((0, 1), (1, 1), (5, 4), (100, 8)):
        args.num_splits = asked
        assert library.catalog_workspace_size(ctypes.byref(args), ctypes.byref(needed)) == 0
        assert (needed.num_splits, needed.c_acc) == (parts, 0), "powers of two, at most the blocks of a cluster"
    assert library.catalog_launch(ctypes.byref(args), None) == 2, "another number of parts than it said"
    assert_fits(catalog, kernel, "gemm")


def test_work_follows_the_parts_of_k_and_rows_that_are_no_vectors(catalog: Catalog) -> None:
    sizes = {"m": 64, "n": 2048, "k": 8192, "dtype": "bf16"}
    kernel = rows(catalog, "dtype = 'bf16' AND layout = 'rcr' AND tile_m = 64 AND tile_n = 64", "sm_90")[0]

    def work(**changes: int) -> dict[str, float]:
        terms = operation("gemm").work(GemmProblem(**{**sizes, **changes}), kernel, 132)
        return {name.removeprefix("sm90_wgmma "): amount for name, amount in terms.items()}

    whole, halves = work(k_batch=1), work(k_batch=2)
    assert (whole["parts"], halves["parts"]) == (0, 1)
    assert (whole["shared"], halves["shared"]) == (0, 64 * kernel.algorithm.tile_n)
    assert (whole["waves"], halves["depth"]) == (halves["waves"], whole["depth"] / 2)
    assert work(k_batch=0) == halves, "selection reckons with the parts that a launch has"
    assert (whole["copied"], work(k=131)["copied"]) == (0, (64 + 2048) * 131)
    assert (whole["scattered"], work(n=2047)["scattered"]) == (0, 64 * 64)


def test_work_counts_operands_that_are_transposed_first(catalog: Catalog) -> None:
    def copied(**fields: Any) -> float:
        problem = GemmProblem(n=64, k=512, dtype="bf16", **fields)
        (kernel,) = catalog.select(problem, arch="sm_90").kernels
        return operation("gemm").work(problem, kernel, 132)["sm90_wgmma copied"]

    assert copied(m=128, layout="crr") == copied(groups=(128,), layout="rrr") == 0
    assert copied(groups=(128,), layout="crr") == 128 * 512
