"""Processes killed at random moments: what they were doing must be done by the next one, and nothing may be lost.

python tests/kills.py --tries 200 [--job build] [--seed 0] prints how many tries there were and what was lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rough import FORK
from tiny_project import answer_of, make_kernel, make_project

from catalog import Catalog
from catalog.build.cache import Cache
from catalog.build.housekeeping import clear, collect, entries, sync_registry, verify
from catalog.ops.attention.problem import Problem
from catalog.runtime.measure import StopRule
from catalog.runtime.tune import TuneOptions, tune
from catalog.settings import settings

HDIMS = (1, 2, 3, 4)
RECEIPTS = (2,)  # some thousand kernels: short, and so often
PATIENCE_SECONDS = 60
OPTIONS = TuneOptions(candidates=2, again=True, rule=StopRule(1.0, least=3, seconds=0.5, warm_up_seconds=0))
LEFTOVER_FOLDERS = ("tmp", "locks")


class Job:
    """Something to kill: ``run`` in a child, ``losses`` afterwards, both over and over in one folder."""

    def run(self) -> None:
        """What is killed."""
        raise NotImplementedError

    def losses(self) -> list[str]:
        """What is not as it should be after a kill, and after the same call once more."""
        raise NotImplementedError


class Populate(Job):
    """An arch is added to a catalog that has another one, or is made anew."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "catalog.db"
        catalog = Catalog(self.path)
        self.kept = catalog.populate("gfx1201", receipts=RECEIPTS).kernels
        catalog.close()
        self.whole = 0
        self.turn = 0

    def run(self) -> None:
        Catalog(self.path).populate("gfx1100", receipts=RECEIPTS, force=True)

    def losses(self) -> list[str]:
        catalog = Catalog(self.path)
        answer = catalog.connection.execute("PRAGMA integrity_check").fetchone()[0]
        found = [] if answer == "ok" else [f"integrity: {answer}"]
        kernels = dict(catalog.connection.execute("SELECT arch, count(*) FROM attention_row GROUP BY arch").fetchall())
        if kernels.get("gfx1201") != self.kept:
            found.append("kernels of another arch")
        if self.whole and kernels.get("gfx1100", 0) not in {0, self.whole}:
            found.append("half a population")
        self.whole = catalog.populate("gfx1100", receipts=RECEIPTS).kernels
        self.turn += 1
        if self.turn % 2:  # every other time it is added, else made anew
            for table in ("kernel", "population"):
                catalog.connection.execute(
                    f"DELETE FROM {table} WHERE lineage IN (SELECT id FROM lineage WHERE arch = 'gfx1100')"
                )
        catalog.close()
        return found


class Build(Job):
    """Four kernels are compiled, by two threads, and recorded."""

    def __init__(self, folder: Path) -> None:
        self.project = make_project(folder)
        self.cache = Cache(folder / "cache")
        self.scratch = folder / "scratch"
        self.scratch.mkdir()

    def run(self) -> None:
        tempfile.tempdir = str(self.scratch)
        self.project.builder(self.cache.folder).build_many(map(make_kernel, HDIMS), jobs=2)

    def losses(self) -> list[str]:
        found = [f"damaged: {damage.reason}" for damage in verify(self.cache)]
        report = self.project.builder(self.cache.folder).build_many(map(make_kernel, HDIMS), jobs=2)
        found += [f"not built: {failure.error}" for failure in report.failures]
        answers = FORK.SimpleQueue()  # in a process of its own: the loader never forgets a library
        child = FORK.Process(target=lambda: answers.put([answer_of(built.path) for built in report.artifacts]))
        child.start()
        child.join(PATIENCE_SECONDS)
        if child.exitcode != 0 or answers.get() != [1000 + hdim for hdim in HDIMS]:
            found.append("a wrong library")
        found += self.left_over()
        clear(self.cache)
        found += [f"left after clear: {path.name}" for path in self.cache.folder.rglob("*") if path.is_file()]
        return found

    def left_over(self) -> list[str]:
        """Files that are neither entries nor remembered answers, after the next build and a collection."""
        collect(self.cache)
        folders = [self.cache.folder / name for name in LEFTOVER_FOLDERS]
        return [f"left over: {path}" for folder in (*folders, self.scratch) for path in folder.rglob("*")]


