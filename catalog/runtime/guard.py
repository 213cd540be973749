"""Guarded first runs: a library that is new to this machine runs in a process of its own first, with a time limit.

A kernel that crashes that process or hangs is quarantined: remembered beside the cache entry and in the registry, and
passed over by selection until the verdict expires. One that ran to its end is remembered too, so that it is guarded
once, and a warm process reads a file of a few bytes per library. Whatever else ends the process says nothing of the
kernel: it is neither loaded here nor quarantined, and the next run tries again.

The first run is on random inputs of the problem's shapes, or of a smaller problem with the same traits where those
would take long or need much memory (:func:`guarded_problem`). What a kernel does with other shapes is not proven.
Kernels that run in this process are guarded; one of a GPU fails there, and the driver tells.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from catalog.backends import GpuBackend, backend_of
from catalog.build.first_runs import FirstRuns, Quarantine
from catalog.errors import DeviceError, ProblemError, QuarantinedError
from catalog.runtime.first_run import first_run
from catalog.runtime.memory import memory_bytes, needed_bytes
from catalog.runtime.workspace import splits_of
from catalog.schema.problem import Problem
from catalog.settings import settings

if TYPE_CHECKING:
    from catalog.build.builder import Artifact
    from catalog.runtime.devices import Device
    from catalog.schema.kernel import Kernel

_log = logging.getLogger(__name__)

MOST_BYTES = 256 * 2**20
"""Tensors of a first run, which live beside those that the caller has already."""

_COPIES = 4
"""How many times the tensors' bytes the process may need: random numbers are float32 before they are anything else."""

MOST_FLOPS = 20 * 10**9
"""Work of a first run: under a second on most machines."""

_SEQUENCE = 1024
"""A shortened sequence is as long as its rest modulo this, plus this: what divides it, a tile or a page, still does."""

_FEW_SPLITS = 8
"""Parts of the keys in a first run of a problem that states many."""

_HINT = "It is not quarantined: the next run tries again. CATALOG_GUARD=never runs new libraries without a first run."


class Guard:
    """Lets libraries run that have run before, and sees to it that the others do so in a process of their own.

    Args:
        runs: where it is remembered how runs ended.
        record: is told of every quarantine that stops a plan, new or not.
    """

    def __init__(self, runs: FirstRuns, record: Callable[[Quarantine], None]) -> None:
        self._runs = runs
        self._record = record

    def check(
        self, problem: Problem, kernels: Sequence[Kernel], artifacts: Sequence[Artifact], device: Device[Any]
    ) -> None:
        """Return when the libraries of a plan may be loaded into this process.

        Raises:
            QuarantinedError: one of them must not, from now on or since an earlier run.
            DeviceError: the process of their first run was ended by something that says nothing of them.
        """
        arch = device.device.arch
        for artifact in artifacts:
            quarantine = self._runs.quarantine_of(artifact.key, arch)
            if quarantine is not None:
                raise self._refusal(quarantine)
        if isinstance(backend_of(kernels[0].arch), GpuBackend):
            return
        known = all(self._runs.passed(artifact.key, artifact.sha256, arch) for artifact in artifacts)
        if known or settings().guard == "never":
            return
        small = guarded_problem(problem)
        ending = first_run(_request(small, kernels, artifacts, device), settings().guard_timeout)
        kernel, artifact = kernels[ending.stage], artifacts[ending.stage]
        if ending.kind == "blamed":
            quarantine = Quarantine(
                key=artifact.key,
                kernel_id=kernel.id,
                kernel=kernel.name,
                arch=kernel.arch,
                device=arch,
                reason=ending.about,
                problem=small.key,
                when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            )
            self._runs.quarantine(quarantine)
            raise self._refusal(quarantine)
        if ending.kind == "unknown":
            told = f"the first run of kernel {kernel.name}, in a process of its own, proves nothing: it {ending.about}"
            _log.warning("%s", told)
            raise DeviceError(told, hint=_HINT)
        if ending.kind == "passed":
            for artifact in artifacts:
                self._runs.remember(artifact.key, artifact.sha256, arch)
        elif ending.kind == "refused":
            _log.info("the first run of %s proves nothing: %s", kernel.name, ending.about)
        else:
            _log.warning("kernels run unguarded: the process for their first run does not start (%s)", ending.about)

    def _refusal(self, quarantine: Quarantine) -> QuarantinedError:
        self._record(quarantine)
        return QuarantinedError(
            f"kernel {quarantine.kernel} {quarantine.reason} when it was first run ({quarantine.when}, on "
            f"{quarantine.device}, problem {quarantine.problem}): it is quarantined until {quarantine.until}",
            hint=f"To give it another chance: catalog cache unquarantine {quarantine.kernel_id}",
            kernel_id=quarantine.kernel_id,
        )


