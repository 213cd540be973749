"""Timing of launches on a stream: by the GPU's own clock, or by the host's until the stream is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property

from catalog.runtime.devices.gpu.resources import Event, Memory
from catalog.runtime.devices.gpu.runtime import GpuRuntime

_FLOOD_BYTES = 1 << 29
"""Twice the largest cache of a GPU: 256 MB (AMD CDNA 3 white paper, Infinity Cache)."""


class Timer:
    """Times launches on streams of a GPU, which must not be captured.

    ``cold`` empties the caches before each launch, by writing to more memory than they hold.

    Args:
        runtime: the vendor's runtime.
        index: the GPU's number.
    """

    def __init__(self, runtime: GpuRuntime, index: int) -> None:
        self._runtime = runtime
        self._index = index

    def by_events(self, stream: int, start: Callable[[], object], launches: int, *, cold: bool) -> list[int]:
        """The nanoseconds of each of ``launches`` calls of ``start``, between events of the GPU.

        Raises:
            DeviceError: the work failed.
        """
        with ExitStack() as stack:
            stack.enter_context(self._runtime.on(self._index))
            # Nothing waits between launches, so the GPU never idles if a launch takes longer than starting the next.
            points = [
                tuple(stack.enter_context(Event(self._runtime, self._index)) for _ in ("start", "stop"))
                for _ in range(launches)
            ]
            for begin, end in points:
                self._before(stream, cold)
                begin.record(stream)
                start()
                end.record(stream)
            self._runtime.synchronize(stream)
            return [round(end.since(begin) * 1e6) for begin, end in points]

    def by_waiting(self, stream: int, start: Callable[[], object], launches: int, *, cold: bool) -> list[int]:
        """The nanoseconds of each of ``launches`` calls of ``start``, until the stream is done.

        Raises:
            DeviceError: the work failed.
        """
        durations = []
        with self._runtime.on(self._index):
            for _ in range(launches):
                self._before(stream, cold)
                self._runtime.synchronize(stream)
                began = time.perf_counter_ns()
                start()
                self._runtime.synchronize(stream)
                durations.append(time.perf_counter_ns() - began)
        return durations

    def _before(self, stream: int, cold: bool) -> None:
        if cold:
            self._runtime.fill(self._flood.handle, 0, _FLOOD_BYTES, stream)

    @cached_property
    def _flood(self) -> Memory:
        return Memory(self._runtime, self._index, _FLOOD_BYTES)
