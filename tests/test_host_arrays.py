"""Arrays of other libraries as tensors of host plans: taken where they are, or refused, never copied."""

from __future__ import annotations

import gc
import shutil
import weakref

import ml_dtypes
import numpy as np
import pytest
from conftest import missing

from catalog.errors import TensorError
from catalog.ops.attention.problem import Problem
from catalog.runtime import bound
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.fast_path import FastPath
from catalog.runtime.devices.host.arrays import host_array
from catalog.runtime.devices.known_call import IN_ORDER
from catalog.runtime.inputs import make_inputs

PROBLEM = Problem(
    batch=2, nhead_q=4, nhead_k=2, seqlen_q=5, seqlen_k=70, hdim_q=64, dtype="fp32", mask="bottom_right", lse=True
)


KNOWN = 6
"""Calls of a plan after which it knows their sizes and strides."""


class Foreign:
    """An array of another library, which has nothing but DLPack."""

    def __init__(self, array, *, versioned=True, device=1):
        self.array, self.versioned, self.device = array, versioned, device

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **asked):
        if not self.versioned and asked:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**asked)


@pytest.fixture(scope="module")
def catalog(host_file, tmp_path_factory):
    return Catalog(shutil.copy(host_file, tmp_path_factory.mktemp("arrays") / "catalog.db"))


@pytest.fixture(scope="module")
def plan(catalog):
    return catalog.select(PROBLEM)


@pytest.mark.parametrize("versioned", [False, True])
def test_arrays_are_taken_where_they_are(versioned):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::2]
    taken = host_array("q", Foreign(array, versioned=versioned))
    assert taken.dtype == array.dtype
    assert taken.strides == array.strides
    assert np.shares_memory(taken, array)
    array[1, 1, 3] = -1
    assert taken[1, 1, 3] == -1


def test_what_is_taken_lives_as_long_as_it_is_used():
    array = np.ones((2, 3), np.float32)
    dead = weakref.ref(array)
    taken = host_array("q", Foreign(array))
    del array
    gc.collect()
    assert dead() is not None
    assert taken.sum() == 6
    del taken
    gc.collect()
    assert dead() is None


def test_plans_run_on_them(plan):
    inputs = make_inputs(PROBLEM)
    expected = plan.run(inputs).outputs
    o = np.empty_like(expected["o"])
    outputs = plan.bind(
        {name: Foreign(array) for name, array in inputs.items()},
        outputs={"o": Foreign(o), "lse": np.empty_like(expected["lse"])},
    )
    outputs.launch()
    assert np.array_equal(o, expected["o"])
    assert isinstance(plan.run({name: Foreign(array) for name, array in inputs.items()}).outputs["o"], np.ndarray)


def test_only_what_says_that_it_may_be_written_is_written(plan):
    inputs = make_inputs(PROBLEM)
    outputs = plan.run(inputs).outputs
    fixed = outputs["o"].copy()
    fixed.flags.writeable = False
    for value in (Foreign(outputs["o"], versioned=False), Foreign(fixed)):
        with pytest.raises(TensorError, match="o is read-only"):
            plan.bind(inputs, outputs={**outputs, "o": value})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Foreign(np.zeros(3), device=2), "q is in memory of an NVIDIA GPU: expected the CPU's"),
        (Foreign(np.zeros(3, ">f4")), "q, a Foreign, cannot be shared without a copy(.|\n)*numpy.array"),
        (Foreign(np.zeros(3, np.complex64)), "q has elements that no kernel accepts"),
    ],
)
def test_what_is_refused(value, message):
    with pytest.raises(TensorError, match=message):
        host_array("q", value)


def test_other_things_are_no_arrays():
    assert host_array("q", [1.0]) is None


@pytest.fixture
def torch():
    try:
        import torch
    except ImportError:
        missing("torch")
    return torch


