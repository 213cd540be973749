"""What operations promise each other: different ways to the same attention agree, random bits are where they belong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import slow_but
from host_problems import SEED, draw_inputs

from catalog.errors import SelectionError
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.answers import reference
from catalog.ops.attention.tolerance import tolerances
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import Array

HEADS: dict[str, Any] = {"nhead_q": 4, "nhead_k": 2, "hdim_q": 64, "dtype": "fp32"}
DENSE: dict[str, Any] = HEADS | {"batch": 2, "lse": True}


@pytest.fixture(scope="module")
def catalog(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    catalog = Catalog(shutil.copy(host_file, tmp_path_factory.mktemp("ops") / "catalog.db"))
    yield catalog
    catalog.close()


def agree(problem: Problem, inputs: dict[str, Array], one: Array, other: Array, name: str = "o") -> bool:
    """Whether two results are as near to each other as each must be to the exact one."""
    return tolerances(problem, inputs)[name].allows(one, other)


MASKS: list[dict[str, Any]] = [{}, {"mask": "causal"}, {"mask": "bottom_right", "window": (40, 0), "sink_size": 3}]


@pytest.mark.parametrize("mask", slow_but(MASKS[1:2], MASKS))
def test_splitkv_equals_fwd_for_every_number_of_splits(catalog: Catalog, mask: dict[str, Any]) -> None:
    problem = Problem(**DENSE, seqlen_q=5, seqlen_k=1000, **mask)
    inputs = make_inputs(problem, SEED) | {"sink": np.array([0.5, -1, 2, -np.inf], np.float32)}
    whole = catalog.select(problem).run(inputs).outputs
    for num_splits in (0, *range(1, 10), 33, 200):
        split = problem.model_copy(update={"op": "splitkv", "num_splits": num_splits})
        parts = catalog.select(split).run(inputs).outputs
        assert all(agree(problem, inputs, parts[name], whole[name], name) for name in ("o", "lse")), num_splits


APPENDED = [("no", 0), ("inter", 16), ("half", 0), ("half", 1)]


@pytest.mark.parametrize(("rope", "page_size"), slow_but(APPENDED[1:2], APPENDED))
def test_append_then_attend_equals_attention_over_everything(catalog: Catalog, rope: str, page_size: int) -> None:
    """Tokens appended in two calls, the second rotated too, against one forward over all of them."""
    batch, new, lengths = 2, 7, np.array([30, 51], np.int32)
    room = 64
    append = Problem(
        **HEADS, op="appendkv", batch=batch, seqlen_q=new, seqlen_k=room, seqlen_new=new, rope=rope, mask="causal",
        page_size=page_size,
    )  # fmt: skip
    inputs = make_inputs(append, SEED) | {"seqlens_k": lengths}
    appended = catalog.select(append).run(inputs).outputs
    table = inputs.get("block_table")

    def whole(cache: Array, sequence: int) -> Array:
        pages = (
            cache[sequence] if table is None else cache[table[sequence]].reshape(-1, *cache.shape[2:]).swapaxes(0, 1)
        )
        return pages[:, : lengths[sequence] + new]

    attend: dict[str, Any] = {"op": "pagedkv", "page_size": page_size} if page_size else {"op": "fwd"}
    problem = Problem(**HEADS, batch=batch, seqlen_q=new, seqlen_k=room, mask="bottom_right", **attend)
    suffix = "_cache" if page_size else ""
    cache = {"k" + suffix: appended["k_cache"], "v" + suffix: appended["v_cache"]}
    tables = {"block_table": table} if page_size else {}
    o = catalog.select(problem).run(q=appended["q"], seqlens_k=lengths + np.int32(new), **cache, **tables).outputs["o"]
    for sequence in range(batch):
        k, v = whole(appended["k_cache"], sequence), whole(appended["v_cache"], sequence)
        alone = Problem(**HEADS, batch=1, seqlen_q=new, seqlen_k=k.shape[1], mask="bottom_right", lse=True)
        given = {"q": appended["q"][sequence][None], "k": k[None], "v": v[None]}
        assert agree(alone, given, o[sequence][None], catalog.select(alone).run(given).outputs["o"])


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16, 64, 1024])
def test_lookup_tables_and_memory_layouts_agree(catalog: Catalog, page_size: int) -> None:
    packed = HEADS | {"op": "batch_prefill", "seqlens_q": [40, 1, 0, 70], "seqlen_k": 150, "page_size": page_size}
    vllm = Problem(**packed, mask="bottom_right", kv_lookup_table="vllm")
    inputs = make_inputs(vllm, SEED)
    inputs["seqlens_k"] = np.array([150, 17, 33, 70], np.int32)
    pages = -(-inputs["seqlens_k"] // page_size)
    expected = catalog.select(vllm).run(inputs).outputs["o"]

    tables = {
        "kv_indptr": np.concatenate([[0], np.cumsum(pages)]).astype(np.int32),
        "kv_page_indices": np.concatenate([row[:n] for row, n in zip(inputs["block_table"], pages, strict=True)]),
        "kv_last_page_lens": ((inputs["seqlens_k"] - 1) % page_size + 1).astype(np.int32),
    }
    tensors = {name: inputs[name] for name in ("q", "k_cache", "v_cache")}
    sglang = vllm.model_copy(update={"kv_lookup_table": "sglang"})
    np.testing.assert_array_equal(catalog.select(sglang).run(tensors | tables).outputs["o"], expected)

    x = 16 // tensors["q"].itemsize
    if page_size % x:
        return
    pool, size, heads, hdim = tensors["k_cache"].shape
    vectors = {
        "k_cache": tensors["k_cache"].reshape(pool, size, heads, hdim // x, x).transpose(0, 2, 3, 1, 4).copy(),
        "v_cache": tensors["v_cache"].reshape(pool, size // x, x, heads, hdim).transpose(0, 3, 1, 4, 2).copy(),
    }
    for problem, index in ((vllm, {n: inputs[n] for n in ("block_table", "seqlens_k")}), (sglang, tables)):
        vectorized = problem.model_copy(update={"kv_memory_layout": "vectorized"})
        o = catalog.select(vectorized).run({"q": tensors["q"], **vectors, **index}).outputs["o"]
        np.testing.assert_array_equal(o, expected)


def test_real_lengths_are_shorter_sequences(catalog: Catalog) -> None:
    """Batch mode, and group mode whose storage is padded: as if only the real tokens were stored."""
    real_q, real_k = np.array([9, 0, 33], np.int32), np.array([20, 5, 33], np.int32)
    stored = {"seqlens_q": [12, 4, 33], "seqlens_k": [32, 8, 40]}
    tight = Problem(**HEADS, seqlens_q=real_q.tolist(), seqlens_k=real_k.tolist(), mask="bottom_right", lse=True)
    inputs = make_inputs(tight, SEED)
    expected = catalog.select(tight).run(inputs).outputs["o"]

    def spread(array: Array, real: Array, room: list[int]) -> Array:
        padded = np.full((sum(room), *array.shape[1:]), np.nan, array.dtype)
        for sequence, (start, first) in enumerate(zip(np.cumsum(room) - room, np.cumsum(real) - real, strict=True)):
            padded[start : start + real[sequence]] = array[first : first + real[sequence]]
        return padded

    q = spread(inputs["q"], real_q, stored["seqlens_q"])
    k, v = (spread(inputs[name], real_k, stored["seqlens_k"]) for name in "kv")
    padded = Problem(**HEADS, **stored, mask="bottom_right", lse=True)
    o = catalog.select(padded).run(q=q, k=k, v=v, seqlens_q=real_q, seqlens_k=real_k).outputs["o"]
    np.testing.assert_array_equal(o, np.nan_to_num(spread(expected, real_q, stored["seqlens_q"])))


def test_packed_qkv_is_read_through_strides(catalog: Catalog) -> None:
    packed = np.random.default_rng(SEED).standard_normal((2, 50, 3, 4, 64), dtype=np.float32)
    q, k, v = packed.swapaxes(0, 2).swapaxes(1, 2)
    problem = Problem(batch=2, nhead_q=4, seqlen_q=50, hdim_q=64, dtype="fp32", mask="causal", lse=True, layout="bshd")
    plan = catalog.select(problem)
    expected = plan.run(q=q.copy(), k=k.copy(), v=v.copy()).outputs["o"]
    assert q.base is not None
    np.testing.assert_array_equal(plan.run(q=q, k=k, v=v).outputs["o"], expected)


# Dropout

DROPPED: dict[str, Any] = DENSE | {"seqlen_q": 150, "seqlen_k": 301, "hdim_q": 256, "dropout": 0.3}


@pytest.mark.slow
def test_dropout_bits_are_the_same_for_every_tile_and_both_directions(catalog: Catalog) -> None:
    problem = Problem(**DROPPED, randval=True)
    state = {"rng_state": np.array([2**63 + 12345, 2**40 + 7], np.uint64)}
    inputs = make_inputs(problem, SEED) | state
    plans = [catalog.plan(problem, candidate.kernel) for candidate in catalog.candidates(problem, limit=3)]
    assert len({plan.kernels[0].algorithm.tile_n0 for plan in plans}) > 1
    first, *others = [plan.run(inputs).outputs for plan in plans]
    for other in others:
        np.testing.assert_array_equal(other["randval"], first["randval"])
        assert agree(problem, inputs, other["o"], first["o"])
    backward = Problem(**(DROPPED | {"lse": False}), op="bwd", randval=True)
    gradients = catalog.select(backward).run(make_inputs(backward, SEED) | state).outputs
    np.testing.assert_array_equal(gradients["randval"], first["randval"])
    other_seed = catalog.select(problem).run(inputs | {"rng_state": np.array([1, 0], np.uint64)}).outputs["randval"]
    assert (other_seed != first["randval"]).mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_what_its_random_bytes_say_and_as_often_as_asked(catalog: Catalog, p: float) -> None:
    """Equal weights and one-hot values: O shows which keys were kept."""
    problem = Problem(
        batch=1, nhead_q=8, seqlen_q=256, seqlen_k=64, hdim_q=64, dtype="fp32", dropout=p, randval=True, lse=True
    )  # fmt: skip
    inputs = make_inputs(problem, SEED)
    inputs["q"][...] = 0
    inputs["v"][...] = np.eye(64, dtype=np.float32)
    outputs = catalog.select(problem).run(inputs).outputs
    kept = outputs["randval"] <= np.floor(np.float32(255) * (np.float32(1) - np.float32(p)))
    np.testing.assert_allclose(outputs["o"], kept / 64 / (1 - p), rtol=1e-6)
    deviation = np.sqrt(p * (1 - p) / kept.size)
    assert abs(kept.mean() - (1 - p)) < 5 * deviation + 1 / 256  # a byte is as fine as that


@pytest.mark.slow
def test_a_dropout_of_1_keeps_nothing(catalog: Catalog) -> None:
    dropped = DROPPED | {"hdim_q": 64, "dropout": 1.0}
    problem = Problem(**dropped, randval=True)
    inputs = make_inputs(problem, SEED)
    outputs, expected = catalog.select(problem).run(inputs).outputs, reference(problem, inputs)
    assert not outputs["o"].any()
    assert not expected["o"].any()
    assert agree(problem, inputs, outputs["lse"], expected["lse"], "lse")
    assert 0 in outputs["randval"]  # which any smaller probability keeps
    backward = Problem(**(dropped | {"lse": False}), op="bwd", randval=True)
    gradients = catalog.select(backward).run(make_inputs(backward, SEED)).outputs
    assert not any(gradients[name].any() for name in ("dq", "dk", "dv"))


# Backward


@pytest.mark.slow
def test_the_gradient_of_lse_alone(catalog: Catalog) -> None:
    """Rows that see no key have none, whatever is said of it."""
    lengths = {"seqlens_q": [40, 0, 9], "seqlens_k": [33, 5, 20]}
    problem = Problem(**HEADS, **lengths, op="bwd", mask="bottom_right", window=(33, 0), dlse=True)
    inputs = make_inputs(problem, SEED)
    inputs["do"][...] = 0
    inputs["dlse"][np.isneginf(inputs["lse"])] = np.inf
    gradients, expected = catalog.select(problem).run(inputs).outputs, reference(problem, inputs)
    assert all(agree(problem, inputs, gradients[name], expected[name], name) for name in ("dq", "dk", "dv"))
    assert not gradients["dv"].any()
    assert not gradients["dq"][:7].any()
    assert gradients["dk"][:33].all()


THREADS = """
import sys, numpy as np
from catalog import Catalog, Problem
from catalog.runtime.inputs import make_inputs
problem = Problem.model_validate_json(sys.argv[2])
plan = Catalog(sys.argv[1]).select(problem)
for _ in range(3):
    outputs = plan.run(make_inputs(problem)).outputs
    print(hash(b"".join(array.tobytes() for array in outputs.values())))
