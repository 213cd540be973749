"""Chunked prefill over a paged cache with vLLM's page table: a block table and a length per sequence.

The queries of all sequences are packed. Those of a sequence are its last tokens, so the mask starts bottom-right.
"""

import numpy as np

from catalog import Catalog, Problem

NHEAD_Q, NHEAD_K, HDIM, PAGE_SIZE = 8, 2, 64, 16
CHUNKS, CACHED = [64, 1, 30], [64, 300, 200]  # a fresh prompt, one that decodes, a later chunk of a long prompt

problem = Problem(
    op="batch_prefill",
    seqlens_q=CHUNKS,
    seqlen_k=320,  # the longest sequence that the block table has room for
    nhead_q=NHEAD_Q,
    nhead_k=NHEAD_K,
    hdim_q=HDIM,
    dtype="fp32",
    mask="bottom_right",
    page_size=PAGE_SIZE,
    num_pages=64,
    kv_lookup_table="vllm",
)
rng = np.random.default_rng(0)
q = rng.standard_normal(problem.shapes["q"], dtype=np.float32)
k_cache, v_cache = (rng.standard_normal(problem.shapes[name], dtype=np.float32) for name in ("k_cache", "v_cache"))
block_table = rng.permutation(64)[: 3 * 20].reshape(3, 20).astype(np.int32)
result = Catalog.select(problem).run(
    q=q,
    k_cache=k_cache,
    v_cache=v_cache,
    block_table=block_table,
    seqlens_k=np.array(CACHED, np.int32),
    repeats=5,
)
o = result.outputs["o"]

print(f"kernel       {result.kernels[0]}")
print(f"q            {q.shape}: (tokens, head, head dim)")
print(f"k_cache      {k_cache.shape}: (page, token, head, head dim)")
print(f"block_table  {block_table.shape}, time {result.time_ms:.3f} ms")
print("queries  keys    error")
start = 0
for sequence, (queries, keys) in enumerate(zip(CHUNKS, CACHED, strict=True)):
    q1 = q[start : start + queries].swapaxes(0, 1).astype(np.float64)
    k1, v1 = (cache[block_table[sequence]].reshape(-1, NHEAD_K, HDIM)[:keys] for cache in (k_cache, v_cache))
    k1, v1 = (np.repeat(x, NHEAD_Q // NHEAD_K, axis=1).swapaxes(0, 1) for x in (k1, v1))
    visible = np.tri(queries, keys, keys - queries, dtype=bool)
    weights = np.where(visible, np.exp(q1 @ k1.swapaxes(-1, -2) / np.sqrt(HDIM)), 0)
    expected = (weights / weights.sum(axis=-1, keepdims=True) @ v1).swapaxes(0, 1)
    error = np.abs(o[start : start + queries] - expected).max()
    print(f"{queries:<7} {keys:>5} {error:>8.1e}")
    np.testing.assert_allclose(o[start : start + queries], expected, rtol=1e-5, atol=1e-5)
    start += queries
