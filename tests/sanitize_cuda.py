"""Run every kernel of sm_90 that answers some small problems: the process that compute-sanitizer watches.

``sanitize_cuda.py CATALOG OP FORM`` prints how many plans ran; a wrong result is reported on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cuda_gpu import ARCH, wrong

from catalog.ops.attention.problem import Problem
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.runtime.plan import Plan

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))

FORMS: dict[str, dict[str, Any]] = {
    "dense": {"batch": 1, "seqlen_q": 200, "seqlen_k": 331, "mask": "bottom_right"},
    "packed": {
        "seqlens_q": [70, 0, 210],
        "seqlens_k": [200, 40, 65],
        "mask": "window",
        "window": (100, 20),
        "bias": "alibi",
    },
}
"""Lengths that no tile divides, longer and shorter than the keys; warpgroups without queries, queries without keys."""

OF_OP: dict[str, dict[str, dict[str, Any]]] = {
    "fwd": {"dense": {"lse": True, "logits_soft_cap": 20.0}, "packed": {"lse": True}},
    "splitkv": {"dense": {"num_splits": 2}, "packed": {}},
    "pagedkv": {"dense": {"lse": True, "page_size": 16}, "packed": {"lse": True, "page_size": 16}},
    "batch_prefill": {
        "packed": {"lse": True, "page_size": 16, "kv_memory_layout": "vectorized", "kv_lookup_table": "sglang"}
    },
    "appendkv": {"dense": {"seqlen_new": 70, "page_size": 16, "rope": "half"}},
    "bwd": {"dense": {}, "packed": {"deterministic": True}},
}


def problems(op: str, form: str) -> list[Problem]:
    """One of every head dim: two query heads share a key head."""
    fields = {"op": op, "nhead_q": 2, "nhead_k": 1, "dtype": "bf16", **FORMS[form], **OF_OP[op][form]}
    if "page_size" in fields and "seqlens_k" in fields:
        fields["seqlen_k"] = max(fields.pop("seqlens_k"))
    return [Problem(**fields, hdim_q=hdim_q, hdim_v=hdim_v) for hdim_q, hdim_v in HEAD_DIMS]


def plans(catalog: Catalog, op: str, form: str) -> Iterator[Plan]:
    """Each problem with every kernel of the smallest fitting head dim that may be its main stage."""
    for problem in problems(op, form):
        kernels = [candidate.kernel for candidate in catalog.candidates(problem, arch=ARCH, limit=100)]
        smallest = min(kernel.signature.hdim_q for kernel in kernels)
        yield from (catalog.plan(problem, kernel) for kernel in kernels if kernel.signature.hdim_q == smallest)


def main(database: str, op: str, form: str) -> int:
    flawed = ran = 0
    with Catalog(Path(database)) as catalog:
        for plan in plans(catalog, op, form):
            failed = wrong(plan, make_inputs(plan.problem, seed=ran))
            if failed:
                print(plan.kernels[0].name, failed, file=sys.stderr)
            flawed += bool(failed)
            ran += 1
    print(ran)
    return flawed > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
