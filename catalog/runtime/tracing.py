"""Recording of plan calls, one line per call, in a file that any number of processes can append to.

Each line is one write to a file opened for appending, so lines of processes and threads do not mix, and a killed
process leaves all its earlier calls. :mod:`catalog.runtime.traces` reads such files and handles a line that a kill cut
short.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from catalog.errors import CatalogError, UsageError
from catalog.files import StrPath
from catalog.forks import Lock
from catalog.settings import TRACE_MAX_BYTES, TRACE_MAX_CALLS, settings

if TYPE_CHECKING:
    from typing_extensions import Self

    from catalog.runtime.bound import Taken
    from catalog.runtime.devices import Device
    from catalog.runtime.plan import Plan
    from catalog.runtime.tensors import Array, Strided

_log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the line format."""

Kind = Literal["run", "launch", "enqueue"]

_NANO = 1e6
"""Nanoseconds per millisecond."""

active: tuple[Tracer, ...] = ()
"""The tracers that record now. Calls check it first: while it is empty, this check is their only cost."""

_switch = Lock()
_listeners: list[Callable[[bool], object]] = []
_by_settings: Tracer | None = None
_pauses = 0


def folder_of(path: Path) -> Path:
    """The folder of the tensors of the trace at ``path``."""
    return path.with_name(f"{path.name}.tensors")


@contextmanager
def trace(
    path: StrPath,
    *,
    tensors: bool | int = False,
    max_bytes: int = TRACE_MAX_BYTES,
    max_calls: int = TRACE_MAX_CALLS,
) -> Iterator[None]:
    """Record every plan call in this process: runs, launches of bound plans, and enqueued work.

    Calls are appended to the file, which other processes may write too; ``catalog replay`` runs them again.

    Args:
        path: the file, in JSON Lines; created if it does not exist.
        tensors: number of calls per problem whose inputs are kept, in the folder ``PATH.tensors``; True: one.
        max_bytes: maximum total bytes of kept inputs; a call that would exceed it is recorded without inputs.
        max_calls: maximum number of recorded calls; a last line says that there were more.

    Raises:
        UsageError: the file cannot be written, or a limit is negative.
    """
    tracer = Tracer(Path(path), int(tensors), max_bytes, max_calls)
    _switch_on(tracer)
    try:
        yield
    finally:
        _switch_off(tracer)


def when_switched(listener: Callable[[bool], object]) -> None:
    """Tell ``listener`` whether calls are recorded: now, and whenever that changes."""
    with _switch:
        _listeners.append(listener)
        listener(bool(active))


@contextmanager
def paused() -> Iterator[None]:
    """Pause all recording: the catalog's own runs, such as timing, are not calls of the user."""
    global _pauses  # noqa: PLW0603
    with _switch:
        before = active
        _set(())
        _pauses += 1
    try:
        yield
    finally:
        with _switch:
            _set(before)
            _pauses -= 1


def follow_settings() -> None:
    """Start recording if the settings request it; plans call this when they load their kernels.

    Raises:
        UsageError: the file named by the settings cannot be written.
    """
    global _by_settings  # noqa: PLW0603
    chosen = settings()
    if _pauses or chosen.trace == (None if _by_settings is None else _by_settings.path):
        return
    with _switch:
        if _by_settings is not None:
            _switch_off(_by_settings)
            _by_settings = None
        if chosen.trace is not None:
            _by_settings = Tracer(chosen.trace, chosen.trace_tensors, chosen.trace_max_bytes, chosen.trace_max_calls)
            _switch_on(_by_settings)


def _set(tracers: tuple[Tracer, ...]) -> None:
    """Record with these from now on; the lock is held."""
    global active  # noqa: PLW0603 - a module variable is the cheapest check for a call
    active = tracers
    for listener in _listeners:
        listener(bool(active))


def _switch_on(tracer: Tracer) -> None:
    with _switch:
        _set((*active, tracer))


def _switch_off(tracer: Tracer) -> None:
    with _switch:
        _set(tuple(other for other in active if other is not tracer))
    tracer.close()


class Recorded:
    """Records one call: a ``with`` block around it keeps its inputs before and writes its time afterwards.

    The time is the block's unless :meth:`took` is called. A call that fails is recorded with its error.
    """

    __slots__ = ("_device", "_kept", "_kind", "_launches", "_ms", "_plan", "_start", "_taken", "_tracers")

    def __init__(self, kind: Kind, plan: Plan, device: Device[Any], taken: Taken) -> None:
        self._kind, self._plan, self._device, self._taken = kind, plan, device, taken
        self._tracers = active
        self._launches = 1
        self._ms: float | None = None

    def took(self, nanoseconds: list[int]) -> None:
        """Set the nanoseconds of each of the call's launches."""
        self._launches, self._ms = len(nanoseconds), median(nanoseconds) / _NANO

    def __enter__(self) -> Self:
        self._kept = [tracer.keep(self._plan, self._device, self._taken) for tracer in self._tracers]
        self._start = time.perf_counter_ns()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        ms = self._ms
        if ms is None and (self._kind != "enqueue" or not self._device.queues):
            ms = (time.perf_counter_ns() - self._start) / _NANO
        start = (
            f'{{"format":{FORMAT},"call":"{self._kind}","at":{time.time():.6f},"pid":{os.getpid()},'
            f'"ms":{"null" if ms is None else f"{ms:.6f}"},"launches":{self._launches},'
        )
        if self._taken.seed is not None:
            start += f'"seed":{self._taken.seed},'
        if error is not None:
            start += f'"error":{json.dumps(f"{type(error).__name__}: {error}")},'
        about = _about(self._plan, self._device)
        for tracer, kept in zip(self._tracers, self._kept, strict=True):
            tracer.write(f"{start}{about}}}\n" if kept is None else f'{start}"tensors":"{kept}",{about}}}\n')


