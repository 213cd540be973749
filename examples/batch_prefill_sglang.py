"""Prefill over a paged cache with SGLang's page table: one list of pages for all sequences, and where each one starts.

Sequences may list the same pages: here two of them share the pages of a common prefix.
"""

import numpy as np

from catalog import Catalog, Problem

HEADS, HDIM, PAGE_SIZE, PREFIX_PAGES = 4, 64, 16, 6
CHUNKS, LENGTHS = [20, 33], [116, 129]  # the prefix of 96 tokens is in the cache already

problem = Problem(
    op="batch_prefill",
    seqlens_q=CHUNKS,
    seqlen_k=256,
    nhead_q=HEADS,
    hdim_q=HDIM,
    dtype="fp32",
    mask="bottom_right",
    page_size=PAGE_SIZE,
    num_pages=32,
    kv_lookup_table="sglang",
)
rng = np.random.default_rng(0)
q = rng.standard_normal(problem.shapes["q"], dtype=np.float32)
k_cache, v_cache = (rng.standard_normal(problem.shapes[name], dtype=np.float32) for name in ("k_cache", "v_cache"))

prefix, rest = np.split(rng.permutation(32).astype(np.int32), [PREFIX_PAGES])
pages = [np.concatenate([prefix, rest[:2]]), np.concatenate([prefix, rest[2:5]])]
table = {
    "kv_indptr": np.cumsum([0, *map(len, pages)], dtype=np.int32),
    "kv_page_indices": np.concatenate(pages),
    "kv_last_page_lens": np.array([(length - 1) % PAGE_SIZE + 1 for length in LENGTHS], np.int32),
}
result = Catalog.select(problem).run(table, q=q, k_cache=k_cache, v_cache=v_cache, repeats=5)
o = result.outputs["o"]

print(f"kernel             {result.kernels[0]}")
for name, array in table.items():
    print(f"{name:<18} {array.tolist()}")
print(f"time               {result.time_ms:.3f} ms")
print("queries  keys    error")
start = 0
for queries, keys, of_sequence in zip(CHUNKS, LENGTHS, pages, strict=True):
    q1 = q[start : start + queries].swapaxes(0, 1).astype(np.float64)
    k1, v1 = (cache[of_sequence].reshape(-1, HEADS, HDIM)[:keys].swapaxes(0, 1) for cache in (k_cache, v_cache))
    visible = np.tri(queries, keys, keys - queries, dtype=bool)
    weights = np.where(visible, np.exp(q1 @ k1.swapaxes(-1, -2) / np.sqrt(HDIM)), 0)
    expected = (weights / weights.sum(axis=-1, keepdims=True) @ v1).swapaxes(0, 1)
    error = np.abs(o[start : start + queries] - expected).max()
    print(f"{queries:<7} {keys:>5} {error:>8.1e}")
    np.testing.assert_allclose(o[start : start + queries], expected, rtol=1e-5, atol=1e-5)
    start += queries
