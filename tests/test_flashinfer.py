"""FlashInfer's interface by the catalog's kernels, against the same in float64, a sequence at a time.

Head dims are below 32, as in test_torch.py: few kernels are compiled.
"""

from __future__ import annotations

import math

import pytest
from conftest import missing, slow_but

from catalog.errors import ArgumentError, CatalogError, SelectionError, UsageError

try:
    import torch
except ImportError:
    missing("torch")

from torch_cases import bottom_right, close, flash64, normal

from catalog.integrations import flashinfer

HEADS, HEADS_K, HDIM, PAGE = 4, 2, 8, 4
KEYS = [7, 0, 21, 4]
"""Tokens of the sequences of a batch."""
QUERIES = [3, 2, 5, 0]
WORKSPACE = torch.empty(1)
PLAIN = {"causal": False, "window_left": -1, "logits_soft_cap": None, "sm_scale": None}


def expected(q, k, v, *, causal, window_left, logits_soft_cap, sm_scale):
    """O and LSE of one sequence, tokens before heads, LSE of base 2."""

    def change(scores):
        scores = scores if sm_scale is None else scores * sm_scale * HDIM**0.5
        return logits_soft_cap * torch.tanh(scores / logits_soft_cap) if logits_soft_cap else scores

    seen = bottom_right(len(q), len(k), window_left, 0 if causal else -1)
    o, lse = flash64(q[None], k[None], v[None], seen, change)
    return o[0], lse[0].T / math.log(2)


def starts(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


class Cache:
    """K and V of KEYS in pages, in a layout and a form, with FlashInfer's three vectors."""

    def __init__(self, layout, form, dtype=torch.float32):
        counts = [-(-keys // PAGE) for keys in KEYS]
        self.indptr = starts(counts)
        self.indices = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1))[: sum(counts)].int()
        self.last = torch.tensor([(keys - 1) % PAGE + 1 if keys else 0 for keys in KEYS], dtype=torch.int32)
        pages = normal(sum(counts) + 3, 2, PAGE, HEADS_K, HDIM, seed=1, dtype=dtype)
        rows = [self.indices[first:end] for first, end in zip(self.indptr, self.indptr[1:], strict=False)]
        tokens = [pages[row.long()].transpose(0, 1).flatten(1, 2) for row in rows]
        self.k, self.v = ([each[i][:keys] for each, keys in zip(tokens, KEYS, strict=True)] for i in (0, 1))
        stored = pages if layout == "NHD" else pages.transpose(2, 3).contiguous()
        self.stored = stored if form == "whole" else stored.unbind(1)

    @property
    def vectors(self):
        return self.indptr, self.indices, self.last


def compare(results, q, k, v, lengths, **options):
    """Compare O and LSE of packed queries with those in float64, a sequence at a time."""
    rows = zip(q.split(lengths), k, v, strict=True)
    each = [expected(*row, **PLAIN | options) for row in rows]
    close(results[0], torch.cat([o for o, _ in each]), q.dtype)
    close(results[1], torch.cat([lse for _, lse in each]), q.dtype)


EVERYTHING = {"causal": True, "window_left": 2, "logits_soft_cap": 5.0, "sm_scale": 0.3}


@pytest.mark.parametrize(
    "options", slow_but([{"causal": True}], [{"causal": True}, {"window_left": 3}, EVERYTHING]), ids=str
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_sequence(layout, options):
    q, k, v = normal(5, HEADS, HDIM), normal(9, HEADS_K, HDIM, seed=1), normal(9, HEADS_K, HDIM, seed=2)
    given = [tensor if layout == "NHD" else tensor.transpose(0, 1).contiguous() for tensor in (k, v)]
    results = flashinfer.single_prefill_with_kv_cache(q, *given, kv_layout=layout, return_lse=True, **options)
    compare(results, q, [k], [v], [5], **options)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_last_token_of_one_sequence(layout):
    q, k, v = normal(HEADS, HDIM), normal(50, HEADS_K, HDIM, seed=1), normal(50, HEADS_K, HDIM, seed=2)
    given = [tensor if layout == "NHD" else tensor.transpose(0, 1).contiguous() for tensor in (k, v)]
    for options in ({}, {"window_left": 2, "logits_soft_cap": 3.0}):
        o, lse = flashinfer.single_decode_with_kv_cache(q, *given, layout, return_lse=True, **options)
        compare((o[None], lse[None]), q[None], [k], [v], [1], **options)
    o = flashinfer.single_decode_with_kv_cache(q, *given, layout, q_scale=0.5, k_scale=2.0, v_scale=3.0, sm_scale=0.2)
    close(o, 3.0 * expected(q[None], k, v, **PLAIN | {"sm_scale": 0.2})[0][0])


@pytest.mark.slow
def test_a_mask_of_ones_own_and_its_gradient():
    q, k, v = (
        normal(3, HEADS, HDIM).requires_grad_(),
        normal(5, HEADS_K, HDIM, seed=1),
        normal(5, HEADS_K, HDIM, seed=2),
    )
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(3)) > 0.4
    o = flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask, causal=True)
    close(o, flash64(q[None], k[None], v[None], mask)[0][0])
    (gradient,) = torch.autograd.grad(o.sum(), q)
    assert gradient.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "form", "dtype"), [("HND", "whole", torch.float32), ("NHD", "pair", torch.bfloat16)]
)
def test_a_batch_over_pages(layout, form, dtype):
    cache = Cache(layout, form, dtype)
    q = normal(sum(QUERIES), HEADS, HDIM, dtype=dtype)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    sizes = (HEADS, HEADS_K, HDIM, PAGE)
    for options in ({"causal": True}, EVERYTHING):
        wrapper.plan(starts(QUERIES), *cache.vectors, *sizes, q_data_type=dtype, **options)
        results = wrapper.run_return_lse(q, cache.stored)
        compare(results, q, cache.k, cache.v, QUERIES, **options)
    out = torch.empty_like(q)
    assert wrapper.run(q, cache.stored, v_scale=2.0, out=out) is out
    close(out, 2 * results[0], dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "tokens"), [("NHD", 1), ("HND", 3)])
