"""Problems: validation messages, the normal form, and the counts that figures are made of."""

import copy
import json
import pickle

import numpy as np
import pytest
from conftest import slow_but
from hypothesis import given
from hypothesis import strategies as st

from catalog.errors import ProblemError
from catalog.ops.attention.fields import ELEMENTS
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.traits import Mask, Mode
from catalog.schema import problem_form

DENSE = {"batch": 2, "nhead_q": 8, "seqlen_q": 64, "hdim_q": 32}
LONG = {"seqlens_q": [2**26], "nhead_q": 1, "hdim_q": 8}
PACKED = {"seqlens_q": [3, 0, 5], "nhead_q": 8, "hdim_q": 32}
VECTORS = PACKED | {"op": "batch_prefill", "page_size": 16, "kv_memory_layout": "vectorized"}
PAGED = PACKED | {"op": "pagedkv", "page_size": 4}
BLOCKS = {"block_mask_q": 64, "block_mask_kv": 64}
APPEND = {"op": "appendkv", "seqlen_new": 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (DENSE | {"nheadk": 4}, r"no field 'nheadk'; did you mean nhead_k\?"),
        (DENSE | {"batch": None}, r"needs batch, or seqlens_q"),
        (DENSE | {"seqlen_q": None}, r"needs seqlen_q, or seqlens_q"),
        (DENSE | {"hdim_q": None}, r"needs hdim_q: head dim"),
        (DENSE | {"batch": -1}, r"batch=-1: .* from 0 to 2147483647"),
        (DENSE | {"batch": True}, r"batch=True: .* an integer"),
        (DENSE | {"hdim_q": 0}, r"hdim_q=0: .* from 1"),
        (DENSE | {"hdim_v": 2**31}, r"hdim_v=2147483648: .* to 2147483647"),
        (DENSE | {"nhead_k": 3}, r"nhead_k=3: must divide nhead_q=8"),
        (DENSE | {"dtype": "bf61"}, r"dtype='bf61' is not allowed; did you mean bf16\?\nAllowed: fp32, fp16, "),
        (DENSE | {"mask": "casual"}, r"mask='casual' is not allowed; did you mean causal\?\nAllowed: no, causal, "),
        (DENSE | {"op": "bdw"}, r"op='bdw' is not allowed; did you mean bwd\?\nAllowed: fwd, splitkv, "),
        (
            DENSE | {"layout": "bhsd "},
            r"layout='bhsd ' is not allowed; did you mean bhsd\?\nAllowed: bhsd, ",
        ),
        (DENSE | {"lse": 1}, r"lse=1: .* True or False"),
        (DENSE | {"scale": -1.0}, r"scale=-1.0: .* positive"),
        (DENSE | {"mask": "window"}, r"mask='window' needs window=\(left, right\)"),
        (DENSE | {"mask": "window", "window": [1, -2]}, r"window\[1\]=-2: .* or -1 for all"),
        (DENSE | {"mask": "window", "window": [1]}, r"window=\[1\]: \(left, right\)"),
        (DENSE | {"window": [1, 1]}, r"window=\(1, 1\) cannot be combined with mask='no'"),
        (DENSE | {"mask": "causal", "window": [1, 1]}, r"window=\(1, 1\) cannot be combined with mask='causal'"),
        (DENSE | {"seqlens_k": [1, 2]}, r"seqlens_k is given without seqlens_q"),
        (PACKED | {"batch": 2}, r"batch=2 contradicts seqlens_q, which makes it 3"),
        (PACKED | {"seqlen_k": 4}, r"seqlen_k=4 contradicts seqlens_k, which makes it 5"),
        (PACKED | {"seqlens_k": [1]}, r"seqlens_k has 1 sequences: must have as many as seqlens_q, 3"),
        (PACKED | {"seqlens_q": [1, -2]}, r"seqlens_q\[1\]=-2: .* from 0"),
        (PACKED | {"seqlens_q": [2**31 - 1, 1]}, r"seqlens_q adds up to 2147483648 tokens"),
        (PACKED | {"layout": "bshd"}, r"layout='bshd' does not apply to packed sequences"),
        (DENSE | {"batch": 2**31 - 1, "seqlen_q": 2**31 - 1}, r"multiply to .* do not fit in 63 bits"),
        (DENSE | {"bias": "alibii"}, r"bias='alibii' is not allowed; did you mean alibi\?\nAllowed: no, bias, alibi"),
        (DENSE | {"bias": "alibi", "bias_dims": "11"}, r"bias_dims='11' cannot be combined with bias='alibi'"),
        (DENSE | {"dropout": 1.5}, r"dropout=1.5: .* from 0 to 1$"),
        (DENSE | {"randval": True}, r"randval needs dropout"),
        (DENSE | {"logits_soft_cap": 0}, r"logits_soft_cap=0: .* positive"),
        (DENSE | {"num_splits": 2}, r"num_splits=2 does not apply to op='fwd'"),
        (DENSE | {"min_seqlen_q": 2}, r"min_seqlen_q needs group mode"),
        (DENSE | {"block_mask_q": 64}, r"block_mask_q=64 needs block_mask_kv, the keys that an entry"),
        (DENSE | {"block_mask_kv": 64}, r"block_mask_kv=64 needs block_mask_q, the queries that an entry"),
        (DENSE | {"block_mask_q": -64, "block_mask_kv": 64}, r"block_mask_q=-64: .* queries that an entry"),
        (PACKED | BLOCKS, r"block_mask_q=64 cannot be combined with packed sequences, seqlens_q: "),
        (DENSE | BLOCKS | {"op": "splitkv"}, r"block_mask_q=64 does not apply to op='splitkv'\nOps .*: fwd"),
        (DENSE | {"qscale": "pertensor"}, r"qscale='pertensor' cannot be combined with dtype='fp16'"),
        (DENSE | {"dtype": "fp8", "qscale": "kv_blockscale"}, r"qscale='kv_blockscale' does not apply to op='fwd'"),
        (DENSE | {"qscale": "mx"}, r"qscale='mx' is not allowed\nAllowed: no, pertensor, blockscale, kv_blockscale"),
        (DENSE | {"op": "pagedkv"}, r"op='pagedkv' needs page_size"),
        (DENSE | {"op": "splitkv", "num_pages": 2}, r"num_pages needs page_size"),
        (
            PACKED | {"op": "pagedkv", "page_size": 4, "seqlens_k": [1, 2, 3]},
            r"seqlens_k cannot be combined with a paged cache",
        ),
        (DENSE | {"op": "batch_prefill", "page_size": 4}, r"op='batch_prefill' needs seqlens_q"),
        (VECTORS | {"page_size": 4}, r"page_size=4 cannot be combined with kv_memory_layout='vectorized': .* of 8"),
        (VECTORS | {"hdim_q": 12}, r"hdim_q=12 cannot be combined with kv_memory_layout='vectorized': .* of 8"),
        (DENSE | {"op": "appendkv"}, r"op='appendkv' needs seqlen_new"),
        (PACKED | {"op": "appendkv", "seqlen_new": 1}, r"seqlens_q cannot be combined with op='appendkv'"),
        (DENSE | {"op": "appendkv", "seqlen_new": 65}, r"seqlen_new=65 does not fit into the cache of seqlen_k=64"),
        (DENSE | APPEND | {"rotary_dim": 8}, r"rotary_dim needs rope"),
        (DENSE | APPEND | {"rope": "half", "rotary_dim": 7}, r"rotary_dim=7: must be even and at most hdim_q=32"),
        (DENSE | APPEND | {"rope": "half", "hdim_q": 1}, r"hdim_q=1 cannot be combined with rope"),
        (DENSE | APPEND | {"lse": True}, r"lse=True does not apply to op='appendkv'"),
        (DENSE | {"op": "bwd", "dbias": True}, r"dbias needs bias='bias'"),
        (DENSE | {"op": "bwd", "dtype": "fp8"}, r"dtype='fp8' does not apply to op='bwd'"),
        (DENSE | {"op": "bwd", "sink_size": 1}, r"sink_size=1 does not apply to op='bwd'"),
    ],
)
def test_a_malformed_problem_says_what_is_allowed(fields, message):
    with pytest.raises(ProblemError, match=message):
        Problem(**fields)


