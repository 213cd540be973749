"""Q, K and V as one projection produces them, (batch, token, 3, head, head dim): passed as views, without copies."""

import numpy as np

from catalog import Catalog, Problem

BATCH, SEQLEN, HEADS, HDIM = 2, 256, 8, 64

rng = np.random.default_rng(0)
qkv = rng.standard_normal((BATCH, SEQLEN, 3, HEADS, HDIM), dtype=np.float32)
q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]

problem = Problem(batch=BATCH, nhead_q=HEADS, seqlen_q=SEQLEN, hdim_q=HDIM, dtype="fp32", layout="bshd")
plan = Catalog.select(problem)
result = plan.run(q=q, k=k, v=v, repeats=5)
o = result.outputs["o"]
o_of_copies = plan.run(q=q.copy(), k=k.copy(), v=v.copy()).outputs["o"]

q64, k64, v64 = (x.swapaxes(1, 2).astype(np.float64) for x in (q, k, v))
weights = np.exp(q64 @ k64.swapaxes(-1, -2) / np.sqrt(HDIM))
expected = (weights / weights.sum(axis=-1, keepdims=True) @ v64).swapaxes(1, 2)

print(f"qkv         {qkv.shape}")
print(f"q, k, v     {q.shape}, strides in elements {tuple(stride // q.itemsize for stride in q.strides)}")
print(f"o           {o.shape}, strides in elements {tuple(stride // o.itemsize for stride in o.strides)}")
print(f"error       {np.abs(o - expected).max():.1e}")
print(f"of copies   {'the same bits' if np.array_equal(o, o_of_copies) else 'OTHER bits'}")
print(f"time        {result.time_ms:.3f} ms")

assert all(np.shares_memory(x, qkv) for x in (q, k, v)), "these are views"
np.testing.assert_array_equal(o, o_of_copies)
np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-5)
