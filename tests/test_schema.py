"""Traits, kernels, names and specs: what goes in comes out, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog.build.resources import RESOURCES
from catalog.errors import CatalogError, SpecError, UsageError
from catalog.ops import operation
from catalog.ops.attention.kernel import AttentionKernel
from catalog.ops.attention.names import Grammar, grammar_of, parse_name
from catalog.ops.attention.traits import TRAITS, Family
from catalog.runtime.catalog import Catalog
from catalog.schema.columns import BUILD, columns_of
from catalog.schema.name_parts import Choice, Pads
from catalog.schema.spec_files import find_spec, load_spec_file
from catalog.schema.traits import Trait


@pytest.mark.parametrize("step", slow_but([500], [500, 1]))
def test_every_row_of_gfx950_survives_both_round_trips(gfx950: Catalog, step: int) -> None:
    rows = gfx950.connection.execute("SELECT * FROM attention_row").fetchall()
    assert len(rows) > 34_889
    for row in rows[::step]:
        kernel = AttentionKernel.from_row(row)
        written = kernel.to_row()
        assert AttentionKernel.from_row(written) == kernel
        assert written == {name: row[name] for name in written}
        assert (kernel.id, kernel.name) == (row["id"], row["name"])
        assert parse_name(row["name"]) == {name: written[name] for name in ("target", *TRAITS)}


def values_of(trait: Trait) -> st.SearchStrategy[Any]:
    if trait.kind == "bool":
        return st.booleans()
    if trait.values:
        return st.sampled_from(trait.values)
    if trait.kind == "int":
        return st.integers(trait.minimum, 512)
    return st.text(max_size=8)


kernel_rows = st.fixed_dictionaries(
    {name: values_of(trait) for name, trait in TRAITS.items()}
    | {name: st.text(max_size=8) for name in TRAITS.identity if name != "target"}
    | {"target": st.sampled_from(["", "gfx9", "gfx950", "x86_64_v3", "aarch64"])}
)


@given(kernel_rows)
def test_any_kernel_survives_row_and_json(row: dict[str, Any]) -> None:
    kernel = AttentionKernel.from_row(row)
    assert AttentionKernel.from_row(kernel.to_row()) == kernel
    written = kernel.canonical_json
    again = AttentionKernel.model_validate_json(written)
    assert (again, again.id) == (kernel, kernel.id)
    assert kernel.canonical_json == written, "its id, computed since, is no part of it"


@st.composite
def named_rows(draw: st.DrawFn, revision: str) -> tuple[Grammar, dict[str, Any]]:
    """A grammar of the revision, and a row whose every trait it has a word for: it has none for some combinations."""
    grammar, row = grammar_of(draw(st.sampled_from(list(Family))), revision), draw(kernel_rows)
    for part in grammar.parts:
        if isinstance(part, Choice):
            row |= zip(part.fields, draw(st.sampled_from(list(part.texts))), strict=True)
        elif isinstance(part, Pads):
            row |= {axis: draw(st.sampled_from([0, *part.amounts])) for axis in part.letters}
    return grammar, row


TARGETS = [("2026-05", ""), ("2026-05", "gfx950"), ("native", "x86_64_v3"), ("native", "an_arch_of_another_package")]


@pytest.mark.parametrize(("revision", "target"), slow_but(TARGETS[1:3], TARGETS))
@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
@given(data=st.data())
def test_a_parsed_name_writes_the_same_name(data: st.DataObject, revision: str, target: str) -> None:
    grammar, row = data.draw(named_rows(revision))
    name = grammar.name(row | {"target": target})
    parsed = grammar.parse(name)
    assert parsed is not None
    assert grammar.name(parsed) == name


def test_names_of_no_kernel_are_refused() -> None:
    with pytest.raises(UsageError, match="fmha_fwd_nonsense"):
        parse_name("fmha_fwd_nonsense")


def test_columns_describe_the_view(gfx950: Catalog) -> None:
    view = [column[0] for column in gfx950.connection.execute("SELECT * FROM kernels LIMIT 0").description]
    columns = list(columns_of(operation()))
    assert [column.name for column in columns] == view
    assert all(column.meaning and column.domain for column in columns)
    assert {column.name for column in BUILD} == {*RESOURCES, "isa", "compile_s"}


def edit(path: Path, *steps: str | int, value: Any) -> None:
    """Set what lies at ``steps`` of a JSON file."""
    document = json.loads(path.read_text())
    place = document
    for step in steps[:-1]:
        place = place[step]
    place[steps[-1]] = value
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("file", "steps", "value", "fragments"),
    [
        ("gfx950", ("enumerations", "fwd", "tiles", 0, "dtype"), ["fp61"], ["fwd.tiles[0].dtype[0]", "fp16", "mxfp4"]),
        ("gfx950", ("enumerations", "fwd", "tiles", 0, "hdim"), "128", ["fwd.tiles[0]", "hdim: '128'"]),
        (
            "gfx950",
            ("enumerations", "fwd", "tiles", 0, "tiles"),
            ["b1x2"],
            ["fwd.tiles[0].tiles", "'b1x2' is not a tile"],
        ),
        (
            "gfx9",
            ("enumerations", "fwd", "variants", 0, "traits"),
            {"pipelin": "qr"},
            ["did you mean pipeline?"],
        ),
        (
            "gfx9",
            ("enumerations", "fwd", "variants", 0, "traits"),
            {"pipeline": "qx"},
            ["pipeline cannot be 'qx'", "qr_async"],
        ),
        ("gfx9", ("enumerations", "fwd", "variants", 0, "traits"), {"lse": 1}, ["lse is a boolean"]),
        ("gfx9", ("enumerations", "fwd", "variants", 0, "traits"), {"pad_s": 3}, ["pad_s cannot be 3", "0, 1, 8"]),
        ("gfx9", ("enumerations", "fwd", "variants", 0, "domain"), "featurs", ["domain 'featurs'", "features"]),
        (
            "ck",
            ("enumerations", "fwd", "constraints", 0, "expr"),
            "mod = 'x'",
            ["fwd.constraints[0].expr", "did you mean mode?"],
        ),
        ("ck", ("enumerations", "fwd", "receipts", "2"), "lse AND", ["fwd.receipts.2", "syntax error"]),
        (
            "ck",
            ("enumerations", "fwd", "constraints", 0, "raeson"),
            "x",
            ["constraints[0].raeson", "unknown field", "reason"],
        ),
        ("ck", ("select", "fwd", "rules", 0, "expr"), ":hdim < 3", ["select.fwd.rules[0].expr", ":hdim_q"]),
        ("gfx950", ("extends",), "gfx8", ["no spec 'gfx8'", "gfx9"]),
        ("gfx9", ("extends",), "gfx950", ["extends itself", "gfx950 -> gfx9"]),
        ("gfx950", ("hardware",), {"$ref": "gfx942"}, ["'gfx942'", "expected a file and a path in it"]),
        ("gfx950", ("hardware",), {"$ref": "gfx8.json#/hardware"}, ["there is no file", "gfx8.json"]),
        ("gfx950", ("hardware",), {"$ref": "gfx942.json#/software"}, ["there is no 'software'", "hardware, hw_rules"]),
        ("gfx950", ("hw_rules",), [{"$ref": "gfx942.json#/hw_rules/lds"}], ["there is no 'lds'", "lds_capacity"]),
        ("gfx950", ("hw_rules",), {"$ref": "gfx942.json#/hw_rules", "id": "x"}, ["is no object", "beside it"]),
        (
            "gfx950",
            ("hardware",),
            {"$ref": "gfx950.json#/hardware"},
            ["refer to each other in a circle", "gfx950.json"],
        ),
    ],
)
def test_a_wrong_spec_names_file_place_and_what_is_allowed(
    specs: Path, file: str, steps: tuple[str | int, ...], value: Any, fragments: list[str]
) -> None:
    path = specs / "arch_specs" / "2026-05" / f"{file}.json"
    edit(path, *steps, value=value)
    with pytest.raises(SpecError) as caught:
        load_spec_file(find_spec((specs / "arch_specs",), "gfx950"))
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert ".json" in str(caught.value)


def test_a_reference_stands_for_what_it_names_changed_by_the_keys_beside_it(specs: Path) -> None:
    """Objects merge, null removes, anything else replaces; an item of a list is named by its id."""
    path = specs / "arch_specs" / "2026-05" / "gfx942.json"
    rule = {"$ref": "../2026-05/gfx90a.json#/hw_rules/no_8_bit_floats", "reason": "as on CDNA 2"}
    edit(path, "hw_rules", value=[rule])
    edit(path, "hardware", value={"$ref": "gfx950.json#/hardware", "compute_units": None, "isa": "gfx942"})
    spec = load_spec_file(find_spec((specs / "arch_specs",), "gfx942"))
    assert [(rule.id, rule.reason) for rule in spec.hw_rules] == [("no_8_bit_floats", "as on CDNA 2")]
    assert spec.hardware is not None
    assert spec.hardware.model_dump(exclude_none=True) == {
        "vendor": "amd", "family": "CDNA", "generation": 4, "lds_bytes": 163840, "wavefront": 64, "isa": "gfx942",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["{", "[]", '{"arch": 1}', "", '{"$ref": "gfx942.json#/hw_rules"}'])
def test_a_spec_that_is_no_json_object_names_the_file(specs: Path, text: str) -> None:
    (specs / "arch_specs" / "2026-05" / "gfx950.json").write_text(text)
    with pytest.raises(CatalogError, match=r"gfx950\.json"):
        load_spec_file(find_spec((specs / "arch_specs",), "gfx950"))


@pytest.mark.parametrize(("arch", "revision", "message"), [("gfx95", None, "gfx950"), ("gfx950", "2031-01", "2026-05")])
def test_an_unknown_arch_or_revision_says_what_there_is(arch: str, revision: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Catalog().spec(arch, revision)
