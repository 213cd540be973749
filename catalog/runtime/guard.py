"""Guarded first runs: a library that is new to this machine runs in a process of its own first, with a time limit.

A kernel that crashes that process or hangs is quarantined: remembered beside the cache entry and in the registry, and
passed over by selection until the verdict expires. One that ran to its end is remembered too, so that it is guarded
once, and a warm process reads a file of a few bytes per library. Whatever else ends the process says nothing of the
kernel: it is neither loaded here nor quarantined, and the next run tries again.

The first run is on random inputs of the problem's shapes, or of a smaller problem with the same traits where those
would take long or need much memory (:func:`guarded_problem`). What a kernel does with other shapes is not proven.

On a GPU a kernel that fails takes all of the process's work there along, so that process has a context of its own. The
problem is so small that the float64 reference takes little time: a kernel whose result is wrong is quarantined too. A
GPU that takes no work of a second process, for lack of memory or because one has it for itself, is used unguarded.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from catalog.backends import GpuBackend, backend_of
from catalog.build.first_runs import FirstRuns, Quarantine
from catalog.errors import DeviceError, ProblemError, QuarantinedError
from catalog.ops import operation_of
from catalog.runtime.first_run import Ending, first_runs
from catalog.runtime.memory import memory_bytes, needed_bytes
from catalog.runtime.splits import wanted_splits
from catalog.schema.problem import Problem
from catalog.settings import settings

if TYPE_CHECKING:
    from catalog.build.builder import Artifact
    from catalog.runtime.devices import Device
    from catalog.schema.kernel import Kernel

_log = logging.getLogger(__name__)


class Limits(NamedTuple):
    """What a first run may take.

    Attributes:
        flops: work.
        bytes: of tensors, which live beside those that the caller has already.
        length: a shortened axis is as long as its rest modulo this, plus this: what divides it, a tile or a page, still
            does.
    """

    flops: int
    bytes: int = 256 * 2**20
    length: int = 1024


HOST_LIMITS = Limits(flops=20 * 10**9)
"""Under a second on most machines."""

GPU_LIMITS = Limits(flops=10**9, bytes=16 * 2**20, length=512)
"""The float64 reference takes up to half a second on one core."""

_GPU_SHARE = 1 / 60
"""Of the time limit, what a launch on a GPU may take: a second by default, for what takes milliseconds."""

_COPIES = 4
"""How many times the tensors' bytes the process may need: random numbers are float32 before they are anything else."""

_HINT = "It is not quarantined: the next run tries again. CATALOG_GUARD=never runs new libraries without a first run."


class Stages(NamedTuple):
    """The stages of a plan that may need a first run: its problem, its kernels and their libraries, in order."""

    problem: Problem
    kernels: Sequence[Kernel]
    artifacts: Sequence[Artifact]


