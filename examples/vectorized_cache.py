"""The vectorized cache layout: 16 bytes of a key, and of a value's tokens, side by side, as GPU kernels load them.

The same tokens in the linear and in the vectorized layout give the same result.
"""

import numpy as np

from catalog import Catalog, Problem

HEADS, HDIM, PAGE_SIZE = 4, 64, 16
X = 16 // np.dtype(np.float32).itemsize  # elements in 16 bytes

linear = Problem(
    op="batch_prefill",
    seqlens_q=[50, 7],
    seqlen_k=128,
    nhead_q=HEADS,
    hdim_q=HDIM,
    dtype="fp32",
    mask="bottom_right",
    page_size=PAGE_SIZE,
)
vectorized = linear.model_copy(update={"kv_memory_layout": "vectorized"})

rng = np.random.default_rng(0)
pages = linear.shapes["k_cache"][0]
q = rng.standard_normal(linear.shapes["q"], dtype=np.float32)
k, v = (rng.standard_normal((pages, PAGE_SIZE, HEADS, HDIM), dtype=np.float32) for _ in range(2))
shared = {
    "q": q,
    "block_table": rng.permutation(pages).reshape(2, -1).astype(np.int32),
    "seqlens_k": np.array([128, 99], np.int32),
}

# (page, token, head, head dim) to (page, head, head dim / x, token, x) of K, (page, head, token / x, head dim, x) of V
k_vectorized = k.reshape(pages, PAGE_SIZE, HEADS, HDIM // X, X).transpose(0, 2, 3, 1, 4).copy()
v_vectorized = v.reshape(pages, PAGE_SIZE // X, X, HEADS, HDIM).transpose(0, 3, 1, 4, 2).copy()

o_linear = Catalog.select(linear).run(shared, k_cache=k, v_cache=v).outputs["o"]
result = Catalog.select(vectorized).run(shared, k_cache=k_vectorized, v_cache=v_vectorized)
o = result.outputs["o"]

print(f"kernel    {result.kernels[0]}")
print("layout      K cache              V cache")
print(f"linear      {k.shape!s:<20} {v.shape}")
print(f"vectorized  {k_vectorized.shape!s:<20} {v_vectorized.shape}")
print(f"o           {o.shape}, off that of the linear layout by {np.abs(o - o_linear).max():.1e}")

# Compare the last sequence with NumPy, in case both layouts are wrong in the same way.
k1, v1 = (x[shared["block_table"][1]].reshape(-1, HEADS, HDIM)[:99].swapaxes(0, 1).astype(np.float64) for x in (k, v))
visible = np.tri(7, 99, 99 - 7, dtype=bool)
weights = np.where(visible, np.exp(q[50:].swapaxes(0, 1) @ k1.swapaxes(-1, -2) / np.sqrt(HDIM)), 0)
expected = (weights / weights.sum(axis=-1, keepdims=True) @ v1).swapaxes(0, 1)
print(f"error       {np.abs(o[50:] - expected).max():.1e}, against float64 NumPy")

np.testing.assert_allclose(o, o_linear, rtol=1e-6, atol=1e-6)
np.testing.assert_allclose(o[50:], expected, rtol=1e-5, atol=1e-5)
