"""Attention sinks as in StreamingLLM: the first keys stay visible however far the window has moved on.

With K = 0, all visible keys have the same weight. With V = identity, O is the matrix of weights.
"""

import numpy as np

from catalog import Catalog, Problem

SEQLEN, HDIM, WINDOW, SINKS = 12, 64, (3, 0), 2

q = np.ones((1, 1, SEQLEN, HDIM), np.float32)
k = np.zeros((1, 1, SEQLEN, HDIM), np.float32)
v = np.eye(SEQLEN, HDIM, dtype=np.float32)[np.newaxis, np.newaxis]
query, key = np.arange(SEQLEN)[:, np.newaxis], np.arange(SEQLEN)[np.newaxis, :]

for sink_size in (0, SINKS):
    problem = Problem(
        batch=1,
        nhead_q=1,
        seqlen_q=SEQLEN,
        hdim_q=HDIM,
        dtype="fp32",
        mask="window",
        window=WINDOW,
        sink_size=sink_size,
    )
    result = Catalog.select(problem).run(q=q, k=k, v=v)
    weights = result.outputs["o"][0, 0, :, :SEQLEN]
    print(f"window {WINDOW}, sink_size {sink_size}: {result.kernels[0]}")
    for row in weights:
        print("   ", " ".join("#" if weight else "." for weight in row))

    in_window = (key >= query - WINDOW[0]) & (key <= query)
    visible = in_window | ((key < sink_size) & (key <= query))
    np.testing.assert_allclose(weights, visible / visible.sum(axis=1, keepdims=True), rtol=1e-6)
