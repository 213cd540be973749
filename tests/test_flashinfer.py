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
from catalog.integrations.flashinfer.positions import encoding_of, rotated, slopes_of
from catalog.integrations.flashinfer.scores import mask_of

HEADS, HEADS_K, HDIM, PAGE = SIZES = 4, 2, 8, 4
KEYS = [7, 0, 21, 4]
"""Tokens of the sequences of a batch."""
QUERIES = [3, 2, 5, 0]
WORKSPACE = torch.empty(1)
PLAIN = {"causal": False, "window_left": -1, "logits_soft_cap": None, "sm_scale": None}


def expected(q, k, v, *, causal, window_left, logits_soft_cap, sm_scale, mask=None, slopes=None):
    """O and LSE of one sequence, tokens before heads, LSE of base 2."""

    def change(scores):
        scores = scores if sm_scale is None else scores * sm_scale * HDIM**0.5
        if slopes is not None:
            scores = scores + slopes * (torch.arange(len(k)) - torch.arange(len(q))[:, None])
        return logits_soft_cap * torch.tanh(scores / logits_soft_cap) if logits_soft_cap else scores

    seen = bottom_right(len(q), len(k), window_left, 0 if causal else -1) if mask is None else mask
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
    """Compare O and LSE of packed queries with those in float64, a sequence at a time; masks are one of each."""
    masks = options.pop("masks", [None] * len(lengths))
    rows = zip(q.split(lengths), k, v, masks, strict=True)
    each = [expected(*row[:3], mask=row[3], **PLAIN | options) for row in rows]
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
    for options in ({"causal": True}, EVERYTHING):
        wrapper.plan(starts(QUERIES), *cache.vectors, *SIZES, q_data_type=dtype, **options)
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
        wrapper.plan(*cache.vectors, *SIZES, q_data_type=q.dtype, q_len_per_req=tokens, **options)
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


SLOPES = 2.0 ** (-2.0 * torch.arange(1, HEADS + 1, dtype=torch.float64))[:, None, None]


def turned(tokens, first, scale=1.0, theta=1e4):
    """Tokens of successive positions from ``first`` on, rotated in float64 as complex numbers."""
    half = HDIM // 2
    angles = (first + torch.arange(len(tokens)).double())[:, None, None] / scale * theta ** (-torch.arange(half) / half)
    pairs = torch.complex(tokens[..., :half].double(), tokens[..., half:].double()) * torch.exp(1j * angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def random_masks(lengths_q, lengths_k):
    """A mask of each sequence, and all of them in FlashInfer's two forms."""
    chosen = torch.Generator().manual_seed(5)
    masks = [torch.rand(pair, generator=chosen) > 0.4 for pair in zip(lengths_q, lengths_k, strict=True)]
    padded = [torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8) for mask in masks]
    packed = torch.cat([(bits * 2 ** torch.arange(8)).sum(1) for bits in padded]).to(torch.uint8)
    return masks, {"custom_mask": torch.cat([mask.flatten() for mask in masks])}, {"packed_custom_mask": packed}


def test_masks_are_unpacked_and_positions_turn_pairs():
    masks, whole, packed = random_masks(QUERIES, KEYS)
    for form in (whole, packed):
        arguments = {"custom_mask": None, "packed_custom_mask": None} | form
        found = mask_of(*arguments.values(), tuple(QUERIES), tuple(KEYS))
        assert all(torch.equal(one, other) for one, other in zip(found, masks, strict=True))
    k = normal(9, HEADS_K, HDIM)
    close(rotated(k, torch.arange(3, 12), encoding_of("ROPE_LLAMA", 2.0, 500.0)), turned(k, 3, 2.0, 500.0))
    # The published slopes of 8 heads; 12 take four of 16 in between.
    assert slopes_of(8, torch.device("cpu")).tolist() == [[2.0**-i for i in range(1, 9)]]
    assert slopes_of(12, torch.device("cpu"))[0, 8:].tolist() == pytest.approx([2 ** -(i + 0.5) for i in range(4)])


@pytest.mark.slow
def test_masks_of_a_batch():
    cache, q = Cache("HND", "pair"), normal(sum(QUERIES), HEADS, HDIM)
    masks, whole, packed = random_masks(QUERIES, KEYS)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "HND")
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    paged.plan(starts(QUERIES), *cache.vectors, *SIZES, q_data_type=q.dtype, causal=True, **whole)
    compare(paged.run(q, cache.stored, return_lse=True), q, cache.k, cache.v, QUERIES, masks=masks)
    ragged.plan(starts(QUERIES), starts(KEYS), HEADS, HEADS_K, HDIM, q_data_type=q.dtype, **packed)
    results = ragged.run(q, torch.cat(cache.k), torch.cat(cache.v), return_lse=True)
    compare(results, q, cache.k, cache.v, QUERIES, masks=masks)
    single = {"custom_mask": masks[2], "pos_encoding_mode": "ALIBI", "return_lse": True}
    results = flashinfer.single_prefill_with_kv_cache(q[5:], cache.k[2], cache.v[2], **single)
    compare(results, q[5:], cache.k[2:3], cache.v[2:3], [5], masks=masks[2:3], slopes=SLOPES)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ROPE_LLAMA", "ALIBI"])
