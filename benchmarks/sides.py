"""The sides of a comparison: our kernels and PyTorch's attention, made to run on the same arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from timing import Call, copies_to_stream, rotating
from timing import sgemm as sgemm_call
from timing import stream as stream_call

from catalog import Catalog, Problem
from catalog.ops.attention.inputs import forward_of
from catalog.runtime.inputs import make_inputs
from catalog.runtime.plan import Plan

Array = NDArray[Any]


@dataclass(frozen=True)
class Side:
    """A timed call, and a function that returns its answer: only some are read, and only after the timing."""

    call: Call
    answer: Callable[[], Array] = lambda: np.empty(0)
    kernels: str = ""


@dataclass(frozen=True)
class Bench:
    """The catalog, the arch of our kernels, and the arrays of the current problem, which its sides share."""

    catalog: Catalog
    arch: str
    _inputs: dict[tuple[str, int], dict[str, Array]] = field(default_factory=dict, repr=False)

    def inputs(self, problem: Problem, copy: int) -> dict[str, Array]:
        """The problem's inputs, of which every ``copy`` has memory of its own."""
        key = (problem.key, copy)
        if key not in self._inputs:
            if copy:
                self._inputs[key] = {name: array.copy(order="K") for name, array in self.inputs(problem, 0).items()}
            else:
                self._inputs[key] = self._backward_inputs(problem) if problem.op == "bwd" else make_inputs(problem, 0)
        return self._inputs[key]

    def plan(self, problem: Problem) -> Plan:
        """The plan that is selected for the problem."""
        return self.catalog.select(problem, arch=self.arch)

    def _backward_inputs(self, problem: Problem) -> dict[str, Array]:
        """O and LSE are our own forward's: the float64 reference takes minutes at these lengths."""
        forward = forward_of(problem)
        inputs = make_inputs(forward, 0)
        bound = self.plan(forward).bind(inputs)
        bound.launch()
        o = bound.outputs["o"]
        gradient = np.random.default_rng(0).standard_normal(o.shape, dtype=np.float32).astype(o.dtype)
        return {**inputs, **bound.outputs, "do": gradient}


Maker = Callable[[Bench], Side]


def ours(problem: Problem, copies: int = 1) -> Maker:
    """Launches of our plan, on each of the copies in turn."""

    def make(bench: Bench) -> Side:
        plan = bench.plan(problem)
        bound = [plan.bind(bench.inputs(problem, copy)) for copy in range(copies)]
        compared = "dq" if problem.op == "bwd" else "o"
        return Side(
            rotating(each.launch for each in bound),
            lambda: bound[0].outputs[compared].astype(np.float32),
            " -> ".join(kernel.name for kernel in plan.kernels),
        )

    return make


def our_run(problem: Problem) -> Maker:
    """Our plan's whole ``run``: inputs checked, outputs allocated, launched."""

    def make(bench: Bench) -> Side:
        plan, inputs = bench.plan(problem), bench.inputs(problem, 0)
        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        return Side(lambda: plan.run(q=q, k=k, v=v))

    return make


def one_by_one(packed: Problem) -> Maker:
    """The sequences of a packed problem as separate problems, one after the other, on views of the same arrays."""

    def make(bench: Bench) -> Side:
        inputs = bench.inputs(packed, 0)
        o = np.empty_like(inputs["q"])
        lengths = packed.seqlens_q or ()
        launches = []
        for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
            alone = packed.model_copy(
                update={"seqlens_q": None, "seqlens_k": None, "batch": 1, "seqlen_q": length, "seqlen_k": length}
            )
            q, k, v, out = (
                array[start : start + length].transpose(1, 0, 2)[np.newaxis]
                for array in (inputs["q"], inputs["k"], inputs["v"], o)
            )
            launches.append(bench.plan(alone).bind(q=q, k=k, v=v, outputs={"o": out}).launch)

        def launch_all() -> None:
            for launch in launches:
                launch()

        return Side(launch_all, lambda: o.astype(np.float32))

    return make


def theirs(problem: Problem, copies: int = 1) -> Maker:
    """PyTorch's attention, on each of the copies in turn."""

    def make(bench: Bench) -> Side:
        calls = [_attention(problem, bench.inputs(problem, copy)) for copy in range(copies)]
        return Side(rotating(calls), lambda: _numpy(calls[0]()))

    return make


def their_backward(problem: Problem) -> Maker:
    """PyTorch's autograd, the forward done before."""

    def make(bench: Bench) -> Side:
        inputs = bench.inputs(problem, 0)
        q, k, v = (_tensor(inputs[name]).requires_grad_() for name in ("q", "k", "v"))
        gradient = _tensor(inputs["do"])
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.mask != "no")

        def backward() -> Any:
            return torch.autograd.grad(o, (q, k, v), gradient, retain_graph=True)[0]

        return Side(backward, lambda: _numpy(backward()))

    return make


def sgemm(_: Bench) -> Side:
    return Side(sgemm_call())


def stream(_: Bench) -> Side:
    return Side(stream_call())


def streamed(maker: Callable[[Problem, int], Maker], problem: Problem) -> Maker:
    """A side on enough copies of the problem that it reads from memory."""
    return maker(problem, copies_to_stream(problem.bytes))


def _attention(problem: Problem, inputs: dict[str, Array]) -> Callable[[], torch.Tensor]:
    q, k, v = (_tensor(inputs[name]) for name in ("q", "k", "v"))
    causal, grouped = problem.mask != "no", problem.ratio > 1

    def attention() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return attention


def _tensor(array: Array) -> torch.Tensor:
    """The same memory as a tensor; PyTorch does not support NumPy's bfloat16."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _numpy(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().float().numpy()
    return array
