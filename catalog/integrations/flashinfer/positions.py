"""Positions in FlashInfer's ways: Q and K rotated by them (ROPE_LLAMA), or distances added to the scores (ALIBI)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from catalog.errors import ArgumentError, TensorError

_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
_THETA = 1e4
"""The default base of wave lengths."""


class Encoding(NamedTuple):
    """How positions take part; ``scale`` and ``theta`` are those of rotations."""

    mode: str
    scale: float
    theta: float

    @property
    def rotates(self) -> bool:
        """Whether Q and K are rotated."""
        return self.mode == "ROPE_LLAMA"

    @property
    def biases(self) -> bool:
        """Whether distances are added to the scores."""
        return self.mode == "ALIBI"


def encoding_of(mode: str, rope_scale: float | None, rope_theta: float | None) -> Encoding:
    """The encoding that FlashInfer's arguments ask for.

    Raises:
        ArgumentError: there is no such mode.
    """
    if mode not in _MODES:
        raise ArgumentError(f"pos_encoding_mode={mode!r}: expected one of {', '.join(_MODES)}")
    return Encoding(mode, rope_scale or 1.0, rope_theta or _THETA)


def rotated(tensor: torch.Tensor, positions: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Q or K rotated by positions: elements i and i + head dim / 2 are a pair.

    Args:
        tensor: (tokens, heads, head dim).
        positions: (tokens,).
        encoding: its position p turns pair i by p / scale * theta ** (-2 i / head dim).

    Returns:
        The same shape and type; computed in float32.

    Raises:
        TensorError: the head dim is odd.
    """
    half = tensor.shape[-1] // 2
    if 2 * half != tensor.shape[-1]:
        raise TensorError(f"head dim {tensor.shape[-1]} is odd: pos_encoding_mode='ROPE_LLAMA' rotates pairs")
    turns = torch.arange(half, device=tensor.device, dtype=torch.float64) / half
    frequencies = encoding.theta**-turns / encoding.scale
    angles = positions.to(tensor.device, torch.float64)[:, None, None] * frequencies
    cosines, sines = angles.cos().float(), angles.sin().float()
    first, second = tensor.float().split(half, dim=-1)
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return turned.to(tensor.dtype)


def places(lengths: tuple[int, ...], ends: tuple[int, ...] | None = None) -> torch.Tensor:
    """Positions of packed tokens, (tokens,), each sequence from 0 on; with ``ends`` its last token is at end - 1."""
    starts = [0] * len(lengths) if ends is None else [end - length for length, end in zip(lengths, ends, strict=True)]
    steps = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return torch.cat(steps) if steps else torch.zeros(0, dtype=torch.int64)


@lru_cache(maxsize=64)
def slopes_of(heads: int, device: torch.device) -> torch.Tensor:
    """The slopes of ALiBi, (1, heads), float32, as in "Train Short, Test Long" (Press et al., 2022).

    Those of a power of two are a geometric series; other numbers of heads take every other slope of the next power.
    """
    power = 1 << (heads.bit_length() - 1)
    series = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor([series + between], dtype=torch.float32, device=device)
