"""Builds of many kernels: their selection, and a summary of the results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.backends import HIP, backend_of
from catalog.build.builder import Artifact, BuildFailure, CompileError
from catalog.errors import INTERRUPTED, BuildError, UsageError
from catalog.messages import counted
from catalog.ops import DEFAULT, operation
from catalog.runtime.builds import why_not
from catalog.runtime.here import resolve_arch

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.schema.kernel import Kernel

NAMED = 10
"""Maximum number of kernels named per reason of failure; all were printed when they failed."""

COLUMNS = ("kernel", "status", "compile_s", "bytes", "id", "error")
"""The columns of :meth:`BuildRun.rows`."""


@dataclass
class BuildRun:
    """A build of many kernels, with the results so far."""

    catalog: Catalog
    kernels: list[Kernel] = field(default_factory=list)
    ended: list[Artifact | BuildFailure] = field(default_factory=list)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self._names = {kernel.id: kernel.name for kernel in self.kernels}

    def add(self, kernels: Sequence[Kernel]) -> None:
        """Add kernels that are about to be built."""
        self.kernels += kernels
        self._names.update((kernel.id, kernel.name) for kernel in kernels)

    @property
    def artifacts(self) -> list[Artifact]:
        """The libraries, compiled or found in the cache."""
        return [one for one in self.ended if isinstance(one, Artifact)]

    @property
    def failures(self) -> list[BuildFailure]:
        """The kernels that failed."""
        return [one for one in self.ended if isinstance(one, BuildFailure)]

    @property
    def exit_code(self) -> int:
        """Exit code of ``catalog build``: 1 if a kernel failed, 130 after Ctrl-C."""
        return INTERRUPTED if self.interrupted else int(bool(self.failures))

    @property
    def rows(self) -> list[list[Any]]:
        """A row for each finished kernel, with the values of :data:`COLUMNS`."""
        return [self._row(one) for one in self.ended]

    def _row(self, ended: Artifact | BuildFailure) -> list[Any]:
        if isinstance(ended, BuildFailure):
            return [ended.kernel.name, "failed", None, None, ended.kernel.id, str(ended.error)]
        name, seconds = self._names[ended.kernel_id], round(ended.compile_seconds, 3)
        return [name, _status(ended), seconds, ended.so_bytes, ended.kernel_id, None]

    def line(self, ended: Artifact | BuildFailure) -> str:
        """The result of a kernel: status, seconds of compiling, size of the library, name."""
        if isinstance(ended, Artifact):
            size, name = ended.so_bytes / 1024, self._names[ended.kernel_id]
            return f"{_status(ended):<8} {ended.compile_seconds:>7.1f} s {size:>8.0f} KiB  {name}"
        took = f"{ended.error.record.compile_s:.1f} s" if isinstance(ended.error, CompileError) else ""
        return f"{'failed':<8} {took:>9} {'':>12}  {ended.kernel.name}"

    @property
    def summary(self) -> str:
        """The number of kernels by result, as a sentence."""
        compiled = [artifact for artifact in self.artifacts if not artifact.cached]
        seconds = sum(artifact.compile_seconds for artifact in compiled)
        left = len(self.kernels) - len(self.ended)
        return (
            f"{'Interrupted. ' if self.interrupted else ''}{counted(len(self.kernels), 'kernel')}: {len(compiled):,} "
            f"compiled in {seconds:.1f} s of compiler time, {len(self.artifacts) - len(compiled):,} already in the "
            f"cache, {len(self.failures):,} failed"
            f"{f', {left:,} left: the same command continues' if left else ''}"
        )

    @property
    def reasons(self) -> list[str]:
        """Lines that give each reason of failure once, with the first kernels that it stopped."""
        stopped: dict[str, list[str]] = {}
        for failure in self.failures:
            known = self.catalog.refusal(failure.kernel)
            said = f"Error: {why_not(failure.kernel, known)}" if known else failure.error.printed
            stopped.setdefault(said, []).append(failure.kernel.name)
        lines: list[str] = []
        for reason, names in stopped.items():
            named = [name for name in names if name not in reason]
            lines += [reason, *(f"    {name}" for name in named[:NAMED])]
            lines += [f"    and {counted(len(named) - NAMED, 'more kernel')}"] if len(named) > NAMED else []
        return lines


def _status(artifact: Artifact) -> str:
    return "cached" if artifact.cached else "compiled"


@dataclass(frozen=True)
class Shard:
    """One of several builders' part of any list of kernels: the parts are disjoint, together the list."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard written as ``2/8``: the second of eight.

        Raises:
            UsageError: ``text`` is not a shard.
        """
        found = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", text)
        if found is None or int(found[1]) > int(found[2]):
            raise UsageError(f"--shard {text} is not allowed", hint="As in --shard 2/8, the second of eight builders.")
        return cls(int(found[1]), int(found[2]))

    def part(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """The builder's part of ``kernels``."""
        return [kernel for kernel in kernels if int(kernel.id[:15], 16) % self.of == self.number - 1]