def test_omitted_fields_follow_the_given_ones():
    problem = Problem(**DENSE)
    assert (problem.nhead_k, problem.seqlen_k, problem.hdim_v) == (8, 64, 32)
    assert problem.softmax_scale == pytest.approx(32**-0.5)
    packed = Problem(**PACKED)
    assert packed.mode is Mode.GROUP
    assert (packed.batch, packed.seqlen_q, packed.seqlen_k, packed.seqlens_k) == (3, 5, 5, (3, 0, 5))


@pytest.mark.parametrize(
    ("given", "kernel_mask", "left", "right", "corner"),
    [
        ({}, Mask.NO, -1, -1, 0),
        ({"mask": "window", "window": [-1, -1]}, Mask.NO, -1, -1, 0),
        ({"mask": "causal"}, Mask.CAUSAL, -1, 0, 0),
        ({"mask": "top_left", "window": [-1, 0]}, Mask.CAUSAL, -1, 0, 0),
        ({"mask": "bottom_right"}, Mask.CAUSAL, -1, 0, 1),
        ({"mask": "generic", "window": [-1, 0]}, Mask.CAUSAL, -1, 0, 1),
        ({"mask": "window", "window": [7, 0]}, Mask.GENERIC, 7, 0, 1),
        ({"mask": "top_left", "window": [7, 3]}, Mask.GENERIC, 7, 3, 0),
    ],
)
def test_masks_have_one_spelling(given, kernel_mask, left, right, corner):
    problem = Problem(**DENSE, **given)
    assert problem.kernel_mask is kernel_mask
    assert (problem.window_left, problem.window_right, problem.mask_corner) == (left, right, corner)


