"""Sliding windows: each query sees N keys to the left and right of the diagonal, and only those cost time."""

import numpy as np

from catalog import Catalog, Problem

SEQLEN, HEADS, HDIM = 2048, 4, 64

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, HEADS, SEQLEN, HDIM), dtype=np.float32) for _ in range(3))
distance = np.arange(SEQLEN)[np.newaxis, :] - np.arange(SEQLEN)[:, np.newaxis]  # key minus query
scores = q[0].astype(np.float64) @ k[0].swapaxes(-1, -2) / np.sqrt(HDIM)

print("window (left, right)   pairs seen    error       time   GFLOP/s")
for left, right in ((-1, 0), (511, 0), (127, 0), (64, 64)):  # -1: all
    problem = Problem(
        batch=1, nhead_q=HEADS, seqlen_q=SEQLEN, hdim_q=HDIM, dtype="fp32", mask="window", window=(left, right)
    )
    result = Catalog.select(problem).run(q=q, k=k, v=v, repeats=5)
    o = result.outputs["o"][0]

    visible = distance <= right
    if left >= 0:
        visible &= distance >= -left
    weights = np.exp(np.where(visible, scores, -np.inf))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v[0]

    seen = f"{visible.mean():.1%}"
    error = np.abs(o - expected).max()
    print(f"{(left, right)!s:<20} {seen:>12} {error:>8.1e} {result.time_ms:>7.2f} ms {result.tflops * 1e3:>9.0f}")
    np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-5)
