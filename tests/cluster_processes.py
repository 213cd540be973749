"""A Dask scheduler and workers on the loopback interface, each a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_SECONDS = 60.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Processes:
    """A scheduler, and workers that each have a cache of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        file = folder / "scheduler.json"
        self.scheduler = self._start(
            "dask_scheduler", "--port", "0", "--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(file)
        )
        wait_until(lambda: file.exists() and file.read_bytes().endswith(b"}"), "the scheduler starts")
        self.address: str = json.loads(file.read_text())["address"]

    def worker(self, **variables: str) -> subprocess.Popen[bytes]:
        """One that compiles a kernel at a time; ``variables`` are set in its environment."""
        cache = self.folder / f"cache of worker {len(self._started)}"
        options = ("--no-nanny", "--nthreads", "1", "--no-dashboard", "--local-directory", str(self.folder))
        return self._start("dask_worker", self.address, *options, CATALOG_CACHE_DIR=str(cache), **variables)

    def wait_for_workers(self, count: int) -> None:
        from distributed import Client

        with Client(self.address) as client:
            client.wait_for_workers(count, timeout=PATIENCE_SECONDS)

    def _start(self, command: str, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.{command}", *words],
            cwd=self.folder,
            env=os.environ | variables,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "processes.log").open("ab"),
        )
        self._started.append(process)
        return process

    def end(self, *processes: subprocess.Popen[bytes]) -> None:
        """Kill ``processes``, all of them when none is named."""
        for process in processes or self._started:
            process.send_signal(signal.SIGKILL)
            process.wait()
