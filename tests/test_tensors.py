"""The tensors of a problem: their shapes, dtypes and strides, and what is refused."""

import numpy as np
import pytest

from catalog.errors import ProblemError, TensorError
from catalog.ops.attention.fields import ELEMENTS
from catalog.ops.attention.problem import Problem
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import check_inputs, check_outputs, element_strides, make_outputs

DENSE = Problem(batch=2, nhead_q=4, nhead_k=2, seqlen_q=6, seqlen_k=8, hdim_q=16, hdim_v=32, lse=True)
PACKED = Problem(seqlens_q=[3, 0, 5], seqlens_k=[1, 2, 0], nhead_q=4, nhead_k=2, hdim_q=16, lse=True)


@pytest.mark.parametrize("dtype", list(ELEMENTS))
@pytest.mark.parametrize("problem", [DENSE, DENSE.model_copy(update={"layout": "bshd"}), PACKED])
def test_made_tensors_are_accepted_and_weigh_what_the_problem_says(problem, dtype):
    problem = problem.model_copy(update={"dtype": dtype})
    tensors = check_inputs(problem, make_inputs(problem)) | check_outputs(problem, make_outputs(problem))
    assert {name: tensor.shape for name, tensor in tensors.items()} == problem.shapes
    assert sum(tensor.nbytes for tensor in tensors.values()) == problem.bytes


def test_inputs_depend_on_the_seed_alone():
    once, again, other = make_inputs(DENSE), make_inputs(DENSE), make_inputs(DENSE, seed=1)
    for name in ("q", "k", "v"):
        assert np.array_equal(once[name], again[name])
        assert not np.array_equal(once[name], other[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": None}, r"k is missing: expected float16 \(2, 2, 8, 16\)"),
        ({"bias": np.zeros(1)}, r"bias is not a tensor of this problem: expected q, k, v"),
        ({"q": [[1.0]]}, r"q is a list: expected a NumPy array"),
        ({"q": np.zeros((2, 4, 6, 8), np.float16)}, r"q is float16 \(2, 4, 6, 8\): expected float16 \(2, 4, 6, 16\)"),
        ({"q": np.zeros((2, 4, 6, 16))}, r"q is float64 .*: expected float16"),
        ({"q": np.zeros((2, 4, 6, 32), np.float16)[..., ::2]}, r"q has a stride of 4 bytes along its last axis"),
        ({"q": np.zeros(1537, np.uint8)[1:].view(np.float16).reshape(2, 4, 6, 16)}, r"q is not aligned"),
    ],
)
def test_inputs_that_are_refused(change, message):
    with pytest.raises(TensorError, match=message):
        check_inputs(DENSE, make_inputs(DENSE) | change)


def test_outputs_that_are_refused():
    outputs = make_outputs(DENSE)
    outputs["o"].flags.writeable = False
    with pytest.raises(TensorError, match="o is read-only"):
        check_outputs(DENSE, outputs)
    repeated = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), DENSE.shapes["lse"], (0, 0, 0))
    with pytest.raises(TensorError, match="lse is a broadcast view"):
        check_outputs(DENSE, make_outputs(DENSE) | {"lse": repeated})


def test_tensors_larger_than_memory_are_refused_before_they_are_made():
    huge = Problem(batch=1024, nhead_q=1024, seqlen_q=1024, hdim_q=1024)
    for make, size in ((make_inputs, "8,796,093,022,208"), (make_outputs, "2,199,023,255,552")):
        with pytest.raises(ProblemError, match=rf"the run needs {size} bytes in total"):
            make(huge)


def strides_of(problem, name, array):
    return element_strides(problem.tensors[name], array.strides, array.itemsize)


def test_strides_are_batch_head_sequence_in_elements():
    lse = np.zeros((2, 4, 6), np.float32)
    assert strides_of(DENSE, "q", np.zeros((2, 4, 6, 16), np.float16)) == (384, 96, 16)
    assert strides_of(DENSE, "lse", lse) == (24, 6, 1)
    swapped = DENSE.model_copy(update={"layout": "bshd"})
    assert strides_of(swapped, "q", np.zeros((2, 6, 4, 16), np.float16)) == (384, 16, 64)
    assert strides_of(swapped, "lse", lse) == (24, 6, 1)
    assert strides_of(PACKED, "q", np.zeros((8, 4, 16), np.float16)) == (0, 16, 64)
    assert strides_of(PACKED, "lse", np.zeros((4, 8), np.float32)) == (0, 8, 1)
    view = np.zeros((2, 12, 8, 16), np.float16)[:, ::2, :4].swapaxes(1, 2)
    assert check_inputs(DENSE, make_inputs(DENSE) | {"q": view})["q"] is view
    assert strides_of(DENSE, "q", view) == (1536, 16, 256)
