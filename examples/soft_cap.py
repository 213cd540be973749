"""Soft cap of the scores, c * tanh(score / c), as in Gemma 2: no score exceeds c, however large Q and K are."""

import numpy as np

from catalog import Catalog, Problem

HEADS, SEQLEN, HDIM = 4, 128, 64

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, HEADS, SEQLEN, HDIM), dtype=np.float32) for _ in range(3))
q *= 20  # peaked attention: without a cap, one key takes almost all
scores = q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(HDIM)

print("cap     largest score   largest weight, mean   error")
for cap in (None, 50.0, 30.0, 5.0):
    problem = Problem(batch=1, nhead_q=HEADS, seqlen_q=SEQLEN, hdim_q=HDIM, dtype="fp32", logits_soft_cap=cap)
    o = Catalog.select(problem).run(q=q, k=k, v=v).outputs["o"]

    capped = scores if cap is None else cap * np.tanh(scores / cap)
    weights = np.exp(capped - capped.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = weights @ v

    error = np.abs(o - expected).max()
    print(f"{cap or 'none':<7} {capped.max():>13.2f} {weights.max(axis=-1).mean():>22.3f} {error:>7.1e}")
    np.testing.assert_allclose(o, expected, rtol=1e-4, atol=1e-4)  # scores of 100 have float32 errors of 1e-5
