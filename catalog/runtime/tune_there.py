"""Tuning on the devices of a Dask cluster's workers: a worker for each GPU, say.

Each worker measures one problem at a time on its own device, in a catalog of its own, with kernels that its own cache
has or that it compiles. It returns the timings and the records of their libraries, which are added to the client's
catalog with the label of the worker's device. Workers with equal devices share the problems; of devices that differ,
each measures every problem.

What the client's file has is not measured again: a problem that was timed on an equal device under the same policy.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import queue
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.backends import backend_of
from catalog.build.cache import ArtifactRecord, Cache
from catalog.build.cluster import TRIES, Cluster
from catalog.errors import CatalogError, ClusterError, UsageError
from catalog.ops import problem_of_key, read_kernel
from catalog.registry.artifacts import record_elsewhere
from catalog.registry.rows import Timing
from catalog.registry.timings import add_timings, measured
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.manifests import valid_timings
from catalog.runtime.measure import StopRule
from catalog.runtime.race import Sureness, Verdict
from catalog.runtime.tune import Tuned, TuneOptions, TuneReport, tune
from catalog.settings import settings

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.schema.problem import Problem

_CHECK_SECONDS = 1.0


@dataclass(frozen=True)
class _Order:
    """A problem to tune, in values that any version can read."""

    problem: str
    arch: str
    revision: str | None
    candidates: int
    rule: Mapping[str, Any]


def tune_there(
    catalog: Catalog,
    problems: Sequence[Problem],
    options: TuneOptions,
    cluster: Cluster,
    on_done: Callable[[Tuned], None] | None = None,
) -> TuneReport:
    """As :func:`catalog.runtime.tune.tune`, on the devices of a cluster's workers that run the arch.

    Raises:
        ClusterError: no worker has such a device, or all workers are gone.
        UsageError: ``options.against`` names implementations: they are only timed on this machine.
        RegistryError: the catalog cannot be written.
    """
    if options.against:
        raise UsageError("other projects' implementations are timed on this machine only", hint="Omit --there.")
    return _Tuning(catalog, options, cluster).run(problems, on_done)


def describe(arch: str) -> dict[str, Any] | str:
    """On a worker: the device that runs ``arch``, as the fields of :class:`DeviceInfo`, or why there is none."""
    try:
        return asdict(_catalog().device_info(arch))
    except CatalogError as error:
        return error.message


def work(order: Mapping[str, Any]) -> dict[str, Any]:
    """On a worker: tune a problem; the outcome, the timings, and the records of the libraries, as plain values."""
    stated = _Order(**order)
    catalog, problem = _catalog(), problem_of_key(stated.problem)
    how = TuneOptions(
        stated.arch, stated.candidates, rule=StopRule(**stated.rule), again=True, revision=stated.revision
    )
    report = tune(catalog, [problem], how)
    if not report.tuned:
        return {"unanswered": report.unanswered.get(problem.key, "")}
    [tuned] = report.tuned
    device, cache = catalog.device_info(stated.arch), Cache(settings().cache_dir)
    keys = {key for _, key in measured(catalog.connection, problem, device, how.rule.policy)}
    found = [timing for timing in valid_timings(catalog.connection, keys) if timing.problem == problem.key]
    records = [stored[0].columns for key in keys if (stored := cache.read_record(key)) is not None]
    return {
        "kernels": [kernel.model_dump_json() for kernel in tuned.kernels.values()],
        "medians": dict(tuned.medians),
        "failures": dict(tuned.failures),
        "verdict": None if tuned.verdict is None else asdict(tuned.verdict),
        "timings": [timing.model_dump() for timing in found],
        "records": records,
    }


def task() -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """The function sent to workers: a closure, which Dask sends as code, so that the scheduler needs no catalog."""

    def tune_one(order: Mapping[str, Any]) -> Mapping[str, Any]:
        from catalog.runtime.tune_there import work

        return work(order)

    return tune_one


@functools.cache
def _catalog() -> Catalog:
    """The worker's own catalog, which lives as long as its process."""
    from catalog.runtime.catalog import Catalog

    folder = tempfile.TemporaryDirectory(prefix="catalog-worker-")
    atexit.register(folder.cleanup)
    return Catalog(Path(folder.name) / "catalog.db")


@dataclass
class _Crew:
    """The workers with one device, and the problems that are left for them, each with its number of attempts."""

    device: DeviceInfo
    idle: list[str]
    left: deque[tuple[Problem, int]] = field(default_factory=deque)


