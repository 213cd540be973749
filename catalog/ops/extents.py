"""Extents of problems, as all operations divide and shorten them."""

from __future__ import annotations


def register_blocks(rows: int, block: int) -> tuple[int, int, int]:
    """Rows in whole register tiles of ``block`` rows, in half ones, and single ones, as host kernels divide them."""
    half = (block + 1) // 2
    whole, left = divmod(rows, block)
    halves, single = divmod(left, half)
    return whole * block, halves * half, single


def shortened(extent: int, length: int) -> int:
    """``length`` plus what ``extent`` is modulo that, or an ``extent`` that is shorter than two of these."""
    return extent if extent < 2 * length else length + extent % length
