"""The float64 reference against loops that follow the definition, and against PyTorch where it is installed."""

import math
import os
import warnings

import numpy as np
import pytest

from catalog.runtime.reference import Tolerance, attention_fwd, max_error, tolerance
from catalog.runtime.tensors import make_inputs
from catalog.schema.problem import ELEMENT_BYTES, Problem

SMALL = {"nhead_q": 4, "nhead_k": 2, "hdim_q": 5, "hdim_v": 3, "dtype": "fp32", "lse": True}
DENSE = SMALL | {"batch": 2, "seqlen_q": 7, "seqlen_k": 9}
PROBLEMS = {
    "no mask": DENSE,
    "bshd": DENSE | {"layout": "bshd"},
    "top left": DENSE | {"mask": "causal"},
    "top left, more queries": DENSE | {"mask": "causal", "seqlen_k": 4},
    "bottom right": DENSE | {"mask": "bottom_right"},
    "bottom right, rows without a key": DENSE | {"mask": "bottom_right", "seqlen_k": 4, "layout": "bshd"},
    "window": DENSE | {"mask": "window", "window": (2, 1)},
    "window, rows without a key": DENSE | {"mask": "window", "window": (1, 0), "seqlen_q": 12},
    "window at the top left": DENSE | {"mask": "top_left", "window": (1, -1), "seqlen_q": 12},
    "window, left side open": DENSE | {"mask": "window", "window": (-1, 3)},
    "scale": DENSE | {"scale": 0.7},
    "group": SMALL | {"seqlens_q": [3, 0, 5, 2], "seqlens_k": [4, 2, 0, 7], "mask": "bottom_right"},
    "no sequence": SMALL | {"seqlens_q": []},
    "no batch": DENSE | {"batch": 0},
    "no query": DENSE | {"seqlen_q": 0},
    "no key": DENSE | {"seqlen_k": 0},
    "bf16": DENSE | {"dtype": "bf16"},
    "fp8": DENSE | {"dtype": "fp8"},
}


def sees(problem, query, key, seqlen_q, seqlen_k):
    """Whether a query sees a key, as the flash-attn and PyTorch documentation define masks."""
    diagonal = query + (seqlen_k - seqlen_q if problem.mask == "bottom_right" else 0)
    match problem.mask, problem.window:
        case "no", _:
            return True
        case _, None:
            return key <= diagonal
        case _, (left, right):
            return (left < 0 or key >= diagonal - left) and (right < 0 or key <= diagonal + right)


def row_by_row(problem, q, k, v):
    """The definition, a number at a time."""
    o = np.full(problem.shapes["o"], np.nan)
    lse = np.full(problem.shapes["lse"], np.nan)

    def at(sequence, head, token, lengths):
        if lengths is not None:
            return sum(lengths[:sequence]) + token, head
        return (sequence, head, token) if problem.layout == "bhsd" else (sequence, token, head)

    for sequence, (seqlen_q, seqlen_k) in enumerate(problem.sequences):
        for head in range(problem.nhead_q):
            head_k = head // (problem.nhead_q // problem.nhead_k)
            for query in range(seqlen_q):
                row = at(sequence, head, query, problem.seqlens_q)
                total, out = 0.0, [0.0] * problem.hdim_v
                for key in range(seqlen_k):
                    if sees(problem, query, key, seqlen_q, seqlen_k):
                        column = at(sequence, head_k, key, problem.seqlens_k)
                        dot = sum(float(a) * float(b) for a, b in zip(q[row], k[column], strict=True))
                        weight = math.exp(problem.softmax_scale * dot)
                        total += weight
                        out = [a + weight * float(b) for a, b in zip(out, v[column], strict=True)]
                o[row] = [a / total if total else 0.0 for a in out]
                lse_row = (row[1], row[0]) if problem.seqlens_q is not None else (sequence, head, query)
                lse[lse_row] = math.log(total) if total else -math.inf
    return o, lse


