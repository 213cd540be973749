"""The candidates for a problem, each timed on this machine: does select take the fastest?"""

import numpy as np

from catalog import Catalog, Problem

problem = Problem(batch=1, nhead_q=8, seqlen_q=1024, hdim_q=64, dtype="fp32")
catalog = Catalog()
selected = catalog.select(problem)
candidates = catalog.candidates(problem, limit=3)

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 8, 1024, 64), dtype=np.float32) for _ in range(3))
plans = [catalog.plan(problem, candidate.kernel) for candidate in candidates]
outputs = [plan.run(q=q, k=k, v=v).outputs["o"] for plan in plans]
# The candidates take turns, so that other work on the machine affects all of them.
times = np.array([[plan.run(q=q, k=k, v=v).time_ms for plan in plans] for _ in range(9)])
best = times.min(axis=0)

print("rank  tile     register block    best ms  GFLOP/s  off the first")
for rank, plan in enumerate(plans, start=1):
    tile = plan.kernels[0].algorithm
    apart = np.abs(outputs[rank - 1] - outputs[0]).max()
    print(
        f"{rank:<5} {tile.tile_m0:>3}x{tile.tile_n0:<4} {tile.warp_m0:>9}x{tile.warp_n0:<4}"
        f" {best[rank - 1]:>10.3f} {problem.flops / best[rank - 1] / 1e6:>8.0f} {apart:>14.1e}"
    )
    np.testing.assert_allclose(outputs[rank - 1], outputs[0], rtol=1e-5, atol=1e-6)

print(f"\nselect takes  {selected.kernels[0].name}")
print(f"the fastest   {plans[int(best.argmin())].kernels[0].name}")
assert selected.kernels[0] == candidates[0].kernel, "select takes the first candidate"
