"""Compiled calls: the tests of PyTorch's door once more, and what autograd asks of a node in C++."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import missing

try:
    import torch
except ImportError:
    missing("torch")

from test_torch import (  # noqa: F401 - collected here again
    test_bfloat16,
    test_causal_biases,
    test_gradients_agree_with_finite_differences,
    test_options_and_shapes_are_those_of_pytorch,
    test_rows_that_see_no_key_are_zeros_and_take_no_gradient,
)
from test_torch_flash import (  # noqa: F401
    test_a_sink_that_is_made_of_lse_trains_as_a_sink,
    test_the_gradients_of_flash_attention,
)
from test_torch_operators import (  # noqa: F401
    test_a_misaligned_tensor_is_refused_each_time,
    test_a_trace_has_every_call_and_its_gradient,
    test_derivatives_that_are_not_there_are_refused,
    test_heads_before_tokens_in_another_order_in_memory_train_in_every_call,
    test_modes_and_profiles_see_the_operators,
    test_negated_views_are_taken_for_what_they_are,
    test_parameters_threads_and_inference_mode,
    test_tensors_left_over_from_a_transform_are_taken_for_what_they_are,
)
from torch.utils.checkpoint import checkpoint
from torch_cases import normal

from catalog.errors import BuildError, ToolchainError
from catalog.runtime.devices import known_call
from catalog.runtime.traces import read_trace
from catalog.runtime.tracing import trace
from catalog.settings import settings
from catalog.torch import compile_calls, flash_attn_func, native, ops, scaled_dot_product_attention

pytestmark = pytest.mark.slow  # PyTorch's headers take half a minute

UNTIL_COMPILED = 12
"""Calls of which the last ones certainly repeat earlier ones."""


@pytest.fixture(scope="module", autouse=True)
def compiled(between_runs: Path) -> Iterator[None]:
    """The module, apart from the cache of other tests, which would use it from then on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "folder", lambda: between_runs / "torch")
        compile_calls()
        ops._compiled_gradient.cache_clear()
        yield
    known_call.use(None)
    native.load.cache_clear()


def leaves(hdim: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Q, K and V, of which each test has another head dim: its calls are not known before."""
    return [normal(2, 4, 9, hdim, seed=seed, dtype=dtype).requires_grad_() for seed in range(3)]


def attend(tensors: list[torch.Tensor]) -> torch.Tensor:
    return scaled_dot_product_attention(*tensors, is_causal=True)


def gradients(o: torch.Tensor, tensors: list[torch.Tensor], *, keep: bool = False) -> tuple[torch.Tensor, ...]:
    """Those of a dense gradient, as layers give it; that of a sum has strides of 0, which kernels do not take."""
    return torch.autograd.grad(o, tensors, torch.ones_like(o), retain_graph=keep)


def known(hdim: int) -> list[torch.Tensor]:
    """Q, K and V of calls that are compiled."""
    for _ in range(UNTIL_COMPILED):
        tensors = leaves(hdim)
        gradients(attend(tensors), tensors)
    return tensors


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with every gradient that Python computes."""
    calls, backward = list[None](), ops._backward

    def counted(*args):
        calls.append(None)
        return backward(*args)

    monkeypatch.setattr(ops, "_backward", counted)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [attend, lambda tensors: flash_attn_func(*tensors, window_size=(3, 2))])
def test_the_bits_are_those_of_the_first_call(function, dtype, in_python):
    first = None
    for call in range(UNTIL_COMPILED):
        tensors = leaves(20, dtype)
        o = function(tensors)
        found = [o, *torch.autograd.grad(o, tensors, normal(*o.shape, seed=7, dtype=dtype))]
        first = first or found
        assert all(torch.equal(one, other) for one, other in zip(found, first, strict=True)), call
    assert len(in_python) < UNTIL_COMPILED
    assert first[0].grad_fn.name() == "CatalogBackward"


