"""The results of a catalog's builds and first runs: recorded in its file, and consulted by selection."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.errors import BuildError, CatalogError, RegistryError, ToolchainError, UsageError
from catalog.registry.artifacts import (
    drop_artifacts,
    quarantine_artifact,
    quarantined_artifacts,
    record_artifact,
    refused_keys,
    release_artifact,
)
from catalog.registry.timings import MAX_MISSES, record_misses
from catalog.registry.transactions import impatient, transaction

if TYPE_CHECKING:
    from catalog.build.cache import ArtifactRecord
    from catalog.build.first_runs import FirstRuns, Quarantine
    from catalog.runtime.builds import Builds
    from catalog.runtime.catalog_file import CatalogFile
    from catalog.runtime.guard import Guard
    from catalog.schema.kernel import Kernel
    from catalog.schema.problem import Problem

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Missed:
    """How often unmeasured problems of a bucket were selected for; written to the file once ``times`` is ``due``."""

    example: Problem
    arch: str
    times: int = 0
    unwritten: int = 0
    due: int = 1


class BuildLog:
    """Records and answers what is known about one catalog's libraries.

    Args:
        file: the catalog file that holds the records.
        builds: builds the libraries; its builder computes content keys.
    """

    def __init__(self, file: CatalogFile, builds: Builds) -> None:
        self._file = file
        self._builds = builds
        self._unrecorded: dict[str, str] = {}
        self._misses: dict[tuple[Any, ...], _Missed] = {}

    @cached_property
    def runs(self) -> FirstRuns:
        """The results of first runs on this machine."""
        from catalog.build.first_runs import FirstRuns

        return FirstRuns(settings.settings().cache_dir)

    @cached_property
    def guard(self) -> Guard:
        """Guards the first runs of this catalog's kernels."""
        from catalog.runtime.guard import Guard

        return Guard(self.runs, self.quarantine)

    def record(self, record: ArtifactRecord) -> None:
        """Record a build in the catalog; if that fails, a kernel that did not compile is remembered in this process."""
        self._file.reconsider({record.kernel_id})
        try:
            with self._file.writing() as connection:
                record_artifact(connection, record.columns)
                drop_artifacts(connection, self._builds.builder.cap.take_dropped())
        except (RegistryError, sqlite3.IntegrityError) as error:
            # The library is in the cache anyway: a catalog that cannot be written must not stop a run.
            _log.warning("%s: the build of %s is not recorded: %s", self._file.path, record.kernel_id, error)
            if record.status == "failed":
                self._unrecorded[record.kernel_id] = record.key

    def miss(self, problem: Problem, arch: str) -> None:
        """Count the selection of an unmeasured problem; the file is updated each time the count has doubled."""
        key = (arch, problem.form.kind, *problem.steps)
        missed = self._misses.get(key)
        if missed is None:
            if len(self._misses) >= MAX_MISSES:
                self.write_misses()
                self._misses.clear()
            missed = self._misses[key] = _Missed(problem, arch)
        missed.times += 1
        missed.unwritten += 1
        if missed.times >= missed.due:
            self.write_misses()

    def write_misses(self) -> None:
        """Write all pending counts, if the catalog can be written now."""
        with suppress(RegistryError, sqlite3.Error), self._file.lock:
            pending = [missed for missed in self._misses.values() if missed.unwritten]
            if not pending:
                return  # do not wait for the file
            for missed in pending:
                missed.due = 2 * missed.times
            connection = self._file.connection
            with impatient(connection), transaction(connection):
                for missed in pending:
                    record_misses(connection, missed.example, missed.arch, missed.unwritten)
                    missed.unwritten = 0

    def quarantine(self, quarantine: Quarantine) -> None:
        """Mark a library as quarantined in the catalog; if that fails, it is remembered in this process."""
        self._file.reconsider({quarantine.kernel_id})
        self._unrecorded[quarantine.kernel_id] = quarantine.key
        with suppress(RegistryError), self._file.writing() as connection:
            if quarantine_artifact(connection, quarantine.key, quarantine.log):
                del self._unrecorded[quarantine.kernel_id]

    def usable(self, kernel: Kernel, passed_over: bool) -> bool:
        """Whether a kernel may be selected; ``passed_over`` if its newest build failed or is quarantined.

        Such a kernel is usable again once its content key has changed, for example with a new compiler or header. If
        compiling is disabled, a kernel is usable only if it is in the cache.
        """
        if self._builds.may_compile and not passed_over and kernel.id not in self._unrecorded:
            return True
        statuses = ("failed", "quarantined") if self._builds.may_compile else ("quarantined",)
        try:
            return self._builds.builder.key_of(kernel) not in self._refused(kernel, statuses)
        except (BuildError, ToolchainError):
            return False

    def _refused(self, kernel: Kernel, statuses: tuple[str, ...]) -> set[str]:
        unrecorded = self._unrecorded.get(kernel.id)
        return refused_keys(self._file.connection, kernel.id, statuses) | ({unrecorded} if unrecorded else set())

    def quarantined(self) -> list[Quarantine]:
        """All quarantines in the cache or the catalog, oldest first."""
        known = {quarantine.key: quarantine for quarantine in self.runs.quarantined()}
        for key, quarantine in self._recorded().items():
            if not quarantine.over:
                known.setdefault(key, quarantine)
        return sorted(known.values(), key=lambda one: (one.when, one.kernel, one.key))

    def _recorded(self) -> dict[str, Quarantine]:
        """The quarantines in the catalog, by key."""
        logs = quarantined_artifacts(self._file.connection)
        if not logs:
            return {}
        from catalog.build.first_runs import Quarantine

        found = {key: Quarantine.of_log(log) for key, log in logs.items()}
        return {key: quarantine for key, quarantine in found.items() if quarantine is not None}

    def end_quarantines(self) -> None:
        """Release kernels whose quarantine has expired, if the catalog can be written now."""
        over = [key for key, quarantine in self._recorded().items() if quarantine.over]
        if over:
            with suppress(RegistryError), self._file.writing() as connection:
                for key in over:
                    self._let_go(connection, key)

    def _let_go(self, connection: sqlite3.Connection, key: str) -> None:
        record = self._builds.builder.cache.load(key)
        release_artifact(connection, key, "" if record is None else record.log)

    def release(self, which: str | None) -> list[Quarantine]:
        """Release the quarantined kernels with name or id ``which`` (None: all) and return their quarantines.

        Raises:
            UsageError: no quarantined kernel has this name or id.
            CatalogError: the cache or the catalog cannot be written.
        """
        released = [one for one in self.quarantined() if which in (None, one.kernel, one.kernel_id)]
        if which is not None and not released:
            raise UsageError(
                f"no quarantined kernel has the name or id {which!r}", hint="catalog cache quarantined lists them."
            )
        self._file.reconsider({one.kernel_id for one in released})
        try:
            with self._file.writing() as connection:
                for one in released:
                    self._let_go(connection, one.key)
                    self.runs.forget(one.key)
                    self._unrecorded.pop(one.kernel_id, None)
        except OSError as error:
            raise CatalogError(f"{error.filename}: {error.strerror}", hint="Nothing is released.") from None
        return released
