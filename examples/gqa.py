"""Grouped-query and multi-query attention: fewer heads of K and V than of Q, each shared by a group of query heads.

Nothing is repeated in memory: query head h reads key head h // (nhead_q / nhead_k).
"""

import numpy as np

from catalog import Catalog, Problem

BATCH, NHEAD_Q, SEQLEN, HDIM = 2, 8, 256, 64

rng = np.random.default_rng(0)
q = rng.standard_normal((BATCH, NHEAD_Q, SEQLEN, HDIM), dtype=np.float32)

print("attention      nhead_q  nhead_k  K and V   error    time")
for name, nhead_k in (("multi-head", 8), ("grouped-query", 2), ("multi-query", 1)):
    k, v = (rng.standard_normal((BATCH, nhead_k, SEQLEN, HDIM), dtype=np.float32) for _ in range(2))
    problem = Problem(batch=BATCH, nhead_q=NHEAD_Q, nhead_k=nhead_k, seqlen_q=SEQLEN, hdim_q=HDIM, dtype="fp32")
    result = Catalog.select(problem).run(q=q, k=k, v=v, repeats=5)

    # By definition, every group of query heads has a copy of its key head.
    k_of_q, v_of_q = (np.repeat(x.astype(np.float64), NHEAD_Q // nhead_k, axis=1) for x in (k, v))
    weights = np.exp(q @ k_of_q.swapaxes(-1, -2) / np.sqrt(HDIM))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v_of_q

    error = np.abs(result.outputs["o"] - expected).max()
    print(
        f"{name:<14} {NHEAD_Q:>7} {nhead_k:>8} {(k.nbytes + v.nbytes) // 1024:>5} KiB"
        f" {error:>8.1e} {result.time_ms:>7.3f} ms"
    )
    np.testing.assert_allclose(result.outputs["o"], expected, rtol=1e-5, atol=1e-5)
