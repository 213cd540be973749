"""Rows of sm_90, compiled by the nvcc of this machine: a row of every family and pipeline, without a GPU."""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from cuda_resources import assert_fits

from catalog.build.cuda.facts import cuda_facts
from catalog.errors import BuildError
from catalog.ops.attention.arguments import ARGUMENTS
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.traits import Family, Pipeline, Qscale
from catalog.ops.attention.workspace import splits_of, workspace_of
from catalog.registry.query import Query, run
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.arguments import template
from catalog.schema.kernel import Kernel

ROWS = (
    (Family.FWD, Pipeline.SM90_WGMMA),
    (Family.FWD, Pipeline.SM90_LATENT),
    (Family.FWD, Pipeline.SM90_MMA),
    (Family.FWD_SPLITKV, Pipeline.SM90_MMA),
    (Family.FWD_SPLITKV, Pipeline.SM90_LATENT),
    (Family.FWD_SPLITKV, Pipeline.SM90_LATENT_WHOLE),
    (Family.FWD_SPLITKV, Pipeline.SM90_STREAM),
    (Family.FWD_SPLITKV, Pipeline.SM90_WHOLE),
    (Family.FWD_SPLITKV_COMBINE, Pipeline.UNUSED),
    (Family.FWD_PAGEDKV, Pipeline.SM90_LATENT),
    (Family.FWD_PAGEDKV, Pipeline.SM90_MMA),
    (Family.FWD_PAGEDKV, Pipeline.SM90_WGMMA),
    (Family.BATCH_PREFILL, Pipeline.SM90_LATENT),
    (Family.BATCH_PREFILL, Pipeline.SM90_MMA),
    (Family.BATCH_PREFILL, Pipeline.SM90_WGMMA),
    (Family.FWD_APPENDKV, Pipeline.NO),
    (Family.BWD_DOT_DO_O, Pipeline.NO),
    (Family.BWD_DQ_DK_DV, Pipeline.SM90_MMA),
    (Family.BWD_DQ_DK_DV, Pipeline.SM90_WGMMA),
    (Family.BWD_CONVERT_DQ, Pipeline.NO),
)


