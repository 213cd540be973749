"""The paged cache of servers: steps against the same in float64, and a server against eager attention.

Head dims are below 32, as in test_torch.py: few kernels are compiled.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from conftest import missing, slow_but

from catalog.errors import ArgumentError, TensorError, UsageError

try:
    import torch
except ImportError:
    missing("torch")

from torch_cases import bottom_right, close, flash64, normal

from catalog.integrations.paged import CachedSequence, PagedCache

HEADS, HEADS_K, HDIM, PAGE = 4, 2, 8, 4
OPTIONS = {"scale": 0.3, "window_left": 5, "soft_cap": 4.0}


class Tokens:
    """Sequences in a cache of two layers with all their K and V, which steps take in parts."""

    def __init__(self, lengths, pages=40, dtype=torch.float32):
        self.cache = PagedCache(2, pages, PAGE, HEADS_K, HDIM, dtype=dtype)
        self.dtype = torch.bfloat16 if dtype == FP8 else dtype
        self.sequences = [CachedSequence() for _ in lengths]
        self.k, self.v = (
            [normal(length, HEADS_K, HDIM, seed=seed + i).to(dtype).to(self.dtype) for i, length in enumerate(lengths)]
            for seed in (10, 50)
        )

    def batch(self, counts):
        """The batch of these numbers of new tokens, by the place of the sequence."""
        batch = [(self.sequences[i], count) for i, count in counts.items()]
        assert all(self.cache.grow(*each) for each in batch)
        return batch

    def check(self, step, counts, **options):
        """Compare a step that was planned for these tokens with float64, in both layers."""
        rows = {i: slice(self.sequences[i].length - count, self.sequences[i].length) for i, count in counts.items()}
        unused = len(step.slots) - sum(counts.values())
        q = normal(len(step.slots), HEADS, HDIM, dtype=self.dtype)
        k, v = (torch.cat([each[i][row] for i, row in rows.items()] + [each[0][:unused]]) for each in (self.k, self.v))
        for layer in range(2):
            found = step.forward(layer, q, k, v, **options)
            start = 0
            for i, row in rows.items():
                mine = slice(start, start + counts[i])
                start += counts[i]
                seen = bottom_right(counts[i], row.stop, options.get("window_left", -1), 0)
                k_all, v_all = (each[i][None, : row.stop] for each in (self.k, self.v))
                o, lse = flash64(q[None, mine], k_all, v_all, seen, changed(options))
                close(found.o[mine], o[0], q.dtype)
                close(found.lse[mine], lse[0].T, q.dtype)


def changed(options):
    """What becomes of scores that have the default scale."""
    factor, cap = options.get("scale", HDIM**-0.5) * HDIM**0.5, options.get("soft_cap")
    return lambda scores: cap * torch.tanh(scores * factor / cap) if cap else scores * factor


PLAIN, FP8 = ({}, torch.float32), torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("options", "dtype"),
    slow_but([PLAIN, ({}, FP8)], [PLAIN, (OPTIONS, torch.float32), ({}, torch.bfloat16), ({}, FP8), (OPTIONS, FP8)]),
)
def test_steps_of_prompts_parts_of_prompts_and_decoded_tokens(options, dtype):
    tokens = Tokens([9, 30, 3, 17], dtype=dtype)
    for counts in ({0: 8, 1: 20}, {0: 1, 1: 9, 2: 2}, {2: 1, 1: 1, 3: 16}, {3: 1}):
        step = tokens.cache.plan(tokens.batch(counts))
        assert (step.decoded, step.chunks) == (
            sum(count == 1 for count in counts.values()),
            tuple(count for count in counts.values() if count > 1),
        )
        tokens.check(step, counts, **options)


def test_a_fixed_step_serves_other_sequences_where_its_tensors_are():
    tokens = Tokens([9, 30, 3])
    first = {i: len(k) - 2 for i, k in enumerate(tokens.k)}
    tokens.check(tokens.cache.plan(tokens.batch(first)), first)
    step = tokens.cache.fixed_step(sequences=4, tokens=32)
    where = [step.positions.data_ptr(), step.slots.data_ptr(), step.table.data_ptr(), step.lengths.data_ptr()]
    for counts in ({0: 1, 1: 1, 2: 1}, {1: 1}):
        step.refill(tokens.batch(counts))
        tokens.check(step, counts)
    assert where == [step.positions.data_ptr(), step.slots.data_ptr(), step.table.data_ptr(), step.lengths.data_ptr()]
    assert [each.length for each in tokens.sequences] == [8, 30, 2]


def test_pages_are_taken_and_given_back():
    cache = PagedCache(1, 6, PAGE, 1, HDIM)
    one, other = CachedSequence(), CachedSequence()
    assert cache.grow(one, 3 * PAGE)
    assert not cache.grow(other, 2 * PAGE + 1)
    assert (len(one.pages), other.pages, cache.free_pages) == (3, [], 2)
    cache.release(one)
    assert cache.grow(other, 5 * PAGE)
    assert sorted(other.pages) == [1, 2, 3, 4, 5], "page 0 is kept back"


def test_what_does_not_fit_is_refused_with_a_remedy():
    tokens = Tokens([9, 9])
    batch = tokens.batch({0: 3, 1: 1})
    q, k = normal(4, HEADS, HDIM), normal(4, HEADS_K, HDIM)
    for wrong, message in (
        ([], "at least one sequence"),
        ([(tokens.sequences[0], 5)], "0 tokens, 5 new ones, and pages for 4"),
        ([(tokens.sequences[0], 0)], "0 new ones"),
    ):
        with pytest.raises(ArgumentError, match=message):
            tokens.cache.plan(wrong)
    with pytest.raises(ArgumentError, match=r"fixed_step"):
        tokens.cache.fixed_step(2, 8).refill(batch)
    with pytest.raises(ArgumentError, match="pages=1"):
        PagedCache(1, 1, PAGE, 1, HDIM)
    assert [each.length for each in tokens.sequences] == [0, 0]
    step = tokens.cache.plan(batch)
    for arguments, error, message in (
        ((0, q[:3], k, k), TensorError, "the step has 4 tokens"),
        ((0, q, k.double(), k), TensorError, "k torch.float64"),
        ((2, q, k, k), ArgumentError, "2 layers"),
        ((0, q.requires_grad_(), k, k), UsageError, "no gradient"),
    ):
        with pytest.raises(error, match=message):
            step.forward(*arguments)


@pytest.fixture(scope="module")
def example():
    """The server of the example."""
    if importlib.util.find_spec("transformers") is None:
        missing("transformers")
    path = Path(__file__).parent.parent / "examples" / "continuous_batching.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_a_servers_tokens_are_those_of_eager_attention(example, kind):
    """Also with windows, soft caps and sinks; 64 requests of the Llama, and so few pages that some must start again."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    windowed = {"sliding_window": 8, "query_pre_attn_scalar": 16} if kind == "gemma2" else {"sliding_window": 8}
    config = AutoConfig.for_model(
        kind,
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        **({} if kind == "llama" else windowed),
        **({"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "gpt_oss" else {}),
    )
    example.transformers.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=example.transformers.PAGED).eval()
    count, pages = (64, 8) if kind == "llama" else (8, 5)
    prompts = torch.randint(3, 99, (count, 40), generator=torch.Generator().manual_seed(2)).tolist()
    requests = [example.Request(i // 2, prompt[: 1 + 7 * i % 40], 3 + i % 9) for i, prompt in enumerate(prompts)]
    cache = PagedCache(2, pages, 16, 2, 16)
    server = example.Server(model, cache, budget=24, longest=64)
    example.serve(server, requests)
    model.set_attn_implementation("eager")
    assert all(example.eager_tokens(model, request) == request.generated for request in requests)
    assert server.preemptions > 0
    assert 0 < server.fixed_steps < server.steps
    assert cache.free_pages == pages - 1
