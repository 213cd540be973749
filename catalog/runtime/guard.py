"""Guarded first runs: a library that is new to this machine first runs in a separate process with a time limit.

A kernel that crashes that process or hangs is quarantined: the verdict is stored beside the cache entry and in the
registry, and selection passes the kernel over until it expires. A finished first run is stored too, so a library is
guarded only once and a warm process reads a few bytes per library. Any other end of the process proves nothing about
the kernel: it is neither loaded nor quarantined, and the next run tries again.

The first run uses random inputs with the problem's shapes, or a smaller problem with the same traits if the original
would take long or need much memory (:func:`guarded_problem`). It proves nothing about other shapes.

On a GPU a failing kernel destroys all of its process's work on that GPU, so the separate process has its own context.
The problem is small enough to compute the float64 reference, and a kernel with a wrong result is quarantined too. If
the GPU accepts no second process, for lack of memory or because it is in exclusive mode, kernels run unguarded.
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
from catalog.ops.families import main_stage
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
    """Limits of a first run's problem.

    Attributes:
        flops: its work in FLOP.
        bytes: size of its tensors, which exist beside the caller's.
        length: the length of a shortened axis is this plus the original length modulo this, so tiles and pages that
            divided the axis still do.
    """

    flops: int
    bytes: int = 256 * 2**20
    length: int = 1024


HOST_LIMITS = Limits(flops=20 * 10**9)
"""Under a second on most machines."""

GPU_LIMITS = Limits(flops=10**9, bytes=16 * 2**20, length=512)
"""The float64 reference takes up to half a second on one core."""

_GPU_SHARE = 1 / 60
"""The share of the time limit that a GPU launch may take: a second by default, for work of milliseconds."""

_COPIES = 4
"""Factor from the tensors' bytes to the process's memory: random numbers are float32 before they are converted."""

_HINT = "It is not quarantined: the next run tries again. CATALOG_GUARD=never runs new libraries without a first run."


class Stages(NamedTuple):
    """A plan that may need a first run: its problem, and its kernels and libraries in order."""

    problem: Problem
    kernels: Sequence[Kernel]
    artifacts: Sequence[Artifact]


class Guard:
    """Admits libraries that have run before, and gives all others a first run in a separate process.

    Args:
        runs: the stored results of first runs.
        record: called with each quarantine that stops a plan, new or not.
    """

    def __init__(self, runs: FirstRuns, record: Callable[[Quarantine], None]) -> None:
        self._runs = runs
        self._record = record
        self._unguarded: set[tuple[str, str, str]] = set()

    def check(
        self, problem: Problem, kernels: Sequence[Kernel], artifacts: Sequence[Artifact], device: Device[Any]
    ) -> None:
        """Return once the libraries of a plan may be loaded into this process.

        Raises:
            QuarantinedError: one of them is quarantined, as of now or since an earlier run.
            DeviceError: their first run ended in a way that proves nothing about them.
        """
        plan, arch = Stages(problem, kernels, artifacts), device.device.arch
        # Quarantine comes first: CATALOG_GUARD=never admits libraries that are new, not those that have failed.
        quarantine = self._quarantine(plan, arch)
        if quarantine is not None:
            raise self._refusal(quarantine)
        if not self._is_new(plan, arch):
            return
        for ending, quarantine in self._run([plan], device):
            if quarantine is not None:  # from the run itself: a stored one may already have expired
                raise self._refusal(quarantine)
            if ending.kind == "unknown":
                name = kernels[ending.stage].name
                message = f"the first run of kernel {name}, in a separate process, proves nothing: it {ending.about}"
                _log.warning("%s", message)
                raise DeviceError(message, hint=_HINT)

    def prepare(self, plans: Sequence[Stages], device: Device[Any]) -> None:
        """Do the first runs of several GPU plans in one process, as long as no kernel is at fault.

        :meth:`check` reports the results. On the host this does nothing and each plan gets its own process in
        :meth:`check`: a kernel that corrupts its process's memory must not cause another to be blamed.
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
        """Run plans in separate processes and store the results; return each ending with its quarantine, if any.

        If other processes cannot find the device, all plans run unguarded.
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
            _log.warning("kernels run unguarded: their first run in a separate process is not possible (%s)", reason)
        return list(zip(endings, quarantines, strict=True))

    def _suspect(self, plan: Stages, arch: str) -> int:
        """The stage to blame for a wrong result: the main one if it is new, else the first new one."""
        new = [stage for stage, artifact in enumerate(plan.artifacts) if not self._passed(artifact, arch)]
        main = main_stage(plan.problem, plan.kernels)
        return main if main in new else new[0]

    def _settle(self, plan: Stages, ending: Ending, arch: str) -> Quarantine | None:
        """Store the result of a plan's first run; return the quarantine if a kernel is to blame."""
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
            for artifact in plan.artifacts:  # by content: a rebuild under the same key may give another library
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
            hint=f"To release it: catalog cache unquarantine {quarantine.kernel_id}",
            kernel_id=quarantine.kernel_id,
        )


def guarded_problem(problem: Problem, limits: Limits = HOST_LIMITS) -> Problem:
    """The problem of a first run: ``problem``, or a smaller one with the same traits within the limits.

    It shrinks by the operation's steps until it fits; even the smallest may exceed the limits.
    """
    room = min(limits.bytes, max(0, memory_bytes() - needed_bytes(problem)) // _COPIES)
    small = problem
    for shrink in operation_of(problem).shrinks:
        if needed_bytes(small) <= room and small.flops <= limits.flops:
            break
        with contextlib.suppress(ProblemError):  # sizes that depend on each other are left unchanged
            small = small.model_copy(update=shrink(small, limits.length))
    return small


def _request(plan: Stages, threads: int) -> dict[str, Any]:
    """A run as :mod:`catalog.runtime.guard_child` reads it, except for its limits and its suspect."""
    return {
        "problem": plan.problem.key,
        "num_splits": wanted_splits(plan.problem, plan.kernels, threads),
        "libraries": [
            {"path": str(artifact.path.absolute()), "sha256": artifact.sha256, "kernel_id": artifact.kernel_id}
            for artifact in plan.artifacts
        ],
    }
