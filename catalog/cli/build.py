"""``catalog build``: a progress bar, a line a kernel, a summary, and what failed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog.backends import HIP, backend_of, target_of
from catalog.build.builder import Artifact, BuildFailure, BuildReport, CompileError
from catalog.build.pools import Pool, Threads
from catalog.cli.printing import print_told
from catalog.errors import INTERRUPTED, BuildError, UsageError
from catalog.messages import counted
from catalog.registry.query import Query, hints
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.here import resolve_arch
from catalog.schema.kernel import Kernel


@dataclass(frozen=True)
class Asked:
    """The options of ``catalog build``."""

    where: str
    arch: str
    jobs: int | None = None
    limit: int | None = None
    scheduler: str | None = None
    fail_fast: bool = False
    verbose: bool = False
    form: str = "table"


def build_with_progress(catalog: Catalog, asked: Asked) -> int:
    """Build what is asked for, print a summary to stdout; the exit code: 1 when a kernel failed, 130 after Ctrl-C.

    Raises:
        QueryError, RegistryError: as :meth:`Catalog.kernels`.
        ClusterError: the scheduler is not reached, or gone.
    """
    arch = resolve_arch(asked.arch)
    _populate(catalog, arch)
    kernels = catalog.kernels(asked.where, arch=arch, limit=asked.limit)
    if not kernels:
        print(f"No kernel of {arch} meets the expression.", file=sys.stderr)
        for hint in hints(Query(asked.where)):
            print(f"Hint: {hint}", file=sys.stderr)
    names = {kernel.id: kernel.name for kernel in kernels}
    done: list[Artifact | BuildFailure] = []
    code = 0
    try:
        with _pool(asked) as pool, _progress(len(kernels), pool.at_once) as (advance, say):
            before = catalog.built(kernels)
            if before:
                say(f"{before:,} of {counted(len(kernels), 'kernel')} built before: {len(kernels) - before:,} left")

            def on_done(ended: Artifact | BuildFailure) -> None:
                done.append(ended)
                advance(isinstance(ended, BuildFailure) or not ended.cached)
                if asked.verbose or isinstance(ended, BuildFailure):
                    say(_line(ended, names))

            catalog.builder.build_many(kernels, on_done=on_done, fail_fast=asked.fail_fast, pool=pool)
    except KeyboardInterrupt:
        code = INTERRUPTED
    report = BuildReport(
        tuple(ended for ended in done if isinstance(ended, Artifact)),
        tuple(ended for ended in done if isinstance(ended, BuildFailure)),
        len(kernels) - len(done),
    )
    for line in _reasons(report, catalog.refusal):
        print(line, file=sys.stderr)
    print_told(
        _summary(report, interrupted=code == INTERRUPTED), COLUMNS, [_row(ended, names) for ended in done], asked.form
    )
    return code or int(bool(report.failures))


def build_fallback(catalog: Catalog, arch: str) -> Path:
    """Build one known-good forward kernel of an AMD arch, of the revision that the CK checkout looks like; its library.

    Raises:
        BuildError, ToolchainError: there is no checkout or no compiler, or it does not compile.
        UsageError: the arch is none of that revision's.
    """
    from catalog.build.targets import CK
    from catalog.ops.attention.upstream.sources import ck_facts, find_checkout

    arch = str(catalog.spec(arch).arch)
    if target_of(arch) is not CK:
        raise UsageError(f"{arch} is no AMD arch", hint="As in: catalog fallback --arch gfx942")
    revision = find_checkout().generator.revision
    catalog.populate(arch, revision=revision)
    kernels = catalog.kernels(f"revision = '{revision}' AND {ck_facts().fallback}", arch=arch)
    if not kernels:
        raise UsageError(f"{arch} has no such kernel at revision {revision}: {ck_facts().fallback}")
    return catalog.build(kernels[0]).path


def _populate(catalog: Catalog, arch: str) -> None:
    """Populate an arch that is not there; an AMD one at the revision of the CK checkout, if there is one."""
    catalog.spec(arch)  # a wrong one is told before all else
    if catalog.populated(arch):
        return
    from catalog.ops.attention.upstream.sources import find_checkout

    revision = None
    if backend_of(arch) is HIP:
        try:
            revision = find_checkout().generator.revision
        except BuildError:
            revision = None  # every kernel will fail with the reason
    catalog.populate(arch, revision=revision)


@contextmanager
def _pool(asked: Asked) -> Iterator[Pool]:
    if asked.scheduler is None:
        yield Threads(asked.jobs)
        return
    from catalog.build.cluster import connect

    with connect(asked.scheduler) as cluster:
        for note in cluster.notes:
            print(note, file=sys.stderr)
        yield cluster


@contextmanager
def _progress(total: int, at_once: int) -> Iterator[tuple[Callable[[bool], None], Callable[[str], None]]]:
    """A bar on stderr: what tells it of a kernel that took a compiler or not, and what prints a line above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed
    from rich.text import Text

    from catalog.cli.progress import Pace

    pace = Pace(time.monotonic(), at_once)

    class Left(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"left: {pace.told(int(task.remaining or 0), time.monotonic())}")

    columns = (TextColumn("building"), BarColumn(), MofNCompleteColumn(), Elapsed(), Left())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)

        def advance(compiled: bool) -> None:
            pace.ended(time.monotonic(), compiled=compiled)
            progress.update(task, advance=1)

        yield advance, lambda text: progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


