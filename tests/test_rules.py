"""Population and parity: the kernels that upstream lists, all of them, no other, and never half of them."""

from __future__ import annotations

import csv
import json
import lzma
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from test_schema import edit

from catalog.errors import MissingReferenceError, RegistryError, SpecError, UsageError
from catalog.ops.attention.problem import Problem
from catalog.registry.connection import LOG_BYTES
from catalog.rules.receipts import resolve_receipts
from catalog.rules.restriction import Restriction
from catalog.runtime.catalog import Catalog
from catalog.schema.spec_files import find_spec, load_spec_file

DATA = Path(__file__).parent.parent / "data"

DEFAULT_COUNTS = {
    "fwd": 11_188,
    "fwd_splitkv": 2_952,
    "fwd_splitkv_combine": 138,
    "fwd_pagedkv": 252,
    "fwd_appendkv": 99,
    "batch_prefill": 8_080,
    "bwd_dot_do_o": 60,
    "bwd_dq_dk_dv": 12_000,
    "bwd_convert_dq": 120,
}


def listed(mask_impl: str) -> list[dict[str, str]]:
    with lzma.open(DATA / "parity" / f"2026-05.gfx950.{mask_impl}.csv.xz", "rt") as file:
        return list(csv.DictReader(file))


RECEIPTS_LISTED = (0, 2, 3, 4, 200, 300, 400, 700, 800, 801)


@pytest.mark.parametrize("mask_impl", slow_but(["generic"], ["generic", "simplified"]))
@pytest.mark.parametrize("arch", slow_but(["gfx950"], ["gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151"]))
def test_names_and_receipts_are_upstreams(
    populated: Callable[..., Path], tmp_path: Path, arch: str, mask_impl: str
) -> None:
    catalog = Catalog(shutil.copy(populated(arch, masks=(mask_impl,)), tmp_path / "catalog.db"))
    for receipt in RECEIPTS_LISTED:
        comparison = catalog.parity(arch, receipt, mask_impl=mask_impl)
        assert comparison.passed, comparison.report()
    gfx11 = {"generic": 19_722, "simplified": 13_274}
    expected = {"gfx950": {"generic": 34_889, "simplified": 22_929}, "gfx1100": gfx11, "gfx1151": gfx11}
    gfx9 = {"generic": 32_593, "simplified": 21_329}
    assert len(catalog.parity(arch, 0, mask_impl=mask_impl).reference) == expected.get(arch, gfx9)[mask_impl]


@pytest.mark.parametrize("mask_impl", slow_but(["generic"], ["generic", "simplified"]))
def test_every_row_is_listed_by_some_receipt(populated: Callable[..., Path], tmp_path: Path, mask_impl: str) -> None:
    """What no listed receipt names, only the others do: 1 (more head dims), and none of the rest adds a row."""
    catalog = Catalog(shutil.copy(populated("gfx950", masks=(mask_impl,)), tmp_path / "catalog.db"))
    in_lists = {row["name"] for row in listed(mask_impl)}
    rows = catalog.connection.execute("SELECT name, receipts FROM kernels").fetchall()
    assert all(receipts for _, receipts in rows)
    assert {receipts for name, receipts in rows if name not in in_lists} == {"1"}
    assert in_lists <= {name for name, _ in rows}


@pytest.mark.slow
def test_the_default_receipt_has_34889_kernels_in_nine_families(gfx950: Catalog) -> None:
    comparison = gfx950.parity("gfx950", 0)
    assert comparison.families == Counter(DEFAULT_COUNTS)
    assert comparison.report() == "PASS: 34,889 kernels across 9 families (gfx950, receipt 0, generic)"


