"""Token by token generation: one plan for all steps, over a dense K/V cache that fills up.

The problem states the capacity of the cache, and each step the number of real tokens of each sequence.
"""

import numpy as np

from catalog import Catalog, Problem

BATCH, NHEAD_Q, NHEAD_K, ROOM, HDIM, STEPS = 3, 8, 2, 2048, 64, 20

problem = Problem(
    op="splitkv",
    batch=BATCH,
    nhead_q=NHEAD_Q,
    nhead_k=NHEAD_K,
    seqlen_q=1,
    seqlen_k=ROOM,
    hdim_q=HDIM,
    dtype="fp32",
)
plan = Catalog.select(problem)
rng = np.random.default_rng(0)
k_cache, v_cache = (np.full((BATCH, NHEAD_K, ROOM, HDIM), np.nan, np.float32) for _ in range(2))
lengths = np.array([1500, 3, 700], np.int32)  # lengths of the prompts
for sequence, length in enumerate(lengths):
    for cache in (k_cache, v_cache):
        cache[sequence, :, :length] = rng.standard_normal((NHEAD_K, length, HDIM), dtype=np.float32)

times, errors = [], []
for _ in range(STEPS):
    q = rng.standard_normal((BATCH, NHEAD_Q, 1, HDIM), dtype=np.float32)
    for cache in (k_cache, v_cache):  # op="appendkv" does this with rotary embedding, see append_kv_rope.py
        cache[np.arange(BATCH), :, lengths] = rng.standard_normal((BATCH, NHEAD_K, HDIM), dtype=np.float32)
    lengths += 1
    result = plan.run(q=q, k=k_cache, v=v_cache, seqlens_k=lengths)
    times.append(result.time_ms)

    for sequence, length in enumerate(lengths):
        k, v = (cache[sequence, :, :length].astype(np.float64) for cache in (k_cache, v_cache))
        grouped = q[sequence].reshape(NHEAD_K, NHEAD_Q // NHEAD_K, HDIM)
        weights = np.exp(grouped @ k.swapaxes(-1, -2) / np.sqrt(HDIM))
        expected = (weights / weights.sum(axis=-1, keepdims=True) @ v).reshape(NHEAD_Q, 1, HDIM)
        errors.append(np.abs(result.outputs["o"][sequence] - expected).max())

print(f"cache     {k_cache.shape} each of K and V; {lengths.tolist()} tokens after {STEPS} steps")
for kernel in result.kernels:
    print(f"kernel    {kernel}")
print(f"error     {max(errors):.1e}, the largest of all steps")
print(f"time      {np.median(times):.3f} ms a step, the median")
assert max(errors) < 1e-5, "every step attends to the real tokens only"
