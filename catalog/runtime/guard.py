"""Guarded first runs: a library that is new to this machine runs in a process of its own first, with a time limit.

A kernel that ends that process or hangs is quarantined: remembered beside the cache entry and in the registry, and
passed over by selection. One that ran to its end is remembered too, so that it is guarded once, and a warm process
reads a file of a few bytes per library.

The first run is on random inputs of the problem's shapes, or of a smaller problem with the same traits where those
would take long or need much memory (:func:`guarded_problem`). What a kernel does with other shapes is not proven.
Kernels that run in this process are guarded; one of a GPU fails there, and the driver tells.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.backends import GpuBackend, backend_of
from catalog.build.first_runs import FirstRuns, Quarantine
from catalog.errors import ProblemError, QuarantinedError
from catalog.runtime.tensors import memory_bytes
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

START_SECONDS = 60.0
"""How long the process may take to start; the time limit counts from then on."""

_MARGIN_SECONDS = 5.0
"""How much later than the process itself its parent notices that the time is up."""

_CHILD = "catalog.runtime.guard_child"


@dataclass(frozen=True)
class Ending:
    """How a first run ended: ``stage`` is the one that ended it, if ``fatal`` says how; else ``passed``, or not.

    A run that neither passed nor was fatal tells nothing of the kernels: one refused the call, or the process did not
    start; ``about`` says so.
    """

    passed: bool = False
    stage: int = 0
    fatal: str | None = None
    about: str = ""


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
        ending = _first_run(_request(small, kernels, artifacts, device), settings().guard_timeout)
        if ending.fatal is not None:
            kernel, artifact = kernels[ending.stage], artifacts[ending.stage]
            quarantine = Quarantine(
                key=artifact.key,
                kernel_id=kernel.id,
                kernel=kernel.name,
                arch=kernel.arch,
                device=arch,
                reason=ending.fatal,
                problem=small.key,
                when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            )
            self._runs.quarantine(quarantine)
            raise self._refusal(quarantine)
        if ending.passed:
            for artifact in artifacts:
                self._runs.remember(artifact.key, artifact.sha256, arch)
        else:
            _log.info("the first run of %s proves nothing: %s", kernels[0].name, ending.about)

    def _refusal(self, quarantine: Quarantine) -> QuarantinedError:
        self._record(quarantine)
        return QuarantinedError(
            f"kernel {quarantine.kernel} {quarantine.reason} when it was first run ({quarantine.when}, on "
            f"{quarantine.device}, problem {quarantine.problem}): it is quarantined",
            hint=f"To give it another chance: catalog cache unquarantine {quarantine.kernel_id}",
            kernel_id=quarantine.kernel_id,
        )


def guarded_problem(problem: Problem, most_flops: int = MOST_FLOPS) -> Problem:
    """What a first run computes: ``problem``, or a smaller one with the same traits that fits the limits.

    The limits are :data:`MOST_BYTES` and ``most_flops``, which the smallest of its kind may exceed. In this order,
    until it fits: one sequence, the longest; one group of heads; a cache without spare pages; sequences of fewer than
    2048 tokens; two query heads of a group.
    """
    room = min(MOST_BYTES, max(0, memory_bytes() - problem.bytes) // _COPIES)
    small = problem
    for shrink in (_one_sequence, _one_group, _no_spare_pages, _short_sequences, _two_heads):
        if small.bytes <= room and small.flops <= most_flops:
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
    """What :mod:`catalog.runtime.guard_child` reads."""
    return {
        "problem": problem.key,
        "num_threads": device.threads,
        "num_splits": splits_of(problem, kernels, device.threads),
        "libraries": [
            {"path": str(artifact.path.absolute()), "sha256": artifact.sha256, "kernel_id": artifact.kernel_id}
            for artifact in artifacts
        ],
    }


def _first_run(request: Mapping[str, Any], seconds: float) -> Ending:
    """Run the libraries in a process of their own, which ends with this call."""
    folder = Path(__file__).parents[2]  # -m looks there first: it finds the package that this module is of
    search_path = map(os.path.abspath, filter(None, [*sys.path, str(folder)]))
    try:
        process = subprocess.Popen(  # noqa: S603 - this Python, and a module of ours
            [sys.executable, "-m", _CHILD],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return _did_not_start(f"{sys.executable}: {error.strerror}")
    late = False
    try:
        output, said = process.communicate(
            json.dumps({**request, "seconds": seconds}), START_SECONDS + seconds + _MARGIN_SECONDS
        )
    except subprocess.TimeoutExpired:
        late = True
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the library has started
            output, said = process.communicate()
    return _ending(list(_messages(output)), late, process.returncode, seconds, said)


def _messages(output: str) -> Iterator[Mapping[str, Any]]:
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _ending(messages: Sequence[Mapping[str, Any]], late: bool, status: int, seconds: float, said: str) -> Ending:
    """What the messages of the process and its exit status say; it may have ended anywhere."""
    stages = [message["stage"] for message in messages if "stage" in message]
    if messages and "end" in messages[-1]:
        end = messages[-1]["end"]
        return Ending(passed=True) if end == "passed" else Ending(about=end)
    if not stages:
        return _did_not_start(said.strip().rpartition("\n")[2] or f"it ended with status {status}")
    if late or status == -signal.SIGALRM:
        return Ending(stage=stages[-1], fatal=f"did not end within {seconds:g} s")
    if status < 0:
        return Ending(stage=stages[-1], fatal=f"died of {signal.Signals(-status).name}")
    return Ending(stage=stages[-1], fatal=f"ended its process with exit status {status}")


def _did_not_start(reason: str) -> Ending:
    """Not the kernels' fault: they run unguarded."""
    _log.warning("kernels run unguarded: the process for their first run does not start (%s)", reason)
    return Ending(about=reason)
