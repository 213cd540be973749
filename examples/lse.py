"""The log-sum-exp of every row, and a use of it: merging attention over parts of the keys into attention over all."""

import numpy as np

from catalog import Catalog, Problem

HEADS, SEQLEN_Q, SEQLEN_K, HDIM = 4, 64, 512, 64


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return O and LSE."""
    problem = Problem(
        batch=1, nhead_q=HEADS, seqlen_q=SEQLEN_Q, seqlen_k=k.shape[2], hdim_q=HDIM, dtype="fp32", lse=True
    )
    outputs = Catalog.select(problem).run(q=q, k=k, v=v).outputs
    return outputs["o"], outputs["lse"]


rng = np.random.default_rng(0)
q = rng.standard_normal((1, HEADS, SEQLEN_Q, HDIM), dtype=np.float32)
k, v = (rng.standard_normal((1, HEADS, SEQLEN_K, HDIM), dtype=np.float32) for _ in range(2))
o, lse = attend(q, k, v)

# Slices along the keys are views: the kernel takes their strides.
parts = [attend(q, k[:, :, keys], v[:, :, keys]) for keys in (slice(0, 100), slice(100, 300), slice(300, 512))]
merged_lse = np.logaddexp.reduce([lse_of_part for _, lse_of_part in parts])
merged = sum(np.exp(lse_of_part - merged_lse)[..., np.newaxis] * o_of_part for o_of_part, lse_of_part in parts)

scores = q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(HDIM)
expected_lse = np.log(np.exp(scores).sum(axis=-1))

print(f"o       {o.shape} {o.dtype}")
print(f"lse     {lse.shape} {lse.dtype}, error {np.abs(lse - expected_lse).max():.1e}")
print(f"merged  {len(parts)} parts, apart from attention over all keys:")
print(f"        o {np.abs(merged - o).max():.1e}, lse {np.abs(merged_lse - lse).max():.1e}")

np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
np.testing.assert_allclose(merged_lse, lse, rtol=1e-6, atol=1e-6)
np.testing.assert_allclose(merged, o, rtol=1e-5, atol=1e-6)
