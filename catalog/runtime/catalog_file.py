"""The catalog's file as a Python object: what it holds, and where that comes from."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.backends import spec_folders
from catalog.errors import RegistryError
from catalog.forks import Lock
from catalog.ops import operation
from catalog.ops.attention.traits import TRAITS
from catalog.registry import timings
from catalog.registry.connection import connect, leak
from catalog.registry.transactions import transaction
from catalog.runtime.devices.here import resolve_arch
from catalog.runtime.select import Population
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.kernel import Kernel
from catalog.schema.spec_files import DEFAULT_REVISION, OWN_SPACES, find_spec, load_spec_file

if TYPE_CHECKING:
    from typing_extensions import Self

    from catalog.registry.merge import Merged
    from catalog.rules.diff import Difference
    from catalog.rules.explain import Explanation
    from catalog.rules.parity import Comparison, Reference
    from catalog.rules.populate import Population as Populated
    from catalog.rules.populate import Progress
    from catalog.rules.restriction import Restriction

_log = logging.getLogger(__name__)

_FORK_WAIT_SECONDS = 10.0
"""How long a fork waits for another thread that is using the file."""


class CatalogFile:
    """The kernels of one SQLite file, which is made when it is not there.

    Args:
        path: the file; None: that of the settings.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else settings.settings().db
        self._lock = Lock()
        self._connection: sqlite3.Connection | None = None
        self._held = False
        _files[id(self)] = self

    def _file_changed(self) -> None:
        """Forget what was remembered of the file's content."""

    def _connection_closed(self) -> None:
        """Forget everything that refers to the connection."""

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection of this object, opened when first used. A fork closes it, so do not keep it across a fork.

        Raises:
            RegistryError: the file cannot be opened or is no catalog.
        """
        if self._connection is None:
            with self._lock:
                self._connection = self._connection or connect(self.path)
        return self._connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A write transaction on this object's connection, which no other thread uses meanwhile.

        Raises:
            RegistryError: as :attr:`connection`, or the file cannot be written; nothing is changed then.
        """
        with self._lock, transaction(self.connection):
            yield self.connection

    def spec(self, arch: str, revision: str | None = None, space: str | None = None) -> ArchSpec:
        """The spec of ``arch``; ``host`` is this machine's CPU. ``space``: its own, or a sweep of the dispatcher.

        Raises:
            UsageError: no such arch or revision.
            SpecError: a spec file is wrong.
            DeviceError: ``host``, and no host arch runs on this CPU.
        """
        return load_spec_file(self.spec_file(arch, revision, space), space)

    def spec_file(self, arch: str, revision: str | None = None, space: str | None = None) -> Path:
        """Where the spec of ``arch`` is: in the data folder, or beside the backend that brings it along.

        Raises:
            UsageError, SpecError, DeviceError: as :meth:`spec`.
            BackendError: two backends own it.
        """
        arch = resolve_arch(arch)
        return find_spec(spec_folders(arch), arch, revision, space)

    def populate(
        self,
        arch: str,
        *,
        revision: str | None = None,
        mask_impl: str = "generic",
        receipts: tuple[int, ...] = (),
        force: bool = False,
        space: str | None = None,
        restriction: Restriction | None = None,
        on_progress: Progress | None = None,
    ) -> Populated:
        """Materialise the kernels of ``arch``; a no-op when they are there, made from the same spec, unless ``force``.

        ``restriction`` leaves out a part of them; what was there of the same space, and is left out now, is deleted.

        Raises:
            UsageError, SpecError, DeviceError: as :meth:`spec`, or there is no such mask implementation or receipt.
            RegistryError: the file cannot be written; nothing is changed then.
        """
        from catalog.rules.populate import Request, populate
        from catalog.rules.restriction import NOTHING_LEFT_OUT

        with self._lock:
            spec = self.spec(arch, revision, space)
            request = Request(spec, mask_impl, receipts, restriction or NOTHING_LEFT_OUT)
            populated = populate(self.connection, request, force=force, on_progress=on_progress)
            if not populated.unchanged:
                self._file_changed()
        return populated

    def parity(
        self,
        arch: str,
        receipt: int,
        *,
        revision: str | None = None,
        mask_impl: str = "generic",
        reference: Reference | None = None,
    ) -> Comparison:
        """The names of ``receipt`` held against upstream's; ``arch`` is populated when it is not there.

        ``reference`` says where upstream's names come from: by default the lists of the data folder, otherwise a CK
        checkout's :func:`~catalog.ops.attention.upstream.live.find_generator`, whose own revision is the one to ask
            for.

        Raises:
            MissingReferenceError: there is no list for this arch, revision, mask implementation and receipt.
            GeneratorError: the checkout's generator gives no list.
            UsageError: the catalog was populated for other receipts, or with a part, only; or as :meth:`spec`.
            SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        from catalog.rules.parity import Lists, compare
        from catalog.rules.populate import Request

        spec = self.spec(arch, revision)
        with self._lock:
            self._populated(arch, spec.revision, mask_impl)
        request = Request(spec, mask_impl)
        names = (reference or Lists(settings.data_dir() / "parity")).names(request, receipt)
        with self._lock:
            return compare(self.connection, request, receipt, names)

    def diff(
        self, arch: str, before: str, after: str, *, mask_impl: str = "generic", receipt: int | None = None
    ) -> Difference:
        """What revision ``after`` of ``arch`` has that ``before`` has not, and the other way round.

        Raises:
            UsageError: no such arch, revision or receipt; or only a part of one of the two is populated.
            SpecError, RegistryError: as :meth:`populate`.
        """
        from catalog.rules.diff import difference
        from catalog.rules.populate import Request

        old, new = (Request(self.spec(arch, revision), mask_impl) for revision in (before, after))
        with self._lock:
            for request in (old, new):
                self._populated(arch, request.spec.revision, mask_impl)
            return difference(self.connection, old, new, receipt)

    def explain(
        self,
        traits: Mapping[str, Any],
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        limit: int = 5,
    ) -> Explanation:
        """Why kernels with these traits exist or not: the verdict of every rule, and the ``limit`` nearest kernels.

        Raises:
            UsageError: no family is stated; or as :meth:`populate`.
            SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        from catalog.rules.explain import explain

        with self._lock:
            population = self._populated(arch, revision, mask_impl)
            spec = self.spec(arch, population.revision)
            return explain(self.connection, spec, population.identity, traits, limit)

    def kernels(self, where: str, *, arch: str | None = None, limit: int | None = None) -> list[Kernel]:
        """The kernels that a SQL expression over the columns selects, in order of id.

        Raises:
            QueryError: the expression is wrong or refused, or the catalog has no such arch.
            RegistryError: there is no catalog yet, or it cannot be read.
        """
        from catalog.registry.query import Query, run

        asked = Query(where, arch and resolve_arch(arch), (*TRAITS.identity, *TRAITS), "id", limit)
        with run(self.path, asked) as result:
            return [operation().kernel.from_row(dict(zip(result.columns, row, strict=True))) for row in result]

    def refusal(self, kernel: Kernel) -> str | None:
        """Why the headers of the kernel's revision do not compile it, where its spec knows; None: they should."""
        population = (kernel.arch, kernel.revision, kernel.space)
        with self._lock:
            rules = self.connection.execute(
                "SELECT expr, reason FROM rule WHERE kind = 'headers' AND arch = ? AND revision = ? AND space = ? "
                "ORDER BY position",
                population,
            ).fetchall()
            for expr, reason in rules:
                broken = f"SELECT 1 FROM kernel WHERE id = ? AND NOT ({expr})"
                if self.connection.execute(broken, [kernel.id]).fetchone() is not None:
                    return str(reason)
        return None

    def rules(
        self,
        arch: str | None = None,
        *,
        revision: str | None = None,
        family: str | None = None,
        kind: str | None = None,
    ) -> list[list[Any]]:
        """The rules of ``arch``, which is populated when it is not there, or of every arch in the file.

        Raises:
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        from catalog.rules.table import list_rules

        with self._lock:
            if arch is not None:
                revision = self.spec(arch, revision).revision
                self._populated(arch, revision, "generic")
            there = self.connection.execute(
                "SELECT DISTINCT arch, revision, space FROM population WHERE arch = coalesce(:arch, arch) "
                "AND revision = coalesce(:revision, revision) ORDER BY arch, revision, space",
                {"arch": None if arch is None else resolve_arch(arch), "revision": revision},
            ).fetchall()
            specs = [self.spec(*row) for row in there]
            return [row for spec in specs for row in list_rules(self.connection, spec, family=family, kind=kind)]

    def misses(self, arch: str) -> list[tuple[str, int]]:
        """Keys of problems that were selected for ``arch`` and not measured since, with counts, the most wanted first.

        One key stands for all problems of its kind of about the same size: no extent is more than twice another's.

        Raises:
            RegistryError: the file cannot be opened or is no catalog.
        """
        with self._lock:
            return timings.misses(self.connection, arch)

    def merge(self, paths: Sequence[Path]) -> list[Merged]:
        """Take over the artifacts' records and the timings of other catalogs, all of them or nothing.

        Raises:
            UsageError: one of ``paths`` is this catalog.
            RegistryError: one is no catalog, is damaged or from a newer version, or this file cannot be written.
        """
        from catalog.registry.merge import merge

        with self._lock:
            merged = merge(self.connection, self.path, paths)
            self._file_changed()
        return merged

    def built(self, kernels: Sequence[Kernel]) -> int:
        """How many of ``kernels`` were built on this machine before, by the file; the cache may have lost some.

        Raises:
            RegistryError: the file cannot be opened or is no catalog.
        """
        asked = json.dumps([kernel.id for kernel in kernels])
        here = "SELECT count(*) FROM kernels WHERE built AND id IN (SELECT value FROM json_each(?))"
        with self._lock:
            return int(self.connection.execute(here, (asked,)).fetchone()[0])

    def populated(self, arch: str) -> bool:
        """Whether the file holds kernels of ``arch``, of any revision.

        Raises:
            RegistryError, DeviceError: as :meth:`populate`.
        """
        with self._lock:
            there = self.connection.execute("SELECT 1 FROM population WHERE arch = ?", (resolve_arch(arch),)).fetchone()
        return there is not None

    def _populated(self, arch: str, revision: str | None, mask_impl: str) -> Population:
        """As :meth:`_population`; populated when it is not there, anew when it is whole and its spec has changed."""
        population = self._population(arch, revision, mask_impl)
        if population is None:
            self.populate(arch, revision=revision, mask_impl=mask_impl)
        elif population.whole:
            try:
                self.populate(arch, revision=population.revision, mask_impl=mask_impl)
            except RegistryError as error:
                _log.warning("%s: the kernels of %s are not made anew: %s", self.path, population.arch, error)
        population = self._population(arch, revision, mask_impl)
        assert population is not None, "a populate leaves its population"  # noqa: S101
        return population

    def _population(self, arch: str, revision: str | None, mask_impl: str) -> Population | None:
        """What the file holds of ``arch``: of several revisions the default one; sweeps do not count."""
        row = self.connection.execute(
            "SELECT arch, revision, space, mask_impl, compute_units, receipts = '' AND restriction = '' AS whole "
            "FROM population "
            "WHERE arch = :arch AND mask_impl = :mask_impl AND revision = coalesce(:revision, revision) "
            f"AND space IN ({', '.join(map(repr, OWN_SPACES))}) ORDER BY revision <> :default, revision LIMIT 1",
            {"arch": resolve_arch(arch), "mask_impl": mask_impl, "revision": revision, "default": DEFAULT_REVISION},
        ).fetchone()
        return None if row is None else Population(**dict(row))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, as the end of a ``with`` statement does; the object opens it again when it is used again."""
        with self._lock:
            self._close()
        self._file_changed()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._connection_closed()

    def before_fork(self) -> None:
        """Close the file, and keep it closed until :meth:`after_fork`.

        SQLite's connections must not cross a fork: the child's copy would claim the locks of the parent. If another
        thread uses the file for too long, or this thread is in a transaction, it stays open, and the child cannot use
        it.
        """
        self._held = self._lock.acquire(_FORK_WAIT_SECONDS)
        if self._held and self._connection is not None and not self._connection.in_transaction:
            with suppress(sqlite3.Error):
                self._close()

    def after_fork(self, *, child: bool) -> None:
        """Continue, in the parent or in the child."""
        if child and self._connection is not None:
            leak(self._connection, self.path)
            self._connection = None
            self._connection_closed()
        if self._held:
            self._lock.release()


_files: weakref.WeakValueDictionary[int, CatalogFile] = weakref.WeakValueDictionary()

_fork = Lock()
_forking: list[CatalogFile] = []


def _before_fork() -> None:
    _fork.acquire()  # threads that fork at the same time take turns
    for reference in _files.valuerefs():  # a list: other threads may make catalogs meanwhile
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
