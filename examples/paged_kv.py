"""A paged K/V cache: pages anywhere in one pool, found through a block table; decoding for three sequences."""

import numpy as np

from catalog import Catalog, Problem

HEADS, HDIM, PAGE_SIZE, LENGTHS = 4, 64, 16, [100, 37, 250]

problem = Problem(
    op="pagedkv",
    batch=len(LENGTHS),
    nhead_q=HEADS,
    seqlen_q=1,
    seqlen_k=256,  # the longest sequence that the block table has room for
    hdim_q=HDIM,
    dtype="fp32",
    page_size=PAGE_SIZE,
    num_pages=40,
)
rng = np.random.default_rng(0)
q = rng.standard_normal(problem.shapes["q"], dtype=np.float32)
k_cache, v_cache = (np.full(problem.shapes[name], np.nan, np.float32) for name in ("k_cache", "v_cache"))
block_table = np.full(problem.shapes["block_table"], -1, np.int32)  # entries after a sequence's end are not read

# Assign free pages at random, as in a server that has run for a while, and fill them.
free = rng.permutation(40).astype(np.int32)
dense = []
for sequence, length in enumerate(LENGTHS):
    k, v = (rng.standard_normal((length, HEADS, HDIM), dtype=np.float32) for _ in range(2))
    pages, free = np.split(free, [-(-length // PAGE_SIZE)])
    block_table[sequence, : len(pages)] = pages
    token = np.arange(length)
    k_cache[pages[token // PAGE_SIZE], token % PAGE_SIZE] = k
    v_cache[pages[token // PAGE_SIZE], token % PAGE_SIZE] = v
    dense.append((k, v))

lengths = np.array(LENGTHS, np.int32)
inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seqlens_k": lengths}
result = Catalog.select(problem).run(inputs, repeats=5)

print(f"kernel       {result.kernels[0]}")
print(f"k_cache      {k_cache.shape}: (page, token, head, head dim)")
print(f"block_table  {block_table.shape}, time {result.time_ms:.3f} ms")
print("tokens  pages                          error")
for sequence, (k, v) in enumerate(dense):
    k1, v1 = (x.swapaxes(0, 1).astype(np.float64) for x in (k, v))
    weights = np.exp(q[sequence] @ k1.swapaxes(-1, -2) / np.sqrt(HDIM))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v1
    error = np.abs(result.outputs["o"][sequence] - expected).max()
    first = " ".join(map(str, block_table[sequence, :5]))
    print(f"{LENGTHS[sequence]:<7} {first + ' ...':<28} {error:>8.1e}")
    np.testing.assert_allclose(result.outputs["o"][sequence], expected, rtol=1e-5, atol=1e-5)