def test_equal_meanings_are_equal_problems():
    assert Problem(**DENSE, mask="causal") == Problem(**DENSE, mask="top_left", window=(-1, 0))
    assert Problem(**DENSE, scale=32**-0.5, dtype="fp16", nhead_k=8) == Problem(**DENSE)
    assert Problem(**DENSE) != Problem(**DENSE, lse=True)
    assert len({Problem(**DENSE), Problem(**DENSE, seqlen_k=64)}) == 1


lengths = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=4)
sides = st.integers(-1, 60)
masks = st.one_of(
    st.sampled_from(["no", "causal", "top_left", "bottom_right"]).map(lambda mask: {"mask": mask}),
    st.builds(
        lambda mask, left, right: {"mask": mask, "window": (left, right)},
        st.sampled_from(["window", "generic", "top_left", "bottom_right"]),
        sides,
        sides,
    ),
)
sizes = st.one_of(
    st.fixed_dictionaries(
        {"batch": st.integers(0, 3), "seqlen_q": st.integers(0, 50), "seqlen_k": st.integers(0, 50)},
        optional={"layout": st.sampled_from(["bhsd", "bshd"])},
    ),
    lengths.map(lambda pairs: {"seqlens_q": [q for q, _ in pairs], "seqlens_k": [k for _, k in pairs]}),
)
problems = st.builds(
    lambda heads, ratio, sizes, mask, traits: Problem(nhead_q=heads * ratio, nhead_k=heads, **sizes, **mask, **traits),
    st.integers(1, 3),
    st.integers(1, 3),
    sizes,
    masks,
    st.fixed_dictionaries(
        {"hdim_q": st.integers(1, 256)},
        optional={
            "hdim_v": st.integers(1, 256),
            "dtype": st.sampled_from(list(ELEMENTS)),
            "lse": st.booleans(),
            "scale": st.floats(0.01, 10),
        },
    ),
)


@given(problems)
def test_problems_survive_json_pickle_and_copying(problem):
    assert Problem(**json.loads(problem.key)) == problem
    assert Problem.model_validate_json(problem.model_dump_json()).key == problem.key
    assert pickle.loads(pickle.dumps(problem)) == problem  # noqa: S301
    assert problem.model_copy() == problem


