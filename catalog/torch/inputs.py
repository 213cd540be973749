"""Preparation of the functions' arguments for the operators."""

from __future__ import annotations

from typing import Any

import torch

Optional = torch.Tensor | None

_SEEDS = 2**63 - 1
_CAST = ("cpu", "cuda")
"""Device types that have kernels and that autocast supports."""


def rng_state(dropout: float, device: torch.device) -> torch.Tensor | None:
    """Seed and offset of a call's dropout, int64 (2,), from PyTorch's generator of the device; None without dropout."""
    return torch.randint(0, _SEEDS, (2,), dtype=torch.int64, device=device) if dropout else None


def autocast_all(first: torch.Tensor, *others: Optional) -> tuple[Any, ...]:
    """Cast tensors as autocast does for PyTorch's own attention and products: floating-point types except float64.

    Autocast is that of the first one's device; where it is off or has no kernels, nothing is cast.
    """
    kind = "cpu" if first.is_cpu else first.device.type  # the device's name takes longer than all else here
    if kind not in _CAST or not torch.is_autocast_enabled(kind):
        return first, *others
    dtype = torch.get_autocast_dtype(kind)
    return tuple([None if tensor is None else _cast(tensor, dtype) for tensor in (first, *others)])


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    casts = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if casts else tensor
