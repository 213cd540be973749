"""Record the calls of a part of a program, with their inputs, and run them again, checked and timed."""

import tempfile
from pathlib import Path

import catalog
from catalog import Catalog, Problem
from catalog.runtime.inputs import make_inputs
from catalog.runtime.replay import ReplayOptions, replay
from catalog.runtime.traces import read_trace

problems = [
    Problem(batch=1, nhead_q=4, seqlen_q=length, hdim_q=64, dtype="fp32", mask="causal") for length in (128, 256)
]

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "calls.jsonl"
    with catalog.trace(file, tensors=True):  # CATALOG_TRACE=FILE does so for a whole program
        for problem in problems:
            bound = Catalog.select(problem).bind(make_inputs(problem))
            for _ in range(10):
                bound.launch()

    trace = read_trace(file)
    print(trace.about.replace(f"{folder}/", ""))
    for done in replay(Catalog.default(), trace.used, ReplayOptions(verify=True)):
        print(f"{done.used.name}: {done.used.calls} calls, {done.used.median_ms:.3f} ms then, {done.about} now")
        assert done.verified, "it is off the float64 reference"
