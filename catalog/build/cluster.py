"""Builds on the machines of a Dask cluster: ``with connect(address) as pool: build_many(kernels, pool=pool)``.

Every worker compiles with its own toolchain into its own cache and returns the library with its record, or the
compiler's output. Results are verified by digest, and by content key wherever this machine can compute the key itself.
A worker whose compiler, flags or headers differ would build another library; it reports that instead, and the kernel
goes to the next worker. If this machine has no compiler for an arch, the workers' keys are accepted. Results are
published under the cache's own lock, alongside any local builder. The kernels of a lost worker are built by the others.

Workers run what they are sent: put a scheduler on a network where everybody is trusted, or behind TLS (its certificates
are in Dask's own configuration).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import queue
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future as LocalFuture
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

from catalog.build.builder import Builder, Built, CompileError
from catalog.build.cache import ArtifactRecord, Origin
from catalog.build.keys import KEY_SCHEMA, abi_number
from catalog.build.pools import Results
from catalog.build.processes import Interrupted
from catalog.build.targets import BUILD_DIR
from catalog.errors import BuildError, CatalogError, ClusterError, ToolchainError
from catalog.extras import how_to_install
from catalog.ops import read_kernel
from catalog.schema.kernel import Kernel
from catalog.threads import usable_cores

CONNECT_SECONDS = 10.0
"""Time limit for connecting to a scheduler, and then for its first worker."""

WORKERLESS_SECONDS = 60.0
"""How long a build continues without workers, which may still be starting."""

TRIES = 3
"""How often a kernel is sent out again after a worker failed without an explanation."""

RESUME = "What is finished is in the cache; the same command goes on from there."

_CHECK_SECONDS = 1.0
_RUNNING = frozenset({"executing", "long-running"})
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Release:
    """Versions that must be equal on all machines of a cluster."""

    version: str
    abi: int
    key_schema: int

    def __str__(self) -> str:
        return f"kernel-catalog {self.version}, ABI {self.abi}, content keys {self.key_schema}"


@functools.cache
def release() -> Release:
    """The release of this process."""
    try:
        number = version("kernel-catalog")
    except PackageNotFoundError:
        number = "unknown"
    return Release(number, abi_number(BUILD_DIR / "abi" / "catalog_abi.h"), KEY_SCHEMA)


# These are sent as plain values: a scheduler need not have this package, and a worker of another version can report it.


@dataclass(frozen=True)
class Order:
    """A kernel to build, as its canonical JSON; ``source``, ``key`` and its ``ingredients`` if the client has them."""

    kernel: str
    release: Release
    source: str | None = None
    key: str | None = None
    ingredients: Mapping[str, str] = field(default_factory=dict)

    def difference(self, here: Mapping[str, str]) -> str | None:
        """The first difference between the content keys of the worker and of the client."""
        for name, there in self.ingredients.items():
            if here[name] != there:
                return f"its {name} differs: {here[name]}; the client's: {there}"
        return None


@dataclass(frozen=True)
class Delivery:
    """A library, the columns of its record, and the SHA-256 of its source."""

    worker: str
    record: Mapping[str, Any]
    source: str
    content: bytes
    cached: bool


@dataclass(frozen=True)
class Failure:
    """The compiler refused the kernel, as it would on any machine."""

    worker: str
    record: Mapping[str, Any]
    message: str
    log: str


@dataclass(frozen=True)
class Refusal:
    """This worker does not build the kernel; with ``whole_arch``, no other kernel of the arch either."""

    worker: str
    reason: str
    whole_arch: bool


Reply = Delivery | Failure | Refusal
_REPLIES: Mapping[str, type[Reply]] = MappingProxyType({kind.__name__: kind for kind in (Delivery, Failure, Refusal)})


class _Unwanted(threading.Event):
    """Set when the scheduler no longer wants the task of this thread, to end its compilers."""

    def __init__(self, worker: Any, task: Any) -> None:
        super().__init__()
        self._tasks, self._task = worker.state.tasks, task

    def is_set(self) -> bool:
        task = self._tasks.get(self._task)
        return task is None or task.state not in _RUNNING


@functools.cache
def _builder() -> Builder:
    from catalog.backends import target_of  # a worker is a separate process, and composes its own parts

    return Builder(targets=target_of)


def _task() -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """The function sent to workers: a closure, which Dask sends as code instead of as the name of a module."""

    def task(order: Mapping[str, Any]) -> Mapping[str, Any]:
        from distributed import get_worker

        try:
            from catalog.build.cluster import work
        except ImportError as error:
            reason = f"it cannot import this version of kernel-catalog: {error}"
            return {"kind": "Refusal", "worker": str(get_worker().address), "reason": reason, "whole_arch": True}
        return work(order)

    return task


def work(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Build on a worker: takes an :class:`Order` as a mapping, returns a :data:`Reply` as one, with its ``kind``."""
    from distributed import get_worker

    worker = get_worker()
    reply: Reply
    if fields["release"] != asdict(release()):
        client = ", ".join(f"{name} {value}" for name, value in fields["release"].items())
        reason = f"it has {release()}; the client has {client}"
        reply = Refusal(str(worker.address), reason, whole_arch=True)
    else:
        stop = _Unwanted(worker, worker.get_current_task())
        reply = _reply(Order(**{**fields, "release": release()}), str(worker.address), stop)
    return {"kind": type(reply).__name__, **asdict(reply)}


