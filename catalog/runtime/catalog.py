"""The catalog as a Python object: populate, select."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.errors import BuildError, ToolchainError
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.stages import MAIN_STAGE, stages_of
from catalog.ops.attention.workspace import splits_of
from catalog.registry import timings
from catalog.runtime.catalog_file import CatalogFile
from catalog.runtime.decisions import Decision, Decisions
from catalog.runtime.devices import why_unavailable
from catalog.runtime.devices.here import Devices
from catalog.runtime.funnel import Step
from catalog.runtime.memory import check_room, surely_fits
from catalog.runtime.on_default import on_default
from catalog.runtime.plan import Plan, Services, Shared
from catalog.runtime.select import Candidate, Choice, Selector
from catalog.schema.kernel import Kernel

if TYPE_CHECKING:
    from catalog.build.builder import Artifact, Builder
    from catalog.rules.explain import Finding
    from catalog.runtime.build_log import History
    from catalog.runtime.devices import Device, DeviceInfo
    from catalog.runtime.devices.host.device import HostDevice

_log = logging.getLogger(__name__)

MEMO_SIZE = 65_536
"""Selections that a catalog remembers; beyond that it forgets all and starts anew."""


class Catalog(CatalogFile):
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
        super().__init__(path)
        self._compile = compile
        self._memo: dict[tuple[Problem, str, str | None, str], Plan] = {}
        self._planners: dict[tuple[str, str | None, str], _Planner] = {}
        self._settings: object = None
        self._devices = Devices(num_threads)
        self._measured: dict[str, int] = {}
        self._warned_of_compiler = False

    @classmethod
    @lru_cache(maxsize=1)
    def default(cls) -> Catalog:
        """The catalog of the settings: one object a process."""
        return cls()

    @on_default
    def select(
        self, problem: Problem, *, arch: str = "host", revision: str | None = None, mask_impl: str = "generic"
    ) -> Plan:
        """The plan that answers ``problem`` on ``arch``.

        The choice is remembered: asking again for an equal problem runs no SQL, nor does a problem about which the same
        facts decide (:mod:`catalog.runtime.decisions`). :meth:`populate` and :meth:`forget` make it
        forget. A problem that was not measured is recorded as a miss, unless the settings say otherwise: see
        :meth:`misses`.

        Raises:
            SelectionError: no kernel answers the problem; says which trait or rule leaves none.
            ProblemError: the arch is this machine's, and a run would need more memory than it has.
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        key = (problem, arch, revision, mask_impl)
        plan = self._memo.get(key)
        if plan is None:
            with self._lock:
                planner = self._planner(arch, revision, mask_impl)
                decision = planner.decisions.of(problem)
                self._check_memory(problem, arch, decision.kernels)
                plan = Plan(problem, planner.arch, decision.kernels, planner.services)
                if len(self._memo) >= MEMO_SIZE:
                    self._memo.clear()
                self._memo[key] = plan
                if decision.evidence != "measured" and settings.settings().record_misses:
                    self.history.miss(problem, plan.arch)
        return plan

    def plan(self, problem: Problem, kernel: Kernel) -> Plan:
        """As :meth:`select`, but ``kernel``, one of :meth:`candidates`, runs as the stage of its family.

        Raises:
            SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`select`.
        """
        with self._lock:
            planner = self._planner(kernel.arch, kernel.revision, kernel.variant)
            selected = planner.decisions.of(problem).kernels
            self._check_memory(problem, kernel.arch, selected)
        kernels = tuple(kernel if stage.family == kernel.family else stage for stage in selected)
        services = replace(planner.services, reselect=lambda *_: kernels, shared=Shared())
        return Plan(problem, planner.arch, kernels, services)

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
        with self._lock:
            selector = self._planner(arch, revision, mask_impl).selector
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
            selector = self._planner(arch, revision, mask_impl).selector
            choice = selector.choice(problem, MAIN_STAGE[problem.op], limit)
            if not choice.candidates:
                selector.candidates(problem, MAIN_STAGE[problem.op])  # says why
        return choice

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
        family = family or MAIN_STAGE[problem.op]
        with self._lock:
            selector = self._planner(arch, revision, mask_impl).selector
            return selector.steps(problem, family), selector.kept(problem, family, limit)

    def _planner(self, arch: str, revision: str | None, mask_impl: str) -> _Planner:
        """The planner of one population; a change of the settings discards all planners' memory."""
        if settings.settings() is not self._settings:
            self._settings = settings.settings()
            self.forget()
        key = (arch, revision, mask_impl)
        if key not in self._planners:
            self._planners[key] = self._new_planner(*key)
        return self._planners[key]

    def _new_planner(self, arch: str, revision: str | None, mask_impl: str) -> _Planner:
        population = self._populated(arch, revision, mask_impl)
        self.history.end_quarantines()

        def forbidding(traits: Mapping[str, Any]) -> list[Finding]:
            explained = self.explain(traits, arch=arch, revision=population.revision, mask_impl=mask_impl, limit=1)
            return [finding for finding in explained.rejections if finding.kind == "constraint"]

        selector = Selector(
            self.connection,
            population,
            forbidding,
            usable=self.history.usable,
            device=lambda: self.measured_on(population.arch),
        )

        def reselect(problem: Problem, without: Set[str]) -> tuple[Kernel, ...]:
            with self._lock:
                self.reconsider(without)
                return _decide(self._planner(arch, revision, mask_impl).selector, problem, without).kernels

        def choice(problem: Problem, limit: int) -> Choice:
            return self.choice(problem, arch=arch, revision=revision, mask_impl=mask_impl, limit=limit)

        def guard(*plan: Any) -> None:
            self.history.guard.check(*plan)  # imported with the first kernel that is loaded

        return _Planner(
            population.arch,
            selector,
            Decisions(self.connection, selector, partial(_decide, selector)),
            Services(choice, self.build, reselect, self.device, guard),
        )

    def _check_memory(self, problem: Problem, arch: str, kernels: tuple[Kernel, ...]) -> None:
        host = self._devices.host_of(arch)
        if host is not None and not surely_fits(problem):
            check_room(problem, splits_of(problem, kernels, host.threads))

    def measured_on(self, arch: str) -> int | None:
        """The device whose timings count: this machine's where it runs ``arch``, else the most measured one."""
        device = self._measured.get(arch)
        if device is None:
            if why_unavailable(arch) is None:
                device = timings.device_id(self.connection, self._devices.info(arch))
            else:
                device = timings.most_measured(self.connection, arch)
            if device is not None:
                self._measured[arch] = device
        return device

    @property
    def may_compile(self) -> bool:
        """Whether kernels that the cache has not are compiled."""
        return settings.settings().compile if self._compile is None else self._compile

    @cached_property
    def builder(self) -> Builder:
        """Builds this catalog's kernels and records what came of it in table ``artifact``."""
        from catalog.build.builder import Builder
        from catalog.build.offline_builder import StoredBuilder

        kind = Builder if self.may_compile else StoredBuilder
        return kind(settings.settings().cache_dir, self.history.record)

    @cached_property
    def history(self) -> History:
        """What builds and first runs of this catalog's kernels came to."""
        from catalog.runtime.build_log import History

        return History(self, self._lock)

    def build(self, kernel: Kernel) -> Artifact:
        """The library of ``kernel``, compiled unless the cache has it.

        Without a usable compiler it is the newest sound library of this row in the cache, whatever compiled it, as when
        compiling is forbidden.

        Raises:
            BuildError: it does not compile; ``log`` is the compiler's output.
            MissingKernelError: it is not in the cache, and compiling is forbidden.
            ToolchainError: there is no usable compiler.
        """
        from catalog.build.builder import CompileError

        try:
            return self.builder.build(kernel)
        except CompileError as error:
            reason = self.refusal(kernel)
            if reason is not None:
                error.hint = f"{kernel.revision} lists it, but {reason}. {error.hint}"
            raise
        except ToolchainError as error:
            return self._cached_instead(kernel, error)

    def _cached_instead(self, kernel: Kernel, lacking: ToolchainError) -> Artifact:
        """The library of ``kernel`` in the cache, found without a compiler.

        Raises:
            ToolchainError: ``lacking``, if the cache has none.
        """
        try:
            artifact = self._stored.build(kernel)
        except BuildError:
            raise lacking from None
        if not self._warned_of_compiler:
            self._warned_of_compiler = True
            _log.warning("%s; running what the cache has", lacking.message)
        return artifact

    @cached_property
    def _stored(self) -> Builder:
        from catalog.build.offline_builder import StoredBuilder

        return StoredBuilder(settings.settings().cache_dir, self.history.record)

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

    def misses(self, arch: str) -> list[tuple[str, int]]:
        """As :meth:`CatalogFile.misses`, including counts that were not written yet."""
        self.history.write_misses()
        return super().misses(arch)

    def close(self) -> None:
        """As :meth:`CatalogFile.close`."""
        if self._connection is not None and "history" in self.__dict__:
            self.history.write_misses()
        super().close()

    def forget(self) -> None:
        """Select anew from now on: what was measured has changed."""
        with self._lock:
            self._memo.clear()
            self._measured.clear()
            for planner in self._planners.values():
                planner.decisions.forget()
                planner.services.shared.clear()

    def reconsider(self, kernel_ids: Collection[str]) -> None:
        """Forget decisions, because these kernels have failed or can be used again; plans that were returned stay."""
        with self._lock:
            for planner in self._planners.values():
                planner.decisions.forget()
                planner.services.shared.drop(kernel_ids)

    def _connection_closed(self) -> None:
        self._planners.clear()

    def _file_changed(self) -> None:
        self.forget()
        self._planners.clear()


@dataclass(frozen=True, slots=True)
class _Planner:
    """Makes the plans of one population: decides by ``selector``, and remembers ``decisions``."""

    arch: str
    selector: Selector
    decisions: Decisions
    services: Services


def _decide(selector: Selector, problem: Problem, without: Set[str] = frozenset()) -> Decision:
    """The best kernel of each stage by the selection query, except the ids ``without``.

    Raises:
        SelectionError: no kernel answers the problem; says which trait or rule leaves none.
    """
    main = MAIN_STAGE[problem.op]
    choice = selector.choice(problem, main, 1, without=without)
    chosen = (choice.candidates or selector.candidates(problem, main, without=without))[0].kernel
    stages = (
        chosen if family is main else selector.candidates(problem, family, static=True, without=without)[0].kernel
        for family in stages_of(problem.op, chosen)
    )
    return Decision(tuple(stages), choice.evidence)
