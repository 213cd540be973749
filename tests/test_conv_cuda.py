"""Convolution rows of sm_90 without a GPU: which are there, which are selected, and that they compile."""

from __future__ import annotations

import ctypes
import json
import math
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from conv_problems import rows
from cuda_resources import assert_fits

from catalog import build
from catalog.build.cuda.toolchain import cuda_toolchain
from catalog.errors import BuildError, SelectionError
from catalog.ops import operation
from catalog.ops.conv import kernels, reach
from catalog.ops.conv.arguments import ARGUMENTS
from catalog.ops.conv.problem import ConvProblem
from catalog.ops.product_words import Dtype
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.arguments import template
from catalog.settings import data_dir


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


def test_small_images_get_transposed_tiles_that_fill_the_gpu_once(catalog: Catalog) -> None:
    """The gradient of the weight has none: its images are not columns of the product."""
    tiles = {}
    for direction in DIRECTIONS:
        algorithm = catalog.select(problem(direction, 512, 7), arch="sm_90").kernels[0].algorithm
        tiles[direction] = (algorithm.tile_m, algorithm.tile_n, algorithm.wave_n)
    assert tiles == {"forward": (112, 64, 4), "bwd_data": (112, 64, 4), "bwd_weight": (128, 192, 1)}


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


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"n": 2**11, "c": 8, "k": 8, "size": (1024, 1024)}, "countable_positions"),
        ({"n": 1, "c": 2**30 + 64, "k": 8, "size": (4,)}, "countable_positions"),
        ({"n": 1, "c": 2**30, "k": 8, "size": (4,), "filter": (2,)}, "countable_steps"),
        ({"n": 2**11, "c": 3000, "k": 6000, "g": 1000, "size": (64, 64)}, "countable_tiles"),
        ({"n": 1, "c": 2**25, "k": 2**25, "g": 2**25, "size": (4,)}, "countable_patches"),
    ],
)
def test_what_a_launch_cannot_count_is_refused(catalog: Catalog, fields: dict[str, Any], rule: str) -> None:
    problem = ConvProblem(dtype="bf16", **{"filter": (1,) * len(fields["size"])} | fields)
    with pytest.raises(SelectionError, match=rule):
        catalog.select(problem, arch="sm_90")


@pytest.mark.parametrize(
    ("header", "name", "value"),
    [
        ("narrow_call", "narrow_bytes", reach._SHARED),
        ("narrow_patches_launch", "narrow_box", reach._BOX),
        ("halo_shape", "longest", reach._BOX),
        ("halo_shape", "shortest", reach._LINE),
        ("conv_shape", "block_channels", reach._BLOCK),
    ],
)
def test_rules_count_with_the_numbers_of_the_kernels(header: str, name: str, value: int) -> None:
    text = Path(*kernels.__path__, "cuda", f"{header}.hpp").read_text(encoding="utf-8")
    (factors,) = re.findall(rf"constexpr int {name} = ([\d *]+);", text)
    assert math.prod(map(int, factors.split("*"))) == value


PATCHES = """
#include <cstdio>
#include "cuda/halo_shape.hpp"

template <catalog::conv::Direction of, int columns, int teams>
struct Row {
    using dtype = catalog::cuda::bf16;
    static constexpr auto direction = of;
    static constexpr int tile_m = 256 / teams, tile_n = columns;
    static constexpr int wave_m = 8 / teams, wave_n = 1, num_wave_groups = teams;
};

template <class Row>
int patches(catalog::cuda::HaloCall<2>& call) {
    using Shape = catalog::cuda::HaloShape<Row>;
    if (!catalog::cuda::choose_patch(call, Row::tile_m, Shape::patch_rows)) return 0;
    return static_cast<int>(call.across[0].divisor * call.across[1].divisor);
}

int main() {
    using catalog::conv::Direction;
    using catalog::cuda::HaloShape;
    std::printf("%d %d %d %d", HaloShape<Row<Direction::forward, 64, 2>>::filters,
                HaloShape<Row<Direction::forward, 32, 2>>::filters, HaloShape<Row<Direction::bwd_data, 64, 2>>::filters,
                HaloShape<Row<Direction::bwd_data, 32, 2>>::filters);
    catalog::cuda::HaloCall<2> call{};
    auto& phase = call.phases[0];
    int height, width;
    while (std::scanf("%d %d %d %d %d %d", &height, &width, &phase.taps[1], &phase.taps[0], &phase.apart[1],
                      &phase.apart[0]) == 6) {
        phase.count[0] = catalog::cuda::Divisor(width);
        phase.count[1] = catalog::cuda::Divisor(height);
        std::printf("\\n%d %d", patches<Row<Direction::forward, 64, 2>>(call),
                    patches<Row<Direction::forward, 64, 1>>(call));
    }
}
"""
"""The filters that stay in shared memory, and for each geometry the patches of an image: small ones, and large ones."""


