"""int8 products: exact sums in int32, and a linear layer of quantized weights and tokens.

A row of tokens and a row of weights have a scale each; C times both is the product of the numbers that they stand for.
"""

import numpy as np
from numpy.typing import NDArray

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem

M, N, K = 16, 300, 256


def quantize(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Each row as int8 and its scale."""
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    return np.rint(x / scale).astype(np.int8), scale


rng = np.random.default_rng(0)
x, weights = rng.standard_normal((M, K), dtype=np.float32), rng.standard_normal((N, K), dtype=np.float32)
(tokens, of_tokens), (table, of_table) = quantize(x), quantize(weights)

c = Catalog.select(GemmProblem(m=M, n=N, k=K, dtype="int8", layout="rcr")).run(a=tokens, b=table).outputs["c"]
print(f"sums are {c.dtype}, and exact")
assert np.array_equal(c, tokens.astype(np.int32) @ table.T.astype(np.int32))

y, expected = c * of_tokens * of_table.T, x @ weights.T
error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
print(f"the layer is off by {error:.1%}")
assert error < 0.02
