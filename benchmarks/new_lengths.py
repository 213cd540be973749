"""Cost of the first call with a new length, compared with a known length and with PyTorch.

python benchmarks/new_lengths.py [--calls N] [--json FILE]

Decoding makes a new length at every token, and training on packed sequences a new tuple of lengths at every step. The
problems are tiny, so that the figures are the cost of a call without its kernels. They are CPU time of the calling
thread; kernels use one thread, on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ["CATALOG_NUM_THREADS"] = "1"  # before the settings are read

import torch

from catalog.torch import flash_attn_varlen_func, scaled_dot_product_attention

HEADS, HDIM, SEQUENCES, LONGEST = 2, 32, 4, 24
WARM = 32
"""Lengths before the first one that counts, so that kernels are compiled, loaded and chosen; and lengths of a turn."""

theirs = torch.nn.functional.scaled_dot_product_attention

Call = Callable[[], object]


@dataclass(frozen=True)
class Figures:
    """CPU time in us: medians over lengths, and their tenth percentiles, which a busy machine disturbs less."""

    scenario: str
    torch: float
    seen: float
    new: float
    more: float
    torch_p10: float
    seen_p10: float
    new_p10: float
    more_p10: float


def decode(calls: int) -> Iterator[tuple[Call, Call]]:
    """One query over a cache that grows by one token per call: ours and PyTorch's."""
    q = torch.randn(1, HEADS, 1, HDIM)
    k, v = torch.randn(2, 1, HEADS, calls, HDIM)
    for length in range(1, calls + 1):
        tensors = q, k[:, :, :length], v[:, :, :length]
        yield partial(scaled_dot_product_attention, *tensors), partial(theirs, *tensors)


def ragged(calls: int, *, training: bool) -> Iterator[tuple[Call, Call]]:
    """Packed sequences of other lengths at each call: ours on the packed ones, PyTorch's on each of them."""
    chance = random.Random(0)  # noqa: S311
    for _ in range(calls):
        lengths = [chance.randint(1, LONGEST) for _ in range(SEQUENCES)]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        packed = [torch.randn(sum(lengths), HEADS, HDIM, requires_grad=training) for _ in range(3)]
        alone = [
            [part.detach().requires_grad_(training) for part in tensor.detach().transpose(0, 1)[None].split(lengths, 2)]
            for tensor in packed
        ]
        yield partial(_ours, packed, starts), partial(_theirs, alone)


def _ours(packed: Sequence[torch.Tensor], starts: torch.Tensor) -> object:
    q, k, v = packed
    o = flash_attn_varlen_func(q, k, v, starts, starts, LONGEST, LONGEST, causal=True)
    assert isinstance(o, torch.Tensor)  # noqa: S101
    return torch.autograd.grad(o, packed, o.detach()) if o.requires_grad else o


def _theirs(alone: Sequence[Sequence[torch.Tensor]]) -> object:
    results = [theirs(q, k, v, is_causal=True) for q, k, v in zip(*alone, strict=True)]
    if not results[0].requires_grad:
        return results
    inputs = [part for parts in alone for part in parts]
    return torch.autograd.grad(results, inputs, [result.detach() for result in results])


def cpu_us(call: Call) -> float:
    """CPU time of one call."""
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1e3


def measured(scenario: str, pairs: Sequence[tuple[Call, Call]]) -> Figures:
    """Time all lengths when they are new, then again, then PyTorch, one call each; the first lengths do not count.

    A few lengths at a time, because the speed of a busy machine changes within a second.
    """
    new, seen, torchs = list[float](), list[float](), list[float]()
    for first in range(0, len(pairs), WARM):
        part = pairs[first : first + WARM]
        new += [cpu_us(ours) for ours, _ in part]
        seen += [cpu_us(ours) for ours, _ in part]
        torchs += [cpu_us(each) for _, each in part]
    new, seen, torchs = new[WARM:], seen[WARM:], torchs[WARM:]
    more = [first - again for first, again in zip(new, seen, strict=True)]
    columns = [sorted(column) for column in (torchs, seen, new, more)]
    medians, tenths = ([round(column[len(column) * part // 10], 1) for column in columns] for part in (5, 1))
    return Figures(scenario, *medians, *tenths)


def main() -> None:
    """Print one row per scenario."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="lengths of a scenario")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    print(f"{'us of CPU time, median (p10)':<30} {'PyTorch':>16} {'seen':>16} {'new':>16} {'new - seen':>16}")
    with torch.no_grad():
        figures.append(measured("decode", list(decode(options.calls))))
        figures.append(measured("ragged forward", list(ragged(options.calls, training=False))))
    figures.append(measured("ragged forward and backward", list(ragged(options.calls, training=True))))
    for row in figures:
        cells = ((row.torch, row.torch_p10), (row.seen, row.seen_p10), (row.new, row.new_p10), (row.more, row.more_p10))
        print(f"{row.scenario:<30}" + "".join(f" {f'{middle:.1f} ({tenth:.1f})':>16}" for middle, tenth in cells))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in figures], indent=1))


if __name__ == "__main__":
    main()
