"""Preparation of the functions' arguments for the operators."""

from __future__ import annotations

import torch

_SEEDS = 2**63 - 1


def rng_state(dropout: float, device: torch.device) -> torch.Tensor | None:
    """Seed and offset of a call's dropout, int64 (2,), from PyTorch's generator of the device; None without dropout."""
    return torch.randint(0, _SEEDS, (2,), dtype=torch.int64, device=device) if dropout else None


def cast_as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast the tensor as autocast does for PyTorch's own attention: floating-point types except float64."""
    casts = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if casts else tensor
