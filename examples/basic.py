"""State a problem, select its kernel, run it, and compare with attention written in NumPy."""

import numpy as np

from catalog import Catalog, Problem

problem = Problem(batch=2, nhead_q=8, seqlen_q=512, hdim_q=64, dtype="fp32")

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 8, 512, 64), dtype=np.float32) for _ in range(3))  # (batch, head, token, head dim)

plan = Catalog.select(problem)  # populates the catalog when it is first used
result = plan.run(q=q, k=k, v=v)  # compiles the kernel when it is first run
again = plan.run(q=q, k=k, v=v, repeats=9)
o = result.outputs["o"]

scores = q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(64)
weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
expected = weights / weights.sum(axis=-1, keepdims=True) @ v

print(f"arch     {plan.arch}")
print(f"kernel   {result.kernels[0]}")
print(f"compile  {result.compile_seconds:.2f} s (0 when the cache has it)")
print(f"q, k, v  {q.shape} {q.dtype}")
print(f"o        {o.shape} {o.dtype}")
print(f"error    {np.abs(o - expected).max():.1e}, against float64 NumPy")
print(f"time     {again.time_ms:.3f} ms, {again.tflops * 1e3:.0f} GFLOP/s")

np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-5)
