"""The random bytes of dropout, from Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float64 = NDArray[np.float64]
Integers = Any
"""An array of NumPy or a tensor of PyTorch, int64."""
Words = tuple[Integers, Integers, Integers, Integers]
"""Four words of 32 bits, lowest first."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF

BLOCK = 16
"""Keys of a block: a counter has a random byte for each."""


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox on every counter, whose words broadcast against each other; the highest may be a number.

    Products wrap around at 64 bits.
    """
    x0, x1, x2, x3 = counter
    for step in range(_ROUNDS):
        key0, key1 = ((word + step * weyl) & _LOW for word, weyl in zip(key, _WEYL, strict=True))
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            (product1 >> 32 & _LOW) ^ x1 ^ key0,
            product1 & _LOW,
            (product0 >> 32 & _LOW) ^ x3 ^ key1,
            product0 & _LOW,
        )
    return x0, x1, x2, x3


def random_words(rng_state: tuple[int, int], head: Integers, query: Integers, block: Integers) -> Words:
    """The random bytes of every block of :data:`BLOCK` keys, for indices that broadcast against each other.

    Byte j % 16 belongs to key j.

    Args:
        rng_state: seed and offset, 64 bits each.
        head: indices of heads among the heads of all sequences, batch * nhead_q + head.
        query: indices of queries.
        block: indices of blocks of keys.
    """
    seed, offset = rng_state
    return philox4x32((block, query, head, offset & _LOW), (seed & _LOW, (seed >> 32) ^ (offset >> 32)))


def random_bytes(rng_state: Array | None, head: int, rows: slice, seqlen_k: int) -> NDArray[np.uint8]:
    """The byte of every query-key pair: (rows, seqlen_k).

    Args:
        rng_state: seed and offset, 64 bits each; None for zeros.
        head: index of the head among the heads of all sequences, batch * nhead_q + head.
        rows: the queries.
        seqlen_k: number of keys.
    """
    seed, offset = (0, 0) if rng_state is None else (int(word) for word in rng_state)
    blocks = np.arange(-(-seqlen_k // BLOCK), dtype=np.int64)
    queries = np.arange(rows.start, rows.stop, dtype=np.int64)[:, np.newaxis]
    words = random_words((seed, offset), np.full((1, 1), head, np.int64), queries, blocks)
    every_byte = np.stack(words, axis=-1).astype("<u4").view(np.uint8)
    return every_byte.reshape(len(queries), len(blocks) * BLOCK)[:, :seqlen_k]


def largest_kept(probability: float) -> int:
    """The largest byte whose weight is kept; -1 if none is. ``probability`` is the float32 that kernels receive.

    That is (1 - p) * 255, rounded down, in float32; if p is 1, no weight is kept.
    """
    kept = np.float32(1) - np.float32(probability)
    return int(np.floor(kept * np.float32(255))) if kept else -1


def dropout_factors(probability: float, random: NDArray[np.uint8]) -> Float64:
    """1 / (1 - p) where a weight is kept, 0 where it is dropped."""
    threshold = largest_kept(probability)
    if threshold < 0:
        return np.zeros(random.shape)
    return np.where(random <= threshold, 1.0 / (1.0 - float(np.float32(probability))), 0.0)
