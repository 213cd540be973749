"""Older revisions are data: the same engine gives their kernels, names and selections too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schema import named_rows

from catalog.build import targets
from catalog.build.builder import Builder, CompileError
from catalog.errors import SelectionError
from catalog.ops.attention.kernel import AttentionKernel
from catalog.ops.attention.names import GRAMMARS, grammar_of, parse_name
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.traits import TRAITS, Family
from catalog.rules.parity import Comparison
from catalog.runtime.build_run import BuildRun
from catalog.runtime.catalog import Catalog
from catalog.runtime.here import resolve_arch

RECEIPTS = {
    "2025-07": (0, 1, 2, 3, 4, 100, 200, 300, 400, 600),
    "2025-11": (0, 1, 2, 3, 4, 100, 200, 300, 400, 600, 800, 801, 888),
}
FLASH_ATTN = {
    "generic": (24_174, 27_342, 5_367, 6_774, 2_943, 17_994, 13_923, 18_750, 14_094, 17_667),
    "simplified": (16_278, 18_390, 3_707, 4_662, 2_075, 12_158, 9_411, 12_646, 9_526, 11_939),
}
AITER_GFX9 = {
    "generic": (17_127, 18_663, 4_932, 4_947, 2_568, 15_069, 12_505, 10_347, 10_287, 16_221, 2_646, 0, 12_927),
    "simplified": (11_557, 12_581, 3_426, 3_417, 1_830, 10_185, 8_443, 7_017, 6_957, 10_947, 1_782, 34, 8_757),
}
AITER_GFX950 = {
    "generic": (19_203, 20_739, 5_728, 5_571, 3_192, 17_145, 14_437, 11_203, 11_011, 18_297, 2_646, 0, 14_859),
    "simplified": (13_009, 14_033, 3_982, 3_849, 2_262, 11_637, 9_799, 7_633, 7_441, 12_399, 1_782, 34, 10_113),
}
AITER_GFX12 = {
    "generic": (13_251, 13_251, 3_816, 3_843, 2_088, 11_769, 9_781, 7_827, 7_779, 12_345, 0, 0, 10_587),
    "simplified": (8_961, 8_961, 2_670, 2_673, 1_502, 7_973, 6_615, 5_329, 5_281, 8_351, 0, 0, 7_185),
}
LISTED = {
    ("2025-07", "gfx90a"): FLASH_ATTN,
    ("2025-07", "gfx942"): FLASH_ATTN,
    ("2025-07", "gfx950"): FLASH_ATTN,
    ("2025-11", "gfx908"): AITER_GFX9,
    ("2025-11", "gfx90a"): AITER_GFX9,
    ("2025-11", "gfx942"): AITER_GFX9,
    ("2025-11", "gfx950"): AITER_GFX950,
    ("2025-11", "gfx1200"): AITER_GFX12,
    ("2025-11", "gfx1201"): AITER_GFX12,
}
"""Kernels that upstream's generator lists for each receipt, by mask implementation."""

Of = tuple[str, str]
FLASH, AITER = ("2025-07", "gfx942"), ("2025-11", "gfx950")
"""A revision and an arch: one of each revision, for what need not be tried on all."""

ROWS = {FLASH: 27_342, AITER: 23_385}
"""Kernels of all receipts together, generic masks."""


def parity(catalog: Catalog, receipt: int, of: Of, mask_impl: str = "generic") -> Comparison:
    revision, arch = of
    return catalog.parity(arch, receipt, revision=revision, mask_impl=mask_impl)


@pytest.fixture(scope="module")
def catalog_of(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Of], Catalog]:
    """Every kernel of an arch at a revision, generic masks. Read it only."""

    @cache
    def catalog_of(of: Of) -> Catalog:
        revision, arch = of
        return Catalog(shutil.copy(populated(arch, revision), tmp_path_factory.mktemp(revision) / "catalog.db"))

    return catalog_of


@pytest.fixture(scope="module")
def catalog(catalog_of: Callable[[Of], Catalog]) -> Catalog:
    """Every kernel of gfx942 at 2025-07, generic masks. Read it only."""
    return catalog_of(FLASH)


@pytest.mark.parametrize(
    ("of", "mask_impl"),
    slow_but(
        [(AITER, "generic")],
        [(of, mask_impl) for of, listed in LISTED.items() for mask_impl in listed],
    ),
)
def test_names_and_receipts_are_upstreams(
    populated: Callable[..., Path], tmp_path: Path, of: Of, mask_impl: str
) -> None:
    revision, arch = of
    catalog = Catalog(shutil.copy(populated(arch, revision, masks=(mask_impl,)), tmp_path / "catalog.db"))
    for receipt, count in zip(RECEIPTS[revision], LISTED[of][mask_impl], strict=True):
        comparison = parity(catalog, receipt, of, mask_impl)
        assert comparison.passed, comparison.report()
        assert len(comparison.reference) == count
    assert catalog.populate(arch, revision=revision, mask_impl=mask_impl).unchanged


