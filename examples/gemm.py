"""Matrix products: layouts, a bias with an activation, a batch, and int8, on the CPU.

A column-major matrix is given as its transpose: weights stored as (out, in) are the B of layout rcr.
"""

import numpy as np

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem

M, N, K = 64, 300, 256

rng = np.random.default_rng(0)
x = rng.standard_normal((M, K), dtype=np.float32)
weights = rng.standard_normal((N, K), dtype=np.float32)
bias = rng.standard_normal(N, dtype=np.float32)

product = x.astype(np.float64) @ weights.T

for layout, a, b in (("rcr", x, weights), ("rrr", x, weights.T), ("crr", x.T, weights.T), ("ccr", x.T, weights)):
    problem = GemmProblem(m=M, n=N, k=K, dtype="fp32", layout=layout)
    result = Catalog.select(problem).run(a=np.ascontiguousarray(a), b=np.ascontiguousarray(b))
    error = np.abs(result.outputs["c"] - product).max()
    print(f"{layout}  {result.time_ms:.3f} ms  off by {error:.1e}  {result.kernels[0]}")
    assert error < 1e-3

layer = GemmProblem(m=M, n=N, k=K, dtype="fp32", layout="rcr", bias=True, activation="silu")
c = Catalog.select(layer).run(a=x, b=weights, bias=bias).outputs["c"]
before = product + bias
error = np.abs(c - before / (1 + np.exp(-before))).max()
print(f"silu(x W^T + bias)  off by {error:.1e}")
assert error < 1e-3

heads = GemmProblem(m=M, n=M, k=K, dtype="fp32", layout="rcr", batch=4, alpha=1 / 16)
q, k = rng.standard_normal((2, 4, M, K), dtype=np.float32)
c = Catalog.select(heads).run(a=q, b=k).outputs["c"]
error = np.abs(c - q.astype(np.float64) @ k.swapaxes(1, 2) / 16).max()
print(f"a batch of 4, divided by 16  off by {error:.1e}")
assert error < 1e-3

integers = GemmProblem(m=M, n=N, k=K, dtype="int8", layout="rcr")
codes, table = (rng.integers(-128, 128, shape, dtype=np.int8) for shape in ((M, K), (N, K)))
c = Catalog.select(integers).run(a=codes, b=table).outputs["c"]
print(f"int8: sums are {c.dtype}, and exact")
assert np.array_equal(c, codes.astype(np.int32) @ table.T.astype(np.int32))
