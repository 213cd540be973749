"""Block masks on the host: a bitmap names the blocks of queries and keys that are attended to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import amx
import command
import numpy as np
import pytest
from conftest import slow_but
from host_problems import poison_last_block

from catalog.errors import SelectionError
from catalog.ops.attention.inputs import complete
from catalog.ops.attention.problem import Problem
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host.device import cpu_features, host_archs
from catalog.runtime.inputs import make_inputs
from catalog.runtime.plan import Plan
from catalog.runtime.tensors import Array
from catalog.runtime.validate import Expected

SIZES: dict[str, Any] = {"batch": 2, "nhead_q": 4, "nhead_k": 2, "seqlen_q": 200, "seqlen_k": 330, "hdim_q": 64}
BLOCKS = {"block_mask_q": 64, "block_mask_kv": 64}
MASKS: dict[str, dict[str, Any]] = {
    "none": {"block_mask_q": 128, "block_mask_kv": 128},
    "causal": BLOCKS | {"mask": "bottom_right", "lse": True, "hdim_q": 96},
    "window": {"block_mask_q": 16, "block_mask_kv": 32, "mask": "window", "window": (90, 5), "layout": "bshd"},
    "blocks longer than tiles": {"block_mask_q": 80, "block_mask_kv": 288, "bias": "bias"},
    "few queries": BLOCKS | {"seqlen_q": 3, "nhead_q": 2},
    "queries of several heads": BLOCKS | {"seqlen_q": 3, "bias": "alibi", "lse": True},
}
PIPELINES = (("fp32", "host_panel"), ("bf16", "host_panel"), ("fp16", "host_panel"))
OF_16_BITS = (("bf16", "host_bf16"), ("bf16", "host_amx"), ("fp16", "host_amx"))


def in_turn(masks: Iterable[str], *pipelines: Sequence[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Each mask with a data type and a pipeline of each of the lists."""
    return [(*found[index % len(found)], mask) for index, mask in enumerate(masks) for found in pipelines]


@pytest.fixture
def catalog(host_file: Path, tmp_path: Path) -> Iterator[Catalog]:
    with Catalog(shutil.copy(host_file, tmp_path / "catalog.db")) as catalog:
        yield catalog


def assert_right(plan: Plan, inputs: dict[str, Array]) -> None:
    expected = Expected(plan.problem, inputs, plan.kernels[0].arch)
    assert all(check.passed for check in expected.check(expected.run(plan))), plan


