"""Real lengths that differ from the storage: a padded batch, or packed slots that are only partly filled.

The padding is NaN here: if the kernel read it, the results would show it.
"""

import numpy as np

from catalog import Catalog, Problem

HEADS, HDIM, ROOM = 4, 64, 128
LENGTHS_Q, LENGTHS_K = [128, 5, 77], [100, 128, 33]

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((3, HEADS, ROOM, HDIM), dtype=np.float32) for _ in range(3))
for sequence, (length_q, length_k) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
    q[sequence, :, length_q:] = np.nan
    k[sequence, :, length_k:] = np.nan
    v[sequence, :, length_k:] = np.nan
lengths = {"seqlens_q": np.array(LENGTHS_Q, np.int32), "seqlens_k": np.array(LENGTHS_K, np.int32)}

# Batch mode: (batch, head, token, head dim).
batched = Problem(batch=3, nhead_q=HEADS, seqlen_q=ROOM, hdim_q=HDIM, dtype="fp32", mask="bottom_right")
o_batched = Catalog.select(batched).run({"q": q, "k": k, "v": v, **lengths}).outputs["o"]

# Group mode: the problem gives the size of the slots, (tokens, head, head dim), the run how many tokens are real.
slots = Problem(seqlens_q=[ROOM] * 3, nhead_q=HEADS, hdim_q=HDIM, dtype="fp32", mask="bottom_right")
packed = {name: x.swapaxes(1, 2).reshape(3 * ROOM, HEADS, HDIM) for name, x in (("q", q), ("k", k), ("v", v))}
o_packed = Catalog.select(slots).run({**packed, **lengths}).outputs["o"].reshape(3, ROOM, HEADS, HDIM).swapaxes(1, 2)

print("sequence  queries     keys       batch mode  group mode")
for sequence, (length_q, length_k) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
    q1 = q[sequence, :, :length_q].astype(np.float64)
    k1, v1 = k[sequence, :, :length_k], v[sequence, :, :length_k]
    visible = np.tri(length_q, length_k, length_k - length_q, dtype=bool)  # the last query sees the last key
    weights = np.where(visible, np.exp(q1 @ k1.swapaxes(-1, -2) / np.sqrt(HDIM)), 0)
    expected = np.zeros((HEADS, ROOM, HDIM))  # rows of padding stay 0, and so do rows that see no key
    expected[:, :length_q] = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30) @ v1

    errors = [np.abs(o[sequence] - expected).max() for o in (o_batched, o_packed)]
    print(f"{sequence:<8} {length_q:>4} of {ROOM} {length_k:>4} of {ROOM}    error {errors[0]:.1e} {errors[1]:>11.1e}")
    for o in (o_batched, o_packed):
        np.testing.assert_allclose(o[sequence], expected, rtol=1e-5, atol=1e-5)
