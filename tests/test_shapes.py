"""Sets of problems: the included ones are valid, unique and have kernels; errors in files are reported."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import combinations, product
from pathlib import Path

import command
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.errors import CatalogError, SpecError, UsageError
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.shape_names import name_of
from catalog.runtime.catalog import Catalog
from catalog.schema.shapes import Grid, Shape, builtin_sets, choose_columns, load_shapes, rows_of

COUNTS = {"smoke": range(330, 401), "full": range(1700, 2001), "nightly": range(4000, 10_001)}
SIGNATURES = 110
"""Most kernels of smoke, tile sizes aside: some three of each are compiled, 2.5 s each."""

GRID = """
about: mine
{extends}
grids:
  - name: small
    category: prefill
    {grid}
"""


@cache
def included(name: str) -> tuple[Shape, ...]:
    """The shapes of a set that comes along, read once."""
    return load_shapes(name).shapes


def written(folder: Path, grid: str, extends: str = "", name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(GRID.format(grid=grid, extends=extends), encoding="utf-8")
    return str(path)


# The sets that come along


@pytest.mark.parametrize("name", COUNTS)
def test_sets_have_the_size_that_they_are_for_and_names_and_problems_are_unique(name: str) -> None:
    shapes = included(name)
    assert len(shapes) in COUNTS[name]
    assert len({shape.name for shape in shapes}) == len({shape.problem.key for shape in shapes}) == len(shapes)


def test_each_set_begins_with_the_smaller_one() -> None:
    smoke, full, nightly = (included(name) for name in ("smoke", "full", "nightly"))
    assert full[: len(smoke)] == smoke
    assert nightly[: len(full)] == full
    assert load_shapes("smoke").shapes == smoke


def test_smoke_has_every_operation_and_what_laptops_can_do_in_50_ms() -> None:
    problems = [shape.problem for shape in included("smoke")]
    assert {problem.op for problem in problems} == {"fwd", "splitkv", "pagedkv", "appendkv", "batch_prefill", "bwd"}
    assert max(problem.flops for problem in problems) < 5e9  # at 100 GFLOP/s
    assert max(problem.bytes for problem in problems) < 100e6


def test_sets_of_gemm_have_small_problems_of_every_kind_and_upstreams_lists() -> None:
    smoke, full = included("gemm-smoke"), included("gemm-full")
    assert full[: len(smoke)] == smoke
    assert max(shape.problem.flops for shape in smoke) < 1e9
    assert max(shape.problem.bytes for shape in smoke) < 20e6
    lists = Counter(re.sub(r"-\d$", "", shape.name.partition("/")[0]) for shape in full if shape.category == "model")
    assert lists == {
        "llama-70b": 156,
        "llama-405b": 156,
        "qwen-32b": 156,
        "llama-70b-fp8": 295,
        "llama-405b-fp8": 288,
        "qwen-32b-fp8": 168,
        "deepseek-v3": 67,
        "deepseek": 78,
    }


def test_sets_of_convolution_have_small_problems_of_every_kind_and_layers_of_networks() -> None:
    smoke, full = included("conv-smoke"), included("conv-full")
    assert full[: len(smoke)] == smoke
    assert max(shape.problem.flops for shape in smoke) < 1e8
    assert max(shape.problem.bytes for shape in smoke) < 3e6
    kinds = {(shape.problem.direction, shape.problem.ndim, shape.problem.dtype) for shape in smoke}
    assert kinds >= set(product(("forward", "bwd_data", "bwd_weight"), (1, 2, 3), ("fp32", "bf16")))
    layers = Counter(shape.name.partition("/")[0] for shape in full if shape.category == "network")
    assert layers == {"resnet-50": 138, "resnext-50": 42, "mobilenet-v2": 180, "stable-diffusion": 210, "r3d-18": 66}
    assert len({shape.name for shape in full}) == len(full)


@pytest.mark.slow
def test_every_smoke_problem_has_kernels_on_this_machine_of_few_signatures() -> None:
    catalog = Catalog.default()
    signatures = set()
    for shape in included("smoke"):
        plan = catalog.select(shape.problem, arch="host")
        best = catalog.candidates(shape.problem, arch="host", limit=3)
        assert best[0].kernel in plan.kernels
        signatures |= {kernel.signature for kernel in plan.kernels}
    assert len(signatures) <= SIGNATURES


@pytest.mark.slow
def test_every_smoke_problem_has_kernels_on_gfx950(gfx950: Catalog) -> None:
    for shape in included("smoke"):
        assert gfx950.select(shape.problem, arch="gfx950").kernels


# Names


def test_a_name_is_readable() -> None:
    problem = Problem(batch=2, nhead_q=32, nhead_k=8, seqlen_q=1024, hdim_q=128, mask="causal")
    assert name_of(problem) == "b2-h32x8-s1024-d128-fp16-causal"
    packed = Problem(
        seqlens_q=[1, 64, 64], seqlens_k=[9, 64, 64], nhead_q=4, hdim_q=192, hdim_v=128, window=[8, -1], mask="window"
    )
    assert name_of(packed) == "b3-h4-q1_2x64-k9_2x64-d192x128-fp16-window8_all"


BASE = {
    "fwd": {"batch": 2, "nhead_q": 8, "seqlen_q": 256, "hdim_q": 64, "dtype": "fp8bf16", "qscale": "blockscale"},
    "group": {"seqlens_q": [7, 8], "nhead_q": 8, "hdim_q": 64, "bias": "bias", "dropout": 0.1},
    "splitkv": {
        "op": "splitkv",
        "batch": 2,
        "nhead_q": 8,
        "seqlen_q": 1,
        "seqlen_k": 64,
        "hdim_q": 64,
        "page_size": 16,
    },
    "appendkv": {
        "op": "appendkv",
        "batch": 2,
        "nhead_q": 8,
        "seqlen_q": 1,
        "seqlen_k": 64,
        "hdim_q": 64,
        "seqlen_new": 1,
        "rope": "half",
    },
    "prefill": {
        "op": "batch_prefill",
        "seqlens_q": [7, 8],
        "seqlen_k": 64,
        "nhead_q": 8,
        "hdim_q": 64,
        "page_size": 16,
    },
    "bwd": {"op": "bwd", "batch": 2, "nhead_q": 8, "seqlen_q": 256, "hdim_q": 64, "bias": "bias"},
    "block mask": {"batch": 2, "nhead_q": 8, "seqlen_q": 64, "hdim_q": 64, "block_mask_q": 32, "block_mask_kv": 32},
}
CHANGES = {
    "op": ["pagedkv"],
    "dtype": ["bf16", "fp8fp32"],
    "page_size": [32],
    "seqlens_q": [[8, 7], list(range(1, 9)), [2, 1, *range(3, 9)]],
    "seqlens_k": [[7, 9], list(range(1, 3))],
    "batch": [3],
    "nhead_q": [16],
    "nhead_k": [4],
    "seqlen_q": [2],
    "seqlen_k": [63],
    "hdim_q": [48],
    "hdim_v": [48],
    "mask": ["causal", "bottom_right"],
    "window": [[3, 0], [3, -1]],
    "sink_size": [2],
    "lse": [True],
    "scale": [0.5],
    "bias": ["alibi"],
    "bias_dims": ["11", "bh"],
    "logits_soft_cap": [30.0],
    "dropout": [0.25],
    "randval": [True],
    "qscale": ["pertensor"],
    "block_scale_size_q": [64],
    "block_scale_size_kv": [64],
    "block_mask_q": [64],
    "block_mask_kv": [64],
    "min_seqlen_q": [1],
    "num_splits": [2],
    "num_pages": [99],
    "kv_memory_layout": ["vectorized"],
    "kv_lookup_table": ["sglang"],
    "seqlen_new": [2],
    "rope": ["inter"],
    "rotary_dim": [8],
    "dbias": [True],
    "dlse": [True],
    "deterministic": [True],
    "layout": ["bshd"],
}


def neighbours() -> list[Problem]:
    """Every base, and every valid problem that differs from one in a field; of windows and sinks also the mask."""
    found: dict[str, Problem] = {}
    changes = [{field: value} for field, values in CHANGES.items() for value in values]
    changes += [change | {"mask": mask} for change in changes if "window" in change for mask in ("window", "top_left")]
    changes += [{"mask": "window", "window": [3, 0], "sink_size": 2}]
    for base in BASE.values():
        for change in [{}, *changes]:
            try:
                problem = Problem(**{**base, **change})
            except UsageError:
                continue
            found[problem.key] = problem
    return list(found.values())


def test_a_name_says_every_field() -> None:
    assert set(CHANGES) == set(Problem.model_fields), "a new field needs a value that differs"
    problems = neighbours()
    said = {field for field in CHANGES for a, b in combinations(problems, 2) if getattr(a, field) != getattr(b, field)}
    assert said == set(CHANGES)
    twins = [name for name, n in Counter(map(name_of, problems)).items() if n > 1]
    assert not twins


# Files of one's own


def test_a_file_extends_a_set_that_comes_along(tmp_path: Path) -> None:
    mine = load_shapes(written(tmp_path, "fixed: {batch: 1, nhead_q: 3, hdim_q: 64, seqlen_q: 11}", "extends: smoke"))
    assert mine.shapes[-1].name == "small/b1-h3-s11-d64-fp16"
    assert mine.shapes[:-1] == included("smoke")


def test_the_example_of_the_docs_is_as_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "reference" / "shapes.md").read_text(encoding="utf-8")
    (tmp_path / "ours.yaml").write_text(
        page.partition('```yaml title="ours.yaml"\n')[2].partition("```")[0], encoding="utf-8"
    )
    names = [shape.name for shape in load_shapes(str(tmp_path / "ours.yaml")).shapes]
    assert len([name for name in names if name.startswith("chat/")]) == 16
    assert "chat/b6-h24x8-s500-d128-bf16-causal-lse" in names
    assert names[-2:] == ["documents/b3-h24x8-q100_900_37-d128-fp16", "documents/b2-h24x8-q2x512-d128-fp16"]
    for name in COUNTS:
        assert f"| `{name}` | {len(included(name)):,} |" in page


def test_a_file_extends_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path, "fixed: {batch: 1, nhead_q: 1, hdim_q: 64, seqlen_q: 1}", name="base.yaml")
    grid = "{name: more, category: long, fixed: {batch: 1, nhead_q: 1, hdim_q: 64, seqlen_q: 9}}"
    own = f"about: more\nextends: ./base.yaml\ngrids: [{grid}]"
    (tmp_path / "own.yml").write_text(own, encoding="utf-8")
    assert [shape.category for shape in load_shapes(str(tmp_path / "own.yml")).shapes] == ["prefill", "long"]


def test_words_of_yaml_are_what_they_look_like(tmp_path: Path) -> None:
    grid = (
        "fixed: {batch: 1, nhead_q: 1, hdim_q: 64, seqlen_q: 8, scale: 2e-1, lse: true}\n    vary: {mask: [no, causal]}"
    )
    plain, causal = (shape.problem for shape in load_shapes(written(tmp_path, grid)).shapes)
    assert (plain.mask, causal.mask) == ("no", "top_left")
    assert plain.scale == 0.2
    assert plain.lse is True


@given(
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    lengths=st.lists(st.integers(1, 99), min_size=1, max_size=4, unique=True),
    heads=st.lists(st.sampled_from([(1, 1), (4, 1), (4, 2), (8, 8)]), min_size=1, max_size=4, unique=True),
)
@settings(max_examples=30, deadline=None)
def test_a_grid_is_the_product_of_its_axes(
    tmp_path_factory: pytest.TempPathFactory, batches: list[int], lengths: list[int], heads: list[tuple[int, int]]
) -> None:
    together = [{"nhead_q": q, "nhead_k": k} for q, k in heads]
    grid = {
        "name": "g",
        "category": "c",
        "fixed": {"hdim_q": 64},
        "vary": {"batch": batches, "seqlen_q": lengths},
        "together": {"heads": together},
    }
    path = tmp_path_factory.mktemp("grid") / "grid.yaml"
    path.write_text(json.dumps({"about": "JSON is YAML", "grids": [grid]}), encoding="utf-8")
    shapes = load_shapes(str(path)).shapes
    assert (
        len(shapes) == Grid.model_validate(grid, context=Problem).size == math.prod(map(len, (batches, lengths, heads)))
    )
    expected = [
        Problem(batch=batch, seqlen_q=length, nhead_q=q, nhead_k=k, hdim_q=64)
        for batch in batches
        for length in lengths
        for q, k in heads
    ]
    assert [shape.problem for shape in shapes] == expected


MANY = list(range(400))
FIELDS = "fixed: {batch: 1, nhead_q: 8, hdim_q: 64, seqlen_q: 8}"


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("fixed: {batch: 1, nhead_q: 8, nhead_k: 3, hdim_q: 64}", "{batch: 1, nhead_q: 8, nhead_k: 3, hdim_q: 64}: a"),
        ("fixed: {batch: 1, nhead_q: 8, nhead_k: 3, hdim_q: 64, seqlen_q: 8}", "nhead_k=3: must divide nhead_q=8"),
        ("fixed: {batch: 1, nhead: 8}", "grid 'small': fixed.nhead: a problem has no field 'nhead'; did"),
        (f"{FIELDS}\n    vary: {{batch: [1, 2]}}", "grid 'small': batch is stated in fixed and in vary"),
        (f"{FIELDS}\n    together: {{a: [{{lse: true}}], b: [{{lse: false}}]}}", "lse is stated in together.a"),
        (f"{FIELDS}\n    vary: {{lse: []}}", "grid 'small': vary.lse: must not be empty"),
        (f"{FIELDS}\n    vary: {{lse: true}}", "grid 'small': vary.lse: must be a list"),
        (f"{FIELDS}\n    vary: {{lse: [{{a: 1}}]}}", "grid 'small': vary.lse[0]: a word, a number"),
        (f"{FIELDS}\n    vary: {{lse: [true, true]}}", "grid 'small' has the problem b1-h8-s8-d64-fp16-lse twice"),
        (f"{FIELDS}\n    varies: {{}}", "grid 'small': varies: unknown field; allowed: name, about"),
        (f"{FIELDS}\n    fixed: {{batch: 2}}", ":8:5: not YAML: 'fixed' is stated twice"),
        (f"{FIELDS}\n  - name: small", "grid 'small': category: missing"),
        (f"{FIELDS}\n  - {{name: small, category: c}}", "two grids are called 'small'"),
        (f"{FIELDS}\n  - {{name: other, category: c, {FIELDS}}}", "b1-h8-s8-d64-fp16 as in grid 'small'"),
        (f"vary: {{batch: {MANY}, seqlen_q: {MANY}}}", "160,000 shapes, at most 100,000; grid 'small'"),
        ("fixed: &a {batch: 1}\n    vary: *a", "not YAML: aliases are not supported here"),
        ("fixed: {batch: 1", "expected ',' or '}'"),
        ("fixed: !!python/object/apply:os.getcwd []", "not YAML: could not determine a constructor"),
        ("fixed: " + "[" * 5000, "nest"),  # the words of PyYAML 6.0.4 or our own
        ("? [a, b]\n    : 1", "a key must be a word"),
    ],
)  # fmt: skip
def test_errors_name_file_grid_field_and_reason(tmp_path: Path, grid: str, message: str) -> None:
    path = written(tmp_path, grid)
    with pytest.raises(UsageError) as caught:
        load_shapes(path)
    assert path in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the top level must be about: and grids:"),
        ("- 1", "the top level must be about: and grids:"),
        ("about: x\ngrids: []", "grids: must not be empty"),
        ("about: x\ngrids: [smoke]", "grids[0]: must be a mapping"),
        ("about: x\nextends: smok\ngrids: [{name: a, category: b}]", "extends: no set of shapes is called 'smok'; did"),
        ("about: x\nextends: ./mine.yaml\ngrids: [{name: a, category: b}]", "extends itself"),
        ("about: x\nextends: ./none.yaml\ngrids: [{name: a, category: b}]", "none.yaml: cannot be read: No such"),
        ('about: x\nextends: "./a\\0b.yaml"\ngrids: [{name: a, category: b}]', "its name has a NUL byte"),
        ("about: \0", "not YAML: "),
        (b"\xff", "cannot be read"),
    ],
)  # fmt: skip
def test_errors_of_whole_files_are_reported(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        load_shapes(str(path))
    assert message in str(caught.value)


def test_a_file_that_comes_along_is_ours_to_mend(specs: Path) -> None:
    (specs / "shapes").mkdir()
    written(specs / "shapes", "fixed: {batch: 1}", name="smoke.yaml")
    assert builtin_sets() == ("smoke",)
    with pytest.raises(SpecError, match=r"smoke\.yaml: grid 'small': \{batch: 1\}: a problem needs nhead_q"):
        load_shapes("smoke")
    with pytest.raises(CatalogError, match=r"(?s)called 'full'.*There are: smoke"):
        load_shapes("full")


# The command line


def test_the_command_lists_sets_and_shapes() -> None:
    sets = json.loads(command.catalog("shapes", "--format", "json").stdout)
    names = ["gemm-smoke", "conv-smoke", "smoke", "conv-full", "gemm-full", "full", "nightly"]
    assert [row["name"] for row in sets] == names
    rows = json.loads(command.catalog("shapes", "smoke", "--format", "json").stdout)
    assert len(rows) == sets[2]["shapes"]
    by_name = {shape.name: shape.problem for shape in included("smoke")}
    for row in rows:
        problem = by_name[row["name"]]
        stated = {name: value for name, value in row.items() if name in Problem.model_fields and value is not None}
        assert Problem(**stated) == problem, "the fields that are printed make the problem"
        assert row["gflop"] == pytest.approx(problem.flops / 1e9, abs=1e-6)
        assert row["mb"] == pytest.approx(problem.bytes / 1e6, abs=1e-6)


def test_the_command_prints_chosen_columns_of_a_file(tmp_path: Path) -> None:
    done = command.catalog("shapes", written(tmp_path, FIELDS), "--columns", "name,lse,dropout", "--format", "csv")
    assert done.stdout.splitlines() == ["name,lse,dropout", "small/b1-h8-s8-d64-fp16,False,0.0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smok"], "did you mean smoke?"),
        (["./none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        (["smoke", "--columns", "hdim"], "no column of shapes is called 'hdim'"),
        (["smoke", "--format", "xml"], "--format xml"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(words: list[str], message: str) -> None:
    done = command.catalog("shapes", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_columns_are_those_that_some_problem_uses(tmp_path: Path) -> None:
    mine = load_shapes(written(tmp_path, FIELDS))
    columns = choose_columns(mine)
    assert columns[:4] == ("name", "category", "gflop", "mb")
    assert "dropout" not in columns
    assert len(next(rows_of(mine, columns))) == len(columns)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


@pytest.mark.parametrize(
    ("make", "message"), [(os.mkfifo, "a pipe, not a regular file"), (_sparse, "more than 16,777")]
)
def test_a_set_that_is_no_file_of_text_is_not_read(
    make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    make(tmp_path / "mine.yaml")
    with pytest.raises(UsageError, match=message):
        load_shapes(str(tmp_path / "mine.yaml"))