class _Tuning:
    def __init__(self, catalog: Catalog, options: TuneOptions, cluster: Cluster) -> None:
        self._catalog, self._options, self._cluster = catalog, options, cluster
        self._deadline = math.inf if options.seconds is None else time.monotonic() + options.seconds
        self._answers = queue.SimpleQueue[Any]()
        self._running: dict[Any, tuple[_Crew, str, Problem, int]] = {}
        self._tuned: list[Tuned] = []
        self._unanswered: dict[str, str] = {}

    def run(self, problems: Sequence[Problem], on_done: Callable[[Tuned], None] | None) -> TuneReport:
        crews = self._crews()
        for crew in crews:
            crew.left.extend((problem, 0) for problem in problems if not self._known(problem, crew.device))
        try:
            while self._running or (self._in_time and any(crew.left and crew.idle for crew in crews)):
                for crew in crews:
                    self._send(crew)
                self._receive(on_done)
        finally:
            if self._running:
                self._cluster.client.cancel(list(self._running), force=True)
        self._catalog.forget()
        left = {problem.key: problem for crew in crews for problem, _ in crew.left}
        if left and self._in_time and not any(crew.idle for crew in crews):
            raise self._cluster.gone()
        return TuneReport(tuple(self._tuned), self._unanswered, tuple(left.values()))

    @property
    def _in_time(self) -> bool:
        return time.monotonic() < self._deadline

    def _crews(self) -> list[_Crew]:
        """The usable workers by device."""
        workers = sorted(set(self._cluster.workers()) - set(self._cluster.unfit))
        answers = self._cluster.client.run(describe, self._options.arch, workers=workers, on_error="return")
        crews: dict[DeviceInfo, _Crew] = {}
        for worker in workers:
            answer = answers.get(worker)
            if isinstance(answer, dict):
                device = DeviceInfo(**answer)
                crews.setdefault(device, _Crew(device, [])).idle.append(worker)
        if not crews:
            reasons = "; ".join(sorted({str(answer) for answer in answers.values()}))
            raise ClusterError(
                f"no worker of {self._cluster.address} has a device for {self._options.arch}: {reasons}",
                hint="Start a worker for each device, for example: CUDA_VISIBLE_DEVICES=0 dask worker ADDRESS.",
            )
        return list(crews.values())

    def _known(self, problem: Problem, device: DeviceInfo) -> bool:
        before = measured(self._catalog.connection, problem, device, self._options.rule.policy)
        return bool(before) and not self._options.again

    def _send(self, crew: _Crew) -> None:
        """Give each idle worker a problem, while there is time."""
        options = self._options
        while crew.idle and crew.left and self._in_time:
            worker, (problem, tries) = crew.idle.pop(), crew.left.popleft()
            order = _Order(problem.key, crew.device.arch, options.revision, options.candidates, asdict(options.rule))
            future = self._cluster.client.submit(task(), asdict(order), pure=False, workers=[worker])
            self._running[future] = crew, worker, problem, tries
            future.add_done_callback(self._answers.put)

    def _receive(self, on_done: Callable[[Tuned], None] | None) -> None:
        """Wait for an answer, and record it; a worker that is gone is not used again."""
        if not self._running:
            return
        try:
            future = self._answers.get(timeout=_CHECK_SECONDS)
        except queue.Empty:
            there = self._cluster.workers()
            lost = [future for future, (_, worker, _, _) in self._running.items() if worker not in there]
            for future in lost:
                crew, worker, problem, tries = self._running.pop(future)
                future.cancel(force=True)
                self._failed(
                    crew, problem, tries, f"{TRIES} workers were lost while they measured it, the last {worker}"
                )
            return
        if future not in self._running:
            return
        crew, worker, problem, tries = self._running.pop(future)
        if future.status == "cancelled":
            raise self._cluster.gone()
        crew.idle.append(worker)
        if future.status == "error":
            self._failed(crew, problem, tries, f"{worker}: {future.exception()}")
            return
        answer = future.result()
        if "unanswered" in answer:
            self._unanswered[problem.key] = answer["unanswered"]
            return
        self._tuned.append(self._recorded(problem, crew.device, answer))
        if on_done is not None:
            on_done(self._tuned[-1])

    def _failed(self, crew: _Crew, problem: Problem, tries: int, reason: str) -> None:
        """Have a problem measured once more, unless that failed too often."""
        if tries + 1 < TRIES:
            crew.left.append((problem, tries + 1))
        else:
            self._unanswered[problem.key] = reason

    def _recorded(self, problem: Problem, device: DeviceInfo, answer: Mapping[str, Any]) -> Tuned:
        """Record the timings of an answer, all of them or none; what they say."""
        kernels = {kernel.id: kernel for kernel in (read_kernel(json.loads(text)) for text in answer["kernels"])}
        first, *_ = self._catalog.candidates(
            problem, arch=device.arch, revision=self._options.revision, limit=1, static=True
        )  # makes the rows, if they are not here
        records = [ArtifactRecord.from_columns(dict(columns)) for columns in answer["records"]]
        of_key = {record.key: record.kernel_id for record in records}
        timings = [Timing.model_validate(timing) for timing in answer["timings"]]
        rows = [
            timing.model_dump(exclude={"device"})
            | {"arch": device.arch, "name": device.name, "facts": device.facts}
            | {"kernel_id": of_key[timing.artifact_key]}
            for timing in timings
            if timing.artifact_key in of_key
        ]
        with self._catalog.writing() as connection:
            for record in records:
                record_elsewhere(connection, record.columns)
            add_timings(connection, rows, conflict="REPLACE")
        verdict = answer["verdict"]
        if verdict is not None:
            verdict = Verdict(**{**verdict, "sureness": Sureness(verdict["sureness"])})
        noise = backend_of(device.arch).noise
        medians, failures = answer["medians"], answer["failures"]
        return Tuned(problem, kernels, medians, failures, first.kernel.id, noise, verdict, device=device)
