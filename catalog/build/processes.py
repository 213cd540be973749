"""Compilers as child processes that never outlive their build."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_POLL_SECONDS = 0.1

# These variables add search paths and output files that content keys do not cover.
_HIDDEN_INPUTS = frozenset(
    {
        "CCC_OVERRIDE_OPTIONS",
        "COMPILER_PATH",
        "CPATH",
        "CPLUS_INCLUDE_PATH",
        "C_INCLUDE_PATH",
        "DEPENDENCIES_OUTPUT",
        "GCC_COMPARE_DEBUG",
        "GCC_EXEC_PREFIX",
        "LD_RUN_PATH",
        "LIBRARY_PATH",
        "SUNPRO_DEPENDENCIES",
    }
)


class Interrupted(Exception):
    """The build was cancelled while it waited or compiled."""


@dataclass(frozen=True)
class Completed:
    """The end of a command: ``output`` is stdout and stderr as one text, ``failure`` says why it failed, if it did."""

    output: str
    failure: str | None
    timed_out: bool = False


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _HIDDEN_INPUTS}
    return kept | {"LC_ALL": "C"}  # because messages are parsed


def _kill(process: subprocess.Popen[str]) -> str:
    """Kill the compiler driver and the programs that it started, and return what they printed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0]


def _failure(returncode: int) -> str | None:
    if returncode == 0:
        return None
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit status {returncode}"


def _communicate(process: subprocess.Popen[str], timeout: float, stop: threading.Event) -> Completed:
    deadline = time.monotonic() + timeout
    while not stop.is_set():
        try:
            output, _ = process.communicate(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline:
                continue
            return Completed(_kill(process), f"stopped after {timeout:g} s", timed_out=True)
        return Completed(output, _failure(process.returncode))
    raise Interrupted


def run(
    command: Sequence[str],
    work_dir: Path,
    timeout: float,
    stop: threading.Event,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Completed:
    """Run ``command`` in ``work_dir`` until it ends, ``timeout`` seconds pass or ``stop`` is set.

    ``variables`` are set in its environment.

    Raises:
        Interrupted: ``stop`` was set; the command and its children are dead.
        OSError: the program cannot be started.
    """
    process = subprocess.Popen(  # noqa: S603 - the command is a compiler's or a generator's, never a shell's
        command,
        cwd=work_dir,
        env=_environment() | dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        return _communicate(process, timeout, stop)
    finally:
        if process.returncode is None:
            _kill(process)