EVERYTHING = Shard(1, 1)
"""The part of a builder that is alone."""


def kernels_to_build(
    catalog: Catalog, where: str, arch: str, limit: int | None = None, of: str | None = None
) -> tuple[list[Kernel], int]:
    """The kernels of ``arch`` that meet the expression ``where``; the arch is populated if necessary.

    Those of the operation ``of``; None: of each that has the columns.

    An AMD arch is populated at the revision of the CK checkout if there is one.

    Returns:
        The kernels, and the number of those left out because selection never takes them (``hw_valid = 0``). An
        expression that names ``hw_valid`` decides for itself: none is left out.

    Raises:
        UsageError, SpecError, DeviceError: as :meth:`Catalog.populate`.
        QueryError, RegistryError: as :meth:`Catalog.kernels`.
    """
    arch = resolve_arch(arch)
    populate_to_build(catalog, arch, of or DEFAULT)
    if re.search(r"\bhw_valid\b", where, re.IGNORECASE):
        return catalog.kernels(where, arch=arch, limit=limit, operation=of), 0
    kernels = list(catalog.rows.kernels(where, arch, limit, of, runnable=True))
    return kernels, catalog.rows.count(where, arch, of, runnable=False)


def about_left_out(count: int, arch: str, of: str | None) -> str:
    """What to say of kernels that :func:`kernels_to_build` left out."""
    arch, operation = resolve_arch(arch), f" --operation {of}" if of else ""
    return (
        f"Left out: {counted(count, 'kernel')} of {arch} that the hardware cannot run, or that are known to be wrong "
        f"(hw_valid = 0).\nHint: `catalog rules{operation} --arch {arch} --kind hardware` says why. "
        "An expression with hw_valid includes them."
    )


def populate_to_build(catalog: Catalog, arch: str, of: str) -> None:
    """Populate ``arch`` unless the catalog has it; an AMD arch at the revision of the CK checkout if there is one.

    Raises:
        UsageError, SpecError, DeviceError, RegistryError: as :meth:`Catalog.populate`.
    """
    catalog.spec(arch, operation=of)  # report an unknown arch before anything else
    if not catalog.rows.populated(arch, of):
        revision = _checkout_revision(of) if backend_of(arch) is HIP else None
        catalog.populate(arch, revision=revision, operation=of)


def build_fallback(catalog: Catalog, arch: str, of: str = DEFAULT) -> Path:
    """Build one known-good kernel of an AMD arch; return its library's path.

    Args:
        catalog: where the kernel is a row; it is populated with its revision.
        arch: an AMD arch.
        of: name of the operation.

    Raises:
        BuildError, ToolchainError: there is no checkout or no compiler, or the kernel does not compile.
        UsageError: ``arch`` is not an AMD arch, or the operation or the revision lacks such a kernel.
    """
    computes = operation(of)
    arch = str(catalog.spec(arch, operation=computes.name).arch)
    if backend_of(arch) is not HIP:
        raise UsageError(f"{arch} is not an AMD arch", hint="For example: catalog fallback --arch gfx942")
    revision, where = computes.fallback()
    catalog.populate(arch, revision=revision, operation=computes.name)
    kernels = catalog.kernels(f"revision = '{revision}' AND {where}", arch=arch, operation=computes.name)
    if not kernels:
        raise UsageError(f"{arch} has no such kernel at revision {revision}: {where}")
    return catalog.build(kernels[0]).path


def _checkout_revision(of: str) -> str | None:
    try:
        return operation(of).checkout_revision()
    except BuildError:
        return None  # each kernel's build will fail with the reason
