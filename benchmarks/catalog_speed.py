"""Speed of the catalog itself: populate, query, parity, select, merge. No kernel is compiled.

python benchmarks/catalog_speed.py [--runs N] [--timings N] [--files N]
"""

from __future__ import annotations

import argparse
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median

from catalog import Catalog, Problem
from catalog.registry.timings import Timing, record
from catalog.registry.transactions import transaction
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.measure import summarise

USER_QUERY = "hdim_q=128 AND pipeline='qr_async'"


def seconds(work: Callable[[], object], runs: int) -> float:
    """Median wall time of ``work``."""
    durations = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return median(durations)


def command(db: Path, *words: str) -> Callable[[], object]:
    """Run a command in a new process."""
    whole = [sys.executable, "-m", "catalog", "--db", str(db), *words]
    return lambda: subprocess.run(whole, check=True, capture_output=True)  # noqa: S603


def problems() -> list[Problem]:
    """Forty problems that select different kernels."""
    return [
        Problem(batch=2, nhead_q=8, seqlen_q=seqlen, hdim_q=hdim, dtype=dtype, mask=mask)
        for seqlen in (1, 100, 1024, 4000, 8192)
        for hdim in (64, 128)
        for dtype in ("fp16", "bf16")
        for mask in ("no", "causal")
    ]


def add_timings(catalog: Catalog, count: int) -> int:
    """Make up ``count`` timings like those of :func:`problems`, 20 per problem; return the number of problems."""
    device = DeviceInfo("gfx950", "made up", 256)
    chance = random.Random(0)  # noqa: S311
    kinds = {problem.form.kind: problem for problem in problems()}.values()
    wanted = -(-count // (20 * len(kinds)))
    with transaction(catalog.connection):
        for kind in kinds:
            ids = [found.kernel.id for found in catalog.candidates(kind, arch="gfx950", limit=20, static=True)]
            catalog.connection.executemany(
                "INSERT OR IGNORE INTO artifact (key, kernel_id, arch, toolchain, flags, status, log, compile_s, "
                "created) VALUES (?1, ?1, 'gfx950', '', '', 'built', '', 1, '2026-01-01T00:00:00+00:00')",
                [(id_,) for id_ in ids],
            )
            for number in range(wanted):
                problem = kind.model_copy(update={"batch": 3 + number // 64, "seqlen_q": 16 + 97 * (number % 64)})
                timings = [Timing(id_, id_, summarise([chance.randrange(10**6, 10**7)])) for id_ in ids]
                record(catalog.connection, problem, device, timings)
    return wanted * len(kinds)


def machines(folder: Path, files: int) -> list[Path]:
    """Catalogs of that many machines, each with 10,000 timings of the same 800 problems."""
    first = Catalog(folder / "0.db")
    first.populate("gfx950")
    add_timings(first, 16_000)  # records 10,000: most problems have fewer than 20 candidates
    first.close()
    paths = [folder / f"{number}.db" for number in range(files)]
    for path in paths[1:]:
        shutil.copyfile(paths[0], path)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE device SET name = ?", (f"machine {path.stem}",))
    return paths


def main() -> None:
    """Print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--timings", type=int, default=0, help="number of made-up timings in the catalog")
    parser.add_argument("--files", type=int, default=0, help="number of catalogs to merge, 10,000 timings each")
    options = parser.parse_args()
    runs = options.runs
    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "catalog.db"
        figures = {
            "catalog populate --arch gfx950 --force": seconds(
                command(db, "populate", "--arch", "gfx950", "--force"), runs
            ),
            "catalog populate, unchanged": seconds(command(db, "populate", "--arch", "gfx950"), runs),
            "catalog parity --receipt 0": seconds(command(db, "parity"), runs),
            f'catalog query "{USER_QUERY}"': seconds(command(db, "query", USER_QUERY), runs),
            f'catalog query "{USER_QUERY}" --count': seconds(command(db, "query", USER_QUERY, "--count"), runs),
            "catalog --help": seconds(command(db, "--help"), runs),
        }
        for what, value in figures.items():
            print(f"{value * 1e3:10.1f} ms  {what}")

        if options.files:
            paths = machines(Path(folder), options.files)
            merge = command(Path(folder) / "merged.db", "merge", *map(str, paths))
            print(f"{seconds(merge, 1) * 1e3:10.1f} ms  catalog merge of {len(paths)} files")

        asked = problems()
        if options.timings:
            catalog = Catalog(db)
            count = add_timings(catalog, options.timings)
            catalog.close()
            print(f"{options.timings:10,} timings of {count:,} problems are made up")
        catalog = Catalog(db)
        first = seconds(lambda: catalog.select(asked[0], arch="gfx950"), 1)
        rows = catalog.connection.execute("SELECT count(*) FROM kernel").fetchone()[0]
        cold = [seconds(partial(catalog.select, problem, arch="gfx950"), 1) for problem in asked[1:]]
        warm = seconds(lambda: [catalog.select(problem, arch="gfx950") for problem in asked * 100], runs)
        print(f"{first * 1e3:10.3f} ms  select, the first of a process, {rows:,} rows present")
        print(f"{median(cold) * 1e3:10.3f} ms  select, cold, median of {len(cold)}; slowest {max(cold) * 1e3:.3f} ms")
        print(f"{warm / len(asked) / 100 * 1e6:10.3f} us  select, warm")


if __name__ == "__main__":
    main()
