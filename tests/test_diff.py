"""What one population has that another has not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import copy_of, slow_but
from test_schema import edit

from catalog.errors import UsageError
from catalog.ops.attention.names import parse_name
from catalog.ops.attention.traits import TRAITS, Family
from catalog.rules.diff import FEW, Difference, difference
from catalog.rules.populate import Request
from catalog.runtime.catalog import Catalog

REVISIONS = ("2025-07", "2026-05")


@pytest.fixture(scope="module")
def catalog(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """Both revisions of gfx942. Read it only."""
    return Catalog(shutil.copy(populated("gfx942", *REVISIONS), tmp_path_factory.mktemp("diff") / "catalog.db"))


@pytest.fixture(scope="module")
def found(catalog: Catalog) -> Difference:
    """What differs in upstream's default build."""
    return between(catalog, 0)


def between(catalog: Catalog, receipt: int | None = None, revisions: tuple[str, str] = REVISIONS) -> Difference:
    before, after = (Request(catalog.spec("gfx942", revision)) for revision in revisions)
    return difference(catalog.connection, before, after, receipt)


@pytest.mark.parametrize("receipt", slow_but([2], [0, 2, None]))
def test_every_kernel_of_either_side_is_counted_once(catalog: Catalog, receipt: int | None) -> None:
    found = between(catalog, receipt)
    for revision, side in zip(REVISIONS, ("vanished", "appeared"), strict=True):
        listed = (
            "" if receipt is None else f"AND id IN (SELECT kernel_id FROM kernel_receipt WHERE receipt = {receipt})"
        )
        rows = catalog.connection.execute(f"SELECT name FROM attention_row WHERE revision = ? {listed}", (revision,))
        named = [name for family in found.families for name in getattr(family, side)]
        changed = [change for family in found.families for change in family.changed]
        named += [change.before if side == "vanished" else change.after for change in changed]
        names = {name for (name,) in rows}
        assert len(named) == len(set(named))
        assert set(named) <= names
        assert len(named) + sum(family.same for family in found.families) == len(names)


@pytest.mark.slow
def test_a_changed_kernel_keeps_its_signature_and_differs_in_few_traits(found: Difference) -> None:
    changes = [change for family in found.families for change in family.changed]
    assert len(changes) > 5_000
    for change in changes:
        before, after = parse_name(change.before), parse_name(change.after)
        traits = [name for name in TRAITS if before[name] != after[name]]
        assert 0 < len(traits) <= FEW
        assert all(TRAITS[name].group == "algorithm" for name in traits)
        assert change.traits == ", ".join(f"{t} {before[t]} -> {after[t]}" for t in traits)


def test_a_renamed_kernel_is_the_same(found: Difference) -> None:
    """dot_do_o: every name has other parts since, and no kernel of 2025-07 is gone."""
    family = next(f for f in found.families if f.family == Family.BWD_DOT_DO_O)
    assert (family.same, family.changed, family.vanished) == (48, (), ())
    assert all("_d96_" in name for name in family.appeared)
    assert dict(family.new_values) == {"hdim_q": (96,), "hdim_v": (96,)}


def test_the_report_tells_counts_values_and_changes(found: Difference) -> None:
    assert not found.empty
    lines = found.report().splitlines()
    assert lines[0] == (
        "gfx942 2025-07 generic -> gfx942 2026-05 generic, receipt 0: "
        "20,734 appeared, 12,315 vanished, 7,584 changed, 4,275 the same"
    )
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")][1:] == [f.value for f in Family]
    assert "fwd_appendkv: 3 appeared, 99 vanished, 0 changed, 96 the same\n  lost: vlayout col\n" in found.report()
    assert "  changed, 576 kernels: wave_m0 2 -> 4, wave_m1 2 -> 4" in lines
    listing = found.listing().splitlines()
    assert [sum(line[0] == mark for line in listing) for mark in "+-~"] == [20_734, 12_315, 7_584]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("revisions", "counts"),
    [
        (("2025-07", "2025-11"), "4,884 appeared, 11,931 vanished, 7,536 changed, 4,707 the same"),
        (("2025-11", "2026-05"), "16,156 appeared, 690 vanished, 132 changed, 16,305 the same"),
    ],
)
def test_a_revision_lies_between(catalog: Catalog, tmp_path: Path, revisions: tuple[str, str], counts: str) -> None:
    catalog = copy_of(catalog, tmp_path / "catalog.db")
    catalog.populate("gfx942", revision="2025-11")
    assert between(catalog, 0, revisions).report().splitlines()[0].endswith(f", receipt 0: {counts}")


@pytest.mark.slow
def test_a_revision_does_not_differ_from_itself(catalog: Catalog) -> None:
    found = between(catalog, revisions=("2025-07", "2025-07"))
    assert found.empty
    assert found.listing() == ""
    assert found.report().startswith("gfx942 2025-07 generic -> gfx942 2025-07 generic: 0 appeared")


@pytest.mark.slow
def test_backwards_it_tells_the_reverse(catalog: Catalog, found: Difference) -> None:
    there, back = found, between(catalog, 0, ("2026-05", "2025-07"))
    for a, b in zip(there.families, back.families, strict=True):
        assert (a.appeared, a.vanished, a.same) == (b.vanished, b.appeared, b.same)
        assert (a.new_values, a.lost_values) == (b.lost_values, b.new_values)


@pytest.mark.slow
def test_one_changed_tile_is_reported_as_a_change(specs: Path, tmp_path: Path) -> None:
    """A revision that widens one tile of the combine stage: its kernels changed, nothing came or went."""
    shutil.copytree(specs / "arch_specs" / "2026-05", specs / "arch_specs" / "2026-06")
    path = specs / "arch_specs" / "2026-06" / "ck.json"
    tiles = json.loads(path.read_text())["enumerations"]["fwd_splitkv_combine"]["tiles"]
    place = next(i for i, group in enumerate(tiles) if group["hdim"] == "96x96")
    edit(path, "revision", value="2026-06")
    edit(path, "enumerations", "fwd_splitkv_combine", "tiles", place, "tiles", value=["b64_o2"])
    catalog = Catalog(tmp_path / "catalog.db")
    for revision in ("2026-05", "2026-06"):
        catalog.populate("gfx942", revision=revision)
    found = between(catalog, revisions=("2026-05", "2026-06"))
    unlike = [family for family in found.families if family.changed or family.appeared or family.vanished]
    assert [family.family for family in unlike] == [Family.FWD_SPLITKV_COMBINE]
    assert {change.traits for change in unlike[0].changed} == {"tile_n1 32 -> 64, block_per_cu -1 -> 2"}
    assert (len(unlike[0].changed), unlike[0].appeared, unlike[0].vanished) == (24, (), ())


def test_what_is_not_there_cannot_be_compared(catalog: Catalog, populated: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gfx942 has no receipt 700 at 2025-07"):
        between(catalog, 700)
    with pytest.raises(UsageError, match=r"no kernels of gfx942 \(2025-07, generic\)") as caught:
        between(Catalog(tmp_path / "empty.db"))
    assert "populate --arch gfx942 --revision 2025-07" in str(caught.value)
    other = Catalog(shutil.copy(populated("gfx942", *REVISIONS, receipts=(2,)), tmp_path / "catalog.db"))
    assert not between(other, 2).empty
    with pytest.raises(UsageError, match="receipts 2 of gfx942 only"):
        between(other)
