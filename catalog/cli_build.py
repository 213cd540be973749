"""``catalog build``: a progress bar, a summary, and what failed."""

from __future__ import annotations

from pathlib import Path

from catalog.build.builder import Artifact, BuildFailure, BuildReport
from catalog.errors import UsageError
from catalog.runtime.catalog import Catalog, resolve_arch


def build_with_progress(catalog: Catalog, where: str, arch: str, jobs: int | None, limit: int | None) -> bool:
    """Build what ``where`` selects, print a summary to stdout; whether any kernel failed.

    Raises:
        QueryError, RegistryError: as :meth:`Catalog.kernels`.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    kernels = catalog.kernels(where, arch=resolve_arch(arch), limit=limit)
    columns = (
        TextColumn("building"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(kernels))

        def advance(done: Artifact | BuildFailure) -> None:
            progress.update(task, advance=1)
            if isinstance(done, BuildFailure):
                progress.console.print(f"failed: {done.kernel.name}", markup=False, highlight=False)

        report = catalog.builder.build_many(kernels, jobs, advance)
    for line in _summary(report):
        print(line)
    return bool(report.failures)


def build_fallback(catalog: Catalog, arch: str) -> Path:
    """Build one known-good forward kernel of an AMD arch, of the revision that the CK checkout looks like; its library.

    Raises:
        BuildError, ToolchainError: there is no checkout or no compiler, or it does not compile.
        UsageError: the arch is none of that revision's.
    """
    from catalog.build.ck.sources import ck_facts, find_checkout

    revision = find_checkout().generator.revision
    catalog.populate(arch, revision=revision)
    kernels = catalog.kernels(f"revision = '{revision}' AND {ck_facts().fallback}", arch=arch)
    if not kernels:
        raise UsageError(f"{arch} has no such kernel at revision {revision}: {ck_facts().fallback}")
    return catalog.build(kernels[0]).path


def _summary(report: BuildReport) -> list[str]:
    """What became of the kernels in a line, then each reason of failures once, with the kernels that it stopped."""
    compiled = [artifact for artifact in report.artifacts if not artifact.cached]
    seconds = sum(artifact.compile_seconds for artifact in compiled)
    kernels = len(report.artifacts) + len(report.failures)
    lines = [
        f"{kernels} kernels: {len(compiled)} compiled in {seconds:.1f} s of compiler time, "
        f"{len(report.artifacts) - len(compiled)} in the cache already, {len(report.failures)} failed"
    ]
    reasons: dict[str, list[str]] = {}
    for failure in report.failures:
        reasons.setdefault(str(failure.error), []).append(failure.kernel.name)
    for reason, names in reasons.items():
        lines += ["", reason, *(f"    {name}" for name in names if name not in reason)]
    return lines