class Collect(Build):
    """The cache is collected while another process fills it; the registry records it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.catalog = folder / "catalog.db"
        Catalog(self.catalog).connection.close()

    def run(self) -> None:
        tempfile.tempdir = str(self.scratch)
        builder = self.project.builder(self.cache.folder)
        for _ in range(3):
            for hdim in HDIMS[:2]:
                builder.build(make_kernel(hdim))
            collect(self.cache, max_bytes=0)
            sync_registry(self.cache, self.catalog)

    def losses(self) -> list[str]:
        found = super().losses()
        catalog = Catalog(self.catalog)
        answer = catalog.connection.execute("PRAGMA integrity_check").fetchone()[0]
        catalog.close()
        if answer != "ok":
            found.append(f"integrity: {answer}")
        if entries(self.cache):
            found.append("entries after clear")
        return found


class Tune(Job):
    """Kernels of the host are timed and their medians recorded, anew each time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "catalog.db"
        self.problems = [Problem(batch=1, nhead_q=1, seqlen_q=length, hdim_q=32, dtype="fp32") for length in (8, 9, 10)]
        catalog = Catalog(self.path)
        found = catalog.candidates(self.problems[0], limit=OPTIONS.candidates, static=True)
        catalog.builder.build_many([candidate.kernel for candidate in found])
        catalog.close()

    def run(self) -> None:
        tune(Catalog(self.path, num_threads=1), self.problems, OPTIONS)

    def losses(self) -> list[str]:
        found = self._found({0, OPTIONS.candidates})
        child = FORK.Process(target=self.run)
        child.start()
        child.join(PATIENCE_SECONDS)
        if child.exitcode != 0:
            found.append("the next tuning failed")
        return found + self._found({OPTIONS.candidates})

    def _found(self, allowed: set[int]) -> list[str]:
        """What is wrong with the file, where each problem may have one of these numbers of timings."""
        catalog = Catalog(self.path)
        answer = catalog.connection.execute("PRAGMA integrity_check").fetchone()[0]
        counted = dict(catalog.connection.execute("SELECT problem_id, count(*) FROM timing GROUP BY 1").fetchall())
        catalog.close()
        found = [] if answer == "ok" else [f"integrity: {answer}"]
        counts = [*counted.values(), *[0] * (len(self.problems) - len(counted))]
        return found + [f"{count} timings of a problem" for count in counts if count not in allowed]


JOBS: dict[str, Callable[[Path], Job]] = {"populate": Populate, "build": Build, "tune": Tune, "gc": Collect}


def kill_at_random(name: str, folder: Path, tries: int, seed: int) -> tuple[int, Counter[str]]:
    """How many of ``tries`` were killed before they had ended, and what was lost."""
    chance = random.Random(seed)  # noqa: S311
    job = JOBS[name](folder)
    started = time.monotonic()
    _run_until_killed(job, None)
    whole = time.monotonic() - started
    killed, lost = 0, Counter(job.losses())
    for _ in range(tries):
        started = time.monotonic()
        if _run_until_killed(job, chance.uniform(0, whole)):
            killed += 1
        else:
            whole = min(whole, time.monotonic() - started)  # the first one was slow
        started = time.monotonic()
        lost.update(job.losses())
        if time.monotonic() - started > PATIENCE_SECONDS:
            lost["the next call waited"] += 1
    return killed, lost


def _run_until_killed(job: Job, delay: float | None) -> bool:
    """Whether the job, killed after ``delay`` seconds, had not ended by itself."""
    child = FORK.Process(target=job.run)
    child.start()
    child.join(delay)
    child.kill()
    child.join()
    assert child.exitcode in {0, -signal.SIGKILL}, f"the job ended with {child.exitcode}"
    return child.exitcode != 0


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", choices=JOBS, action="append")
    options = parser.parse_args()
    print(f"{'job':10}{'tries':>8}{'killed':>8}{'losses':>8}", flush=True)
    for name in options.job or JOBS:
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {"CATALOG_CACHE_DIR": f"{folder}/kernels", "CATALOG_GUARD": "never"}
            settings.cache_clear()
            killed, lost = kill_at_random(name, Path(folder), options.tries, options.seed)
        print(f"{name:10}{options.tries:8}{killed:8}{lost.total():8}", flush=True)
        for what, times in lost.most_common():
            print(f"    {times:6} {what}", flush=True)


if __name__ == "__main__":
    main()
