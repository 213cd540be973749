"""The file of a catalog: its connection, the locks around it, and the rows populated from specs.

Three kinds of locks protect against different things. :attr:`CatalogFile.lock` serialises the threads of a process on
the connection and on everything cached from the file. SQLite's own locks serialise writing processes. A fork holds the
locks of all files (``_fork`` serialises forks), because a connection must not be in use while the process is copied.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import weakref
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from catalog.backends import spec_folders
from catalog.errors import RegistryError, UsageError
from catalog.forks import Lock
from catalog.ops import DEFAULT, operation, operation_of
from catalog.registry.connection import connect, leak
from catalog.registry.kernels import populate_command
from catalog.registry.transactions import transaction
from catalog.registry.views import rows_of
from catalog.runtime.here import resolve_arch
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.lineage import BASE, LINEAGE_OF_POPULATION, OWN_SPACES, Lineage, Wanted
from catalog.schema.spec_files import DEFAULT_REVISION, find_spec, known_archs, load_spec_file

if TYPE_CHECKING:
    from catalog.registry.adopted import Forgotten
    from catalog.rules.adopt import Adopted, Nearest
    from catalog.rules.populate import Populated, Progress, Request
    from catalog.schema.kernel import Kernel

_log = logging.getLogger(__name__)

_FORK_WAIT_SECONDS = 10.0
"""Seconds that a fork waits for another thread that is using the file."""


def spec_path(arch: str, revision: str | None = None, space: str | None = None, of: str = DEFAULT) -> Path:
    """The path of the spec of ``arch``, in the data folder or in the package of the arch's backend or operation.

    Raises:
        UsageError, SpecError, DeviceError: as :meth:`catalog.Catalog.spec`.
        BackendError: two backends claim the arch.
    """
    arch = resolve_arch(arch)
    return find_spec(spec_folders(arch, of), arch, revision, space)


def read_spec(arch: str, revision: str | None = None, space: str | None = None, of: str = DEFAULT) -> ArchSpec:
    """The spec of ``arch``; see :meth:`catalog.Catalog.spec`."""
    return load_spec_file(spec_path(arch, revision, space, of), space, of)


def known_specs(arch: str, of: str = DEFAULT) -> list[ArchSpec]:
    """The specs of ``arch``, one for each known revision.

    Raises:
        UsageError: there is no such arch.
        SpecError: a spec file is wrong.
    """
    arch = resolve_arch(arch)
    folders = spec_folders(arch, of)
    find_spec(folders, arch)  # report an unknown arch
    return [load_spec_file(path, of=of) for path in known_archs(*folders)[arch].values()]


def nearest_of(arch: str, variant: str, receipt: int, names: Set[str]) -> Nearest:
    """The known revision of ``arch`` whose kernels of ``receipt`` have the most of ``names``.

    Raises:
        UsageError, SpecError: as :func:`known_specs`.
    """
    from catalog.rules.adopt import nearest
    from catalog.rules.populate import Request

    specs = (spec for spec in known_specs(arch) if variant in spec.variants and receipt in spec.receipt_numbers)
    with closing(sqlite3.connect(":memory:")) as connection:
        return nearest(connection, names, (Request(spec, variant, (receipt,)) for spec in specs))


@dataclass(frozen=True, slots=True)
class Held:
    """A lineage in a file: ``whole`` unless the populate was restricted; ``compute_units`` of the arch, if known."""

    lineage: Lineage
    compute_units: int | None
    whole: bool


class Watcher(Protocol):
    """An object that caches something read from a file."""

    def rows_changed(self) -> None:
        """Called when kernels, rules or timings have changed."""

    def disconnected(self) -> None:
        """Called when the connection is closed; queries need a new one."""

    def reconsider(self, kernel_ids: Collection[str]) -> None:
        """Called when these kernels have failed or can be used again."""


class CatalogFile:
    """One SQLite file, created on first use if it does not exist.

    Attributes:
        path: path of the file.
        lock: held by the thread that uses the connection.
        watchers: objects that are notified of changes made through this object; weak references.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = Lock()
        self.watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self._connection: sqlite3.Connection | None = None
        self._held = False
        _files[id(self)] = self

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection of this object, opened when first used. A fork closes it, so do not keep it across a fork.

        Raises:
            RegistryError: the file cannot be opened or is not a catalog.
        """
        if self._connection is None:
            with self.lock:
                # Check again: another thread may have opened it while this one waited for the lock.
                self._connection = self._connection or connect(self.path)
        return self._connection

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A write transaction on this object's connection; other threads wait for the connection until it ends.

        Raises:
            RegistryError: as :attr:`connection`, or the file cannot be written, in which case nothing changes.
        """
        with self.lock, transaction(self.connection):
            yield self.connection

    def rows_changed(self) -> None:
        """Notify the watchers that rows have changed."""
        for watcher in self.watchers:
            watcher.rows_changed()

    def reconsider(self, kernel_ids: Collection[str]) -> None:
        """Notify the watchers that these kernels have failed or can be used again."""
        for watcher in self.watchers:
            watcher.reconsider(kernel_ids)

    def populate(self, request: Request, *, force: bool = False, on_progress: Progress | None = None) -> Populated:
        """Materialise the rows of ``request`` unless they are up to date with the spec.

        New rows have the timings of installed packages.

        Raises:
            UsageError, SpecError, RegistryError: as :func:`catalog.rules.populate.populate`.
        """
        from catalog.rules.populate import populate

        with self.lock:
            populated = populate(self.connection, request, force=force, on_progress=on_progress)
            if not populated.unchanged:
                from catalog.runtime.manifests import record_installed

                record_installed(self.connection)
                self.rows_changed()
        return populated

    def held(self, wanted: Wanted) -> Held:
        """The lineage in the file; populated if it is missing, and populated again if it is whole and outdated.

        An adopted lineage stays as it is: only its checkout could make it again.

        Raises:
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`catalog.Catalog.populate`.
        """
        with self.lock:
            held = self._find(wanted)
            if held is None:
                self._populate(wanted)
            elif held.whole and not held.lineage.base:
                try:
                    self._populate(wanted._replace(revision=held.lineage.revision))
                except RegistryError as error:  # the existing rows can still answer
                    arch = held.lineage.arch
                    _log.warning("%s: the outdated kernels of %s are kept: %s", self.path, arch, error)
            held = self._find(wanted)
        assert held is not None, "a populate leaves its record"  # noqa: S101
        return held

    def _populate(self, wanted: Wanted) -> None:
        from catalog.rules.populate import Request

        self.refuse_adopted(wanted)
        self.populate(Request(read_spec(wanted.arch, wanted.revision, of=wanted.operation), wanted.variant))

    def refuse_adopted(self, wanted: Wanted) -> None:
        """Refuse to make rows of an adopted revision from a spec.

        Raises:
            UsageError: the revision was adopted; the hint is the command that adopts it for this arch and variant.
        """
        from catalog.registry.adopted import records_of

        if wanted.revision is None:
            return
        records = records_of(self.connection, wanted.operation, wanted.revision)
        for its, record in records.items():
            asked = replace(its, arch=resolve_arch(wanted.arch), variant=wanted.variant)
            about = operation(wanted.operation).about_variant
            there = "; ".join(f"{one.arch}{about(one.variant)}" for one in records)
            raise UsageError(
                f"revision {wanted.revision} was adopted, for {there}: only its checkout lists its kernels for "
                f"{asked.arch}{about(asked.variant)}",
                hint=f"Run: {populate_command(asked, record.root)}",
            )

    def adopt(
        self,
        wanted: Wanted,
        root: Path,
        *,
        timeout: float | None = None,
        receipts: Sequence[int] = (),
        force: bool = False,
        on_progress: Progress | None = None,
    ) -> Adopted:
        """Adopt the checkout at ``root`` as the revision of ``wanted``; None: named after its commit or digest.

        Raises:
            UsageError, GeneratorError, SpecError, RegistryError: as :func:`catalog.rules.adopt.adopt`.
        """
        from catalog.build.generators import TIMEOUT_SECONDS
        from catalog.rules.adopt import adopt

        specs = known_specs(wanted.arch, wanted.operation)
        generator = operation(wanted.operation).generator(root, timeout or TIMEOUT_SECONDS)
        with self.lock:
            adopted = adopt(
                self.connection,
                generator,
                specs,
                wanted.variant,
                label=wanted.revision,
                receipts=receipts,
                force=force,
                on_progress=on_progress,
            )
            if not adopted.unchanged:
                self.rows_changed()
        return adopted

    def forget(self, revision: str, of: str = DEFAULT) -> Forgotten:
        """Delete an adopted revision.

        Raises:
            UsageError, RegistryError: as :func:`catalog.registry.adopted.forget`.
        """
        from catalog.registry.adopted import forget

        with self.lock:
            forgotten = forget(self.connection, of, revision)
            self.rows_changed()
        return forgotten

    def spec(self, arch: str, revision: str | None = None, space: str | None = None, of: str = DEFAULT) -> ArchSpec:
        """The spec of ``arch``; for an adopted revision, that of its nearest known one with the checkout's receipts.

        Raises:
            UsageError, SpecError, DeviceError: as :meth:`catalog.Catalog.spec`.
        """
        try:
            return read_spec(arch, revision, space, of)
        except UsageError as error:
            from catalog.registry.adopted import records_of, revisions_of

            arch = resolve_arch(arch)
            records = records_of(self.connection, of, revision) if revision is not None else {}
            for its, record in records.items():
                if its.arch == arch and space in (None, *OWN_SPACES):
                    from catalog.rules.adopt import adopted_spec

                    base = read_spec(arch, record.base, space, of)
                    return adopted_spec(base, str(revision), tuple(map(int, record.receipts.split())))
            self.refuse_adopted(Wanted(arch, revision, operation=of))
            adopted = revisions_of(self.connection, of, arch)
            if adopted and revision is not None:
                error.hint = f"{error.hint} Adopted: {', '.join(adopted)}."
            raise

    def _find(self, wanted: Wanted) -> Held | None:
        """The lineage in the file now, if any: the default one of several revisions; sweeps do not count."""
        row = self.connection.execute(
            f"SELECT *, receipts = '' AND restriction = '' AS whole, {BASE} AS base FROM {LINEAGE_OF_POPULATION} "
            "WHERE operation = :operation AND arch = :arch AND variant = :variant "
            "AND revision = coalesce(:revision, revision) "
            f"AND space IN ({', '.join(map(repr, OWN_SPACES))}) ORDER BY revision <> :default, revision LIMIT 1",
            {**wanted._asdict(), "arch": resolve_arch(wanted.arch), "default": DEFAULT_REVISION},
        ).fetchone()
        return None if row is None else Held(Lineage.of_row(row), row["compute_units"], bool(row["whole"]))

    def adopted_from(self, kernel: Kernel) -> str | None:
        """The path of the checkout that the revision of a kernel was adopted from; None if it was not adopted here."""
        from catalog.registry.adopted import records_of

        with self.lock:
            records = records_of(self.connection, kernel.operation, kernel.revision)
        return next((record.root for lineage, record in records.items() if lineage.arch == kernel.arch), None)

    def refusal(self, kernel: Kernel) -> str | None:
        """Why the headers that would compile the kernel cannot, according to its spec; None if they should."""
        lineage = (kernel.operation, kernel.arch, kernel.revision, kernel.space)
        with self.lock:
            rules = self.connection.execute(
                "SELECT scope, expr, reason FROM rule WHERE kind = 'headers' AND operation = ? AND arch = ? "
                "AND revision = ? AND space = ? ORDER BY scope, position",
                lineage,
            ).fetchall()
            broken = [rule for rule in rules if self._breaks(kernel, rule["expr"])]
        if not broken:
            return None
        reasons = [
            next((rule["reason"] for rule in broken if not rule["scope"] or revision in rule["scope"].split()), None)
            for revision in operation_of(kernel).headers_revisions(kernel)
        ]
        return reasons[0] if reasons and all(reasons) else None

    def _breaks(self, kernel: Kernel, expr: str) -> bool:
        row = f"SELECT 1 FROM {rows_of(kernel.operation)} WHERE id = ? AND NOT ({expr})"
        return self.connection.execute(row, [kernel.id]).fetchone() is not None

    def close(self) -> None:
        """Close the file; the next use opens it again, perhaps with other content."""
        with self.lock:
            self._close()
        self.rows_changed()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._forget_connection()

    def _forget_connection(self) -> None:
        self._connection = None
        for watcher in self.watchers:
            watcher.disconnected()

    def before_fork(self) -> None:
        """Close the file, and keep it closed until :meth:`after_fork`.

        SQLite connections must not cross a fork: the child's copy would claim the parent's locks. If another thread
        uses the file for too long, or this thread is in a transaction, the file stays open, and the child cannot use
        it.
        """
        self._held = self.lock.acquire(_FORK_WAIT_SECONDS)
        if self._held and self._connection is not None and not self._connection.in_transaction:
            with suppress(sqlite3.Error):
                self._close()

    def after_fork(self, *, child: bool) -> None:
        """Release the lock; in the child also abandon a connection that could not be closed before the fork."""
        if child and self._connection is not None:
            leak(self._connection, self.path)
            self._forget_connection()
        if self._held:
            self.lock.release()


_files: weakref.WeakValueDictionary[int, CatalogFile] = weakref.WeakValueDictionary()

_fork = Lock()
_forking: list[CatalogFile] = []


def _before_fork() -> None:
    _fork.acquire()  # serialise forks: there is only one list of the files that a fork holds
    for reference in _files.valuerefs():  # a list: other threads may create catalogs meanwhile
        file = reference()
        if file is not None:
            _forking.append(file)
            file.before_fork()


def _after_fork(*, child: bool) -> None:
    while _forking:
        _forking.pop().after_fork(child=child)
    _fork.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=partial(_after_fork, child=False),
    after_in_child=partial(_after_fork, child=True),
)