def test_other_sizes_and_strides_are_not_taken_for_known_ones(in_python):
    tensors = known(19)
    expected = gradients(attend(tensors), tensors)
    python = len(in_python)
    strided = [tensor.detach().mT.contiguous().mT.requires_grad_() for tensor in tensors]
    longer = [torch.cat([tensor.detach(), torch.zeros_like(tensor)], 2).requires_grad_() for tensor in tensors]
    for changed in (strided, longer):
        found = torch.autograd.grad(attend(changed)[:, :, :9].sum(), changed)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[:, :, :9], other, rtol=2e-5, atol=2e-5)
    expanded = torch.ones(()).expand(2, 4, 9, 19)  # the gradient has strides of 0
    for one, other in zip(torch.autograd.grad(attend(tensors), tensors, expanded), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert len(in_python) > python


def test_only_what_needs_a_gradient_gets_one():
    q, k, v = (tensor.detach() for tensor in known(18))
    o = attend([q, k.requires_grad_(), v])
    o.sum().backward()
    assert q.grad is None
    assert v.grad is None
    assert k.grad.shape == k.shape
    assert not attend([q, k.detach(), v]).requires_grad


def test_graphs_are_kept_freed_and_checked_as_pytorchs():
    tensors = known(17)
    o = attend(tensors)
    twice = [gradients(o, tensors, keep=True) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*twice, strict=True))
    gradients(o, tensors)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(o, tensors)
    copies = [tensor * 1 for tensor in tensors]
    o = attend(copies)
    copies[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_hooks_see_what_is_saved_and_what_is_computed(in_python):
    tensors, seen = known(16), list[tuple[int, ...]]()
    expected = gradients(attend(tensors), tensors)
    python = len(in_python)

    def packed(tensor):
        seen.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        o = attend(tensors)
    o.register_hook(lambda gradient: 2 * gradient)
    doubled = gradients(o, tensors)
    assert seen == [*3 * [(2, 4, 9, 16)], (2, 4, 9, 16), (2, 4, 9)]
    assert all(torch.equal(one, 2 * other) for one, other in zip(doubled, expected, strict=True))
    again = checkpoint(attend, tensors, use_reentrant=False)
    found = gradients(again, tensors)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(in_python) == python


def test_modes_profiles_and_traces_see_known_gradients(tmp_path, in_python):
    tensors = known(15)
    o, python = attend(tensors), len(in_python)
    with torch.profiler.profile() as profile:
        gradients(o, tensors, keep=True)
    assert "catalog::bwd" in {event.key for event in profile.key_averages()}
    with trace(tmp_path / "calls.jsonl"):
        gradients(o, tensors, keep=True)
    assert [used.problem.op for used in read_trace(tmp_path / "calls.jsonl").used] == ["bwd"]
    assert len(in_python) == python + 2
    gradients(o, tensors)
    assert len(in_python) == python + 2


def test_threads_compute_gradients_at_once():
    tensors = known(14)
    expected = gradients(attend(tensors), tensors)
    equal = list[bool]()

    def work():
        for _ in range(20):
            own = leaves(14)
            found = gradients(attend(own), own)
            equal.append(all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == 80 * [True]


def test_nothing_outlives_the_graph():
    tensors = known(13)
    o = attend(tensors)
    alive = [weakref.ref(tensor) for tensor in (*tensors, o)]
    del tensors
    assert alive[0]() is not None  # the graph has it
    del o
    assert [one() for one in alive] == 4 * [None]


def test_without_a_module_there_is_a_message_and_python_goes_on(tmp_path, monkeypatch):
    source = tmp_path / "broken.cpp"
    source.write_text("#error no")
    monkeypatch.setattr(native, "folder", lambda: tmp_path / "torch")
    monkeypatch.setattr(native, "_SOURCE", source)
    with pytest.raises(BuildError, match=r"broken\.cpp does not compile") as refused:
        compile_calls()
    assert "#error no" in refused.value.log
    monkeypatch.setenv("CATALOG_CXX", "no-compiler")
    settings.cache_clear()
    with pytest.raises(ToolchainError, match="no-compiler is not a program"):
        compile_calls()
    assert not list(tmp_path.rglob("*.so"))
    native.load.cache_clear()
    tensors = leaves(12)
    attend(tensors).sum().backward()
    assert tensors[0].grad is not None
    monkeypatch.undo()
    native.load.cache_clear()
    assert native.load() is not None


def test_a_damaged_module_is_left_alone(tmp_path, monkeypatch, caplog):
    whole = compile_calls()
    monkeypatch.setattr(native, "folder", lambda: tmp_path)
    native._place().mkdir()
    (native._place() / whole.name).write_bytes(whole.read_bytes()[:4096])
    native.load.cache_clear()
    assert native.load() is None
    text = native._place() / f"{hashlib.sha256(b'text').hexdigest()}.so"
    text.write_bytes(b"text")
    native.load.cache_clear()
    assert native.load() is None
    assert "compiled calls are not used" in caplog.text
    monkeypatch.undo()
    native.load.cache_clear()
    assert native.load() is not None
