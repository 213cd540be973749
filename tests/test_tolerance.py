"""The tolerances: kernels that round as they must are within, and not far within; kernels that are wrong are not."""

import warnings

import numpy as np
import pytest
from conftest import slow_but
from test_reference import GRADIENTS, PROBLEMS, TINY, with_options

from catalog.ops.attention.fields import ELEMENTS
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.answers import reference
from catalog.ops.attention.tolerance import tolerances
from catalog.runtime.elements import element_type, numpy_dtype
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tolerance import Tolerance, max_error

SIZES = {"batch": 1, "nhead_q": 2, "seqlen_q": 128, "seqlen_k": 512, "hdim_q": 128}


def matrices(inputs, *names):
    """The heads of the only sequence, float32, times their scales."""
    return [
        inputs[name][0].astype(np.float32) * inputs.get(f"{name}_descale", np.ones(1, np.float32)) for name in names
    ]


def rounded_to_tf32(x):
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def cut_off(numbers):
    """Their sum along axis -2, of which tensor cores keep the bits of float32 that the largest number has."""
    largest = np.max(np.abs(numbers), axis=-2, keepdims=True)
    unit = 2.0 ** (np.floor(np.log2(np.maximum(largest, 1e-300))) - 23)
    total = np.sum(np.trunc(numbers / unit) * unit, axis=-2)
    kept = total.astype(np.float32)
    return np.where(np.abs(kept) > np.abs(total), np.nextafter(kept, np.float32(0)), kept).astype(np.float32)


