"""The kernels of sm_90 on a real GPU, against the float64 reference and PyTorch: make test-cuda."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from cuda_gpu import ARCH, RUNS, SEVERAL_TILES, Row, build, many_heads, need_gpu, part, wrong
from host_problems import draw_inputs, poison_last_block

from catalog.ops.attention.fields import Op
from catalog.ops.attention.inputs import complete
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.sequences import sequences
from catalog.ops.attention.traits import KvMemoryLayout
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs

need_gpu()
pytest_plugins = ("cuda_fixtures",)

MANY_BLOCKS = {
    **{"batch": 4, "nhead_q": 8, "nhead_k": 4, "seqlen_q": 700, "seqlen_k": 1400},
    **{"seqlens_q": [900, 1, 400, 700], "seqlens_k": [1400, 700, 900, 1400]},
}
"""A backward has more blocks than run at a time, each of which adds to dQ of many others."""


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


@pytest.mark.parametrize(("op", "number"), RUNS)
def test_random_problems_of_all_pairs_of_traits_and_tiles(
    catalog: Catalog, tested: Mapping[Op, list[Row]], op: Op, number: int
) -> None:
    failed = []
    ran = 0
    for row in part(tested[op], number):
        for problem in row.problems():
            inputs = draw_inputs(problem, ran)
            failed += [
                (problem.key, row.kernel.name, check) for check in wrong(catalog.plan(problem, row.kernel), inputs)
            ]
            ran += 1
    assert not failed, f"{len(failed)} outputs of {ran} problems: {failed[:5]}"


@pytest.mark.parametrize("op", ["splitkv", "pagedkv", "batch_prefill"])
def test_what_lies_behind_the_keys_of_a_page_is_not_used(
    catalog: Catalog, tested: Mapping[Op, list[Row]], op: Op
) -> None:
    failed = []
    for seed, row in enumerate(row for row in tested[op] if row.kernel.signature.paged_kv):
        problem = row.of_sizes(SEVERAL_TILES[op])
        inputs = draw_inputs(problem, seed)
        poison_unused(problem, inputs)
        failed += [(problem.key, row.kernel.name, check) for check in wrong(catalog.plan(problem, row.kernel), inputs)]
    assert not failed, failed[:5]


@pytest.mark.parametrize("mask", ["no", "causal"])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("hdim", [64, 128, 192, 256])
def test_blocks_that_a_block_mask_leaves_out_are_never_read(catalog: Catalog, hdim: int, block: int, mask: str) -> None:
    """NaN in the last block of keys changes nothing for the queries that do not attend to it, bit by bit.

    More tiles than multiprocessors, so that rings go on from tile to tile, some of which have no block.
    """
    sizes = {"batch": 3, "nhead_q": 8, "nhead_k": 4, "seqlen_q": 1500, "seqlen_k": 1500, "block_mask_q": block}
    heads = {"hdim_q": hdim, "hdim_v": min(hdim, 128) if hdim == 192 else hdim, "dtype": "bf16"}
    problem = Problem(**sizes, **heads, block_mask_kv=block, mask=mask, lse=True)
    plan, inputs = catalog.select(problem, arch=ARCH), make_inputs(problem, 1)
    build(catalog, plan.kernels)
    assert not wrong(plan, inputs)
    before = plan.run(inputs).outputs["o"]
    blind = poison_last_block(problem, inputs)
    o = plan.run(inputs).outputs["o"]
    assert np.isnan(o[~blind].astype(np.float32)).any()
    np.testing.assert_array_equal(o[blind].astype(np.float32), before[blind].astype(np.float32))


@pytest.mark.parametrize("exponent", [-100, -20, -1, 13, 16, 60, 100])
@pytest.mark.parametrize(("hdim", "queries"), [(128, 1), (128, 40), (256, 3)])
def test_bf16_queries_of_any_size_over_fp8_keys(catalog: Catalog, hdim: int, queries: int, exponent: int) -> None:
    """bf16 has a wider range than fp16, in which they are multiplied. A row of zeros and one of single numbers, too."""
    sizes = {"op": "splitkv", "batch": 1, "nhead_q": 8, "nhead_k": 2, "seqlen_q": queries, "seqlen_k": 300}
    scale = hdim**-0.5 * 2.0**-exponent
    problem = Problem(**sizes, hdim_q=hdim, dtype="bf16kvfp8", scale=scale, lse=True)
    inputs = make_inputs(problem, 1)
    inputs["q"] = (inputs["q"].astype(np.float32) * 2.0**exponent).astype(inputs["q"].dtype)
    inputs["q"][0, 0] = 0
    inputs["q"][0, 1, :, 1:] = 0
    plans = [catalog.plan(problem, one.kernel) for one in catalog.candidates(problem, arch=ARCH)]
    build(catalog, (kernel for plan in plans for kernel in plan.kernels))
    for plan in plans:
        assert not wrong(plan, inputs), plan.kernels[0].name


@pytest.mark.parametrize("mask", ["no", "causal"])
@pytest.mark.parametrize("blocks", [(64, 64), (128, 128), (64, 192)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("hdim", [64, 128, 192, 256])
def test_gradients_under_a_block_mask(
    *, catalog: Catalog, hdim: int, deterministic: bool, blocks: tuple[int, int], mask: str
) -> None:
    """Where some heads have no blocks, some queries and keys have none, and of the others a third is seen.

    Where all of a tile's keys are in one block, NaN in the last block changes nothing for who does not attend to it.
    """
    sizes = {"batch": 3, "nhead_q": 8, "nhead_k": 4, "seqlen_q": 1500, "seqlen_k": 1500, "mask": mask}
    heads = {"hdim_q": hdim, "hdim_v": min(hdim, 128) if hdim == 192 else hdim, "dtype": "bf16"}
    of_mask = {"block_mask_q": blocks[0], "block_mask_kv": blocks[1]}
    problem = Problem(op="bwd", **sizes, **heads, **of_mask, deterministic=deterministic)
    plan, inputs = catalog.select(problem, arch=ARCH), make_inputs(problem, 1)
    build(catalog, plan.kernels)
    bitmap = inputs["block_mask"]
    bitmap[...] = np.random.default_rng(hdim).random(bitmap.shape) < 1 / 3
    bitmap[0, :3] = bitmap[:, :, 2] = bitmap[..., 1] = bitmap[..., 3:5] = 0
    inputs |= complete(problem, inputs)
    assert not wrong(plan, inputs)
    before = plan.run(inputs).outputs
    assert not before["dq"][:, :, 2 * blocks[0] : 3 * blocks[0]].any()
    for name in ("dk", "dv"):
        assert not before[name][0, 0].any()
        assert not before[name][:, :, blocks[1] : 2 * blocks[1]].any()
    if blocks == (128, 128):
        blind = poison_last_block(problem, inputs)
        after = plan.run(inputs).outputs
        assert np.isnan(after["dq"][~blind].astype(np.float32)).any()
        assert np.isfinite(after["dq"][blind].astype(np.float32)).all()
        if deterministic:
            assert np.array_equal(after["dq"][blind], before["dq"][blind])
        for name in ("dk", "dv"):
            assert np.array_equal(after[name][:, :, :1408], before[name][:, :, :1408])


@pytest.mark.parametrize("hdim", [64, 128, 192, 256, 512])
def test_deterministic_backward_is_the_same_bits_every_time(
    catalog: Catalog, tested: Mapping[Op, list[Row]], hdim: int
) -> None:
    of_hdim = [row.kernel for row in tested["bwd"] if row.kernel.signature.hdim_q == hdim]
    kernels = [kernel for kernel in of_hdim if kernel.signature.deterministic]
    assert kernels
    for kernel in kernels:
        problem = Row("bwd", kernel).of_sizes(MANY_BLOCKS)
        plan, inputs = catalog.plan(problem, kernel), make_inputs(problem, 1)
        first = plan.run(inputs).outputs
        for _ in range(4):
            again = plan.run(inputs).outputs
            assert all(np.array_equal(first[name], again[name]) for name in ("dq", "dk", "dv")), kernel.name


@pytest.mark.parametrize("mask", ["no", "causal"])
@pytest.mark.parametrize("hdim", [64, 128, 256])
def test_many_deterministic_blocks_give_the_same_bits_forty_times(catalog: Catalog, hdim: int, mask: str) -> None:
    """An order of additions that is only likely changes some of them."""
    sizes = many_heads(hdim) | {"batch": 2, "seqlen_q": 2048, "seqlen_k": 2048}
    problem = Problem(op="bwd", **sizes, mask=mask, dtype="bf16", deterministic=True)
    plan, inputs = catalog.select(problem, arch=ARCH), make_inputs(problem, 1)
    build(catalog, plan.kernels)
    first = plan.run(inputs).outputs["dq"]
    for _ in range(40):
        assert np.array_equal(plan.run(inputs).outputs["dq"], first)


@pytest.mark.parametrize(
    ("mask", "seen"),
    [({"mask": "causal"}, slice(0, 400)), ({"mask": "window", "window": (30, 40)}, slice(270, 700))],
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("hdim", [64, 128, 256])
def test_keys_that_no_query_sees_have_no_gradient(
    *, catalog: Catalog, hdim: int, deterministic: bool, mask: Mapping[str, Any], seen: slice
) -> None:
    """Blocks clear dQ of heads that come later, even those whose keys no query sees."""
    problem = Problem(op="bwd", **many_heads(hdim), **mask, dtype="bf16", deterministic=deterministic)
    plan, inputs = catalog.select(problem, arch=ARCH), make_inputs(problem, 1)
    build(catalog, plan.kernels)
    assert not wrong(plan, inputs)
    outputs = plan.run(inputs).outputs
    for name in ("dk", "dv"):
        assert outputs[name][:, :, seen].any(axis=(0, 1, 3)).all()
        outputs[name][:, :, seen] = 0
        assert not outputs[name].any()


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
@pytest.mark.parametrize("hdim", [64, 128, 512])
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
@pytest.mark.parametrize(("queries", "hdim"), [(300, 128), (3, 128), (300, 59)])
def test_functions_for_pytorch_run_on_the_gpu(causal: bool, queries: int, hdim: int) -> None:
    """Few queries split the keys; odd head dims are padded."""
    torch = pytest.importorskip("torch")
    from catalog.torch import flash_attn_func, scaled_dot_product_attention

    q = torch.randn(2, 8, queries, hdim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, 2, 300, hdim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    o = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    grad = torch.randn_like(o)
    pairs = [(o, expected)]
    pairs += zip(torch.autograd.grad(o, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True)
    if queries == 300 or not causal:  # flash-attn's last query sees all keys
        of_tokens_first = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)
        pairs.append((of_tokens_first.transpose(1, 2), expected))
    for actual, wanted in pairs:
        assert (actual.float() - wanted.float()).norm() < 1e-2 * wanted.float().norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("block", "hdim"), [(64, 128), (128, 128), (128, 59)])
def test_block_sparse_attention_runs_on_the_gpu(block: int, hdim: int, causal: bool) -> None:
    torch = pytest.importorskip("torch")
    from catalog.torch import block_sparse_attention

    of_cuda = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(2, heads, 500, hdim, **of_cuda) for heads in (8, 2, 2))
    blocks = -(-500 // block)
    block_mask = torch.rand(8, blocks, blocks, device="cuda") < 0.5
    o = block_sparse_attention(q, k, v, block_mask, block_size=(block, block), causal=causal, enable_gqa=True)
    seen = block_mask.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :500, :500]
    seen = seen.tril() if causal else seen
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    expected = expected.masked_fill(~seen.any(-1, keepdim=True), 0)
    assert (o.float() - expected.float()).norm() < 1e-2 * expected.float().norm()
    grad_o = torch.randn_like(o).masked_fill(~seen.any(-1, keepdim=True), 0)  # PyTorch's own would be NaN
    gradients = torch.autograd.grad(o, (q, k, v), grad_o)
    shown = seen | ~seen.any(-1, keepdim=True)
    other = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown, enable_gqa=True)
    for ours, theirs in zip(gradients, torch.autograd.grad(other, (q, k, v), grad_o), strict=True):
        assert (ours.float() - theirs.float()).norm() < 2e-2 * theirs.float().norm()
