"""Append new tokens to a K/V cache with rotary embedding, then attend; compare with one pass over all tokens."""

import numpy as np

from catalog import Catalog, Problem

HEADS, HDIM, ROOM, NEW, BEFORE = 4, 64, 256, 8, [200, 13]
BATCH = len(BEFORE)

append = Problem(
    op="appendkv",
    batch=BATCH,
    nhead_q=HEADS,
    seqlen_q=NEW,
    seqlen_k=ROOM,
    seqlen_new=NEW,
    hdim_q=HDIM,
    dtype="fp32",
    rope="half",  # pairs (i, i + 32), as in GPT-NeoX and Llama; "inter": pairs (2 i, 2 i + 1), as in GPT-J
    mask="causal",  # query i has the position of new token i
)
attend = Problem(
    batch=BATCH, nhead_q=HEADS, seqlen_q=NEW, seqlen_k=ROOM, hdim_q=HDIM, dtype="fp32", mask="bottom_right"
)

rng = np.random.default_rng(0)
q, k_new, v_new = (rng.standard_normal((BATCH, HEADS, NEW, HDIM), dtype=np.float32) for _ in range(3))
k_cache, v_cache = (rng.standard_normal((BATCH, HEADS, ROOM, HDIM), dtype=np.float32) for _ in range(2))
k_before, v_before = k_cache.copy(), v_cache.copy()
angles = np.arange(ROOM)[:, np.newaxis] * 10_000.0 ** (-np.arange(HDIM // 2) / (HDIM // 2))
cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
before = np.array(BEFORE, np.int32)

appended = Catalog.select(append).run(
    q=q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, seqlens_k=before, rotary_cos=cos, rotary_sin=sin
)
attended = Catalog.select(attend).run(q=appended.outputs["q"], k=k_cache, v=v_cache, seqlens_k=before + NEW)

print(f"append   {appended.kernels[0]}")
print(f"attend   {attended.kernels[0]}")
print(f"in place {'yes' if appended.outputs['k_cache'] is k_cache else 'NO'}: the cache of the result is the given one")
print("tokens before  new    error of o")
for sequence, length in enumerate(BEFORE):
    # A pair is a complex number, and a rotation is a product with exp(i angle).
    turn = np.exp(1j * angles[length : length + NEW])
    q1, k1 = ((x[sequence, ..., :32] + 1j * x[sequence, ..., 32:]) * turn for x in (q, k_new))
    q1, k1 = (np.concatenate([x.real, x.imag], axis=-1) for x in (q1, k1))
    k1 = np.concatenate([k_before[sequence, :, :length], k1], axis=1)
    v1 = np.concatenate([v_before[sequence, :, :length], v_new[sequence]], axis=1)
    visible = np.tri(NEW, length + NEW, length, dtype=bool)
    weights = np.where(visible, np.exp(q1 @ k1.swapaxes(-1, -2) / np.sqrt(HDIM)), 0)
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v1
    o = attended.outputs["o"][sequence]
    print(f"{length:>13} {NEW:>4} {np.abs(o - expected).max():>13.1e}")
    np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-5)
assert appended.outputs["k_cache"] is k_cache, "a cache is updated in place"
