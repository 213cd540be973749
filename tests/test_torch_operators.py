"""The catalog's attention as PyTorch's operators: their rules, modes, compiled graphs, threads, derivatives, traces."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import missing

from catalog.build.builder import Builder
from catalog.errors import TensorError, UsageError
from catalog.runtime.catalog import Catalog
from catalog.runtime.traces import read_trace
from catalog.runtime.tracing import trace
from catalog.settings import settings

try:
    import torch
except ImportError:
    missing("torch")

from torch import library
from torch.utils._python_dispatch import TorchDispatchMode
from torch_cases import STARTS_K, STARTS_Q, attention64, close, normal

from catalog.torch import calls, flash_attn_func, flash_attn_varlen_func, ops, scaled_dot_product_attention, watchers
from catalog.torch.calls import Case, Options, gradient_of, problem_of

PLAIN = Options("bhsd", "no", -1, 0, None, 0.0, 0.0, False)
CAUSAL = Options("bhsd", "top_left", -1, 0, None, 0.0, 0.0, False)


def test_head_dims_are_padded_where_kernels_need_it(monkeypatch):
    """As on an NVIDIA GPU."""
    leaves = [normal(1, 2, 5, hdim, seed=hdim).requires_grad_() for hdim in (13, 13, 6)]
    results = []
    for nvidia in (False, True):
        monkeypatch.setattr(ops, "on_nvidia", lambda _, nvidia=nvidia: nvidia)
        o = scaled_dot_product_attention(*leaves, is_causal=True)
        results.append([o, *torch.autograd.grad(o.sum(), leaves)])
    for padded, plain in zip(*results, strict=True):
        close(padded, plain.double())


def test_operators_keep_pytorchs_rules():
    q, k, v = (normal(2, 2, 5, 8, seed=seed) for seed in range(3))
    bias, nothing = normal(2, 2, 5, 5), [None] * 4
    fwd, bwd = torch.ops.catalog.fwd.default, torch.ops.catalog.bwd.default
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, bias)]
    library.opcheck(fwd, (*leaves[:3], None, *nothing, None, *CAUSAL))
    library.opcheck(fwd, (*leaves, *nothing, None, *PLAIN))
    o, lse = fwd(*leaves, *nothing, None, *PLAIN)
    saved = [tensor.detach() for tensor in (*leaves[:3], o, lse, bias)]
    for grad_lse in (None, lse.detach()):
        library.opcheck(bwd, (o.detach(), grad_lse, *saved, None, None, None, None, True, *PLAIN))
    packed = PLAIN._replace(layout="packed", mask="bottom_right")
    qkv = normal(16, 4, 8), normal(31, 2, 8), normal(31, 2, 8)
    library.opcheck(fwd, (*qkv, None, None, STARTS_Q, STARTS_K, None, None, *packed))


def test_modes_and_profiles_see_the_operators():
    """Where nobody watches, calls spare PyTorch's dispatcher; whoever watches sees them."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen, q = [], normal(1, 2, 5, 8).requires_grad_()
    plain = scaled_dot_product_attention(q, q, q)
    with Watching():
        watched = scaled_dot_product_attention(q, q, q)
        gradients = torch.autograd.grad(watched.sum(), q)
    assert {"catalog.fwd.default", "catalog.bwd.default"} <= set(seen)
    assert torch.equal(plain, watched)
    assert torch.equal(torch.autograd.grad(plain.sum(), q)[0], gradients[0])
    with torch.profiler.profile() as profile:
        scaled_dot_product_attention(q, q, q)
    assert "catalog::fwd" in {event.key for event in profile.key_averages()}
    batch = torch.stack([torch.ones(1, 2, 5, 8), torch.zeros(1, 2, 5, 8)])
    (pair,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q), q, batch, is_grads_batched=True)
    assert pair[0].isfinite().all()
    assert not pair[1].any()


