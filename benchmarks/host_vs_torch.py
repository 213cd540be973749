"""Time the catalog's host kernels against PyTorch's scaled_dot_product_attention: same process, same threads.

A turn is one untimed and one timed run of each side: the untimed run wakes its own threads while those of the other
OpenMP runtime, which spin for some milliseconds after their work, go to sleep. Figures are medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from catalog import Catalog, Problem
from catalog.runtime.devices.host import HostDevice, resolve_host_arch
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import make_outputs
from catalog.runtime.tolerance import max_error
from catalog.runtime.workspace import splits_of

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HEADS = 8
SGEMM_SIZE = 1024


@dataclass(frozen=True)
class Row:
    """One problem: medians in ms, rates in GFLOP/s, and how far the two answers are apart."""

    op: str
    dtype: str
    mask: str
    seqlen: int
    hdim: int
    ours_ms: float
    torch_ms: float
    ours_gflops: float
    torch_gflops: float
    sgemm_gflops: float
    ratio: float
    max_difference: float
    kernels: str


def seconds_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(functions: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """The median seconds of each."""
    seconds: list[list[float]] = [[] for _ in functions]
    for turn in range(runs + 1):
        for index, function in enumerate(functions):
            function()
            elapsed = seconds_of(function)
            if turn:
                seconds[index].append(elapsed)
    return [median(each) for each in seconds]


Side = Callable[[], object]
Difference = Callable[[], float]


def sides(catalog: Catalog, problem: Problem, threads: int) -> tuple[Side, Side, Difference, str]:
    """Our side, PyTorch's, how far their answers are apart, and our kernels' names."""
    inputs = make_inputs(problem)
    outputs, plan = make_outputs(problem, inputs), catalog.select(problem)
    device = HostDevice(threads)
    libraries = plan.build()
    loaded = [device.load(library.path, library.sha256, library.kernel_id) for library in libraries]
    call = device.call(problem, inputs | outputs, splits_of(problem, plan.kernels, threads))

    def ours() -> None:
        for kernel in loaded:
            device.launch(kernel, call)

    dtype = TORCH_DTYPES[problem.dtype]
    tensors = {name: torch.from_numpy(array.astype(np.float32)).to(dtype) for name, array in inputs.items()}
    q, k, v = (tensors[name].requires_grad_(problem.op == "bwd") for name in ("q", "k", "v"))

    def forward() -> Any:
        causal = problem.mask == "top_left"
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    theirs, compared = forward, "o"
    if problem.op == "bwd":
        o, compared = forward(), "dq"

        def theirs() -> Any:
            return torch.autograd.grad(o, (q, k, v), tensors["do"], retain_graph=True)[0]

    def difference() -> float:
        return max_error(outputs[compared], theirs().float().detach().numpy())

    return ours, theirs, difference, " -> ".join(kernel.name for kernel in plan.kernels)


def compare(catalog: Catalog, problem: Problem, runs: int, threads: int) -> Row:
    ours, theirs, difference, kernels = sides(catalog, problem, threads)
    a, b = torch.randn(2, SGEMM_SIZE, SGEMM_SIZE)
    ours_s, torch_s, sgemm_s = interleaved([ours, theirs, lambda: a @ b], runs)
    gflop = problem.flops / 1e9
    return Row(
        op=problem.op,
        dtype=problem.dtype,
        mask="no" if problem.mask == "no" else "causal",
        seqlen=problem.seqlen_q,
        hdim=problem.hdim_q,
        ours_ms=ours_s * 1e3,
        torch_ms=torch_s * 1e3,
        ours_gflops=gflop / ours_s,
        torch_gflops=gflop / torch_s,
        sgemm_gflops=2 * SGEMM_SIZE**3 / sgemm_s / 1e9,
        ratio=torch_s / ours_s,
        max_difference=difference(),
        kernels=kernels,
    )


def print_table(rows: Iterator[Row]) -> list[Row]:
    """Print each row when it is measured."""
    print(
        f"{'op':3} {'dtype':5} {'mask':6} {'seqlen':>6} {'hdim':>4} {'ours ms':>9} {'torch ms':>9} {'ours GF/s':>9} "
        f"{'torch GF/s':>10} {'sgemm GF/s':>10} {'torch/ours':>10} {'ours/sgemm':>10} {'max diff':>9}"
    )
    done = []
    for row in rows:
        print(
            f"{row.op:3} {row.dtype:5} {row.mask:6} {row.seqlen:6} {row.hdim:4} {row.ours_ms:9.2f} {row.torch_ms:9.2f} "
            f"{row.ours_gflops:9.1f} {row.torch_gflops:10.1f} {row.sgemm_gflops:10.1f} {row.ratio:10.2f} "
            f"{row.ours_gflops / row.sgemm_gflops:10.2f} {row.max_difference:9.1e}",
            flush=True,
        )
        done.append(row)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--op", nargs="+", choices=("fwd", "bwd"), default=["fwd", "bwd"])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--hdim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", nargs="+", choices=TORCH_DTYPES, default=list(TORCH_DTYPES))
    parser.add_argument("--runs", type=int, default=7, help="timed runs of each side (default 7)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each side (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    if options.runs < 1 or options.threads < 1:
        parser.error("--runs and --threads are at least 1")

    torch.set_num_threads(options.threads)
    catalog = Catalog()
    device = HostDevice(options.threads).device
    print(f"{device.name}, {resolve_host_arch()}, {options.threads} threads, median of {options.runs} runs")
    print(f"PyTorch {torch.__version__}; sgemm: its fp32 matrix product of {SGEMM_SIZE}")
    print(f"(batch, heads) = (1, {HEADS}); FLOP: 4 (bwd: 10) b h seqlen^2 hdim, half under a causal mask\n")
    problems = (
        Problem(op=op, batch=1, nhead_q=HEADS, seqlen_q=seqlen, hdim_q=hdim, dtype=dtype, mask=mask)
        for op, dtype, mask, hdim, seqlen in product(
            options.op, options.dtype, ("no", "causal"), options.hdim, options.seqlen
        )
    )
    rows = print_table(compare(catalog, problem, options.runs, options.threads) for problem in problems)
    if options.json is not None:
        figures = {"device": asdict(device), "torch": torch.__version__, "runs": options.runs}
        options.json.write_text(json.dumps(figures | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