def _reply(order: Order, address: str, stop: threading.Event) -> Reply:
    try:
        return _build(order, address, stop)
    except Interrupted:
        return Refusal(address, "the build was cancelled", whole_arch=False)
    except CompileError as error:
        message = error.message.replace("does not compile with", f"does not compile on {address} with", 1)
        return Failure(address, error.record.columns, message, error.log)
    except CatalogError as error:
        return Refusal(address, str(error), whole_arch=isinstance(error, ToolchainError))


def _build(order: Order, address: str, stop: threading.Event) -> Reply:
    builder = _builder()
    job = builder.job(read_kernel(json.loads(order.kernel)), stop, order.source)
    if order.key is not None and order.key != job.key.hex:
        reason = order.difference(job.ingredients) or f"its content key differs: {job.key.hex}"
        return Refusal(address, f"it would build another library: {reason}", whole_arch=True)
    built = builder.finish(job, stop)
    library = built.artifact.path.read_bytes()
    return Delivery(address, built.record.columns, job.origin.source, library, built.artifact.cached)


@contextmanager
def connect(address: str) -> Iterator[Cluster]:
    """The cluster whose scheduler listens at ``address``, as ``tcp://host:8786``.

    Raises:
        ClusterError: the extra is not installed, nothing answers in :data:`CONNECT_SECONDS`, or no worker is usable.
    """
    try:
        import distributed
    except ImportError as error:
        raise ClusterError(f"a cluster needs dask.distributed ({error})", hint=how_to_install("cluster")) from None
    for name in ("distributed", "distributed.client", "distributed.gc", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        # Dask warns of versions that differ and still work together; the ones that matter are compared below.
        warnings.simplefilter("ignore", distributed.versions.VersionMismatchWarning)
        try:
            client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False, name="catalog")
        except Exception as error:  # anything that the network, TLS or Dask may raise
            raise ClusterError(
                f"no Dask scheduler answers at {address}: {_brief(error)}",
                hint="dask scheduler starts one and prints its address, as tcp://host:8786.",
            ) from None
    try:
        yield Cluster.of(client, address)
    finally:
        client.close(timeout=_CHECK_SECONDS)


