"""Convolution's rows: the names of upstream's rule sets and sweeps, what is possible, configurations, and selection."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest
from conftest import slow_but

from catalog.errors import ProblemError, UsageError
from catalog.ops import operation
from catalog.ops.conv.problem import ConvProblem
from catalog.ops.conv.reach import reachable
from catalog.rules.lists import compare_lists
from catalog.rules.restriction import restriction
from catalog.runtime.catalog import Catalog
from catalog.schema.lineage import Lineage

CONV = operation("conv")
DATA = Path(__file__).parent.parent / "data"
PARITY = list(csv.DictReader((DATA / "parity" / "conv.csv").open()))
LISTS = [
    ("2026-05", "gfx942"),
    *(("2026-07", arch) for arch in ("gfx90a", "gfx942", "gfx950", "gfx1201")),
    *(("2026-05", arch) for arch in ("gfx90a", "gfx950")),
]
IMAGES = {"n": 32, "c": 64, "k": 128, "size": (56, 56), "filter": (3, 3), "pad": (1, 1), "dtype": "bf16"}


@pytest.mark.parametrize(("revision", "arch"), slow_but(LISTS[:1], LISTS))
def test_the_names_are_upstreams(revision: str, arch: str) -> None:
    found = compare_lists(Catalog().spec(arch, revision, operation="conv"))
    assert [one.key for one in found if not one.passed] == []
    listed = {
        (row["receipt"], row["direction"], row["dtype"], int(row["ndim"])): int(row["kernels"])
        for row in PARITY
        if (row["revision"], row["arch"]) == (revision, arch)
    }
    assert {one.key: len(one.names) for one in found} == listed


def any_problem(rng: random.Random) -> ConvProblem:
    """A problem of any geometry, often an extreme one."""
    while True:
        g, ndim = rng.choice((1, 2, 8)), rng.randint(1, 3)
        channels = {name: g * rng.choice((1, 2, 4, 24, 2**26)) for name in "ck"}
        extents = {
            name: [rng.choice((low, 1, 2, 3, 7, 130, most)) for _ in range(ndim)]
            for name, low, most in (("size", 1, 2**31 - 1), ("filter", 1, 40), ("stride", 1, 2**31 - 1))
        }
        extents |= {"dilation": [rng.choice((1, 1, 2, 9, 300)) for _ in range(ndim)]}
        extents |= {"pad": [rng.choice((0, 0, 1, 50, 3000)) for _ in range(ndim)]}
        direction = rng.choice(("forward", "bwd_data", "bwd_weight"))
        try:
            return ConvProblem(direction=direction, n=rng.choice((0, 1, 9)), g=g, dtype="bf16", **channels, **extents)
        except ProblemError:
            continue  # the filter is larger than the image, or sizes multiply to too much


def test_parameters_fit_sqlite_and_their_form() -> None:
    """Each is a 64-bit integer; those that are not said to vary are the same for all problems of a form."""
    rng = random.Random(2026)  # noqa: S311
    fixed = {*CONV.parameters} - {*CONV.varying}
    for _ in range(500):
        one = any_problem(rng)
        try:
            other = one.model_copy(update={"n": 3, "c": 2 * one.c, "size": [1 + extent for extent in one.size]})
        except ProblemError:
            continue
        assert one.form is other.form
        values = {name: CONV.parameter(one, name) for name in CONV.parameters}
        assert all(-(2**63) <= value < 2**63 for value in values.values()), (one.key, values)
        for name in fixed - one.extents.keys():
            assert values[name] == CONV.parameter(other, name), (name, one.key)


def test_tma_reaches_a_gradient_if_it_reaches_each_phase() -> None:
    """Corners of each phase's box in the output, and offsets in it, on three axes: im2col.hpp."""
    rng, answers = random.Random(2026), [0, 0]  # noqa: S311

    def sides(most: int) -> list[int]:
        return [rng.randint(1, most) for _ in range(3)]

    def reached(axis: tuple[int, ...]) -> Iterator[bool]:
        size, out, taps, stride, dilation, pad = axis
        for first in range(min(stride, size)):
            places = [first + pad - dilation * tap for tap in range(taps)]
            met = [place // stride for place in places if place % stride == 0]
            if met:
                upper = met[-1] + len(range(first, size, stride)) - out
                yield -16 <= met[-1] < 16 and -16 <= upper < 16 and met[0] - met[-1] < 32

    for _ in range(2000):
        geometry = {"size": sides(60), "filter": sides(9), "stride": sides(9), "dilation": sides(4), "pad": sides(30)}
        if rng.random() < 0.5:
            geometry |= {"stride": sides(70), "dilation": sides(40), "pad": sides(200)}
        try:
            problem = ConvProblem(direction="bwd_data", n=1, c=1, k=1, **geometry)
        except ProblemError:
            continue  # the filter is larger than the image
        of_axes = (problem.size, problem.out, problem.filter, problem.stride, problem.dilation, problem.pad)
        expected = all(one for axis in zip(*of_axes, strict=True) for one in reached(axis))
        assert reachable(problem) == expected, problem.key
        answers[expected] += 1
    assert min(answers) > 100


@pytest.fixture
def sweep(tmp_path: Path) -> Catalog:
    """A catalog with the tile engine's backward weights of one tile."""
    catalog = Catalog(tmp_path / "catalog.db")
    some = restriction(
        catalog.spec("gfx942", operation="conv"), (), "tile_m = 64 AND tile_k = 64", None, ("bwd_weight",)
    )
    catalog.populate("gfx942", operation="conv", restriction=some)
    return catalog


def rows(catalog: Catalog, columns: str, where: str = "1") -> list[tuple[Any, ...]]:
    asked = f"SELECT {columns} FROM conv_row WHERE {where} ORDER BY dispatch_order"
    return [tuple(row) for row in catalog.connection.execute(asked)]


def test_configurations_that_share_a_name_are_rows(sweep: Catalog) -> None:
    [(kernels, names, pipelines)] = rows(
        sweep, "count(id), count(DISTINCT name), count(DISTINCT pipeline)", "tile_n = 64"
    )
    assert (kernels, names, pipelines) == (512, 128, 8)
    shared, shows = rows(sweep, "name, group_concat(DISTINCT pipeline)", "tile_n = 64 GROUP BY name")[0]
    assert "_compv3_" in shared
    assert {"compv3", "compv4", "basic_v1"} < set(shows.split(","))
    grammar = operation("conv").kernel.grammar(
        "bwd_weight", Lineage("conv", "gfx942", "2026-05", "tile_engine", "generic")
    )
    parsed = grammar.parse(shared)
    assert parsed is not None
    assert (parsed["direction"], parsed["pipeline"], parsed["dtype_acc"]) == ("bwd_weight", "compv3", "fp32")


def test_kernels_known_to_be_wrong_are_listed_and_not_selected(sweep: Catalog) -> None:
    wrong = "scheduler = 'interwave' AND pipeline IN ('basic_v1', 'mem')"
    assert {valid for (valid,) in rows(sweep, "hw_valid", wrong)} == {0}
    assert {valid for (valid,) in rows(sweep, "hw_valid", wrong.replace("interwave", "intrawave"))} == {1}
    problem = ConvProblem(direction="bwd_weight", **IMAGES)
    kept = {one.kernel.name for one in sweep.candidates(problem, arch="gfx942", limit=10_000)}
    assert kept
    assert kept.isdisjoint(name for (name,) in rows(sweep, "name", f"{wrong} AND pipeline = 'mem'"))
    plain = ConvProblem(**{**IMAGES, "direction": "bwd_weight", "c": 30})
    steps, left = sweep.narrowing(plain, arch="gfx942")
    assert not left
    assert {step.id for step in steps if step.rejects} & {"loads_of_b_whole", "stores_whole"}


@pytest.mark.slow
def test_the_rule_set_of_the_command_line_and_its_fallback(tmp_path: Path) -> None:
    run = partial(command.catalog, db=tmp_path / "catalog.db")
    done = run("populate", "conv", "--arch", "gfx90a", "--revision", "2026-07", "--rule-set", "full")
    assert "of gfx90a (revision 2026-07, space ck)" in done.stdout, done.stderr
    (header, *names) = run(
        *("query", "direction='forward'", "--operation", "conv", "--columns", "name", "--format", "csv")
    ).stdout.splitlines()
    forward = [
        row for row in PARITY if (row["arch"], row["receipt"], row["direction"]) == ("gfx90a", "full", "forward")
    ]
    assert header == "name"
    assert len(names) == sum(int(row["kernels"]) for row in forward)
    tile = ("direction=forward", "dtype=fp16", "tile_m=16", "tile_n=16", "tile_k=64")
    explain = ("explain", "conv", "--arch", "gfx90a", "--revision", "2026-07", "family=forward", *tile)
    found = json.loads(run(*explain, "wave_m=1", "wave_n=1", "--format", "json").stdout)
    assert ("fallback", "no_strategy_is_possible", "holds") in {
        (one["kind"], one["id"], one["verdict"]) for one in found
    }
    rules = run("rules", "--operation", "conv", "--arch", "gfx90a", "--revision", "2026-07", "--kind", "fallback")
    assert "all its waves and matrix instructions" in rules.stdout


def instance(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {f"{kind}_{axis}": 32 for kind in ("tile", "warp_tile") for axis in "mnk"}
    fields |= {f"warp_{axis}": 1 for axis in "mnk"} | {f"vector_size_{tensor}": 8 for tensor in "abc"}
    return fields | {"id": 0, "pipeline": "compv3", "scheduler": "intrawave", "epilogue": "cshuffle"} | changes


def config(path: Path, *instances: Any, **changes: Any) -> Path:
    document = {"variant": "bwd_weight", "ndim_spatial": 3, "layout": "ndhwgc", "datatype": "bf16"}
    path.write_text(json.dumps(document | {"instances": instances} | changes))
    return path


DEPTHWISE = dict.fromkeys(
    ("tile_h", "tile_w", "str_h", "str_w", "pad_h", "pad_w", "nbatch", "sub_h", "sub_w", "in_vec", "out_vec"), 1
)


def test_configurations_of_upstreams_list_kernels_one_by_one(tmp_path: Path) -> None:
    stored = Catalog(tmp_path / "catalog.db")
    spec = stored.spec("gfx942", "2026-07", operation="conv")
    streams = {"streamk_enabled": True, "streamk_reduction_strategy": "TREE", "two_stage": True}
    files = (
        config(tmp_path / "products.json", instance(), instance(id=1), instance(**streams)),
        config(
            tmp_path / "depthwise.json",
            DEPTHWISE | {"filt": 3},
            variant="forward_depthwise",
            ndim_spatial=2,
            layout="ngchw",
        ),
    )
    done = stored.populate(
        "gfx942", revision="2026-07", operation="conv", restriction=restriction(spec, files, "", None)
    )
    assert done.families == {"bwd_weight": 2, "depthwise": 1}
    tile = "compv3_cshuffle_intrawave_32x32x32_1x1x1_32x32x32_vec8_8_8"
    assert sorted(name for (name,) in rows(stored, "name")) == [
        f"grouped_conv_bwd_weight_bf16_ndhwgc_3d_{tile}",
        f"grouped_conv_bwd_weight_bf16_ndhwgc_3d_{tile}_2stage_streamk_tree",
        "grouped_conv_fwd_depthwise_bf16_ngchw_2d_1x1_f3_s1x1_p1x1_nb1_sub1x1_vec1_1",
    ]
    problem = ConvProblem(
        **{**IMAGES, "direction": "bwd_weight", "size": (8, 8, 8), "filter": (3,) * 3, "pad": (1,) * 3}
    )
    [best, *_] = stored.candidates(problem, arch="gfx942", revision="2026-07", limit=2)
    assert best.kernel.signature.layout == "ndhwgc"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instances": [{}]}, r"instances\[0\]: tile_m is missing"),
        ({"instances": [instance(tile_q=1)]}, "no field is called 'tile_q'"),
        ({"instances": [instance(pipeline="compv9")]}, "pipeline cannot be 'compv9'"),
        ({"instances": [3]}, r"instances\[0\]: must be an object"),
        ({"variant": "sideways"}, "variant: 'sideways' is not allowed"),
        ({"ndim_spatial": 4}, "ndim_spatial: 4 is not allowed"),
    ],
)
def test_a_wrong_configuration_is_a_message(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    spec = Catalog(tmp_path / "catalog.db").spec("gfx942", "2026-07", operation="conv")
    with pytest.raises(UsageError, match=message):
        restriction(spec, (config(tmp_path / "my.json", **{"instances": [instance()], **changes}),), "", None)


def test_a_sweep_of_the_users_own_replaces_the_axes(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    traits = {"data_type": ["fp16"], "pipeline": ["mem"], "num_groups_to_merge": [4], "ndim_spatial": [1]}
    values = {name: {"values": its} for name, its in traits.items()}
    path.write_text(json.dumps({"variant": "bwd_data", "trait_config": values}))
    stored = Catalog(tmp_path / "catalog.db")
    asked = restriction(stored.spec("gfx950", operation="conv"), (path,), "", None)
    done = stored.populate("gfx950", operation="conv", restriction=asked)
    assert done.families == {"bwd_data": 10 * 2 * 2 * 2}
    assert rows(stored, "DISTINCT dtype, pipeline, num_groups_to_merge, ndim, direction") == [
        ("fp16", "mem", 4, 1, "bwd_data")
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": (4,) * 4, "filter": (1,) * 4, "pad": (0,) * 4}, "size has 4 extents"),
        ({"filter": (3,)}, "filter has 1 numbers, but size has 2"),
        ({"g": 3}, "c=64 is not a multiple of g=3"),
        ({"size": (1, 56), "pad": (0, 0)}, "reaches over 3 elements along axis 0, the padded input has 1"),
        ({"dtype": "int8", "direction": "bwd_data"}, "int8 has no gradients"),
        ({"stride": (0, 1)}, "stride.*0"),
    ],
)
def test_a_wrong_problem_is_a_message(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        ConvProblem(**{**IMAGES, **changes})


def drawn(problem: ConvProblem, name: str, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(problem.shapes[name])


@pytest.mark.parametrize("layout", ["nhwgc", "ngchw"])
@pytest.mark.parametrize(
    "fields",
    [
        {"size": (7,), "filter": (3,), "pad": (2,), "stride": (2,), "c": 6, "k": 4, "g": 2},
        {"size": (6, 5), "filter": (3, 2), "pad": (1, 0), "dilation": (2, 1), "c": 3, "k": 3, "g": 3},
        {"size": (4, 5, 3), "filter": (2, 1, 3), "stride": (1, 2, 3), "pad": (0, 1, 2), "c": 2, "k": 5},
    ],
)
def test_the_reference_is_the_definition_and_its_gradients(layout: str, fields: dict[str, Any]) -> None:
    forward, data, weight = (
        ConvProblem(n=2, dtype="fp32", layout=layout, direction=direction, **fields)
        for direction in ("forward", "bwd_data", "bwd_weight")
    )
    of = operation("conv")
    x, w, dy = drawn(forward, "input", 0), drawn(forward, "weight", 1), drawn(data, "output", 2)
    y = of.reference(forward, {"input": x, "weight": w})["output"]
    assert y.shape == dy.shape
    dx = of.reference(data, {"output": dy, "weight": w})["input"]
    dw = of.reference(weight, {"input": x, "output": dy})["weight"]
    np.testing.assert_allclose([(dx * x).sum(), (dw * w).sum()], (dy * y).sum(), rtol=1e-12)
    last = layout == "nhwgc"
    x, w, y = (np.moveaxis(tensor, -1, 1) if last else tensor for tensor in (x, w, y))
    padded = np.pad(x, ((0, 0), (0, 0), *((pad, pad) for pad in forward.pad)))
    per_group, outs = w.shape[1], forward.k // forward.g
    for image, out, *place in np.ndindex(*y.shape):
        first = out // outs * per_group
        window = tuple(
            slice(at * step, at * step + apart * (reach - 1) + 1, apart)
            for at, step, apart, reach in zip(place, forward.stride, forward.dilation, forward.filter, strict=True)
        )
        seen = padded[(image, slice(first, first + per_group), *window)]
        assert np.isclose(y[(image, out, *place)], (seen * w[out]).sum())


def test_a_tolerance_holds_for_float32_and_not_for_less() -> None:
    problem = ConvProblem(n=1, c=32, k=8, size=(6, 6), filter=(3, 3), dtype="fp32")
    x, w = (drawn(problem, name, seed).astype(np.float32) for seed, name in enumerate(("input", "weight")))
    of, given = operation("conv"), {"input": x, "weight": w}
    expected, allowed = of.reference(problem, given)["output"], of.tolerances(problem, given)["output"]
    assert allowed.allows(expected.astype(np.float32), expected)
    assert not allowed.allows(expected.astype(np.float16).astype(np.float32), expected)
