"""Recording the calls of plans: a line a call, in a file that any number of processes append to.

A line is one write to a file that is opened for appending, so lines of processes and threads do not mix, and a process
that is killed leaves all calls before. :mod:`catalog.runtime.traces` reads such files, and knows the one line that a
kill may have cut short.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from catalog.errors import CatalogError, UsageError
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
"""The version of the lines."""

Kind = Literal["run", "launch", "enqueue"]

_NANO = 1e6
"""Nanoseconds of a millisecond."""

active: tuple[Tracer, ...] = ()
"""What records now. Calls look here first: while it is empty, this look is all that they pay."""

_switch = Lock()
_by_settings: Tracer | None = None
_pauses = 0


def folder_of(path: Path) -> Path:
    """Where the tensors of the trace at ``path`` lie."""
    return path.with_name(f"{path.name}.tensors")


@contextmanager
def trace(
    path: Path | str,
    *,
    tensors: bool | int = False,
    max_bytes: int = TRACE_MAX_BYTES,
    max_calls: int = TRACE_MAX_CALLS,
) -> Iterator[None]:
    """Record every call of a plan in this process: runs, launches of bound plans, what is enqueued.

    Calls are appended to the file, which other processes may write too; ``catalog replay`` runs them again.

    Args:
        path: the file, of JSON lines; made when it is not there.
        tensors: keep the inputs of so many calls of each problem, True: of one; beside the file, in ``PATH.tensors``.
        max_bytes: of kept inputs together, at the most; a call that would exceed it is recorded without them.
        max_calls: recorded at the most; a last line says that there were more.

    Raises:
        UsageError: the file cannot be written, or a limit is negative.
    """
    tracer = Tracer(Path(path), int(tensors), max_bytes, max_calls)
    _switch_on(tracer)
    try:
        yield
    finally:
        _switch_off(tracer)


@contextmanager
def paused() -> Iterator[None]:
    """Record nothing meanwhile: what the catalog runs for its own purposes is not what was asked for."""
    global active, _pauses  # noqa: PLW0603 - a module's variable is the cheapest thing a call can look at
    with _switch:
        before, active = active, ()
        _pauses += 1
    try:
        yield
    finally:
        with _switch:
            active = before
            _pauses -= 1


def follow_settings() -> None:
    """Record from now on, if the settings say so; plans ask when they load their kernels.

    Raises:
        UsageError: the file of the settings cannot be written.
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


def _switch_on(tracer: Tracer) -> None:
    global active  # noqa: PLW0603
    with _switch:
        active = (*active, tracer)


def _switch_off(tracer: Tracer) -> None:
    global active  # noqa: PLW0603
    with _switch:
        active = tuple(other for other in active if other is not tracer)
    tracer.close()


class Recorded:
    """One call, for a ``with`` block around it: its inputs are kept before, its time is written behind.

    The time is the block's, unless :meth:`took` says better. A call that fails is recorded with its error.
    """

    __slots__ = ("_device", "_kept", "_kind", "_launches", "_ms", "_plan", "_start", "_taken", "_tracers")

    def __init__(self, kind: Kind, plan: Plan, device: Device[Any], taken: Taken) -> None:
        self._kind, self._plan, self._device, self._taken = kind, plan, device, taken
        self._tracers = active
        self._launches = 1
        self._ms: float | None = None

    def took(self, nanoseconds: list[int]) -> None:
        """The call was so many launches, and this is how long each took."""
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
    """What all calls of a plan have in common, as the members of a JSON object."""
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
        }
        members = json.dumps(fields, separators=(",", ":")).removeprefix("{").removesuffix("}")
        about = _abouts[plan] = f'{members},"problem":{plan.problem.key}'
    return about


class Tracer:
    """Appends to one file.

    Args:
        path: the file.
        tensors: calls of each problem whose inputs are kept.
        max_bytes: of these inputs.
        max_calls: that are recorded.

    Raises:
        UsageError: the file cannot be written, or a limit is negative.
    """

    def __init__(self, path: Path, tensors: int, max_bytes: int, max_calls: int) -> None:
        for name, limit in (("tensors", tensors), ("max_bytes", max_bytes), ("max_calls", max_calls)):
            if limit < 0:
                raise UsageError(f"a trace's {name} is {limit}: expected 0 or more")
        self.path = path
        self._folder = folder_of(path.absolute())  # the process may go to another folder
        self._tensors, self._max_bytes, self._max_calls = tensors, max_bytes, max_calls
        self._calls = count(1)
        self._kept: dict[str, int] = {}
        self._bytes = 0
        self._lock = Lock()
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"{path}: no trace can be written there: {error.strerror}") from None
        self._open = True
        # Who writes refers to this object: the descriptor is not closed, and becomes another file's, meanwhile.
        weakref.finalize(self, os.close, self._file).atexit = False

    def close(self) -> None:
        """Write no more."""
        self._open = False

    def write(self, line: str) -> None:
        """Append the line of a call; where that fails, tell so once, and write no more: the call itself is done."""
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
        _log.warning("%s: calls are not recorded any more: %s", self.path, reason)

    def keep(self, plan: Plan, device: Device[Any], taken: Taken) -> str | None:
        """Write the inputs of a call, if they are wanted, and there are any but seeded ones; the file's name."""
        problem = plan.problem
        if taken.seed is not None or not self._open or self._kept.get(problem.key, 0) >= self._tensors:
            return None
        inputs = {name: array for name, array in taken.arrays.items() if problem.tensors[name].role != "output"}
        size = sum(math.prod(array.shape) * array.dtype.itemsize for array in inputs.values())
        with self._lock:
            if self._kept.get(problem.key, 0) >= self._tensors:
                return None  # another thread's call was first
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
            with self._lock:  # the next call's are kept instead
                self._kept[problem.key] -= 1
                self._bytes -= size
            return None
        except (OSError, CatalogError) as error:
            _log.warning("%s: the inputs of a call are not kept: %s", self.path, error)
            return None


def _on_host(device: Device[Any], inputs: Mapping[str, Strided]) -> dict[str, Array] | None:
    """What the inputs hold now; None where that cannot be asked, in a stream that is being captured."""
    arrays: dict[str, Array] = {}
    for name, array in inputs.items():
        on_host = device.on_host(array)
        if on_host is None:
            return None
        arrays[name] = on_host
    return arrays


def _save(folder: Path, key: str, arrays: Mapping[str, Array]) -> str:
    """Write the arrays into a new file, which appears whole; its name."""
    from catalog.runtime.array_files import save_arrays

    folder.mkdir(exist_ok=True)
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:12]}-{uuid.uuid4().hex[:12]}.npz"
    save_arrays(folder / name, arrays)
    return name
