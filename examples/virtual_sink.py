"""A virtual sink as in gpt-oss: a logit per head that takes its share of the softmax and has no value.

The weights of the real keys then add up to less than 1. With V = 1 their sum is what the kernel returns.
"""

import numpy as np

from catalog import Catalog, Problem

HEADS, SEQLEN, HDIM = 4, 128, 64

problem = Problem(batch=1, nhead_q=HEADS, seqlen_q=SEQLEN, hdim_q=HDIM, dtype="fp32")
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, HEADS, SEQLEN, HDIM), dtype=np.float32) for _ in range(3))
sink = np.array([-np.inf, 0, 4, 8], np.float32)  # -inf: this head has no sink

plan = Catalog.select(problem)
o = plan.run(q=q, k=k, v=v, sink=sink).outputs["o"]
sums = plan.run(q=q, k=k, v=np.ones_like(v), sink=sink).outputs["o"][0, :, :, 0]

weights = np.exp(q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(HDIM))
weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sink.astype(np.float64))[:, np.newaxis, np.newaxis]
expected = weights @ v

print("head   sink   sum of the weights    error")
for head in range(HEADS):
    low, high = sums[head].min(), sums[head].max()
    print(f"{head:<4} {sink[head]:>6} {low:>9.4f} to {high:.4f} {np.abs(o[0, head] - expected[0, head]).max():>8.1e}")

np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-5)
np.testing.assert_allclose(sums, weights[0].sum(axis=-1), rtol=1e-5)
assert np.all(sums[1:] < 1), "a sink takes a share of every row"
