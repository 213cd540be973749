"""A matrix product: state a problem, select its kernel, run it, and compare with NumPy.

Weights stored as (out, in) are the column-major B of layout rcr: a column-major matrix is given as its transpose.
"""

import numpy as np

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem

rng = np.random.default_rng(0)
x = rng.standard_normal((64, 256), dtype=np.float32)
weights = rng.standard_normal((300, 256), dtype=np.float32)

problem = GemmProblem(m=64, n=300, k=256, dtype="fp32", layout="rcr")
result = Catalog.select(problem).run(a=x, b=weights)
c = result.outputs["c"]

error = np.abs(c - x.astype(np.float64) @ weights.T).max()
print(f"{result.kernels[0]}  {result.time_ms:.3f} ms  off by {error:.1e}")
assert error < 1e-3
