"""Layouts of matrix products: A and B row-major or column-major, the same product each time.

The letters of a layout stand for A, B and C: r is row-major, c column-major, given as the transpose. A matrix may be a
part of a larger one.
"""

import numpy as np

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem

M, N, K = 64, 300, 256

rng = np.random.default_rng(0)
a, b = rng.standard_normal((M, K), dtype=np.float32), rng.standard_normal((K, N), dtype=np.float32)
product = a.astype(np.float64) @ b

for layout in ("rcr", "rrr", "crr", "ccr"):
    of_a = a if layout[0] == "r" else np.ascontiguousarray(a.T)
    of_b = b if layout[1] == "r" else np.ascontiguousarray(b.T)
    result = Catalog.select(GemmProblem(m=M, n=N, k=K, dtype="fp32", layout=layout)).run(a=of_a, b=of_b)
    error = np.abs(result.outputs["c"] - product).max()
    print(f"{layout}  {result.time_ms:.3f} ms  off by {error:.1e}  {result.kernels[0]}")
    assert error < 1e-3

half = GemmProblem(m=M, n=N // 2, k=K, dtype="fp32", layout="rrr")
c = Catalog.select(half).run(a=a, b=b[:, : N // 2]).outputs["c"]
error = np.abs(c - product[:, : N // 2]).max()
print(f"the first half of the columns of B, without a copy  off by {error:.1e}")
assert error < 1e-3
