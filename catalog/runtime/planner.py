"""From problems to plans: the choice of kernels, and the services that plans need when they run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from catalog import settings
from catalog.backends import GpuBackend, backend_of, why_unavailable
from catalog.ops.families import mains
from catalog.registry import timings
from catalog.registry.foreign import timings_of
from catalog.runtime.builds import Builds
from catalog.runtime.catalog_file import CatalogFile
from catalog.runtime.decisions import Decisions
from catalog.runtime.frozen import FrozenPlanner
from catalog.runtime.here import Devices, resolve_arch
from catalog.runtime.plan import Instead, Plan, Shared
from catalog.runtime.select import Choice, Decision, Selector
from catalog.runtime.siblings import Profile, Sibling, profile_of, siblings_of
from catalog.runtime.splits import check_fits
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import Wanted
from catalog.schema.policy import GRAPH, Policy, policy_in_force
from catalog.schema.problem import Problem

if TYPE_CHECKING:
    from catalog.build.builder import Artifact
    from catalog.rules.explain import Finding
    from catalog.runtime.devices import Device
    from catalog.runtime.devices.host.device import HostDevice

K = TypeVar("K")

MOST_PLANS = 65_536
"""Maximum number of plans that a catalog caches; when it is exceeded, all are dropped."""

PlanKey = tuple[tuple[Any, ...], str, str | None, str]
"""A problem's identity and the requested arch, revision and variant, in the form that is the fastest to hash."""


class Planners:
    """The planners of a catalog, and the plans that they made.

    Args:
        file: the file with the kernels.
        builds: builds the kernels.
        devices: the devices that run them.
    """

    def __init__(self, file: CatalogFile, builds: Builds, devices: Devices) -> None:
        self.file = file
        self.builds = builds
        self.devices = devices
        self.plans: dict[PlanKey, Plan] = {}
        self._by_policy: dict[tuple[PlanKey, Policy], Plan] = {}
        self._planners: dict[tuple[Wanted, Policy], Planner] = {}
        self._usual: dict[tuple[str | None, ...], Planner] = {}
        self._policy = GRAPH
        self._captures: dict[str, bool] = {}
        self._measured: dict[str, int] = {}
        self._siblings: dict[str, tuple[Sibling, ...]] = {}
        self._settings: object = None
        self._frozen: FrozenPlanner | None = None
        file.watchers.add(self)

    def _follow_settings(self) -> None:
        """Drop all decisions if the settings have changed."""
        chosen = settings.settings()
        if chosen is not self._settings:
            self.forget()
            self._usual.clear()
            self._frozen = None if chosen.choices is None else FrozenPlanner(chosen.choices, self.devices)
            self._policy = policy_in_force()
            self._settings = chosen

    def of(self, wanted: Wanted, policy: Policy | None = None) -> Planner:
        """The planner of a lineage under a policy, by default the one in force now.

        Its decisions are dropped if the settings have changed.
        """
        self._follow_settings()
        key = wanted, policy or self.policy(wanted.arch)
        planner = self._planners.get(key)
        if planner is None:
            planner = self._planners[key] = Planner(*key, self)
        return planner

    def policy(self, arch: str) -> Policy:
        """The measuring policy in force for ``arch``: that of the settings, or graph while its GPU captures one."""
        if self._varies(arch) and self.devices.of(arch).capturing:
            return self._policy._replace(measured_as="graph")
        return self._policy

    def _varies(self, arch: str) -> bool:
        """Whether a captured graph changes the policy of ``arch``, whose device is here."""
        if self._policy.measured_as == "graph":
            return False
        varies = self._captures.get(arch)
        if varies is None:
            resolved = resolve_arch(arch)
            varies = isinstance(backend_of(resolved), GpuBackend) and why_unavailable(resolved) is None
            self._captures[arch] = varies
        return varies

    def plan(self, problem: Problem, key: PlanKey) -> Plan:
        """Make the plan for a problem; added to :attr:`plans` under ``key``, unless the next call may need another.

        Raises:
            SelectionError, ProblemError, ChoicesError: as :meth:`catalog.Catalog.select`.
        """
        if settings.settings() is not self._settings:
            self._follow_settings()
        usual = problem.operation, *key[1:]
        planner = self._usual.get(usual)
        if planner is not None:
            return _kept(self.plans, key, planner.plan(problem))
        _, arch, revision, variant = key
        if self._frozen is not None:
            return _kept(self.plans, key, self._frozen.plan(problem, arch, revision, variant))
        wanted = Wanted(arch, revision, variant, problem.operation)
        if not self._varies(arch):
            planner = self._usual[usual] = self.of(wanted)
            return _kept(self.plans, key, planner.plan(problem))
        place = key, self.policy(arch)  # a captured graph changes the policy
        return self._by_policy.get(place) or _kept(self._by_policy, place, self.of(wanted).plan(problem))

    def measured_on(self, arch: str) -> int | None:
        """The id of the device whose timings count: this machine's if it runs ``arch``, else the most measured one."""
        device = self._measured.get(arch)
        if device is None:
            if why_unavailable(arch) is None:
                device = timings.device_id(self.file.connection, self.devices.info(arch))
            else:
                device = timings.most_measured(self.file.connection, arch)
            if device is not None:
                self._measured[arch] = device
        return device

    def witnesses(self, arch: str) -> Iterator[tuple[int, Sibling | None]]:
        """The row ids of the devices whose timings are evidence for ``arch``, the best first.

        The device of :meth:`measured_on` is no sibling. Its siblings follow; they are looked up when they are needed.
        """
        own = self.measured_on(arch)
        if own is not None:
            yield own, None
        if arch not in self._siblings:
            self._siblings[arch] = siblings_of(self.file.connection, self.profile(arch), without=own)
        yield from ((sibling.id, sibling) for sibling in self._siblings[arch])

    def profile(self, arch: str) -> Profile:
        """The profile of the device of :meth:`measured_on`; without one, of this machine's or a usual device."""
        own = self.measured_on(arch)
        if own is not None:
            return profile_of(self.file.connection, own)
        return Profile.of(arch, self.devices.info(arch).cores if why_unavailable(arch) is None else None)

    def foreign_timings(self, problem: Problem, arch: str) -> list[dict[str, Any]]:
        """As :meth:`catalog.Catalog.foreign_timings`."""
        with self.file.lock:
            connection, device = self.file.connection, self.profile(resolve_arch(arch))
            near = siblings_of(connection, device, "foreign_timing")
            return timings_of(connection, problem, [sibling.id for sibling in near])

    def forget(self) -> None:
        """Drop plans and decisions, because measurements have changed."""
        with self.file.lock:
            self.plans.clear()
            self._by_policy.clear()
            self._measured.clear()
            self._siblings.clear()
            for planner in self._planners.values():
                planner.forget()

    def rows_changed(self) -> None:
        """Drop plans and decisions, because rows and rules have changed."""
        with self.file.lock:
            self.forget()
            self.disconnected()

    def disconnected(self) -> None:
        """Drop everything tied to the closed connection; plans are kept."""
        for planner in self._planners.values():
            planner.disconnected()

    def reconsider(self, kernel_ids: Collection[str]) -> None:
        """Drop decisions, because these kernels have failed or can be used again; returned plans remain valid."""
        with self.file.lock:
            for planner in self._planners.values():
                planner.reconsider(kernel_ids)


