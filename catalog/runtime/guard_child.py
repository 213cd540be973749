"""The process of a first run: ``python -m catalog.runtime.guard_child``, started by :mod:`catalog.runtime.first_run`.

It reads one JSON object from stdin, loads the libraries, launches them once on random inputs, and writes JSON lines to
stdout: ``{"stage": i}`` before it loads and before it launches library i, ``{"end": "passed"}``, ``{"end": reason}``
where a library cannot be loaded or refuses the call, or ``{"unknown": reason}`` where it ran out of memory by itself.
The process imports all that it needs before the first line, and leaves without cleaning up after the last.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from catalog.build.cache import MOST_LIBRARY_BYTES
from catalog.errors import CatalogError
from catalog.files import read_own
from catalog.runtime.bound import agreed_workspace
from catalog.runtime.devices.host import HostDevice
from catalog.runtime.devices.loading import LoadedKernel
from catalog.runtime.inputs import draw_inputs
from catalog.runtime.tensors import make_outputs
from catalog.schema.problem import Problem


def main() -> None:
    """Run what stdin asks for; does not return."""
    request = json.load(sys.stdin)
    tell = _private_stdout()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The default action of SIGALRM ends the process wherever it is: a loop in C needs no help of Python's.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        _run(request, tell)
        tell(end="passed")
    except CatalogError as error:
        tell(end=str(error))
    except MemoryError as error:
        tell(unknown=f"ran out of memory: {error}")
    os._exit(0)


def _run(request: dict[str, Any], tell: Any) -> None:
    problem = Problem(**json.loads(request["problem"]))
    # Drawn, not computed: a backward's O and LSE would take a forward by the reference.
    inputs = draw_inputs(problem, seed=0)
    tensors = inputs | make_outputs(problem, inputs)
    device = HostDevice(request["num_threads"])
    loaded = _load(device, request["libraries"], tell)
    call = device.call(problem, tensors, agreed_workspace(problem, loaded, request["num_splits"]))
    for stage, kernel in enumerate(loaded):
        tell(stage=stage)
        device.launch(kernel, call)


def _load(device: HostDevice, libraries: list[dict[str, str]], tell: Any) -> list[LoadedKernel]:
    loaded = []
    for stage, library in enumerate(libraries):
        tell(stage=stage)
        path = Path(library["path"])
        try:
            content = read_own(path, MOST_LIBRARY_BYTES)
        except OSError as error:
            raise CatalogError(f"{path} cannot be read: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != library["sha256"]:
            raise CatalogError(f"{path} is being replaced")
        loaded.append(device.load(path, library["sha256"], library["kernel_id"]))
    return loaded


def _private_stdout() -> Any:
    """Writes a message to what stdout was; what libraries print goes nowhere."""
    channel = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)

    def tell(**message: Any) -> None:
        os.write(channel, json.dumps(message).encode() + b"\n")

    return tell


if __name__ == "__main__":
    main()
