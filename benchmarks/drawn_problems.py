"""Problems that are drawn at random for benchmarks of selection."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog import Problem
from catalog.ops.conv.problem import ConvProblem
from catalog.ops.gemm.problem import GemmProblem
from catalog.schema.problem import Problem as AnyProblem


@dataclass(frozen=True)
class AttentionSpace:
    """Which problems of attention are drawn.

    Attributes:
        kinds: what kernels are compiled for.
        lengths: the shortest and longest sequence of queries; they are drawn log-uniformly.
        heads: numbers of query heads; keys have as many, or one.
        batches: numbers of sequences.
        most: maximum number of rows: queries of all heads and sequences, or keys.
    """

    kinds: Sequence[Mapping[str, Any]]
    lengths: tuple[int, int]
    heads: Sequence[int]
    batches: Sequence[int]
    most: int

    def draw(self, chance: random.Random) -> Problem | None:
        """A problem; None if it is too large."""
        length = _log_uniform(chance, self.lengths)
        heads, batch = chance.choice(self.heads), chance.choice(self.batches)
        keys = length if chance.random() < 0.7 else length + chance.randrange(self.lengths[1])
        keys_heads, kind = chance.choice([heads, 1]), chance.choice(self.kinds)
        if batch * heads * max(length, keys) > self.most:
            return None
        return Problem(batch=batch, nhead_q=heads, nhead_k=keys_heads, seqlen_q=length, seqlen_k=keys, **kind)


@dataclass(frozen=True)
class GemmSpace:
    """Which products are drawn: rows log-uniformly, columns and depth also from the sizes of models' layers."""

    kinds: Sequence[Mapping[str, Any]]
    rows: tuple[int, int]
    sizes: tuple[int, int]
    layers: Sequence[int]
    flops: float

    def draw(self, chance: random.Random) -> GemmProblem | None:
        """A problem; None if it is too large."""
        m = _log_uniform(chance, self.rows)
        n, k = (chance.choice((_log_uniform(chance, self.sizes), chance.choice(self.layers))) for _ in range(2))
        problem = GemmProblem(m=m, n=n, k=k, **chance.choice(self.kinds))
        return problem if problem.flops <= self.flops else None


@dataclass(frozen=True)
class ConvSpace:
    """Which convolutions are drawn: channels and extents log-uniformly, filters as in networks, in every direction."""

    kinds: Sequence[dict[str, Any]]
    images: Sequence[int]
    channels: tuple[int, int]
    extents: tuple[int, int]
    flops: float

    def draw(self, chance: random.Random) -> ConvProblem | None:
        """A problem; None if it is too large."""
        c, k = (8 * max(1, _log_uniform(chance, self.channels) // 8) for _ in range(2))
        size, reach = _log_uniform(chance, self.extents), chance.choice((1, 3, 3))
        direction = chance.choice(("forward", "bwd_data", "bwd_weight"))
        square = {"size": size, "filter": reach, "pad": reach // 2, "stride": chance.choice((1, 1, 2))}
        fields = chance.choice(self.kinds) | {name: (extent,) * 2 for name, extent in square.items()}
        problem = ConvProblem(direction=direction, n=chance.choice(self.images), c=c, k=k, **fields)
        return problem if problem.flops <= self.flops else None


def _log_uniform(chance: random.Random, bounds: tuple[int, int]) -> int:
    least, most = map(math.log, bounds)
    return round(math.exp(chance.uniform(least, most)))


SPACES: Mapping[tuple[str, str], AttentionSpace | GemmSpace | ConvSpace] = {
    ("attention", "host"): AttentionSpace(
        kinds=(
            {"dtype": "fp32", "hdim_q": 64},
            {"dtype": "fp32", "hdim_q": 64, "mask": "causal"},
            {"dtype": "fp32", "hdim_q": 128, "mask": "causal"},
            {"dtype": "bf16", "hdim_q": 64, "mask": "causal"},
        ),
        lengths=(8, 1500),
        heads=(1, 2, 4, 8, 12),
        batches=(1, 1, 2, 4),
        most=1 << 17,
    ),
    ("attention", "gpu"): AttentionSpace(
        kinds=(
            {"dtype": "bf16", "hdim_q": 64, "mask": "causal"},
            {"dtype": "bf16", "hdim_q": 128, "mask": "causal"},
            {"dtype": "bf16", "hdim_q": 128},
        ),
        lengths=(64, 4096),
        heads=(4, 8, 16, 32),
        batches=(1, 1, 2, 4),
        most=1 << 16,
    ),
    ("gemm", "host"): GemmSpace(
        kinds=(
            {"dtype": "fp32", "layout": "rcr"},
            {"dtype": "fp32", "layout": "rrr"},
            {"dtype": "bf16", "layout": "rcr"},
        ),
        rows=(1, 2048),
        sizes=(32, 4096),
        layers=(64, 128, 512, 768, 1024, 2048, 4096),
        flops=2e9,
    ),
    ("gemm", "gpu"): GemmSpace(
        kinds=tuple({"dtype": "bf16", "layout": layout, "k_batch": 0} for layout in ("rcr", "rrr")),
        rows=(1, 16384),
        sizes=(64, 16384),
        layers=(1024, 2048, 4096, 5120, 7168, 8192, 14336),
        flops=2e12,
    ),
    ("conv", "host"): ConvSpace(
        kinds=({"dtype": "fp32"}, {"dtype": "fp32", "layout": "ngchw"}, {"dtype": "bf16"}),
        images=(1, 1, 2, 4),
        channels=(8, 512),
        extents=(5, 80),
        flops=1e9,
    ),
}
"""The spaces by operation and place."""


def drawn(space: AttentionSpace | GemmSpace | ConvSpace, count: int, seed: int) -> Iterator[AnyProblem]:
    """Problems, each once."""
    chance, seen = random.Random(seed), set[str]()  # noqa: S311 - repeatable
    while len(seen) < count:
        problem = space.draw(chance)
        if problem is not None and problem.key not in seen:
            seen.add(problem.key)
            yield problem