@pytest.mark.slow
def test_one_changed_spec_value_fails_parity_with_the_right_names(specs: Path, tmp_path: Path) -> None:
    """A tile of head dim 256 loses its 128 keys: its kernels are missing, others are extra."""
    path = specs / "arch_specs" / "2026-05" / "gfx9.json"
    groups = json.loads(path.read_text())["enumerations"]["fwd_splitkv"]["tiles"]
    place = next(i for i, group in enumerate(groups) if group["hdim"] == "256x256")
    tile = "b64x{}x32x256x32x256_r4x1x1_r4x1x1_w16x16x16_w16x16x16"
    edit(path, "enumerations", "fwd_splitkv", "tiles", place, "tiles", value=[tile.format(64)])
    comparison = Catalog(tmp_path / "catalog.db").parity("gfx950", 0)
    assert not comparison.passed
    assert list(comparison.missing) == list(comparison.extra) == ["fwd_splitkv"]
    missing, extra = comparison.missing["fwd_splitkv"], comparison.extra["fwd_splitkv"]
    assert len(missing) == len(extra) == 576
    assert {name.replace("b64x128x", "b64x64x") for name in missing} == set(extra)
    assert all("_d256_" in name for name in missing)
    assert comparison.report().startswith("FAIL: 576 missing, 576 extra of 34,889 kernels")


