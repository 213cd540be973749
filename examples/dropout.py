"""Dropout of attention weights: the same seed drops the same weights, and the kernel can return the random bytes."""

import numpy as np

from catalog import Catalog, Problem

HEADS, SEQLEN, HDIM, DROPOUT = 4, 256, 64, 0.2

problem = Problem(batch=1, nhead_q=HEADS, seqlen_q=SEQLEN, hdim_q=HDIM, dtype="fp32", dropout=DROPOUT, randval=True)
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, HEADS, SEQLEN, HDIM), dtype=np.float32) for _ in range(3))
plan = Catalog.select(problem)


def run(seed: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Return O and the random bytes; the state of the generator is a seed and an offset."""
    outputs = plan.run(q=q, k=k, v=v, rng_state=np.array([seed, offset], np.uint64)).outputs
    return outputs["o"], outputs["randval"]


o, randval = run(seed=7, offset=0)
o_again, randval_again = run(seed=7, offset=0)
_, randval_other_seed = run(seed=8, offset=0)
_, randval_other_offset = run(seed=7, offset=1)

# A weight is kept if its byte is at most floor((1 - p) * 255), and then divided by 1 - p.
threshold = int((1 - DROPOUT) * 255)
kept = randval <= threshold
weights = np.exp(q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(HDIM))
weights *= kept / (1 - DROPOUT) / weights.sum(axis=-1, keepdims=True)
expected = weights @ v

print(f"randval        {randval.shape} {randval.dtype}, kept where <= {threshold}")
print(f"kept           {kept.mean():.4f}, expected {(threshold + 1) / 256:.4f}")
print(f"same seed      {'same' if np.array_equal(randval, randval_again) else 'OTHER'} weights dropped")
print(f"another seed   {np.mean(randval != randval_other_seed):.1%} of the bytes differ")
print(f"another offset {np.mean(randval != randval_other_offset):.1%} of the bytes differ")
print(f"error          {np.abs(o - expected).max():.1e}, against NumPy with the same weights dropped")

np.testing.assert_array_equal(randval, randval_again)
np.testing.assert_array_equal(o, o_again)
np.testing.assert_allclose(kept.mean(), (threshold + 1) / 256, atol=0.005)
np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-5)
assert np.mean(randval != randval_other_seed) > 0.9, "another seed must drop other weights"
assert np.mean(randval != randval_other_offset) > 0.9, "another offset must drop other weights"
