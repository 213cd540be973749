"""flash_attn_with_kvcache by the catalog's kernels, against the same in float64, a sequence at a time.

Head dims are below 32, as in test_torch.py: few kernels are compiled.
"""

from __future__ import annotations

from itertools import product

import pytest
from conftest import missing, slow_but

from catalog.errors import ArgumentError, SelectionError, TensorError, UsageError

try:
    import torch
except ImportError:
    missing("torch")

from torch_cases import bottom_right, close, flash64, normal

from catalog.torch import flash_attn_with_kvcache

HEADS, HDIM, CAPACITY = 4, 8, 40
LENGTHS = torch.tensor([7, 0, 21], dtype=torch.int32)
"""Tokens that the sequences have before a call."""


def rotated(x, cos, sin, positions, interleaved):
    """(tokens, heads, head dim), each token at its position."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    c, s = (table.double()[positions][:, None] for table in (cos, sin))
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = a * c - b * s, b * c + a * s
    return torch.cat([torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1), rest], -1)


class Store:
    """A cache of 3 sequences: dense, as some of more sequences, or in pages; ``rows(i)`` are the places of one."""

    def __init__(self, form, heads, dtype):
        shape = {"dense": (3, CAPACITY), "chosen": (5, CAPACITY), "pages": (17, 8)}[form]
        self.k, self.v = (normal(*shape, heads, HDIM, seed=seed, dtype=dtype) for seed in (10, 11))
        self.where = {}
        places = torch.arange(3)[:, None]
        if form == "chosen":
            places = torch.tensor([[4], [0], [2]])
            self.where = {"cache_batch_idx": places[:, 0].int()}
        if form == "pages":
            places = torch.randperm(17, generator=torch.Generator().manual_seed(1))[:15].view(3, 5)
            self.where = {"block_table": places.int()}
        tokens = torch.arange(shape[1])
        self._rows = (places[:, :, None] * shape[1] + tokens).flatten(1)

    def of(self, cache, i):
        return cache.flatten(0, 1)[self._rows[i]]

    def put(self, cache, i, first, tokens):
        cache.flatten(0, 1)[self._rows[i][first : first + len(tokens)]] = tokens.to(cache.dtype)


def unchanged(scores, _):
    return scores


def check(form, *, dtype=torch.float32, queries=3, new=3, heads_k=2, rope=None, change=unchanged, **options):
    """Compare O, LSE and the cache with those in float64; ``change`` is what the options do to the scores."""
    store = Store(form, heads_k, dtype)
    q = normal(3, queries, HEADS, HDIM, dtype=dtype)
    k, v = (normal(3, new, heads_k, HDIM, seed=seed, dtype=dtype) for seed in (1, 2))
    causal, (left, right) = options.get("causal", False), options.get("window_size", (-1, -1))
    right = 0 if causal else right
    tokens = {"k": k, "v": v} if new else {}
    if rope:
        angles = 6 * torch.rand(CAPACITY + 3, HDIM // 4, generator=torch.Generator().manual_seed(3))
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        tokens |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rope == "interleaved"}
    expected_k, expected_v, o64, lse64 = store.k.clone(), store.v.clone(), [], []
    for i, length in enumerate(LENGTHS.tolist()):
        after, query, fresh = length + new, q[i].double(), k[i].double()
        if rope:
            turn = (cos, sin), rope == "interleaved"
            steps = torch.arange(queries) if max(left, right) >= 0 else torch.zeros(queries, dtype=torch.long)
            query = rotated(query, *turn[0], length + steps, turn[1])
            fresh = rotated(fresh, *turn[0], length + torch.arange(new), turn[1])
        store.put(expected_k, i, length, fresh)
        store.put(expected_v, i, length, v[i])
        seen = bottom_right(queries, after, left, right)
        keys, values = (store.of(cache, i)[:after][None] for cache in (expected_k, expected_v))
        one = flash64(query[None], keys, values, seen, lambda scores, i=i: change(scores, i))
        o64.append(one[0])
        lse64.append(one[1])
    result = flash_attn_with_kvcache(
        q, store.k, store.v, cache_seqlens=LENGTHS, return_softmax_lse=True, **tokens, **store.where, **options
    )
    close(result[0], torch.cat(o64), dtype)
    close(result[1], torch.cat(lse64), dtype)
    close(store.k, expected_k, dtype)
    assert torch.equal(store.v, expected_v)


@pytest.mark.parametrize("form", slow_but(["pages"], ["dense", "chosen", "pages"]))
def test_new_tokens_are_rotated_appended_and_seen(form):
    check(form, rope="interleaved", causal=True, num_splits=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "rope", "splits"), [*product(["dense", "pages"], [None, "interleaved", "halves"], [0, 1, 3])]
)
@pytest.mark.parametrize("window", [(-1, -1), (5, 2)])
def test_forms_rotations_windows_and_splits(form, rope, splits, window):
    check(form, rope=rope, window_size=window, num_splits=splits)
    check(form, rope=rope, window_size=window, num_splits=splits, causal=True, queries=5, new=2)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "pages"])
def test_features(form):
    slopes = torch.rand(3, HEADS)

    def slanted(scores, i):
        """Under a causal mask, what all keys of a row have in common is left out of LSE, as in flash-attn."""
        return scores + slopes[i].double()[:, None, None] * torch.arange(scores.shape[-1])

    check(form, softcap=2.0, change=lambda scores, _: 2.0 * torch.tanh(scores / 2.0))
    check(form, alibi_slopes=slopes, causal=True, change=slanted)
    check(form, dtype=torch.bfloat16, causal=True)
    check(form, heads_k=1, queries=1, new=1)
    check(form, heads_k=4, softmax_scale=0.3, change=lambda scores, _: scores * 0.3 * HDIM**0.5)


def test_a_cache_that_is_only_read_and_one_length_for_all():
    q, k, v = normal(2, 3, HEADS, HDIM), normal(4, 9, 2, HDIM, seed=1), normal(4, 9, 2, HDIM, seed=2)
    expected, _ = flash64(q, k[:2, :6], v[:2, :6], bottom_right(3, 6, right=0))
    o = flash_attn_with_kvcache(q, k, v, cache_seqlens=6, causal=True, num_splits=1)
    close(o, expected)
    whole = flash_attn_with_kvcache(q, k, v, causal=True, num_splits=1)
    close(whole, flash64(q, k[:2], v[:2], bottom_right(3, 9, right=0))[0])


@pytest.mark.parametrize(("queries", "splits"), slow_but([(1, 0)], [(1, 0), (5, 1)]))
@pytest.mark.parametrize("form", slow_but(["pages"], ["dense", "pages"]))
def test_a_cache_of_fp8_has_factors(form, queries, splits):
    store, q = Store(form, 2, torch.float32), normal(3, queries, HEADS, HDIM, dtype=torch.bfloat16)
    factors = {"k_descale": torch.tensor([0.5]), "v_descale": torch.tensor([3.0])}
    k, v = (cache.to(torch.float8_e4m3fn) for cache in (store.k, store.v))
    wide = [tensor.float() * factor for tensor, factor in zip((k, v), factors.values(), strict=True)]
    lengths = torch.tensor([7, 1, 21], dtype=torch.int32)
    options = {"cache_seqlens": lengths, "causal": True, "num_splits": splits, **store.where}
    for given, of_cache in ((factors, wide), ({}, [k.float(), v.float()])):
        o = flash_attn_with_kvcache(q, k, v, **options, **given)
        for i, length in enumerate(lengths.tolist()):
            keys, values = (store.of(cache, i)[None, :length] for cache in of_cache)
            close(o[i], flash64(q[i : i + 1], keys, values, bottom_right(queries, length, right=0))[0][0], q.dtype)
    only_v = flash_attn_with_kvcache(q, k, v, **options, v_descale=factors["v_descale"])
    close(only_v, o * factors["v_descale"], q.dtype)


@pytest.mark.parametrize("form", slow_but(["pages"], ["dense", "pages"]))
def test_new_tokens_are_divided_by_the_factors_of_a_cache_of_fp8(form):
    store, dtype, new = Store(form, 2, torch.float32), torch.bfloat16, 4
    q = normal(3, 1, HEADS, HDIM, dtype=dtype)
    tokens = {"k": normal(3, new, 2, HDIM, seed=1, dtype=dtype), "v": normal(3, new, 2, HDIM, seed=2, dtype=dtype)}
    tokens["v"][0, 0, 0, 0] = 1e4  # more than fp8 holds
    caches = {"k": store.k.to(torch.float8_e4m3fn), "v": store.v.to(torch.float8_e4m3fn)}
    factors = {"k": torch.tensor([0.5]), "v": torch.tensor([4.0])}
    expected = {name: cache.float() for name, cache in caches.items()}
    for i, length in enumerate(LENGTHS.tolist()):
        for name, cache in expected.items():
            quotients = (tokens[name][i].float() / factors[name]).clamp(-448, 448)
            store.put(cache, i, length, quotients.to(torch.float8_e4m3fn).float())
    o = flash_attn_with_kvcache(
        *(q, caches["k"], caches["v"], tokens["k"], tokens["v"]),
        cache_seqlens=LENGTHS,
        **store.where,
        **{f"{name}_descale": factor for name, factor in factors.items()},
    )
    for name, cache in caches.items():
        torch.testing.assert_close(cache.float(), expected[name], rtol=0, atol=0)
    for i, length in enumerate(LENGTHS.tolist()):
        keys, values = (store.of(expected[x] * factors[x], i)[None, : length + new] for x in ("k", "v"))
        every = torch.ones(1, length + new, dtype=torch.bool)
        close(o[i], flash64(q[i : i + 1], keys, values, every)[0][0], dtype)


def test_what_is_refused_and_leaves_the_cache_alone():
    q, cache, new = normal(2, 1, HEADS, HDIM), normal(2, 9, 2, HDIM), normal(2, 1, 2, HDIM)
    fp8 = {"k_cache": cache.to(torch.float8_e4m3fn), "v_cache": cache.to(torch.float8_e4m3fn)}
    before, lengths = cache.clone(), torch.tensor([3, 9], dtype=torch.int32)
    table = torch.zeros(3, 1, dtype=torch.int32)
    calls = [
        (ArgumentError, "give both", {"k": new}),
        (ArgumentError, "k needs cache_seqlens", {"k": new, "v": new}),
        (ArgumentError, "rotary_cos needs k", {"rotary_cos": cache, "rotary_sin": cache}),
        (ArgumentError, "rotary_sin belong together", {"rotary_cos": cache}),
        (ArgumentError, "cannot be combined with block_table", {"cache_batch_idx": lengths, "block_table": table}),
        (SelectionError, "cache_leftpad", {"cache_leftpad": lengths}),
        (TensorError, r"places for \(3,\) sequences, q has 2", {"block_table": table}),
        (TensorError, r"seqlens_k\[1\]", {"k": new, "v": new, "cache_seqlens": lengths}),
        (TensorError, "rotary_cos is", {"k": new, "v": new, "cache_seqlens": 3, **dict.fromkeys(ROTARY, normal(8, 4))}),
        (UsageError, "has no gradient", {"softmax_scale": 1.0, "q": q.clone().requires_grad_()}),
        (ArgumentError, "v_descale are factors of a cache of float8_e4m3fn", {"k_descale": torch.ones(1)}),
        (TensorError, "k is float8_e4m3fn .*: expected float32", fp8),
        (
            TensorError,
            r"k_descale is float32 \(2,\): expected float32 \(1,\)",
            {**fp8, "q": q.half(), "k_descale": torch.ones(2)},
        ),
    ]
    for error, message, options in calls:
        with pytest.raises(error, match=message):
            flash_attn_with_kvcache(**{"q": q, "k_cache": cache, "v_cache": cache, **options})
    strided = normal(2, 9, 2, 2 * HDIM)[..., ::2]
    with pytest.raises(TensorError, match="k_cache has strides"):
        flash_attn_with_kvcache(q, strided, cache.clone(), new, new, cache_seqlens=3)
    with pytest.raises(TensorError, match="the cache has 2"):
        flash_attn_with_kvcache(normal(3, 1, HEADS, HDIM), cache, cache)
    assert torch.equal(cache, before)


ROTARY = ("rotary_cos", "rotary_sin")