def test_positions(mode):
    cache, q = Cache("NHD", "whole"), normal(sum(QUERIES), HEADS, HDIM)
    last = normal(len(KEYS), HEADS, HDIM, seed=4)
    rotates, slopes = mode == "ROPE_LLAMA", None if mode == "ROPE_LLAMA" else SLOPES
    k = [turned(tokens, 0) for tokens in cache.k] if rotates else cache.k
    firsts = [keys - queries for keys, queries in zip(KEYS, QUERIES, strict=True)]
    of_prefill = torch.cat([turned(*pair) for pair in zip(q.split(QUERIES), firsts, strict=True)]) if rotates else q
    of_decode = torch.cat([turned(row[None], keys - 1) for row, keys in zip(last, KEYS, strict=True)])
    options = {"pos_encoding_mode": mode, "q_data_type": torch.float32}
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    for causal in (True, False):
        given = {"causal": causal, "window_left": 3 if causal else -1}
        wanted = {**given, "slopes": slopes}
        ragged.plan(starts(QUERIES), starts(KEYS), HEADS, HEADS_K, HDIM, **options, **given)
        results = ragged.run(q, torch.cat(cache.k), torch.cat(cache.v), return_lse=True)
        compare(results, of_prefill.float(), k, cache.v, QUERIES, **wanted)
        paged.plan(starts(QUERIES), *cache.vectors, *SIZES, **options, **given)
        results = paged.run(q, cache.stored, return_lse=True)
        compare(results, of_prefill.float(), k, cache.v, QUERIES, **wanted)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
    decode.plan(*cache.vectors, *SIZES, **options)
    results = decode.run(last, cache.stored, return_lse=True)
    compare(results, (of_decode if rotates else last).float(), k, cache.v, [1] * len(KEYS), slopes=slopes)
    # The same key by key: the position of a single query is that of the last key.
    o, lse = flashinfer.single_decode_with_kv_cache(
        last[2], cache.k[2], cache.v[2], pos_encoding_mode=mode, return_lse=True
    )
    close(o, results[0][2])
    close(lse, results[1][2])


@pytest.mark.parametrize("rotates", slow_but([False], [False, True]))
def test_a_cache_of_fp8_is_read_as_it_is_unless_keys_are_rotated(rotates):
    cache, dtype = Cache("NHD", "whole"), torch.bfloat16
    q, last = normal(sum(QUERIES), HEADS, HDIM, dtype=dtype), normal(len(KEYS), HEADS, HDIM, dtype=dtype)
    stored = cache.stored.to(torch.float8_e4m3fn)
    k, v = ([tensor.to(stored.dtype).to(dtype) for tensor in tensors] for tensors in (cache.k, cache.v))
    options = {"q_data_type": dtype, "kv_data_type": stored.dtype}
    options |= {"pos_encoding_mode": "ROPE_LLAMA"} if rotates else {}
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    decode.plan(*cache.vectors, *SIZES, **options)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    prefill.plan(starts(QUERIES), *cache.vectors, *SIZES, causal=True, **options)
    kept = decode._cache(stored, decode._plan).k
    assert kept.dtype == (dtype if rotates else stored.dtype)
    assert (kept.data_ptr() == stored.data_ptr()) is not rotates
    scale = 0.25
    results = decode.run(last, stored, return_lse=True, k_scale=scale, v_scale=2.0)
    other = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    other.plan(*cache.vectors, *SIZES, **{**options, "kv_data_type": dtype})
    widened = stored.to(dtype)
    for ours, theirs in zip(
        results, other.run(last, widened, return_lse=True, k_scale=scale, v_scale=2.0), strict=True
    ):
        close(ours, theirs, dtype)
    if not rotates:
        compare(decode.run(last, stored, return_lse=True), last, k, v, [1] * len(KEYS))
        compare(prefill.run(q, stored, return_lse=True), q, k, v, QUERIES, causal=True)


