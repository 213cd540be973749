"""Split-KV (flash decoding): parallel splits of the keys, combined by their log-sum-exp.

With few queries there are fewer work items than cores; splits make more. The result is that of fwd for any number.
"""

import numpy as np

from catalog import Catalog, Problem

SHAPE = {"batch": 1, "nhead_q": 4, "nhead_k": 1, "seqlen_q": 1, "seqlen_k": 8192, "hdim_q": 64, "dtype": "fp32"}

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 4, 1, 64), dtype=np.float32)
k, v = (rng.standard_normal((1, 1, 8192, 64), dtype=np.float32) for _ in range(2))

weights = np.exp(q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(64))
expected = weights / weights.sum(axis=-1, keepdims=True) @ v
fwd = Catalog.select(Problem(**SHAPE)).run(q=q, k=k, v=v, repeats=9)

print("op       num_splits    error  off fwd's      time")
print(f"{'fwd':<8} {'':>10} {np.abs(fwd.outputs['o'] - expected).max():>8.1e} {fwd.time_ms:>20.3f} ms")
for num_splits in (0, 1, 2, 3, 8, 32):
    plan = Catalog.select(Problem(op="splitkv", num_splits=num_splits, **SHAPE))
    result = plan.run(q=q, k=k, v=v, repeats=9)
    o = result.outputs["o"]
    error, apart = np.abs(o - expected).max(), np.abs(o - fwd.outputs["o"]).max()
    print(f"splitkv  {num_splits or 'chosen':>10} {error:>8.1e} {apart:>10.1e} {result.time_ms:>9.3f} ms")
    np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(o, fwd.outputs["o"], rtol=1e-5, atol=1e-6)

print("\nstages")
for kernel in plan.kernels:
    print(f"  {kernel.family}: {kernel.name}")
assert [str(kernel.family) for kernel in plan.kernels] == ["fwd_splitkv", "fwd_splitkv_combine"]
