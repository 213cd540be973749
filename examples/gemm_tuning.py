"""Tune a matrix product on this machine: measured medians, not the static order, decide from then on."""

import os
import tempfile
from pathlib import Path

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime.tune import TuneOptions, tune

problem = GemmProblem(m=48, n=256, k=256, dtype="fp32", layout="rcr")

with tempfile.TemporaryDirectory() as folder, Catalog(Path(folder) / "catalog.db") as catalog:
    static = catalog.select(problem).kernels[0]
    print(f"static order  {static.name}")

    report = tune(catalog, [problem], TuneOptions(candidates=3, seconds=10))
    for line in catalog.candidates(problem, limit=3):
        time = "not recorded: too noisy" if line.median_ms is None else f"{line.median_ms:.4f} ms"
        print(f"{time:<24}{line.kernel.name}")

    best = catalog.candidates(problem, limit=1)[0].kernel
    print(f"{os.linesep}select takes  {catalog.select(problem).kernels[0].name}")
    assert catalog.select(problem).kernels[0] == best
