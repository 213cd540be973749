"""The process of a first run, seen from the parent: it is started, watched, and judged by how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

START_SECONDS = 60.0
"""Seconds that the process may take to start; the time limit counts from then on."""

PATIENCE = 10
"""A process that gets too little CPU time may take this many times its limit by the clock."""

_POLL_SECONDS = 0.1
_LATER_SECONDS = 5.0
"""The process ends itself this much later than its parent would end it, in case the parent is gone."""

_CHILD = "catalog.runtime.guard_child"

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
"""Signals by which code ends its own process. Others come from outside: a stopped service, a system out of memory."""


_LAST = ("blamed", "unguarded")
"""Kinds of endings after which the process exits."""


Kind = Literal["passed", "blamed", "refused", "unguarded", "unknown"]


@dataclass(frozen=True)
class Ending:
    """How a first run ended; ``stage`` is the kernel that was loaded or run last, ``about`` has details.

    - passed: all kernels finished, and their results were right if they were compared.
    - blamed: the stage's kernel crashed, hung, or gave a wrong result.
    - refused: the stage's library does not load, or its kernel rejects the call; the process continued.
    - unguarded: the process did not start, or cannot use the device.
    - unknown: anything else, which may or may not be the kernel's fault.
    """

    kind: Kind
    stage: int = 0
    about: str = ""


def first_runs(device: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], seconds: float) -> list[Ending]:
    """Run plans in child processes, which end before this function returns; return how each run ended.

    One process does the runs one after another until a kernel ends it; a new process does the rest.

    Args:
        device: its :attr:`~catalog.runtime.devices.Device.identity`.
        runs: the runs as :mod:`catalog.runtime.guard_child` reads them, at least one.
        seconds: limit of each step of a run that has no limit of its own, both by the clock and of CPU time.
    """
    endings: list[Ending] = []
    while len(endings) < len(runs):
        endings += _runs_of_one_process(device, runs[len(endings) :], seconds)
    return endings


def _runs_of_one_process(device: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], seconds: float) -> list[Ending]:
    """How the runs that one process started ended: at least one, or all if the process cannot start any."""
    folder = Path(__file__).parents[2]  # -m searches it first, so the child imports this very package
    search_path = map(os.path.abspath, filter(None, [*sys.path, str(folder)]))
    try:
        process = subprocess.Popen(  # noqa: S603 - this Python, and a module of ours
            [sys.executable, "-m", _CHILD],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return [Ending("unguarded", about=f"{sys.executable}: {error.strerror}")] * len(runs)
    request = {"device": device, "runs": runs, "seconds": PATIENCE * seconds + _LATER_SECONDS}
    try:
        output, said, why = _watched(process, json.dumps(request).encode(), seconds)
    finally:
        if process.returncode is None:
            _killed(process)
    endings, stage = _reported(output)
    if len(endings) < len(runs) and not (endings and endings[-1].kind in _LAST):
        endings.append(_died(process, stage, why, None if output else said))
    if endings[-1].kind == "unguarded":
        endings += [endings[-1]] * (len(runs) - len(endings))
    return endings


def _killed(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Kill the process with everything its libraries started; return its output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def _watched(process: subprocess.Popen[bytes], asked: bytes, seconds: float) -> tuple[bytes, bytes, Ending | None]:
    """Send the request and wait until the process ends; return its output, and the verdict if its time ran out.

    Each message restarts the limit: ``seconds``, or the limit that the message states. A process is blamed only if it
    used up the limit both by the clock and in CPU time, because a suspended or overloaded machine is not the kernel's
    fault; or if all its threads sleep without progress, because then it waits for something that never happens.
    """
    count, began, before, limit = 0, time.monotonic(), 0.0, START_SECONDS
    question: bytes | None = asked
    last: _Activity | None = None
    while True:
        try:
            return *process.communicate(question, timeout=_POLL_SECONDS), None
        except subprocess.TimeoutExpired as expired:
            output = expired.output or b""
        question = None  # send it only once
        now = _activity(process.pid)
        messages = list(_messages(output))
        if len(messages) > count:
            count, began, before = len(messages), time.monotonic(), now.cpu_seconds if now else 0.0
            limit = messages[-1].get("seconds", seconds)
        elapsed = time.monotonic() - began
        if elapsed >= limit:
            if not count:
                return *_killed(process), Ending("unguarded", about=f"it takes more than {limit:g} s")
            had = limit if now is None else now.cpu_seconds - before
            if had >= limit or (now is not None and now.asleep and now == last):
                return *_killed(process), Ending("blamed", about=f"did not end within {limit:g} s")
            if elapsed >= PATIENCE * limit:
                about = f"had {had:.2g} s of CPU time in {elapsed:.0f} s and did not end"
                return *_killed(process), Ending("unknown", about=about)
        last = now


@dataclass(frozen=True)
class _Activity:
    """Total CPU time of a process's threads, and whether all of them sleep."""

    cpu_seconds: float
    asleep: bool


def _activity(pid: int) -> _Activity | None:
    """The activity of a process; None if it has ended or the system does not report it."""
    try:
        threads = [_stat(task / "stat") for task in Path(f"/proc/{pid}/task").iterdir()]
        process = _stat(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    ticks = int(process[11]) + int(process[12])  # utime, stime: proc_pid_stat(5)
    return _Activity(ticks / os.sysconf("SC_CLK_TCK"), all(thread[0] == "S" for thread in threads))


def _stat(path: Path) -> list[str]:
    """The fields of a ``stat`` file from the third on; the name before them may contain any character."""
    return path.read_text(errors="replace").rpartition(")")[2].split()


def _messages(output: bytes) -> Iterator[Mapping[str, Any]]:
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _reported(output: bytes) -> tuple[list[Ending], int | None]:
    """The endings that a process has reported, and the stage that it was in afterwards, if any."""
    endings: list[Ending] = []
    stage: int | None = None
    for message in _messages(output):
        if "end" not in message:
            stage = message.get("stage")
            continue
        stage = message.get("stage", stage)
        kind: Kind = "unknown" if message["end"] == "refused" and stage is None else message["end"]
        endings.append(Ending(kind, stage or 0, message.get("about", "")))
        stage = None
    return endings, stage


def _died(process: subprocess.Popen[bytes], stage: int | None, why: Ending | None, said: bytes | None) -> Ending:
    """How the last run of an ended process ended.

    Args:
        process: the process.
        stage: the kernel that was being loaded or launched; only that one can be blamed.
        why: why the process was killed; None if it ended by itself.
        said: its error output, if it reported nothing else.
    """
    status = process.returncode
    if why is None and status < 0:
        crashed: Kind = "blamed" if -status in _CRASHES else "unknown"
        why = Ending(crashed, about=f"died of {signal.Signals(-status).name}")
    if why is None and said is not None:
        last_line = said.decode(errors="replace").strip().rpartition("\n")[2]
        return Ending("unguarded", about=last_line or f"it ended with exit status {status}")
    if why is None:
        why = Ending("unknown", about=f"ended with exit status {status} before the kernel had returned")
    if why.kind == "blamed" and stage is None:
        return replace(why, kind="unknown")
    return replace(why, stage=stage or 0)
