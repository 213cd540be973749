"""An elementwise bias on the scores in its three shapes: one for all, one per head, one per batch and head."""

import numpy as np

from catalog import Catalog, Problem

BATCH, HEADS, SEQLEN_Q, SEQLEN_K, HDIM = 2, 4, 128, 192, 64

rng = np.random.default_rng(0)
q = rng.standard_normal((BATCH, HEADS, SEQLEN_Q, HDIM), dtype=np.float32)
k, v = (rng.standard_normal((BATCH, HEADS, SEQLEN_K, HDIM), dtype=np.float32) for _ in range(2))
scores = q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(HDIM)

print("bias_dims  shape of bias        error       time")
for bias_dims in ("11", "1h", "bh"):
    problem = Problem(
        batch=BATCH,
        nhead_q=HEADS,
        seqlen_q=SEQLEN_Q,
        seqlen_k=SEQLEN_K,
        hdim_q=HDIM,
        dtype="fp32",
        bias="bias",
        bias_dims=bias_dims,
    )
    bias = rng.standard_normal(problem.shapes["bias"], dtype=np.float32)
    bias[rng.random(bias.shape) < 0.2] = -np.inf  # a bias may also hide keys
    result = Catalog.select(problem).run(q=q, k=k, v=v, bias=bias, repeats=5)

    weights = np.exp(scores + bias)  # NumPy broadcasts the axes of extent 1, the kernel reads them with stride 0
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v

    error = np.abs(result.outputs["o"] - expected).max()
    print(f"{bias_dims:<10} {bias.shape!s:<18} {error:>8.1e} {result.time_ms:>7.3f} ms")
    np.testing.assert_allclose(result.outputs["o"], expected, rtol=1e-5, atol=1e-5)
print(f"One kernel for all three: {result.kernels[0]}")
