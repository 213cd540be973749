"""Causal masks from either corner: which keys each query sees, read from the kernel's own weights.

With K = 0, all visible keys have the same weight. With V = identity, O is the matrix of weights.
"""

import numpy as np

from catalog import Catalog, Problem

HDIM = 64


def weights(mask: str, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """Return the weight of every key for every query, (seqlen_q, seqlen_k)."""
    problem = Problem(batch=1, nhead_q=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, hdim_q=HDIM, dtype="fp32", mask=mask)
    q = np.ones((1, 1, seqlen_q, HDIM), np.float32)
    k = np.zeros((1, 1, seqlen_k, HDIM), np.float32)
    v = np.eye(seqlen_k, HDIM, dtype=np.float32)[np.newaxis, np.newaxis]
    o = Catalog.select(problem).run(q=q, k=k, v=v).outputs["o"]
    return np.asarray(o[0, 0, :, :seqlen_k])


for title, mask, seqlen_q, seqlen_k, diagonal in (
    ("no mask", "no", 4, 7, 7),
    ("top_left, also called causal: query i sees keys up to i (PyTorch's is_causal)", "top_left", 4, 7, 0),
    ("bottom_right: the last query sees the last key (flash-attn's causal)", "bottom_right", 4, 7, 3),
    ("bottom_right, more queries than keys: the first ones see none, and their O is 0", "bottom_right", 6, 4, -2),
):
    seen = weights(mask, seqlen_q, seqlen_k)
    print(title)
    for row in seen:
        print("   ", " ".join("#" if weight else "." for weight in row))

    visible = np.tril(np.ones((seqlen_q, seqlen_k)), diagonal)
    expected = visible / np.maximum(visible.sum(axis=1, keepdims=True), 1)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
print("The weights are 1 / (keys seen), as they must be.")
