"""Block masks: a bitmap names the blocks of queries and keys that see each other, and only those cost time."""

import numpy as np

from catalog import Catalog, Problem

SEQLEN, HEADS, HDIM, BLOCK = 2048, 2, 64, 128

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, HEADS, SEQLEN, HDIM), dtype=np.float32) for _ in range(3))
scores = q[0].astype(np.float64) @ k[0].swapaxes(-1, -2) / np.sqrt(HDIM)
problem = Problem(
    batch=1, nhead_q=HEADS, seqlen_q=SEQLEN, hdim_q=HDIM, dtype="fp32", block_mask_q=BLOCK, block_mask_kv=BLOCK
)
plan = Catalog.select(problem)

row, column = np.indices((SEQLEN // BLOCK, SEQLEN // BLOCK))
documents = row // 4 == column // 4  # four documents, which do not see each other
dilated = (row - column) % 4 == 0
print("blocks that see each other      seen    error       time")
for name, seen in (("all", row >= 0), ("those of one document", documents), ("every fourth", dilated)):
    bitmap = np.broadcast_to(seen.astype(np.uint8), problem.shapes["block_mask"])  # one for all heads
    result = plan.run(q=q, k=k, v=v, block_mask=bitmap, repeats=5)
    o = result.outputs["o"][0]

    visible = np.kron(seen, np.ones((BLOCK, BLOCK), bool))
    weights = np.exp(np.where(visible, scores, -np.inf))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v[0]

    print(f"{name:<26} {seen.mean():>9.0%} {np.abs(o - expected).max():>8.1e} {result.time_ms:>7.2f} ms")
    np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-5)