@pytest.fixture(scope="module")
def catalog(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    with Catalog(shutil.copy(populated("sm_90"), tmp_path_factory.mktemp("cuda") / "catalog.db")) as catalog:
        yield catalog


def row(catalog: Catalog, family: Family, pipeline: Pipeline) -> Kernel:
    where = f"family = '{family}' AND pipeline = '{pipeline}' AND dtype = 'bf16' AND mask <> 'generic' AND bias = 'no'"
    return catalog.kernels(f"{where} AND mode = 'batch' AND hdim_q IN (128, 256, 576)", arch="sm_90", limit=1)[0]


PREFILL = {"op": "batch_prefill", "batch": 1, "seqlens_q": (2048,), "page_size": 16}
PAGE_FACTORS = {"dtype": "bf16kvfp8", "qscale": "kv_blockscale"}
BLOCK_FACTORS = {"dtype": "bf16kvfp8", "qscale": "blockscale"}
VECTORS = {"kv_memory_layout": "vectorized"}
FP32 = {"dtype": "fp32"}
SINK = {"mask": "window", "window": (128, 0), "sink_size": 4}

SELECTED: tuple[dict[str, object], ...] = (
    {"hdim_q": 128},
    {"hdim_q": 128, "mask": "causal", "lse": True},
    {"hdim_q": 64, "mask": "window", "window": (128, 0)},
    {"hdim_q": 512, "mask": "causal"},
    {"hdim_q": 128, "dtype": "fp8bf16", "qscale": "pertensor"},
    {"hdim_q": 128, "dtype": "fp8bf16", "qscale": "blockscale", "mask": "causal", "lse": True},
    {"hdim_q": 256, "dtype": "fp8fp16", "qscale": "pertensor", "mask": "causal"},
    {"hdim_q": 128, "dtype": "fp8", "qscale": "pertensor", "mask": "causal"},
    {"hdim_q": 64, "dtype": "bf8", "qscale": "blockscale"},
    {"hdim_q": 256, "dtype": "fp8fp32", "qscale": "pertensor", "lse": True},
    {"hdim_q": 64, "dtype": "bf8", "qscale": "blockscale", "bias": "bias", "lse": True} | SINK,
    {"op": "splitkv", "hdim_q": 128, "seqlen_q": 1, "dtype": "fp8", "bias": "bias", "page_size": 16},
    {"op": "pagedkv", "hdim_q": 256, "page_size": 16, "dtype": "fp8fp32", "bias": "bias", "mask": "causal"},
    {"hdim_q": 192, "hdim_v": 128, "dtype": "fp8bf16", "qscale": "kv_blockscale", "bias": "bias"} | PREFILL | SINK,
    {"hdim_q": 128, "mask": "causal", "lse": True} | FP32,
    {"hdim_q": 256, "bias": "bias", "dropout": 0.1} | SINK | FP32,
    {"hdim_q": 192, "hdim_v": 128, "block_mask_q": 64, "block_mask_kv": 64} | FP32,
    {"op": "splitkv", "hdim_q": 256, "seqlen_q": 1, "num_splits": 8, "page_size": 16} | FP32,
    {"op": "splitkv", "batch": 64, "hdim_q": 128, "seqlen_q": 1} | FP32,
    {"op": "pagedkv", "hdim_q": 64, "page_size": 16, "mask": "causal", "logits_soft_cap": 50.0} | FP32,
    {"hdim_q": 128, "bias": "alibi", "dropout": 0.1} | PREFILL | VECTORS | FP32,
    {"op": "appendkv", "hdim_q": 128, "seqlen_q": 1, "seqlen_new": 1, "rope": "half", "page_size": 16} | FP32,
    {"op": "bwd", "hdim_q": 64, "bias": "bias", "dbias": True, "dropout": 0.1} | FP32,
    {"op": "bwd", "hdim_q": 128, "block_mask_q": 64, "block_mask_kv": 64, "deterministic": True} | FP32,
    {"op": "bwd", "hdim_q": 256, "mask": "window", "window": (128, 0), "logits_soft_cap": 50.0} | FP32,
    {"op": "splitkv", "hdim_q": 128, "seqlen_q": 1, "num_splits": 8},
    {"op": "splitkv", "hdim_q": 128, "seqlen_q": 1, "num_splits": 8, "dtype": "fp8"},
    {"op": "pagedkv", "hdim_q": 128, "page_size": 16, "dtype": "bf8", "mask": "causal"},
    {"op": "splitkv", "batch": 64, "hdim_q": 128, "seqlen_q": 1},
    {"op": "splitkv", "hdim_q": 576, "hdim_v": 512, "nhead_k": 1, "seqlen_q": 1, "batch": 128},
    {"op": "pagedkv", "hdim_q": 576, "hdim_v": 512, "nhead_k": 1, "page_size": 16, "mask": "bottom_right"},
    {"op": "splitkv", "hdim_q": 512, "seqlen_q": 1, "logits_soft_cap": 50.0, "page_size": 16},
    {"hdim_q": 512, "bias": "bias"} | SINK,
    {"hdim_q": 512, "bias": "alibi"} | PREFILL | {"kv_lookup_table": "sglang"},
    {"op": "pagedkv", "hdim_q": 128, "page_size": 16, "batch": 1, "seqlens_q": (2048,), "min_seqlen_q": 8},
    {"op": "pagedkv", "hdim_q": 256, "page_size": 4, "mask": "causal"},
    {"op": "pagedkv", "hdim_q": 256, "page_size": 16, "bias": "bias", "dtype": "bf16kvfp8"},
    {"op": "splitkv", "hdim_q": 128, "seqlen_q": 1, "dtype": "bf16kvfp8", "qscale": "pertensor", "page_size": 16},
    {"hdim_q": 64, "bias": "alibi"} | PREFILL | {"kv_lookup_table": "sglang"},
    {"hdim_q": 128, "dtype": "fp8bf16", "qscale": "kv_blockscale", "mask": "causal"} | PREFILL,
    {"hdim_q": 64} | SINK | PREFILL | PAGE_FACTORS,
    {"hdim_q": 256, "bias": "alibi"} | PREFILL | PAGE_FACTORS,
    {"hdim_q": 128, "mask": "causal"} | PREFILL | VECTORS,
    {"hdim_q": 64, "mask": "causal", "dtype": "fp8bf16", "qscale": "pertensor"} | PREFILL | VECTORS,
    {"hdim_q": 128} | SINK | PREFILL | PAGE_FACTORS | VECTORS,
    {"hdim_q": 256, "bias": "bias", "dtype": "bf16kvfp8"} | PREFILL | VECTORS,
    {"hdim_q": 128, "bias": "bias"} | PREFILL,
    {"hdim_q": 256, "bias": "alibi", "dropout": 0.1} | PREFILL,
    {"hdim_q": 192, "hdim_v": 128, "bias": "bias", "dropout": 0.1} | PREFILL | SINK,
    {"hdim_q": 128} | SINK | PREFILL,
    {"hdim_q": 256, "bias": "bias", "lse": True} | SINK | BLOCK_FACTORS,
    {"op": "appendkv", "hdim_q": 128, "seqlen_q": 1, "seqlen_new": 1, "rope": "half", "page_size": 16},
    {"op": "appendkv", "hdim_q": 512, "seqlen_q": 1, "seqlen_new": 1, "rope": "inter"},
    {"op": "bwd", "hdim_q": 64, "deterministic": True},
    {"op": "bwd", "hdim_q": 64, "mask": "window", "window": (128, 0), "bias": "alibi"},
    {"op": "bwd", "hdim_q": 64, "dropout": 0.1},
    {"op": "bwd", "hdim_q": 128, "mask": "causal", "block_mask_q": 128, "block_mask_kv": 128},
    {"op": "bwd", "hdim_q": 128, "mask": "causal", "block_mask_q": 128, "block_mask_kv": 128, "deterministic": True},
    {"op": "bwd", "hdim_q": 128, "mask": "causal", "block_mask_q": 128, "block_mask_kv": 128, "bias": "bias"},
    {"op": "bwd", "hdim_q": 64, "mask": "window", "window": (128, 0), "bias": "bias"},
    {"op": "bwd", "hdim_q": 128},
    {"op": "bwd", "hdim_q": 256, "mask": "causal"},
    {"op": "bwd", "hdim_q": 512, "mask": "causal", "deterministic": True},
    {"op": "bwd", "hdim_q": 320, "logits_soft_cap": 50.0},
    {"hdim_q": 128} | SINK,
    {"hdim_q": 64, "bias": "bias", "dropout": 0.1},
    {"hdim_q": 128, "mask": "causal", "block_mask_q": 128, "block_mask_kv": 128},
    {"hdim_q": 256, "bias": "bias", "block_mask_q": 64, "block_mask_kv": 64},
    {"op": "bwd", "hdim_q": 192, "hdim_v": 128, "bias": "bias", "block_mask_q": 64, "block_mask_kv": 128},
    {"op": "bwd", "hdim_q": 256, "deterministic": True, "block_mask_q": 128, "block_mask_kv": 128},
    {"op": "bwd", "hdim_q": 256, "mask": "causal", "deterministic": True, "bias": "alibi"},
    {"op": "bwd", "hdim_q": 256, "mask": "causal", "deterministic": True, "dropout": True},
    {"op": "bwd", "hdim_q": 128, "bias": "bias", "dbias": True},
    {"op": "bwd", "hdim_q": 128, "dropout": 0.1},
    {"op": "bwd", "hdim_q": 256, "mask": "causal", "logits_soft_cap": 50.0},
)
"""Problems with plans of every family."""


@pytest.mark.usefixtures("nvcc")
@pytest.mark.parametrize("fields", slow_but([], SELECTED), ids=repr)
def test_selected_rows_compile_without_spills(catalog: Catalog, fields: dict[str, object]) -> None:
    asked = Problem(**{"batch": 2, "nhead_q": 16, "seqlen_q": 2048, "seqlen_k": 2048, "dtype": "bf16"} | fields)
    for kernel in catalog.select(asked, arch="sm_90").kernels:
        assert_compiles_without_spills(catalog, kernel)


@pytest.mark.usefixtures("nvcc")
@pytest.mark.slow
@pytest.mark.parametrize("paged", [False, True])
def test_stream_rows_compile_without_spills(catalog: Catalog, paged: bool) -> None:
    where = f"pipeline = 'sm90_stream' AND hdim_q = 128 AND dtype = 'bf16' AND mode = 'batch' AND paged_kv = {paged:d}"
    plain = catalog.kernels(f"{where} AND mask = 'causal' AND bias = 'no' AND NOT logits", arch="sm_90")
    assert {kernel.algorithm.tile_m0 for kernel in plain} == {16, 64, 128}
    for kernel in plain[:2]:
        assert_compiles_without_spills(catalog, kernel)


def assert_compiles_without_spills(catalog: Catalog, kernel: Kernel) -> None:
    artifact = catalog.build(kernel)
    library = ctypes.CDLL(str(artifact.path))
    library.catalog_describe.restype = ctypes.c_char_p
    assert json.loads(library.catalog_describe())["id"] == kernel.id
    assert library.catalog_launch(None, None) == 2, "no arguments"
    assert_fits(catalog, kernel, "attention")
    columns = ("registers", "occupancy", "code_bytes")
    query = Query(f"id = '{kernel.id}' AND built", columns=columns)
    ((registers, occupancy, code),) = run(catalog.path, query)
    assert 16 <= registers <= 255
    assert 1 <= occupancy <= 16
    assert code > 500


LATENT_HEADS = {"nhead_q": 128, "nhead_k": 1}
SHORT_QUERIES: dict[str, Any] = {"op": "splitkv", "nhead_q": 64, "nhead_k": 8, "seqlen_q": 1, "dtype": "bf16"}


@pytest.mark.parametrize("pipeline", [Pipeline.SM90_STREAM, Pipeline.SM90_WHOLE, Pipeline.SM90_LATENT_WHOLE])
def test_some_rows_need_no_second_launch_and_take_no_number_of_splits(catalog: Catalog, pipeline: Pipeline) -> None:
    kernel = row(catalog, Family.FWD_SPLITKV, pipeline)
    signature = kernel.signature
    hdims = {"hdim_q": signature.hdim_q, "hdim_v": signature.hdim_v}
    problem = Problem(batch=2, seqlen_k=4096, mask=signature.mask.value, **hdims, **SHORT_QUERIES)
    assert catalog.plan(problem, kernel).kernels == (kernel,)
    stated = problem.model_copy(update={"num_splits": 2})

    def pipelines(of: Problem) -> set[Pipeline]:
        found = catalog.candidates(of, arch="sm_90", limit=20)
        return {candidate.kernel.algorithm.pipeline for candidate in found}

    assert pipeline in pipelines(problem)
    divided = {Pipeline.SM90_LATENT} if signature.hdim_q == 576 else {Pipeline.SM90_MMA, Pipeline.SM90_LATENT}
    assert pipelines(stated) == divided


@pytest.mark.parametrize(
    ("batch", "seqlen_k", "pipeline"),
    [
        (1, 512, "whole"),
        (1, 1024, "mma"),
        (4, 8192, "mma"),
        (8, 4096, "whole"),
        (8, 16384, "mma"),
        (20, 8192, "mma"),
        (128, 1024, "whole"),
    ],
)
def test_keys_stay_whole_where_that_keeps_the_memory_busy(
    catalog: Catalog, batch: int, seqlen_k: int, pipeline: str
) -> None:
    """The faster one of the two on an H200."""
    problem = Problem(batch=batch, seqlen_k=seqlen_k, hdim_q=128, **SHORT_QUERIES)
    assert catalog.select(problem, arch="sm_90").kernels[0].algorithm.pipeline == f"sm90_{pipeline}"


@pytest.mark.parametrize(
    ("batch", "seqlen_k", "pipeline"),
    [
        (1, 1024, "latent"),
        (16, 8192, "latent"),
        (64, 1024, "latent_whole"),
        (66, 8192, "latent_whole"),
        (80, 8192, "latent"),
    ],
)
def test_latent_keys_stay_whole_where_that_keeps_all_multiprocessors_busy(
    catalog: Catalog, batch: int, seqlen_k: int, pipeline: str
) -> None:
    """The faster one of the two on an H100, with 128 heads: two tiles of rows for each sequence."""
    problem = Problem(batch=batch, seqlen_k=seqlen_k, hdim_q=576, hdim_v=512, **SHORT_QUERIES | LATENT_HEADS)
    assert catalog.select(problem, arch="sm_90").kernels[0].algorithm.pipeline == f"sm90_{pipeline}"


@pytest.mark.usefixtures("nvcc")
@pytest.mark.slow
def test_whole_keys_need_no_workspace(catalog: Catalog) -> None:
    problem = Problem(batch=64, seqlen_k=1024, hdim_q=128, num_splits=1, **SHORT_QUERIES)
    kernel = next(
        candidate.kernel
        for candidate in catalog.candidates(problem, arch="sm_90", limit=5)
        if candidate.kernel.algorithm.pipeline is Pipeline.SM90_WHOLE
    )
    needed = needed_workspace(catalog, problem, kernel)
    assert needed.num_splits == 1
    assert workspace_of(problem, 1, [needed]).partials == {}


def needed_workspace(catalog: Catalog, problem: Problem, kernel: Kernel) -> Any:
    """What the kernel's library asks for."""
    library = ctypes.CDLL(str(catalog.build(kernel).path))
    args = template(problem, ()).fill({}, (), (), 8, {})
    needed = ARGUMENTS.workspace()
    assert library.catalog_workspace_size(ctypes.byref(args), ctypes.byref(needed)) == 0
    return needed


@pytest.mark.usefixtures("nvcc")
@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
def test_a_deterministic_backward_needs_little_more_memory(catalog: Catalog, batch: int) -> None:
    """One dQ in float32, as without it, and a counter for each tile: not a dQ for each tile of keys."""
    problem = Problem(op="bwd", batch=batch, nhead_q=16, seqlen_q=8192, hdim_q=128, dtype="bf16", deterministic=True)
    main = catalog.select(problem, arch="sm_90").kernels[1]
    needed = needed_workspace(catalog, problem, main)
    dq = batch * 16 * 8192 * 128 * 4
    assert needed.num_splits == 1
    assert dq < needed.dq_acc <= 1.001 * dq


def test_every_family_has_rows_and_no_other(catalog: Catalog) -> None:
    found = catalog.connection.execute("SELECT DISTINCT family, pipeline FROM attention_row WHERE arch = 'sm_90'")
    assert {tuple(pair) for pair in found} == {(family.value, pipeline.value) for family, pipeline in ROWS}


def test_a_trait_that_the_headers_do_not_know_is_refused(catalog: Catalog) -> None:
    kernel = row(catalog, Family.FWD, Pipeline.SM90_WGMMA)
    scaled = kernel.model_copy(update={"signature": kernel.signature.model_copy(update={"qscale": Qscale.MX})})
    with pytest.raises(BuildError, match="NVIDIA has no kernels for qscale = mx"):
        catalog.build(scaled)


@pytest.mark.parametrize(
    ("problem", "families"),
    [
        ({"seqlen_q": 4096, "mask": "causal"}, ["fwd"]),
        ({"op": "splitkv", "seqlen_q": 1, "seqlen_k": 16384}, ["fwd_splitkv", "fwd_splitkv_combine"]),
        ({"op": "pagedkv", "seqlen_q": 16, "seqlen_k": 1000, "page_size": 16}, ["fwd_pagedkv"]),
        ({"op": "batch_prefill", "seqlens_q": [70, 4096], "seqlen_k": 8192, "page_size": 1}, ["batch_prefill"]),
        ({"op": "appendkv", "seqlen_q": 1, "seqlen_k": 4096, "seqlen_new": 1, "rope": "inter"}, ["fwd_appendkv"]),
        ({"op": "bwd", "seqlen_q": 4096}, ["bwd_dot_do_o", "bwd_dq_dk_dv", "bwd_convert_dq"]),
        ({"seqlen_q": 4096, "bias": "bias", "dropout": 0.1, "randval": True, "lse": True}, ["fwd"]),
        (
            {"op": "splitkv", "seqlen_q": 1, "seqlen_k": 16384, "mask": "window", "window": (999, 0), "sink_size": 4},
            ["fwd_splitkv", "fwd_splitkv_combine"],
        ),
        (
            {"op": "bwd", "seqlen_q": 4096, "bias": "bias", "dbias": True, "dropout": 0.1, "randval": True},
            ["bwd_dot_do_o", "bwd_dq_dk_dv", "bwd_convert_dq"],
        ),
        ({"op": "bwd", "seqlen_q": 4096, "logits_soft_cap": 50.0}, ["bwd_dot_do_o", "bwd_dq_dk_dv", "bwd_convert_dq"]),
    ],
)
def test_problems_select_rows(catalog: Catalog, problem: dict[str, object], families: list[str]) -> None:
    plan = catalog.select(Problem(batch=2, nhead_q=16, nhead_k=4, hdim_q=128, dtype="bf16", **problem), arch="sm_90")
    assert [kernel.family for kernel in plan.kernels] == families


@pytest.mark.parametrize(
    ("registers", "threads", "shared_bytes", "warps"),
    [(168, 384, 230_000, 3), (128, 128, 0, 4), (255, 128, 100_000, 2), (32, 1024, 0, 16), (16, 32, 0, 8)],
)
def test_occupancy_is_what_cuda_says(registers: int, threads: int, shared_bytes: int, warps: int) -> None:
    """Against cudaOccupancyMaxActiveBlocksPerMultiprocessor on an H200, times warps of a block, by scheduler."""
    assert cuda_facts().arches["sm_90"].occupancy(registers, threads, shared_bytes) == warps


@pytest.mark.parametrize(
    ("batch", "seqlen_k", "splits"),
    [(1, 32768, 31), (16, 16384, 2), (20, 8192, 3), (64, 2048, 1), (1, 1024, 4), (1, 100, 1)],
)
def test_splits_fill_the_gpu(catalog: Catalog, batch: int, seqlen_k: int, splits: int) -> None:
    """132 multiprocessors with two blocks each; a batch has eight key heads, whose queries are one tile."""
    heads = {"nhead_q": 32, "nhead_k": 8, "hdim_q": 128, "dtype": "bf16"}
    problem = Problem(op="splitkv", batch=batch, seqlen_q=1, seqlen_k=seqlen_k, **heads)
    plan = catalog.select(problem, arch="sm_90")
    assert plan.kernels[0].algorithm.block_per_cu == 2
    assert splits_of(problem, plan.kernels, 132, whole_waves=True) == splits


@pytest.mark.parametrize(
    ("batch", "seqlen_k", "splits"), [(8, 4096, 8), (1, 1024, 8), (2, 4096, 22), (1, 8192, 43), (12, 4096, 5)]
)
def test_splits_of_long_keys_have_whole_tiles(catalog: Catalog, batch: int, seqlen_k: int, splits: int) -> None:
    """Tiles of 64 keys, two tiles of queries for each sequence: 7 splits of 64 tiles would take as long as 10 tiles."""
    problem = Problem(batch=batch, seqlen_k=seqlen_k, hdim_q=576, hdim_v=512, **SHORT_QUERIES | LATENT_HEADS)
    kernels = catalog.kernels("family = 'fwd_splitkv' AND pipeline = 'sm90_latent'", arch="sm_90", limit=1)
    assert splits_of(problem, kernels, 132, whole_waves=True) == splits