CONSTRAINTS = [
    (FLASH, "group_mode_padding", {family.value for family in Family} - {"fwd_appendkv"}),
    (FLASH, "soft_cap_excludes_bias", {"fwd", "fwd_splitkv", "fwd_pagedkv", "batch_prefill"}),
    (FLASH, "inference_only_hdims", {"fwd"}),
    (FLASH, "no_wg32_dropout", {"bwd_dq_dk_dv"}),
    (FLASH, "dbias_needs_bias", {"bwd_dq_dk_dv"}),
    (AITER, "gfx9_tile_per_pipeline", {"fwd"}),
    (AITER, "trload_tile", {"fwd"}),
    (AITER, "hdim_192x128_inference_only", {"fwd"}),
    (AITER, "pad_8_for_both_head_dims", {"bwd_dq_dk_dv"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("of", "constraint", "families"), CONSTRAINTS)
def test_every_constraint_bites(specs: Path, tmp_path: Path, of: Of, constraint: str, families: set[str]) -> None:
    """Without it the catalog has kernels that upstream does not list, of those families alone."""
    revision, arch = of
    whole = Catalog(tmp_path / "catalog.db").spec(arch, revision).model_dump(mode="json", exclude_none=True)
    for enumeration in whole["enumerations"].values():
        enumeration["constraints"] = [c for c in enumeration["constraints"] if c["id"] != constraint]
    (specs / "arch_specs" / revision / f"{arch}.json").write_text(json.dumps(whole))
    comparison = parity(Catalog(tmp_path / "catalog.db"), 0, of)
    assert not comparison.missing
    assert set(comparison.extra) == families


@pytest.mark.slow
@pytest.mark.parametrize("of", list(ROWS))
def test_every_row_survives_both_round_trips(catalog_of: Callable[[Of], Catalog], of: Of) -> None:
    rows = catalog_of(of).connection.execute("SELECT * FROM attention_row").fetchall()
    assert len(rows) == ROWS[of]
    for row in rows:
        kernel = AttentionKernel.from_row(row)
        written = kernel.to_row()
        assert (kernel.id, kernel.name) == (row["id"], row["name"])
        assert parse_name(row["name"]) == {name: written[name] for name in ("target", *TRAITS)}


@pytest.mark.slow
@pytest.mark.parametrize("revision", RECEIPTS)
@given(data=st.data())
@settings(max_examples=300)
def test_a_parsed_name_writes_the_same_name(data: st.DataObject, revision: str) -> None:
    grammar, row = data.draw(named_rows(revision))
    name = grammar.name(row | {"target": "gfx942"})
    parsed = grammar.parse(name)
    assert parsed is not None
    assert grammar.name(parsed) == name


@pytest.mark.parametrize(
    ("revision", "same"),
    [
        ("2025-07", {Family.FWD_SPLITKV_COMBINE, Family.FWD_APPENDKV}),
        ("2025-11", {Family.FWD_SPLITKV_COMBINE, Family.FWD_APPENDKV, Family.BWD_DOT_DO_O, Family.BWD_DQ_DK_DV}),
        ("2026-05", set(Family)),
    ],
)
def test_families_that_were_not_renamed_share_their_grammar(revision: str, same: set[Family]) -> None:
    assert {family for family in Family if grammar_of(family, revision) is GRAMMARS[family]} == same


@pytest.mark.parametrize(
    ("of", "adds"),
    [
        (FLASH, {("fwd", "row", 1), ("fwd", "col", 0), ("fwd_splitkv", "row", 1), ("fwd_splitkv", "col", 0)}),
        (AITER, {("fwd", "row", 1)}),
    ],
)
def test_receipt_1_adds_kernels_that_no_other_receipt_lists(
    catalog_of: Callable[[Of], Catalog], of: Of, adds: set[tuple[str, str, int]]
) -> None:
    rows = catalog_of(of).connection.execute(
        "SELECT family, vlayout, pad_sk, pipeline, count(*) FROM kernels WHERE receipts = '1' GROUP BY 1, 2, 3, 4"
    )
    found = {tuple(row)[:-1]: row[-1] for row in rows}
    default, extended = LISTED[of]["generic"][:2]
    assert sum(found.values()) == extended - default
    assert set(found) == {(*kernels, "qr") for kernels in adds}


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (FLASH, {
            ("fwd_splitkv", "receipt", "4"), ("fwd_splitkv", "receipt", "3"), ("fwd_splitkv", "variant", "qr_async"),
            ("fwd", "variant", "qr_any_hdim_row"), ("fwd_pagedkv", "variant", "qr_s"),
        }),
        (AITER, {
            ("fwd_splitkv", "receipt", "4"), ("fwd_splitkv", "receipt", "3"), ("fwd_splitkv_combine", "receipt", "2"),
            ("bwd", "receipt", "888"), ("bwd", "constraint", "pad_8_for_both_head_dims"),
        }),
    ],
)  # fmt: skip
def test_quirks_are_kept_and_explained(
    catalog_of: Callable[[Of], Catalog], of: Of, expected: set[tuple[str, str, str]]
) -> None:
    catalog = catalog_of(of)
    rules = catalog.connection.execute("SELECT * FROM rule WHERE kind NOT IN ('order', 'hardware')").fetchall()
    assert all(rule["reason"] and rule["source"].startswith(("ops/", "codegen/", "include/")) for rule in rules)
    assert {(rule["scope"], rule["kind"], rule["id"]) for rule in rules if rule["quirk"]} >= expected
    assert "fwd_splitkv" not in parity(catalog, 4, of).families
    flash = parity(catalog, 3, of).reference
    assert any("_fp8_" in name for name in flash if name.startswith("fmha_fwd_splitkv_d"))


