"""The process of a first run, from the outside: started, watched, and judged by how it ended."""

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
"""How long the process may take to start; the time limit counts from then on."""

PATIENCE = 10
"""How many times the limit a process may take that the machine gives too little of its processors."""

_POLL_SECONDS = 0.1
_LATER_SECONDS = 5.0
"""How much later than its parent would the process ends itself: for when the parent is gone."""

_CHILD = "catalog.runtime.guard_child"

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
"""What code does to its process itself. Other signals come from outside: of a service that stops, of a system that has
no memory left."""


@dataclass(frozen=True)
class Ending:
    """How a first run ended; ``stage`` is the kernel that was loaded or ran last, ``about`` says more.

    - passed: all kernels ran to their end.
    - blamed: the stage's kernel crashed or hung.
    - refused: the stage's library does not load, or its kernel does not take the call; the process went on.
    - unguarded: the process did not start.
    - unknown: all else, which may be the kernel's fault or not.
    """

    kind: Literal["passed", "blamed", "refused", "unguarded", "unknown"]
    stage: int = 0
    about: str = ""


def first_run(request: Mapping[str, Any], seconds: float) -> Ending:
    """Run libraries in a process of their own, which ends with this call.

    Args:
        request: what :mod:`catalog.runtime.guard_child` reads, but for the time.
        seconds: how long it may take once it has started, where the machine gives it so much CPU time.
    """
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
            start_new_session=True,
        )
    except OSError as error:
        return Ending("unguarded", about=f"{sys.executable}: {error.strerror}")
    asked = json.dumps({**request, "seconds": PATIENCE * seconds + _LATER_SECONDS}).encode()
    try:
        output, said, why = _watched(process, asked, seconds)
    finally:
        if process.returncode is None:
            _killed(process)
    return _ending(list(_messages(output)), why, process.returncode, said.decode(errors="replace"))


def _killed(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """End the process and what its libraries have started; what it has printed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def _watched(process: subprocess.Popen[bytes], asked: bytes, seconds: float) -> tuple[bytes, bytes, Ending | None]:
    """Ask the process and wait until it ends: what it printed, and what to make of it where its time was up before.

    Once it has started it has ``seconds``, by the clock and of CPU time: a machine that is suspended or overloaded is
    not the kernel's fault. A process all of whose threads sleep waits for what never comes: it needs no more CPU time.
    """
    started, began, before = False, time.monotonic(), 0.0
    question: bytes | None = asked
    last: _Activity | None = None
    while True:
        try:
            return *process.communicate(question, timeout=_POLL_SECONDS), None
        except subprocess.TimeoutExpired as expired:
            output = expired.output or b""
        question = None  # is asked once
        now = _activity(process.pid)
        if not started and b"\n" in output:
            started, began, before = True, time.monotonic(), now.cpu_seconds if now else 0.0
        elapsed = time.monotonic() - began
        if not started and elapsed >= START_SECONDS:
            return *_killed(process), Ending("unguarded", about=f"it takes more than {START_SECONDS:g} s")
        if started and elapsed >= seconds:
            had = seconds if now is None else now.cpu_seconds - before
            if had >= seconds or (now is not None and now.asleep and now == last):
                return *_killed(process), Ending("blamed", about=f"did not end within {seconds:g} s")
            if elapsed >= PATIENCE * seconds:
                about = f"had {had:.2g} s of CPU time in {elapsed:.0f} s and did not end"
                return *_killed(process), Ending("unknown", about=about)
        last = now


@dataclass(frozen=True)
class _Activity:
    """CPU time that the threads of a process have had together, and whether all of them sleep."""

    cpu_seconds: float
    asleep: bool


def _activity(pid: int) -> _Activity | None:
    """What a process does; None where the system does not say, or it has ended."""
    try:
        threads = [_stat(task / "stat") for task in Path(f"/proc/{pid}/task").iterdir()]
        process = _stat(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    ticks = int(process[11]) + int(process[12])  # utime, stime: proc_pid_stat(5)
    return _Activity(ticks / os.sysconf("SC_CLK_TCK"), all(thread[0] == "S" for thread in threads))


def _stat(path: Path) -> list[str]:
    """The fields of a ``stat`` file from the third on: before them is a name, which may hold anything."""
    return path.read_text(errors="replace").rpartition(")")[2].split()


def _messages(output: bytes) -> Iterator[Mapping[str, Any]]:
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _ending(messages: Sequence[Mapping[str, Any]], why: Ending | None, status: int, said: str) -> Ending:
    """What the messages of the process and its exit status say; it may have ended anywhere."""
    stages = [message["stage"] for message in messages if "stage" in message]
    stage = stages[-1] if stages else 0
    last = messages[-1] if messages else {}
    if last.get("end") == "passed":
        return Ending("passed", stage)
    if "end" in last:
        return Ending("refused" if stages else "unknown", stage, last["end"])
    if "unknown" in last:
        return Ending("unknown", stage, last["unknown"])
    if why is not None:
        return replace(why, stage=stage)
    if status < 0:
        about = f"died of {signal.Signals(-status).name}"
        return Ending("blamed" if stages and -status in _CRASHES else "unknown", stage, about)
    about = f"ended with exit status {status}"
    return (
        Ending("unknown", stage, f"{about} before the kernel had returned")
        if stages
        else Ending("unguarded", about=said.strip().rpartition("\n")[2] or f"it {about}")
    )
