"""The gradients of Q, K and V, checked against finite differences of float64 attention along random directions."""

import numpy as np

from catalog import Catalog, Problem

NHEAD_Q, NHEAD_K, SEQLEN, HDIM = 4, 2, 128, 64
SHAPE = {"batch": 1, "nhead_q": NHEAD_Q, "nhead_k": NHEAD_K, "seqlen_q": SEQLEN, "hdim_q": HDIM, "dtype": "fp32"}

rng = np.random.default_rng(0)
q, do = (rng.standard_normal((1, NHEAD_Q, SEQLEN, HDIM), dtype=np.float32) for _ in range(2))
k, v = (rng.standard_normal((1, NHEAD_K, SEQLEN, HDIM), dtype=np.float32) for _ in range(2))
inputs: dict[str, np.ndarray] = {"q": q, "k": k, "v": v}

forward = Catalog.select(Problem(lse=True, **SHAPE)).run(inputs)
plan = Catalog.select(Problem(op="bwd", **SHAPE))
result = plan.run(inputs, o=forward.outputs["o"], lse=forward.outputs["lse"], do=do, repeats=5)


def loss(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
    """sum(dO * O): its gradients are what the backward returns."""
    k, v = (np.repeat(x.astype(np.float64), NHEAD_Q // NHEAD_K, axis=1) for x in (k, v))
    weights = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(HDIM))
    return float(np.sum(do * (weights / weights.sum(axis=-1, keepdims=True) @ v)))


for kernel in plan.kernels:
    print(f"{kernel.family!s:<15} {kernel.name}")
print(f"time            {result.time_ms:.3f} ms, {result.tflops * 1e3:.0f} GFLOP/s\n")
print("gradient  shape              along a direction  by differences    apart, of |gradient|")
for name, x in inputs.items():
    gradient = result.outputs[f"d{name}"].astype(np.float64)
    direction = rng.standard_normal(x.shape)
    step = 1e-4 * direction
    moved = [loss(**{**inputs, name: x + signed}) for signed in (step, -step)]
    differences = (moved[0] - moved[1]) / 2e-4
    along = float(np.sum(gradient * direction))
    apart = abs(along - differences) / np.linalg.norm(gradient)
    print(f"d{name:<8} {gradient.shape!s:<18} {along:>17.6f} {differences:>15.6f} {apart:>11.1e}")
    assert apart < 1e-5, f"d{name} is not the gradient"
