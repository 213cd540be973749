"""Speculative decoding with a tree of drafts: a bias hides what is no ancestor, and all branches are judged at once."""

import numpy as np

from catalog import Catalog, Problem

CACHED, HEADS, KV_HEADS, HDIM = 1000, 8, 2, 64
PARENTS = (-1, -1, 0, 0, 1, 2, 4)  # of seven drafts; -1: the last token of the cache

rng = np.random.default_rng(0)
drafts, keys = len(PARENTS), CACHED + len(PARENTS)
q = rng.standard_normal((1, HEADS, drafts, HDIM), dtype=np.float32)
k, v = (rng.standard_normal((1, KV_HEADS, keys, HDIM), dtype=np.float32) for _ in range(2))

seen = np.zeros((drafts, drafts), bool)  # each draft sees itself and its ancestors
for draft, parent in enumerate(PARENTS):
    seen[draft, draft] = True
    if parent >= 0:
        seen[draft] |= seen[parent]

problem = Problem(
    op="splitkv",
    batch=1,
    nhead_q=HEADS,
    nhead_k=KV_HEADS,
    seqlen_q=drafts,
    seqlen_k=keys,
    hdim_q=HDIM,
    dtype="fp32",
    bias="bias",
    bias_dims="11",  # one for all sequences and heads
)
bias = np.zeros(problem.shapes["bias"], np.float32)
bias[..., CACHED:] = np.where(seen, 0, -np.inf)
o = Catalog.select(problem).run(q=q, k=k, v=v, bias=bias).outputs["o"]

print("draft  ancestors       error")
for draft in range(drafts):
    path = np.flatnonzero(seen[draft])
    visible = np.r_[:CACHED, CACHED + path]  # as if the branch alone had been appended to the cache
    for head in range(HEADS):
        branch_k, branch_v = (x[0, head // (HEADS // KV_HEADS), visible].astype(np.float64) for x in (k, v))
        weights = np.exp(branch_k @ q[0, head, draft] / np.sqrt(HDIM))
        np.testing.assert_allclose(o[0, head, draft], weights / weights.sum() @ branch_v, rtol=1e-5, atol=1e-5)
    error = np.abs(o[0, head, draft] - weights / weights.sum() @ branch_v).max()
    print(f"{draft:>5}  {' '.join(map(str, path[:-1])) or 'none':<12} {error:>8.1e}")
