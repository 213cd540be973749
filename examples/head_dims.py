"""Head dims that no kernel is compiled for, also different ones for Q and V: the next larger padded kernel is used."""

import numpy as np

from catalog import Catalog, Problem

HEADS, SEQLEN = 4, 128

rng = np.random.default_rng(0)
print("hdim_q  hdim_v   kernel's   padded    error")
for hdim_q, hdim_v in ((64, 64), (40, 40), (64, 48), (57, 33)):
    q, k = (rng.standard_normal((1, HEADS, SEQLEN, hdim_q), dtype=np.float32) for _ in range(2))
    v = rng.standard_normal((1, HEADS, SEQLEN, hdim_v), dtype=np.float32)
    problem = Problem(batch=1, nhead_q=HEADS, seqlen_q=SEQLEN, hdim_q=hdim_q, hdim_v=hdim_v, dtype="fp32")
    plan = Catalog.select(problem)
    o = plan.run(q=q, k=k, v=v).outputs["o"]

    weights = np.exp(q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(hdim_q))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v

    (kernel,) = plan.kernels
    compiled_for = f"{kernel.signature.hdim_q} x {kernel.signature.hdim_v}"
    padded = "yes" if kernel.algorithm.pad_d else "no"
    print(f"{hdim_q:>6} {hdim_v:>7} {compiled_for:>10} {padded:>8} {np.abs(o - expected).max():>8.1e}")
    assert o.shape == (1, HEADS, SEQLEN, hdim_v)
    np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-5)
