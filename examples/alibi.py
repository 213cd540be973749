"""ALiBi: a penalty that grows with the distance between query and key, with a separate slope for each head."""

import numpy as np

from catalog import Catalog, Problem

HEADS, SEQLEN, HDIM = 8, 256, 64

problem = Problem(batch=1, nhead_q=HEADS, seqlen_q=SEQLEN, hdim_q=HDIM, dtype="fp32", mask="causal", bias="alibi")
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, HEADS, SEQLEN, HDIM), dtype=np.float32) for _ in range(3))
slopes = (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)[np.newaxis]  # 1/2, 1/4, ... as in the paper
result = Catalog.select(problem).run(q=q, k=k, v=v, alibi_slopes=slopes, repeats=5)
o = result.outputs["o"][0]

distance = np.arange(SEQLEN)[:, np.newaxis] - np.arange(SEQLEN)[np.newaxis, :]  # query minus key
scores = q[0].astype(np.float64) @ k[0].swapaxes(-1, -2) / np.sqrt(HDIM)
scores -= slopes[0, :, np.newaxis, np.newaxis] * distance
weights = np.exp(np.where(distance >= 0, scores, -np.inf))
weights /= weights.sum(axis=-1, keepdims=True)
expected = weights @ v[0]

print(f"kernel  {result.kernels[0]}")
print(f"slopes  {slopes.shape} {slopes.dtype}")
print("head    slope  mean distance   error")
for head in range(HEADS):
    mean_distance = (weights[head, -1] * distance[-1]).sum()
    error = np.abs(o[head] - expected[head]).max()
    print(f"{head:<5} {slopes[0, head]:>7.4f} {mean_distance:>14.1f} {error:>7.1e}")

np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-5)
