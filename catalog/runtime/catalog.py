"""The catalog as a Python object: populate, select, build."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.ops import DEFAULT, operation_of
from catalog.ops import operation as named_operation
from catalog.registry import timings
from catalog.runtime.builds import Builds
from catalog.runtime.catalog_file import CatalogFile, read_spec, spec_path
from catalog.runtime.devices.here import Devices, resolve_arch
from catalog.runtime.funnel import Step
from catalog.runtime.on_default import on_default
from catalog.runtime.plan import Plan
from catalog.runtime.planner import Planners
from catalog.runtime.select import Candidate, Choice
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import LINEAGE_OF_POPULATION, Wanted
from catalog.schema.problem import Problem

if TYPE_CHECKING:
    from typing_extensions import Self

    from catalog.build.builder import Artifact, Builder
    from catalog.registry.merge import Merged
    from catalog.rules.diff import Difference
    from catalog.rules.explain import Explanation
    from catalog.rules.parity import Comparison, Reference
    from catalog.rules.populate import Populated, Progress
    from catalog.rules.restriction import Restriction
    from catalog.runtime.build_log import BuildLog
    from catalog.runtime.devices import Device, DeviceInfo
    from catalog.runtime.devices.host.device import HostDevice


class Catalog:
    """The kernels of one SQLite file.

    ``Catalog.select(problem)`` works on the default catalog, ``Catalog(path).select(problem)`` on the file at ``path``;
    it is made when it is not there, and an arch is populated when it is first selected from.

    Args:
        path: the file; None: that of the settings.
        num_threads: threads of a host kernel, 0: every core that the process may use; None: as the settings say.
        compile: False: run what the cache of kernels has, and start no compiler; None: as the settings say.
    """

    def __init__(
        self, path: Path | str | None = None, *, num_threads: int | None = None, compile: bool | None = None
    ) -> None:
        self._file = CatalogFile(Path(path) if path is not None else settings.settings().db)
        self._devices = Devices(num_threads)
        self.builds = Builds(self._file, compile)
        self._planners = Planners(self._file, self.builds, self._devices)
        self._plans = self._planners.plans

    @classmethod
    @lru_cache(maxsize=1)
    def default(cls) -> Catalog:
        """The catalog of the settings: one object a process."""
        return cls()

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection to the file, opened when first used. A fork closes it, so do not keep it across a fork.

        Raises:
            RegistryError: the file cannot be opened or is no catalog.
        """
        return self._file.connection

    def writing(self) -> AbstractContextManager[sqlite3.Connection]:
        """A write transaction on :attr:`connection`, which no other thread uses meanwhile.

        Raises:
            RegistryError: as :attr:`connection`, or the file cannot be written; nothing is changed then.
        """
        return self._file.writing()

    @on_default
    def select(
        self, problem: Problem, *, arch: str = "host", revision: str | None = None, mask_impl: str = "generic"
    ) -> Plan:
        """The plan that answers ``problem`` on ``arch``.

        The choice is remembered: asking again for an equal problem runs no SQL, nor does a problem about which the same
        facts decide (:mod:`catalog.runtime.decisions`). :meth:`populate` and :meth:`forget` make it forget. A problem
        that was not measured is recorded as a miss, unless the settings say otherwise: see :meth:`misses`.

        Raises:
            SelectionError: no kernel answers the problem; says which trait or rule leaves none.
            ProblemError: the arch is this machine's, and a run would need more memory than it has.
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        key = (problem, arch, revision, mask_impl)
        plan = self._plans.get(key)
        if plan is None:
            with self._file.lock:
                plan = self._planners.plan(key)
        return plan

    def plan(self, problem: Problem, kernel: Kernel) -> Plan:
        """As :meth:`select`, but ``kernel``, one of :meth:`candidates`, runs as the stage of its family.

        Raises:
            SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`select`.
        """
        with self._file.lock:
            wanted = Wanted(kernel.arch, kernel.revision, kernel.variant, kernel.operation)
            return self._planners.of(wanted).plan_with(problem, kernel)

    @on_default
    def candidates(
        self,
        problem: Problem,
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        family: str | None = None,
        limit: int = 10,
        static: bool = False,
    ) -> list[Candidate]:
        """The best ``limit`` kernels for ``problem``, best first; the first is the one that :meth:`select` takes.

        ``family`` is a stage of the plan; by default the one that does most of the work. ``static``: in the order that
        holds before anything is measured.

        Raises:
            SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`select`.
        """
        with self._file.lock:
            selector = self._planners.of(Wanted(arch, revision, mask_impl, problem.operation)).selector
            family = family or operation_of(problem).main_stage(problem)
            return selector.candidates(problem, family, limit, static=static)

    def choice(
        self,
        problem: Problem,
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        limit: int = 10,
    ) -> Choice:
        """What :meth:`select` uses to choose the main stage of ``problem``, and the best ``limit`` candidates.

        Raises:
            SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`select`.
        """
        with self._file.lock:
            return self._planners.of(Wanted(arch, revision, mask_impl, problem.operation)).choice(problem, limit)

    def narrowing(
        self,
        problem: Problem,
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        family: str | None = None,
        limit: int = 5,
    ) -> tuple[tuple[Step, ...], list[Candidate]]:
        """How an arch's kernels narrow down to those that answer ``problem``, and the best ``limit`` of these.

        ``family`` is a stage of the plan; by default the one that does most of the work.

        Raises:
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        family = family or operation_of(problem).main_stage(problem)
        with self._file.lock:
            selector = self._planners.of(Wanted(arch, revision, mask_impl, problem.operation)).selector
            return selector.steps(problem, family), selector.kept(problem, family, limit)

    def forget(self) -> None:
        """Select anew from now on: what was measured has changed."""
        self._planners.forget()

    def measured_on(self, arch: str) -> int | None:
        """The device whose timings count: this machine's where it runs ``arch``, else the most measured one."""
        return self._planners.measured_on(arch)

    @property
    def builder(self) -> Builder:
        """Builds this catalog's kernels and records what came of it in table ``artifact``."""
        return self.builds.builder

    @property
    def build_log(self) -> BuildLog:
        """What builds and first runs of this catalog's kernels came to."""
        return self.builds.log

    def build(self, kernel: Kernel) -> Artifact:
        """The library of ``kernel``, compiled unless the cache has it.

        Without a usable compiler it is the newest sound library of this row in the cache, whatever compiled it, as when
        compiling is forbidden.

        Raises:
            BuildError: it does not compile; ``log`` is the compiler's output.
            MissingKernelError: it is not in the cache, and compiling is forbidden.
            ToolchainError: there is no usable compiler.
        """
        return self.builds.build(kernel)

    def refusal(self, kernel: Kernel) -> str | None:
        """Why the headers of the kernel's revision do not compile it, where its spec knows; None: they should."""
        return self._file.refusal(kernel)

    def host(self) -> HostDevice:
        """The host CPU as a device."""
        return self._devices.host

    def device(self, arch: str) -> Device[Any]:
        """What kernels of ``arch`` run on: the host CPU, or the first GPU of that arch which the process may use.

        It is the same object each time, of the host for all its archs.

        Raises:
            DeviceError: this machine has none; says what it lacks.
        """
        return self._devices.of(arch)

    def device_info(self, arch: str) -> DeviceInfo:
        """What timings of kernels of ``arch`` on this machine are tied to.

        Raises:
            DeviceError: as :meth:`device`.
        """
        return self._devices.info(arch)

    def spec(
        self, arch: str, revision: str | None = None, space: str | None = None, *, operation: str = DEFAULT
    ) -> ArchSpec:
        """The spec of ``arch``; ``host`` is this machine's CPU. ``space``: its own, or a sweep of the dispatcher.

        Raises:
            UsageError: no such arch or revision.
            SpecError: a spec file is wrong.
            DeviceError: ``host``, and no host arch runs on this CPU.
        """
        return read_spec(arch, revision, space, operation)

    def spec_file(
        self, arch: str, revision: str | None = None, space: str | None = None, *, operation: str = DEFAULT
    ) -> Path:
        """Where the spec of ``arch`` is: in the data folder, or beside the backend that brings it along.

        Raises:
            UsageError, SpecError, DeviceError: as :meth:`spec`.
            BackendError: two backends own it.
        """
        return spec_path(arch, revision, space, operation)

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
        operation: str = DEFAULT,
    ) -> Populated:
        """Materialise the kernels of ``arch``; a no-op when they are there, made from the same spec, unless ``force``.

        ``restriction`` leaves out a part of them; what was there of the same space, and is left out now, is deleted.

        Raises:
            UsageError, SpecError, DeviceError: as :meth:`spec`, or there is no such mask implementation or receipt.
            RegistryError: the file cannot be written; nothing is changed then.
        """
        from catalog.rules.populate import Request
        from catalog.rules.restriction import NOTHING_LEFT_OUT

        spec = read_spec(arch, revision, space, operation)
        request = Request(spec, mask_impl, receipts, restriction or NOTHING_LEFT_OUT)
        return self._file.populate(request, force=force, on_progress=on_progress)

    def parity(
        self,
        arch: str,
        receipt: int,
        *,
        revision: str | None = None,
        mask_impl: str = "generic",
        reference: Reference | None = None,
    ) -> Comparison:
        """The names of ``receipt`` compared with upstream's; ``arch`` is populated when it is not there.

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

        request = Request(read_spec(arch, revision), mask_impl)
        self._file.held(Wanted(arch, request.spec.revision, mask_impl))
        names = (reference or Lists(settings.data_dir() / "parity")).names(request, receipt)
        with self._file.lock:
            return compare(self._file.connection, request.lineage, receipt, names)

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

        old, new = (Request(read_spec(arch, revision), mask_impl) for revision in (before, after))
        with self._file.lock:
            for request in (old, new):
                self._file.held(Wanted(arch, request.spec.revision, mask_impl))
            return difference(self._file.connection, old, new, receipt)

    def explain(
        self,
        traits: Mapping[str, Any],
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        limit: int = 5,
        operation: str = DEFAULT,
    ) -> Explanation:
        """Why kernels with these traits exist or not: the verdict of every rule, and the ``limit`` nearest kernels.

        Raises:
            UsageError: no family is stated; or as :meth:`populate`.
            SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        from catalog.rules.explain import explain

        with self._file.lock:
            lineage = self._file.held(Wanted(arch, revision, mask_impl, operation)).lineage
            spec = read_spec(lineage.arch, lineage.revision, of=operation)
            return explain(self._file.connection, spec, lineage, traits, limit)

    def kernels(
        self, where: str, *, arch: str | None = None, limit: int | None = None, operation: str | None = None
    ) -> list[Kernel]:
        """The kernels that a SQL expression over the columns selects, in order of id.

        Those of ``operation``; None: of each that has the columns.

        Raises:
            QueryError: the expression is wrong or refused, or the catalog has no such arch.
            RegistryError: there is no catalog yet, or it cannot be read.
        """
        from catalog.registry.query import Query, operations_asked, run

        found: list[Kernel] = []
        for name in operations_asked(self.path, where) if operation is None else (operation,):
            kernel = named_operation(name).kernel
            columns = (*kernel.traits.identity, *kernel.traits)
            left = None if limit is None else limit - len(found)
            with run(self.path, Query(where, arch and resolve_arch(arch), columns, "id", left, name)) as result:
                found += [kernel.from_row(dict(zip(result.columns, row, strict=True))) for row in result]
        return found

    def rules(
        self,
        arch: str | None = None,
        *,
        revision: str | None = None,
        family: str | None = None,
        kind: str | None = None,
        operation: str = DEFAULT,
    ) -> list[list[Any]]:
        """The rules of ``arch``, which is populated when it is not there, or of every arch in the file.

        Raises:
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        from catalog.rules.table import list_rules

        with self._file.lock:
            if arch is not None:
                revision = read_spec(arch, revision, of=operation).revision
                self._file.held(Wanted(arch, revision, operation=operation))
            there = self._file.connection.execute(
                f"SELECT DISTINCT arch, revision, space FROM {LINEAGE_OF_POPULATION} "
                "WHERE operation = :operation AND arch = coalesce(:arch, arch) "
                "AND revision = coalesce(:revision, revision) ORDER BY arch, revision, space",
                {
                    "operation": operation,
                    "arch": None if arch is None else resolve_arch(arch),
                    "revision": revision,
                },
            ).fetchall()
            specs = [read_spec(row[0], row[1], row[2], operation) for row in there]
            return [row for spec in specs for row in list_rules(self._file.connection, spec, family=family, kind=kind)]

    def misses(self, arch: str) -> list[tuple[str, int]]:
        """Keys of problems that were selected for ``arch`` and not measured since, with counts, the most wanted first.

        One key stands for all problems of its kind of about the same size: no extent is more than twice another's.
        Counts that were not written yet are included.

        Raises:
            RegistryError: the file cannot be opened or is no catalog.
        """
        self.build_log.write_misses()
        with self._file.lock:
            return timings.misses(self._file.connection, arch)

    def merge(self, paths: Sequence[Path]) -> list[Merged]:
        """Take over the artifacts' records and the timings of other catalogs, all of them or nothing.

        Raises:
            UsageError: one of ``paths`` is this catalog.
            RegistryError: one is no catalog, is damaged or from a newer version, or this file cannot be written.
        """
        from catalog.registry.merge import merge

        with self._file.lock:
            merged = merge(self._file.connection, self.path, paths)
            self._file.rows_changed()
        return merged

    def built(self, kernels: Sequence[Kernel]) -> int:
        """How many of ``kernels`` were built on this machine before, by the file; the cache may have lost some.

        Raises:
            RegistryError: the file cannot be opened or is no catalog.
        """
        asked = json.dumps([kernel.id for kernel in kernels])
        here = (
            "SELECT count(DISTINCT kernel_id) FROM artifact WHERE status = 'built' AND NOT elsewhere "
            "AND dropped IS NULL AND kernel_id IN (SELECT value FROM json_each(?))"
        )
        with self._file.lock:
            return int(self._file.connection.execute(here, (asked,)).fetchone()[0])

    def populated(self, arch: str, operation: str = DEFAULT) -> bool:
        """Whether the file holds kernels of ``arch``, of any revision.

        Raises:
            RegistryError, DeviceError: as :meth:`populate`.
        """
        asked = f"SELECT 1 FROM {LINEAGE_OF_POPULATION} WHERE operation = ? AND arch = ?"
        with self._file.lock:
            return self._file.connection.execute(asked, (operation, resolve_arch(arch))).fetchone() is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, as the end of a ``with`` statement does; the object opens it again when it is used again."""
        if self._file.is_open:
            self.build_log.write_misses()
        self._file.close()