def test_elements_that_numpy_lacks(torch):
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    for value in (tensor, Foreign(tensor), Foreign(tensor, versioned=False)):
        taken = host_array("q", value)
        assert taken.dtype == ml_dtypes.bfloat16
        assert taken.tolist() == tensor.tolist()
        tensor[0, 0] += 1
        assert float(taken[0, 0]) == float(tensor[0, 0])
    assert host_array("q", torch.zeros(2, dtype=torch.float8_e4m3fn)).dtype == ml_dtypes.float8_e4m3fn


def test_pytorchs_tensors_give_pytorchs_tensors(torch, plan):
    inputs = make_inputs(PROBLEM)
    expected = plan.run(inputs).outputs
    result = plan.run({name: torch.from_numpy(array) for name, array in inputs.items()})
    for name, array in expected.items():
        assert isinstance(result.outputs[name], torch.Tensor)
        assert np.array_equal(result.outputs[name].numpy(), array)


def test_lengths_in_pytorchs_tensors_are_checked_too(torch, plan):
    inputs = {name: torch.from_numpy(array) for name, array in make_inputs(PROBLEM).items()}
    with pytest.raises(TensorError, match=r"seqlens_k\[1\] is 71"):
        plan.run(inputs, seqlens_k=torch.tensor([70, 71], dtype=torch.int32))


def test_pytorchs_tensors_that_are_refused(torch):
    for tensor, message in (
        (torch.zeros(2, requires_grad=True), "requires a gradient(.|\n)*catalog.torch"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch._neg_view(torch.zeros(2)), "negated"),
        (torch.zeros(2, dtype=torch.complex64), "no kernel accepts: torch.complex64"),
    ):
        with pytest.raises(TensorError, match=message):
            host_array("q", tensor)


@pytest.fixture
def first_calls(monkeypatch):
    """The problems of calls that were checked as first ones are."""
    problems, take = [], bound.take
    monkeypatch.setattr(bound, "take", lambda problem, *rest: problems.append(problem) or take(problem, *rest))
    return problems


def test_tensors_like_those_of_a_first_call_take_the_fast_path_at_any_size(torch, catalog, first_calls):
    catalog.forget()  # what other tests selected
    sizes = {"batch": 2, "seqlen_q": 6, "seqlen_k": 71}, {"batch": 3, "seqlen_q": 9, "seqlen_k": 1}
    for problem in (PROBLEM, *(PROBLEM.resized(**size) for size in sizes)):
        given = {name: torch.from_numpy(array) for name, array in make_inputs(problem, problem.batch).items()}
        wider = {name: torch.zeros(*tensor.shape[:-1], 72)[..., :64].copy_(tensor) for name, tensor in given.items()}
        expected = catalog.select(problem).run(given).outputs
        first_calls.clear()
        for tensors in (given, wider):
            for name, tensor in catalog.select(problem).enqueue(tensors).items():
                assert torch.equal(tensor, expected[name])
        assert len(first_calls) <= (problem is PROBLEM)


def test_calls_over_pages_take_the_fast_path_and_wrong_pages_are_refused_in_words(torch, catalog, first_calls):
    problem = Problem(op="pagedkv", batch=2, nhead_q=2, seqlen_q=1, seqlen_k=32, page_size=16, hdim_q=64, dtype="fp32")
    given = {name: torch.from_numpy(array) for name, array in make_inputs(problem).items()}
    plan = catalog.select(problem)
    expected = plan.run(given).outputs["o"]
    plan.enqueue(given)
    first_calls.clear()
    assert torch.equal(plan.enqueue(given)["o"], expected)
    assert not first_calls
    with pytest.raises(TensorError, match=r"block_table\[0\] is 4: must be from 0 to 3"):
        plan.enqueue({**given, "block_table": torch.full_like(given["block_table"], 4)})