@pytest.mark.parametrize("fields", PROBLEMS.values(), ids=PROBLEMS)
def test_reference_agrees_with_the_definition(fields):
    problem = Problem(**fields)
    inputs = make_inputs(problem)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        o, lse = attention_fwd(problem, **inputs)
    expected_o, expected_lse = row_by_row(problem, **inputs)
    assert o.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(o, expected_o, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_large_scores_and_many_rows():
    problem = Problem(batch=1, nhead_q=1, seqlen_q=1100, seqlen_k=600, hdim_q=8, mask="causal", scale=1000.0)
    inputs = make_inputs(problem)
    o, _ = attention_fwd(problem, **inputs)
    np.testing.assert_array_equal(o[0, 0, 0], inputs["v"][0, 0, 0].astype(np.float64))
    scores = np.where(np.tri(1100, 600), inputs["q"][0, 0].astype(float) @ inputs["k"][0, 0].astype(float).T, -np.inf)
    assert np.median(np.abs(o[0, 0] - inputs["v"][0, 0][scores.argmax(axis=1)])) < 1e-12


@pytest.mark.parametrize("mask", ["no", "causal"])
def test_reference_agrees_with_pytorch(mask):
    if os.environ.get("CI") == "true":
        import torch
    else:
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    problem = Problem(batch=2, nhead_q=4, nhead_k=2, seqlen_q=33, seqlen_k=47, hdim_q=16, dtype="fp32", mask=mask)
    inputs = make_inputs(problem)
    q, k, v = (torch.from_numpy(tensor).double() for tensor in inputs.values())
    k, v = (tensor.repeat_interleave(problem.ratio, dim=1) for tensor in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")
    o, _ = attention_fwd(problem, **inputs)
    np.testing.assert_allclose(o, expected.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_tolerance_allows_an_honest_kernel_and_no_wrong_one(dtype):
    """Float32 with P and O rounded is within tolerance; the answer to another mask is not."""
    import ml_dtypes

    problem = Problem(batch=1, nhead_q=2, seqlen_q=64, seqlen_k=512, hdim_q=128, dtype=dtype)
    element = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    inputs = make_inputs(problem)
    q, k, v = (tensor.astype(np.float32) for tensor in inputs.values())
    scores = np.float32(problem.softmax_scale) * (q @ k.swapaxes(2, 3))
    largest = scores.max(axis=3, keepdims=True)
    p = np.exp(scores - largest)
    total = p.sum(axis=3, keepdims=True)
    o = (p.astype(element).astype(np.float32) @ v / total).astype(element)
    lse = (largest + np.log(total))[..., 0]
    expected_o, expected_lse = attention_fwd(problem, **inputs)
    assert tolerance(problem.dtype, "o").allows(o, expected_o)
    assert tolerance(problem.dtype, "lse").allows(lse, expected_lse)
    wrong_o, wrong_lse = attention_fwd(problem.model_copy(update={"mask": "window", "window": (-1, 60)}), **inputs)
    assert not tolerance(problem.dtype, "o").allows(wrong_o, expected_o)
    assert not tolerance(problem.dtype, "lse").allows(wrong_lse, expected_lse)


def test_every_dtype_of_problems_has_a_tolerance():
    assert all(tolerance(dtype, "o").atol > 0 for dtype in ELEMENT_BYTES)


def test_errors_of_what_is_not_finite():
    inf, nan = np.array([-np.inf, 1.0]), np.array([np.nan, 1.0])
    assert max_error(inf, inf) == 0.0
    assert max_error(np.array([0.0, 1.0]), inf) == max_error(nan, inf) == max_error(nan, np.ones(2)) == np.inf
    assert max_error(np.zeros(0), np.zeros(0)) == 0.0
    assert max_error(np.array([1.0, 2.5]), np.array([1.0, 2.0])) == 0.5
    assert Tolerance(0.25, 0.25).allows(np.array([2.5]), np.array([2.0]))
    assert not Tolerance(0.25, 0.25).allows(nan, np.ones(2))
    assert not Tolerance(0.25, 0.25).allows(np.array([1.0]), np.array([np.inf]))
