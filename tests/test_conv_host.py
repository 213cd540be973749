"""Convolution kernels of the host: results against the float64 reference and PyTorch, gradients, messages, commands."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from time import process_time, thread_time
from typing import Any

import amx
import command
import numpy as np
import pytest
from conftest import missing, slow_but
from conv_problems import CONV, NARROW, check, check_problem, rows

from catalog.errors import TensorError
from catalog.ops.conv.arguments import ARGUMENTS
from catalog.ops.conv.problem import ConvProblem
from catalog.ops.conv.reach import REACH
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host.device import cpu_features, host_archs, why_unavailable
from catalog.runtime.guard import guarded_problem
from catalog.runtime.inputs import make_inputs
from catalog.schema.kernel import Kernel
from catalog.settings import settings

SEED = 2026
ARCHES = tuple(arch for arch in host_archs() if why_unavailable(arch) is None)
DIRECTIONS = ("forward", "bwd_data", "bwd_weight")
PLANE = "dtype = 'fp32' AND layout = 'nhwgc' AND ndim = 2 AND pipeline = 'host_panel'"


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """The host's convolution kernels, each compiled once for all tests of this file."""
    with Catalog(tmp_path_factory.mktemp("conv") / "catalog.db") as catalog:
        for arch in ARCHES:
            catalog.populate(arch, operation="conv")
        yield catalog


def of_plane(catalog: Catalog, direction: str) -> Kernel:
    """The first kernel of a direction for two axes, in fp32."""
    return rows(catalog, f"{PLANE} AND family = '{direction}'")[0]


def narrow_rows(catalog: Catalog, direction: str) -> list[Kernel]:
    """Those of narrow groups for two axes: one of each pipeline that this CPU runs."""
    dots = "" if "avx512_bf16" in cpu_features() else "AND pipeline NOT LIKE '%_dot'"
    found = rows(catalog, f"pipeline IN {NARROW} AND ndim = 2 AND family = '{direction}' {dots}")
    return list({row.algorithm.pipeline: row for row in found}.values())