def test_known_calls_differ_in_addresses_only(torch, catalog, monkeypatch):
    plan, checked = catalog.select(PROBLEM), FastPath.__call__
    inputs = [make_inputs(PROBLEM, seed) for seed in range(2)]
    expected = [plan.run(arrays).outputs["o"] for arrays in inputs]
    given = [{name: torch.from_numpy(array) for name, array in arrays.items()} for arrays in inputs]
    tokens_first = [
        {name: tensor.transpose(1, 2).contiguous().transpose(1, 2) for name, tensor in tensors.items()}
        for tensors in given
    ]
    paths = []
    monkeypatch.setattr(FastPath, "__call__", lambda *rest, **more: paths.append(1) or checked(*rest, **more))
    catalog.forget()
    for _ in range(KNOWN):
        plan.enqueue(given[0])
    paths.clear()
    made = [plan.enqueue(tensors)["o"] for tensors in given]
    assert not paths
    assert all(np.array_equal(o.numpy(), wanted) for o, wanted in zip(made, expected, strict=True))
    calls = 0
    while len(paths) == calls:  # until these strides are the known ones
        calls += 1
        o = plan.enqueue(tokens_first[calls % 2])["o"]
        assert np.array_equal(o.numpy(), expected[calls % 2])
    assert calls < 80
    paths.clear()
    plan.enqueue(given[0])
    assert paths
    catalog.forget()
    assert (plan, IN_ORDER) not in plan.services.shared.known


def test_partial_results_of_known_calls_lie_apart(torch, catalog):
    problem = Problem(op="bwd", batch=1, nhead_q=2, seqlen_q=7, hdim_q=64, dtype="fp32", mask="top_left")
    given = {name: torch.from_numpy(array) for name, array in make_inputs(problem).items()}
    plan = catalog.select(problem)
    expected = plan.run(given).outputs
    for _ in range(KNOWN + 1):
        made = plan.enqueue(given)
    assert (plan, IN_ORDER) in plan.services.shared.known
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.items())


@pytest.mark.parametrize("calls", [1, KNOWN])
def test_what_is_not_certainly_fit_is_checked_as_a_first_call(torch, catalog, first_calls, calls):
    """A wrong tensor is refused in the same words, and an odd one that kernels take gives what it should."""
    plan = catalog.select(PROBLEM)
    given = {name: torch.from_numpy(array) for name, array in make_inputs(PROBLEM).items()}
    for _ in range(calls):
        expected = plan.enqueue(given)["o"]
    assert ((plan, IN_ORDER) in plan.services.shared.known) >= (calls == KNOWN)
    first_calls.clear()
    k = given["k"]
    odd = torch.from_numpy(np.ndarray(k.shape, np.float32, np.zeros(k.nbytes + 1, np.uint8), 1))
    for value, message in (
        (k[:, :, :69], r"k is float32 \(2, 2, 69, 64\): expected float32 \(2, 2, 70, 64\)"),
        (k.to(torch.bfloat16), "k is bfloat16"),
        (k.transpose(2, 3).contiguous().transpose(2, 3), "a stride of 280 bytes along its last axis"),
        (odd, "k is not aligned"),
        (torch.nn.Parameter(k), "requires a gradient"),
        (torch._neg_view(k), "negated"),
        (k.to_sparse(), "sparse"),
        (k.to("meta"), "meta"),
        (None, "k is missing"),
    ):
        with pytest.raises(TensorError, match=message):
            plan.enqueue({**given, "k": value})
    assert torch.equal(torch.from_numpy(plan.enqueue({**given, "k": k.numpy()})["o"].numpy()), expected)
    assert len(first_calls) == 10
    lengths = torch.tensor([70, 71], dtype=torch.int32)  # whose values the kernels check each time
    for _ in range(2):
        plan.enqueue(given, seqlens_k=lengths - 1)
        with pytest.raises(TensorError, match=r"seqlens_k\[1\] is 71"):
            plan.enqueue(given, seqlens_k=lengths)
