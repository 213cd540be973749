"""The float64 reference against loops that follow the definition, finite differences, PyTorch, and itself."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from conftest import missing, slow_but

from catalog.ops.attention.inputs import forward_of
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.answers import reference
from catalog.ops.attention.reference.dropout import philox4x32
from catalog.runtime.inputs import make_inputs

SMALL = {"nhead_q": 4, "nhead_k": 2, "hdim_q": 5, "hdim_v": 3, "dtype": "fp32"}
DENSE = SMALL | {"batch": 2, "seqlen_q": 7, "seqlen_k": 9}
PACKED = SMALL | {"seqlens_q": [3, 0, 5, 2], "seqlens_k": [4, 2, 0, 7]}
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
    "window and sink tokens": DENSE | {"mask": "window", "window": (1, 0), "sink_size": 2},
    "scale": DENSE | {"scale": 0.7},
    "soft cap": DENSE | {"logits_soft_cap": 0.5, "bias": "bias"},
    "bias": DENSE | {"bias": "bias", "bias_dims": "bh", "mask": "causal"},
    "bias of a head": DENSE | {"bias": "bias", "bias_dims": "1h"},
    "one bias": DENSE | {"bias": "bias", "bias_dims": "11"},
    "alibi": DENSE | {"bias": "alibi"},
    "alibi, top left": DENSE | {"bias": "alibi", "mask": "top_left", "window": (3, 1)},
    "alibi, causal": DENSE | {"bias": "alibi", "bias_dims": "bh", "mask": "bottom_right"},
    "block mask": DENSE | {"block_mask_q": 2, "block_mask_kv": 3, "mask": "window", "window": (5, 2)},
    "dropout": DENSE | {"dropout": 0.3, "randval": True, "mask": "causal", "seqlen_k": 21},
    "group": PACKED | {"mask": "bottom_right"},
    "group, everything": PACKED | {"bias": "bias", "dropout": 0.5, "randval": True, "mask": "window", "window": (3, 0)},
    "group, alibi": PACKED | {"bias": "alibi", "bias_dims": "bh"},
    "group, short sequences skipped": PACKED | {"min_seqlen_q": 2},
    "no sequence": SMALL | {"seqlens_q": []},
    "no batch": DENSE | {"batch": 0},
    "no query": DENSE | {"seqlen_q": 0},
    "no key": DENSE | {"seqlen_k": 0},
    "bf16": DENSE | {"dtype": "bf16"},
    "fp8": DENSE | {"dtype": "fp8"},
}


def agree(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


def with_options(problem, inputs):
    """The inputs with every optional one that the problem may have."""
    rng = np.random.default_rng(1)
    options = {
        "sink": rng.standard_normal(problem.nhead_q).astype(np.float32),
        "rng_state": np.array([0x123456789ABCDEF0, 0xFEDCBA9876543210], np.uint64),
        "seqlens_q": np.array([max(q - 1, 0) for q, _ in problem.sequences], np.int32),
        "seqlens_k": np.array([k // 2 for _, k in problem.sequences], np.int32),
    }
    return inputs | {name: array for name, array in options.items() if name in problem.tensors}


# The definition, a number at a time


def sees(problem, query, key, seqlen_q, seqlen_k):
    """Whether a query sees a key, as the flash-attn and PyTorch documentation define masks."""
    diagonal = query + (seqlen_k - seqlen_q if problem.mask == "bottom_right" else 0)
    match problem.mask, problem.window:
        case "no", _:
            return True
        case _, None:
            return key <= diagonal
        case _, (left, right):
            in_reach = left < 0 or key >= diagonal - left or key < problem.sink_size
            return in_reach and (right < 0 or key <= diagonal + right)


def alibi(problem, query, key, seqlen_q, seqlen_k):
    """What a slope is multiplied by."""
    if problem.mask != "no" and problem.window is None:
        return key
    return -abs(query + (0 if problem.mask == "top_left" else seqlen_k - seqlen_q) - key)


def random_byte(rng_state, head, query, key):
    seed, offset = (int(word) for word in rng_state)
    counter = (key // 16, query, head, offset % 2**32)
    words = philox(counter, (seed % 2**32, (seed >> 32) ^ (offset >> 32)))
    return b"".join(word.to_bytes(4, "little") for word in words)[key % 16]


def philox(x, key):
    """Philox4x32-10 in Python's integers."""
    for step in range(10):
        k0, k1 = (key[0] + step * 0x9E3779B9) % 2**32, (key[1] + step * 0xBB67AE85) % 2**32
        p0, p1 = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = ((p1 >> 32) ^ x[1] ^ k0, p1 % 2**32, (p0 >> 32) ^ x[3] ^ k1, p0 % 2**32)
    return x