def _kept(plans: dict[K, Plan], key: K, plan: Plan) -> Plan:
    """Add a plan to a cache, and return it."""
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


class Planner:
    """Makes the plans of one lineage under one policy, as their :class:`catalog.runtime.plan.Services`.

    It lives as long as its catalog; its decisions live as long as the connection and the rows they come from.
    """

    def __init__(self, wanted: Wanted, policy: Policy, planners: Planners) -> None:
        self.shared = Shared()
        self.policy = policy
        self._wanted = wanted
        self._planners = planners
        self._decisions: Decisions | None = None

    @cached_property
    def _host(self) -> HostDevice | None:
        """The host CPU if it runs the kernels."""
        return self._planners.devices.host_of(self._wanted.arch)

    @property
    def decisions(self) -> Decisions:
        """The decisions from the current rows; hold the file's lock while using them."""
        if self._decisions is None:
            self._decisions = self._new_decisions()
        return self._decisions

    def _new_decisions(self) -> Decisions:
        file, builds = self._planners.file, self._planners.builds
        held = file.held(self._wanted)
        builds.log.end_quarantines()
        selector = Selector(
            file.connection,
            held,
            forbidding=self._forbidding,
            usable=builds.log.usable,
            witnesses=partial(self._planners.witnesses, held.lineage.arch),
            policy=self.policy,
        )
        return Decisions(selector)

    @property
    def selector(self) -> Selector:
        """The selector behind :attr:`decisions`."""
        return self.decisions.selector

    def _forbidding(self, traits: Mapping[str, Any]) -> list[Finding]:
        from catalog.rules.explain import explain

        selector = self.selector
        lineage = selector.lineage
        spec = self._planners.file.spec(lineage.arch, lineage.revision, of=lineage.operation)
        explained = explain(selector.connection, spec, selector.lineage, traits, 1)
        return [finding for finding in explained.rejections if finding.kind == "constraint"]

    def plan(self, problem: Problem) -> Plan:
        """Make the plan of the best kernels for ``problem``; an unmeasured problem is counted as a miss.

        Raises:
            SelectionError, ProblemError: as :meth:`catalog.Catalog.select`.
        """
        decisions = self._decisions or self.decisions
        decision, arch = decisions.of(problem), decisions.selector.lineage.arch
        check_fits(problem, decision.kernels, self._host)
        if decision.evidence != "measured" and settings.settings().record_misses:
            self._planners.builds.log.miss(problem, arch)
        instead = self._instead(problem, decision) if decision.faster and settings.settings().allow_foreign else None
        return Plan(problem, arch, decision.kernels, self, instead)

    def _instead(self, problem: Problem, decision: Decision) -> Instead | None:
        """The fastest rival that is installed here in the version that was timed, and computes the problem."""
        from catalog.foreign.installed import installed

        place = "cpu" if self._host else "cuda"
        there = installed(problem.operation)
        for rival in decision.faster:
            one = there.get(rival.name)
            if one is not None and one.version == rival.version and not one.objection(problem, place):
                return Instead(one, rival)
        return None

    def plan_with(self, problem: Problem, kernel: Kernel) -> Plan:
        """Like :meth:`plan`, but ``kernel`` runs as the main stage, or as that of its family, and is never replaced.

        Raises:
            SelectionError, ProblemError: as :meth:`plan`.
        """
        if kernel.family in mains(problem):
            kernels = self.selector.stages(problem, kernel)
        else:
            selected = self.decisions.of(problem).kernels
            kernels = tuple(kernel if stage.family == kernel.family else stage for stage in selected)
        check_fits(problem, kernels, self._host)
        return Plan(problem, kernel.arch, kernels, _Pinned(self, kernels))

    def forget(self) -> None:
        """Drop all decisions."""
        if self._decisions is not None:
            self._decisions.forget()
        self.shared.clear()

    def disconnected(self) -> None:
        """Drop everything read from the closed connection."""
        self._decisions = None

    def reconsider(self, kernel_ids: Collection[str]) -> None:
        """Drop all decisions, and forget that these kernels are loaded."""
        if self._decisions is not None:
            self._decisions.forget()
        self.shared.drop(kernel_ids)

    def choice(self, problem: Problem, limit: int) -> Choice:
        """As :meth:`catalog.Catalog.choice`."""
        with self._planners.file.lock:
            return self._planners.of(self._wanted, self.policy).selector.choice(problem, mains(problem), limit)

    def build(self, kernel: Kernel) -> Artifact:
        """As :meth:`catalog.Catalog.build`."""
        return self._planners.builds.build(kernel)

    def reselect(self, problem: Problem, without: Set[str]) -> tuple[Kernel, ...]:
        """The best kernels for ``problem``, except the ids ``without``.

        Raises:
            SelectionError: no other kernel answers the problem.
        """
        with self._planners.file.lock:
            self._planners.reconsider(without)
            return self._planners.of(self._wanted, self.policy).selector.decide(problem, without).kernels

    def device(self, arch: str) -> Device[Any]:
        """As :meth:`catalog.Catalog.device`."""
        return self._planners.devices.of(arch)

    def guard(
        self, problem: Problem, kernels: Sequence[Kernel], artifacts: Sequence[Artifact], device: Device[Any]
    ) -> None:
        """As :meth:`catalog.runtime.guard.Guard.check`."""
        self._planners.builds.log.guard.check(problem, kernels, artifacts, device)


@dataclass(frozen=True, slots=True)
class _Pinned:
    """The services of a plan with pinned kernels: those of ``planner``, except that kernels are never replaced."""

    planner: Planner
    kernels: tuple[Kernel, ...]
    shared: Shared = field(default_factory=Shared)

    @property
    def policy(self) -> Policy:
        return self.planner.policy

    def choice(self, problem: Problem, limit: int) -> Choice:
        return self.planner.choice(problem, limit)

    def build(self, kernel: Kernel) -> Artifact:
        return self.planner.build(kernel)

    def reselect(self, problem: Problem, without: Set[str]) -> tuple[Kernel, ...]:
        return self.kernels

    def device(self, arch: str) -> Device[Any]:
        return self.planner.device(arch)

    def guard(
        self, problem: Problem, kernels: Sequence[Kernel], artifacts: Sequence[Artifact], device: Device[Any]
    ) -> None:
        self.planner.guard(problem, kernels, artifacts, device)
