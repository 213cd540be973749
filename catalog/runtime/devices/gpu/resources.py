"""Resources of a GPU's runtime that must be released: memory, streams, events, graphs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from catalog.errors import DeviceError
from catalog.runtime.devices.gpu.runtime import GpuRuntime

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)


class _Resource:
    """A resource that ``make`` created on a GPU; released by :meth:`close`, a ``with`` block or its last reference.

    ``make`` takes a description of the call for its error message.
    """

    def __init__(
        self,
        runtime: GpuRuntime,
        index: int,
        make: Callable[[str], int],
        release: Callable[[int], None],
        about: str = "",
    ) -> None:
        with runtime.on(index):
            self.handle = make(f"{about} on GPU {index}")
        self.runtime = runtime
        self._release = release
        self._finalizer = weakref.finalize(self, _let_go, runtime, release, self.handle)

    def close(self) -> None:
        """Release the resource; a second call does nothing.

        Raises:
            DeviceError: the runtime cannot release it.
        """
        if self._finalizer.detach() is not None and not self.runtime.forked:
            self._release(self.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _let_go(runtime: GpuRuntime, release: Callable[[int], None], handle: int) -> None:
    """Release a resource at its last reference, where no error can be raised; a forked child owns no resources."""
    if runtime.forked:
        return
    try:
        release(handle)
    except DeviceError as error:
        _log.warning("%s", error.message)


class Memory(_Resource):
    """``size`` bytes of a GPU's memory, uninitialised; ``handle`` is the address.

    Raises:
        DeviceError: the GPU does not have enough free memory.
    """

    def __init__(self, runtime: GpuRuntime, index: int, size: int) -> None:
        # Zero bytes would have a null address, which means an absent tensor.
        room = max(1, size)
        super().__init__(
            runtime, index, lambda about: runtime.allocate(room, about), runtime.free, f" of {room:,} bytes"
        )


class Stream(_Resource):
    """A queue of work, synchronised with the default stream in both directions; ``handle`` is the runtime's."""

    def __init__(self, runtime: GpuRuntime, index: int) -> None:
        super().__init__(runtime, index, runtime.make_stream, runtime.drop_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        """cuda.core's protocol for sharing streams: its version, and the handle."""
        return 0, self.handle

    def synchronize(self) -> None:
        """As :meth:`GpuRuntime.synchronize`."""
        self.runtime.synchronize(self.handle)


class Event(_Resource):
    """A point in a stream, with its time."""

    def __init__(self, runtime: GpuRuntime, index: int) -> None:
        super().__init__(runtime, index, runtime.make_event, runtime.drop_event)

    def record(self, stream: int) -> None:
        """Record the event after the stream's current work.

        Raises:
            DeviceError: the stream belongs to another GPU.
        """
        self.runtime.record(self.handle, stream)

    def synchronize(self) -> None:
        """Wait until the stream has reached the event.

        Raises:
            DeviceError: work before the event failed.
        """
        self.runtime.await_event(self.handle)

    def since(self, start: Event) -> float:
        """Milliseconds from ``start`` to this event; both must have been reached.

        Raises:
            DeviceError: one of them was not recorded or not reached.
        """
        return self.runtime.milliseconds(start.handle, self.handle)


class Graph(_Resource):
    """Work captured once, to be replayed any number of times; ``handle`` is the runtime's.

    Args:
        runtime: the vendor's runtime.
        index: the GPU's number.
        start: starts the work on the stream with the given handle.

    Raises:
        DeviceError: the work cannot be captured.
    """

    def __init__(self, runtime: GpuRuntime, index: int, start: Callable[[int], object]) -> None:
        def capture(_: str) -> int:
            with Stream(runtime, index) as stream:  # the default stream cannot be captured
                runtime.begin_capture(stream.handle)
                try:
                    start(stream.handle)
                except BaseException:
                    with suppress(DeviceError):
                        runtime.drop_graph(runtime.end_capture(stream.handle))
                    raise
                return runtime.end_capture(stream.handle)

        super().__init__(runtime, index, capture, runtime.drop_graph)

    def replay(self, stream: int) -> None:
        """Start the work on a stream.

        Raises:
            DeviceError: the GPU does not accept it.
        """
        self.runtime.replay(self.handle, stream)