@pytest.mark.usefixtures("nvcc")
@pytest.mark.slow
def test_rules_count_patches_and_filters_as_the_kernels_do(catalog: Catalog, tmp_path: Path) -> None:
    chance = random.Random(1)  # noqa: S311
    drawn = []
    for _ in range(300):
        size, taps, apart = ([chance.randint(1, most) for _ in "hw"] for most in (400, 9, 12))
        pad = [(number - 1) * distance for number, distance in zip(taps, apart, strict=True)]
        drawn.append(ConvProblem(n=1, c=64, k=64, size=size, filter=taps, dilation=apart, pad=pad))
    source = tmp_path / "patches.cu"
    source.write_text(PATCHES)
    folders = (Path(*build.__path__), Path(*kernels.__path__))
    compiler = [cuda_toolchain("sm_90").compiler.path, "-std=c++17", *(f"-I{folder}" for folder in folders)]
    subprocess.run([*compiler, source, "-o", tmp_path / "patches"], check=True, timeout=120)
    given = "\n".join(" ".join(map(str, (*p.out, *p.filter, *p.dilation))) for p in drawn)
    done = subprocess.run([tmp_path / "patches"], input=given, capture_output=True, text=True, check=True, timeout=60)
    filters, *counts = done.stdout.splitlines()
    parameters = [reach.REACH[name] for name in ("small_patches", "large_patches")]
    assert counts == [" ".join(str(parameter(problem)) for parameter in parameters) for problem in drawn]
    expression = catalog.spec("sm_90", operation="conv").quantities["kept_filters"]
    where = "pipeline = 'sm90_halo' AND num_wave_groups = 2 AND ndim = 2 AND dtype = 'bf16'"
    found = catalog.connection.execute(
        f"SELECT {expression} FROM conv_row WHERE {where} ORDER BY direction DESC, tile_n DESC"
    )
    assert filters.split() == [str(number) for (number,) in found]


def test_parts_of_the_depth_and_static_order_are_of_one_model() -> None:
    text = Path(*kernels.__path__, "cuda", "conv_call.hpp").read_text(encoding="utf-8")
    terms = " ".join(re.findall(r"const(?:expr)? double (.*?);", text.split("choose_splits")[1], re.S))
    spec = json.loads((data_dir() / "arch_specs" / "conv" / "native" / "sm_90.json").read_text(encoding="utf-8"))
    quantities = " ".join(spec["quantities"].values())
    numbers = set(re.findall(r"\d+\.\d+", terms)) - {"3.4"}  # of a second wave of clusters, which the order leaves out
    assert len(numbers) > 10
    assert numbers <= set(re.findall(r"\d+\.\d+", quantities))


def test_tiles_are_large_where_small_ones_are_too_many(catalog: Catalog) -> None:
    many = ConvProblem(n=2**10, c=3000, k=6000, g=1000, size=(64, 64), filter=(1, 1), dtype="bf16")
    assert catalog.select(many, arch="sm_90").kernels[0].algorithm.tile_m == 256


def test_the_largest_launches_are_offered(catalog: Catalog) -> None:
    few = ConvProblem(n=2**11, c=3, k=8, size=(1024, 1024), filter=(3, 3), stride=(2, 2), pad=(1, 1), dtype="bf16")
    largest = ConvProblem(n=2**10, c=8, k=8, size=(1024, 1024), filter=(1, 1), dtype="bf16")
    for wanted in (few, largest):
        catalog.select(wanted, arch="sm_90")


def test_sizes_of_one_form_choose_the_pipeline(catalog: Catalog) -> None:
    """Both fill the same tiles, so that only what the rules ask about groups tells them apart."""
    fields: dict[str, Any] = {"n": 8, "k": 64, "g": 2, "size": (28, 28), "filter": (3, 3), "pad": (1, 1)}
    chosen = [catalog.select(ConvProblem(c=c, dtype="bf16", **fields), arch="sm_90").kernels[0] for c in (64, 96)]
    assert [kernel.algorithm.pipeline for kernel in chosen] == ["sm90_narrow", "sm90_wgmma"]


def test_extreme_strides_are_selected_for_at_once(catalog: Catalog) -> None:
    most, fields = 2**31 - 1, {"direction": "bwd_data", "c": 8, "k": 8, "dtype": "bf16"}
    before = process_time()
    for geometry in (
        {"n": 1, "size": (4, 4, 4), "filter": (1, 1, 1), "stride": (most,) * 3},
        {"n": 0, "size": (most,) * 3, "filter": (1, 1, 1), "stride": (most,) * 3},
        {"n": 1, "size": (30_000_000,), "filter": (3,), "stride": (30_000_000,)},
        {"n": 1, "size": (16_000_000,), "filter": (16_000_000,), "stride": (16_000_000,)},
    ):
        catalog.select(ConvProblem(**fields, **geometry), arch="sm_90")
    assert process_time() - before < 5


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
@pytest.mark.parametrize(
    ("direction", "sizes"),
    [
        ("forward", (256, 56)),
        ("forward", (512, 7)),
        ("bwd_data", (512, 7)),
        ("bwd_data", (256, 56, 32)),
        ("bwd_weight", (256, 56)),
        ("bwd_weight", (256, 56, 32)),
    ],
)
def test_selected_rows_compile_without_spills(catalog: Catalog, direction: str, sizes: tuple[int, ...]) -> None:
    wanted = problem(direction, *sizes)
    (kernel,) = catalog.select(wanted, arch="sm_90").kernels
    library = ctypes.CDLL(str(catalog.build(kernel).path))
    library.catalog_describe.restype = ctypes.c_char_p
    assert json.loads(library.catalog_describe())["id"] == kernel.id
    assert library.catalog_launch(None, None) == 2, "no arguments"
    args, needed = template(wanted, ()).fill({}, (), (), 1, {}), ARGUMENTS.workspace()
    assert library.catalog_workspace_size(ctypes.byref(args), ctypes.byref(needed)) == 0
    assert needed.num_splits == 1, "kernels divide the depth by themselves"
    assert library.catalog_launch(ctypes.byref(args), None) == 2, "no tensors"
    assert_fits(catalog, kernel, "conv")