def row_by_row(problem, inputs):
    """o, lse and randval."""
    q, k, v = (inputs[name] for name in "qkv")
    packed = problem.seqlens_q is not None
    results = {"o": np.zeros(problem.shapes["o"]), "lse": np.zeros(problem.shapes["lse"])}
    results |= {"randval": np.zeros(problem.shapes["randval"], np.uint8)} if problem.randval else {}

    def at(sequence, head, token, lengths):
        if packed:
            return sum(lengths[:sequence]) + token, head
        return (sequence, head, token) if problem.layout == "bhsd" else (sequence, token, head)

    def of_rows(sequence, head, query):
        return (head, sum(problem.seqlens_q[:sequence]) + query) if packed else (sequence, head, query)

    for sequence, stored in enumerate(problem.sequences):
        seqlen_q, seqlen_k = (
            int(inputs[f"seqlens_{axis}"][sequence]) if f"seqlens_{axis}" in inputs else length
            for axis, length in zip("qk", stored, strict=True)
        )
        if seqlen_q <= problem.min_seqlen_q:
            continue
        for head, query in np.ndindex(problem.nhead_q, seqlen_q):
            row = at(sequence, head, query, problem.seqlens_q)
            pair = of_rows(sequence, head, query)
            total = math.exp(inputs["sink"][head]) if "sink" in inputs else 0.0
            out = np.zeros(problem.hdim_v)
            for key in range(seqlen_k):
                column = at(sequence, head // problem.ratio, key, problem.seqlens_k)
                byte = random_byte(inputs.get("rng_state", (0, 0)), sequence * problem.nhead_q + head, query, key)
                if problem.randval:
                    results["randval"][(*pair, key)] = byte
                if not sees(problem, query, key, seqlen_q, seqlen_k):
                    continue
                if problem.block_mask_q:
                    block = query // problem.block_mask_q, key // problem.block_mask_kv
                    if not inputs["block_mask"][(sequence, head, *block)]:
                        continue
                score = problem.softmax_scale * sum(float(a) * float(b) for a, b in zip(q[row], k[column], strict=True))
                if problem.logits_soft_cap:
                    score = problem.logits_soft_cap * math.tanh(score / problem.logits_soft_cap)
                if "bias" in inputs:
                    shared = np.broadcast_to(inputs["bias"], problem.tensors["bias"].shape)
                    full = (problem.nhead_q,) if packed else (problem.batch, problem.nhead_q)
                    score += float(np.broadcast_to(shared, (*full, *shared.shape[len(full) :]))[(*pair, key)])
                if "alibi_slopes" in inputs:
                    slopes = np.broadcast_to(inputs["alibi_slopes"], (problem.batch, problem.nhead_q))
                    score += float(slopes[sequence, head]) * alibi(problem, query, key, seqlen_q, seqlen_k)
                weight = math.exp(score)
                total += weight
                kept = byte <= math.floor((1 - problem.dropout) * 255)
                out += kept * weight / (1 - float(np.float32(problem.dropout))) * v[column].astype(float)
            results["o"][row] = out / total if total else 0.0
            results["lse"][pair] = math.log(total) if total else -math.inf
    return results


@pytest.mark.parametrize("options", [False, True], ids=["required inputs", "all inputs"])
@pytest.mark.parametrize("fields", PROBLEMS.values(), ids=PROBLEMS)
def test_attention_agrees_with_the_definition(fields, options):
    problem = Problem(**fields, lse=True)
    inputs = make_inputs(problem)
    inputs = with_options(problem, inputs) if options else inputs
    before = {name: array.copy() for name, array in inputs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = reference(problem, inputs)
    expected = row_by_row(problem, inputs)
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype == expected[name].dtype
        agree(actual[name], expected[name])
    for name, array in before.items():
        np.testing.assert_array_equal(inputs[name], array)


def test_large_scores_and_many_rows():
    problem = Problem(batch=1, nhead_q=1, seqlen_q=5000, seqlen_k=600, hdim_q=8, mask="causal", scale=1000.0)
    inputs = make_inputs(problem)
    o = reference(problem, inputs)["o"]
    np.testing.assert_array_equal(o[0, 0, 0], inputs["v"][0, 0, 0].astype(np.float64))
    scores = np.where(np.tri(5000, 600), inputs["q"][0, 0].astype(float) @ inputs["k"][0, 0].astype(float).T, -np.inf)
    assert np.median(np.abs(o[0, 0] - inputs["v"][0, 0][scores.argmax(axis=1)])) < 1e-12


def test_keys_with_a_bias_of_minus_infinity_are_hidden():
    problem = Problem(**DENSE, bias="bias", lse=True)
    inputs = make_inputs(problem)
    inputs["bias"][:, :, :, 4:] = -np.inf
    inputs["bias"][:, :, 2] = -np.inf
    hidden = reference(problem, inputs)
    first = {name: inputs[name][:, :, :4] for name in ("k", "v")} | {"bias": inputs["bias"][..., :4]}
    short = reference(problem.model_copy(update={"seqlen_k": 4}), inputs | first)
    for name in ("o", "lse"):
        agree(hidden[name], short[name])
    assert np.all(np.isneginf(hidden["lse"][:, :, 2]))
    assert not np.any(hidden["o"][:, :, 2])


# Dropout


def test_philox_known_answers():
    """Those of Random123's kat_vectors."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, expected in (
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, (ones,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        words = philox4x32(tuple(np.array([word]) for word in counter), key)
        assert " ".join(f"{word.item():08x}" for word in words) == expected


def test_dropout_keeps_as_many_weights_as_it_says():
    """Equal weights: O is the share of kept keys times 1 / (1 - p)."""
    problem = Problem(batch=2, nhead_q=2, seqlen_q=64, seqlen_k=256, hdim_q=1, dtype="fp32", dropout=0.3, randval=True)
    inputs = make_inputs(problem) | {"rng_state": np.array([7, 9], np.uint64)}
    inputs["q"][...], inputs["v"][...] = 0, 1
    results = reference(problem, inputs)
    kept = (results["randval"] <= 178).mean()  # 0.7 * 255 = 178.5
    assert kept == pytest.approx(179 / 256, abs=0.005)
    assert results["o"].mean() == pytest.approx(kept / (1 - np.float32(0.3)))
    counts = np.bincount(results["randval"].ravel(), minlength=256)
    expected = results["randval"].size / 256
    assert np.sum((counts - expected) ** 2) / expected == pytest.approx(255, abs=5 * math.sqrt(2 * 255))  # chi-squared
    others = [inputs | {"rng_state": np.array(state, np.uint64)} for state in ((7, 10), (8, 9), (7, 2**32 + 9))]
    for other in others:
        assert np.mean(reference(problem, other)["randval"] == results["randval"]) < 0.01


# Scales


def test_scales_multiply_the_elements():
    fields = {"batch": 2, "nhead_q": 4, "nhead_k": 2, "seqlen_q": 7, "seqlen_k": 11, "hdim_q": 16, "dtype": "fp8bf16"}
    plain = Problem(**fields)
    per_tensor = Problem(**fields, qscale="pertensor")
    blocks = Problem(**fields, qscale="blockscale", block_scale_size_q=3, block_scale_size_kv=4)
    for problem, size_q, size_k in ((per_tensor, 0, 0), (blocks, 3, 4)):
        inputs = make_inputs(problem)
        scaled = {}
        for name, size in (("q", size_q), ("k", size_k), ("v", size_k)):
            factors = inputs[f"{name}_descale"].astype(float)
            if size:
                factors = np.repeat(factors, size, axis=2)[:, :, : inputs[name].shape[2], np.newaxis]
            scaled[name] = inputs[name].astype(float) * factors
        agree(reference(problem, inputs)["o"], reference(plain, scaled)["o"])


# Paged caches

LENGTHS_K = (13, 0, 8, 24)
PREFILL = {"seqlens_q": [3, 2, 8, 5], "nhead_q": 4, "nhead_k": 2, "hdim_q": 16, "dtype": "fp16", "mask": "bottom_right"}


def paged_inputs(problem, dense):
    """The inputs of a paged problem whose sequences are those of packed K and V, in linear pages and vLLM's table."""
    inputs = {"q": dense["q"]} | {name: dense[name] for name in ("bias", "sink") if name in dense}
    pages = np.random.default_rng(3).permutation(problem.num_pages).astype(np.int32)
    inputs["block_table"] = pages.reshape(problem.batch, -1)
    inputs["seqlens_k"] = np.array(LENGTHS_K, np.int32)
    for name in ("k", "v"):
        cache = np.full((problem.num_pages, problem.page_size, problem.nhead_k, problem.hdim_q), np.nan, np.float16)
        for sequence, tokens in enumerate(np.split(dense[name], np.cumsum(LENGTHS_K)[:-1])):
            for position, token in enumerate(tokens):
                page = inputs["block_table"][sequence, position // problem.page_size]
                cache[page, position % problem.page_size] = token
        inputs[f"{name}_cache"] = cache
    return inputs


def to_sglang(problem, inputs):
    """The page table as lists of different lengths."""
    pages = -(-inputs["seqlens_k"] // problem.page_size)
    return {name: array for name, array in inputs.items() if name not in ("block_table", "seqlens_k")} | {
        "kv_indptr": np.concatenate([[0], np.cumsum(pages)]).astype(np.int32),
        "kv_page_indices": np.concatenate([row[:n] for row, n in zip(inputs["block_table"], pages, strict=True)]),
        "kv_last_page_lens": ((inputs["seqlens_k"] - 1) % problem.page_size + 1).astype(np.int32),
    }


def to_vectorized(inputs, x=8):
    """Pages of (page_size, nhead, hdim) with x elements of K's head dim, and x tokens of V, together."""
    pages, size, nhead, hdim = inputs["k_cache"].shape
    k = inputs["k_cache"].reshape(pages, size, nhead, hdim // x, x).transpose(0, 2, 3, 1, 4)
    v = inputs["v_cache"].reshape(pages, size // x, x, nhead, hdim).transpose(0, 3, 1, 4, 2)
    return inputs | {"k_cache": k, "v_cache": v}


@pytest.mark.parametrize("op", ["splitkv", "pagedkv", "batch_prefill"])
def test_a_paged_cache_is_read_like_packed_keys(op):
    fwd = Problem(**PREFILL, seqlens_k=list(LENGTHS_K), bias="bias")
    dense = with_options(fwd, make_inputs(fwd))
    dense = {name: array for name, array in dense.items() if not name.startswith("seqlens")}
    expected = reference(fwd, dense)
    problem = Problem(**PREFILL, op=op, seqlen_k=24, page_size=8, bias="bias")
    inputs = paged_inputs(problem, dense)
    same = [(problem, inputs)]
    if op == "batch_prefill":
        vectorized = problem.model_copy(update={"kv_memory_layout": "vectorized"})
        sglang = vectorized.model_copy(update={"kv_lookup_table": "sglang"})
        same += [(vectorized, to_vectorized(inputs)), (sglang, to_sglang(problem, to_vectorized(inputs)))]
    for asked, given in same:
        for name, result in reference(asked, given).items():
            agree(result, expected[name])


def test_scales_of_pages():
    fields = PREFILL | {"op": "batch_prefill", "dtype": "fp8bf16", "seqlen_k": 24, "page_size": 8}
    problem = Problem(**fields, qscale="kv_blockscale")
    inputs = make_inputs(problem)
    scaled = {"q": inputs["q"].astype(float) * inputs["q_descale"].astype(float)} | {
        f"{name}_cache": inputs[f"{name}_cache"].astype(float) * inputs[f"{name}_descale"][:, None, :, None]
        for name in ("k", "v")
    }
    agree(reference(problem, inputs)["o"], reference(Problem(**fields), inputs | scaled)["o"])


# Appending

APPEND = {"op": "appendkv", "batch": 3, "nhead_q": 4, "nhead_k": 2, "seqlen_q": 5, "seqlen_k": 16, "seqlen_new": 5}
APPEND |= {"hdim_q": 16, "dtype": "fp32"}


@pytest.mark.parametrize("fields", [{}, {"layout": "bshd"}, {"page_size": 4}], ids=["dense", "bshd", "paged"])
@pytest.mark.parametrize("dtype", ["fp32", "fp8"])
def test_attention_over_an_appended_cache_is_that_over_all_tokens(fields, dtype):
    append = Problem(**APPEND | fields | {"dtype": dtype})
    inputs = make_inputs(append) | {"seqlens_k": np.array([11, 0, 6], np.int32)}
    before = {name: array.copy() for name, array in inputs.items()}
    results = reference(append, inputs)
    np.testing.assert_array_equal(results["q"], inputs["q"].astype(float))
    for name, array in before.items():
        np.testing.assert_array_equal(inputs[name], array)
    changed = np.any(results["k_cache"] != inputs["k_cache"].astype(float), axis=-1)
    assert changed.sum() == append.batch * append.nhead_k * append.seqlen_new

    sizes = {name: APPEND[name] for name in ("nhead_q", "nhead_k", "hdim_q", "seqlen_k")} | {"mask": "bottom_right"}
    over_cache = Problem(op="splitkv", batch=3, seqlen_q=5, dtype=dtype, **sizes, **fields)
    suffix = "_cache" if over_cache.paged else ""
    given = inputs | {"k" + suffix: results["k_cache"], "v" + suffix: results["v_cache"]}
    actual = reference(over_cache, given | {"seqlens_k": inputs["seqlens_k"] + 5})
    for sequence, length in enumerate(inputs["seqlens_k"]):
        one = Problem(batch=1, seqlen_q=5, **sizes | {"seqlen_k": int(length) + 5}, layout=append.layout)
        axis = 1 if append.layout == "bshd" else 2

        def all_tokens(name, sequence=sequence, length=length, axis=axis):
            cache = inputs[f"{name}_cache"].astype(float)
            if append.paged:
                old = cache[inputs["block_table"][sequence]].reshape(1, -1, *cache.shape[2:]).swapaxes(1, 2)
            else:
                old = cache[sequence : sequence + 1]
            new = inputs[f"{name}_new"][sequence : sequence + 1].astype(float)
            return np.concatenate([np.take(old, np.arange(length), axis), new], axis)

        expected = reference(
            one, {"q": inputs["q"][sequence : sequence + 1], "k": all_tokens("k"), "v": all_tokens("v")}
        )
        agree(actual["o"][sequence], expected["o"][0])
        agree(actual["lse"][sequence], expected["lse"][0])


@pytest.mark.parametrize("mask", ["no", "causal"])
@pytest.mark.parametrize("rope", ["inter", "half"])
def test_rotary_embedding_turns_complex_numbers(rope, mask):
    problem = Problem(**APPEND, rope=rope, rotary_dim=12, mask=mask)
    before = np.array([11, 0, 6], np.int32)
    inputs = make_inputs(problem) | {"seqlens_k": before}
    results = reference(problem, inputs)

    def turned(tokens, positions):
        result = tokens.astype(float)
        first, second = (slice(0, 12, 2), slice(1, 12, 2)) if rope == "inter" else (slice(0, 6), slice(6, 12))
        tables = inputs["rotary_cos"].astype(float) + 1j * inputs["rotary_sin"].astype(float)
        numbers = (result[..., first] + 1j * result[..., second]) * tables[positions]
        result[..., first], result[..., second] = numbers.real, numbers.imag
        return result

    for sequence, length in enumerate(before):
        positions = length + np.arange(5)
        agree(
            results["k_cache"][sequence, :, positions[0] : positions[0] + 5],
            turned(inputs["k_new"][sequence], positions),
        )
        np.testing.assert_array_equal(results["v_cache"][sequence, :, length : length + 5], inputs["v_new"][sequence])
        of_queries = positions if mask == "causal" else np.full(5, length)
        agree(results["q"][sequence], turned(inputs["q"][sequence], of_queries))


# Gradients

TINY = {"op": "bwd", "nhead_q": 2, "nhead_k": 1, "hdim_q": 3, "hdim_v": 2, "dtype": "fp32"}
GRADIENTS = {
    "bias and dropout": {"batch": 2, "seqlen_q": 3, "seqlen_k": 5, "bias": "bias", "bias_dims": "bh", "dropout": 0.4},
    "shared bias, causal": {"batch": 2, "seqlen_q": 4, "bias": "bias", "bias_dims": "11", "mask": "causal"},
    "rows without a key, bshd": {"batch": 1, "seqlen_q": 5, "seqlen_k": 3, "mask": "bottom_right", "layout": "bshd"},
    "group, bias and window": {"seqlens_q": [3, 2], "seqlens_k": [4, 3], "bias": "bias", "mask": "window"},
    "group, alibi and dropout": {"seqlens_q": [3, 0, 2], "bias": "alibi", "dropout": 0.2, "scale": 1.3},
    "of LSE, rows without a key": {"batch": 1, "seqlen_q": 5, "seqlen_k": 3, "mask": "bottom_right", "dlse": True},
    "of LSE, group and dropout": {"seqlens_q": [3, 0, 2], "dropout": 0.2, "bias": "bias", "dlse": True},
}
GRADIENTS["group, bias and window"]["window"] = (1, 1)
GRADIENTS["block mask"] = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "block_mask_q": 2, "block_mask_kv": 3}


@pytest.mark.parametrize("options", slow_but([True], [False, True]), ids=["required inputs", "all inputs"])
@pytest.mark.parametrize("fields", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_finite_differences(fields, options):
    problem = Problem(**TINY, **fields, dbias=fields.get("bias") == "bias")
    forward = forward_of(problem)
    inputs = make_inputs(problem)
    optional = with_options(forward, {}) if options else {}
    do = inputs["do"].astype(float)
    variables = {name: inputs[name].astype(float) for name in ("q", "k", "v", "bias") if name in inputs}
    given = {name: inputs[name] for name in inputs if name in forward.tensors} | optional

    def loss(changed):
        results = reference(forward, given | changed)
        seen = np.isfinite(results["lse"])
        of_lse = np.sum(inputs["dlse"][seen] * results["lse"][seen]) if problem.dlse else 0.0
        return float(np.sum(do * results["o"]) + of_lse)

    answer = reference(forward, given | variables)
    with_sink = {name: array for name, array in optional.items() if name != "sink"}  # the forward's lse knows the sink
    gradients = reference(problem, inputs | with_sink | variables | {"o": answer["o"], "lse": answer["lse"]})
    step = 1e-5
    for name, array in variables.items():
        difference = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            change = np.zeros(array.shape)
            change[index] = step
            difference[index] = (loss({name: array + change}) - loss({name: array - change})) / (2 * step)
        # One bias may be that of all sequences or heads.
        shared = tuple(axis for axis, extent in enumerate(array.shape) if extent < gradients[f"d{name}"].shape[axis])
        gradient = gradients[f"d{name}"].sum(axis=shared, keepdims=True)
        np.testing.assert_allclose(gradient, difference, rtol=1e-7, atol=1e-8)


# PyTorch


@pytest.mark.parametrize(
    "fields",
    [{}, {"mask": "causal"}, {"bias": "bias"}, {"block_mask_q": 8, "block_mask_kv": 16}],
    ids=["no mask", "causal", "bias", "block mask"],
)
def test_attention_and_gradients_agree_with_pytorch(fields):
    try:
        import torch
    except ImportError:
        missing("PyTorch")
    sizes = {"batch": 2, "nhead_q": 4, "nhead_k": 2, "seqlen_q": 33, "seqlen_k": 47, "hdim_q": 16, "hdim_v": 8}
    problem = Problem(op="bwd", **sizes, dtype="fp32", dbias="bias" in fields, **fields)
    inputs = make_inputs(problem)
    names = [name for name in ("q", "k", "v", "bias") if name in inputs]
    tensors = {name: torch.from_numpy(inputs[name]).double().requires_grad_() for name in names}
    mask = tensors["bias"].expand(2, 4, 33, 47) if "bias" in tensors else None
    if problem.block_masked:
        inputs["block_mask"][..., 0] = 1  # every query sees a key
        mask = torch.from_numpy(np.kron(inputs["block_mask"], np.ones((8, 16)))[..., :33, :47] != 0)
    o = torch.nn.functional.scaled_dot_product_attention(
        *(tensors[name] for name in "qkv"), attn_mask=mask, is_causal=problem.mask == "top_left", enable_gqa=True
    )
    o.backward(torch.from_numpy(inputs["do"]).double())

    forward = forward_of(problem)
    answer = reference(forward, {name: inputs[name] for name in forward.tensors if name in inputs})
    agree(answer["o"], o.detach().numpy())
    gradients = reference(problem, inputs | {"o": answer["o"], "lse": answer["lse"]})
    for name, tensor in tensors.items():
        gradient = gradients[f"d{name}"].sum(axis=0, keepdims=True) if name == "bias" else gradients[f"d{name}"]
        agree(gradient, tensor.grad.numpy())
