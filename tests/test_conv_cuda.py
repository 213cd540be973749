"""Convolution rows of sm_90 without a GPU: which are there, which are selected, and that they compile."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from typing import Any

import pytest
from conv_problems import rows

from catalog.errors import BuildError, SelectionError
from catalog.ops import operation
from catalog.ops.conv.arguments import ARGUMENTS
from catalog.ops.conv.problem import ConvProblem
from catalog.ops.conv.traits import Dtype
from catalog.registry.query import Query, run
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.arguments import template


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    with Catalog(tmp_path_factory.mktemp("conv_cuda") / "catalog.db") as catalog:
        catalog.populate("sm_90", operation="conv")
        yield catalog


def problem(direction: str, channels: int, extent: int, g: int = 1, **others: Any) -> ConvProblem:
    fields: dict[str, Any] = {"n": 32, "c": channels, "k": channels, "g": g, "size": (extent,) * 2, "filter": (3, 3)}
    return ConvProblem(direction=direction, dtype="bf16", **fields | {"pad": (1, 1)} | others)


DIRECTIONS = ("forward", "bwd_data", "bwd_weight")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_large_images_get_large_tiles_and_narrow_groups_their_own_pipeline(catalog: Catalog, direction: str) -> None:
    def selected(*sizes: int) -> Any:
        return catalog.select(problem(direction, *sizes), arch="sm_90").kernels[0].algorithm

    large = selected(256, 56)
    assert large.pipeline == "sm90_wgmma"
    assert large.tile_m * large.tile_n >= 128 * 192
    few = selected(64, 56)
    assert min(few.tile_m, few.tile_n) == 64
    assert {selected(256, 28, 256 // width).pipeline for width in (1, 2, 8, 16)} == {"sm90_narrow"}
    assert selected(256, 28, 2).pipeline == "sm90_wgmma"


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"layout": "ngchw"}, "same_layout"),
        ({"size": (900, 900), "dilation": (200, 200)}, "tma_gathers"),
        ({"stride": (9, 9)}, "tma_gathers"),
    ],
)
def test_what_no_row_can_compute_is_refused(catalog: Catalog, changes: dict[str, Any], rules: str) -> None:
    with pytest.raises(SelectionError, match=rules):
        catalog.select(problem("forward", 64, 56, **changes), arch="sm_90")


def test_long_distances_fit_one_axis(catalog: Catalog) -> None:
    fields: dict[str, Any] = {"n": 1, "c": 64, "k": 64, "size": (9000,), "filter": (3,), "dilation": (512,)}
    for direction in DIRECTIONS:
        catalog.select(ConvProblem(direction=direction, dtype="fp16", **fields), arch="sm_90")


def test_types_without_rows_are_refused(catalog: Catalog) -> None:
    fields = problem("forward", 64, 56).model_dump() | {"dtype": "fp32"}
    with pytest.raises(SelectionError, match="dtype"):
        catalog.select(ConvProblem(**fields), arch="sm_90")
    kernel = rows(catalog, "ndim = 2", "sm_90")[0]
    wide = kernel.model_copy(update={"signature": kernel.signature.model_copy(update={"dtype": Dtype.FP32})})
    with pytest.raises(BuildError, match="NVIDIA has no convolution kernels for dtype = fp32"):
        operation("conv").emit(wide, "cuda", catalog.path)


@pytest.mark.usefixtures("nvcc")
@pytest.mark.slow
@pytest.mark.parametrize(("direction", "g"), [("forward", 1), ("bwd_data", 32), ("bwd_weight", 1), ("bwd_weight", 32)])
def test_selected_rows_compile_without_spills(catalog: Catalog, direction: str, g: int) -> None:
    wanted = problem(direction, 256, 56, g)
    (kernel,) = catalog.select(wanted, arch="sm_90").kernels
    library = ctypes.CDLL(str(catalog.build(kernel).path))
    library.catalog_describe.restype = ctypes.c_char_p
    assert json.loads(library.catalog_describe())["id"] == kernel.id
    assert library.catalog_launch(None, None) == 2, "no arguments"
    args, needed = template(wanted, ()).fill({}, (), (), 1, {}), ARGUMENTS.workspace()
    assert library.catalog_workspace_size(ctypes.byref(args), ctypes.byref(needed)) == 0
    assert needed.num_splits == 1, "kernels divide the depth by themselves"
    assert library.catalog_launch(ctypes.byref(args), None) == 2, "no tensors"
    query = Query(
        f"id = '{kernel.id}' AND built", columns=("spills", "scratch_bytes", "shared_bytes"), operation="conv"
    )
    ((spills, scratch, shared),) = run(catalog.path, query)
    assert (spills, scratch) == (0, 0)
    assert shared <= 232_448, "227 KiB is what a block may have"
