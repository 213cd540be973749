"""Explanations: a rule for every kernel that is missing, none against one that exists, and counts that add up."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from test_schema import edit
from typer.testing import CliRunner

from catalog.cli.main import app
from catalog.errors import CatalogError, SpecError, UsageError
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.traits import TRAITS, Family
from catalog.rules.explain import Explanation, Verdict
from catalog.rules.table import COLUMNS, KINDS
from catalog.runtime.catalog import Catalog
from catalog.schema.spec_files import find_spec, load_spec_file
from catalog.schema.trait_text import read_traits

ID, SCOPE, EXPR = (COLUMNS.index(column) for column in ("id", "scope", "expr"))


def explained(catalog: Catalog, words: str, **where: Any) -> Explanation:
    return catalog.explain(read_traits(words.split(), TRAITS), arch="gfx950", **where)


def verdicts(explanation: Explanation, kind: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {f.id: (f.verdict.value, f.traits) for f in explanation.findings if f.kind == kind}


def test_a_rule_holds_rejects_or_depends_on_unstated_traits(gfx950: Catalog) -> None:
    words = "family=fwd dtype=bf16 hdim_q=128 hdim_v=128 pipeline=qr_async tile_m0=64 mode=group pad_s=0"
    found = explained(gfx950, words)
    constraints = verdicts(found, "constraint")
    assert constraints["group_mode_padding"] == ("rejected", ("mode=group", "pad_s=0"))
    assert constraints["hdim_192x128_inference_only"] == ("holds", ())
    assert constraints["soft_cap_excludes_bias"] == ("depends", ("bias", "logits"))
    assert constraints["gfx9_tile_per_pipeline"] == ("depends", ("tile_n0", "tile_k0"))
    assert {f.id for f in found.rejections} == {"variants", "group_mode_padding"}
    assert all(finding.reason and finding.source for finding in found.findings)
    assert found.kernels == 0
    assert found.matches[0].changes == ("pad_s=1",)
    assert "_group_b64x128x" in found.matches[0].name


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ("family=fwd hdim_q=128 tile_m0=64 tile_n0=96", "tile", "tile_n0=128"),
        ("family=fwd dtype=bf16 pipeline=qr_async bias=bias", "variant", "qr_async needs (bias <> 'bias'"),
        ("family=fwd dtype=bf16 pipeline=qr_async pad_s=0", "variant", "qr_async needs pad_s=1"),
        ("family=fwd dbias=1", "trait", "have dbias=0 only"),
        ("family=bwd_dot_do_o tile_m0=128", "trait", "have tile_m0=64 only"),
        ("family=bwd_dq_dk_dv dropout=0 dropout_variant=wg16", "derived", "dropout follows from other traits"),
        ("family=bwd_dq_dk_dv max_seq_q=16 mode=group", "constraint", "batch mode without a mask only"),
        ("family=fwd dtype=fp32 logits=1", "listed", "at least one receipt"),
        ("family=fwd hdim_q=100", "invariant", "8 elements"),
    ],
)
def test_each_kind_of_rule_rejects_with_a_reason(gfx950: Catalog, words: str, kind: str, message: str) -> None:
    found = explained(gfx950, words, limit=1)
    reasons = [finding.reason for finding in found.rejections if finding.kind == kind]
    assert any(message in reason for reason in reasons), found.rejections
    assert found.kernels == 0
    assert len(found.matches) == 1
    assert "rejected by" in found.summary


def test_a_condition_on_an_unstated_trait_is_not_taken_for_false(catalog_of: Callable[[str], Catalog]) -> None:
    """SQL's own iif takes its last branch when the condition is unknown."""
    traits = read_traits(["family=fwd", "hdim_q=128", "hdim_v=128", "pad_d=1", "pad_dv=1"], TRAITS)
    found = catalog_of("gfx1100").explain(traits, arch="gfx1100")
    assert verdicts(found, "constraint")["gfx11_d128_tile"][0] == "depends"


