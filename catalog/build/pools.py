"""Pools that build many kernels at once: threads of this process, or a cluster (:mod:`catalog.build.cluster`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from catalog.schema.kernel import Kernel
from catalog.threads import usable_cores

if TYPE_CHECKING:
    from catalog.build.builder import Builder, Built

Results = Generator[tuple[int, "Callable[[], Built]"], None, None]
"""For each kernel as it ends: its index in the request, and a function that returns its library or raises its error."""


class Pool(Protocol):
    """Builds many kernels, in any order."""

    @property
    def at_once(self) -> int:
        """Number of kernels built at a time."""

    def results(self, builder: Builder, kernels: Sequence[Kernel]) -> Results:
        """Build ``kernels`` into ``builder``'s cache. Closing the generator stops everything unfinished."""


@dataclass(frozen=True)
class Threads:
    """Threads of this process, ``jobs`` at a time (None: one per core).

    Threads suffice: the compilers are processes, and Python only waits for them.
    """

    jobs: int | None = None

    @property
    def at_once(self) -> int:
        """Number of kernels built at a time."""
        return self.jobs or usable_cores()

    def results(self, builder: Builder, kernels: Sequence[Kernel]) -> Results:
        """Build ``kernels``; closing the generator ends the running compilers."""
        stop = threading.Event()
        pool = ThreadPoolExecutor(self.at_once, thread_name_prefix="build")
        try:
            futures = {pool.submit(builder.make, kernel, stop): place for place, kernel in enumerate(kernels)}
            for future in as_completed(futures):
                yield futures[future], future.result
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