def multiply_parts(a, b, rests=True):
    """A B as tensor cores multiply float32: eight products at a time, which are three of TF32."""
    parts = []
    for x in (np.ascontiguousarray(a), np.ascontiguousarray(b)):
        high = rounded_to_tf32(x)
        low = ((x - high).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        parts.append((high.astype(np.float64), low.astype(np.float64)))
    (a_high, a_low), (b_high, b_low) = parts
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for first in range(0, a.shape[-1], 8):
        eight = slice(first, first + 8)
        product = np.zeros_like(total)
        pairs = ((a_low, b_high), (a_high, b_low), (a_high, b_high))
        for of_a, of_b in pairs if rests else pairs[2:]:
            numbers = of_a[..., :, eight, np.newaxis] * of_b[..., np.newaxis, eight, :]
            product = cut_off(np.concatenate([numbers, product[..., np.newaxis, :].astype(np.float64)], axis=-2))
        total = total + product
    return total


def float32_attention(problem, inputs, weights, multiply=np.matmul):
    """O and LSE as a kernel computes them, with P rounded to ``weights``."""
    q, k, v = matrices(inputs, "q", "k", "v")
    scores = np.float32(problem.softmax_scale) * multiply(q, k.swapaxes(1, 2)) + matrices(inputs, "bias")[0]
    largest = scores.max(axis=2, keepdims=True)
    p = np.exp(scores - largest)
    total = p.sum(axis=2, keepdims=True)
    o = multiply(p.astype(weights).astype(np.float32), v) / total
    return {"o": o[np.newaxis], "lse": (largest + np.log(total))[np.newaxis, ..., 0]}


def float32_gradients(problem, inputs, weights):
    """dQ, dK, dV and dbias, with P and dS rounded to ``weights``."""
    q, k, v, o, do, bias = matrices(inputs, "q", "k", "v", "o", "do", "bias")
    scale = np.float32(problem.softmax_scale)
    p = np.exp(scale * (q @ k.swapaxes(1, 2)) + bias - inputs["lse"][0, ..., np.newaxis])
    delta = (do * o).sum(axis=2, keepdims=True) - inputs["dlse"][0, ..., np.newaxis]
    ds = p * (do @ v.swapaxes(1, 2) - delta)
    rounded_p, rounded_ds = (matrix.astype(weights).astype(np.float32) for matrix in (p, ds))
    dq, dk = scale * rounded_ds @ k, scale * rounded_ds.swapaxes(1, 2) @ q
    results = {"dq": dq, "dk": dk, "dv": rounded_p.swapaxes(1, 2) @ do, "dbias": ds}
    return {name: gradient[np.newaxis] for name, gradient in results.items()}


CASES = {
    "fp32": ({"dtype": "fp32"}, "float32"),
    "fp32, large scores": ({"dtype": "fp32", "scale": 0.5}, "float32"),
    "bf16": ({"dtype": "bf16"}, "float32"),
    "fp16 with P in fp16": ({"dtype": "fp16"}, "float16"),
    "bf16 with P in bf16": ({"dtype": "bf16"}, "bfloat16"),
    "fp8": ({"dtype": "fp8", "qscale": "pertensor"}, "float32"),
    "fp8 with O in fp32": ({"dtype": "fp8fp32", "qscale": "pertensor"}, "float32"),
}


OPS_AND_CASES = [(op, case) for op in ("fwd", "bwd") for case in CASES if op == "fwd" or "fp8" not in case]
QUICK = [("fwd", "fp32"), ("fwd", "fp8"), ("bwd", "fp16 with P in fp16"), ("bwd", "bf16")]


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("hdim", [8, 64])
def test_products_in_parts_are_within_their_bound_and_those_of_tf32_are_not(hdim, positive):
    problem = Problem(**SIZES | {"seqlen_q": 16, "hdim_q": hdim}, dtype="fp32", bias="bias", lse=True)
    inputs = make_inputs(problem)
    if positive:
        inputs |= {name: np.abs(inputs[name]) for name in ("q", "k", "v")}
    expected, allowed = reference(problem, inputs), tolerances(problem, inputs, splits=True)
    honest = float32_attention(problem, inputs, np.float32, multiply_parts)
    without_rests = float32_attention(problem, inputs, np.float32, lambda a, b: multiply_parts(a, b, rests=False))
    for name in problem.made:
        assert allowed[name].used(honest[name], expected[name]) <= 1
    assert allowed["o"].used(without_rests["o"], expected["o"]) > 1


@pytest.mark.parametrize(("op", "case"), slow_but(QUICK, OPS_AND_CASES))
def test_tolerances_allow_an_honest_kernel_and_no_wrong_one(op, case):
    fields, weights = CASES[case]
    also = {"dbias": True, "dlse": True} if op == "bwd" else {"lse": True}
    problem = Problem(op=op, **SIZES, **fields, bias="bias", **also)
    inputs = make_inputs(problem)
    expected, allowed = reference(problem, inputs), tolerances(problem, inputs, weights)
    kernel = float32_attention if op == "fwd" else float32_gradients
    honest = kernel(problem, inputs, numpy_dtype(weights))
    # A kernel that never reads the last of 512 keys: its weight is 0.002 on average.
    blind = inputs | {"bias": np.where(np.arange(512) == 511, -np.inf, inputs["bias"]).astype(inputs["bias"].dtype)}
    wrong = reference(problem, blind)
    for name in problem.made:
        result = honest[name].astype(element_type(problem, name))
        used = allowed[name].used(result, expected[name])
        assert 0.005 < used <= 1, name  # in float32, sums of both signs are this much better than sums may be
        assert not allowed[name].allows(wrong[name].astype(result.dtype), expected[name]), name


@pytest.mark.parametrize(
    ("dtype", "weights", "may_lose"),
    [("bf16kvfp8", "bfloat16", True), ("bf16kvfp8", "float32", False), ("bf16", "bfloat16", False)],
)
def test_only_rounding_to_fp16_may_lose_a_small_weight(dtype, weights, may_lose):
    sizes = {"batch": 1, "nhead_q": 1, "seqlen_q": 1, "seqlen_k": 2, "hdim_q": 64}
    problem = Problem(**sizes, dtype=dtype, bias="bias")
    inputs = make_inputs(problem)
    inputs["bias"][..., 1] = -30  # its weight is about e^-30, half a step of fp16 e^-17
    inputs["v"][..., 0, :] = 0
    expected, allowed = reference(problem, inputs)["o"], tolerances(problem, inputs, weights)["o"]
    assert np.any(expected != 0)
    assert allowed.allows(np.zeros_like(expected), expected) == may_lose


@pytest.mark.parametrize(("factor", "may_lose"), [(1.0, False), (2.0**-30, True)])
def test_rounding_to_fp16_may_lose_a_value_of_a_small_factor(factor, may_lose):
    problem = Problem(
        op="batch_prefill",
        **{"batch": 1, "nhead_q": 1, "seqlens_q": (1,), "seqlen_k": 2, "hdim_q": 64, "page_size": 1},
        **{"dtype": "bf16kvfp8", "qscale": "kv_blockscale"},
    )
    inputs = make_inputs(problem)
    first, second = inputs["block_table"][0]
    inputs["v_descale"][first], inputs["v_descale"][second] = 1, factor
    inputs["v_cache"][first] = 0
    expected, allowed = reference(problem, inputs)["o"], tolerances(problem, inputs, "bfloat16")["o"]
    assert np.any(expected != 0)
    assert allowed.allows(np.zeros_like(expected), expected) == may_lose


@pytest.mark.parametrize("fields", [*PROBLEMS.values(), *(TINY | fields for fields in GRADIENTS.values())])
def test_every_result_has_a_finite_tolerance(fields):
    problem = Problem(**fields)
    inputs = make_inputs(problem)
    for given in (inputs, with_options(problem, inputs)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            allowed = tolerances(problem, given)
        for name, result in reference(problem, given).items():
            assert np.all(np.isfinite(allowed[name].atol))
            assert allowed[name].allows(result, result)
            assert np.ndim(allowed[name].atol) in (0, result.ndim)


def test_tolerance_of_rotated_tokens():
    sizes = {"batch": 2, "nhead_q": 4, "nhead_k": 2, "seqlen_q": 3, "seqlen_k": 64, "seqlen_new": 9, "hdim_q": 64}
    problem = Problem(op="appendkv", **sizes, dtype="bf16", rope="half", rotary_dim=32, mask="causal")
    inputs = make_inputs(problem)
    expected, allowed = reference(problem, inputs), tolerances(problem, inputs)
    rounded = {name: result.astype(element_type(problem, "q")) for name, result in expected.items()}
    assert 0.9 < allowed["q"].used(rounded["q"], expected["q"]) <= 1
    assert allowed["k_cache"].allows(rounded["k_cache"], expected["k_cache"])
    for name, index in (("k_cache", (0, 0, 0, 0)), ("k_cache", (0, 0, 60, 40)), ("v_cache", (0, 0, 60, 0))):
        wrong = rounded[name].astype(np.float64)
        wrong[index] = np.nextafter(wrong[index], np.inf)  # what is copied must be exact
        assert not allowed[name].allows(wrong, expected[name])


def test_tolerance_of_tokens_that_are_rounded_to_the_cache():
    sizes = {"batch": 2, "nhead_q": 4, "nhead_k": 2, "seqlen_q": 3, "seqlen_k": 64, "seqlen_new": 9, "hdim_q": 64}
    for rotary in ({}, {"rope": "half", "rotary_dim": 32, "mask": "causal"}):
        problem = Problem(op="appendkv", **sizes, **rotary, dtype="bf16kvfp8")
        inputs = make_inputs(problem)
        inputs["v_new"][0, 0, 0, 0] = 1000  # beyond what fp8 holds, divided by its factor, too
        inputs |= {name: np.float32([factor]) for name, factor in (("k_descale", 0.75), ("v_descale", 1.5))}
        expected, allowed = reference(problem, inputs), tolerances(problem, inputs)
        assert expected["v_cache"].max() == 448
        rounded = {name: result.astype(element_type(problem, name)) for name, result in expected.items()}
        for name, result in rounded.items():
            assert allowed[name].allows(result, expected[name])
        assert allowed["v_cache"].used(rounded["v_cache"], expected["v_cache"]) > 0.9
        before = inputs["seqlens_k"][0]
        for place, factor in ((before, 1.2), (before - 1, 1.0001)):  # a new token, and one that was there
            wrong = rounded["v_cache"].astype(np.float64)
            wrong[0, 1, place] *= factor
            assert not allowed["v_cache"].allows(wrong, expected["v_cache"])


@pytest.mark.parametrize("dtype", list(ELEMENTS))
def test_rounding_of_every_dtype_is_allowed(dtype):
    """Every number that O may be, and what is between: values of one key each."""
    problem = Problem(batch=1, nhead_q=1, seqlen_q=1, hdim_q=1, hdim_v=4096, dtype=dtype)
    magnitudes = 2.0 ** np.random.default_rng(0).uniform(-20, 7, 4096)
    inputs = {"q": np.ones((1, 1, 1, 1)), "k": np.ones((1, 1, 1, 1)), "v": magnitudes.reshape(1, 1, 1, -1)}
    expected, allowed = reference(problem, inputs)["o"], tolerances(problem, inputs)["o"]
    rounded = expected.astype(element_type(problem, "o"))
    used = allowed.used(rounded, expected)
    assert used <= 1
    assert used > 0.25 or dtype in ("fp32", "fp8fp32")
    assert not allowed.allows(expected * (1 + 3 * allowed.rtol) + 3 * allowed.atol, expected)


def test_rows_that_are_left_alone_must_be_exactly_zero():
    problem = Problem(op="bwd", batch=1, nhead_q=1, seqlen_q=8, hdim_q=4, dtype="fp16")
    inputs = make_inputs(problem) | {"seqlens_q": np.array([5], np.int32), "seqlens_k": np.array([6], np.int32)}
    allowed = tolerances(problem, inputs)
    for name, real in (("dq", 5), ("dk", 6), ("dv", 6)):
        assert np.all(allowed[name].atol[:, :, :real] > 0)
        assert not np.any(allowed[name].atol[:, :, real:])


def test_errors_of_what_is_not_finite():
    inf, nan = np.array([-np.inf, 1.0]), np.array([np.nan, 1.0])
    assert max_error(inf, inf) == 0.0
    assert max_error(np.array([0.0, 1.0]), inf) == max_error(nan, inf) == max_error(nan, np.ones(2)) == np.inf
    assert max_error(np.zeros(0), np.zeros(0)) == 0.0
    assert max_error(np.array([1.0, 2.5]), np.array([1.0, 2.0])) == 0.5
    assert Tolerance(0.25, 0.25).allows(np.array([2.5]), np.array([2.0]))
    assert not Tolerance(0.25, 0.25).allows(nan, np.ones(2))
    assert not Tolerance(0.25, 0.25).allows(np.array([1.0]), np.array([np.inf]))
    assert Tolerance(np.array([0.5, 0.0]), 0.0).allows(np.array([1.5, 1.0]), np.ones(2))
    assert not Tolerance(np.array([0.0, 0.5]), 0.0).allows(np.array([1.5, 1.0]), np.ones(2))
    assert Tolerance(0.25, 0.0).used(np.array([1.125]), np.ones(1)) == 0.5