def test_a_family_that_the_arch_lacks_is_the_reason(catalog_of: Callable[[str], Catalog]) -> None:
    found = catalog_of("gfx1100").explain({"family": "batch_prefill"}, arch="gfx1100")
    assert [finding.id for finding in found.rejections] == ["batch_prefill"]
    assert not found.matches


def test_what_the_hardware_cannot_run_exists_all_the_same(catalog_of: Callable[[str], Catalog]) -> None:
    traits = read_traits(["family=fwd", "dtype=fp8bf16", "hdim_q=64"], TRAITS)
    found = catalog_of("gfx90a").explain(traits, arch="gfx90a")
    assert found.kernels
    assert {finding.id for finding in found.rejections} == {"no_8_bit_floats", "arch_has_dtype"}
    assert "not runnable" in found.summary


@pytest.mark.parametrize("family", slow_but([Family.FWD_SPLITKV, Family.BATCH_PREFILL], Family))
def test_no_rule_is_against_a_kernel_that_exists_and_some_rule_against_any_other(
    gfx950: Catalog, family: Family
) -> None:
    """Fully stated, nothing is left open; with one trait changed, rules and rows agree on whether it exists."""
    rows = gfx950.connection.execute("SELECT * FROM kernels WHERE family = ? ORDER BY id", (family.value,)).fetchall()
    draw = random.Random(0)  # noqa: S311
    for row in draw.sample(rows, 3):
        traits = {trait: row[trait] for trait in TRAITS}
        exact = gfx950.explain(traits, arch="gfx950")
        [match] = exact.matches
        assert (exact.kernels, match.id, match.name, match.receipts) == (1, row["id"], row["name"], row["receipts"])
        assert row["name"] in exact.summary
        assert {finding.verdict for finding in exact.findings if finding.kind != "receipt"} == {Verdict.HOLDS}
        listed = [id_ for id_, (verdict, _) in verdicts(exact, "receipt").items() if verdict == "holds"]
        assert listed == row["receipts"].split()
        trait = draw.choice([trait for trait in TRAITS if trait != "family"])
        value = draw.choice(rows)[trait]
        changed = gfx950.explain({**traits, trait: value}, arch="gfx950")
        assert bool(changed.kernels) is not bool(changed.rejections)


@pytest.mark.parametrize(
    "arch",
    slow_but(["gfx950"], ["gfx950", "gfx942", "gfx90a", "gfx908", "gfx1100", "gfx1151", "gfx1200", "gfx1201"]),
)
def test_every_kernel_that_its_hardware_runs_meets_the_invariants(
    catalog_of: Callable[[str], Catalog], arch: str
) -> None:
    catalog = catalog_of(arch)
    rules = catalog.rules(arch, kind="invariant")
    held = ", ".join(f"min(? NOT IN ('', family) OR ({rule[EXPR]}) IS TRUE)" for rule in rules)
    [verdicts] = catalog.connection.execute(
        f"SELECT {held} FROM attention_row WHERE arch = ? AND hw_valid", [*(rule[SCOPE] for rule in rules), arch]
    )
    assert [rule[ID] for rule, holds in zip(rules, verdicts, strict=True) if not holds] == []
    unfit = catalog.connection.execute("SELECT count(*) FROM attention_row WHERE arch = ? AND NOT hw_valid", (arch,))
    assert bool(unfit.fetchone()[0]) is (arch in {"gfx908", "gfx90a", "gfx1100", "gfx1151"})


def test_a_wrong_invariant_is_named(specs: Path) -> None:
    path = specs / "arch_specs" / "2026-05" / "ck.json"
    edit(path, "invariants", 0, "expr", value="archh = 'gfx950'")
    with pytest.raises(SpecError, match=r"ck\.json: invariants\[0\]\.expr: .*did you mean arch"):
        load_spec_file(find_spec((specs / "arch_specs",), "gfx950"))


