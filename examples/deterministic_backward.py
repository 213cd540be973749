"""A deterministic backward: the same bits in every run and with any number of threads.

The number of threads is a setting of the process, CATALOG_NUM_THREADS, so each number has its own process here.
"""

import hashlib
import os
import subprocess
import sys

from catalog import Catalog, Problem
from catalog.runtime.inputs import make_inputs
from catalog.runtime.validate import check_result

RUNS = 3
problem = Problem(
    op="bwd", batch=1, nhead_q=2, seqlen_q=192, seqlen_k=2048, hdim_q=64, dtype="fp32", deterministic=True
)


def digests() -> list[str]:
    """SHA-256 of dQ, dK and dV together, for each of a few runs."""
    inputs, plan = make_inputs(problem), Catalog.select(problem)
    results = [plan.run(inputs) for _ in range(RUNS)]
    assert all(check.passed for check in check_result(problem, inputs, results[0])), "off the float64 reference"
    return [
        hashlib.sha256(b"".join(result.outputs[name].tobytes() for name in ("dq", "dk", "dv"))).hexdigest()
        for result in results
    ]


if "--digests" in sys.argv:
    print("\n".join(digests()))
else:
    print("threads  run  SHA-256 of dQ, dK, dV")
    seen = set()
    for threads in (1, 2, 3):
        environment = {**os.environ, "CATALOG_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--digests"]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
        for run, digest in enumerate(done.stdout.split(), start=1):
            print(f"{threads:>7} {run:>4}  {digest[:32]}...")
            seen.add(digest)
    print("The same bits every time." if len(seen) == 1 else "The bits DIFFER.")
    assert len(seen) == 1, "a deterministic backward depends on its inputs alone"
