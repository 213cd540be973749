"""What the HIP runtime makes and must release: memory, streams, events."""

from __future__ import annotations

import logging
import weakref
from ctypes import byref, c_float, c_void_p
from typing import TYPE_CHECKING, ClassVar

from catalog.errors import DeviceError
from catalog.runtime.devices.hip_runtime import HipRuntime

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)


class _Resource:
    """What the runtime made on a GPU: released once, by :meth:`close`, a ``with`` block or the last reference's end."""

    _make: ClassVar[str]
    _release: ClassVar[str]

    def __init__(self, runtime: HipRuntime, index: int, argument: int, about: str = "") -> None:
        handle = c_void_p()
        with runtime.on(index):
            runtime.call(self._make, byref(handle), argument, about=f"{about} on GPU {index}")
        self.runtime = runtime
        self.handle = handle.value or 0
        self._finalizer = weakref.finalize(self, _let_go, runtime, self._release, self.handle)

    def close(self) -> None:
        """Release it; a second time does nothing.

        Raises:
            DeviceError: the runtime cannot release it.
        """
        if self._finalizer.detach() is not None:
            self.runtime.call(self._release, self.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _let_go(runtime: HipRuntime, release: str, handle: int) -> None:
    """Release what nobody refers to any more: nobody is there to catch an error either."""
    try:
        runtime.call(release, handle)
    except DeviceError as error:
        _log.warning("%s", error.message)


class Memory(_Resource):
    """So many bytes of a GPU's memory, uninitialised; ``handle`` is the address.

    Raises:
        DeviceError: the GPU has not so much memory left.
    """

    _make, _release = "hipMalloc", "hipFree"

    def __init__(self, runtime: HipRuntime, index: int, size: int) -> None:
        # No bytes would be no address, and that reads as an absent tensor.
        super().__init__(runtime, index, max(1, size), f" of {size:,} bytes")


class Stream(_Resource):
    """A queue of work; ``handle`` is its hipStream_t. It waits for work of the default stream, and that for its."""

    _make, _release = "hipStreamCreateWithFlags", "hipStreamDestroy"

    def __init__(self, runtime: HipRuntime, index: int) -> None:
        super().__init__(runtime, index, 0)

    def synchronize(self) -> None:
        """As :meth:`HipRuntime.synchronize`."""
        self.runtime.synchronize(self.handle)


class Event(_Resource):
    """A point in a stream, with its time."""

    _make, _release = "hipEventCreateWithFlags", "hipEventDestroy"

    def __init__(self, runtime: HipRuntime, index: int) -> None:
        super().__init__(runtime, index, 0)

    def record(self, stream: int) -> None:
        """Let the event be where the stream's work ends now.

        Raises:
            DeviceError: the stream is none of the event's GPU.
        """
        self.runtime.call("hipEventRecord", self.handle, stream)

    def synchronize(self) -> None:
        """Wait until the stream has come to the event.

        Raises:
            DeviceError: work before the event failed.
        """
        self.runtime.call("hipEventSynchronize", self.handle)

    def since(self, start: Event) -> float:
        """Milliseconds from ``start`` to this event; both must have been reached.

        Raises:
            DeviceError: one was not recorded, or not reached.
        """
        elapsed = c_float()
        self.runtime.call("hipEventElapsedTime", byref(elapsed), start.handle, self.handle)
        return elapsed.value
