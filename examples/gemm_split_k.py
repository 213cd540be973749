"""Split-K: a deep product with few elements of C in parts, whose sums are added in order.

The number of threads does not change the result. The number of parts does, by rounding.
"""

import numpy as np

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem

M, N, K = 16, 64, 16384

rng = np.random.default_rng(0)
a, b = rng.standard_normal((M, K), dtype=np.float32), rng.standard_normal((N, K), dtype=np.float32)
exact = a.astype(np.float64) @ b.T

for k_batch in (1, 4, 0):
    plan = Catalog.select(GemmProblem(m=M, n=N, k=K, dtype="fp32", layout="rcr", k_batch=k_batch))
    first, again = (plan.run(a=a, b=b) for _ in range(2))
    error = np.abs(first.outputs["c"] - exact).max()
    parts = f"{k_batch} parts" if k_batch else "as many as suit"
    print(f"{parts:<16} {again.time_ms:.3f} ms  off by {error:.1e}")
    assert error < 1e-2
    assert np.array_equal(first.outputs["c"], again.outputs["c"])
