"""Speed over sequence lengths: a table of GFLOP/s, without a mask and with a causal one."""

import numpy as np

from catalog import Catalog, Problem

HEADS, HDIM, LENGTHS = 8, 64, (16, 64, 256, 1024, 2048)

rng = np.random.default_rng(0)
print("            ------- no mask ------   ------- causal -------")
print("seqlen         time ms     GFLOP/s      time ms     GFLOP/s")
for seqlen in LENGTHS:
    q, k, v = (rng.standard_normal((1, HEADS, seqlen, HDIM), dtype=np.float32) for _ in range(3))
    cells = []
    for mask in ("no", "causal"):
        problem = Problem(batch=1, nhead_q=HEADS, seqlen_q=seqlen, hdim_q=HDIM, dtype="fp32", mask=mask)
        result = Catalog.select(problem).run(q=q, k=k, v=v, repeats=7)
        cells.append(f"{result.time_ms:>12.3f} {result.tflops * 1e3:>11.0f}")

        # The last query sees every key under both masks: a cheap check of every run.
        weights = np.exp(q[:, :, -1:].astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(HDIM))
        expected = weights / weights.sum(axis=-1, keepdims=True) @ v
        np.testing.assert_allclose(result.outputs["o"][:, :, -1:], expected, rtol=1e-5, atol=1e-5)
        # Two products of 2 FLOP a multiply-add; a causal mask halves the pairs.
        flops = 4 * HEADS * seqlen * seqlen * HDIM // (1 if mask == "no" else 2)
        np.testing.assert_allclose(result.tflops, flops / result.time_ms / 1e9, rtol=1e-9)
    print(f"{seqlen:<7} {cells[0]} {cells[1]}")
