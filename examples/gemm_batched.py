"""Batches of matrix products: one launch for the scores of all heads, and a matrix that all products share."""

import numpy as np

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem

HEADS, TOKENS, DIM = 8, 64, 128

rng = np.random.default_rng(0)
q, k = rng.standard_normal((2, HEADS, TOKENS, DIM), dtype=np.float32)

scores = GemmProblem(batch=HEADS, m=TOKENS, n=TOKENS, k=DIM, dtype="fp32", layout="rcr", alpha=DIM**-0.5)
plan = Catalog.select(scores)
result = plan.run(a=q, b=k)
expected = q.astype(np.float64) @ k.swapaxes(1, 2) / DIM**0.5
error = np.abs(result.outputs["c"] - expected).max()
print(f"{HEADS} heads            {result.time_ms:.3f} ms  off by {error:.1e}")
assert error < 1e-3

shared = np.broadcast_to(k[:1], k.shape)  # a stride of 0: no copies
c = plan.run(a=q, b=shared).outputs["c"]
error = np.abs(c - q.astype(np.float64) @ k[0].T / DIM**0.5).max()
print(f"one K for all heads  off by {error:.1e}")
assert error < 1e-3
