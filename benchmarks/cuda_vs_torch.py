"""Time the catalog's attention kernels for NVIDIA GPUs, and PyTorch's own attention, and compare them with targets.

Kernels are tuned, selected and checked against PyTorch before anything is timed. All sides of a problem take turns on
one stream; figures are medians, by the GPU's clock. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from catalog import Catalog, Problem
from catalog.ops.attention.inputs import forward_of
from catalog.runtime.measure import StopRule
from catalog.runtime.tune import TuneOptions, tune
from catalog.schema.problem import Problem as AnyProblem

SCENARIOS = ("forward", "backward", "decode", "fp8_cache", "paged", "latent", "launch")
TOKENS, HIDDEN = 16_384, 2_048
DECODED = (1, 8, 32, 128)
"""Batches of decoding."""
GROUPED = {"nhead_q": 64, "nhead_k": 8, "hdim_q": 128}
LATENT = {"nhead_q": 128, "nhead_k": 1, "hdim_q": 576, "hdim_v": 512}
PAGES = (16, 64, 256)
MANY = 32
"""Sequences that keep the memory busy, however few keys they have."""
COPY_BYTES = 1 << 32
BUSY_BYTES = 1 << 30
READ_BYTES = 1 << 28
BACKENDS: Mapping[str, SDPBackend] = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
WIDE_BACKENDS: Mapping[str, SDPBackend] = {"math": SDPBackend.MATH}
"""Of head dims above 256, which PyTorch's fused kernels do not take."""
CLOSE = 2e-2
"""Relative distance, in the Frobenius norm, of two correct bf16 answers."""

LAUNCH = Problem(batch=1, nhead_q=4, seqlen_q=128, hdim_q=64, dtype="bf16")

Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """Figures of one problem: TFLOP/s of each side, or what the scenario's title says, and whether targets are met."""

    scenario: str
    labels: Mapping[str, Any]
    figures: Mapping[str, float]
    targets: Mapping[str, bool] = field(default_factory=dict)
    kernel: str = ""


def medians(sides: Mapping[str, Call], seconds: float, *, cold: bool = False) -> dict[str, float]:
    """Median milliseconds of each side; they take turns, launch by launch, for that time in total.

    Each round has an order of its own: what ran before changes the time of a launch of 10 microseconds by up to one.

    Each round is queued while the GPU is busy with something else, so that no side waits for its launch. With `cold`,
    it is so before every launch, and other memory is read, which leaves none of the operands in the L2 cache, and
    nothing that must be written back.
    """
    busy = torch.empty(BUSY_BYTES, device="cuda", dtype=torch.uint8)
    other = torch.zeros(READ_BYTES // 4, device="cuda", dtype=torch.int32)
    for call in sides.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = random.Random(0)  # noqa: S311 - repeatable
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(next(iter(times.values()))) < 10:
        marks = []
        busy.zero_()
        for name, call in order.sample(list(sides.items()), len(sides)):
            if cold:
                busy.zero_()
                other.amax()
            start, end = event(), event()
            start.record()
            call()
            end.record()
            marks.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in marks:
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(taken) for name, taken in times.items()}