def test_kernels_compute_any_problem(catalog: Catalog) -> None:
    check(catalog, of_plane(catalog, "forward"), 40)


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_depthwise_filters_of_three_columns(catalog: Catalog, direction: str) -> None:
    """Width, stride and padding decide which columns are outside of the image; the last block of channels overlaps."""
    rng, used = random.Random(SEED), set()  # noqa: S311
    for width, stride, pad, dtype in product((7, 15, 44), (1, 2), (0, 1, 2), ("fp32", "bf16")):
        c = rng.choice((8, 33, 48, 150))
        axes: dict[str, Any] = {"size": (5, width), "filter": (3, 3), "stride": (stride,) * 2, "pad": (pad,) * 2}
        problem = ConvProblem(n=2, c=c, k=c, g=c, direction=direction, dtype=dtype, **axes)
        kernels = [one.kernel for one in catalog.candidates(problem) if one.kernel.algorithm.pipeline in NARROW]
        used |= {kernel.algorithm.pipeline.value for kernel in kernels}
        for kernel in kernels:
            check_problem(catalog, kernel, problem, rng)
    assert used >= {row.algorithm.pipeline.value for row in narrow_rows(catalog, direction)} - {"host_padded_dot"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_depthwise_weights_from_large_images(catalog: Catalog, stride: int, dtype: str) -> None:
    """Kernels prefetch large tensors, also behind their ends."""
    axes: dict[str, Any] = {"size": (191, 201), "filter": (3, 3), "stride": (stride,) * 2, "pad": (1, 1)}
    problem = ConvProblem(n=3, c=72, k=72, g=72, direction="bwd_weight", dtype=dtype, **axes)
    (kernel,) = catalog.select(problem).kernels
    check_problem(catalog, kernel, problem, random.Random(SEED))  # noqa: S311


@pytest.mark.slow
@pytest.mark.parametrize("channels", [3, 32])
def test_gradients_of_depthwise_weights_are_infinite_only_for_taps_that_meet_an_infinity(
    catalog: Catalog, channels: int
) -> None:
    """A position at a corner of the image, whose neighbours are multiplied with it at once, meets no tap outside."""
    groups = dict.fromkeys("ckg", channels)
    problem = ConvProblem(n=1, size=(6, 24), filter=(3, 3), pad=(1, 1), direction="bwd_weight", dtype="bf16", **groups)
    inputs = make_inputs(problem, SEED)
    infinity = inputs["output"].dtype.type(np.inf)
    inputs["input"][...] = inputs["input"].dtype.type(1)
    inputs["output"][0, 0, 0, 2] = inputs["output"][0, 5, 23, channels - 1] = infinity
    met = np.zeros(problem.shapes["weight"], bool)
    met[2, 1:, 1:] = met[channels - 1, :2, :2] = True
    # Of few channels, host_direct multiplies the zeros around the image.
    others = {"host_direct"} if channels == 3 else set()
    kernels = [one.kernel for one in catalog.candidates(problem)]
    for kernel in (kernel for kernel in kernels if kernel.algorithm.pipeline in {*NARROW} - others):
        result = catalog.plan(problem, kernel).run(inputs).outputs["weight"].astype(np.float32)
        np.testing.assert_array_equal(np.isinf(result), met, err_msg=kernel.name)


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kernels_of_narrow_groups_compute_any_problem_that_they_answer(catalog: Catalog, direction: str) -> None:
    kernels = narrow_rows(catalog, direction)
    assert not catalog.builder.build_many(kernels).failures
    for kernel in kernels:
        check(catalog, kernel, 30)


@pytest.mark.slow
def test_kernels_of_all_kinds_compute_any_problem(catalog: Catalog) -> None:
    """Each direction, layout, type and number of axes, and each pipeline."""
    kinds = [
        "dtype = 'fp32' AND layout = 'nhwgc' AND ndim = 2 AND family = 'bwd_data'",
        "dtype = 'fp32' AND layout = 'nhwgc' AND ndim = 2 AND family = 'bwd_weight'",
        "dtype = 'bf16' AND layout = 'ngchw' AND ndim = 3 AND family = 'forward'",
        "dtype = 'fp16' AND layout = 'ngchw' AND ndim = 1 AND family = 'bwd_data'",
        "dtype = 'int8' AND layout = 'nhwgc' AND ndim = 3",
        "dtype = 'fp32' AND family = 'depthwise'",
    ]
    kernels = [rows(catalog, f"pipeline = 'host_panel' AND {kind}")[0] for kind in kinds]
    direct = "pipeline = 'host_direct' AND ndim = 2 AND dtype"
    kernels += [
        rows(catalog, f"{direct} = '{dtype}' AND family = '{family}'")[0]
        for dtype, family in (("fp32", "bwd_data"), ("bf16", "bwd_weight"))
    ]
    scatter = "pipeline = 'host_scatter' AND dtype"
    kernels += [
        rows(catalog, f"{scatter} = '{dtype}' AND ndim = {ndim}")[0] for dtype, ndim in (("fp32", 2), ("bf16", 3))
    ]
    kernels += rows(catalog, "pipeline = 'host_winograd'")
    assert not catalog.builder.build_many(kernels).failures
    used = {kernel.name: check(catalog, kernel, 40) for kernel in kernels}
    assert max(used.values()) > 0.02, "tolerances are far too wide"


@pytest.mark.parametrize(
    ("direction", "groups"), slow_but([("forward", 1)], [("forward", 1), ("forward", 5), ("bwd_weight", 1)])
)
def test_minimal_filtering_spreads_no_infinity(
    catalog: Catalog, direction: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums mix elements that some results do not meet: these are numbers even so, and others are what they were."""
    problem = ConvProblem(
        **{"direction": direction, "n": 2, "c": 33 * groups, "k": 70, "g": groups, "dtype": "fp32"},
        **{"size": (9, 12), "filter": (3, 3), "pad": (1, 0)},
    )
    inputs, [made] = make_inputs(problem, SEED), problem.made
    kernel = rows(catalog, f"pipeline = 'host_winograd' AND family = '{direction}' AND ndim = 2")[0]
    plan, direct = catalog.plan(problem, kernel), catalog.plan(problem, of_plane(catalog, direction))
    inputs["input"][0, 3, 4, 5], inputs["input"][1, 8, 11, 32], inputs["input"][0, 7, 1, 0] = np.inf, np.nan, 3e38
    (inputs["weight"][11] if direction == "forward" else inputs["output"][1])[2, 1, 20] = -np.inf
    result, expected = (one.run(inputs).outputs[made] for one in (plan, direct))
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(result[infinite], expected[infinite])
    others = np.isfinite(expected) & (np.abs(expected) < 1e30)
    np.testing.assert_allclose(result[others], expected[others], rtol=1e-4, atol=1e-4)
    assert 0.5 < others.mean() < 0.99
    for threads in (1, 3, 16):
        monkeypatch.setenv("CATALOG_NUM_THREADS", str(threads))
        settings.cache_clear()
        np.testing.assert_array_equal(catalog.plan(problem, kernel).run(inputs).outputs[made], result)


@pytest.mark.parametrize(
    "of",
    slow_but(
        ["'host_panel' AND dtype = 'fp32'"],
        [
            "'host_panel' AND dtype = 'bf16'",
            "'host_panel' AND dtype = 'fp32'",
            "'host_direct' AND dtype = 'fp32'",
            "'host_depthwise' AND dtype = 'fp32'",
            "'host_two_rows' AND dtype = 'fp32'",
            "'host_padded' AND dtype = 'bf16'",
            "'host_winograd'",
        ],
    ),
)
def test_large_results_are_equal_at_any_address(catalog: Catalog, of: str) -> None:
    """Results at addresses of whole vectors bypass the caches."""
    found = rows(catalog, f"pipeline = {of} AND family = 'forward' AND layout = 'nhwgc' AND ndim = 2")
    if not found:
        pytest.skip("this arch has no such kernel")
    kernel = found[0]
    groups = 64 if kernel.algorithm.pipeline in NARROW else 1
    problem = ConvProblem(
        n=2, c=groups, k=64, g=groups, size=(191, 201), filter=(3, 3), pad=(1, 1), dtype=kernel.signature.dtype.value
    )
    inputs, plan = make_inputs(problem, SEED), catalog.plan(problem, kernel)
    bound = plan.bind(inputs)
    bound.launch()
    expected = bound.outputs["output"]
    assert expected.nbytes > 8 << 20
    assert expected.ctypes.data % 64 == 0
    for offset in (0, 1, 8):
        memory = np.full(expected.size + 64, np.nan, expected.dtype)
        memory = memory[-memory.ctypes.data % 64 // memory.itemsize + offset :][: expected.size]
        plan.bind(inputs, outputs={"output": memory.reshape(expected.shape)}).launch()
        np.testing.assert_array_equal(memory.reshape(expected.shape).view(np.uint8), expected.view(np.uint8))


@pytest.mark.slow
def test_products_in_amx_tiles(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are computed in software."""
    if not amx.PAIRS["host_amx"] - amx.TILES <= cpu_features():
        pytest.skip("this CPU has no AVX512-BF16")
    amx.pretend("host_amx", tmp_path, monkeypatch)
    kinds = (
        ("bf16", "bwd_weight", "host_amx"),
        ("fp16", "forward", "host_amx"),
        ("bf16", "forward", "host_lines_amx"),
        ("bf16", "bwd_data", "host_scatter_amx"),
        ("bf16", "bwd_weight", "host_shift_amx"),
    )
    with Catalog(catalog.path) as other:
        for dtype, family, pipeline in kinds:
            wanted = f"dtype = '{dtype}' AND family = '{family}' AND layout = 'nhwgc' AND ndim = 2"
            check(other, rows(other, f"{wanted} AND pipeline = '{pipeline}'", "x86_64_v4")[0], 10)
        first_layer = ConvProblem(direction="bwd_data", n=1, c=3, k=64, size=(9, 9), filter=(3, 3), dtype="bf16")
        (kernel,) = other.select(first_layer, arch="x86_64_v4").kernels
        assert kernel.algorithm.pipeline == "host_scatter_amx"


@pytest.mark.slow
def test_gradients_are_those_of_the_output(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution is linear in each factor: <y(x, w), g> = <x, dx(g, w)> = <w, dw(x, g)>. Threads change no bit."""
    fields: dict[str, Any] = {"n": 3, "c": 10, "k": 15, "g": 5, "size": (23, 18), "filter": (3, 4), "dtype": "fp32"}
    fields |= {"stride": (2, 3), "dilation": (2, 1), "pad": (3, 0)}
    of = {direction: ConvProblem(direction=direction, **fields) for direction in DIRECTIONS}
    x, w = make_inputs(of["forward"], SEED).values()
    gradient = make_inputs(of["bwd_data"], SEED + 1)["output"]
    given = {
        "forward": {"input": x, "weight": w},
        "bwd_data": {"output": gradient, "weight": w},
        "bwd_weight": {"input": x, "output": gradient},
    }

    def computed() -> list[np.ndarray[Any, Any]]:
        plans = {direction: catalog.plan(of[direction], of_plane(catalog, direction)) for direction in DIRECTIONS}
        return [next(iter(plan.run(given[direction]).outputs.values())) for direction, plan in plans.items()]

    y, dx, dw = computed()
    sides = [np.vdot(y.astype(np.float64), gradient), np.vdot(x.astype(np.float64), dx)]
    np.testing.assert_allclose([*sides, np.vdot(w.astype(np.float64), dw)], sides[0], rtol=1e-5)
    other = catalog.plan(of["bwd_data"], rows(catalog, "pipeline = 'host_scatter' AND dtype = 'fp32' AND ndim = 2")[0])
    scattered = other.run(given["bwd_data"]).outputs["input"]
    np.testing.assert_allclose(scattered, dx, rtol=1e-4, atol=1e-5)
    for threads in (1, 3):
        monkeypatch.setenv("CATALOG_NUM_THREADS", str(threads))
        settings.cache_clear()
        for result, before in zip(computed(), (y, dx, dw), strict=True):
            np.testing.assert_array_equal(result, before)
        np.testing.assert_array_equal(other.run(given["bwd_data"]).outputs["input"], scattered)


@pytest.mark.slow
def test_threads_share_one_axis(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of one image with one axis, whose products do not depend on them."""

    def computed(threads: int, problem: ConvProblem, launches: int = 1) -> tuple[np.ndarray[Any, Any], float]:
        """The result, and the CPU time of other threads than this one as a share of all."""
        monkeypatch.setenv("CATALOG_NUM_THREADS", str(threads))
        settings.cache_clear()
        kernel = rows(catalog, f"pipeline = 'host_scatter' AND dtype = 'fp32' AND ndim = {problem.ndim}")[0]
        bound = catalog.plan(problem, kernel).bind(make_inputs(problem, SEED))
        before = process_time(), thread_time()
        for _ in range(launches):
            bound.launch()
        total = process_time() - before[0]
        return bound.outputs["input"].copy(), (total - (thread_time() - before[1])) / total

    wide = ConvProblem(direction="bwd_data", n=1, c=1, k=512, size=(160_000,), filter=(10,), stride=(5,), dtype="fp32")
    assert computed(2, wide, 20)[1] > 0.1
    fields: dict[str, Any] = {"direction": "bwd_data", "n": 1, "c": 3, "k": 21, "dtype": "fp32"}
    for geometry in (
        {"size": (9001,), "filter": (100,), "stride": (3,), "dilation": (2,), "pad": (70,)},
        {"size": (1, 7001), "filter": (2, 5), "stride": (1, 2), "pad": (1, 2)},
    ):
        problem = ConvProblem(**fields, **geometry)
        alone, _ = computed(1, problem)
        inputs = make_inputs(problem, SEED)
        expected, allowed = CONV.reference(problem, inputs)["input"], CONV.tolerances(problem, inputs)["input"]
        assert allowed.used(alone, expected) <= 1
        for threads in (2, 3, 7):
            np.testing.assert_array_equal(computed(threads, problem)[0], alone)


def test_strides_beyond_the_image_take_no_time(catalog: Catalog) -> None:
    fields: dict[str, Any] = {"n": 2, "c": 3, "k": 5, "size": (4, 4), "filter": (3, 2), "dtype": "fp32"}
    problem = ConvProblem(direction="bwd_data", **fields, stride=(100_000, 99_999), pad=(1, 0))
    inputs, before = make_inputs(problem, SEED), process_time()
    result = catalog.plan(problem, of_plane(catalog, "bwd_data")).run(inputs).outputs["input"]
    assert process_time() - before < 10, "each remainder of the strides was visited"
    assert CONV.tolerances(problem, inputs)["input"].used(result, CONV.reference(problem, inputs)["input"]) <= 1


@pytest.mark.parametrize("pad", slow_but([(1 << 29) - 5], [(1 << 14) - 5, (1 << 29) - 5]))
def test_taps_far_outside_the_image_meet_zeros(catalog: Catalog, pad: int) -> None:
    """What a band would read of the input, with the zeros around it, is too large to be copied, or to be counted."""
    kernel = rows(catalog, "pipeline = 'host_direct' AND family = 'bwd_weight' AND dtype = 'fp32' AND ndim = 2")[0]
    fields: dict[str, Any] = {"size": (10, 10), "filter": (2, 2), "dilation": (2 * pad + 6,) * 2, "pad": (pad,) * 2}
    width = kernel.algorithm.vector_c
    problem = ConvProblem(direction="bwd_weight", n=2, c=2 * width, k=2 * width, g=2, dtype="fp32", **fields)
    gradient = catalog.plan(problem, kernel).run(make_inputs(problem, SEED)).outputs["weight"]
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.slow
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_the_reference_is_pytorchs(ndim: int) -> None:
    try:
        import torch
    except ImportError:
        missing("PyTorch")
    rng = random.Random(ndim)  # noqa: S311
    fields: dict[str, Any] = {"n": 2, "c": 6, "k": 9, "g": 3, "dtype": "fp32", "size": (9, 7, 8)[:ndim]}
    fields |= {name: [rng.randint(1, 3) for _ in range(ndim)] for name in ("filter", "stride", "dilation", "pad")}
    of = {direction: ConvProblem(direction=direction, **fields) for direction in DIRECTIONS}
    x, w = make_inputs(of["forward"], SEED).values()
    gradient = make_inputs(of["bwd_data"], SEED)["output"]
    given = (torch.from_numpy(array).double().movedim(-1, 1) for array in (x, w, gradient))
    theirs_x, theirs_w, theirs_gradient = (tensor.requires_grad_() for tensor in given)
    forward = of["forward"]
    function = getattr(torch.nn.functional, f"conv{ndim}d")
    y = function(theirs_x, theirs_w, None, forward.stride, forward.pad, forward.dilation, forward.g)
    results = (y, *torch.autograd.grad(y, (theirs_x, theirs_w), theirs_gradient))
    inputs = ({"input": x, "weight": w}, {"output": gradient, "weight": w}, {"input": x, "output": gradient})
    for direction, tensors, theirs in zip(DIRECTIONS, inputs, results, strict=True):
        (ours,) = CONV.reference(of[direction], tensors).values()
        np.testing.assert_allclose(ours, theirs.detach().movedim(1, -1).numpy(), rtol=1e-11, atol=1e-11)


def test_the_header_derives_from_the_list_of_arguments() -> None:
    assert (CONV.headers["kernels"] / "operation" / "args.h").read_text() == ARGUMENTS.header


def test_first_runs_of_large_problems_are_small() -> None:
    fields = {"filter": (3, 3), "dilation": (100, 1), "stride": (2, 2), "dtype": "fp32", "g": 4}
    large = ConvProblem(n=256, c=4 * 1001, k=4 * 900, size=(515, 2001), **fields)
    small = guarded_problem(large)
    assert small.flops < large.flops / 1e4
    assert small.form.text == large.form.text
    assert (small.size[0], small.channels_in % 128) == (201 + 515 % 201, 1001 % 128)
    assert guarded_problem(small) == small


def test_sizes_choose_the_kernel(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow groups have direct kernels, filters of 3 x 3 minimal filtering, others products: in one process."""
    amx.hide(monkeypatch)

    def chosen(channels: int, g: int = 32, size: int = 9, **fields: Any) -> str:
        sides = {"n": 2, "size": (size, size), "filter": (3, 3), "pad": (1, 1)}
        problem = ConvProblem(c=g * channels, k=g * channels, g=g, **sides | fields)
        return str(catalog.stages(problem)[0].algorithm.pipeline.value)

    assert [chosen(channels) for channels in (3, 33)] == ["host_pixels", "host_panel"]
    assert {chosen(channels) for channels in (1, 4, 2)} <= set(NARROW)
    if rows(catalog, "pipeline = 'host_padded'"):
        copied: tuple[dict[str, Any], ...] = ({}, {"filter": (5, 5), "pad": (2, 2)}, {"stride": (2, 2)})
        assert [chosen(4, **fields) for fields in copied] == ["host_padded"] * 3
        assert chosen(4, dilation=(1, 2)) == "host_direct"
        assert [chosen(1, filter=(5, 5), pad=(2, 2)), chosen(1, size=7)] == ["host_padded", "host_depthwise"]
        in_short_rows = "host_two_rows" if rows(catalog, "pipeline = 'host_two_rows'") else "host_padded"
        assert chosen(1, size=5) == in_short_rows
    assert chosen(1, layout="ngchw") == "host_panel"
    assert chosen(1, dtype="int8") == "host_panel"
    assert chosen(2, g=2) == "host_pixels"  # no vector is full
    assert [chosen(channels, g=1, dtype="bf16") for channels in (4, 6)] == ["host_pixels", "host_panel"]
    assert chosen(64, g=1, dtype="fp32", size=14) == "host_winograd"
    for direction in ("bwd_data", "bwd_weight"):
        assert chosen(64, g=1, dtype="fp32", size=14, direction=direction) == "host_winograd"
    assert chosen(64, g=1, dtype="fp32", size=3, pad=(0, 0), direction="bwd_weight") == "host_panel"  # of one element
    # A vector holds the channels of a group, but minimal filtering takes less time.
    narrow = 2 * rows(catalog, "pipeline = 'host_direct'")[0].algorithm.vector_c
    for direction in ("forward", "bwd_data", "bwd_weight"):
        expected = "host_direct" if direction == "bwd_weight" and narrow < 24 else "host_winograd"
        assert chosen(narrow, dtype="fp32", size=14, direction=direction) == expected
    others: tuple[dict[str, Any], ...] = ({"size": 5}, {"dtype": "bf16"}, {"stride": (2, 1)}, {"dilation": (1, 2)})
    for fields in others:
        assert chosen(64, **{"g": 1, "dtype": "fp32", "size": 14} | fields) != "host_winograd"
    few = {"n": 2, "c": 3, "k": 64, "size": (9, 9), "direction": "bwd_data", "dtype": "fp32"}
    assert [
        str(catalog.stages(ConvProblem(filter=filter_, **few | fields))[0].algorithm.pipeline.value)
        for filter_, fields in (((3, 3), {}), ((3, 3), {"c": 8}), ((1, 1), {}), ((3, 3), {"c": 33}))
    ] == ["host_scatter", "host_scatter", "host_panel", "host_panel"]
    deep = ConvProblem(**few | {"size": (5, 9, 9)}, filter=(3, 1, 1))
    assert catalog.stages(deep)[0].algorithm.pipeline == "host_scatter"


@pytest.mark.parametrize("direction", ["forward", "bwd_weight"])
def test_narrow_register_tiles_are_for_few_columns(catalog: Catalog, direction: str) -> None:
    """They take longer for a column, so that some columns of zeros are better than they are."""
    if "x86_64_v4" not in ARCHES:
        pytest.skip("this CPU has no AVX-512")

    def width(columns: int) -> int:
        channels = {"c": columns, "k": 64} if direction == "bwd_weight" else {"c": 64, "k": columns}
        problem = ConvProblem(direction=direction, n=2, size=(9, 9), filter=(1, 1), dtype="fp32", **channels)
        return int(catalog.select(problem, arch="x86_64_v4").kernels[0].algorithm.warp_tile_n)

    others = {48: 64, 72: 32} if direction == "bwd_weight" else {48: 16, 72: 16}
    assert {columns: width(columns) for columns in (8, 16, 24, 48, 64, 72, 144, 224, 240)} == {
        **{8: 16, 16: 16, 24: 32, 64: 64, 144: 32, 224: 32, 240: 64},
        **others,
    }


def test_selection_asks_for_what_rules_of_the_arch_name(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, parameter = list[str](), type(CONV).parameter

    def noted(operation: Any, problem: ConvProblem, name: str) -> Any:
        asked.append(name)
        return parameter(operation, problem, name)

    monkeypatch.setattr(type(CONV), "parameter", noted)
    catalog.stages(ConvProblem(direction="bwd_data", n=2, c=3, k=5, size=(6, 7), filter=(3, 3), dtype="bf16"))
    assert "taps" in asked
    assert not REACH.keys() & asked


def test_wrong_tensors_are_a_message(catalog: Catalog) -> None:
    problem = ConvProblem(n=2, c=4, k=6, g=2, size=(5, 7), filter=(3, 3), dtype="fp32")
    x, w = make_inputs(problem, SEED).values()
    plan = catalog.plan(problem, of_plane(catalog, "forward"))
    for tensors, message in (
        ({"input": x, "weight": w[..., :1]}, r"weight is float32 \(6, 3, 3, 1\): expected float32 \(6, 3, 3, 2\)"),
        ({"input": x}, "weight is missing"),
        ({"input": x.astype(np.float16), "weight": w}, "input is float16"),
        ({"input": x, "weight": w, "bias": w}, "bias is not a tensor of this problem"),
        ({"input": x[:, ::-1], "weight": w}, "input has a stride of -"),
    ):
        with pytest.raises(TensorError, match=message):
            plan.bind(tensors)


@pytest.mark.slow
def test_commands_run_trace_and_replay(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATALOG_TRACE", str(tmp_path / "calls.jsonl"))
    fields = ("--n", 2, "--c", 6, "--k", 64, "--size", "9,11", "--filter", "3,3", "--stride", "2,1", "--pad", "1,2")
    done = command.catalog("run", "conv", *fields, "--dtype", "fp32", "--validate", db=catalog.path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^validation +passed$", done.stdout, re.MULTILINE)
    monkeypatch.delenv("CATALOG_TRACE")
    replayed = command.catalog("replay", tmp_path / "calls.jsonl", "--verify", db=catalog.path)
    assert replayed.returncode == 0, replayed.stderr
    assert "conv-n2-c6-k64-9x11-f3x3-s2x1-p1x2" in replayed.stdout
