"""The second revision is data: the same engine gives its kernels, names and selections too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from hypothesis import given, settings
from test_schema import named_rows

from catalog.build import targets
from catalog.build.builder import Builder, CompileError
from catalog.errors import SelectionError
from catalog.ops.attention.kernel import AttentionKernel
from catalog.ops.attention.names import GRAMMARS, Grammar, grammar_of, parse_name
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.traits import TRAITS, Family
from catalog.rules.parity import Comparison
from catalog.runtime.build_run import BuildRun
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.here import resolve_arch

REVISION = "2025-07"

RECEIPTS = (0, 1, 2, 3, 4, 100, 200, 300, 400, 600)
COUNTS = {
    "generic": (24_174, 27_342, 5_367, 6_774, 2_943, 17_994, 13_923, 18_750, 14_094, 17_667),
    "simplified": (16_278, 18_390, 3_707, 4_662, 2_075, 12_158, 9_411, 12_646, 9_526, 11_939),
}
DEFAULT, EXTENDED = COUNTS["generic"][:2]


def parity(catalog: Catalog, receipt: int, arch: str = "gfx942", mask_impl: str = "generic") -> Comparison:
    return catalog.parity(arch, receipt, revision=REVISION, mask_impl=mask_impl)


@pytest.fixture(scope="module")
def catalog(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """Every kernel of the revision on gfx942, generic masks. Read it only."""
    return Catalog(shutil.copy(populated("gfx942", REVISION), tmp_path_factory.mktemp(REVISION) / "catalog.db"))


@pytest.mark.parametrize("mask_impl", slow_but(["generic"], ["generic", "simplified"]))
@pytest.mark.parametrize("arch", slow_but(["gfx942"], ["gfx90a", "gfx942", "gfx950"]))
def test_names_and_receipts_are_upstreams(
    populated: Callable[..., Path], tmp_path: Path, arch: str, mask_impl: str
) -> None:
    catalog = Catalog(shutil.copy(populated(arch, REVISION, mask_impl), tmp_path / "catalog.db"))
    for receipt, count in zip(RECEIPTS, COUNTS[mask_impl], strict=True):
        comparison = parity(catalog, receipt, arch, mask_impl)
        assert comparison.passed, comparison.report()
        assert len(comparison.reference) == count
    assert catalog.populate(arch, revision=REVISION, mask_impl=mask_impl).kernels == COUNTS[mask_impl][1]


CONSTRAINTS = [
    ("group_mode_padding", {family.value for family in Family} - {"fwd_appendkv"}),
    ("soft_cap_excludes_bias", {"fwd", "fwd_splitkv", "fwd_pagedkv", "batch_prefill"}),
    ("inference_only_hdims", {"fwd"}),
    ("no_wg32_dropout", {"bwd_dq_dk_dv"}),
    ("dbias_needs_bias", {"bwd_dq_dk_dv"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("constraint", "families"), slow_but(CONSTRAINTS[:1], CONSTRAINTS))
def test_every_constraint_bites(specs: Path, tmp_path: Path, constraint: str, families: set[str]) -> None:
    """Without it the catalog has kernels that upstream does not list, of those families alone."""
    path = specs / "arch_specs" / REVISION / "ck.json"
    spec = json.loads(path.read_text())
    for enumeration in spec["enumerations"].values():
        enumeration["constraints"] = [c for c in enumeration.get("constraints", ()) if c["id"] != constraint]
    path.write_text(json.dumps(spec))
    comparison = parity(Catalog(tmp_path / "catalog.db"), 0)
    assert not comparison.missing
    assert set(comparison.extra) == families


@pytest.mark.slow
def test_every_row_survives_both_round_trips(catalog: Catalog) -> None:
    rows = catalog.connection.execute("SELECT * FROM attention_row").fetchall()
    assert len(rows) == EXTENDED
    for row in rows:
        kernel = AttentionKernel.from_row(row)
        written = kernel.to_row()
        assert (kernel.id, kernel.name) == (row["id"], row["name"])
        assert parse_name(row["name"]) == {name: written[name] for name in ("target", *TRAITS)}


@given(named_rows(REVISION))
@settings(max_examples=300)
def test_a_parsed_name_writes_the_same_name(named: tuple[Grammar, dict[str, Any]]) -> None:
    grammar, row = named
    name = grammar.name(row | {"target": "gfx942"})
    parsed = grammar.parse(name)
    assert parsed is not None
    assert grammar.name(parsed) == name


def test_families_that_were_not_renamed_share_their_grammar() -> None:
    same = {family for family in Family if grammar_of(family, REVISION) is GRAMMARS[family]}
    assert same == {Family.FWD_SPLITKV_COMBINE, Family.FWD_APPENDKV}
    assert all(grammar_of(family, "2026-05") is GRAMMARS[family] for family in Family)


def test_receipt_1_adds_kernels_that_no_other_receipt_lists(catalog: Catalog) -> None:
    rows = catalog.connection.execute(
        "SELECT family, vlayout, pipeline, pad_sk, count(*) FROM kernels WHERE receipts = '1' GROUP BY 1, 2, 3, 4"
    ).fetchall()
    assert sum(row[-1] for row in rows) == EXTENDED - DEFAULT
    assert {tuple(row)[:-1] for row in rows} == {
        (family, vlayout, "qr", int(vlayout == "row"))
        for family in ("fwd", "fwd_splitkv")
        for vlayout in ("row", "col")
    }


def test_quirks_are_kept_and_explained(catalog: Catalog) -> None:
    rules = catalog.connection.execute("SELECT * FROM rule WHERE kind <> 'order'").fetchall()
    assert all(rule["reason"] and rule["source"].startswith(("ops/", "codegen/", "include/")) for rule in rules)
    quirks = {(rule["scope"], rule["kind"], rule["id"]) for rule in rules if rule["quirk"]}
    assert quirks >= {
        ("fwd_splitkv", "receipt", "4"),
        ("fwd_splitkv", "receipt", "3"),
        ("fwd_splitkv", "variant", "qr_async"),
        ("fwd", "variant", "qr_any_hdim_row"),
        ("fwd_pagedkv", "variant", "qr_s"),
    }
    assert "fwd_splitkv" not in parity(catalog, 4).families
    assert any("_fp8_" in name for name in parity(catalog, 3).reference if name.startswith("fmha_fwd_splitkv_d"))
    unpaged = "SELECT count(*) FROM attention_row WHERE family = 'fwd_pagedkv' AND NOT paged_kv"
    assert catalog.connection.execute(unpaged).fetchone()[0] == 288


@pytest.mark.slow
def test_both_revisions_live_in_one_catalog(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    catalog.populate("gfx942", revision=REVISION)
    catalog.populate("gfx942")
    assert parity(catalog, 0).passed
    assert catalog.parity("gfx942", 0).passed
    assert catalog.parity("gfx942", 0).lineage.revision == "2026-05"


def test_gfx90a_keeps_the_fp8_rows_and_never_selects_them(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    catalog.populate("gfx90a", revision=REVISION)
    rows = catalog.connection.execute("SELECT DISTINCT dtype, hw_valid FROM attention_row ORDER BY dtype").fetchall()
    assert [tuple(row) for row in rows] == [("bf16", 1), ("fp16", 1), ("fp8", 0)]


@pytest.fixture(scope="module")
def default_build(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """The kernels of receipt 0 alone. Read it only."""
    catalog = Catalog(tmp_path_factory.mktemp("receipt_0") / "catalog.db")
    catalog.populate("gfx942", revision=REVISION, receipts=(0,))
    return catalog


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({"hdim_q": 128, "seqlen_q": 256}, (128, 128, 128, "_qr_async_vr_psddv_")),
        ({"hdim_q": 128, "seqlen_q": 250}, (128, 128, 128, "_qr_async_vr_psskddv_")),
        ({"hdim_q": 40, "seqlen_q": 64}, (64, 64, 64, "_qr_async_vr_psddv_")),
        ({"hdim_q": 96, "seqlen_q": 64}, (96, 128, 128, "_qr_async_vr_psskddv_")),
        ({"hdim_q": 136, "seqlen_q": 64}, (160, 160, 128, "_qr_async_vr_psskddv_")),
        ({"hdim_q": 192, "hdim_v": 128, "seqlen_q": 128}, (192, 128, 128, "_qr_async_vr_psddv_")),
        ({"hdim_q": 64, "seqlens_q": (128, 256)}, (64, 64, 64, "_qr_async_vr_psskddv_")),
    ],
)
def test_selection_chooses_what_upstreams_dispatch_chooses(
    default_build: Catalog, fields: dict[str, Any], chosen: tuple[int, int, int, str]
) -> None:
    """Head dims of the kernel, keys of its tile, and its pipeline with paddings; facts from upstream's dispatch."""
    fields = fields if "seqlens_q" in fields else {"batch": 2, **fields}
    problem = Problem(nhead_q=4, **fields)
    kernel = default_build.candidates(problem, arch="gfx942", revision=REVISION, limit=1)[0].kernel
    assert (kernel.signature.hdim_q, kernel.signature.hdim_v, kernel.algorithm.tile_n0) == chosen[:3]
    assert chosen[3] in kernel.name