def event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def tensors(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def check(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    distance = float((actual.double() - expected.double()).norm() / expected.double().norm())
    if not distance < CLOSE:
        raise SystemExit(f"{name}: relative distance {distance:.3g} from PyTorch: nothing is timed")


class Bench:
    """The catalog, and the time to spend on tuning and timing."""

    def __init__(self, catalog: Catalog, options: argparse.Namespace) -> None:
        self.catalog = catalog
        self.candidates: int = options.candidates
        self.seconds: float = options.seconds

    def bound(self, problem: Problem, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> tuple[Any, str]:
        """The selected plan with its tensors, and its main kernel's name."""
        plan = self.catalog.select(problem, arch="sm_90")
        bound = plan.bind(inputs, outputs=outputs)
        bound.enqueue()
        torch.cuda.synchronize()
        return bound, max((kernel.name for kernel in plan.kernels), key=len)

    def forward(self, hdims: Sequence[int], seqlens: Sequence[int]) -> Iterator[Row]:
        for hdim in hdims:
            for seqlen in seqlens:
                for mask in ("no", "causal"):
                    yield self._forward(hdim, seqlen, mask)

    def _forward(self, hdim: int, seqlen: int, mask: str) -> Row:
        problem = forward_problem(hdim, seqlen, mask)
        q, k, v = (tensors(problem.batch, problem.nhead_q, seqlen, hdim) for _ in range(3))
        o = torch.empty_like(q)
        bound, kernel = self.bound(problem, {"q": q, "k": k, "v": v}, {"o": o})
        causal = mask == "causal"

        def torch_side(backend: SDPBackend) -> Call:
            def call() -> torch.Tensor:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, k, v, is_causal=causal)

            return call

        sides: dict[str, Call] = {name: torch_side(backend) for name, backend in backends_of(hdim).items()}
        first = next(iter(sides))
        check(f"forward {problem.key}", o, sides[first]())
        times = medians({"ours": bound.enqueue, **sides}, self.seconds)
        rates = {name: problem.flops / ms / 1e9 for name, ms in times.items()}
        ratios = {f"of {name}": rates["ours"] / rates[name] for name in sides}
        targets = {f"{first} x 1.5": ratios[f"of {first}"] >= 1.5}
        if seqlen >= 4096 and "cudnn" in sides:
            targets["cudnn x 1.0"] = ratios["of cudnn"] >= 1.0
        labels = {"hdim": hdim, "seqlen": seqlen, "mask": mask}
        return Row("forward", labels, rates | ratios, targets, kernel)

    def backward(self, hdims: Sequence[int], seqlens: Sequence[int]) -> Iterator[Row]:
        for hdim in hdims:
            for seqlen in seqlens:
                for mask in ("no", "causal"):
                    yield self._backward(hdim, seqlen, mask)

    def _backward(self, hdim: int, seqlen: int, mask: str) -> Row:
        problem = backward_problem(hdim, seqlen, mask)
        causal = mask == "causal"
        q, k, v = (tensors(problem.batch, problem.nhead_q, seqlen, hdim).requires_grad_() for _ in range(3))
        grad = tensors(*q.shape)
        o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda", dtype=torch.float32)
        forward = forward_of(problem)
        given = {"q": q.detach(), "k": k.detach(), "v": v.detach()}
        self.bound(forward, given, {"o": o.detach(), "lse": lse})
        gradients = {name: torch.empty_like(q).detach() for name in ("dq", "dk", "dv")}
        bound, kernel = self.bound(problem, {**given, "o": o.detach(), "lse": lse, "do": grad}, gradients)

        def torch_side(backend: SDPBackend) -> Call:
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, is_causal=causal)
            return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

        sides: dict[str, Call] = {name: torch_side(backend) for name, backend in backends_of(hdim).items()}
        first = next(iter(sides))
        for (name, gradient), expected in zip(gradients.items(), sides[first](), strict=True):
            check(f"backward {problem.key}: {name}", gradient, expected)
        times = medians({"ours": bound.enqueue, **sides}, self.seconds)
        rates = {name: problem.flops / ms / 1e9 for name, ms in times.items()}
        ratios = {f"of {name}": rates["ours"] / rates[name] for name in sides}
        labels = {"hdim": hdim, "seqlen": seqlen, "mask": mask}
        targets = {f"{first} x 1.2": ratios[f"of {first}"] >= 1.2}
        return Row("backward", labels, rates | ratios, targets, kernel)

    def decode(self, seqlens: Sequence[int]) -> Iterator[Row]:
        source = torch.empty(COPY_BYTES // 2, device="cuda", dtype=torch.uint8)
        target = torch.empty_like(source)
        for problem in decode_problems(seqlens, GROUPED):
            seqlen = problem.seqlen_k
            q = tensors(problem.batch, problem.nhead_q, 1, problem.hdim_q)
            k, v = (tensors(problem.batch, problem.nhead_k, seqlen, problem.hdim_q) for _ in range(2))
            o = torch.empty_like(q)
            bound, kernel = self.bound(problem, {"q": q, "k": k, "v": v}, {"o": o})
            check(f"decode {problem.key}", o, scaled_dot_product_attention(q, k, v, enable_gqa=True))
            sides: dict[str, Call] = {
                "ours": bound.enqueue,
                "cudnn": partial(cudnn, q, k, v),
                "copy": partial(target.copy_, source),
            }
            times = medians(sides, self.seconds, cold=True)
            moved = {"ours": problem.bytes, "cudnn": problem.bytes, "copy": COPY_BYTES}
            rates = {name: moved[name] / ms / 1e6 for name, ms in times.items()}
            ratios = {f"of {name}": rates["ours"] / rates[name] for name in ("cudnn", "copy")}
            figures = {"us": 1e3 * times["ours"]} | rates | ratios
            labels = {"batch": problem.batch, "seqlen": seqlen}
            targets = {"cudnn x 1.0": ratios["of cudnn"] >= 1.0}
            if problem.batch >= MANY:
                targets["copy x 0.85"] = ratios["of copy"] >= 0.85
            yield Row("decode", labels, figures, targets, kernel)

    def fp8_cache(self, seqlens: Sequence[int]) -> Iterator[Row]:
        """Decoding over a cache of fp8, and over one of bf16 with the same numbers."""
        narrow = decode_problems(seqlens, GROUPED, "bf16kvfp8")
        for problem, wide in zip(narrow, decode_problems(seqlens, GROUPED), strict=True):
            q = tensors(problem.batch, problem.nhead_q, 1, problem.hdim_q)
            k, v = (
                tensors(problem.batch, problem.nhead_k, problem.seqlen_k, problem.hdim_q).to(torch.float8_e4m3fn)
                for _ in range(2)
            )
            of_wide = {"q": q, "k": k.to(q.dtype), "v": v.to(q.dtype)}
            o = torch.empty_like(q)
            bound, kernel = self.bound(problem, {"q": q, "k": k, "v": v}, {"o": o})
            of_bf16, _ = self.bound(wide, of_wide, {"o": torch.empty_like(q)})
            check(f"fp8 cache {problem.key}", o, cudnn(*of_wide.values()))
            times = medians({"ours": bound.enqueue, "bf16": of_bf16.enqueue}, self.seconds, cold=True)
            share = times["ours"] / times["bf16"]
            figures = {f"{name} us": 1e3 * ms for name, ms in times.items()}
            figures |= {"GB/s": problem.bytes / times["ours"] / 1e6, "time of bf16": share}
            labels = {"batch": problem.batch, "seqlen": problem.seqlen_k}
            yield Row("fp8_cache", labels, figures, {"0.6 of bf16": share <= 0.6}, kernel)

    def paged(self, hdims: Sequence[int], seqlens: Sequence[int]) -> Iterator[Row]:
        """Causal prefill of packed queries over pages in random order, and over packed keys."""
        for hdim in hdims:
            for seqlen in seqlens:
                yield self._paged(hdim, seqlen)

    def _paged(self, hdim: int, seqlen: int) -> Row:
        packed, *problems = paged_problems(hdim, seqlen)
        q = tensors(TOKENS, packed.nhead_q, hdim)
        k, v = (tensors(TOKENS, packed.nhead_k, hdim) for _ in range(2))
        o = torch.empty_like(q)
        bound, _ = self.bound(packed, {"q": q, "k": k, "v": v}, {"o": o})
        sides: dict[str, Call] = {"packed": bound.enqueue}
        for problem in problems:
            order = torch.randperm(problem.num_pages or 0, device="cuda")
            caches = {name: torch.empty_like(x) for name, x in (("k_cache", k), ("v_cache", v))}
            for cache, x in zip(caches.values(), (k, v), strict=True):
                pages = (len(order), problem.page_size, *x.shape[1:])
                cache.resize_(pages)[order] = x.view(pages)
            batch = TOKENS // seqlen
            lengths = torch.full((batch,), seqlen, device="cuda", dtype=torch.int32)
            given = {"q": q, **caches, "block_table": order.view(batch, -1).int(), "seqlens_k": lengths}
            result = torch.empty_like(q)
            of_pages, kernel = self.bound(problem, given, {"o": result})
            check(f"paged {problem.key}", result, o)
            sides[f"pages of {problem.page_size}"] = of_pages.enqueue
        times = medians(sides, self.seconds)
        rates = {name: packed.flops / ms / 1e9 for name, ms in times.items()}
        shares = {f"share, {name}": times["packed"] / ms for name, ms in times.items() if name != "packed"}
        targets = {"0.97 of packed": min(shares.values()) >= 0.97}
        return Row("paged", {"hdim": hdim, "seqlen": seqlen}, rates | shares, targets, kernel)

    def latent(self, seqlens: Sequence[int]) -> Iterator[Row]:
        for problem in decode_problems(seqlens, LATENT):
            q = tensors(problem.batch, problem.nhead_q, 1, problem.hdim_q)
            k = tensors(problem.batch, 1, problem.seqlen_k, problem.hdim_q)
            v = k[..., : problem.hdim_v]
            o = torch.empty_like(q[..., : problem.hdim_v])
            bound, kernel = self.bound(problem, {"q": q, "k": k, "v": v}, {"o": o})
            weights = (q[:, :, 0] @ k[:, 0].mT * problem.hdim_q**-0.5).softmax(-1, dtype=torch.float32)
            check(f"latent {problem.key}", o[:, :, 0], weights.to(o.dtype) @ v[:, 0])
            ms = medians({"ours": bound.enqueue}, self.seconds, cold=True)["ours"]
            moved = k.nbytes + q.nbytes + o.nbytes
            figures = {"us": 1e3 * ms, "TFLOP/s": problem.flops / ms / 1e9, "GB/s": moved / ms / 1e6}
            labels = {"batch": problem.batch, "seqlen": problem.seqlen_k}
            yield Row("latent", labels, figures, {}, kernel)

    def launch(self) -> Iterator[Row]:
        problem = LAUNCH
        q, k, v = (tensors(problem.batch, problem.nhead_q, problem.seqlen_q, problem.hdim_q) for _ in range(3))
        given = {"q": q, "k": k, "v": v}
        bound, kernel = self.bound(problem, given, {"o": torch.empty_like(q)})
        plan = self.catalog.select(problem, arch="sm_90")
        calls: dict[str, Call] = {
            "ours": bound.enqueue,
            "plan.enqueue": lambda: plan.enqueue(given),
            "bound.launch": bound.launch,
            "torch": lambda: scaled_dot_product_attention(q, k, v),
        }
        taken = {}
        for name, call in calls.items():
            durations = []
            for _ in range(300):
                torch.cuda.synchronize()
                started = time.perf_counter()
                call()
                durations.append((time.perf_counter() - started) * 1e6)
            taken[name] = statistics.median(durations)
        yield Row("launch", {"unit": "us"}, taken, {"15 us": taken["ours"] <= 15}, kernel)


def backends_of(hdim: int) -> Mapping[str, SDPBackend]:
    return BACKENDS if hdim <= 256 else WIDE_BACKENDS


def forward_problem(hdim: int, seqlen: int, mask: str) -> Problem:
    heads = HIDDEN // hdim
    return Problem(batch=TOKENS // seqlen, nhead_q=heads, seqlen_q=seqlen, hdim_q=hdim, dtype="bf16", mask=mask)


def backward_problem(hdim: int, seqlen: int, mask: str) -> Problem:
    heads = HIDDEN // hdim
    return Problem(
        op="bwd", batch=TOKENS // seqlen, nhead_q=heads, seqlen_q=seqlen, hdim_q=hdim, dtype="bf16", mask=mask
    )


def decode_problems(seqlens: Sequence[int], heads: Mapping[str, int], dtype: str = "bf16") -> Iterator[Problem]:
    for batch in DECODED:
        for seqlen in seqlens:
            yield Problem(op="splitkv", batch=batch, seqlen_q=1, seqlen_k=seqlen, dtype=dtype, **heads)


def paged_problems(hdim: int, seqlen: int) -> list[Problem]:
    """Four query heads for each head of keys: packed, and over pages of each size."""
    heads, lengths = HIDDEN // hdim, [seqlen] * (TOKENS // seqlen)
    alike = {"seqlens_q": lengths, "nhead_q": heads, "nhead_k": max(1, heads // 4), "hdim_q": hdim}
    alike |= {"dtype": "bf16", "mask": "bottom_right"}
    pages = [{"page_size": size, "num_pages": TOKENS // size} for size in PAGES]
    return [
        Problem(seqlens_k=lengths, **alike),
        *(Problem(op="pagedkv", seqlen_k=seqlen, **alike, **of_page) for of_page in pages),
    ]


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def build(catalog: Catalog, problems: Sequence[AnyProblem]) -> None:
    """Compile what is selected for all problems, on every core."""
    plans = [catalog.select(problem, arch="sm_90") for problem in problems]
    kernels = {kernel.id: kernel for plan in plans for kernel in plan.kernels}
    for failure in catalog.builder.build_many(kernels.values()).failures:
        print(f"{failure.kernel.name}: {failure.error}")


def print_row(row: Row) -> None:
    labels = " ".join(f"{name}={value}" for name, value in row.labels.items())
    figures = "  ".join(f"{name} {value:.4g}" for name, value in row.figures.items())
    verdict = ", ".join(f"{'met' if met else 'NOT met'}: {name}" for name, met in row.targets.items())
    kernel = row.kernel.partition("_batch_")[2] or row.kernel
    print(f"{row.scenario:8} {labels:32} {figures}  [{verdict}]  {kernel[:64]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--scenario", nargs="+", choices=SCENARIOS, default=None)
    add("--seqlen", type=int, nargs="+", default=(2048, 4096, 8192, 16384))
    add("--hdim", type=int, nargs="+", default=(128, 64))
    add("--candidates", type=int, default=4, help="number of kernels to tune per problem; 0: use the recorded timings")
    add("--seconds", type=float, default=0.5, help="total for all sides of one problem")
    add("--db", type=Path, default=None, help="the catalog")
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    chosen = options.scenario or SCENARIOS
    catalog = Catalog(options.db)
    catalog.populate("sm_90")
    problems = []
    for hdim in options.hdim:
        for seqlen in options.seqlen:
            problems += paged_problems(hdim, seqlen) if "paged" in chosen else []
            for mask in ("no", "causal"):
                problems += [forward_problem(hdim, seqlen, mask)] if "forward" in chosen else []
                problems += [backward_problem(hdim, seqlen, mask)] if "backward" in chosen else []
    problems += decode_problems(options.seqlen, GROUPED) if {"decode", "fp8_cache"} & {*chosen} else []
    problems += decode_problems(options.seqlen, GROUPED, "bf16kvfp8") if "fp8_cache" in chosen else []
    problems += decode_problems(options.seqlen, LATENT) if "latent" in chosen else []
    if options.candidates:
        rule = StopRule(seconds=0.1, warm_up_seconds=0.02)
        tuning = TuneOptions(arch="sm_90", candidates=options.candidates, rule=rule)
        report = tune(catalog, problems, tuning)
        print(f"tuned {len(report.tuned)} problems, {report.gain:.3f} times the static order on geometric mean")
    forwards = [forward_of(problem) for problem in problems if problem.op == "bwd"]
    build(catalog, [*problems, *forwards, LAUNCH])
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    bench = Bench(catalog, options)
    rows: list[Row] = []
    scenarios: dict[str, Callable[[], Iterator[Row]]] = {
        "forward": lambda: bench.forward(options.hdim, options.seqlen),
        "backward": lambda: bench.backward(options.hdim, options.seqlen),
        "decode": lambda: bench.decode(options.seqlen),
        "fp8_cache": lambda: bench.fp8_cache(options.seqlen),
        "paged": lambda: bench.paged(options.hdim, options.seqlen),
        "latent": lambda: bench.latent(options.seqlen),
        "launch": bench.launch,
    }
    for name in chosen:
        for row in scenarios[name]():
            rows.append(row)
            print_row(row)
    met = [met for row in rows for met in row.targets.values()]
    print(f"{sum(met)} of {len(met)} targets met")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