@pytest.mark.parametrize(
    ("changes", "kind", "rule"),
    [
        ({}, "build", "compiles"),
        ({"hdim_q": 257}, "build", "compiles"),
        ({"dtype": "bf8"}, "trait", "dtype"),
        ({"lse": True, "dtype": "fp8bf16"}, "trait", "lse"),
    ],
)
def test_a_problem_narrows_the_kernels_down_to_its_candidates(
    gfx950: Catalog, changes: dict[str, Any], kind: str, rule: str
) -> None:
    fields: dict[str, Any] = {"batch": 8, "nhead_q": 32, "seqlen_q": 2048, "hdim_q": 128, "dtype": "bf16"} | changes
    problem = Problem(**fields)
    steps, kept = gfx950.narrowing(problem, arch="gfx950", limit=1000)
    assert (steps[-1].kind, steps[-1].id, steps[-1].left) == (kind, rule, len(kept))
    lefts = [step.left for step in steps]
    assert lefts == sorted(lefts, reverse=True)
    for before, step in itertools.pairwise(steps):
        lost = before.left - step.left
        assert lost == step.rejects if step.kind == "trait" else lost <= step.rejects
    if kept:
        assert kept == gfx950.candidates(problem, arch="gfx950", limit=1000)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hdim=128", "did you mean hdim_v or hdim_q?"),
        ("arch=gfx950", "--arch"),
        ("hdim_q", "trait=value, as in family=fwd"),
        ("hdim_q=-1", "integer >= 0"),
        ("hdim_q=99999999999999999999", "9 digits"),
        ("pipeline=qr_asinc", "did you mean qr_async"),
        ("lse=maybe", "Allowed: 0, 1"),
        ("pad_s=3", "Allowed: 0, 1, 8"),
        ("family=bwd", "stated twice"),
    ],
)
def test_a_wrong_word_says_what_is_allowed(word: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_traits(["family=fwd", word], TRAITS)


def run(catalog: Catalog, *words: str) -> Any:
    return CliRunner().invoke(app, ["--db", str(catalog.path), *words])


def test_explain_prints_both_kinds_in_every_format(gfx950: Catalog) -> None:
    traits = ["explain", "--arch", "gfx950", "family=fwd", "hdim_q=128", "mode=group", "pad_s=0", "lse=true"]
    problem = ["explain", "--arch", "gfx950", "--batch", "1", "--nhead-q", "8", "--seqlen-q", "2048", "--hdim-q", "128"]
    table = run(gfx950, *traits)
    assert table.exit_code == 0
    assert table.stdout.startswith("No kernel of gfx950 has these traits; rejected by: group_mode_padding.\n")
    assert table.stdout.index("\nchanges  ") < table.stdout.index("\nkind  "), "the answer, then the evidence"
    assert run(gfx950, *problem).stdout.startswith("11 fwd kernels answer the problem; the best, in order:\n")
    for words in (traits, problem):
        rows = json.loads(run(gfx950, *words, "--limit", "2", "--format", "json").stdout)
        assert [bool(row["name"]) for row in rows[-3:]] == [False, True, True]
        assert {row["kind"] for row in rows[-2:]} == {"kernel"}


def test_rules_lists_what_concerns_a_family(gfx950: Catalog, tmp_path: Path) -> None:
    done = run(gfx950, "rules", "--arch", "gfx950", "--family", "bwd_dot_do_o", "--format", "json")
    rows = json.loads(done.stdout)
    assert {row["scope"] for row in rows} == {"", "bwd", "bwd_dot_do_o"}
    assert [row["kind"] for row in rows] == sorted((row["kind"] for row in rows), key=KINDS.index)
    new = Catalog(tmp_path / "new.db")
    assert new.rules() == []
    order = new.rules("sm_90", kind="order", operation="conv")
    assert {row[COLUMNS.index("kind")] for row in order} == {"order"}
    assert len(new.rules(operation="conv")) > len(order)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("explain", "nothing to explain"),
        ("explain family=fwd --batch 1", "cannot be combined"),
        ("explain --arch gfx950 hdim_q=128", "no family is stated"),
        ("rules --kind constrant", "did you mean constraint?"),
        ("rules --family fdw", "did you mean fwd"),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2(gfx950: Catalog, words: str, message: str) -> None:
    error = run(gfx950, *words.split()).exception
    assert isinstance(error, CatalogError)
    assert error.exit_code == 2
    assert message in str(error)
