"""The kernels of sm_90 on a real GPU, against the float64 reference and PyTorch: make test-cuda.

Every pair of values of two traits that some row has together is in a problem, and every tile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from cuda_gpu import ARCH, build, need_gpu, wrong
from host_problems import Signature, draw_inputs, problem_fields, signatures

from catalog.ops.attention.fields import Op
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.sequences import sequences
from catalog.ops.attention.stages import MAIN_STAGE
from catalog.ops.attention.traits import KvMemoryLayout
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.schema.kernel import Kernel

need_gpu()

OPS: tuple[Op, ...] = ("fwd", "splitkv", "pagedkv", "batch_prefill", "appendkv", "bwd")
PROBLEMS_OF_A_SIGNATURE = 6
_DENSE = "mode = 'batch' AND NOT paged_kv AND NOT logits"
TILES: Mapping[Op, tuple[str, Mapping[str, Any]]] = {
    "fwd": (f"{_DENSE} AND lse", {"seqlen_q": 333, "seqlen_k": 457, "lse": True}),
    "splitkv": (_DENSE, {"seqlen_q": 3, "seqlen_k": 1500}),
    "pagedkv": (
        "mode = 'batch' AND NOT logits AND lse",
        {"seqlen_q": 77, "seqlen_k": 457, "page_size": 16, "lse": True},
    ),
    "batch_prefill": ("NOT logits AND lse", {"seqlens_q": [77, 0, 300], "seqlen_k": 457, "page_size": 16, "lse": True}),
    "appendkv": ("paged_kv", {"seqlen_q": 33, "seqlen_k": 457, "seqlen_new": 129, "page_size": 16}),
    "bwd": (_DENSE, {"seqlen_q": 333, "seqlen_k": 457}),
}
"""Rows of every tile of an operation's main stage, and a problem for them; further traits are those of the row."""


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path_factory.mktemp("cuda") / "catalog.db")
    catalog.populate(ARCH)
    yield catalog
    catalog.close()


def drawn(signature: Signature, seed: int) -> Problem:
    pick = random.Random(seed)  # noqa: S311
    return Problem(**problem_fields(signature, lambda *values: pick.choice(values)))


def problem_of(kernel: Kernel, op: Op, sizes: Mapping[str, Any]) -> Problem:
    """A problem of these sizes that the kernel answers."""
    signature = kernel.signature
    fields = {"op": op, "nhead_q": 4, "nhead_k": 2, "dtype": signature.dtype, **sizes}
    fields |= {"hdim_q": signature.hdim_q, "hdim_v": signature.hdim_v, "batch": len(sizes.get("seqlens_q", "of"))}
    if op == "batch_prefill":
        fields |= {name: getattr(signature, name) for name in ("kv_memory_layout", "kv_lookup_table")}
    if op == "appendkv":
        fields["rope"] = signature.rope
    return Problem(**fields)


