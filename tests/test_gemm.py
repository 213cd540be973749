"""GEMM's rows: the names of upstream's generators, traits behind shared names, selection, and configurations."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest
from conftest import slow_but

from catalog.errors import GeneratorError, ProblemError, SelectionError, SpecError, UsageError
from catalog.ops import operation, problem_of
from catalog.ops.gemm.problem import GemmProblem
from catalog.rules.adopt import Adopted
from catalog.rules.lists import compare_lists, digest_of, names_of
from catalog.rules.restriction import restriction
from catalog.runtime.catalog import Catalog
from catalog.schema.lineage import Lineage
from catalog.schema.relations import Relation, expanded
from catalog.schema.spec_files import load_spec_file

DATA = Path(__file__).parent.parent / "data"
PARITY = list(csv.DictReader((DATA / "parity" / "gemm.csv").open()))
TE, DISPATCHER = "tile_engine", "dispatcher"
QUICK = [
    ("2025-11", TE, "gfx950", ("preshuffle",)),
    ("2026-05", TE, "gfx942", ("grouped",)),
    ("2026-07", DISPATCHER, "gfx90a", ("preshuffle",)),
]
LISTS = [
    *((revision, TE, arch, ()) for revision in ("2025-11", "2026-05", "2026-07") for arch in ("gfx90a", "gfx942")),
    *((revision, TE, "gfx950", ()) for revision in ("2025-11", "2026-05", "2026-07")),
    ("2025-11", TE, "gfx1201", ("preshuffle",)),
    ("2026-05", TE, "gfx1201", ("grouped", "preshuffle", "multi_d")),
    ("2026-05", DISPATCHER, "gfx950", ()),
    ("2026-05", DISPATCHER, "gfx1201", ()),
    ("2026-07", DISPATCHER, "gfx90a", ()),
    ("2026-07", DISPATCHER, "gfx942", ("preshuffle", "multi_abd")),
    ("2026-07", DISPATCHER, "gfx950", ("universal", "multi_abd")),
    ("2026-07", DISPATCHER, "gfx1201", ()),
    ("2026-07", DISPATCHER, "gfx1100", ("preshuffle",)),
]  # fmt: skip
HALF = "dtype = 'fp16' AND layout = 'rcr' AND tile_k = 64 AND warp_tile_k = 16 AND NOT persistent"
BIG = {"operation": "gemm", "m": 3840, "n": 4096, "k": 2048}


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """A catalog with some universal and multi-D kernels of the tile engine for gfx950."""
    made = Catalog(tmp_path / "catalog.db")
    spec = made.spec("gfx950", "2025-11", operation="gemm")
    some = restriction(spec, (), HALF.replace("= 'rcr'", "LIKE 'rcr%'"), None, ("universal", "multi_d"))
    made.populate("gfx950", revision="2025-11", operation="gemm", restriction=some)
    return made


def rows(catalog: Catalog, columns: str, where: str = "1") -> list[tuple[Any, ...]]:
    asked = f"SELECT {columns} FROM gemm_row WHERE {where} ORDER BY dispatch_order"
    return [tuple(row) for row in catalog.connection.execute(asked)]


@pytest.mark.parametrize(("revision", "space", "arch", "families"), slow_but(QUICK, [*QUICK, *LISTS]))
def test_the_names_are_upstreams(revision: str, space: str, arch: str, families: tuple[str, ...]) -> None:
    found = compare_lists(Catalog().spec(arch, revision, space, operation="gemm"), families)
    assert [one.key for one in found if not one.passed] == []
    listed = {
        (row["family"], row["dtype"], row["layout"]): int(row["kernels"])
        for row in PARITY
        if (row["revision"], row["space"], row["arch"]) == (revision, space, arch)
        and (not families or row["family"] in families)
    }
    assert {one.key: len(one.names) for one in found} == listed


SHARED = [
    ("2026-07", "gfx1101", "gfx1100", 60),
    ("2026-05", "gfx1200", "gfx1201", 32),
    *((revision, arch, "gfx1100", None) for revision in ("2026-05", "2026-07") for arch in ("gfx1102", "gfx1103")),
    *((revision, arch, "gfx1100", None) for revision in ("2026-05", "2026-07") for arch in ("gfx1150", "gfx1151")),
]


@pytest.mark.parametrize(("revision", "arch", "of", "units"), slow_but(SHARED[:2], SHARED))
def test_archs_of_a_family_have_the_same_rows(revision: str, arch: str, of: str, units: int | None) -> None:
    spec = Catalog().spec(arch, revision, DISPATCHER, operation="gemm")
    place = (revision, DISPATCHER, of, "preshuffle")
    listed = [row for row in PARITY if (row["revision"], row["space"], row["arch"], row["family"]) == place]
    found = compare_lists(spec, ("preshuffle",))
    assert [one.passed for one in found] == [True] * len(listed) != []
    assert spec.hardware is not None
    assert spec.hardware.family == "RDNA", "from a sibling's timings, its own may be selected"
    assert units in (None, spec.hardware.compute_units)


@pytest.mark.slow
def test_on_the_first_cdna_upstream_refuses_no_8_bit_floats_and_the_hardware_does(tmp_path: Path) -> None:
    stored = Catalog(tmp_path / "catalog.db")
    spec = stored.spec("gfx908", "2026-05", DISPATCHER, operation="gemm")
    asked = restriction(spec, (), "tile_m = 128 AND tile_n = 128 AND tile_k = 64 AND layout = 'rcr'", None)
    stored.populate("gfx908", revision="2026-05", space=DISPATCHER, operation="gemm", restriction=asked)
    tiles = "DISTINCT warp_tile_m || 'x' || warp_tile_n || 'x' || warp_tile_k"
    half = {tile for (tile,) in stored.connection.execute(f"SELECT {tiles} FROM gemm_row WHERE dtype = 'fp16'")}
    assert half == {"32x32x8", "16x16x16", "32x32x16", "16x16x32"}, "unlike gfx90a, without 4x64 and 64x4"
    listed, runs = (
        {tile for (tile,) in stored.connection.execute(f"SELECT {tiles} FROM gemm_row WHERE dtype = 'fp8' AND {which}")}
        for which in ("1", "hw_valid")
    )
    assert runs == {"32x32x16", "32x32x32", "32x32x64"} < listed


def test_stored_rows_have_the_names_of_the_join(tmp_path: Path) -> None:
    stored = Catalog(tmp_path / "catalog.db")
    spec = stored.spec("gfx90a", "2026-07", "dispatcher", operation="gemm")
    asked = restriction(spec, (), "", None, ("preshuffle",))
    done = stored.populate("gfx90a", revision="2026-07", space="dispatcher", operation="gemm", restriction=asked)
    made = names_of(spec, ["preshuffle"])
    assert done.families == {"preshuffle": sum(map(len, made.values()))}
    assert digest_of(name for (name,) in rows(stored, "name")) == digest_of(n for names in made.values() for n in names)


def test_what_is_large_is_stored_only_on_request(tmp_path: Path) -> None:
    spec = Catalog(tmp_path / "catalog.db").spec("gfx950", "2026-07", "dispatcher", operation="gemm")
    assert {name for name, one in spec.enumerations.items() if not one.on_request} == {"standard"}
    of_all = restriction(spec, (), "", None)
    assert [name for name in spec.enumerations if of_all.conditions(spec, name) is not None] == ["standard"]
    with pytest.raises(UsageError, match=r"no family 'multi_e'.*did you mean multi_d"):
        restriction(spec, (), "", None, ("multi_e",))


def test_a_name_may_stand_for_several_kernels(catalog: Catalog) -> None:
    shared = rows(
        catalog, "name, group_concat(elementwise, ' '), count(DISTINCT id)", "family = 'multi_d' GROUP BY name"
    )
    assert {(names, ids) for _, names, ids in shared} == {("MultiDMultiply MultiDAdd PassThrough", 3)}
    kernel, lineage = operation("gemm").kernel, Lineage("gemm", "gfx950", "2025-11", TE, "generic")
    assert [kernel.family_named(name, lineage) for name in (shared[0][0], "gemm_nonsense")] == ["multi_d", None]
    parsed = kernel.grammar("multi_d", lineage).parse(shared[0][0])
    assert parsed is not None
    assert (parsed["dtype_acc"], parsed["double_buffer"], parsed["layout"]) == ("fp32", False, "rcrr")


def test_kernels_known_to_be_wrong_are_listed_and_not_selected(catalog: Catalog) -> None:
    wrong = "epilogue = 'cshuffle' AND tile_m = 192 AND wave_m = 2 AND wave_n = 2 AND warp_tile_m = 32"
    assert {valid for (valid,) in rows(catalog, "hw_valid", wrong)} == {0}
    assert {valid for (valid,) in rows(catalog, "hw_valid", wrong.replace("cshuffle", "default"))} == {1}
    kept = catalog.candidates(problem_of(BIG), arch="gfx950", revision="2025-11", limit=10_000)
    names = {one.kernel.name for one in kept}
    assert names
    assert names.isdisjoint(name for (name,) in rows(catalog, "name", wrong))


def test_a_problem_finds_the_rows_whose_tiles_divide_it(catalog: Catalog) -> None:
    select = partial(catalog.candidates, arch="gfx950", revision="2025-11", limit=10_000)
    best = select(problem_of(BIG))
    assert all(2048 % one.kernel.algorithm.tile_k == 0 for one in best)
    assert {
        one.kernel.signature.layout for one in select(problem_of(BIG | {"num_d": 2, "elementwise": "MultiDAdd"}))
    } == {"rcrr"}
    steps, kept = catalog.narrowing(problem_of(BIG | {"k": 131}), arch="gfx950", revision="2025-11")
    assert not kept
    assert "a_divisible" in {step.id for step in steps if step.rejects}
    with pytest.raises(SelectionError):
        catalog.select(problem_of(BIG | {"k": 131}), arch="gfx950", revision="2025-11")


def test_upstreams_rows_take_no_epilogue_of_the_call(catalog: Catalog) -> None:
    select = partial(catalog.candidates, arch="gfx950", revision="2025-11", limit=1)
    for more in ({}, {"batch": 3}, {"k_batch": 4}):
        assert select(problem_of(BIG | more))
    for more in ({"bias": True}, {"alpha": 2}, {"beta": 1}, {"activation": "relu"}):
        with pytest.raises(SelectionError, match="general=1"):
            select(problem_of(BIG | more))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": -1}, "k=-1: expected an integer from 0"),
        ({"layout": "rcc"}, "layout='rcc' is not allowed"),
        ({"dtype": "int8", "num_d": 1}, "num_d=1 and elementwise=PassThrough contradict each other"),
        ({"m": 2**31 - 1, "n": 2**31 - 1, "k": 2**31 - 1}, "do not fit in 63 bits"),
    ],
)
def test_a_wrong_problem_is_a_message(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        GemmProblem(**{"m": 64, "n": 64, "k": 64, **fields})


@pytest.mark.parametrize("layout", ["rcr", "rrr", "crr", "ccr"])
def test_the_reference_is_the_same_in_every_layout(layout: str) -> None:
    problem = GemmProblem(m=5, n=7, k=33, dtype="fp32", layout=layout, num_d=1, elementwise="MultiDAdd")
    rng = np.random.default_rng(0)
    a, b, d = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 33), (33, 7), (5, 7)))
    stored = {"a": a if layout[0] == "r" else a.T, "b": b if layout[1] == "r" else b.T, "d0": d}
    assert {name: array.shape for name, array in stored.items()} | {"c": (5, 7)} == dict(problem.shapes)
    of = operation("gemm")
    expected = of.reference(problem, stored)["c"]
    np.testing.assert_allclose(expected, a.astype(np.float64) @ b + d)
    allowed = of.tolerances(problem, stored)["c"]
    assert allowed.allows(a @ b + d, expected)
    assert not allowed.allows((a @ b + d) * np.float32(1.001), expected)


@pytest.mark.usefixtures("hip_machine")
def test_the_command_line_lists_explains_and_says_what_a_build_needs(tmp_path: Path) -> None:
    run: Callable[..., subprocess.CompletedProcess[str]] = partial(command.catalog, db=tmp_path / "catalog.db")
    words = ("--arch", "gfx90a", "--space", TE, "--revision", "2025-11")
    done = run("populate", "gemm", *words, "--family", "universal", "--where", HALF)
    assert "of gfx90a (revision 2025-11, space tile_engine) in" in done.stdout, done.stderr
    asked = ("query", "dtype='fp16' AND layout='rcr'", "--operation", "gemm", "--arch", "gfx90a")
    (header, *names) = run(*asked, "--columns", "name", "--format", "csv").stdout.splitlines()
    assert header == "name"
    assert all(name.startswith("gemm_fp16_rcr_") for name in names)
    assert int(run("query", HALF, "--count").stdout) == len(names) > 0
    stated = ("family=universal", "dtype=fp16", "warp_tile_m=64", "warp_tile_n=8")
    explained = run("explain", "gemm", *words[:2], "--revision", "2025-11", *stated).stdout
    assert "rejected by: warp_tile_m, warp_tile_n, warp_tile" in explained
    quirks = run("rules", "--operation", "gemm", *words[:2], "--revision", "2025-11", "--format", "json")
    assert {row["id"] for row in json.loads(quirks.stdout) if row["quirk"]} == {"lds_capacity"}
    built = run("build", HALF, "--operation", "gemm", *words[:2], "--limit", 1)
    assert "kernels of AMD archs come from a CK checkout, and none is named" in built.stderr + built.stdout
    assert run("populate", "gemm", "--operation", "attention", "--arch", "gfx90a").returncode == 2


def config(path: Path, **changes: Any) -> Path:
    tile: dict[str, Any] = {f"tile_{axis}": {"min": 64, "max": 128, "step": 64} for axis in "mnk"}
    tile |= {"warp_m": {"values": [2]}, "warp_n": {"values": [2]}, "warp_k": {"values": [1]}}
    tile |= {f"warp_tile_{axis}": {"values": [16]} for axis in "mnk"}
    traits = {"pipeline": {"values": ["compv3"]}, "scheduler": {"values": ["intrawave"]}, "pad_k": {"values": [True]}}
    document: dict[str, Any] = {"tile_config": tile, "trait_config": traits, "k_block_per_cu": 2}
    for place, value in changes.items():
        document[place] = document.get(place, {}) | value if isinstance(value, dict) else value
    path.write_text(json.dumps(document))
    return path


def test_a_configuration_of_upstreams_replaces_the_axes(tmp_path: Path) -> None:
    stored = Catalog(tmp_path / "catalog.db")
    spec = stored.spec("gfx942", "2025-11", operation="gemm")
    axes = restriction(spec, (config(tmp_path / "my.json"),), "", None)
    done = stored.populate("gfx942", revision="2025-11", operation="gemm", restriction=axes)
    assert list(done.families) == ["universal"]
    made = rows(stored, "DISTINCT warp_tile_m, pipeline, pad_k, block_per_cu, wave_m")
    assert made == [(16, "compv3", 1, 2, 2)]
    assert {m for (m,) in rows(stored, "DISTINCT tile_m")} == {64, 128}
    unchanged = stored.populate("gfx942", revision="2025-11", operation="gemm", restriction=axes)
    assert unchanged.unchanged


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_config": {"tile_q": {"values": [1]}}}, "no axis is called 'tile_q'"),
        ({"tile_config": {"tile_m": {"min": 1, "max": 9, "step": 0}}}, "tile_config.tile_m: must be"),
        ({"tile_config": {"tile_m": {"min": 1, "max": 10**9, "step": 1}}}, "more than 1,024 values"),
        ({"tile_config": {"tile_m": {"values": ["wide"]}}}, "tile_m cannot be 'wide'"),
        ({"tile_config": {"tile_m": {"values": ["12x3"]}}}, "tile_m cannot be '12x3'"),
        ({"tile_config": {"tile_m": {"values": [2**70]}}}, "tile_m: integers must be from 0 to 2147483647"),
        ({"trait_config": {"pipeline": {"values": ["compv9"]}}}, "pipeline cannot be 'compv9'"),
        ({"trait_config": [1]}, "trait_config: must be an object"),
        ({"tiles": {}}, "no field is called 'tiles'"),
    ],
)
def test_a_wrong_configuration_is_a_message(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    spec = Catalog(tmp_path / "catalog.db").spec("gfx942", "2025-11", operation="gemm")
    with pytest.raises(UsageError, match=message):
        restriction(spec, (config(tmp_path / "my.json", **changes),), "", None)


BUILDER = """
import argparse, pathlib
parser = argparse.ArgumentParser()
for option in ("working_path", "gpu_target", "datatype", "layout", "config_json"):
    parser.add_argument("--" + option, required=True)
