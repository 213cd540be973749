"""Epilogues of matrix products: bias, activation, gate, residual and C in place, computed before C is stored."""

from typing import Any

import numpy as np

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem

M, N, K = 64, 300, 256

rng = np.random.default_rng(0)
x, weights = rng.standard_normal((M, K), dtype=np.float32), rng.standard_normal((N, K), dtype=np.float32)
bias, other = rng.standard_normal(N, dtype=np.float32), rng.standard_normal((M, N), dtype=np.float32)
product = x.astype(np.float64) @ weights.T
gate = product / (1 + np.exp(-product)) * other  # silu(x) is x / (1 + exp(-x))

add, multiply = {"num_d": 1, "elementwise": "MultiDAdd"}, {"num_d": 1, "elementwise": "MultiDMultiply"}
layers: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "relu(x W^T + bias)": ({"bias": True, "activation": "relu"}, {"bias": bias}, np.maximum(product + bias, 0)),
    "silu(x W^T) * gate": ({"activation": "silu", **multiply}, {"d0": other}, gate),
    "x W^T + bias + residual": ({"bias": True, **add}, {"bias": bias, "d0": other}, product + bias + other),
    "x W^T / 2 + 3 C": ({"alpha": 0.5, "beta": 3.0}, {"c": other.copy()}, product / 2 + 3.0 * other),
}
for name, (fields, tensors, expected) in layers.items():
    problem = GemmProblem(m=M, n=N, k=K, dtype="fp32", layout="rcr", **fields)
    c = Catalog.select(problem).run(a=x, b=weights, **tensors).outputs["c"]
    error = np.abs(c - expected).max()
    print(f"{name:<24} off by {error:.1e}")
    assert error < 1e-3