def poison_unused(problem: Problem, inputs: Mapping[str, Any]) -> None:
    """Write NaN to every slot of the cache that holds no key of a sequence."""
    used = np.zeros((problem.num_pages or 0, problem.page_size), bool)
    for sequence in sequences(problem, inputs):
        if "block_table" in inputs:
            pages = inputs["block_table"][sequence.index]
        else:
            pages = inputs["kv_page_indices"][inputs["kv_indptr"][sequence.index] :]
        keys = np.arange(sequence.seqlen_k)
        used[pages[keys // problem.page_size], keys % problem.page_size] = True
    pages, slots = np.nonzero(~used)
    k, v = inputs["k_cache"], inputs["v_cache"]
    if problem.kv_memory_layout is KvMemoryLayout.VECTORIZED:
        vector = v.shape[-1]
        k[pages, :, :, slots] = np.nan
        v[pages, :, slots // vector, :, slots % vector] = np.nan
    else:
        k[pages, slots] = v[pages, slots] = np.nan


@pytest.mark.parametrize("op", OPS)
def test_drawn_problems_of_all_pairs_of_traits(catalog: Catalog, op: Op) -> None:
    of = signatures(catalog, op, ARCH)
    problems = [drawn(signature, seed) for signature in of for seed in range(PROBLEMS_OF_A_SIGNATURE)]
    plans = [catalog.select(problem, arch=ARCH) for problem in problems]
    build(catalog, (kernel for plan in plans for kernel in plan.kernels))
    main = MAIN_STAGE[op]
    failed = []
    for seed, (problem, plan) in enumerate(zip(problems, plans, strict=True)):
        kernel = next(kernel for kernel in plan.kernels if kernel.family == main)
        failed += [
            (problem.key, kernel.name, check)
            for check in wrong(catalog.plan(problem, kernel), draw_inputs(problem, seed))
        ]
    assert not failed, f"{len(failed)} of {len(problems)}: {failed[:5]}"


FEATURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "all": ("true", {"mask": "causal"}),
    "plain": ("mask = 'causal' AND bias = 'no' AND NOT dropout", {"mask": "causal"}),
    "sink": (
        "sink AND bias = 'no' AND NOT dropout",
        {"mask": "window", "window": (100, 0), "sink_size": 37},
    ),
    "bias": ("mask = 'causal' AND bias = 'bias' AND NOT dbias AND NOT dropout", {"mask": "causal", "bias": "bias"}),
    "dbias": (
        "mask = 'no' AND dbias AND NOT dropout",
        {"bias": "bias", "dbias": True},
    ),
    "dropout": (
        "mask = 'causal' AND bias = 'no' AND dropout AND NOT store_randval",
        {"mask": "causal", "dropout": 0.2},
    ),
    "randval": (
        "mask = 'causal' AND bias = 'no' AND dropout AND (store_randval OR family = 'fwd')",
        {"mask": "causal", "dropout": 0.5, "randval": True},
    ),
}
"""Traits of rows, and fields of a problem for them."""
OPS_OF: Mapping[str, tuple[Op, ...]] = {
    "all": ("appendkv",),
    "plain": ("fwd", "splitkv", "pagedkv", "batch_prefill", "bwd"),
    "sink": ("fwd", "splitkv", "pagedkv"),
    "bias": ("fwd", "splitkv", "pagedkv", "bwd"),
    "dbias": ("bwd",),
    "dropout": ("fwd", "bwd"),
    "randval": ("fwd", "bwd"),
}


@pytest.mark.parametrize(("feature", "op"), [(feature, op) for feature, ops in OPS_OF.items() for op in ops])
def test_every_tile(catalog: Catalog, feature: str, op: Op) -> None:
    (tiles, sizes), (traits, fields) = TILES[op], FEATURES[feature]
    kernels = catalog.kernels(f"family = '{MAIN_STAGE[op]}' AND {tiles} AND {traits}", arch=ARCH, limit=200)
    assert kernels
    build(catalog, kernels)
    failed = []
    for seed, kernel in enumerate(kernels):
        problem = problem_of(kernel, op, {**sizes, **fields})
        failed += [(kernel.name, check) for check in wrong(catalog.plan(problem, kernel), draw_inputs(problem, seed))]
    assert not failed, f"{len(failed)} outputs of {len(kernels)} kernels: {failed[:5]}"


@pytest.mark.parametrize("op", ["pagedkv", "batch_prefill"])
def test_what_lies_behind_the_keys_of_a_page_is_not_used(catalog: Catalog, op: Op) -> None:
    (tiles, sizes), (traits, fields) = TILES[op], FEATURES["plain"]
    where = f"family = '{MAIN_STAGE[op]}' AND {tiles} AND {traits} AND hdim_q = 128"
    kernels = catalog.kernels(where, arch=ARCH, limit=200)
    build(catalog, kernels)
    failed = []
    for seed, kernel in enumerate(kernels):
        problem = problem_of(kernel, op, {**sizes, **fields})
        inputs = draw_inputs(problem, seed)
        poison_unused(problem, inputs)
        failed += [(kernel.name, check) for check in wrong(catalog.plan(problem, kernel), inputs)]
    assert not failed, f"{len(failed)} outputs of {len(kernels)} kernels: {failed[:5]}"


@pytest.mark.parametrize(
    "fields",
    [
        {"batch": 4, "seqlen_q": 1200},
        {"batch": 4, "seqlen_q": 1200, "mask": "causal"},
        {"batch": 4, "seqlen_q": 900, "seqlen_k": 1400, "mask": "window", "window": (300, 100)},
        {"seqlens_q": [900, 1, 400, 1100], "seqlens_k": [1100, 700, 900, 600], "mask": "bottom_right"},
    ],
    ids=lambda fields: fields.get("mask", "no"),
)
@pytest.mark.parametrize("hdim", [64, 128, 256])
def test_deterministic_backward_is_the_same_bits_every_time(
    catalog: Catalog, hdim: int, fields: dict[str, Any]
) -> None:
    """With more blocks than run at a time, each of which adds to tiles of many others."""
    problem = Problem(op="bwd", nhead_q=8, nhead_k=4, hdim_q=hdim, dtype="bf16", deterministic=True, **fields)
    plan = catalog.select(problem, arch=ARCH)
    build(catalog, plan.kernels)
    inputs = make_inputs(problem, 1)
    first = plan.run(inputs).outputs
    for _ in range(4):
        again = plan.run(inputs).outputs
        assert all(np.array_equal(first[name], again[name]) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("mask", ["no", "causal", "bottom_right"])
@pytest.mark.parametrize("hdim", [64, 128])
def test_packed_sequences_that_differ_in_length(catalog: Catalog, hdim: int, mask: str) -> None:
    """Blocks look for their tiles among 70 sequences, most of them short and some empty."""
    pick = random.Random(hdim)  # noqa: S311
    lengths = [900, *(pick.choice([0, 1, 37, 64, 130]) for _ in range(68)), 700]
    keys = lengths if mask == "causal" else [pick.choice([0, 1, 90, 400]) for _ in lengths]
    problem = Problem(
        seqlens_q=lengths, seqlens_k=keys, nhead_q=4, nhead_k=2, hdim_q=hdim, dtype="bf16", mask=mask, lse=True
    )
    plan = catalog.select(problem, arch=ARCH)
    build(catalog, plan.kernels)
    assert not wrong(plan, make_inputs(problem, 1)), plan.kernels


@pytest.mark.parametrize("mask", ["no", "causal"])
@pytest.mark.parametrize("hdim", [64, 128])
def test_forward_and_backward_agree_with_pytorch(catalog: Catalog, hdim: int, mask: str) -> None:
    torch = pytest.importorskip("torch")
    shape = {"batch": 2, "nhead_q": 4, "seqlen_q": 515, "hdim_q": hdim, "dtype": "fp16", "mask": mask}
    inputs = make_inputs(Problem(**shape), 1)
    leaves = {name: torch.tensor(inputs[name], device="cuda", requires_grad=True) for name in "qkv"}
    o = torch.nn.functional.scaled_dot_product_attention(*leaves.values(), is_causal=mask == "causal")
    grad = torch.randn_like(o)
    o.backward(grad)

    forward = catalog.select(Problem(**shape, lse=True), arch=ARCH).run(inputs).outputs
    np.testing.assert_allclose(forward["o"].astype(np.float32), o.detach().float().cpu().numpy(), atol=4e-3)
    backward = catalog.select(Problem(op="bwd", **shape), arch=ARCH)
    given = {**inputs, "o": forward["o"], "lse": forward["lse"], "do": grad.cpu().numpy()}
    for name, gradient in backward.run(given).outputs.items():
        expected = leaves[name.removeprefix("d")].grad.float().cpu().numpy()
        assert np.linalg.norm(gradient.astype(np.float32) - expected) < 4e-3 * np.linalg.norm(expected), name


@pytest.mark.parametrize("causal", [False, True])
def test_functions_for_pytorch_run_on_the_gpu(causal: bool) -> None:
    torch = pytest.importorskip("torch")
    from catalog.torch import flash_attn_func, scaled_dot_product_attention

    q = torch.randn(2, 8, 300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, 2, 300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    o = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    grad = torch.randn_like(o)
    pairs = [(o, expected)]
    pairs += zip(torch.autograd.grad(o, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True)
    of_tokens_first = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)
    pairs.append((of_tokens_first.transpose(1, 2), expected))
    for actual, wanted in pairs:
        assert (actual.float() - wanted.float()).norm() < 1e-2 * wanted.float().norm()
