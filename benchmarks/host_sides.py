"""What the comparisons of host kernels with PyTorch's share: options, the machine, the table and its summary."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from report import Row, Target, is_met, print_table, summary

from catalog import Catalog
from catalog.runtime.peaks import measure_peaks

TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
)


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """The options of all; ``about`` is the docstring of the script."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--runs", type=int, default=25, help="timed runs of each side (default 25)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one problem (default 8)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each side")
    parser.add_argument("--best", action="store_true", help="minima instead of medians, for a busy machine")
    return parser


def compare(
    columns: Sequence[str], targets: Sequence[Target], threads: int, rows_of: Callable[[Catalog, float], Iterator[Row]]
) -> None:
    """Print the rows of a catalog as they are timed, and how many meet the targets.

    Args:
        columns: labels and figures of the table.
        targets: what the figures are compared with.
        threads: of each side.
        rows_of: times problems, given the catalog and the peak of this CPU in GFLOP/s.
    """
    torch.set_num_threads(threads)
    os.environ["CATALOG_NUM_THREADS"] = str(threads)  # read by the first use of the catalog's settings
    catalog = Catalog()
    device = catalog.host().device
    peak = measure_peaks(catalog.builder, device.arch, device.cores).gflops
    print(f"{device.name}, {device.arch}, {device.cores} threads, peak {peak:.0f} GFLOP/s; PyTorch {torch.__version__}")
    rows = print_table(columns, targets, rows_of(catalog, peak))
    print(f"\n{sum(is_met(row, targets) for row in rows)}/{len(rows)} problems met")
    for line in summary(targets, rows):
        print(f"    {line}")