def test_the_last_tokens_of_a_batch(layout, tokens):
    cache, q = Cache(layout, "whole"), normal(tokens * len(KEYS), HEADS, HDIM)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout, use_tensor_cores=True)
    for options in ({}, {"window_left": 2, "logits_soft_cap": 3.0}):
        sizes = (HEADS, HEADS_K, HDIM, PAGE)
        wrapper.plan(*cache.vectors, *sizes, q_data_type=q.dtype, q_len_per_req=tokens, **options)
        results = wrapper.run(q, cache.stored, return_lse=True)
        compare(results, q, cache.k, cache.v, [tokens] * len(KEYS), causal=tokens > 1, **options)


@pytest.mark.slow
def test_a_packed_batch_in_every_layout_with_gradients():
    q, k, v = (
        normal(sum(n), heads, HDIM, seed=s)
        for n, heads, s in ((QUERIES, HEADS, 0), (KEYS, HEADS_K, 1), (KEYS, HEADS_K, 2))
    )
    for layout in ("NHD", "HND"):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, layout)
        wrapper.plan(starts(QUERIES), starts(KEYS), HEADS, HEADS_K, HDIM, causal=True, q_data_type=torch.float32)
        given = [tensor if layout == "NHD" else tensor.transpose(0, 1).contiguous() for tensor in (k, v)]
        compare(wrapper.run(q, *given, return_lse=True), q, k.split(KEYS), v.split(KEYS), QUERIES, causal=True)
    leaf = k.clone().requires_grad_()
    o = wrapper.run(q, leaf.transpose(0, 1), v.transpose(0, 1))
    assert torch.autograd.grad(o.sum(), leaf)[0].shape == k.shape


def test_what_no_kernel_follows_is_refused_with_the_reason():
    q, k = normal(2, HEADS, HDIM), normal(5, HEADS_K, HDIM)
    cache = Cache("NHD", "whole")
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    sizes = (HEADS, HEADS_K, HDIM, PAGE)
    plans = {
        "follows custom_mask": {"custom_mask": torch.ones(1)},
        "pos_encoding_mode='ROPE_LLAMA'": {"pos_encoding_mode": "ROPE_LLAMA"},
        "kv_data_type is float8_e4m3fn": {"kv_data_type": "float8_e4m3fn"},
        "follows prefix_len_ptr": {"prefix_len_ptr": torch.ones(1)},
    }
    for words, options in plans.items():
        with pytest.raises(NotImplementedError, match=words) as caught:
            paged.plan(starts(QUERIES), *cache.vectors, *sizes, **options)
        assert isinstance(caught.value, SelectionError)
    with pytest.raises(NotImplementedError, match="latent attention"):
        flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, backend="auto")
    with pytest.raises(NotImplementedError, match="use_cuda_graph"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
    with pytest.raises(NotImplementedError, match="follows packed_custom_mask"):
        flashinfer.single_prefill_with_kv_cache(q, k, k, packed_custom_mask=torch.ones(1))
    mistakes = {
        "kv_layout='DHN'": lambda: flashinfer.single_prefill_with_kv_cache(q, k, k, kv_layout="DHN"),
        "call plan first": lambda: paged.run(q, cache.stored),
        "must ascend": lambda: paged.plan(torch.tensor([0, 3, 1, 4, 5]), *cache.vectors, *sizes),
        "must be from 1": lambda: paged.plan(starts(QUERIES), cache.indptr, cache.indices, cache.last + 9, *sizes),
        "expected a type": lambda: paged.plan(starts(QUERIES), *cache.vectors, *sizes, q_data_type="float99"),
    }
    for words, call in mistakes.items():
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert isinstance(caught.value, ArgumentError)
    with pytest.raises(UsageError, match="no gradient"):
        flashinfer.single_decode_with_kv_cache(q[0].requires_grad_(), k, k)
    with pytest.raises(CatalogError, match="float64"):
        flashinfer.single_prefill_with_kv_cache(q.double(), k.double(), k.double())