@pytest.mark.parametrize(
    "name",
    [
        "_any_requires_grad",
        "_dispatch_keys",
        "_get_tracing_state",
        "_len_torch_dispatch_stack",
        "_len_torch_function_stack",
        "_autograd._profiler_enabled",
        "_functorch.is_functorch_wrapped_tensor",
        "_functorch.peek_interpreter_stack",
    ],
)
def test_without_a_private_function_of_pytorch_every_call_goes_through_the_dispatcher(name, monkeypatch):
    q = normal(1, 2, 5, 8).requires_grad_()
    (expected,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q).sum(), q)
    try:
        with monkeypatch.context() as lacking:
            lacking.delattr(f"torch._C.{name}")
            importlib.reload(watchers)
            assert not watchers.unwatched((q,))
            (gradient,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q).sum(), q)
    finally:
        importlib.reload(watchers)
    assert torch.equal(gradient, expected)
    assert watchers.unwatched((q,))


def test_compiled_whole_graphs_give_what_eager_gives():
    def model(x, mask):
        q, k, v = (each.transpose(1, 2) for each in x.sin().unflatten(-1, (3, 2, 8)).unbind(2))
        learned = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        dropped = scaled_dot_product_attention(q, k, v, dropout_p=1e-9, scale=0.5)
        tokens_first = (each.transpose(1, 2) for each in (q, k, v))
        causal, lse, _ = flash_attn_func(*tokens_first, causal=True, return_attn_probs=True)
        return (learned + dropped).cos().sum() + causal.sin().sum() + lse.sin().sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        x, mask = normal(2, tokens, 48).requires_grad_(), normal(2, 1, tokens, tokens).requires_grad_()
        actual, expected = compiled(x, mask), model(x, mask)
        close(actual, expected)
        for gradient, wanted in zip(
            torch.autograd.grad(actual, (x, mask)), torch.autograd.grad(expected, (x, mask)), strict=True
        ):
            close(gradient, wanted)


def test_parameters_threads_and_inference_mode():
    q, k, v = (torch.nn.Parameter(normal(1, 2, 5, 8, seed=seed)) for seed in range(3))
    expected = scaled_dot_product_attention(q, k, v)
    with torch.inference_mode():
        assert torch.equal(scaled_dot_product_attention(q, k, v), expected)
    other = threading.Thread(target=lambda: scaled_dot_product_attention(q, k, v).sum().backward())
    other.start()
    other.join()
    assert torch.equal(q.grad, torch.autograd.grad(expected.sum(), q)[0])


def test_new_lengths_need_no_builder_and_are_right(monkeypatch):
    """A cache that grows, and packed sequences of other lengths: nothing is settled anew, nothing is left unchecked."""

    def decode(length):
        q, k, v = (normal(1, 2, tokens, 16, seed=seed) for seed, tokens in enumerate((1, length, length)))
        with torch.no_grad():
            close(scaled_dot_product_attention(q, k, v), attention64(q.double(), k.double(), v.double()))

    def train(*lengths):
        tensors = [normal(sum(lengths), 2, 16, seed=seed).requires_grad_() for seed in range(3)]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        o = flash_attn_varlen_func(*tensors, starts, starts, max(lengths), max(lengths), causal=True)
        parts = [tensor.detach().double().requires_grad_() for tensor in tensors]
        alone = [
            attention64(*(part[None].transpose(1, 2) for part in one), is_causal=True).transpose(1, 2)[0]
            for one in zip(*(part.split(lengths) for part in parts), strict=True)
        ]
        close(o, torch.cat(alone))
        weights = normal(*o.shape, seed=9)
        wanted = torch.autograd.grad(torch.cat(alone), parts, weights.double())
        for gradient, expected in zip(torch.autograd.grad(o, tensors, weights), wanted, strict=True):
            close(gradient, expected)

    decode(3)
    train(3, 5)
    monkeypatch.setattr(Builder, "make", lambda *_: pytest.fail("a loaded kernel was settled again"))
    for length in (4, 5, 64, 65, 300):
        decode(length)
    train(4, 9)
    train(17, 1, 30)
    q, k, v = normal(1, 2, 1, 16), normal(1, 2, 11, 16), normal(1, 2, 12, 16)
    with torch.no_grad(), pytest.raises(TensorError, match="v is float32"):
        scaled_dot_product_attention(q, k, v)
    k = normal(1, 2, 16, 13).transpose(2, 3)  # strided along the head dim
    with torch.no_grad():
        close(scaled_dot_product_attention(q, k, k), attention64(q.double(), k.double(), k.double()))
    monkeypatch.undo()
    Catalog.default().forget()
    decode(6)


