"""Streams of other libraries: their handles, and which one the caller's work goes to now."""

from __future__ import annotations

import sys
from typing import Any

from catalog.errors import UsageError
from catalog.runtime.devices.gpu.vendors import Vendor

_ATTRIBUTES = ("cuda_stream", "ptr", "handle")
"""Where streams of PyTorch, of CuPy and of other libraries have their handle."""


def handle_of(stream: Any) -> int:
    """The handle of a stream: a handle itself, or an object that tells it, as PyTorch's, CuPy's, cuda.core's do.

    Raises:
        UsageError: it is no stream.
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
        f"{stream!r} is no stream",
        hint="A stream is a handle, or has cuda_stream (torch.cuda.current_stream()) or __cuda_stream__.",
    )


def current_stream(vendor: Vendor, index: int) -> int:
    """The stream that work of this thread goes to on GPU ``index``, by PyTorch, else by CuPy; 0 without either.

    Neither is imported, nor is its GPU touched where the process has not done so.
    """
    torch = torch_on(vendor)
    if torch is not None:
        return int(torch._C._cuda_getCurrentRawStream(index))
    cupy = sys.modules.get("cupy")
    if cupy is not None and vendor.runtime == ("HIP" if cupy.cuda.runtime.is_hip else "CUDA"):
        return int(cupy.cuda.get_current_stream(index).ptr)
    return 0


_torch: dict[str, Any] = {}
"""The module torch by the runtime that it has used: asked for at every launch, and that it has remains so."""


def torch_on(vendor: Vendor) -> Any:
    """The module torch, where the process has it, made for GPUs of the vendor, and has used one; else None."""
    torch = sys.modules.get("torch")
    if torch is None or torch is _torch.get(vendor.runtime):
        return torch
    try:
        if getattr(torch.version, vendor.runtime.lower()) is None or not torch.cuda.is_initialized():
            return None
    except AttributeError:  # another module of this name, or one that is being imported
        return None
    _torch[vendor.runtime] = torch
    return torch
