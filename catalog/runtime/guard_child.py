"""The process of first runs: ``python -m catalog.runtime.guard_child``, started by :mod:`catalog.runtime.first_run`.

It reads one JSON object from stdin and does its ``runs`` in order: it loads a plan's libraries, launches them once on
random inputs and, if the run names a suspect, compares the results with the float64 reference. It writes JSON lines to
stdout; each except the last one of a run restarts the time limit:

- ``{"stage": i}`` before loading library i, ``{"stage": i, "seconds": s}`` before launching it, with that limit,
- ``{}`` before comparing,
- ``{"end": "passed"}``,
- ``{"end": "refused", "about": reason}`` if a library cannot be loaded or rejects the call,
- ``{"end": "unknown", "about": reason}`` if the process itself ran out of memory,
- ``{"end": "blamed", "about": reason, "stage": i}`` if the kernel of stage i is at fault; the process exits,
- ``{"end": "unguarded", "about": reason}`` if this process cannot use the device; the process exits.

The process imports everything before its first line, and exits without cleaning up after the last.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from catalog.build.cache import MOST_LIBRARY_BYTES
from catalog.errors import CatalogError, DeviceError, KernelFaultError
from catalog.files import read_own
from catalog.ops import problem_of_key
from catalog.runtime.devices import Device
from catalog.runtime.devices.loading import LoadedKernel
from catalog.runtime.here import reopened
from catalog.runtime.inputs import draw_inputs, make_inputs
from catalog.runtime.splits import agreed_workspace
from catalog.runtime.tensors import make_outputs, results
from catalog.runtime.validate import Expected
from catalog.schema.problem import Problem

Send = Callable[..., None]


class _UnusableError(Exception):
    """The device has no memory for this process or does not admit it."""


class _BlamedError(Exception):
    """A kernel is at fault."""

    def __init__(self, reason: str, stage: int) -> None:
        super().__init__(reason)
        self.stage = stage


def main() -> None:
    """Do the runs requested on stdin; does not return."""
    request = json.load(sys.stdin)
    send = _private_stdout()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # SIGALRM's default action ends the process even inside a loop in C, without any help from the interpreter.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        device = reopened(request["device"])
        for run in request["runs"]:
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
            send(**_ending(run, device, send))
    except _BlamedError as error:
        send(end="blamed", about=str(error), stage=error.stage)
    except CatalogError as error:
        send(end="unguarded", about=error.line)
    except _UnusableError as error:
        send(end="unguarded", about=str(error))
    os._exit(0)


def _ending(run: Mapping[str, Any], device: Device[Any], send: Send) -> dict[str, str]:
    """Do one run; return the message that ends it."""
    try:
        _run(run, device, send)
    except CatalogError as error:
        return {"end": "refused", "about": str(error)}
    except MemoryError as error:
        return {"end": "unknown", "about": f"ran out of memory: {error}"}
    return {"end": "passed"}


def _run(run: Mapping[str, Any], device: Device[Any], send: Send) -> None:
    problem, suspect = problem_of_key(run["problem"]), run["suspect"]
    expected = None if suspect is None else _expected(problem, device.device.arch)
    # Without a comparison random inputs will do: O and LSE of a backward would take a forward by the reference.
    inputs = draw_inputs(problem) if expected is None else expected.given()
    tensors = inputs | make_outputs(problem, inputs)
    loaded = _load(device, run["libraries"], send)
    workspace = agreed_workspace(problem, loaded, run["num_splits"])
    try:
        call = device.call(problem, tensors, workspace)
    except DeviceError as error:
        raise _UnusableError(error.line) from None
    for stage, kernel in enumerate(loaded):
        send(stage=stage, seconds=run["seconds"])
        try:
            device.run((kernel,), call)
        except KernelFaultError as error:
            raise _BlamedError(error.fault, stage) from None
    if expected is not None:
        send()
        for check in expected.check_outputs(results(problem.form, tensors)):
            if not check.passed:
                how = f"has an error of {check.max_error:.3g}, {check.tolerance_used:.3g} times its tolerance"
                raise _BlamedError(f"gave a wrong result: {check.tensor} {how}", suspect)


@lru_cache(maxsize=1)
def _expected(problem: Problem, arch: str) -> Expected:
    """The expected results, shared by the runs of one problem."""
    return Expected(problem, make_inputs(problem), arch)


def _load(device: Device[Any], libraries: list[dict[str, str]], send: Send) -> list[LoadedKernel]:
    loaded = []
    for stage, library in enumerate(libraries):
        send(stage=stage)
        path = Path(library["path"])
        try:
            content = read_own(path, MOST_LIBRARY_BYTES)
        except OSError as error:
            raise CatalogError(f"{path} cannot be read: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != library["sha256"]:
            raise CatalogError(f"{path} is being replaced")
        loaded.append(device.load(path, library["sha256"], library["kernel_id"]))
    return loaded


def _private_stdout() -> Send:
    """Return a function that writes a message to the original stdout; anything libraries print is discarded."""
    channel = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)

    def send(**message: Any) -> None:
        os.write(channel, json.dumps(message).encode() + b"\n")

    return send


if __name__ == "__main__":
    main()