CONSTRAINTS = [
    ("group_mode_padding", "fwd"),
    ("soft_cap_excludes_bias", "fwd"),
    ("gfx9_tile_per_pipeline", "fwd"),
    ("v3_tile", "fwd"),
    ("pad_8_for_both_head_dims", "bwd_dq_dk_dv"),
    ("page_of_one_token_is_linear", "batch_prefill"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("constraint", "family"), CONSTRAINTS)
def test_every_constraint_bites(specs: Path, tmp_path: Path, constraint: str, family: str) -> None:
    """Without it the catalog has kernels that upstream does not list, of that family alone."""
    for path in (specs / "arch_specs" / "2026-05").glob("*.json"):
        spec = json.loads(path.read_text())
        for enumeration in spec.get("enumerations", {}).values():
            enumeration["constraints"] = [c for c in enumeration.get("constraints", ()) if c["id"] != constraint]
        path.write_text(json.dumps(spec))
    comparison = Catalog(tmp_path / "catalog.db").parity("gfx950", 0)
    assert not comparison.missing
    assert family in comparison.extra


def test_populating_again_changes_nothing_and_says_so(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    assert not catalog.populate("sm_90", operation="conv").unchanged
    before = catalog.connection.execute("SELECT created, digest FROM population").fetchall()
    assert catalog.populate("sm_90", operation="conv").unchanged
    assert catalog.connection.execute("SELECT created, digest FROM population").fetchall() == before
    assert not catalog.populate("sm_90", operation="conv", force=True).unchanged


@pytest.mark.parametrize(("arch", "kept"), [("sm_90", "fwd_splitkv"), ("gfx950", "bwd_dot_do_o")])
def test_a_restriction_may_be_about_the_family(
    catalog_of: Callable[[str], Catalog], tmp_path: Path, arch: str, kept: str
) -> None:
    """Also where one enumeration yields several families, as upstream's backward kernels."""
    where = f"family = '{kept}'"
    asked = f"SELECT id FROM kernel WHERE {where} ORDER BY id"
    with Catalog(tmp_path / "catalog.db") as catalog:
        made = catalog.populate(arch, restriction=Restriction(where=where))
        rows = catalog.connection.execute(asked).fetchall()
    assert made.families == {kept: len(rows)}
    assert rows == catalog_of(arch).connection.execute(asked).fetchall()


@pytest.mark.slow
def test_a_population_restricted_to_a_receipt_has_its_kernels_only(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    assert catalog.populate("gfx950", receipts=(4,)).kernels == 10_584
    assert catalog.parity("gfx950", 4).passed
    with pytest.raises(UsageError, match="receipts 4 of gfx950 only"):
        catalog.parity("gfx950", 0)
    catalog.populate("gfx950", restriction=Restriction(where="hdim_q = 128"))
    with pytest.raises(UsageError, match=r"a part of gfx950 only .*: where hdim_q = 128"):
        catalog.parity("gfx950", 4)
    assert catalog.populate("gfx950").kernels > 34_889


@pytest.mark.slow
def test_populations_live_side_by_side_and_keep_what_hangs_on_their_rows(copied: Catalog, specs: Path) -> None:
    connection = copied.connection
    kept, dropped = (
        connection.execute(
            f"SELECT id FROM attention_row WHERE family = 'fwd_appendkv' AND hdim_q = {hdim}"
        ).fetchone()[0]
        for hdim in (64, 256)
    )
    for kernel in (kept, dropped):
        connection.execute(
            "INSERT INTO artifact (key, kernel_id, arch, toolchain, flags, status, log, compile_s, created) "
            "VALUES (?1, ?1, 'gfx950', '', '', 'built', '', 0, '')",
            (kernel,),
        )
    copied.populate("gfx950", mask_impl="simplified")
    path = specs / "arch_specs" / "2026-05" / "ck.json"
    tiles = json.loads(path.read_text())["enumerations"]["fwd_appendkv"]["tiles"]
    edit(path, "enumerations", "fwd_appendkv", "tiles", value=[t for t in tiles if t["hdim"] != "256x256"])
    copied.populate("gfx950")
    assert connection.execute("SELECT key FROM artifact").fetchall()[0][0] == kept
    assert connection.execute("SELECT count(*) FROM artifact").fetchone()[0] == 1
    simplified = "SELECT count(*) FROM attention_row WHERE mask_impl = 'simplified'"
    assert connection.execute(simplified).fetchone()[0] > 22_929
    assert not connection.execute("PRAGMA foreign_key_check").fetchall()


@pytest.mark.slow
def test_a_spec_that_gives_a_kernel_twice_is_refused_and_nothing_changes(copied: Catalog, specs: Path) -> None:
    path = specs / "arch_specs" / "2026-05" / "gfx950.json"
    tiles = json.loads(path.read_text())["enumerations"]["bwd"]["tiles"]
    edit(path, "enumerations", "bwd", "tiles", value=[*tiles, tiles[0]])
    before = copied.connection.execute("SELECT count(*) FROM attention_row").fetchone()[0]
    with pytest.raises(SpecError, match="makes the same kernel twice"):
        copied.populate("gfx950")
    assert copied.connection.execute("SELECT count(*) FROM attention_row").fetchone()[0] == before


@pytest.mark.slow
def test_a_populate_killed_at_any_time_leaves_all_or_nothing(tmp_path: Path) -> None:
    """kill -9 at growing delays: the file opens, is sound, and holds either no kernel or every one."""
    path = tmp_path / "catalog.db"
    command = [sys.executable, "-m", "catalog", "--db", str(path), "populate", "--arch", "gfx950", "--force"]
    seen = set()
    for delay in (0.1, 0.3, 0.5, 0.7, 0.9, 1.2, 1.5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        catalog = Catalog(path)
        assert catalog.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        seen.add(catalog.connection.execute("SELECT count(*) FROM attention_row").fetchone()[0])
        catalog.close()
    catalog = Catalog(path)
    assert catalog.parity("gfx950", 0).passed
    assert seen <= {0, catalog.connection.execute("SELECT count(*) FROM attention_row").fetchone()[0]}


@pytest.mark.parametrize(
    ("text", "receipts"), [("0", (0,)), ("flash", (2, 3)), ("pytorch", (4,)), ("aiter", (100, 200, 300, 400))]
)
def test_receipts_have_names(text: str, receipts: tuple[int, ...]) -> None:
    assert resolve_receipts(load_spec_file(find_spec((DATA / "arch_specs",), "gfx950")), text) == receipts


@pytest.mark.parametrize("text", ["5", "flahs", "-1"])
def test_an_unknown_receipt_says_which_there_are(text: str) -> None:
    with pytest.raises(UsageError, match="transformer_engine"):
        resolve_receipts(load_spec_file(find_spec((DATA / "arch_specs",), "gfx950")), text)


def test_parity_without_a_list_says_so(gfx950: Catalog) -> None:
    with pytest.raises(MissingReferenceError, match="no reference list for receipt 100"):
        gfx950.parity("gfx950", 100)
    assert gfx950.parity("gfx950", 801).report().startswith("PASS: 0 kernels")  # a list, and nothing on it


def test_rules_are_rows_with_reasons_and_sources(gfx950: Catalog) -> None:
    rules = gfx950.connection.execute("SELECT * FROM rule WHERE kind <> 'order'").fetchall()
    assert all(rule["reason"] for rule in rules)
    upstream = ("ops/", "codegen/", "dispatcher/")
    for rule in rules:
        assert "ISA" in rule["source"] or "CK" in rule["source"] or rule["source"].startswith(upstream), tuple(rule)
        assert (rule["kind"] == "hardware") == (not rule["source"].startswith(upstream)), tuple(rule)
    quirk = gfx950.connection.execute("SELECT quirk FROM rule WHERE scope = 'fwd_splitkv' AND id = '4'").fetchone()[0]
    assert "fp16, bf16" in quirk


@pytest.mark.parametrize("content", [b"no database", b""])
def test_a_file_that_is_no_catalog_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.db"
    if content:
        path.write_bytes(content * 200)
    else:
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE mine (x)")
        other.close()
    before = path.read_bytes()
    with pytest.raises(RegistryError, match=r"other\.db"):
        Catalog(path).populate("gfx950")
    assert path.read_bytes() == before


def test_a_catalog_of_a_newer_program_is_refused(copied: Catalog) -> None:
    copied.connection.execute("PRAGMA user_version = 99")
    copied.close()
    with pytest.raises(RegistryError, match="schema version 99"):
        copied.populate("gfx950")


@pytest.mark.slow
def test_the_log_of_changes_does_not_stay_large(tmp_path: Path) -> None:
    with Catalog(tmp_path / "catalog.db") as catalog:
        catalog.populate("gfx1201")
        log = tmp_path / "catalog.db-wal"
        assert log.stat().st_size == 0
        with catalog.connection as connection:
            connection.execute("BEGIN")
            connection.execute("UPDATE kernel SET name = name || ''")
        catalog.select(Problem(batch=1, nhead_q=1, seqlen_q=8, hdim_q=64), arch="gfx1201")
        assert log.stat().st_size <= LOG_BYTES


@pytest.mark.slow
def test_a_select_makes_the_kernels_of_a_changed_spec_anew(specs: Path, tmp_path: Path) -> None:
    problem = Problem(batch=1, nhead_q=1, seqlen_q=8, hdim_q=64, dtype="fp32")
    before = Catalog(tmp_path / "catalog.db").select(problem, arch="x86_64_v3").kernels[0]
    path = specs / "arch_specs" / "native" / "x86_64_v3.json"
    spec = json.loads(path.read_text())
    for group in spec["enumerations"]["fwd"]["tiles"]:
        group["tiles"] = group["tiles"][1:]
    path.write_text(json.dumps(spec))
    after = Catalog(tmp_path / "catalog.db").select(problem, arch="x86_64_v3").kernels[0]
    assert after.algorithm != before.algorithm
    restricted = Catalog(tmp_path / "restricted.db")
    restricted.populate("gfx950", receipts=(2,))
    kernels = len(restricted.kernels("1", arch="gfx950"))
    restricted.select(problem.model_copy(update={"dtype": "fp16", "lse": True}), arch="gfx950")
    assert len(restricted.kernels("1", arch="gfx950")) == kernels, "what was left out on purpose stays out"


def test_sources_in_this_repository_exist() -> None:
    def sources(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (value[key] for key in ("source",) if isinstance(value.get(key), str))
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                yield from sources(item)

    named = [(path, source) for path in DATA.rglob("*.json") for source in sources(json.loads(path.read_text()))]
    paths = [(path, there) for path, source in named for there in re.findall(r"catalog/[\w/]+(?:\.\w+)?", source)]
    assert len(paths) > 100
    assert [(path.name, there) for path, there in paths if not (DATA.parent / there).exists()] == []
