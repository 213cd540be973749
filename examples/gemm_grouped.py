"""Grouped products: each expert multiplies its own tokens by its own weights, all in one launch.

The gradient of the weights is a product of groups as well: there they divide the depth.
"""

import numpy as np

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem

IN, OUT = 64, 96
TOKENS = (5, 0, 120, 33, 1)  # of each expert

rng = np.random.default_rng(0)
x = rng.standard_normal((sum(TOKENS), IN), dtype=np.float32)  # sorted by expert
weights = rng.standard_normal((len(TOKENS), OUT, IN), dtype=np.float32)
starts = np.cumsum((0, *TOKENS))

forward = GemmProblem(groups=TOKENS, n=OUT, k=IN, dtype="fp32", layout="rcr", activation="silu")
result = Catalog.select(forward).run(a=x, b=weights)
y = result.outputs["c"]
before = np.concatenate([x[starts[i] : starts[i + 1]] @ weights[i].T for i in range(len(TOKENS))])
error = np.abs(y - before / (1 + np.exp(-before))).max()
print(f"silu(x W^T) of {len(TOKENS)} experts  {y.shape}  off by {error:.1e}  {result.kernels[0]}")
assert error < 1e-3

gradient = GemmProblem(groups=TOKENS, group_axis="k", m=OUT, n=IN, dtype="fp32", layout="crr")
dw = Catalog.select(gradient).run(a=y, b=x).outputs["c"]  # y stands for the gradient of the result
expected = np.stack([y[starts[i] : starts[i + 1]].T @ x[starts[i] : starts[i + 1]] for i in range(len(TOKENS))])
error = np.abs(dw - expected).max()
print(f"gradient of the weights  {dw.shape}  off by {error:.1e}")
assert error < 1e-2
assert not dw[1].any(), "an expert without tokens has no gradient"
