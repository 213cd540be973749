"""Run some kernels of sm_90, each on a small problem: the process that compute-sanitizer watches.

``sanitize_cuda.py CATALOG OP ID...`` prints how many kernels ran; a wrong result is reported on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

from cuda_gpu import ARCH, Row, wrong
from host_problems import draw_inputs

from catalog.ops.attention.fields import Op
from catalog.runtime.catalog import Catalog

SIZES = {
    **{"batch": 1, "nhead_q": 2, "nhead_k": 1, "seqlen_q": 200, "seqlen_k": 331, "seqlen_new": 70},
    **{"seqlens_q": [70, 0, 210], "seqlens_k": [200, 40, 65]},
}
"""Lengths that no tile divides, longer and shorter than the keys; warpgroups without queries, queries without keys."""


def main(database: str, op: str, *ids: str) -> int:
    flawed = 0
    with Catalog(Path(database)) as catalog:
        for seed, kernel_id in enumerate(ids):
            (kernel,) = catalog.kernels(f"id = '{kernel_id}'", arch=ARCH)
            problem = Row(cast(Op, op), kernel).of_sizes(SIZES)
            failed = wrong(catalog.plan(problem, kernel), draw_inputs(problem, seed))
            if failed:
                print(kernel.name, problem.key, failed, file=sys.stderr)
            flawed += bool(failed)
    print(len(ids))
    return 1 if flawed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
