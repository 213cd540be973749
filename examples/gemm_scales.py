"""Scaled fp8 products: weights in blocks of 128 x 128 and tokens in parts of 128, as DeepSeek-V3 stores them.

The kernel scales the sum of each 128 products and adds these in float32: no copy in a wider type is made.
"""

import numpy as np
from ml_dtypes import float8_e4m3fn
from numpy.typing import NDArray

from catalog import Catalog
from catalog.ops.gemm.problem import BLOCK, GemmProblem

M, N, K = 4, 512, 1024


def quantize(x: NDArray[np.float32], rows: int) -> tuple[NDArray[float8_e4m3fn], NDArray[np.float32]]:
    """x in fp8, and the scale of each block of `rows` x 128."""
    blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // BLOCK, BLOCK)
    scale = np.abs(blocks).max(axis=(1, 3)) / np.float32(448)  # the largest number of e4m3
    return (blocks / scale[:, None, :, None]).reshape(x.shape).astype(float8_e4m3fn), scale


rng = np.random.default_rng(0)
x, weights = rng.standard_normal((M, K), dtype=np.float32), rng.standard_normal((N, K), dtype=np.float32)
(a, scale_a), (b, scale_b) = quantize(x, rows=1), quantize(weights, rows=BLOCK)
print(f"scales of A are {scale_a.shape}, scales of B {scale_b.shape}")

layer = GemmProblem(m=M, n=N, k=K, dtype="fp8", scales="block", dtype_c="bf16")
ran = Catalog.select(layer).run(a=a, b=b, scale_a=scale_a, scale_b=scale_b)
y, expected = ran.outputs["c"], x @ weights.T
error = np.linalg.norm(y.astype(np.float32) - expected) / np.linalg.norm(expected)
print(f"{ran.kernels[0]} gives {y.dtype}, off by {error:.1%}")
assert error < 0.05