@pytest.mark.slow
def test_a_cache_of_another_type_other_options_and_a_faster_plan():
    cache, q = Cache("HND", "whole"), normal(len(KEYS), HEADS, HDIM)
    stored, once = cache.stored.to(torch.float8_e4m3fn), [1] * len(KEYS)
    k, v = ([tensor.to(torch.float8_e4m3fn).float() for tensor in tensors] for tensors in (cache.k, cache.v))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "HND")
    wrapper.plan(*cache.vectors, *SIZES, q_data_type=q.dtype, data_type="float8_e4m3fn", window_left=2)
    compare(wrapper.run(q, stored, return_lse=True), q, k, v, once, window_left=2)
    lse = torch.empty(len(KEYS), HEADS)
    assert wrapper.run(q, stored, lse=lse).shape == q.shape
    results = wrapper.forward_return_lse(q, stored, sm_scale=0.3)
    compare(results, q, k, v, once, sm_scale=0.3)
    assert not torch.equal(lse, results[1])
    indptr, *rest = cache.vectors
    other = {"q_data_type": q.dtype, "o_data_type": torch.bfloat16}
    flashinfer.fast_decode_plan(wrapper, torch.empty(0), *rest, *SIZES, global_override_indptr_cpu=indptr, **other)
    o = wrapper.run(q, cache.stored)
    assert o.dtype == torch.bfloat16
    close(o[0], expected(q[:1], cache.k[0], cache.v[0], **PLAIN)[0][0], o.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "causal", "neighbours"), [([1, 1, 1], False, True), ([3, 0, 5], True, False)], ids=["even", "uneven"]
)
def test_latent_attention(tokens, causal, neighbours):
    keys, size, hdims = [7, 0, 21], 4, (512, 64)
    cache, scale = normal(12, size, sum(hdims)), 0.05
    parts = cache.split(hdims, dim=-1) if neighbours else [part.contiguous() for part in cache.split(hdims, dim=-1)]
    counts = [-(-count // size) for count in keys]
    indices = torch.randperm(12, generator=torch.Generator().manual_seed(1))[: sum(counts)].int()
    q = normal(sum(tokens), HEADS, sum(hdims), seed=2)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    lengths = torch.tensor(keys, dtype=torch.int32)
    types = (torch.float32, torch.float32)
    wrapper.plan(starts(tokens), starts(counts), indices, lengths, HEADS, *hdims, size, causal, scale, *types)
    o, lse = wrapper.run(*q.split(hdims, dim=-1), *parts, return_lse=True, return_lse_base_on_e=True)
    numbers = zip(indices.split(counts), keys, strict=True)
    rows = [cache[pages.long()].flatten(0, 1)[:count, None] for pages, count in numbers]
    for sequence, k, found, found_lse in zip(q.split(tokens), rows, o.split(tokens), lse.split(tokens), strict=True):
        seen = bottom_right(len(sequence), len(k), -1, 0 if causal else -1)
        wanted = flash64(sequence[None], k[None], k[None, ..., : hdims[0]], seen, lambda scores: scores * scale * 24.0)
        close(found, wanted[0][0])
        close(found_lse, wanted[1][0].T)


def test_what_no_kernel_follows_is_refused_with_the_reason():
    q, k = normal(2, HEADS, HDIM), normal(5, HEADS_K, HDIM)
    cache = Cache("NHD", "whole")
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    plans = {
        "follows prefix_len_ptr": {"prefix_len_ptr": torch.ones(1)},
    }
    for words, options in plans.items():
        with pytest.raises(NotImplementedError, match=words) as caught:
            paged.plan(starts(QUERIES), *cache.vectors, *SIZES, **options)
        assert isinstance(caught.value, SelectionError)
    for wrapper in (flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchMLAPagedAttentionWrapper):
        with pytest.raises(NotImplementedError, match="use_cuda_graph"):
            wrapper(torch.empty(1, device="meta"), use_cuda_graph=True)
    with pytest.raises(NotImplementedError, match="follows kv_cache_sf"):
        flashinfer.single_prefill_with_kv_cache(q, k, k, kv_cache_sf=(k, k))
    mistakes = {
        "kv_layout='DHN'": lambda: flashinfer.single_prefill_with_kv_cache(q, k, k, kv_layout="DHN"),
        "call plan first": lambda: paged.run(q, cache.stored),
        "must ascend": lambda: paged.plan(torch.tensor([0, 3, 1, 4, 5]), *cache.vectors, *SIZES),
        "must be from 1": lambda: paged.plan(starts(QUERIES), cache.indptr, cache.indices, cache.last + 9, *SIZES),
        "packed_custom_mask has 1 bytes": lambda: flashinfer.single_prefill_with_kv_cache(
            q, k, k, packed_custom_mask=torch.ones(1)
        ),
        "pos_encoding_mode='ROPE'": lambda: paged.plan(
            starts(QUERIES), *cache.vectors, *SIZES, pos_encoding_mode="ROPE"
        ),
        "and kv_len_arr has 1": lambda: flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE).plan(
            starts(QUERIES), starts([1]), cache.indices, torch.ones(1), 4, 512, 64, 4, True, 0.1, q.dtype, q.dtype
        ),
        "no option logits_cap": lambda: paged.forward(q, cache.stored, logits_cap=1.0),
        "expected a type": lambda: paged.plan(starts(QUERIES), *cache.vectors, *SIZES, q_data_type="float99"),
    }
    for words, call in mistakes.items():
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert isinstance(caught.value, ArgumentError)
    with pytest.raises(UsageError, match="no gradient"):
        flashinfer.single_decode_with_kv_cache(q[0].requires_grad_(), k, k)
    with pytest.raises(CatalogError, match="float64"):
        flashinfer.single_prefill_with_kv_cache(q.double(), k.double(), k.double())