"""


@pytest.mark.slow
def test_deterministic_backward_is_bitwise_equal_over_runs_and_thread_counts(catalog: Catalog) -> None:
    problem = Problem(**HEADS, op="bwd", batch=1, seqlen_q=300, seqlen_k=1300, mask="causal", deterministic=True)
    catalog.select(problem).build()
    digests: list[str] = []
    for num_threads in (1, 2, 3):
        environment = os.environ | {"CATALOG_NUM_THREADS": str(num_threads), "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-c", THREADS, str(catalog.path), problem.model_dump_json()]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        digests += done.stdout.split()
    assert len(digests) == 9
    assert len(set(digests)) == 1


@pytest.mark.slow
def test_backward_of_a_window_without_keys_is_zero(catalog: Catalog) -> None:
    problem = Problem(**HEADS, op="bwd", seqlens_q=[100], seqlens_k=[7], mask="top_left", window=(3, 3))
    outputs = catalog.select(problem).run(draw_inputs(problem, SEED)).outputs
    assert not np.count_nonzero(outputs["dq"][11:])
    assert all(np.isfinite(gradient).all() for gradient in outputs.values())


# What no kernel does


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"logits_soft_cap": 5.0, "bias": "bias"}, "soft_cap_excludes_bias forbids bias=bias, logits=1"),
        ({"hdim_q": 513}, "hdim_q_fits rejects"),
        ({"dtype": "fp8", "dropout": 0.1}, "needs dropout=1"),
    ],
)
def test_a_combination_that_no_kernel_has_names_the_rule(catalog: Catalog, fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(SelectionError, match=rule):
        catalog.select(Problem(**(DENSE | {"seqlen_q": 8} | fields)))
