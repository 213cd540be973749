"""The catalog as a Python object: populate, select."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.errors import RegistryError
from catalog.registry import connect
from catalog.runtime import timings
from catalog.runtime.devices import why_unavailable
from catalog.runtime.devices.here import Devices, resolve_arch
from catalog.runtime.narrow import Step
from catalog.runtime.on_default import on_default
from catalog.runtime.plan import Plan, Services
from catalog.runtime.select import Candidate, Choice, Population, Selector
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.fields import IDENTITY, TRAITS, Family
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem
from catalog.schema.spec_files import DEFAULT_REVISION, OWN_SPACES, load_spec
from catalog.schema.stages import MAIN_STAGE, stages_of

if TYPE_CHECKING:
    from catalog.build.builder import Artifact, Builder
    from catalog.merge import Merged
    from catalog.rules.diff import Difference
    from catalog.rules.explain import Explanation, Finding
    from catalog.rules.parity import Comparison, Reference
    from catalog.rules.populate import Population as Populated
    from catalog.rules.populate import Progress
    from catalog.rules.restriction import Restriction
    from catalog.runtime.devices import Device, DeviceInfo
    from catalog.runtime.devices.host import HostDevice
    from catalog.runtime.history import History

_log = logging.getLogger(__name__)

MEMO_SIZE = 65_536
"""Selections that a catalog remembers; beyond that it forgets all and starts anew."""


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
        self.path = Path(path) if path is not None else settings.settings().db
        self._compile = compile
        self._memo: dict[tuple[str, str, str | None, str], Plan] = {}
        self._lock = threading.RLock()
        self._selectors: dict[tuple[str, str | None, str], Selector] = {}
        self._devices = Devices(num_threads)

    @classmethod
    @lru_cache(maxsize=1)
    def default(cls) -> Catalog:
        """The catalog of the settings: one object a process."""
        return cls()

    @cached_property
    def connection(self) -> sqlite3.Connection:
        """The connection of this object, opened when first used.

        Raises:
            RegistryError: the file cannot be opened or is no catalog.
        """
        return connect(self.path)

    def spec(self, arch: str, revision: str | None = None, space: str | None = None) -> ArchSpec:
        """The spec of ``arch``; ``host`` is this machine's CPU. ``space``: its own, or a sweep of the dispatcher.

        Raises:
            UsageError: no such arch or revision.
            SpecError: a spec file is wrong.
            DeviceError: ``host``, and no host arch runs on this CPU.
        """
        return load_spec(settings.data_dir() / "arch_specs", resolve_arch(arch), revision, space)

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
                self._selectors.clear()
                self._memo.clear()
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
        checkout's :func:`~catalog.rules.live.find_generator`, whose own revision is the one to ask for.

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

    def kernels(self, where: str, *, arch: str | None = None, limit: int | None = None) -> list[Kernel]:
        """The kernels that a SQL expression over the columns selects, in order of id.

        Raises:
            QueryError: the expression is wrong or refused, or the catalog has no such arch.
            RegistryError: there is no catalog yet, or it cannot be read.
        """
        from catalog.query import Query, run

        asked = Query(where, arch and resolve_arch(arch), (*IDENTITY, *TRAITS), "id", limit)
        with run(self.path, asked, settings.settings().query_timeout) as result:
            return [Kernel.from_row(dict(zip(result.columns, row, strict=True))) for row in result]

    @on_default
    def select(
        self, problem: Problem, *, arch: str = "host", revision: str | None = None, mask_impl: str = "generic"
    ) -> Plan:
        """The plan that answers ``problem`` on ``arch``.

        The choice is remembered: asking again for an equal problem runs no SQL. :meth:`populate` makes it forget. A
        problem that was not measured is recorded as a miss, unless the settings say otherwise: see :meth:`misses`.

        Raises:
            SelectionError: no kernel answers the problem; says which trait or rule leaves none.
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        key = (problem.key, arch, revision, mask_impl)
        plan = self._memo.get(key)
        if plan is None:
            with self._lock:
                plan = self._plan(problem, arch, revision, mask_impl)
                if len(self._memo) >= MEMO_SIZE:
                    self._memo.clear()
                self._memo[key] = plan
                if settings.settings().record_misses:
                    self._note_miss(problem, plan.arch)
        return plan

    def _note_miss(self, problem: Problem, arch: str) -> None:
        neighbour = timings.nearest(self.connection, problem, self._measured_on(arch))
        if neighbour is None or not neighbour.same:
            self.history.miss(problem, arch)

    def misses(self, arch: str) -> list[tuple[str, int]]:
        """Keys of the problems that were selected for ``arch`` and not measured since, with how often, the most first.

        Raises:
            RegistryError: the file cannot be opened or is no catalog.
        """
        with self._lock:
            return timings.misses(self.connection, arch)

    def plan(self, problem: Problem, kernel: Kernel) -> Plan:
        """As :meth:`select`, but ``kernel``, one of :meth:`candidates`, runs as the stage of its family.

        Raises:
            SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`select`.
        """
        selected = self._plan(problem, kernel.arch, kernel.revision, kernel.mask_impl)
        kernels = tuple(kernel if stage.family is kernel.family else stage for stage in selected.kernels)
        return Plan(problem, selected.arch, kernels, replace(selected.services, reselect=lambda _: kernels))

    @on_default
    def candidates(
        self,
        problem: Problem,
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        family: Family | None = None,
        limit: int = 10,
        static: bool = False,
    ) -> list[Candidate]:
        """The best ``limit`` kernels for ``problem``, best first; the first is the one that :meth:`select` takes.

        ``family`` is a stage of the plan; by default the one that does most of the work. ``static``: in the order that
        holds before anything is measured.

        Raises:
            SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`select`.
        """
        with self._lock:
            selector = self._selector(arch, revision, mask_impl)
            return selector.candidates(problem, family or MAIN_STAGE[problem.op], limit, static=static)

    def choice(
        self,
        problem: Problem,
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        limit: int = 10,
    ) -> Choice:
        """What :meth:`select` goes by for the main stage of ``problem``, and the best ``limit`` candidates.

        Raises:
            SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`select`.
        """
        with self._lock:
            selector = self._selector(arch, revision, mask_impl)
            choice = selector.choice(problem, MAIN_STAGE[problem.op], limit)
            if not choice.candidates:
                selector.candidates(problem, MAIN_STAGE[problem.op])  # says why
        return choice

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

    def narrowing(
        self,
        problem: Problem,
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        family: Family | None = None,
        limit: int = 5,
    ) -> tuple[tuple[Step, ...], list[Candidate]]:
        """How an arch's kernels narrow down to those that answer ``problem``, and the best ``limit`` of these.

        ``family`` is a stage of the plan; by default the one that does most of the work.

        Raises:
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        family = family or MAIN_STAGE[problem.op]
        with self._lock:
            selector = self._selector(arch, revision, mask_impl)
            return selector.steps(problem, family), selector.kept(problem, family, limit)

    def rules(
        self,
        arch: str | None = None,
        *,
        revision: str | None = None,
        family: Family | None = None,
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

    def _plan(self, problem: Problem, arch: str, revision: str | None, mask_impl: str) -> Plan:
        def kernels(without: Set[str]) -> tuple[Kernel, ...]:
            with self._lock:
                selector = self._selector(arch, revision, mask_impl)
                main = selector.candidates(problem, MAIN_STAGE[problem.op], without=without)[0].kernel
                stages = stages_of(problem.op, main)
                return tuple(selector.candidates(problem, family, without=without)[0].kernel for family in stages)

        def choice(problem: Problem, limit: int) -> Choice:
            return self.choice(problem, arch=arch, revision=revision, mask_impl=mask_impl, limit=limit)

        def guard(*plan: Any) -> None:
            self.history.guard.check(*plan)  # imported with the first kernel that is loaded

        services = Services(choice, self.build, kernels, self.device, guard)
        return Plan(problem, resolve_arch(arch), kernels(frozenset()), services)

    def _selector(self, arch: str, revision: str | None, mask_impl: str) -> Selector:
        key = (arch, revision, mask_impl)
        if key not in self._selectors:
            population = self._populated(arch, revision, mask_impl)

            def forbidding(traits: Mapping[str, Any]) -> list[Finding]:
                explained = self.explain(traits, arch=arch, revision=population.revision, mask_impl=mask_impl, limit=1)
                return [finding for finding in explained.rejections if finding.kind == "constraint"]

            self._selectors[key] = Selector(
                self.connection,
                population,
                forbidding,
                usable=self.history.usable,
                device=lambda: self._measured_on(population.arch),
            )
        return self._selectors[key]

    def _measured_on(self, arch: str) -> int | None:
        """The device whose timings count: this machine's where it runs ``arch``, else the most measured one."""
        if why_unavailable(arch) is None:
            return timings.device_id(self.connection, self._devices.info(arch))
        return timings.most_measured(self.connection, arch)

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

    @property
    def may_compile(self) -> bool:
        """Whether kernels that the cache has not are compiled."""
        return settings.settings().compile if self._compile is None else self._compile

    @cached_property
    def builder(self) -> Builder:
        """Builds this catalog's kernels and records what came of it in table ``artifact``."""
        from catalog.build.builder import Builder
        from catalog.build.stored import StoredBuilder

        kind = Builder if self.may_compile else StoredBuilder
        return kind(settings.settings().cache_dir, self.history.record)

    @cached_property
    def history(self) -> History:
        """What builds and first runs of this catalog's kernels came to."""
        from catalog.runtime.history import History

        return History(self, self._lock)

    def build(self, kernel: Kernel) -> Artifact:
        """The library of ``kernel``, compiled unless the cache has it.

        Raises:
            BuildError: it does not compile; ``log`` is the compiler's output.
            MissingKernelError: it is not in the cache, and compiling is forbidden.
            ToolchainError: there is no usable compiler.
        """
        return self.builder.build(kernel)

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

    def forget(self) -> None:
        """Select anew from now on: what was measured has changed."""
        with self._lock:
            self._memo.clear()

    def merge(self, paths: Sequence[Path]) -> list[Merged]:
        """Take over the artifacts' records and the timings of other catalogs, all of them or nothing.

        Raises:
            UsageError: one of ``paths`` is this catalog.
            RegistryError: one is no catalog, is damaged or from a newer version, or this file cannot be written.
        """
        from catalog.merge import merge

        with self._lock:
            merged = merge(self.connection, self.path, paths)
            self._selectors.clear()
            self._memo.clear()
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

    def close(self) -> None:
        """Close the file; the object opens it again when it is used again."""
        if "connection" in self.__dict__:
            self.connection.close()
            del self.__dict__["connection"]
        self._selectors.clear()
        self._memo.clear()
