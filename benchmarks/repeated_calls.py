"""Cost of known sizes and strides: forward and backward of one tiny attention layer, ours and PyTorch's.

python benchmarks/repeated_calls.py [--runs N]

Training calls the same layers over and over. The problem is tiny, so that the figures are the cost of two calls with
hardly any work. They are CPU time of the calling thread; kernels use one thread, on both sides.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

os.environ["CATALOG_NUM_THREADS"] = "1"  # before the settings are read

import torch
from timing import Call, Pace, interleaved
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from catalog.integrations.transformers import attend_strictly
from catalog.torch import scaled_dot_product_attention

HEADS, TOKENS, HDIM = 2, 16, 64
BURST = 50
"""Calls of a side in a turn."""

theirs = torch.nn.functional.scaled_dot_product_attention

Attention = Callable[..., torch.Tensor]


def step(attention: Attention, tensors: Sequence[torch.Tensor]) -> Call:
    """One forward and backward."""
    gradient = torch.ones_like(attention(*tensors))
    return lambda: torch.autograd.grad(attention(*tensors), tensors, gradient)


def scenarios(dtype: torch.dtype) -> Iterator[tuple[str, Call, Call]]:
    """The name of each scenario, our side and PyTorch's."""
    dense = [torch.randn(1, HEADS, TOKENS, HDIM, dtype=dtype).requires_grad_() for _ in range(3)]
    projected = [torch.randn(1, TOKENS, HEADS, HDIM, dtype=dtype).requires_grad_().transpose(1, 2) for _ in range(3)]

    def in_model(attention: Callable[..., Any]) -> Attention:
        layer = torch.nn.Module()
        return lambda q, k, v: attention(layer, q, k, v, None, scaling=HDIM**-0.5, is_causal=True)[0]

    alone = partial(scaled_dot_product_attention, is_causal=True), partial(theirs, is_causal=True)
    layers = in_model(attend_strictly), in_model(sdpa_attention_forward)
    for name, (ours, pytorchs), tensors in (
        ("heads before tokens", alone, dense),
        ("tokens before heads", alone, projected),
        ("transformers' layer", layers, projected),
    ):
        yield name, step(ours, tensors), step(pytorchs, tensors)


def main() -> None:
    """Print one row per scenario."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3000, help="timed runs of each side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pace = Pace(options.runs, BURST, 60.0, clock=time.thread_time)
    print(f"{'us of CPU time, medians':<32} {'ours':>8} {'PyTorch':>8}")
    for dtype in (torch.float32, torch.bfloat16):
        for name, ours, pytorchs in scenarios(dtype):
            seconds, _ = interleaved({"ours": ours, "PyTorch": pytorchs}, pace)
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            print(f"{label:<32} {1e6 * seconds['ours']:>8.1f} {1e6 * seconds['PyTorch']:>8.1f}")


if __name__ == "__main__":
    main()
