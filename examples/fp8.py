"""fp8 attention with scales: one for a whole tensor, or one for each block of tokens of a head.

The heads' values differ in size by up to a million: with one scale for all, the small ones leave fp8's range.
"""

import ml_dtypes
import numpy as np

from catalog import Catalog, Problem
from catalog.runtime.validate import check_result

HEADS, SEQLEN, HDIM, BLOCK = 4, 256, 64, 128
FP8 = ml_dtypes.float8_e4m3fn
LARGEST = 448  # of float8_e4m3fn


def quantised(x: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return ``x`` as fp8, scaled so that its maximum along ``axis`` (None: overall) is LARGEST, and the scale."""
    descale = np.abs(x).max(axis=axis, keepdims=True) / LARGEST
    return (x / descale).reshape(1, HEADS, SEQLEN, HDIM).astype(FP8), descale.astype(np.float32)


rng = np.random.default_rng(0)
sizes = np.array([1, 1e-3, 1e-5, 1e-6])
q, k, v = (rng.standard_normal((1, HEADS, SEQLEN, HDIM)) for _ in range(3))
v *= sizes[:, np.newaxis, np.newaxis]
weights = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(HDIM))
exact = weights / weights.sum(axis=-1, keepdims=True) @ v

errors = {}
for qscale in ("pertensor", "blockscale"):
    problem = Problem(
        batch=1,
        nhead_q=HEADS,
        seqlen_q=SEQLEN,
        hdim_q=HDIM,
        dtype="fp8fp32",  # fp8 in, fp32 out
        qscale=qscale,
        block_scale_size_q=BLOCK,
        block_scale_size_kv=BLOCK,
    )
    inputs = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        blocks = x.reshape(1, HEADS, SEQLEN // BLOCK, BLOCK * HDIM)
        inputs[name], descale = quantised(blocks, None if qscale == "pertensor" else -1)
        inputs[f"{name}_descale"] = descale.reshape(problem.shapes[f"{name}_descale"])
    result = Catalog.select(problem).run(inputs)
    (check,) = check_result(problem, inputs, result)  # against float64 with the same quantised tensors
    squares = [(x**2).sum(axis=(0, 2, 3)) for x in (result.outputs["o"] - exact, exact)]
    errors[qscale] = np.sqrt(squares[0] / squares[1])
    print(f"{qscale:<10}  {result.kernels[0]}")
    print(f"            off the reference by {check.max_error:.1e}, {check.tolerance_used:.0%} of the tolerance")
    assert check.passed, f"{qscale} is off by {check.max_error}"

print("\nrelative error of o from quantising, by head")
print("size of v   pertensor   blockscale")
for head, size in enumerate(sizes):
    print(f"{size:<9g} {errors['pertensor'][head]:>11.1%} {errors['blockscale'][head]:>12.1%}")
assert errors["blockscale"].max() < 0.1, "with a scale of their own, small heads are as exact as large ones"
assert errors["pertensor"][-1] > 0.9, "with one scale for all, the smallest head is lost"