_abouts: weakref.WeakKeyDictionary[Plan, str] = weakref.WeakKeyDictionary()


def _about(plan: Plan, device: Device[Any]) -> str:
    """The fields that all calls of a plan share, as members of a JSON object."""
    about = _abouts.get(plan)
    if about is None:
        main, info = plan.kernels[0], device.device
        fields = {
            "arch": plan.arch,
            "revision": main.revision,
            "mask_impl": main.variant,
            "device": info.name,
            "cores": info.cores,
            "kernels": [kernel.name for kernel in plan.kernels],
            **plan.services.policy._asdict(),
        }
        members = json.dumps(fields, separators=(",", ":")).removeprefix("{").removesuffix("}")
        about = _abouts[plan] = f'{members},"problem":{plan.problem.key}'
    return about


class Tracer:
    """Appends calls to one file.

    Args:
        path: the file.
        tensors: number of calls per problem whose inputs are kept.
        max_bytes: maximum total bytes of kept inputs.
        max_calls: maximum number of recorded calls.

    Raises:
        UsageError: the file cannot be written, or a limit is negative.
    """

    def __init__(self, path: Path, tensors: int, max_bytes: int, max_calls: int) -> None:
        for name, limit in (("tensors", tensors), ("max_bytes", max_bytes), ("max_calls", max_calls)):
            if limit < 0:
                raise UsageError(f"{name} of a trace is {limit}: expected 0 or more")
        self.path = path
        self._folder = folder_of(path.absolute())  # the process may change its working folder
        self._tensors, self._max_bytes, self._max_calls = tensors, max_bytes, max_calls
        self._calls = count(1)
        self._kept: dict[str, int] = {}
        self._bytes = 0
        self._lock = Lock()
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"{path}: the trace cannot be written: {error.strerror}") from None
        self._open = True
        # Closed with the last reference, not by close(): a writer must not find its descriptor reused by another file.
        weakref.finalize(self, os.close, self._file).atexit = False

    def close(self) -> None:
        """Stop writing."""
        self._open = False

    def write(self, line: str) -> None:
        """Append a call's line; if that fails, warn once and stop writing, since the call itself has succeeded."""
        if not self._open:
            return
        if next(self._calls) > self._max_calls:
            self._open = False
            line = (
                f'{{"format":{FORMAT},"call":"full","at":{time.time():.6f},"pid":{os.getpid()},'
                f'"calls":{self._max_calls}}}\n'
            )
        data = line.encode()
        try:
            if os.write(self._file, data) == len(data):
                return
            reason = "no space is left"
        except OSError as error:
            reason = str(error.strerror)
        self._open = False
        _log.warning("%s: calls are no longer recorded: %s", self.path, reason)

    def keep(self, plan: Plan, device: Device[Any], taken: Taken) -> str | None:
        """Write the inputs of a call if requested and not all are seeded; return the file's name, else None."""
        problem = plan.problem
        if taken.seed is not None or not self._open or self._kept.get(problem.key, 0) >= self._tensors:
            return None
        inputs = {name: array for name, array in taken.arrays.items() if problem.tensors[name].role != "output"}
        size = sum(math.prod(array.shape) * array.dtype.itemsize for array in inputs.values())
        with self._lock:
            if self._kept.get(problem.key, 0) >= self._tensors:
                return None  # another thread's call came first
            self._kept[problem.key] = self._kept.get(problem.key, 0) + 1
            fits = self._bytes + size <= self._max_bytes
            self._bytes += size * fits
        if not fits:
            _log.warning("%s: inputs of %s bytes are not kept: they would exceed its limit", self.path, f"{size:,}")
            return None
        try:
            arrays = _on_host(device, inputs)
            if arrays is not None:
                return _save(self._folder, problem.key, arrays)
            with self._lock:  # keep the inputs of the next call instead
                self._kept[problem.key] -= 1
                self._bytes -= size
            return None
        except (OSError, CatalogError) as error:
            _log.warning("%s: the inputs of a call are not kept: %s", self.path, error)
            return None


def _on_host(device: Device[Any], inputs: Mapping[str, Strided]) -> dict[str, Array] | None:
    """Copies of the inputs on the host; None during the capture of a stream, when copying is impossible."""
    arrays: dict[str, Array] = {}
    for name, array in inputs.items():
        on_host = device.on_host(array)
        if on_host is None:
            return None
        arrays[name] = on_host
    return arrays


def _save(folder: Path, key: str, arrays: Mapping[str, Array]) -> str:
    """Write the arrays atomically to a new file; return its name."""
    from catalog.runtime.array_files import save_arrays

    folder.mkdir(exist_ok=True)
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:12]}-{uuid.uuid4().hex[:12]}.npz"
    save_arrays(folder / name, arrays)
    return name
