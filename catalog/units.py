"""Sizes and ages as people write them: 2G, 500M; 30d, 12h."""

from __future__ import annotations

import re

from catalog.errors import UsageError

_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_AGES = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size such as ``2G``, ``500M``, ``1.5 GiB`` or ``4096`` into bytes; units are powers of 1024.

    Raises:
        UsageError: ``text`` is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="Sizes are numbers with K, M, G or T, such as 500M or 2G.")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def parse_age(text: str) -> float:
    """Parse an age such as ``30d``, ``12h``, ``90m``, ``45s`` or ``2w`` into seconds.

    Raises:
        UsageError: ``text`` is not an age.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not an age", hint="Ages are numbers with s, m, h, d or w, such as 12h or 30d.")
    return float(match[1]) * _AGES[match[2].lower()]


def format_size(size: float) -> str:
    """Format ``size`` bytes in the largest unit in which the number is at least 1, such as ``1.5 MiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