def _brief(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass
class Cluster:
    """The workers behind one scheduler: a :class:`~catalog.build.pools.Pool`.

    ``unfit`` maps workers that are left out from the start to the reasons.
    """

    client: Any
    address: str
    unfit: dict[str, str]

    @classmethod
    def of(cls, client: Any, address: str) -> Cluster:
        """The cluster of a connected client, after checking its workers.

        Raises:
            ClusterError: it has no worker, or none of this version of the package.
        """
        try:
            client.wait_for_workers(1, timeout=CONNECT_SECONDS)
            answers = client.run(release, on_error="return")
        except (OSError, TimeoutError):
            raise ClusterError(
                f"the scheduler at {address} has no workers", hint=f"Start some: dask worker {address} --nthreads 8"
            ) from None
        unfit = {worker: why for worker, answer in answers.items() if (why := _why_unfit(answer)) is not None}
        if len(unfit) == len(answers):
            raise ClusterError(
                f"no worker of {address} can build for this client, which has {release()}: {_by_reason(unfit)}",
                hint="Workers need the same version of kernel-catalog: install it there, and restart them.",
            )
        return cls(client, address, unfit)

    @property
    def notes(self) -> list[str]:
        """Notes about the workers for the user, one line each."""
        return [f"left out: {_by_reason(self.unfit)}"] if self.unfit else []

    @property
    def at_once(self) -> int:
        """Number of threads of the present workers: each waits for a compiler.

        Raises:
            ClusterError: the scheduler is gone.
        """
        return sum(self.workers().values())

    def workers(self) -> dict[str, int]:
        """The present workers by address, each with its number of threads.

        Raises:
            ClusterError: the scheduler is gone.
        """
        try:
            return dict(self.client.nthreads())
        except Exception:  # a closed connection raises many kinds of errors
            raise self.gone() from None

    def gone(self) -> ClusterError:
        """The error for a scheduler that no longer answers."""
        return ClusterError(f"the scheduler at {self.address} is gone", hint=RESUME)

    def results(self, builder: Builder, kernels: Sequence[Kernel]) -> Results:
        """Have ``kernels`` built. Closing the generator cancels waiting kernels and ends running compilers.

        Raises:
            ClusterError: the scheduler is gone, or there were no workers for :data:`WORKERLESS_SECONDS`.
        """
        return _Run(self, builder, kernels).results()


def _why_unfit(answer: object) -> str | None:
    if isinstance(answer, BaseException):
        return f"it cannot import this version of kernel-catalog: {_brief(answer)}"
    return None if answer == release() else f"it has {answer}"


def _by_reason(reasons: Mapping[str, str]) -> str:
    """Reasons with their workers, each reason once."""
    workers: dict[str, list[str]] = {}
    for worker, reason in sorted(reasons.items()):
        workers.setdefault(reason, []).append(worker)
    return "; ".join(
        f"{named[0]}{f' and {len(named) - 1} more' if len(named) > 1 else ''}: {reason}"
        for reason, named in workers.items()
    )


Outcome = Callable[[], Built]


class _Run:
    """One call of :meth:`Cluster.results`.

    Threads compute keys. Their results and the cluster's answers come through one queue; everything else happens in
    the caller's thread.
    """

    def __init__(self, cluster: Cluster, builder: Builder, kernels: Sequence[Kernel]) -> None:
        self._cluster, self._builder, self._kernels = cluster, builder, kernels
        self._stop = threading.Event()
        self._inbox = queue.SimpleQueue[tuple[int, Callable[[], Outcome | None]]]()
        self._futures: dict[int, Any] = {}
        self._orders: dict[int, Order] = {}
        self._unfit: dict[str, dict[str, str]] = {}
        self._refused: dict[int, dict[str, str]] = {}
        self._errors: dict[int, list[str]] = {}
        self._workers_seen = time.monotonic()

    def results(self) -> Results:
        threads = ThreadPoolExecutor(usable_cores(), thread_name_prefix="keys")
        try:
            for place, kernel in enumerate(self._kernels):
                prepared = threads.submit(self._prepare, kernel)
                prepared.add_done_callback(functools.partial(self._put, place, self._prepared))
            left = len(self._kernels)
            while left:
                try:
                    place, take = self._inbox.get(timeout=_CHECK_SECONDS)
                except queue.Empty:
                    self._check_workers()
                    continue
                self._workers_seen = time.monotonic()
                outcome = take()
                if outcome is not None:
                    left -= 1
                    yield place, outcome
        finally:
            self._stop.set()
            if self._futures and self._cluster.client.status == "running":
                self._cluster.client.cancel(list(self._futures.values()), force=True)
            threads.shutdown(cancel_futures=True)

    def _put(self, place: int, take: Callable[[int, Any], Outcome | None], future: Any) -> None:
        self._inbox.put((place, functools.partial(take, place, future)))

    def _check_workers(self) -> None:
        if not self._futures or self._cluster.workers():
            self._workers_seen = time.monotonic()
        elif time.monotonic() - self._workers_seen > WORKERLESS_SECONDS:
            raise ClusterError(f"the scheduler at {self._cluster.address} has no workers any more", hint=RESUME)

    def _prepare(self, kernel: Kernel) -> Built | Order:
        """The library of a kernel if this machine has it, otherwise an order, with its key where it is known."""
        try:
            job = self._builder.job(kernel, self._stop)
        except CompileError:
            raise
        except (ToolchainError, BuildError):
            # No compiler or checkout here: the workers decide.
            return Order(kernel.model_dump_json(), release())
        return self._builder.find(job) or Order(
            kernel.model_dump_json(), release(), job.unit.source, job.key.hex, job.ingredients
        )

    def _prepared(self, place: int, future: LocalFuture[Built | Order]) -> Outcome | None:
        try:
            made = future.result()
        except (BuildError, ToolchainError) as error:
            return _raising(error)
        if isinstance(made, Built):
            return lambda: made
        self._orders[place] = made
        return self._send(place)

    def _send(self, place: int) -> Outcome | None:
        """Send the kernel to a worker that has not refused it; return an outcome if there is no such worker."""
        arch = self._kernels[place].arch
        refused = self._cluster.unfit | self._unfit.get(arch, {}) | self._refused.get(place, {})
        fit = set(self._cluster.workers()) - set(refused) if refused else None
        if fit is not None and not fit:
            return _raising(
                ToolchainError(f"no worker of {self._cluster.address} builds kernels of {arch}: {_by_reason(refused)}")
            )
        future = self._cluster.client.submit(
            _task(),
            asdict(self._orders[place]),
            pure=False,
            workers=None if fit is None else sorted(fit),
            allow_other_workers=fit is not None,  # so that no kernel waits for a worker that died
        )
        self._futures[place] = future
        future.add_done_callback(functools.partial(self._put, place, self._answered))
        return None

    def _answered(self, place: int, future: Any) -> Outcome | None:
        del self._futures[place]
        if future.status == "cancelled":
            raise self._cluster.gone()
        if future.status == "error":
            return self._failed(place, future.exception())
        fields = dict(future.result())
        reply = _REPLIES[fields.pop("kind")](**fields)
        if isinstance(reply, Refusal):
            return self._refuse(place, reply)
        try:
            record = ArtifactRecord.from_columns(dict(reply.record))
        except ValueError:
            return self._refuse(place, Refusal(reply.worker, "its records are of another version", whole_arch=True))
        fault = self._fault(place, record, reply)
        if fault is not None:
            return self._refuse(place, Refusal(reply.worker, fault, whole_arch=False))
        return functools.partial(self._admit, place, record, reply)

    def _admit(self, place: int, record: ArtifactRecord, reply: Delivery | Failure) -> Built:
        if isinstance(reply, Failure):
            raise self._builder.admit_failure(record, reply.message, reply.log, self._stop)
        origin = Origin(self._kernels[place].name, release().abi, reply.source)
        return self._builder.admit(record, origin, reply.content, self._stop, cached=reply.cached)

    def _fault(self, place: int, record: ArtifactRecord, reply: Delivery | Failure) -> str | None:
        """What is wrong with a worker's reply, which is then discarded as a whole; None if nothing is."""
        if record.kernel_id != self._kernels[place].id or _DIGEST.fullmatch(record.key) is None:
            return f"it sent the record of something else: {record.key[:64]!r} of kernel {record.kernel_id[:64]!r}"
        if isinstance(reply, Failure):
            return None
        if self._orders[place].key not in {None, record.key}:
            return f"it sent a library with another content key: {record.key}"
        sent = (hashlib.sha256(reply.content).hexdigest(), len(reply.content))
        if sent != (record.so_sha256, record.so_bytes) or record.status != "built":
            return "it sent a library that differs from its record"
        return None

    def _refuse(self, place: int, refusal: Refusal) -> Outcome | None:
        of_all = self._unfit.setdefault(self._kernels[place].arch, {})
        reasons = of_all if refusal.whole_arch else self._refused.setdefault(place, {})
        reasons[refusal.worker] = refusal.reason
        return self._send(place)

    def _failed(self, place: int, error: BaseException) -> Outcome | None:
        """Handle workers that died too often, or an exception that :func:`work` does not expect."""
        from distributed.scheduler import KilledWorker

        if isinstance(error, KilledWorker):
            died = f"{error.allowed_failures + 1} workers died while they built kernel {self._kernels[place].name}"
            hint = "Do they have enough memory for their compilers? dask worker --nthreads sets how many run at a time."
            return _raising(BuildError(died, hint=hint))
        errors = self._errors.setdefault(place, [])
        errors.append(f"{type(error).__name__}: {_brief(error)}")
        if len(errors) < TRIES:
            return self._send(place)
        return _raising(BuildError(f"workers of {self._cluster.address} fail: {errors[-1]}"))


def _raising(error: CatalogError) -> Outcome:
    def outcome() -> Built:
        raise error

    return outcome
