"""Sequences of different lengths, packed along the token axis without padding: group mode."""

import numpy as np

from catalog import Catalog, Problem

HEADS, HDIM, LENGTHS = 8, 64, [900, 17, 256, 1, 430]

problem = Problem(seqlens_q=LENGTHS, nhead_q=HEADS, hdim_q=HDIM, dtype="fp32", mask="causal")
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((sum(LENGTHS), HEADS, HDIM), dtype=np.float32) for _ in range(3))
result = Catalog.select(problem).run(q=q, k=k, v=v, repeats=5)
o = result.outputs["o"]

print(f"kernel   {result.kernels[0]}")
print(f"q, k, v  {q.shape}: (tokens, head, head dim)")
print("tokens       length    error")
ends = np.cumsum(LENGTHS)
for start, end in zip(ends - LENGTHS, ends, strict=True):
    # One sequence alone, (head, token, head dim).
    q1, k1, v1 = (x[start:end].swapaxes(0, 1).astype(np.float64) for x in (q, k, v))
    scores = q1 @ k1.swapaxes(-1, -2) / np.sqrt(HDIM)
    weights = np.exp(np.where(np.tri(end - start, dtype=bool), scores, -np.inf))
    expected = (weights / weights.sum(axis=-1, keepdims=True) @ v1).swapaxes(0, 1)

    error = np.abs(o[start:end] - expected).max()
    print(f"{start:>4} to {end:<5} {end - start:>5} {error:>8.1e}")
    np.testing.assert_allclose(o[start:end], expected, rtol=1e-5, atol=1e-5)

as_batch = Problem(batch=len(LENGTHS), nhead_q=HEADS, seqlen_q=max(LENGTHS), hdim_q=HDIM, dtype="fp32", mask="causal")
print(f"time     {result.time_ms:.2f} ms, {problem.flops / as_batch.flops:.0%} of the FLOP of a padded batch")