@pytest.mark.parametrize(("hdim", "rule"), [(100, "hdim_q_divides"), (264, "hdim_fits")])
def test_a_head_dim_that_no_kernel_accepts_is_reported(default_build: Catalog, hdim: int, rule: str) -> None:
    with pytest.raises(SelectionError, match=rule):
        default_build.candidates(
            Problem(batch=2, nhead_q=4, hdim_q=hdim, seqlen_q=128), arch="gfx942", revision=REVISION
        )


def test_receipt_1_covers_any_head_dim(catalog: Catalog) -> None:
    problem = Problem(batch=2, nhead_q=4, hdim_q=100, seqlen_q=128)
    chosen = catalog.candidates(problem, arch="gfx942", revision=REVISION, limit=1)[0].kernel
    assert (chosen.signature.hdim_q, chosen.algorithm.pipeline.value, chosen.algorithm.pad_d) == (128, "qr", 1)


@pytest.fixture(scope="module")
def refusing(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """Both mask implementations on gfx942, and a compiler that refuses every kernel."""
    folder = tmp_path_factory.mktemp("refusing")
    catalog = Catalog(shutil.copy(populated("gfx942", REVISION), folder / "catalog.db"))
    catalog.populate("gfx942", revision=REVISION, mask_impl="simplified")
    compiler = targets.HOST.toolchain(resolve_arch("host"))
    target = replace(targets.HOST, toolchain=lambda arch: compiler, emit=lambda kernel, memory: "#error refused")
    catalog.builds.builder = Builder(folder / "cache", catalog.build_log.record, targets=lambda arch: target)
    return catalog


@pytest.mark.parametrize(
    ("where", "refused"),
    [
        ("family = 'fwd_splitkv'", "with simplified masks only"),
        ("family = 'fwd_splitkv' AND pipeline = 'qr_async' AND mask_impl = 'simplified'", "no asynchronous pipeline"),
        ("family = 'fwd_splitkv' AND pipeline = 'qr' AND mask_impl = 'simplified'", None),
        ("family = 'batch_prefill' AND vlayout = 'col'", "of values in rows only"),
        ("family = 'batch_prefill' AND vlayout = 'row'", None),
        ("family = 'fwd'", None),
    ],
)
def test_a_failed_build_says_what_the_headers_refuse(refusing: Catalog, where: str, refused: str | None) -> None:
    [kernel] = refusing.kernels(f"revision = '{REVISION}' AND {where}", arch="gfx942", limit=1)

    with pytest.raises(CompileError) as caught:
        refusing.build(kernel)
    log = "The compiler's output is in "
    assert "refused" in caught.value.message
    assert str(caught.value.hint).startswith(f"{REVISION} lists it, but its headers" if refused else log)
    assert (refused or log) in str(caught.value.hint)

    run = BuildRun(refusing, [kernel])
    refusing.builder.build_many(run.kernels, on_done=run.ended.append)
    assert run.exit_code == 1
    assert (refused or log) in "\n".join(run.reasons)
