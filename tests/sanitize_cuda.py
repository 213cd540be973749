"""Run some kernels of sm_90, each on a small problem: the process that compute-sanitizer watches.

``sanitize_cuda.py CATALOG OP ID...`` prints how many kernels are right; a wrong result is reported on stderr. OP is one
of attention's, or ``gemm`` or ``conv``, or ``many_heads``: a backward whose blocks have several works.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, cast

import conv_problems
import gemm_problems
from cuda_gpu import ARCH, Row, many_heads, wrong
from host_problems import draw_inputs

from catalog.ops.attention.fields import Op
from catalog.ops.attention.problem import Problem as Attention
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import Array
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem

SIZES = {
    **{"batch": 1, "nhead_q": 2, "nhead_k": 1, "seqlen_q": 200, "seqlen_k": 331, "seqlen_new": 70},
    **{"seqlens_q": [70, 0, 210], "seqlens_k": [200, 40, 65]},
}
"""Lengths that no tile divides, longer and shorter than the keys; warpgroups without queries, queries without keys."""


PRODUCTS: dict[str, Any] = {"gemm": gemm_problems, "conv": conv_problems}


def drawn(op: str, kernel: Kernel, seed: int) -> tuple[Problem, dict[str, Array]]:
    """A problem that a kernel answers, and inputs."""
    if op in PRODUCTS:
        problem = PRODUCTS[op].problem_of_row(kernel, random.Random(seed))  # noqa: S311
        return problem, make_inputs(problem, seed)
    if op == "many_heads":
        traits = kernel.signature
        problem = Attention(op="bwd", **many_heads(traits.hdim_q), mask="causal", dtype=traits.dtype.value)
        return problem, make_inputs(problem, seed)
    problem = Row(cast(Op, op), kernel).of_sizes(SIZES)
    return problem, draw_inputs(problem, seed)


def main(database: str, op: str, *ids: str) -> int:
    flawed = 0
    with Catalog(Path(database)) as catalog:
        for seed, kernel_id in enumerate(ids):
            (kernel,) = catalog.kernels(f"id = '{kernel_id}'", arch=ARCH)
            problem, inputs = drawn(op, kernel, seed)
            failed = wrong(catalog.plan(problem, kernel), inputs)
            if failed:
                print(kernel.name, problem.key, failed, file=sys.stderr)
            flawed += bool(failed)
    print(len(ids) - flawed)
    return 1 if flawed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
