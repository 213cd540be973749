"""A plan bound to its tensors: checked once, launched often, always in place."""

from __future__ import annotations

import itertools
import shutil
import tracemalloc

import numpy as np
import pytest
from conftest import slow_but

from catalog.errors import DeviceError, TensorError
from catalog.ops.attention.arguments import ARGUMENTS
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.stages import WORKSPACES
from catalog.ops.attention.workspace import most_splits, splits_of, workspace_of
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import make_outputs

# Their kernels are those of test_host_ops.py.
HEADS = {"nhead_q": 4, "nhead_k": 2, "hdim_q": 64, "dtype": "fp32", "mask": "bottom_right"}
PROBLEM = Problem(**HEADS, batch=2, seqlen_q=5, seqlen_k=70, lse=True)
SPLIT = Problem(**HEADS, op="splitkv", batch=2, seqlen_q=1, seqlen_k=900, lse=True)
BACKWARD = Problem(**HEADS, op="bwd", seqlens_q=[40], seqlens_k=[40], window=(30, 0))
EACH, OPS = slow_but([PROBLEM, SPLIT], (PROBLEM, SPLIT, BACKWARD)), ("fwd", "splitkv", "bwd")


@pytest.fixture(scope="module")
def catalog(host_file, tmp_path_factory):
    return Catalog(shutil.copy(host_file, tmp_path_factory.mktemp("bound") / "catalog.db"))


@pytest.mark.parametrize("problem", EACH, ids=OPS)
def test_launches_see_what_the_inputs_hold_and_give_what_a_run_gives(catalog, problem):
    plan = catalog.select(problem)
    inputs = {name: array.copy() for name, array in make_inputs(problem).items()}
    bound = plan.bind(inputs)
    outputs = dict(bound.outputs)
    for seed in (1, 2):
        for name, array in make_inputs(problem, seed).items():
            inputs[name][...] = array
        bound.launch()
        expected = plan.run(inputs).outputs
        for name, array in outputs.items():
            assert bound.outputs[name] is array
            assert np.array_equal(array, expected[name])


def test_given_outputs_are_written_in_place(catalog):
    interleaved = np.full((2, 5, 4, 64), np.nan, np.float32)
    outputs = make_outputs(PROBLEM) | {"o": interleaved.swapaxes(1, 2)}
    bound = catalog.select(PROBLEM).bind(make_inputs(PROBLEM), outputs=outputs)
    bound.launch()
    expected = catalog.select(PROBLEM).run(make_inputs(PROBLEM)).outputs
    assert np.array_equal(interleaved.swapaxes(1, 2), expected["o"])
    assert np.array_equal(outputs["lse"], expected["lse"])


@pytest.mark.parametrize("problem", EACH, ids=OPS)
def test_kernels_say_how_large_the_workspaces_are(catalog, problem):
    """As large as the arrays that the runtime makes: nothing is there twice, nothing is too short."""
    bound = catalog.select(problem).bind()
    args = ARGUMENTS.args.from_buffer_copy(bound._call.args)
    args.num_splits = 3
    sizes = [kernel.workspace(args) for kernel in bound.kernels]
    assert {size.num_splits for size in sizes} == {3}
    for name in WORKSPACES:
        made = workspace_of(problem, 3).partials
        assert max(getattr(size, name) for size in sizes) == (made[name].bytes if name in made else 0)


@pytest.mark.parametrize("fields", [{"op": "splitkv"}, {"op": "bwd"}, {"op": "bwd", "deterministic": True}])
@pytest.mark.parametrize("keys", [0, 40, 5000])
def test_no_plan_has_more_splits_than_its_memory_was_checked_for(catalog, fields, keys):
    problem = Problem(batch=1, nhead_q=2, seqlen_q=3, seqlen_k=keys, hdim_q=64, dtype="fp32", **fields)
    kernels = catalog.select(problem).kernels
    for threads, whole_waves in itertools.product((1, 7, 4096), (False, True)):
        assert splits_of(problem, kernels, threads, whole_waves=whole_waves) <= most_splits(problem)


def test_cold_launches_give_the_same(catalog):
    bound = catalog.select(PROBLEM).bind()
    bound.launch()
    before = bound.outputs["o"].copy()
    assert len(bound.time(2, cold=True)) == 2
    assert np.array_equal(bound.outputs["o"], before)


def test_a_launch_allocates_nothing(catalog):
    bound = catalog.select(SPLIT).bind()
    bound.launch()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(100):
        bound.launch()
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after == before
    assert peak - before < 1024  # a status, an iterator


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o": None}, "o is missing"),
        ({"extra": np.zeros(1)}, "extra is not a tensor of this problem: expected o, lse"),
        ({"o": np.zeros((2, 4, 5, 64))}, "o is float64"),
        ({"o": np.broadcast_to(np.float32(0), (2, 4, 5, 64))}, "o has a stride of 0 bytes|o is read-only"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(catalog, change, message):
    with pytest.raises(TensorError, match=message):
        catalog.select(PROBLEM).bind(make_inputs(PROBLEM), outputs=make_outputs(PROBLEM) | change)


def test_an_output_that_shares_memory_with_another_tensor_is_refused(catalog):
    room = np.zeros((2, 2, 75, 64), np.float32)  # the keys, and an output that begins in their last rows
    inputs = make_inputs(PROBLEM) | {"k": room[:, :, :70]}
    o = room.reshape(-1)[: 2 * 4 * 5 * 64].reshape(2, 4, 5, 64)
    with pytest.raises(TensorError, match="the output o shares memory with k"):
        catalog.select(PROBLEM).bind(inputs, outputs=make_outputs(PROBLEM) | {"o": o})

    projected = np.zeros((2, 5, 3, 4, 64), np.float32)  # one buffer, but other elements
    problem = Problem(**HEADS | {"nhead_k": 4}, batch=2, seqlen_q=5, lse=True)
    q, k, v = projected.transpose(2, 0, 3, 1, 4)
    with pytest.raises(TensorError, match="the output o shares memory with q"):
        catalog.select(problem).bind(q=q, k=k, v=v, outputs=make_outputs(problem) | {"o": q})
    apart = np.zeros((2, 5, 4, 4, 64), np.float32).transpose(2, 0, 3, 1, 4)
    catalog.select(problem).bind(
        q=apart[0], k=apart[1], v=apart[2], outputs=make_outputs(problem) | {"o": apart[3]}
    ).launch()


def test_a_length_that_no_longer_fits_is_refused_by_the_kernel(catalog):
    lengths = np.array([900, 3], np.int32)
    bound = catalog.select(SPLIT).bind(make_inputs(SPLIT) | {"seqlens_k": lengths})
    bound.launch()
    lengths[1] = 901
    with pytest.raises(DeviceError, match="the kernel was not built for this call"):
        bound.launch()