@pytest.mark.parametrize("bias", ["no", "bias", "alibi"])
@pytest.mark.parametrize("lengths", [None, (4, 5), (1, 8)])
@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        CAUSAL._replace(scale=0.5, dropout=0.25),
        Options("bshd", "bottom_right", 3, 2, None, 0.0, 0.0, True),
        Options("bshd", "bottom_right", -1, 0, None, 30.0, 0.0, False),
    ],
)
def test_gradients_are_the_problem_of_their_own_case(options, lengths, bias):
    """Whether it is derived from the forward's problem or from the tensors."""
    shape = torch.Size((9, 2, 16) if lengths else (1, 9, 2, 16))
    options = options._replace(layout="packed" if lengths else "bshd")
    forward = Case("fwd", torch.float32, bias, "bh", False, False, options, *[shape] * 3, lengths, lengths, 0)
    for dbias, dlse in ((False, False), (bias == "bias", True)):
        backward = forward._replace(op="bwd", dbias=dbias, dlse=dlse)
        derived = gradient_of(problem_of(forward), dbias, dlse, options.deterministic)
        assert derived.key == problem_of(backward).key


def test_a_backward_does_not_read_the_lengths_again(monkeypatch):
    """For the starts of sequences on a GPU it would wait. Starts that have changed meanwhile are refused."""
    q, k, v = (normal(9, 2, 16, seed=seed).requires_grad_() for seed in range(3))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    o, again = (flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, causal=True) for _ in range(2))
    expected = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    monkeypatch.setattr(ops, "_lengths", lambda _: pytest.fail("the lengths were read again"))
    for gradient, wanted in zip(torch.autograd.grad(again.sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(gradient, wanted)
    starts[1] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o.sum(), (q, k, v))


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_heads_before_tokens_in_another_order_in_memory_train_in_every_call(dropout):
    """First calls, later ones whose sizes and strides are known, and calls that somebody watches."""
    leaves = [normal(2, 6, 3, 16, seed=seed).requires_grad_() for seed in range(3)]
    q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    weights = normal(2, 3, 6, 16, seed=9)
    expected = attention64(*(leaf.transpose(1, 2) for leaf in doubles), is_causal=True)
    wanted = torch.autograd.grad(expected, doubles, weights.double())
    options = {"is_causal": True, "dropout_p": dropout}
    for _ in range(6):
        o = scaled_dot_product_attention(q, k, v, **options)
        close(o, expected)
        assert o.transpose(1, 2).is_contiguous()
        for gradient, right in zip(torch.autograd.grad(o, leaves, weights), wanted, strict=True):
            close(gradient, right)
            assert gradient.is_contiguous()
        with torch.no_grad():
            close(scaled_dot_product_attention(q, k, v, **options), expected)
    o = scaled_dot_product_attention(q, k, v, **options)
    for gradient, right in zip(torch.autograd.grad(o, leaves, weights, create_graph=True), wanted, strict=True):
        close(gradient, right)
    o, batch = scaled_dot_product_attention(q, k, v, **options), torch.stack([weights, torch.zeros_like(weights)])
    for pair, right in zip(torch.autograd.grad(o, leaves, batch, is_grads_batched=True), wanted, strict=True):
        close(pair[0], right)
        assert not pair[1].any()


def test_tensors_left_over_from_a_transform_are_taken_for_what_they_are():
    q = normal(1, 2, 5, 8)
    leaf, left = q.clone().requires_grad_(), []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(q)
    expected = scaled_dot_product_attention(q, q, q)
    for _ in range(6):
        close(scaled_dot_product_attention(left[0], q, q), expected)
        o = scaled_dot_product_attention(left[0], leaf, q)
        close(o, expected)
        assert torch.autograd.grad(o.sum(), leaf)[0].isfinite().all()


def test_known_calls_are_not_looked_for_while_a_trace_records(tmp_path):
    q = normal(1, 2, 7, 16).requires_grad_()
    for _ in range(5):
        scaled_dot_product_attention(q, q, q).sum().backward()
    with trace(tmp_path / "calls.jsonl"):
        scaled_dot_product_attention(q, q, q).sum().backward()
    assert sorted(used.problem.op for used in read_trace(tmp_path / "calls.jsonl").used) == ["bwd", "fwd"]


def test_long_keys_of_few_heads_are_divided_among_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("CATALOG_NUM_THREADS", "2")
    settings.cache_clear()
    with trace(tmp_path / "calls.jsonl"), torch.no_grad():
        for heads, keys in ((1, 1500), (2, 1500), (1, 1000)):
            q, k, v = (normal(1, h, tokens, 16, seed=h) for h, tokens in ((4, 1), (heads, keys), (heads, keys)))
            expected = attention64(q.double(), k.double(), v.double(), enable_gqa=True)
            close(scaled_dot_product_attention(q, k, v, enable_gqa=True), expected)
    settings.cache_clear()
    used = {
        (one.problem.nhead_k, one.problem.seqlen_k): one.problem.op for one in read_trace(tmp_path / "calls.jsonl").used
    }
    assert used == {(1, 1500): "splitkv", (2, 1500): "fwd", (1, 1000): "fwd"}


def test_a_misaligned_tensor_is_refused_each_time():
    q, k, v = (normal(1, 2, 5, 8, seed=seed) for seed in range(3))
    bytes_ = torch.zeros(q.nbytes + 1, dtype=torch.uint8)
    scaled_dot_product_attention(q, k, v)
    odd = torch.from_numpy(np.ndarray(q.shape, np.float32, bytes_.numpy(), 1))
    for _ in range(2):
        with pytest.raises(TensorError, match="not aligned"):
            scaled_dot_product_attention(odd, k, v)


def test_gpu_tensors_are_copied_where_rows_are_not_vectors():
    dense = normal(2, 3, 5, 8, dtype=torch.bfloat16)
    assert calls._vectors(dense) is dense
    assert calls._vectors(dense[..., :4]).data_ptr() == dense.data_ptr()
    for view in (dense[..., 1:], dense.mT, dense.flatten()[: 2 * 3 * 5 * 7].view(2, 3, 5, 7)):
        copy = calls._vectors(view)
        assert copy.is_contiguous()
        assert torch.equal(copy, view)


def test_derivatives_that_are_not_there_are_refused():
    q = normal(1, 2, 5, 8)

    def attention(q):
        return scaled_dot_product_attention(q, q, q).sum()

    with pytest.raises(UsageError, match="no forward-mode derivative"):
        torch.func.jvp(attention, (q,), (q,))
    with pytest.raises(UsageError, match=r"transforms of torch\.func\n.*backward"):
        torch.func.grad(attention)(q)
    leaf = q.requires_grad_()
    (gradient,) = torch.autograd.grad(attention(leaf), leaf, create_graph=True)
    with pytest.raises(UsageError, match=r"no second derivative\n.*MATH"):
        gradient.sum().backward()


def test_tensors_of_several_devices_are_refused():
    q, meta = normal(1, 2, 5, 8), torch.zeros(1, 2, 5, 8, device="meta")
    scaled_dot_product_attention(q, q, q)
    assert scaled_dot_product_attention(meta, meta, meta).is_meta
    with pytest.raises(TensorError, match="on cpu and meta: expected one device"):
        scaled_dot_product_attention(q, meta, q)


def test_negated_views_are_taken_for_what_they_are():
    q, k, v = (normal(1, 2, 5, 8, seed=seed) for seed in range(3))
    assert torch.equal(scaled_dot_product_attention(torch._neg_view(q), k, v), scaled_dot_product_attention(-q, k, v))


def test_the_catalog_alone_does_not_import_pytorch():
    program = "import sys, catalog, catalog.runtime.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_operators_have_the_arguments_that_options_have():
    assert [argument.name for argument in torch.ops.catalog.fwd.default._schema.arguments][ops._TENSORS :] == [
        *Options._fields
    ]


def test_a_trace_has_every_call_and_its_gradient(tmp_path):
    query, key, value = (normal(1, 2, 20, 16, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    scaled_dot_product_attention(query, key, value)  # makes the layout known
    with trace(tmp_path / "calls.jsonl", tensors=True):
        for _ in range(3):
            scaled_dot_product_attention(query, key, value)
        scaled_dot_product_attention(query.requires_grad_(), key, value).sum().backward()
    found = read_trace(tmp_path / "calls.jsonl").used
    assert sum(used.calls for used in found if used.problem.op == "fwd") == 4
    assert [used.calls for used in found if used.problem.op == "bwd"] == [1]
    for used in found:
        (recording,) = used.recordings
        assert np.array_equal(recording.load(used.problem)["q"].astype(np.float32), query.detach().float().numpy())
