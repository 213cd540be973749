"""Tune a layer of a network and its gradients on this machine: measured medians decide from then on."""

import tempfile
from pathlib import Path

from catalog import Catalog
from catalog.ops.conv.problem import ConvProblem
from catalog.runtime.tune import TuneOptions, tune

forward = ConvProblem(n=1, c=64, k=64, size=(14, 14), filter=(3, 3), pad=(1, 1), dtype="fp32")
layer = [forward.model_copy(update={"direction": word}) for word in ("forward", "bwd_data", "bwd_weight")]

with tempfile.TemporaryDirectory() as folder, Catalog(Path(folder) / "catalog.db") as catalog:
    tune(catalog, layer, TuneOptions(candidates=2, seconds=10))
    for problem in layer:
        print(problem.name)
        for line in catalog.candidates(problem, limit=2):
            time = "not recorded: too noisy" if line.median_ms is None else f"{line.median_ms:.4f} ms"
            print(f"  {time:<24}{line.kernel.name}")
        best = catalog.candidates(problem, limit=1)[0].kernel
        assert catalog.select(problem).kernels[0] == best