def test_half_of_the_early_pagedkv_kernels_have_no_pages(catalog: Catalog) -> None:
    unpaged = "SELECT count(*) FROM attention_row WHERE family = 'fwd_pagedkv' AND NOT paged_kv"
    assert catalog.connection.execute(unpaged).fetchone()[0] == 288


@pytest.mark.slow
def test_all_revisions_live_in_one_catalog(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    revisions = [*RECEIPTS, "2026-05"]
    for revision in revisions:
        catalog.populate("gfx942", revision=revision)
    assert all(parity(catalog, 0, (revision, "gfx942")).passed for revision in revisions)
    assert catalog.parity("gfx942", 0).lineage.revision == "2026-05"


HARDWARE = [
    (("2025-07", "gfx90a"), "dtype LIKE 'fp8%'", False),
    (("2025-07", "gfx90a"), "dtype NOT LIKE 'fp8%'", True),
    (("2025-11", "gfx90a"), "dtype LIKE 'fp8%'", False),
    (("2025-11", "gfx90a"), "dtype NOT LIKE 'fp8%'", True),
    (("2025-11", "gfx908"), "dtype LIKE 'fp8%'", False),
    (("2025-11", "gfx908"), "dtype = 'bf16'", True),
    (("2025-11", "gfx942"), "1", True),
    (("2025-11", "gfx1201"), "family = 'batch_prefill'", False),
    (("2025-11", "gfx1201"), "family <> 'batch_prefill'", True),
]


@pytest.mark.parametrize(("of", "where", "runs"), slow_but(HARDWARE[:2], HARDWARE))
def test_rows_that_the_hardware_cannot_run_are_kept_and_never_selected(
    catalog_of: Callable[[Of], Catalog], of: Of, where: str, runs: bool
) -> None:
    rows = catalog_of(of).connection.execute(f"SELECT DISTINCT hw_valid FROM attention_row WHERE {where}")
    assert [bool(row[0]) for row in rows] == [runs]


@pytest.fixture(scope="module")
def default_build(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """The kernels of receipt 0 alone. Read it only."""
    rows = populated("gfx942", "2025-07", receipts=(0,))
    return Catalog(shutil.copy(rows, tmp_path_factory.mktemp("receipt_0") / "catalog.db"))


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
    kernel = default_build.candidates(problem, arch="gfx942", revision="2025-07", limit=1)[0].kernel
    assert (kernel.signature.hdim_q, kernel.signature.hdim_v, kernel.algorithm.tile_n0) == chosen[:3]
    assert chosen[3] in kernel.name


@pytest.mark.parametrize(("hdim", "rule"), [(100, "hdim_q_divides"), (264, "hdim_fits")])
def test_a_head_dim_that_no_kernel_accepts_is_reported(default_build: Catalog, hdim: int, rule: str) -> None:
    with pytest.raises(SelectionError, match=rule):
        default_build.candidates(
            Problem(batch=2, nhead_q=4, hdim_q=hdim, seqlen_q=128), arch="gfx942", revision="2025-07"
        )


def test_receipt_1_covers_any_head_dim(catalog: Catalog) -> None:
    problem = Problem(batch=2, nhead_q=4, hdim_q=100, seqlen_q=128)
    chosen = catalog.candidates(problem, arch="gfx942", revision="2025-07", limit=1)[0].kernel
    assert (chosen.signature.hdim_q, chosen.algorithm.pipeline.value, chosen.algorithm.pad_d) == (128, "qr", 1)


@pytest.fixture(scope="module")
def refusing(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """Both mask implementations on gfx942, and a compiler that refuses every kernel."""
    folder = tmp_path_factory.mktemp("refusing")
    rows = populated("gfx942", "2025-07", masks=("generic", "simplified"))
    catalog = Catalog(shutil.copy(rows, folder / "catalog.db"))
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
    [kernel] = refusing.kernels(f"revision = '2025-07' AND {where}", arch="gfx942", limit=1)

    with pytest.raises(CompileError) as caught:
        refusing.build(kernel)
    log = "The compiler's output is in "
    assert "refused" in caught.value.message
    assert str(caught.value.hint).startswith("2025-07 lists it, but its headers" if refused else log)
    assert (refused or log) in str(caught.value.hint)

    run = BuildRun(refusing, [kernel])
    refusing.builder.build_many(run.kernels, on_done=run.ended.append)
    assert run.exit_code == 1
    assert (refused or log) in "\n".join(run.reasons)