@given(problems.filter(lambda problem: problem.kernel_mask is Mask.GENERIC))
def test_flops_of_a_window_count_the_visible_pairs(problem):
    pairs = 0
    for seqlen_q, seqlen_k in problem.sequences:
        diagonal = seqlen_k - seqlen_q if problem.mask_corner else 0
        for query in range(seqlen_q):
            first = 0 if problem.window_left < 0 else query + diagonal - problem.window_left
            last = seqlen_k if problem.window_right < 0 else query + diagonal + problem.window_right
            pairs += sum(first <= key <= last for key in range(seqlen_k))
    assert problem.flops == 2 * (problem.hdim_q + problem.hdim_v) * problem.nhead_q * pairs


@pytest.mark.parametrize("page_size", [0, 16])
def test_appending_moves_the_new_tokens_not_the_cache(page_size):
    fields = {"op": "appendkv", "batch": 2, "nhead_q": 8, "nhead_k": 2, "seqlen_q": 1, "seqlen_new": 3, "hdim_q": 64}
    short, long = (Problem(**fields, seqlen_k=length, page_size=page_size) for length in (1024, 4096))
    table = 4 * 2 * (4096 - 1024) // 16 if page_size else 0
    assert long.traffic - short.traffic == table
    new = 2 * 2 * 2 * 3 * 64 * 2  # K and V of two sequences, two heads, three tokens, two bytes an element
    queries = 2 * 8 * 64 * 2
    rest = short.traffic - 2 * new - queries
    assert 0 <= rest <= queries + 4 * 2 * (1 + 1024 // 16)


def test_flops_and_bytes():
    full = Problem(**DENSE, nhead_k=2, hdim_v=16, lse=True)
    assert full.flops == 2 * 8 * 2 * 64 * 64 * (32 + 16)
    assert full.bytes == 2 * (2 * 64) * (8 * 32 + 2 * 32 + 2 * 16 + 8 * 16) + 4 * (2 * 8 * 64)
    assert full.model_copy(update={"mask": "causal"}).flops * 2 == full.flops
    assert Problem(**PACKED, dtype="fp32").flops == 2 * 8 * (3 * 3 + 5 * 5) * (32 + 32)


def test_the_key_is_made_once():
    problem = Problem(**DENSE)
    assert problem.key is problem.key


SIZES = st.one_of(
    st.integers(0, 70), st.sampled_from([-1, 2**31 - 1, 2**31, 2**20, True, False, 3.0, None, "4", np.int64(5)])
)
LENGTHS = st.one_of(
    st.lists(SIZES, max_size=3).map(tuple), st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
)
FORMS = [
    DENSE,
    DENSE | {"op": "bwd", "mask": "causal", "bias": "bias", "dbias": True},
    DENSE | {"op": "splitkv", "num_splits": 3, "scale": 0.5, "layout": "bshd"},
    DENSE | {"dtype": "fp8", "qscale": "blockscale", "lse": True},
    DENSE | BLOCKS,
    DENSE | APPEND | {"rope": "half"},
    DENSE | {"op": "splitkv", "page_size": 4},
    PACKED,
    PACKED | {"op": "bwd", "mask": "window", "window": (3, 1), "bias": "alibi", "bias_dims": "bh"},
    PACKED | {"min_seqlen_q": 2, "dropout": 0.5, "randval": True},
    PAGED | {"seqlen_k": 9},
    VECTORS | {"seqlen_k": 9},
]


def outcome(make):
    try:
        return make().key
    except ProblemError as error:
        return str(error)


@pytest.mark.parametrize("fields", slow_but([FORMS[0], FORMS[4], FORMS[5], FORMS[8], FORMS[10]], FORMS))
@given(
    sizes=st.one_of(
        st.fixed_dictionaries({"batch": SIZES, "seqlen_q": SIZES, "seqlen_k": SIZES}),
        st.fixed_dictionaries({"seqlens_q": LENGTHS, "seqlens_k": LENGTHS}),
        st.lists(st.integers(0, 9), min_size=1, max_size=3).map(
            lambda q: {"seqlens_q": tuple(q), "seqlens_k": tuple(q)}
        ),
        st.fixed_dictionaries({"seqlens_q": LENGTHS, "seqlen_k": SIZES, "num_pages": SIZES}),
    )
)
def test_other_sizes_are_taken_as_the_constructor_takes_them(fields, sizes):
    """The same problem or the same error, whether or not the sizes are certain enough for the short way."""
    problem = Problem(**fields)
    others = {name: value for name, value in problem.model_dump().items() if name not in problem.sizes}
    assert outcome(lambda: problem.resized(**sizes)) == outcome(lambda: Problem(**{**others, **sizes}))


@pytest.mark.parametrize("of_other", [DENSE, PACKED, DENSE | BLOCKS, PAGED | {"seqlen_k": 9}, LONG])
@pytest.mark.parametrize("fields", FORMS)
def test_sizes_of_another_problem_are_taken_as_the_constructor_takes_them(fields, of_other):
    problem, other = Problem(**fields), Problem(**of_other)
    others = {name: value for name, value in problem.model_dump().items() if name not in problem.sizes}
    sizes = {name: getattr(other, name) for name in problem.sizes}
    assert outcome(lambda: problem.form.like(other)) == outcome(lambda: Problem(**{**others, **sizes}))
    if (problem.seqlens_q is None) == (other.seqlens_q is None) and problem.form.borrowed_sizes(other):
        like, made = problem.form.like(other), Problem(**{**others, **sizes})
        assert (like.extents, like.lists.arrays, like.shapes) == (made.extents, made.lists.arrays, made.shapes)
        assert like.lists is other.lists


@pytest.mark.parametrize("fields", FORMS)
def test_problems_of_one_form_differ_in_sizes_only(fields):
    problem = Problem(**fields)
    if problem.op == "appendkv" or problem.paged:
        other = problem.model_copy(update={"seqlen_k": 80, "num_pages": None})
    elif problem.seqlens_q is None:
        other = problem.resized(batch=1, seqlen_q=7, seqlen_k=9)
    else:
        other = problem.resized(seqlens_q=(1, 2, 3, 4), seqlens_k=(5, 4, 3, 2))
    same = Problem(**json.loads(other.key))
    assert other == same
    assert hash(other) == hash(same)
    assert other != problem
    assert other.form == problem.form
    assert (other.tensors, other.bytes, other.flops) == (same.tensors, same.bytes, same.flops)
    assert other.extents == same.extents
    assert other.lists.arrays == same.lists.arrays
    assert (repr(other), other.model_dump()) == (repr(same), same.model_dump())
    assert pickle.loads(pickle.dumps(other)) == copy.deepcopy(other) == other  # noqa: S301
    assert Problem(**fields | {"nhead_q": 16}).form != problem.form


def test_lengths_that_equal_known_ones_are_still_checked():
    problem = Problem(**PACKED)
    assert problem.resized(seqlens_q=(1, 2), seqlens_k=(1, 2)).seqlens_q == (1, 2)
    for equal in ((True, 2), (1.0, 2.5)):
        with pytest.raises(ProblemError, match="seqlens_q"):
            problem.resized(seqlens_q=equal, seqlens_k=equal)
    assert problem.resized(seqlens_q=(1, 2), seqlens_k=(1, 2)).key == Problem(**PACKED | {"seqlens_q": [1, 2]}).key


def test_equal_forms_are_one_object_while_a_problem_has_them(monkeypatch):
    """Also if more forms are in use than are kept: plans and decisions are looked up by the object."""
    monkeypatch.setattr(problem_form, "MOST_FORMS", 1)
    first = Problem(**DENSE)
    for heads in (16, 24):
        assert Problem(**DENSE | {"nhead_q": heads}).form is not first.form
    assert Problem(**DENSE | {"batch": 9}).form is first.form