parser.add_argument("--list_kernels", action="store_true")
asked = parser.parse_args()
assert pathlib.Path(asked.config_json).name == "default_config.json"
names = pathlib.Path(__file__).with_name(asked.datatype + ".txt").read_text().split()
listed = pathlib.Path(asked.working_path, "gemm_preshuffle_kernel_list.txt")
listed.write_text("".join(f"{name}|tile|traits\\n" for name in names))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose tile engine has one builder, which lists what a file beside it says."""
    folder = tmp_path / "ck" / "tile_engine" / "ops" / "gemm_preshuffle"
    folder.mkdir(parents=True)
    (folder / "gemm_preshuffle_instance_builder.py").write_text(BUILDER)
    (folder / "configs").mkdir()
    (folder / "configs" / "default_config.json").write_text(json.dumps({"k_block_per_cu": 1, "permute_n": True}))
    for (_, dtype, _), names in names_of(Catalog().spec("gfx90a", "2025-11", operation="gemm"), ["preshuffle"]).items():
        (folder / f"{dtype}.txt").write_text("\n".join(names))
    return tmp_path / "ck"


def test_a_checkouts_own_builder_is_compared(checkout: Path, tmp_path: Path) -> None:
    run = partial(command.catalog, "parity", "--operation", "gemm", "--ck-root", checkout, db=tmp_path / "catalog.db")
    done = run("--arch", "gfx90a")
    assert (done.returncode, done.stdout) == (0, "PASS: 552 kernels in 4 lists (gfx90a, 2025-11, tile_engine)\n")
    (listed,) = checkout.rglob("bf16.txt")
    first, *others = listed.read_text().split()
    listed.write_text("\n".join([*others, "gemm_preshuffle_new"]))
    done = run("--arch", "gfx90a")
    assert done.returncode == 1
    assert {f"  + {first}", "  - gemm_preshuffle_new"} <= set(done.stdout.splitlines())
    listed.unlink()
    done = run("--arch", "gfx90a")
    assert done.returncode == 2
    assert "Error: " in done.stderr
    assert "bf16.txt" in done.stderr
    assert not list(checkout.rglob("__pycache__"))


@pytest.mark.slow
def test_what_a_checkouts_builder_lists_becomes_rows(checkout: Path, tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    (listed,) = checkout.rglob("bf16.txt")
    first, second, *others = sorted(listed.read_text().split())
    new = first.replace("_False_", "_True_", 1)
    listed.write_text("\n".join([new, second.replace("preshufflev2", "preshufflev3"), *others]))
    (config,) = checkout.rglob("default_config.json")
    config.write_text(json.dumps({"k_block_per_cu": 2, "permute_n": True}))
    adopt = partial(catalog.populate, "gfx90a", operation="gemm", ck_root=checkout.parent, label="my-ck")
    done = adopt()
    assert isinstance(done, Adopted)
    assert (done.names, done.common, done.families) == (552, 550, {"preshuffle": 551})
    [unknown] = done.unknown
    assert (unknown.part, unknown.place) == ("_preshufflev3", "a value of pipeline")
    mine = "revision = 'my-ck'"
    assert rows(catalog, "DISTINCT base, permute_n, block_per_cu", mine) == [("2025-11", 1, 2)]
    assert rows(catalog, "pad_m, dtype_c", f"{mine} AND name = '{new}'") == [(1, "bf16")]
    [kernel] = catalog.kernels(f"{mine} AND name = '{new}'")
    assert kernel.name == new
    assert adopt().unchanged
    listed.write_text("\x1b[31mrubbish\n")
    with pytest.raises(GeneratorError, match="line 1 of the list for preshuffle bf16 rcr is not a kernel"):
        adopt(force=True)
    listed.write_text("\n".join([new, *others]))
    config.write_text(json.dumps({"permute_n": True}))
    with pytest.raises(UsageError, match="another state of the generator"):
        adopt()
    adopt(label="plain")
    found = catalog.diff("gfx90a", "my-ck", "plain", operation="gemm")
    assert {change.traits for family in found.families for change in family.changed} == {"block_per_cu 2 -> 1"}
    with pytest.raises(UsageError, match="only its checkout lists its kernels for gfx942") as error:
        catalog.spec("gfx942", "plain", operation="gemm")
    assert str(error.value.hint).endswith("tile_engine/ops --arch gfx942 --label plain")
    assert catalog.forget_revision("my-ck", operation="gemm").kernels == 551


def test_every_elementwise_function_is_a_list_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "tile_engine" / "ops" / "gemm_multi_d"
    (folder / "configs").mkdir(parents=True)
    (folder / "gemm_multi_d_instance_builder.py").touch()
    with pytest.raises(GeneratorError, match=r"default_config\.json: not a configuration"):
        operation("gemm").generator(folder, 30).runs("gfx942", "generic", ())
    (folder / "configs" / "default_config.json").write_text("{}")
    runs = operation("gemm").generator(folder, 30).runs("gfx942", "generic", ())
    assert len(runs) == 4 * 3
    assert {(run.traits["layout"], run.traits["num_d"]) for run in runs} == {
        (layout, 2) for layout in ("rcrr", "rrrr", "crrr", "ccrr")
    }
    assert {run.traits["elementwise"] for run in runs} == {"MultiDMultiply", "MultiDAdd", "PassThrough"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--ck-root", "."), 2, "holds no tile engine of CK"),
        (("--family", "batched"), 2, "family=batched is not allowed"),
        (("--revision", "2026-07", "--family", "grouped"), 2, "there is no reference list for gfx950"),
        (("--space", "ck"), 2, "no space is called 'ck'"),
    ],
)
def test_parity_without_a_reference_is_a_message(
    tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    shown = [str(tmp_path) if word == "." else word for word in words]
    done = command.catalog("parity", "--operation", "gemm", *shown, db=tmp_path / "catalog.db")
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_quantities_are_replaced_outside_of_strings() -> None:
    quantities = {"waves": "wave_m * wave_n", "block": "waves * 64"}
    assert expanded("block = 'waves' OR waves_m > waves", quantities) == (
        "((wave_m * wave_n) * 64) = 'waves' OR waves_m > (wave_m * wave_n)"
    )


def test_rows_of_relations_are_written_in_short() -> None:
    relation = Relation(
        columns=["dtype", "wave_m", "wave_n"], rows=[{"of": ["fp16", "bf16"], "rows": ["4x1", None]}, ["fp8", 1, 2]]
    )
    assert list(relation.cells()) == [
        *(("fp16", 4, 1), ("fp16", None, None), ("bf16", 4, 1), ("bf16", None, None)),
        ("fp8", 1, 2),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relations": {"axis": {"columns": ["tile_q"], "rows": [1]}}}, "relations.axis: no trait is called 'tile_q'"),
        ({"relations": {"axis": {"columns": ["tile_m"], "rows": ["x"]}}}, "relations.axis: tile_m cannot be 'x'"),
        ({"relations": {"axis": {"columns": ["tile_m"], "rows": [[1, 2]]}}}, "has 2 values for 1 columns"),
        ({"relations": {"axis": {"rows": [1]}}}, "relations.axis: columns are missing"),
        ({"join": ["axes"]}, "join names the relation 'axes'; there are: axis"),
        ({"constraints": [{"expr": "tiles > 1"}]}, "no such column: tiles"),
        ({"constraints": [{"expr": "tile_m > 1", "enumerations": ["b"]}]}, "no enumeration is called 'b'"),
    ],
)
def test_a_wrong_spec_is_a_message(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    about = {"id": "rule", "reason": "why", "source": "where"}
    path = tmp_path / "2026-05" / "my_arch.json"
    path.parent.mkdir()
    spec = {
        "arch": "my_arch",
        "revision": "2026-05",
        "space": TE,
        "relations": change.get("relations", {"axis": {"columns": ["tile_m"], "rows": [64]}}),
        "constraints": [about | rule for rule in change.get("constraints", ())],
        "enumerations": {"a": {"join": change.get("join", ["axis"]), "yields": [{"family": "universal"}]}},
    }
    path.write_text(json.dumps(spec))
    with pytest.raises(SpecError, match=message):
        load_spec_file(path, of="gemm")
