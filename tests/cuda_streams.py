"""Streams, graphs and PyTorch's tensors on a real GPU of arch sm_90: make test-cuda."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cuda_gpu import ARCH, need_gpu

from catalog.errors import TensorError
from catalog.ops.attention.problem import Problem
from catalog.ops.conv.problem import ConvProblem
from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.plan import Plan

need_gpu()
pytest_plugins = ("cuda_fixtures",)

SHAPE: dict[str, Any] = {"batch": 2, "nhead_q": 8, "nhead_k": 2, "hdim_q": 128, "dtype": "bf16", "lse": True}
PROBLEMS = {
    "dense": Problem(**SHAPE, seqlen_q=515, mask="causal"),
    "packed": Problem(
        **{name: value for name, value in SHAPE.items() if name != "batch"}, seqlens_q=[100, 0, 333], mask="causal"
    ),
    "splitkv": Problem(**SHAPE, op="splitkv", seqlen_q=1, seqlen_k=3000),
    "stream": Problem(**{**SHAPE, "batch": 600}, op="splitkv", seqlen_q=1, seqlen_k=300),
}


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    return torch


def plan_of(catalog: Catalog, name: str) -> Plan:
    """The selected plan, or that of the first stream row."""
    problem = PROBLEMS[name]
    if name != "stream":
        return catalog.select(problem, arch=ARCH)
    candidates = (candidate.kernel for candidate in catalog.candidates(problem, arch=ARCH, limit=20))
    return catalog.plan(problem, next(one for one in candidates if one.algorithm.pipeline == "sm90_stream"))


def drawn(torch: Any, problem: Problem) -> dict[str, Any]:
    return {
        name: torch.randn(problem.shapes[name], device="cuda", dtype=getattr(torch, problem.tensors[name].element))
        for name in problem.needed
    }


def attention(torch: Any, problem: Problem, given: dict[str, Any]) -> Any:
    attend = torch.nn.functional.scaled_dot_product_attention
    causal = problem.mask != "no"
    if problem.seqlens_q is None:
        return attend(*given.values(), is_causal=causal, enable_gqa=True)
    parts = (tensor.split(problem.seqlens_q) for tensor in given.values())
    return torch.cat(
        [
            attend(*(one.transpose(0, 1)[None] for one in sequence), is_causal=causal, enable_gqa=True)[0].transpose(
                0, 1
            )
            for sequence in zip(*parts, strict=True)
            if sequence[0].shape[0]
        ]
    )


def close(torch: Any, actual: Any, expected: Any) -> bool:
    return bool((actual.double() - expected.double()).norm() < 1e-2 * expected.double().norm())


@pytest.mark.parametrize("name", PROBLEMS)
def test_queued_launches_follow_pytorchs_order(torch: Any, catalog: Catalog, name: str) -> None:
    problem, plan = PROBLEMS[name], plan_of(catalog, name)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(5):
                given = drawn(torch, problem)
                torch.cuda._sleep(2_000_000)  # about a millisecond: what is queued does not start yet
                for tensor in given.values():
                    tensor.mul_(0.5)
                o = plan.enqueue(given)["o"]
                scaled = o * 2
                assert close(torch, scaled, attention(torch, problem, given) * 2)
    torch.cuda.synchronize()


@pytest.mark.parametrize("start", ["launch", "enqueue"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_captured_launch_replays(torch: Any, catalog: Catalog, name: str, start: str) -> None:
    problem = PROBLEMS[name]
    given = drawn(torch, problem)
    outputs = {
        made: torch.empty(problem.shapes[made], device="cuda", dtype=getattr(torch, problem.tensors[made].element))
        for made in problem.made
    }
    bound = plan_of(catalog, name).bind(given, outputs=outputs)
    bound.launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(bound, start)()
    del bound
    for _ in range(3):
        for tensor in given.values():
            tensor.normal_()
        graph.replay()
        assert close(torch, outputs["o"], attention(torch, problem, given))


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_captured_plan_replays_into_the_tensors_that_it_made(torch: Any, catalog: Catalog, name: str) -> None:
    problem = PROBLEMS[name]
    plan, given = plan_of(catalog, name), drawn(torch, problem)
    for _ in range(2):
        plan.enqueue(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = plan.enqueue(given)["o"]
    torch.empty(1 << 20, device="cuda").fill_(float("nan"))
    for _ in range(3):
        given["q"].normal_()
        graph.replay()
        assert close(torch, o, attention(torch, problem, given))


CHAINS = {
    "few rows": GemmProblem(m=16, n=1024, k=1024, dtype="bf16", layout="rcr"),
    "parts of K": GemmProblem(m=64, n=1024, k=1024, dtype="bf16", layout="rcr", k_batch=4),
    "many rows": GemmProblem(m=3000, n=1024, k=1024, dtype="bf16", layout="rcr"),
    "convolution": ConvProblem(n=8, c=64, k=64, size=(33, 29), filter=(3, 3), pad=(1, 1), dtype="bf16"),
    "copied convolution": ConvProblem(n=8, c=72, k=72, size=(33, 29), filter=(3, 3), pad=(1, 1), dtype="bf16"),
    "convolution of few channels": ConvProblem(n=8, c=4, k=4, size=(33, 29), filter=(3, 3), pad=(1, 1), dtype="bf16"),
}
"""Problems whose result has the shape of their first operand."""


@pytest.mark.parametrize("name", CHAINS)
def test_kernels_that_start_early_wait_for_what_they_read(torch: Any, catalog: Catalog, name: str) -> None:
    """Each launch reads what the last one wrote, and overwrites what the last one read."""
    problem = CHAINS[name]
    catalog.populate(ARCH, operation=problem.operation)
    plan = catalog.select(problem, arch=ARCH)
    operand, weight = problem.needed
    [made] = problem.made
    shape, of_weight = problem.shapes[operand], problem.shapes[weight]
    depth = math.prod(of_weight) // of_weight[0]
    weights = [torch.randn(of_weight, device="cuda").mul_(depth**-0.5).bfloat16() for _ in range(12)]
    first = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    pair = [first.clone(), torch.empty_like(first)]
    calls = [
        plan.bind({operand: pair[i % 2], weight: one}, outputs={made: pair[1 - i % 2]}) for i, one in enumerate(weights)
    ]

    def chain() -> None:
        pair[0].copy_(first)
        for call in calls:
            call.enqueue()

    chain()
    torch.cuda.synchronize()
    expected = first
    for one in weights:
        expected = plan.run({operand: expected, weight: one}).outputs[made]
    assert torch.equal(pair[0], expected)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        chain()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            chain()
        torch.cuda.current_stream().wait_stream(side)
        again = pair[0] * 1
    for _ in range(20):
        pair[0].fill_(float("nan"))
        graph.replay()
        assert torch.equal(again, expected)
    for _ in range(20):
        torch.cuda._sleep(100_000)
        chain()
        assert torch.equal(pair[0], expected)


def test_numpy_arrays_end_no_capture(torch: Any, catalog: Catalog) -> None:
    bound = catalog.select(PROBLEMS["dense"], arch=ARCH).bind()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(TensorError, match="NumPy arrays"):
            bound.launch()
        x += 1
    graph.replay()
    assert x.tolist() == [1] * 4


def test_runs_are_timed_and_agree_on_pytorchs_tensors_and_numpys(torch: Any, catalog: Catalog) -> None:
    problem = Problem(**{**SHAPE, "dtype": "fp16"}, seqlen_q=257)
    plan, given = catalog.select(problem, arch=ARCH), drawn(torch, problem)
    on_gpu = plan.run(given, repeats=5)
    copied = plan.run({name: tensor.cpu().numpy() for name, tensor in given.items()}, repeats=5)
    assert np.array_equal(on_gpu.outputs["o"].cpu().numpy(), copied.outputs["o"])
    assert 1e-3 < on_gpu.time_ms < 5
    assert 300 < (catalog.device(ARCH).clock_mhz() or 0) < 3000