NAMED = 10
"""Kernels that are named with the reason why they failed; each had its line when it did."""

COLUMNS = ("kernel", "status", "compile_s", "bytes", "id", "error")
"""What became of a kernel, as a row."""


def _row(ended: Artifact | BuildFailure, names: Mapping[str, str]) -> list[Any]:
    """The values of :data:`COLUMNS`."""
    if isinstance(ended, BuildFailure):
        return [ended.kernel.name, "failed", None, None, ended.kernel.id, str(ended.error)]
    status = "cached" if ended.cached else "compiled"
    return [names[ended.kernel_id], status, round(ended.compile_seconds, 3), ended.so_bytes, ended.kernel_id, None]


def _line(ended: Artifact | BuildFailure, names: Mapping[str, str]) -> str:
    """What became of a kernel: how, seconds of its compiler, size of its library, name."""
    if isinstance(ended, Artifact):
        how, seconds, size = "cached" if ended.cached else "compiled", ended.compile_seconds, ended.so_bytes
        return f"{how:<8} {seconds:>7.1f} s {size / 1024:>8.0f} KiB  {names[ended.kernel_id]}"
    took = f"{ended.error.record.compile_s:.1f} s" if isinstance(ended.error, CompileError) else ""
    return f"{'failed':<8} {took:>9} {'':>12}  {ended.kernel.name}"


def _summary(report: BuildReport, interrupted: bool) -> str:
    """What became of the kernels in a line."""
    compiled = [artifact for artifact in report.artifacts if not artifact.cached]
    seconds = sum(artifact.compile_seconds for artifact in compiled)
    kernels = len(report.artifacts) + len(report.failures) + report.left
    left = f", {report.left:,} left: the same command goes on from here" if report.left else ""
    cached, failed = len(report.artifacts) - len(compiled), len(report.failures)
    return (
        f"{'Interrupted. ' if interrupted else ''}{counted(kernels, 'kernel')}: {len(compiled):,} compiled in "
        f"{seconds:.1f} s of compiler time, {cached:,} in the cache already, {failed:,} failed{left}"
    )


def _reasons(report: BuildReport, refusal: Callable[[Kernel], str | None]) -> list[str]:
    """Each reason of failures once, with the first of the kernels that it stopped."""
    lines: list[str] = []
    reasons: dict[str, list[str]] = {}
    for failure in report.failures:
        known = refusal(failure.kernel)
        reason = failure.error.printed if known is None else f"Error: {failure.kernel.revision} lists it, but {known}"
        reasons.setdefault(reason, []).append(failure.kernel.name)
    for reason, stopped in reasons.items():
        named = [name for name in stopped if name not in reason]
        lines += [reason, *(f"    {name}" for name in named[:NAMED])]
        lines += [f"    and {counted(len(named) - NAMED, 'more kernel')}"] if len(named) > NAMED else []
    return lines
