"""The comparisons, their sizes and their targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import turns
from report import Target
from turns import Lengths, Turn

Axes = Mapping[str, tuple[Any, ...]]

DTYPES = ("fp32", "fp16", "bf16")
_MASKS = tuple(turns.MASKS)
_LAYOUTS = tuple(
    f"{prefix}{layout}{suffix}" for prefix, suffix in (("", " ms"), ("paged/", "")) for layout in turns.LAYOUTS
)
_AGAINST_TORCH = ("ours ms", "torch ms", "ours GF/s", "sgemm GF/s", "torch/ours", "ours/sgemm", "causal/half")


@dataclass(frozen=True)
class Scenario:
    """``axes`` are the arguments of ``turn``, every combination measured; ``quick`` replaces some to measure less.

    ``runs`` timed runs of each side, ``burst`` of them at a time: more where one takes microseconds.
    """

    name: str
    title: str
    turn: Callable[..., Turn]
    axes: Axes
    quick: Axes
    columns: tuple[str, ...]
    targets: tuple[Target, ...]
    runs: int = 7
    burst: int = 1

    def turns(self, chosen: Axes) -> Iterator[Turn]:
        """The turns of all points, with the values of the axes in ``chosen`` instead of its own."""
        axes = {name: chosen.get(name, values) for name, values in self.axes.items()}
        for point in product(*axes.values()):
            yield self.turn(**dict(zip(axes, point, strict=True)))


_LISTS = (
    Lengths("8 x 1024", (1024,) * 8),
    Lengths("8192 + 63 x 16", (8192, *(16,) * 63)),
    Lengths("100, 200..1000", tuple(range(100, 1001, 100))),
    Lengths("64 x 128", (128,) * 64),
    Lengths("512 x 16", (16,) * 512),
)

SCENARIOS = (
    Scenario(
        "forward",
        "Forward, against PyTorch's attention and its matrix product; batch 1, 8 heads",
        turns.forward,
        axes={"dtype": DTYPES, "hdim": (64, 128), "seqlen": (1024, 2048, 4096, 8192)},
        quick={"hdim": (128,), "seqlen": (1024,)},
        columns=("dtype", "mask", "hdim", "seqlen", *_AGAINST_TORCH, "max diff"),
        targets=(
            Target("torch/ours", ">=", 2.0, {"dtype": ("fp32", "fp16")}),
            Target("torch/ours", ">=", 1.0, {"dtype": ("bf16",)}),
            Target("ours/sgemm", ">=", 0.75),
            Target("causal/half", "<=", 1.15),
        ),
    ),
    Scenario(
        "gqa",
        "Query heads that share key heads against heads of their own; batch 1, 8 query heads",
        turns.gqa,
        axes={"dtype": DTYPES, "mask": _MASKS, "hdim": (64, 128), "seqlen": (2048,)},
        quick={"dtype": ("fp32", "bf16"), "mask": ("full",), "hdim": (128,), "seqlen": (1024,)},
        columns=("dtype", "mask", "hdim", "seqlen", "nhead_k", "MHA ms", "GQA ms", "GQA/MHA"),
        targets=(Target("GQA/MHA", "<=", 1.0, noise=0.02),),
    ),
    Scenario(
        "backward",
        "Backward, all three stages, against PyTorch's autograd with its forward done before; batch 1, 8 heads",
        turns.backward,
        axes={"dtype": DTYPES, "hdim": (64, 128), "seqlen": (1024, 2048, 4096)},
        quick={"dtype": ("fp32", "bf16"), "hdim": (128,), "seqlen": (1024,)},
        columns=("dtype", "mask", "hdim", "seqlen", *_AGAINST_TORCH, "max diff"),
        targets=(Target("torch/ours", ">=", 1.5),),
    ),
    Scenario(
        "decode",
        "One query over a long K/V cache: bytes of all tensors a second, against reading memory",
        turns.decode,
        axes={
            "dtype": DTYPES,
            "hdim": (128,),
            "heads": ((8, 8), (8, 1), (32, 8)),
            "batch": (1, 16),
            "seqlen": (4096, 16384, 65536),
        },
        quick={"dtype": ("fp32", "bf16"), "heads": ((8, 8), (32, 8)), "batch": (1,), "seqlen": (16384,)},
        columns=(
            *("dtype", "hdim", "nhead_q", "nhead_k", "batch", "seqlen_k", "ours ms", "torch ms", "ours GB/s"),
            *("stream GB/s", "ours/stream", "torch/ours", "max diff"),
        ),
        targets=(Target("ours/stream", ">=", 0.9),),
    ),
    Scenario(
        "short",
        "Short sequences, 8 heads: a bound launch, and a run with its checks and new outputs, against PyTorch",
        turns.short,
        axes={"dtype": DTYPES, "hdim": (64, 128), "batch": (1, 4), "seqlen": (1, 16, 32, 64, 128)},
        quick={"dtype": ("fp32", "bf16"), "hdim": (128,), "batch": (1,), "seqlen": (1, 64)},
        columns=(
            *("dtype", "hdim", "batch", "seqlen", "launch us", "run us", "torch us", "torch/launch", "torch/run"),
            *("run-launch us", "max diff"),
        ),
        targets=(Target("torch/launch", ">=", 1.0), Target("torch/run", ">=", 1.0), Target("run-launch us", "<=", 20)),
        runs=300,
        burst=10,
    ),
    Scenario(
        "varlen",
        "Packed sequences against each of them alone, one after the other, and against a padded batch; 8 heads",
        turns.varlen,
        axes={"dtype": DTYPES, "hdim": (128,), "mask": _MASKS, "lengths": _LISTS},
        quick={"dtype": ("fp32",), "mask": ("full",), "lengths": _LISTS[2:]},
        columns=(
            *("dtype", "hdim", "mask", "lengths", "packed ms", "alone ms", "GF/s", "packed/alone", "packed/padded"),
            "max diff",
        ),
        targets=(Target("packed/alone", "<=", 1.0, noise=0.1),),
    ),
    Scenario(
        "paged",
        "K and V in pages in random order against contiguous ones, laid out as in a page or head by head",
        turns.paged,
        axes={
            "op": tuple(turns.OPS_OVER_PAGES),
            "dtype": ("fp32", "bf16"),
            "hdim": (128,),
            "seqlens": ((1, 8192), (1, 16384), (8, 8192), (8, 16384), (128, 8192), (128, 16384), (2048, 2048)),
            "pages": ((16, 64, 256, 1024),),
        },
        quick={"dtype": ("bf16",), "seqlens": ((1, 8192), (128, 8192)), "pages": ((16, 1024),)},
        columns=("op", "dtype", "hdim", "seqlen_q", "seqlen_k", "page", "paged ms", *_LAYOUTS),
        targets=(Target(f"paged/{turns.LAYOUTS[0]}", "<=", 1.1),),
    ),
)
