"""Kernels for what is used: the problems of a model, and builds and checks for a trace, a set or a model."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import pytest
from conftest import fill

from catalog.build.cache import Cache
from catalog.errors import SelectionError
from catalog.ops import operation
from catalog.ops.attention import models
from catalog.ops.attention.problem import Problem
from catalog.runtime.catalog import Catalog
from catalog.runtime.demand import Demand
from catalog.schema.arguments import ABI_VERSION
from catalog.schema.deployment import Deployment, read_model, sizes_up_to

MODELS = Path(__file__).parent.parent / "examples" / "models"
LLAMA, GEMMA, MIXTRAL = (MODELS / f"{name}.json" for name in ("llama-3.1-8b", "gemma-2-9b", "mixtral-8x7b"))
SMALL = Problem(batch=1, nhead_q=2, seqlen_q=33, hdim_q=32, dtype="fp32")
TINY = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 64, "torch_dtype": "float32"}


def problems_of(model: Path, **deployment: Any) -> list[Any]:
    return list(operation().problems_of_model(read_model(model), Deployment(**deployment)))


@pytest.mark.parametrize("tp", [1, 2, 8, 16])
@pytest.mark.parametrize(("model", "hdim"), [(LLAMA, 128), (GEMMA, 256), (MIXTRAL, 128)], ids=str)
def test_a_rank_has_its_part_of_the_heads(model: Path, hdim: int, tp: int) -> None:
    config = read_model(model)
    problems = problems_of(model, tp=tp, max_len=8192)
    heads = {(problem.nhead_q, problem.nhead_k, problem.hdim_q, problem.dtype) for problem in problems}
    keys = max(1, config["num_key_value_heads"] // tp)  # a rank that has only a part of a key head has it whole
    assert heads == {(config["num_attention_heads"] // tp, keys, hdim, "bf16")}
    assert {problem.op for problem in problems} == {"fwd", "splitkv", "pagedkv"}
    assert max(problem.seqlen_k for problem in problems) == 8192
    assert max(problem.batch for problem in problems) == 256


def test_layers_with_a_window_and_a_soft_cap_are_told_from_others() -> None:
    problems = problems_of(GEMMA)
    assert {problem.logits_soft_cap for problem in problems} == {50.0}
    prompts = [problem for problem in problems if problem.op == "fwd" and problem.seqlen_q > 1]
    windows = {(problem.seqlen_q > 4096, problem.window) for problem in prompts}
    assert windows == {(False, None), (True, None), (True, (4095, 0))}


def test_training_needs_gradients_and_nothing_else_does() -> None:
    trained = problems_of(LLAMA, phases=("train",), max_len=64)
    assert {(problem.op, problem.lse) for problem in trained} == {("fwd", True), ("bwd", False)}
    assert not {"bwd"} & {problem.op for problem in problems_of(LLAMA, max_len=64)}


def test_kernels_for_the_derived_lengths_answer_every_length(gfx950: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(tp=8, max_len=32_768, phases=("prefill", "decode", "train"))

    def kernels() -> set[str]:
        answers = Demand.of_model(LLAMA, deployment, "gfx950").answers(gfx950)
        assert answers.complete
        return {kernel.name for kernel in answers.kernels}

    derived, dice = kernels(), random.Random(1)  # noqa: S311
    lengths = [dice.randint(1, top) for top in (600, 5_000, 32_768) for _ in range(20)]
    monkeypatch.setattr(models._Rank, "_lengths", lengths)
    monkeypatch.setattr(models._Rank, "_batches", [dice.randint(1, 256) for _ in range(4)])
    assert kernels() <= derived


def test_sizes_stand_for_all_below() -> None:
    assert sizes_up_to(20, 3) == (3, 4, 7, 8, 15, 16, 20)
    assert sizes_up_to(1) == (1,)


@pytest.mark.parametrize(
    ("changed", "words", "message"),
    [
        ({"num_attention_heads": None}, (), "num_attention_heads: expected an integer"),
        ({"num_attention_heads": 0}, (), "num_attention_heads: "),
        ({}, ("--tp", 3), "3 ranks cannot share 2 query heads and 2 key heads"),
        ({"torch_dtype": "int4"}, (), "dtype 'int4' is not an element type of kernels"),
        ({"kv_lora_rank": 512}, (), "kv_lora_rank=512: its latent attention compresses keys, which is not derived"),
        (
            {"attn_logit_softcapping": 50, "attention_dropout": 0.1},
            ("--phase", "train"),
            "phase train: no kernel computes the gradient",
        ),
        ({}, ("--phase", "sleep"), "phase 'sleep' is unknown"),
        ({}, ("--max-batch", 10**9), "max_batch=1000000000: expected a number from 1 to 65,536"),
        ({"max_position_embeddings": 2**40}, (), "do not fit in 63 bits"),
        ({"text_config": {"num_attention_heads": -1}}, (), "num_attention_heads: "),
        (None, (), "a list, expected the object of a model's config.json"),
    ],
)
def test_a_model_that_is_not_understood_says_so(
    changed: dict[str, Any] | None, words: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps([] if changed is None else TINY | changed))
    done = command.catalog("check", "--model", model, *words, db=tmp_path / "catalog.db")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [(), ("fwd", "--shapes", "smoke"), ("--shapes", "smoke", "--limit", 1)])
def test_a_build_has_one_source_of_kernels(words: tuple[object, ...], tmp_path: Path) -> None:
    done = command.catalog("build", *words, db=tmp_path / "catalog.db")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: give either EXPR")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A call of :data:`SMALL`, as a program would have recorded it."""
    file = tmp_path / "calls.jsonl"
    line = {"format": 1, "at": 1.0, "pid": 1, "call": "run", "ms": 1.0, "launches": 1, "arch": "host"}
    line |= {"revision": "native", "mask_impl": "generic", "device": "a CPU", "cores": 1, "kernels": ["one"]}
    file.write_text(json.dumps(line | {"problem": SMALL.key_fields()}) + "\n")
    return file


