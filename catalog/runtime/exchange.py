"""Export of a catalog's built kernels to a bundle, and import from one."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from catalog import settings
from catalog.backends import GpuBackend, backend_of
from catalog.build.bundle import FORMAT as BUNDLE_FORMAT
from catalog.build.bundle import Bundle, Entry, Manifest, abi, library_of, open_bundle, placed, write_bundle
from catalog.build.cache import Cache
from catalog.errors import BundleError, UsageError
from catalog.files import StrPath
from catalog.messages import counted
from catalog.registry.artifacts import quarantined_artifacts
from catalog.registry.kernels import kernel_of, populate_command
from catalog.registry.query import kernel_ids
from catalog.runtime.demand import Demand
from catalog.runtime.manifests import record_manifest, valid_timings
from catalog.runtime.traces import read_trace
from catalog.schema.lineage import LINEAGE, LINEAGE_OF_POPULATION, OWN_SPACES, Lineage

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog

_MEMBER_BYTES = 2048
"""More than a member of a zip archive takes besides its content, and than an empty bundle takes."""


@dataclass(frozen=True)
class Exported:
    """A written bundle; ``unbuilt`` counts selected kernels without a library in the cache.

    ``covered`` is the share of a trace's calls, or of their time, whose kernels are all in the bundle; None without a
    trace.
    """

    libraries: int
    timings: int
    unbuilt: int
    bytes: int
    covered: float | None = None


@dataclass(frozen=True)
class Usage:
    """What a bundle must serve, and how large it may be.

    ``weights`` says how much each set of kernels is used: the number of calls of a plan, or their time.
    """

    weights: Mapping[frozenset[str], float]
    most_bytes: int | None

    @classmethod
    def of_trace(cls, catalog: Catalog, path: StrPath, by: str, most_bytes: int | None) -> Usage:
        """The use of the kernels that are selected now for the calls of a trace.

        Args:
            catalog: selects the kernels.
            path: the trace.
            by: ``calls`` or ``time``.
            most_bytes: the size limit of the bundle; None for none.

        Raises:
            UsageError: the trace is wrong, or ``by`` is unknown.
        """
        if by not in ("calls", "time"):
            raise UsageError(f"--by {by} is not allowed", hint="Allowed: calls, time.")
        plans = Demand.of_trace(path, None).answers(catalog).plans
        weights: dict[frozenset[str], float] = {}
        for used in read_trace(path).used:
            kernels = frozenset(kernel.id for kernel in plans.get((used.problem, used.wanted), ()))
            weights[kernels] = weights.get(kernels, 0) + (used.calls if by == "calls" else used.total_ms)
        return cls(weights, most_bytes)

    @property
    def kernels(self) -> set[str]:
        """The ids of all kernels that are used."""
        return set().union(*self.weights)

    def chosen(self, sizes: Mapping[str, int]) -> set[str]:
        """The kernels to take, by their sizes in bytes: those of the most used plans first, as long as they fit.

        A plan with a kernel that has no size is left out.
        """
        taken, left = set[str](), None if self.most_bytes is None else self.most_bytes - _MEMBER_BYTES
        for kernels, _ in sorted(self.weights.items(), key=lambda item: (-item[1], sorted(item[0]))):
            size = sum(sizes.get(kernel, 0) for kernel in kernels - taken)
            if kernels <= sizes.keys() and (left is None or size <= left):
                taken |= kernels
                left = None if left is None else left - size
        return taken

    def covered(self, taken: Set[str]) -> float:
        """The share of the use that the kernels ``taken`` serve, from 0 to 1."""
        total = sum(self.weights.values())
        return sum(weight for kernels, weight in self.weights.items() if kernels and kernels <= taken) / (total or 1)


@dataclass(frozen=True)
class Imported:
    """An imported bundle: the number of libraries that are new, already present, or without a row in the catalog."""

    new: int
    present: int
    no_rows: int
    timings: int


def export_bundle(
    catalog: Catalog,
    where: str,
    path: StrPath,
    arch: str | None = None,
    operation: str | None = None,
    *,
    usage: Usage | None = None,
) -> Exported:
    """Write the built libraries of the kernels that ``where`` selects, with their timings, to ``path``.

    Only kernels of ``operation`` are exported; None: of every operation that has the columns. With ``usage``, only
    those that it needs, within its limit. Quarantined libraries are not exported.

    Raises:
        QueryError, RegistryError: the expression is invalid or not allowed, or there is no catalog.
        UsageError: no kernel is selected, or none of them is built.
        CacheError: other users have access to the cache folder.
        BundleError: the file cannot be written; no file is left behind.
    """
    chosen = kernel_ids(catalog.path, where, arch, operation)
    if usage is not None:
        chosen &= usage.kernels
    if not chosen:
        raise UsageError(f"no kernel meets {where!r}{' and is used' if usage else ''}: nothing to export")
    cache = Cache(settings.settings().cache_dir)
    entries = built_entries(catalog.connection, cache, chosen)
    if not entries:
        raise UsageError(
            f"none of {counted(len(chosen), 'kernel')} is in the cache {cache.folder}",
            hint="Build them with catalog build.",
        )
    built, covered = {entry.kernel.id for entry in entries}, None
    if usage is not None:
        taken = usage.chosen(_sizes(entries, cache, catalog.connection))
        entries, covered = [entry for entry in entries if entry.kernel.id in taken], usage.covered(taken)
        if not entries:
            raise UsageError("the kernels of no plan are built and fit into the size limit")
    timings = valid_timings(catalog.connection, {entry.artifact.key for entry in entries})
    manifest = Manifest(
        format=BUNDLE_FORMAT,
        abi=abi(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        entries=tuple(entries),
        timings=timings,
    )
    size = write_bundle(Path(path), manifest, cache)
    return Exported(len(entries), len(timings), len(chosen - built), size, covered)


def _sizes(entries: Sequence[Entry], cache: Cache, connection: sqlite3.Connection) -> dict[str, int]:
    """Bytes that each kernel's libraries and timings add to a bundle at most, by the kernel's id.

    The manifest is counted as if it were not compressed.
    """
    sizes: dict[str, int] = {}
    for entry in entries:
        library = zlib.compress(library_of(entry, cache))
        stated = (entry, *valid_timings(connection, {entry.artifact.key}))
        size = len(library) + _MEMBER_BYTES + sum(len(row.model_dump_json(indent=4)) for row in stated)
        sizes[entry.kernel.id] = sizes.get(entry.kernel.id, 0) + size
    return sizes


def built_entries(connection: sqlite3.Connection, cache: Cache, chosen: Set[str]) -> list[Entry]:
    """The intact entries of these rows with this version's ABI, ordered by key."""
    entries = []
    for key in sorted(cache.all_keys() - quarantined_artifacts(connection).keys()):
        stored = cache.read_record(key)
        if stored is None or stored[0].kernel_id not in chosen or stored[1].abi != abi():
            continue
        record, origin = cache.load(key), stored[1]
        if record is not None:
            kernel = kernel_of(connection, record.kernel_id)
            if kernel is None:
                continue
            entries.append(Entry(kernel=kernel, name=origin.kernel_name, artifact=record, source=origin.source))
    return entries


