"""Speed of the kernel cache: a cached kernel in a warm process, and housekeeping with many entries.

python benchmarks/cache_speed.py [--entries N] [--runs N]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from catalog import Catalog, Problem
from catalog.backends import target_of
from catalog.build.builder import Builder
from catalog.build.cache import ArtifactRecord, Cache, Origin
from catalog.build.housekeeping import collect, entries, sync_registry, verify
from catalog.settings import settings

PROBLEM = Problem(batch=1, nhead_q=8, seqlen_q=64, hdim_q=64, dtype="fp32", mask="causal", lse=True)
LIBRARY_BYTES = 50_000


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fill(cache: Cache, record: ArtifactRecord, number: int) -> None:
    """Add entries of made-up libraries, used at different times, each with the lock file of its build."""
    cache.create()
    for place in range(number):
        library = place.to_bytes(8, "big") * (LIBRARY_BYTES // 8)
        digest = hashlib.sha256(library).hexdigest()
        cache.so_path(digest).write_bytes(library)
        cache.put_record(
            replace(record, key=digest, so_sha256=digest, so_bytes=len(library)), Origin(f"kernel {place}", 0, digest)
        )
        os.utime(cache.record_path(digest), (place, place))
        cache.locks.path(digest).touch()


def warm(catalog: Catalog, runs: int) -> None:
    """Time a kernel of this machine's CPU in a process that has found it before."""
    kernel = catalog.select(PROBLEM).kernels[0]
    builder = Builder(targets=target_of)
    builder.build(kernel)
    first = Builder(targets=target_of)
    print(f"{seconds(lambda: first.build(kernel)) * 1e3:10.2f} ms  cached kernel to artifact, a new builder")
    durations = [seconds(lambda: builder.build(kernel)) for _ in range(runs)]
    print(
        f"{median(durations) * 1e3:10.2f} ms  cached kernel to artifact, warm, median of {runs}; "
        f"fastest {min(durations) * 1e3:.2f}"
    )


def main() -> None:
    """Print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog(Path(folder) / "catalog.db")
        warm(catalog, options.runs)
        record, _ = Cache(settings().cache_dir).read(catalog.build(catalog.select(PROBLEM).kernels[0]).key)
        cache = Cache(Path(folder) / "cache")
        fill(cache, record, options.entries)
        half = sum(entry.bytes for entry in entries(cache)) // 2
        for what, work in {
            "ls": lambda: entries(cache),
            "verify": lambda: verify(cache),
            "gc --dry-run, half of them": lambda: collect(cache, half, dry_run=True),
            "gc, half of them": lambda: collect(cache, half),
            "sync the registry": lambda: sync_registry(cache, catalog.path),
            "gc, nothing to do": lambda: collect(cache, half),
        }.items():
            print(f"{seconds(work) * 1e3:10.0f} ms  {what}, {options.entries:,} entries")


if __name__ == "__main__":
    main()