def guarded_problem(problem: Problem, most_flops: int = MOST_FLOPS) -> Problem:
    """What a first run computes: ``problem``, or a smaller one with the same traits that fits the limits.

    The limits are :data:`MOST_BYTES` and ``most_flops``, which the smallest of its kind may exceed. In this order,
    until it fits: one sequence, the longest; one group of heads; a cache without spare pages; few splits; sequences of
    fewer than 2048 tokens; two query heads of a group.
    """
    room = min(MOST_BYTES, max(0, memory_bytes() - needed_bytes(problem)) // _COPIES)
    small = problem
    for shrink in (_one_sequence, _one_group, _no_spare_pages, _few_splits, _short_sequences, _two_heads):
        if needed_bytes(small) <= room and small.flops <= most_flops:
            break
        with contextlib.suppress(ProblemError):  # sizes that only fit together stay as they are
            small = small.model_copy(update=shrink(small))
    return small


def _one_sequence(problem: Problem) -> dict[str, Any]:
    if problem.seqlens_q is None:
        return {"batch": min(problem.batch, 1), **_fitting_pages(problem)}
    q, k = max(problem.sequences, key=math.prod, default=(0, 0))
    return _packed(problem, q, k) | _fitting_pages(problem)


def _one_group(problem: Problem) -> dict[str, Any]:
    return {"nhead_q": problem.ratio, "nhead_k": 1}


def _no_spare_pages(problem: Problem) -> dict[str, Any]:
    return _fitting_pages(problem)


def _few_splits(problem: Problem) -> dict[str, Any]:
    return {"num_splits": min(problem.num_splits, _FEW_SPLITS)}


def _short_sequences(problem: Problem) -> dict[str, Any]:
    q, k = _short(problem.seqlen_q), _short(problem.seqlen_k)
    if problem.seqlens_q is not None:
        return _packed(problem, q, k) | _fitting_pages(problem)
    new = {} if problem.seqlen_new is None else {"seqlen_new": _short(problem.seqlen_new)}
    return {"seqlen_q": q, "seqlen_k": k, **new, **_fitting_pages(problem)}


def _two_heads(problem: Problem) -> dict[str, Any]:
    return {"nhead_q": min(problem.nhead_q, 2 * problem.nhead_k)}


def _packed(problem: Problem, q: int, k: int) -> dict[str, Any]:
    """One packed sequence; the keys of a paged one are as many as the page table has room for."""
    keys = {} if problem.seqlens_k is None else {"seqlens_k": (k,)}
    return {"seqlens_q": (q,), "seqlen_q": q, "seqlen_k": k, "batch": 1, **keys}


def _fitting_pages(problem: Problem) -> dict[str, Any]:
    """As many pages as the sequences fill: the default."""
    return {"num_pages": None} if problem.paged else {}


def _short(length: int) -> int:
    return length if length < 2 * _SEQUENCE else _SEQUENCE + length % _SEQUENCE


def _request(
    problem: Problem, kernels: Sequence[Kernel], artifacts: Sequence[Artifact], device: Device[Any]
) -> dict[str, Any]:
    """What :mod:`catalog.runtime.guard_child` reads, but for the time."""
    return {
        "problem": problem.key,
        "num_threads": device.threads,
        "num_splits": splits_of(problem, kernels, device.threads),
        "libraries": [
            {"path": str(artifact.path.absolute()), "sha256": artifact.sha256, "kernel_id": artifact.kernel_id}
            for artifact in artifacts
        ],
    }