def import_bundle(catalog: Catalog, path: StrPath, *, trust: bool) -> Imported:
    """Import the libraries and timings of a bundle; importing it again changes nothing.

    A lineage that the catalog lacks is populated. A library whose row is not in the catalog is cached but not recorded.

    Args:
        catalog: the catalog for the records; the settings name the cache for the libraries.
        path: the bundle.
        trust: whether the bundle comes from a source whose code may run.

    Raises:
        UsageError: ``trust`` is false.
        BundleError: the bundle is damaged, or is for another version or machine; or the cache cannot be written.
        RegistryError: the catalog cannot be written. In all of these cases nothing from the bundle is kept.
    """
    cache = Cache(settings.settings().cache_dir)
    with open_bundle(Path(path), _why_not_here) as bundle:
        if not trust:
            raise UsageError(
                f"{path}: the libraries of a bundle are code, which runs with all of your rights",
                hint="Add --trust if you trust its source.",
            )
        _populate(catalog, bundle)
        try:
            with placed(bundle, cache) as new, catalog.writing() as connection:
                known, timings = record_manifest(connection, bundle.manifest)
        except (OverflowError, sqlite3.IntegrityError) as error:
            raise BundleError(f"{path}: its manifest has values that no catalog can have: {error}") from None
        catalog.forget()
        entries = len(bundle.manifest.entries)
        return Imported(len(new), entries - len(new), entries - known, timings)


def _why_not_here(arch: str, isa: str) -> str | None:
    """Why a library is not for this machine. GPU libraries are stored anywhere; host libraries must run here."""
    backend = backend_of(arch)
    if arch not in backend.isas:
        return f"this version does not know arch {arch!r}"
    if isa != backend.isas[arch]:
        return f"ISA {isa!r} is not the ISA of {arch}"
    return None if isinstance(backend, GpuBackend) else backend.why_unavailable(arch)


def _populate(catalog: Catalog, bundle: Bundle) -> None:
    """Populate the lineages of a bundle's rows that the catalog lacks."""
    asked = f"SELECT {', '.join(LINEAGE)} FROM {LINEAGE_OF_POPULATION}"
    there = {Lineage(*row) for row in catalog.connection.execute(asked)}
    for lineage in sorted({entry.kernel.lineage for entry in bundle.manifest.entries} - there):
        if lineage.space not in OWN_SPACES:
            continue  # a sweep may have millions of rows: only the user populates one
        try:
            catalog.populate(**lineage.wanted.keywords, operation=lineage.operation)
        except UsageError as error:
            adopts = f"Adopt the same checkout first: {populate_command(lineage, 'CHECKOUT')}"
            raise BundleError(
                f"this catalog lacks the bundle's kernels: {error.message}", hint=adopts if lineage.base else error.hint
            ) from None
