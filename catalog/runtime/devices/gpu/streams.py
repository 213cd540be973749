"""Streams of other libraries: their handles, and the caller's current stream."""

from __future__ import annotations

import sys
from typing import Any

from catalog.errors import UsageError
from catalog.runtime.devices.gpu.vendors import Vendor

_ATTRIBUTES = ("cuda_stream", "ptr", "handle")
"""The attributes with the handle of a stream, of PyTorch, CuPy and other libraries."""


def handle_of(stream: Any) -> int:
    """The handle of ``stream``, which is a handle itself or a stream of PyTorch, CuPy or cuda.core.

    Raises:
        UsageError: it is not a stream.
    """
    if isinstance(stream, int):
        return stream
    shares = getattr(stream, "__cuda_stream__", None)
    if shares is not None:
        return int((shares() if callable(shares) else shares)[1])
    for name in _ATTRIBUTES:
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    if type(stream).__name__ in ("cudaStream_t", "CUstream"):
        return int(stream)
    raise UsageError(
        f"{stream!r} is not a stream",
        hint="A stream is a handle, or has cuda_stream (torch.cuda.current_stream()) or __cuda_stream__.",
    )


def current_stream(vendor: Vendor, index: int) -> int:
    """The handle of this thread's current stream on GPU ``index``, PyTorch's or else CuPy's; 0 without either.

    Neither is imported here, and a GPU that the process does not use is not initialised.
    """
    torch = torch_on(vendor)
    if torch is not None:
        return int(torch._C._cuda_getCurrentRawStream(index))
    cupy = sys.modules.get("cupy")
    if cupy is not None and vendor.runtime == ("HIP" if cupy.cuda.runtime.is_hip else "CUDA"):
        return int(cupy.cuda.get_current_stream(index).ptr)
    return 0


_torch: dict[str, Any] = {}
"""The module torch by the runtime that it has used; needed at every launch, and it never changes once set."""


def torch_on(vendor: Vendor) -> Any:
    """The module torch if it is imported, is built for the vendor's GPUs, and has used one; else None."""
    torch = sys.modules.get("torch")
    if torch is None or torch is _torch.get(vendor.runtime):
        return torch
    try:
        if getattr(torch.version, vendor.runtime.lower()) is None or not torch.cuda.is_initialized():
            return None
    except AttributeError:  # another module of this name, or torch is still being imported
        return None
    _torch[vendor.runtime] = torch
    return torch
