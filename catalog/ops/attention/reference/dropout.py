"""The random bytes of dropout, from Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float64 = NDArray[np.float64]
UInt64 = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF

_BYTES = 16
"""Random bytes per counter."""


def philox4x32(counter: UInt64, key: tuple[int, int]) -> NDArray[np.uint32]:
    """Ten rounds of Philox on every counter: (..., 4) words of 32 bits, lowest first, as are the results."""
    x0, x1, x2, x3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    low, shift = np.uint64(_LOW), np.uint64(32)
    for step in range(_ROUNDS):
        key0, key1 = (np.uint64((word + step * weyl) & _LOW) for word, weyl in zip(key, _WEYL, strict=True))
        product0, product1 = np.uint64(_MULTIPLIERS[0]) * x0, np.uint64(_MULTIPLIERS[1]) * x2
        x0, x1, x2, x3 = (
            (product1 >> shift) ^ x1 ^ key0,
            product1 & low,
            (product0 >> shift) ^ x3 ^ key1,
            product0 & low,
        )
    return np.stack([x0, x1, x2, x3], axis=-1).astype(np.uint32)


def random_bytes(rng_state: Array | None, head: int, rows: slice, seqlen_k: int) -> NDArray[np.uint8]:
    """The byte of every query-key pair: (rows, seqlen_k).

    Byte j % 16 of counter (j / 16, query, head, offset) belongs to key j.

    Args:
        rng_state: seed and offset, 64 bits each; None for zeros.
        head: index of the head among the heads of all sequences, batch * nhead_q + head.
        rows: the queries.
        seqlen_k: number of keys.
    """
    seed, offset = (0, 0) if rng_state is None else (int(word) for word in rng_state)
    counter = np.empty((rows.stop - rows.start, -(-seqlen_k // _BYTES), 4), np.uint64)
    counter[..., 0] = np.arange(counter.shape[1])
    counter[..., 1] = np.arange(rows.start, rows.stop)[:, np.newaxis]
    counter[..., 2] = head
    counter[..., 3] = offset & _LOW
    words = philox4x32(counter, (seed & _LOW, (seed >> 32) ^ (offset >> 32)))
    every_byte = words.astype("<u4").view(np.uint8).reshape(len(words), counter.shape[1] * _BYTES)
    return every_byte[:, :seqlen_k]


def dropout_factors(probability: float, random: NDArray[np.uint8]) -> Float64:
    """1 / (1 - p) where a weight is kept, 0 where it is dropped; p is the float32 that kernels receive.

    A weight is kept if its byte is at most (1 - p) * 255, rounded down, in float32; if p is 1, none is kept.
    """
    kept = np.float32(1) - np.float32(probability)
    if not kept:
        return np.zeros(random.shape)
    threshold = int(np.floor(kept * np.float32(255)))
    return np.where(random <= threshold, 1.0 / (1.0 - float(np.float32(probability))), 0.0)