def arch_with(pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The arch whose first choice is a pipeline, on a CPU as if it had no better one."""
    arch = "host"
    if pipeline != "host_panel":
        if "x86_64_v4" not in host_archs() or not amx.PAIRS[pipeline] - amx.TILES <= cpu_features():
            pytest.skip("this CPU has no AVX512-BF16")
        arch = "x86_64_v4"
    if arch != "host" or "x86_64_v4" in host_archs():
        amx.pretend(pipeline, tmp_path, monkeypatch)
    return arch


@pytest.mark.parametrize(
    ("dtype", "pipeline", "mask"),
    slow_but([("bf16", "host_panel", "causal")], in_turn(MASKS, PIPELINES, OF_16_BITS)),
)
def test_every_pipeline_agrees_with_the_reference(
    *, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, pipeline: str, mask: str
) -> None:
    arch = arch_with(pipeline, tmp_path, monkeypatch)
    problem = Problem(**SIZES | MASKS[mask], dtype=dtype)
    plan = catalog.select(problem, arch=arch)
    assert plan.kernels[0].algorithm.pipeline == pipeline
    for seed in range(3):
        assert_right(plan, make_inputs(problem, seed))


WITHOUT_LSE = {name: {field: value for field, value in mask.items() if field != "lse"} for name, mask in MASKS.items()}
GRADIENTS = WITHOUT_LSE | {
    "blocks longer than tiles": MASKS["blocks longer than tiles"] | {"dbias": True, "deterministic": True},
    "soft cap": BLOCKS | {"logits_soft_cap": 5.0, "mask": "causal", "dlse": True},
}


@pytest.mark.parametrize(
    ("dtype", "pipeline", "mask"),
    slow_but([], in_turn(GRADIENTS, PIPELINES, OF_16_BITS[:2])),
)
def test_gradients_of_every_pipeline_agree_with_the_reference(
    *, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, pipeline: str, mask: str
) -> None:
    arch = arch_with(pipeline, tmp_path, monkeypatch)
    problem = Problem(op="bwd", **SIZES | GRADIENTS[mask], dtype=dtype)
    plan = catalog.select(problem, arch=arch)
    assert plan.kernels[1].algorithm.pipeline == {"host_panel": "no"}.get(pipeline, pipeline)
    for seed in range(3):
        assert_right(plan, make_inputs(problem, seed))


@pytest.mark.parametrize("mask", slow_but(["none"], MASKS))
def test_blocks_that_are_left_out_are_never_read(catalog: Catalog, mask: str) -> None:
    """NaN in the last block of keys changes nothing for the queries that do not attend to it, bit by bit."""
    problem = Problem(**SIZES | MASKS[mask], dtype="fp32")
    plan, inputs = catalog.select(problem), make_inputs(problem, 1)
    before = plan.run(inputs).outputs["o"].copy()
    blind = poison_last_block(problem, inputs)
    o = plan.run(inputs).outputs["o"]
    assert blind.any()
    assert np.isnan(o[~blind]).any()
    np.testing.assert_array_equal(o[blind], before[blind])


@pytest.mark.parametrize("dtype", slow_but(["fp32"], ["fp32", "bf16"]))
def test_gradients_do_not_depend_on_blocks_that_are_left_out(catalog: Catalog, dtype: str) -> None:
    """NaN in the last block of keys reaches its own gradients, and those of queries that attend to it."""
    problem = Problem(op="bwd", **SIZES | BLOCKS, dtype=dtype)
    plan, inputs = catalog.select(problem), make_inputs(problem, 1)
    before = {name: array.copy() for name, array in plan.run(inputs).outputs.items()}
    blind = poison_last_block(problem, inputs)
    after = plan.run(inputs).outputs
    assert blind.any()
    assert np.isnan(after["dq"][~blind].astype(np.float32)).all()
    np.testing.assert_array_equal(after["dq"][blind], before["dq"][blind])
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(after[name][:, :, :320], before[name][:, :, :320])


def test_gradients_of_what_nobody_sees_are_zero(catalog: Catalog) -> None:
    problem = Problem(op="bwd", **SIZES, **BLOCKS, dtype="fp32")
    inputs = make_inputs(problem, 1)
    inputs["block_mask"][:, :, 1] = 0  # queries from 64 on
    inputs["block_mask"][:, :2, :, 2] = 0  # keys from 128 on, of the first head of keys
    plan = catalog.select(problem)
    inputs |= complete(problem, inputs)
    outputs = plan.run(inputs).outputs
    assert_right(plan, inputs)
    assert not outputs["dq"][:, :, 64:128].any()
    assert not outputs["dk"][:, 0, 128:192].any()
    assert not outputs["dv"][:, 0, 128:192].any()


def test_one_bitmap_serves_all_sequences_and_heads_by_a_stride_of_0(catalog: Catalog) -> None:
    problem = Problem(**SIZES, **BLOCKS, dtype="fp32", lse=True)
    inputs = make_inputs(problem, 1)
    inputs["block_mask"] = np.broadcast_to(inputs["block_mask"][:1, :1], inputs["block_mask"].shape)
    assert inputs["block_mask"].strides[:2] == (0, 0)
    assert_right(catalog.select(problem), inputs)


def test_queries_without_a_block_see_no_key(catalog: Catalog) -> None:
    problem = Problem(**SIZES, **BLOCKS, dtype="fp32", lse=True)
    inputs = make_inputs(problem, 1)
    inputs["block_mask"][...] = 1
    inputs["block_mask"][:, :, 1] = 0
    o, lse = catalog.select(problem).run(inputs).outputs.values()
    assert not o[:, :, 64:128].any()
    np.testing.assert_array_equal(np.isneginf(lse), np.broadcast_to((np.arange(200) // 64) == 1, lse.shape))


FIT_NO_TILE: Sequence[tuple[str, dict[str, int], str]] = (
    ("x86_64_v4", {"block_mask_q": 24}, "after a multiple of 16 queries or 32 keys"),
    ("sm_90", {"block_mask_kv": 96}, "a tile of keys is in one block"),
    ("sm_90", {"block_mask_q": 32}, "all queries of a tile see the same blocks"),
)


@pytest.mark.parametrize(("arch", "fields", "reason"), slow_but(FIT_NO_TILE[1:], FIT_NO_TILE))
def test_blocks_that_fit_no_tile_are_explained(
    catalog_of: Callable[[str], Catalog], arch: str, fields: dict[str, Any], reason: str
) -> None:
    problem = Problem(**SIZES | BLOCKS | fields, dtype="bf16")
    with pytest.raises(SelectionError, match=f"mask_blocks_fit_tiles rejects .*{reason}"):
        catalog_of(arch).select(problem, arch=arch)


@pytest.mark.parametrize("arch", ["x86_64_v3", "sm_90"])
@pytest.mark.parametrize(("trait", "value"), [("mode", "group"), ("sink", True), ("dropout", True)])
def test_features_that_exclude_a_block_mask_are_explained(
    catalog_of: Callable[[str], Catalog], arch: str, trait: str, value: object
) -> None:
    traits = {"family": "fwd", "hdim_q": 128, "dtype": "bf16", "mask": "generic", "block_mask": True, trait: value}
    findings = catalog_of(arch).explain(traits, arch=arch).findings
    of_trait = {"mode": "block_mask_needs_batch"}.get(trait, f"block_mask_excludes_{trait}")
    assert of_trait in {finding.id for finding in findings if finding.verdict.value == "rejected"}


def test_the_command_draws_a_bitmap_and_validates(host_file: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(host_file, tmp_path / "catalog.db"))
    options = "--batch 1 --nhead-q 2 --seqlen-q 300 --hdim-q 64 --dtype fp32 --block-mask-q 128 --block-mask-kv 128"
    done = command.catalog("run", *options.split(), "--validate", "--format", "json", db=path)
    assert json.loads(done.stdout)
