"""Element types: fp32, fp16 and bf16 tensors, and how far each is from float64 attention on the same tensors.

NumPy has no bf16 of its own: ml_dtypes adds it. Kernels add in float32 and round O once. Where the CPU multiplies
pairs of bf16, they also round the weights, as a GPU's matrix units do.
"""

import ml_dtypes
import numpy as np

from catalog import Catalog, Problem

HEADS, SEQLEN, HDIM = 8, 256, 64
ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}

rng = np.random.default_rng(0)
random = [rng.standard_normal((1, HEADS, SEQLEN, HDIM)) for _ in range(3)]

print("dtype  NumPy's name  K and V     time      error  relative to |o|")
for dtype, element in (("fp32", np.float32), ("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)):
    q, k, v = (x.astype(element) for x in random)
    problem = Problem(batch=1, nhead_q=HEADS, seqlen_q=SEQLEN, hdim_q=HDIM, dtype=dtype)
    result = Catalog.select(problem).run(q=q, k=k, v=v, repeats=5)
    o = result.outputs["o"]

    q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
    weights = np.exp(q64 @ k64.swapaxes(-1, -2) / np.sqrt(HDIM))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v64

    error = np.abs(o - expected)
    relative = error.max() / np.abs(expected).max()
    print(
        f"{dtype:<6} {o.dtype.name:<13} {(k.nbytes + v.nbytes) // 1024:>3} KiB {result.time_ms:>8.3f} ms"
        f" {error.max():>8.1e} {relative:>10.1e}"
    )
    # One rounding of the result, one of the weights in bf16, and some in float32 before them.
    allowed = ROUNDOFF[dtype] * np.abs(expected) + 1e-5
    if dtype == "bf16":
        allowed += ROUNDOFF[dtype] * (weights / weights.sum(axis=-1, keepdims=True) @ np.abs(v64))
    assert np.all(error <= allowed), f"{dtype} is off by {error.max()}"
