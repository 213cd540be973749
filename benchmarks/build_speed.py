"""Kernels per second that are compiled into an empty cache, with one compiler and with two.

python benchmarks/build_speed.py [--kernels N] [--jobs 1,2] [--where EXPR]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from catalog import Catalog
from catalog.backends import target_of
from catalog.build.builder import Builder

SMALL = "family = 'fwd' AND hdim_q = 64 AND dtype = 'fp32'"


def main() -> None:
    """Print one line per number of jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=16)
    parser.add_argument("--jobs", default="1,2", help="numbers of compilers at a time")
    parser.add_argument("--where", default=SMALL, help="which of the host's kernels")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog(Path(folder) / "catalog.db")
        catalog.populate("host")
        kernels = catalog.kernels(options.where, arch="host", limit=options.kernels)
        for jobs in map(int, options.jobs.split(",")):
            started = time.perf_counter()
            report = Builder(Path(folder) / f"cache of {jobs}", targets=target_of).build_many(kernels, jobs)
            seconds = time.perf_counter() - started
            compilers = sum(artifact.compile_seconds for artifact in report.artifacts)
            print(
                f"{len(report.artifacts) / seconds:8.3f} kernels/s  {jobs} at a time: {len(report.artifacts)} in "
                f"{seconds:.1f} s, {compilers:.1f} s of compiler time, {len(report.failures)} failed"
            )
        catalog.close()


if __name__ == "__main__":
    main()