class Guard:
    """Lets libraries run that have run before, and sees to it that the others do so in a process of their own.

    Args:
        runs: where it is remembered how runs ended.
        record: called with each quarantine that stops a plan, new or not.
    """

    def __init__(self, runs: FirstRuns, record: Callable[[Quarantine], None]) -> None:
        self._runs = runs
        self._record = record
        self._unguarded: set[tuple[str, str, str]] = set()

    def check(
        self, problem: Problem, kernels: Sequence[Kernel], artifacts: Sequence[Artifact], device: Device[Any]
    ) -> None:
        """Return when the libraries of a plan may be loaded into this process.

        Raises:
            QuarantinedError: one of them must not, from now on or since an earlier run.
            DeviceError: the process of their first run was ended by something that says nothing of them.
        """
        plan, arch = Stages(problem, kernels, artifacts), device.device.arch
        # Before all else: CATALOG_GUARD=never lets libraries run that are new, not those that have failed.
        quarantine = self._quarantine(plan, arch)
        if quarantine is not None:
            raise self._refusal(quarantine)
        if not self._is_new(plan, arch):
            return
        for ending, quarantine in self._run([plan], device):
            if quarantine is not None:  # even where quarantines last 0 days
                raise self._refusal(quarantine)
            if ending.kind == "unknown":
                name = kernels[ending.stage].name
                message = f"the first run of kernel {name}, in a process of its own, proves nothing: it {ending.about}"
                _log.warning("%s", message)
                raise DeviceError(message, hint=_HINT)

    def prepare(self, plans: Sequence[Stages], device: Device[Any]) -> None:
        """Do the first runs of several plans of a GPU, which share a process as long as none is at fault.

        :meth:`check` says what came of them. On the host each plan waits for that: what a kernel does to the memory of
        its process must not be blamed on another.
        """
        arch = device.device.arch
        new = [plan for plan in plans if self._is_new(plan, arch) and self._quarantine(plan, arch) is None]
        if len(new) > 1 and isinstance(backend_of(arch), GpuBackend):
            self._run(new, device)

    def _is_new(self, plan: Stages, arch: str) -> bool:
        """Whether a library of the plan needs a first run."""
        return settings().guard != "never" and not all(self._passed(artifact, arch) for artifact in plan.artifacts)

    def _passed(self, artifact: Artifact, arch: str) -> bool:
        key = (artifact.key, artifact.sha256, arch)
        return key in self._unguarded or self._runs.passed(*key)

    def _quarantine(self, plan: Stages, arch: str) -> Quarantine | None:
        found = (self._runs.quarantine_of(artifact.key, arch) for artifact in plan.artifacts)
        return next((quarantine for quarantine in found if quarantine is not None), None)

    def _run(self, plans: Sequence[Stages], device: Device[Any]) -> list[tuple[Ending, Quarantine | None]]:
        """Run plans in processes of their own, and remember what that proves: how each ended, and its quarantine.

        A device that other processes cannot find runs all unguarded.
        """
        arch, seconds = device.device.arch, settings().guard_timeout
        identity = device.identity
        if identity is None:
            return []
        gpu = isinstance(backend_of(arch), GpuBackend)
        limits = GPU_LIMITS if gpu else HOST_LIMITS
        small = [plan._replace(problem=guarded_problem(plan.problem, limits)) for plan in plans]
        requests = [
            {
                **_request(plan, device.threads),
                "seconds": seconds * _GPU_SHARE if gpu else seconds,
                "suspect": self._suspect(plan, arch) if gpu else None,
            }
            for plan in small
        ]
        endings = first_runs(identity, requests, seconds)
        quarantines = [self._settle(plan, ending, arch) for plan, ending in zip(small, endings, strict=True)]
        for reason in {ending.about for ending in endings if ending.kind == "unguarded"}:
            _log.warning("kernels run unguarded: the process for their first run cannot do it (%s)", reason)
        return list(zip(endings, quarantines, strict=True))

    def _suspect(self, plan: Stages, arch: str) -> int:
        """The stage that a wrong result is blamed on: among those that are new the main one, else the first."""
        new = [stage for stage, artifact in enumerate(plan.artifacts) if not self._passed(artifact, arch)]
        main = operation_of(plan.problem).main_stage(plan.problem)
        return next((stage for stage in new if plan.kernels[stage].family == main), new[0])

    def _settle(self, plan: Stages, ending: Ending, arch: str) -> Quarantine | None:
        """Remember what came of a plan's first run; the quarantine, where a kernel is to blame."""
        kernel, artifact = plan.kernels[ending.stage], plan.artifacts[ending.stage]
        if ending.kind == "blamed":
            quarantine = Quarantine(
                key=artifact.key,
                kernel_id=kernel.id,
                kernel=kernel.name,
                arch=kernel.arch,
                device=arch,
                reason=ending.about,
                problem=plan.problem.key,
                when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            )
            self._runs.quarantine(quarantine)
            return quarantine
        if ending.kind == "passed":
            for artifact in plan.artifacts:  # by content: what is built again under the same key may be another library
                self._runs.remember(artifact.key, artifact.sha256, arch)
        elif ending.kind == "unguarded":
            self._unguarded |= {(artifact.key, artifact.sha256, arch) for artifact in plan.artifacts}
        elif ending.kind == "refused":
            _log.info("the first run of %s proves nothing: %s", kernel.name, ending.about)
        return None

    def _refusal(self, quarantine: Quarantine) -> QuarantinedError:
        self._record(quarantine)
        return QuarantinedError(
            f"kernel {quarantine.kernel} {quarantine.reason} when it was first run ({quarantine.when}, on "
            f"{quarantine.device}, problem {quarantine.problem}): it is quarantined until {quarantine.until}",
            hint=f"To give it another chance: catalog cache unquarantine {quarantine.kernel_id}",
            kernel_id=quarantine.kernel_id,
        )


def guarded_problem(problem: Problem, limits: Limits = HOST_LIMITS) -> Problem:
    """What a first run computes: ``problem``, or a smaller one with the same traits that fits the limits.

    The smallest of its kind may exceed them. It becomes smaller in steps, those of the operation, until it fits.
    """
    room = min(limits.bytes, max(0, memory_bytes() - needed_bytes(problem)) // _COPIES)
    small = problem
    for shrink in operation_of(problem).shrinks:
        if needed_bytes(small) <= room and small.flops <= limits.flops:
            break
        with contextlib.suppress(ProblemError):  # sizes that only fit together stay as they are
            small = small.model_copy(update=shrink(small, limits.length))
    return small


def _request(plan: Stages, threads: int) -> dict[str, Any]:
    """What :mod:`catalog.runtime.guard_child` reads of a run, but for how it is judged."""
    return {
        "problem": plan.problem.key,
        "num_splits": wanted_splits(plan.problem, plan.kernels, threads),
        "libraries": [
            {"path": str(artifact.path.absolute()), "sha256": artifact.sha256, "kernel_id": artifact.kernel_id}
            for artifact in plan.artifacts
        ],
    }