def _remove(cache: Cache, key: str) -> None:
    cache.remove(key)


def _damage_library(cache: Cache, key: str) -> None:
    cache.so_path(key).write_bytes(b"no library")


def _damage_record(cache: Cache, key: str) -> None:
    cache.record_path(key).write_text("{}")


def _build_with_another_abi(cache: Cache, key: str) -> None:
    record, origin = cache.read(key)
    cache.put_record(record, replace(origin, abi=origin.abi + 1))


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (_remove, "absent"),
        (_damage_library, "unsound: its library differs from the one that was built"),
        (_damage_record, "unsound: its record is damaged"),
        (_build_with_another_abi, f"ABI {ABI_VERSION + 1}, this version has ABI {ABI_VERSION}"),
    ],
)
def test_check_names_each_library_that_cannot_be_used(
    spoil: Callable[[Cache, str], None], fault: str, trace: Path, host_file: Path, tmp_path: Path
) -> None:
    db = Path(shutil.copy(host_file, tmp_path / "catalog.db"))
    with Catalog(db) as catalog:
        [kernel] = catalog.select(SMALL).kernels
        cache = Cache(fill(tmp_path / "cache", [kernel]))
    where: dict[str, Any] = {"db": db, "CATALOG_CACHE_DIR": cache.folder, "CATALOG_COMPILE": "false"}
    built = command.catalog("build", "--trace", trace, **where)
    assert "1 already in the cache" in built.stdout
    sound = command.catalog("check", "--trace", trace, **where)
    assert (sound.returncode, sound.stdout) == (0, ""), sound.stderr

    spoil(cache, *cache.keys())
    spoiled = command.catalog("check", "--trace", trace, "--format", "json", **where)
    assert spoiled.returncode == 1
    [row] = json.loads(spoiled.stdout)
    assert (row["kernel"], row["id"]) == (kernel.name, kernel.id)
    assert row["fault"] == fault


def test_a_problem_without_kernels_fails_the_build_of_a_trace(trace: Path, populated: Any, tmp_path: Path) -> None:
    """sm_90 has no fp32 above head dim 256; a model may have other ways to make its calls, a trace has not."""
    wide = SMALL.model_copy(update={"hdim_q": 320, "hdim_v": 320})
    trace.write_text(json.dumps(json.loads(trace.read_text()) | {"problem": wide.key_fields()}) + "\n")
    db = Path(shutil.copy(populated("sm_90"), tmp_path / "catalog.db"))
    done = command.catalog("build", "--trace", trace, "--arch", "sm_90", db=db)
    assert done.returncode == 1
    assert "no fwd kernel of sm_90 answers the problem" in done.stderr
    with Catalog(db) as catalog, pytest.raises(SelectionError):
        catalog.stages(wide, arch="sm_90")


RUN = """\
import sys
from pathlib import Path
from catalog import Catalog
from catalog.runtime.demand import Demand
from catalog.schema.deployment import Deployment

demand = Demand.of_model(Path(sys.argv[1]), Deployment(tp=2, max_batch=3, phases=sys.argv[2].split(",")), "host")
catalog = Catalog.default()
for problem, _ in demand.calls:
    if problem.seqlen_k in (16, 63):
        catalog.select(problem).run()
assert not {"torch", "transformers"} & sys.modules.keys()
"""


@pytest.mark.slow
def test_after_a_build_nothing_is_missing_and_no_compiler_starts(host_file: Path, tmp_path: Path) -> None:
    shutil.copy(host_file, tmp_path / "catalog.db")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    variables = {"CATALOG_DB": str(tmp_path / "catalog.db"), "CATALOG_CACHE_DIR": str(tmp_path / "cache")}
    no_compiler = {"CATALOG_COMPILE": "false", "CATALOG_CXX": "/no/compiler", "CATALOG_TRACE": "calls.jsonl"}
    phases = "decode"
    model = ("--model", "config.json", "--tp", "2", "--max-batch", "3", "--phase", phases)

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | variables | more
        command = [sys.executable, *words]
        return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path)

    empty = run("-m", "catalog", "check", *model)
    assert empty.returncode == 1
    built = run("-m", "catalog", "build", *model)
    assert built.returncode == 0, built.stderr
    assert run("-m", "catalog", "check", *model).returncode == 0
    ran = run("-c", RUN, "config.json", phases, **no_compiler)
    assert ran.returncode == 0, ran.stderr
    replayed = run("-m", "catalog", "replay", "calls.jsonl", "--format", "json", **no_compiler)
    assert replayed.returncode == 0, replayed.stderr
    rows = json.loads(replayed.stdout)
    assert {row["kernels"].count(" -> ") for row in rows} == {0, 1}, "plans of one stage, and of two"
    assert not [row for row in rows if row["error"] or not row["same_kernels"]]
