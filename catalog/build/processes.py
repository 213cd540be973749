"""Compilers as child processes that never outlive their build."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_POLL_SECONDS = 0.5
_PIECE_BYTES = 2**16

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


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the compiler driver and the programs that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _failure(returncode: int) -> str | None:
    if returncode == 0:
        return None
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit status {returncode}"


def _read(
    process: subprocess.Popen[bytes], folder: Path, timeout: float, stop: threading.Event, most_bytes: int | None
) -> Completed:
    """Read what the process prints until it ends or must be stopped."""
    assert process.stdout is not None, "it is a pipe"  # noqa: S101
    pipe, printed, ended = process.stdout.fileno(), bytearray(), False
    deadline, readable = time.monotonic() + timeout, select.poll()
    readable.register(pipe, select.POLLIN)
    while not stop.is_set():
        if ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return Completed(_text(printed), _failure(process.wait(_POLL_SECONDS)))
        elif readable.poll(_POLL_SECONDS * 1000):
            piece = os.read(pipe, _PIECE_BYTES)
            printed += piece
            ended = not piece
        if most_bytes is not None and most_bytes < max(len(printed), _written(folder)):
            return Completed(_text(printed), f"stopped after {most_bytes / 2**20:g} MiB of output")
        if time.monotonic() >= deadline:
            return Completed(_text(printed), f"stopped after {timeout:g} s", timed_out=True)
    raise Interrupted


def _text(printed: bytes | bytearray) -> str:
    return printed.decode(errors="replace")


def _written(folder: Path) -> int:
    """Bytes of the files in a folder; files in its subfolders do not count."""
    written = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # it was temporary
                written += entry.stat().st_size if entry.is_file(follow_symlinks=False) else 0
    return written


def run(
    command: Sequence[str],
    work_dir: Path,
    timeout: float,
    stop: threading.Event,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    most_bytes: int | None = None,
) -> Completed:
    """Run ``command`` in ``work_dir`` until it ends, ``timeout`` seconds pass or ``stop`` is set.

    ``variables`` are set in its environment. A command that prints more than ``most_bytes``, or writes more to files
    in ``work_dir``, is stopped, too.

    Raises:
        Interrupted: ``stop`` was set; the command and its children are dead.
        OSError: the program cannot be started.
    """
    with subprocess.Popen(  # noqa: S603 - the command is a compiler's or a generator's, never a shell's
        command,
        cwd=work_dir,
        env=_environment() | dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            return _read(process, work_dir, timeout, stop, most_bytes)
        finally:
            if process.returncode is None:
                _kill(process)
