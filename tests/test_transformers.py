"""Models of Hugging Face transformers on the kernels: logits, tokens and gradients are those of eager attention."""

from __future__ import annotations

import pytest
from conftest import missing

try:
    import torch
    import transformers
except ImportError:
    missing("transformers")

from catalog import torch as ours
from catalog.errors import SelectionError
from catalog.integrations import transformers as integration
from catalog.integrations.masks import LazyMask, mask

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"head_dim": 16, "sliding_window": 8}
DECODERS = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES | {"head_dim": 16},
    "mistral": SIZES | {"sliding_window": 8},
    "gemma2": SIZES | WINDOW | {"query_pre_attn_scalar": 16},
    "gemma3_text": SIZES | WINDOW | {"query_pre_attn_scalar": 16},
    "gpt_oss": SIZES | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99, "pad_token_id": 0, "eos_token_id": 2},
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
INDEXER = {"index_topk": 6, "index_n_heads": 2, "index_head_dim": 32}
BLOCKS = {"index_block_size": 4, "index_topk_blocks": 2, "index_local_blocks": 1}
EXTRAS = {
    "inkling2_text": {"num_key_value_heads": 2, "head_dim": 16},  # a sink for each query
    "deepseek_v32": LATENT | INDEXER | {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},  # chosen keys
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse"] * 2} | INDEXER | BLOCKS,  # chosen blocks of keys
}
"""Models whose attention takes arguments of its own."""
LENGTH = 21
LEFT = torch.ones(3, LENGTH, dtype=torch.int64)
LEFT[0, :6], LEFT[2, :3] = 0, 0


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Registered, and counts at zero."""
    transformers.logging.set_verbosity_error()
    integration.register()
    ours.support.counts.clear()
    torch.manual_seed(0)


def tokens():
    return torch.randint(3, 99, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def both(model, call):
    """What a call gives with eager attention and with the catalog's."""
    results = []
    for implementation in ("eager", integration.NAME):
        model.set_attn_implementation(implementation)
        results.append(call(model))
    return results


def agree(model, call):
    expected, actual = both(model, call)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def config_of(kind, **fields):
    return transformers.AutoConfig.for_model(kind, **fields)


def decoder(kind):
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **DECODERS[kind])).eval()
    with torch.no_grad():  # as new, sinks and scales are constants
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2 * (parameter.dim() < 2))
    return model


@pytest.mark.parametrize("kind", DECODERS)
def test_decoder(kind):
    """Logits of whole and padded batches, tokens of growing and static caches, gradients."""
    model, ids = decoder(kind), tokens()
    with torch.no_grad():
        agree(model, lambda model: model(ids).logits)
        for padding in (LEFT, LEFT.flip(1)):
            agree(model, lambda model, padding=padding: model(ids, attention_mask=padding).logits[padding.bool()])
        options = {"attention_mask": LEFT, "max_new_tokens": 5, "do_sample": False, "disable_compile": True}
        for cache in ({}, {"cache_implementation": "static"}):
            expected, actual = both(model, lambda model, cache=cache: model.generate(ids, **options, **cache))
            assert torch.equal(actual, expected)
    labels = ids.masked_fill(LEFT == 0, -100)
    labels[0, 6] = labels[2, 3] = -100  # the logits before them are of padding

    def gradients(model):
        model.zero_grad()
        model(ids, attention_mask=LEFT, labels=labels).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    agree(model, gradients)
    seen = ours.report()
    assert seen.catalog > seen.pytorch
    assert all("soft" in reason for reason in seen.reasons), str(seen)


@pytest.mark.parametrize("kind", EXTRAS)
def test_arguments_that_change_the_result(kind):
    config = config_of(kind, **SIZES | EXPERTS | EXTRAS[kind])
    model, ids = transformers.AutoModelForCausalLM.from_config(config).eval(), tokens()
    with torch.no_grad():
        agree(model, lambda model: model(ids).logits)
        if "index_topk_blocks" not in EXTRAS[kind]:  # such an indexer reads padding
            agree(model, lambda model: model(ids, attention_mask=LEFT).logits[LEFT.bool()])
    assert ours.report().pytorch == 0


def test_an_unknown_argument_leaves_a_call_to_the_model():
    """Attention of a module that has it at hand, as transformers' models do."""
    model, ids = decoder("llama"), tokens()
    layer = model.model.layers[0].self_attn
    q, k, v = (torch.randn(1, 4, 9, 16) for _ in range(3))
    integration.attend(layer, q, k[:, :2], v[:, :2], None, scaling=0.25, position_ids=ids[:1, :9])
    assert (ours.report().catalog, ours.report().pytorch) == (1, 0)
    integration.attend(layer, q, k[:, :2], v[:, :2], None, scaling=0.25, temperature=torch.ones(4))
    assert list(ours.report().reasons) == ["no kernel knows the argument temperature of this model's attention"]


def test_masks_reach_the_attention_that_takes_over():
    """No kernel computes in float64. Where a mask is causal and nothing else, PyTorch's kernels need no elements."""
    layer = decoder("llama").model.layers[0].self_attn
    q, k, v = (torch.randn(3, heads, LENGTH, 16, dtype=torch.float64) for heads in (4, 2, 2))
    sizes = {"batch_size": 3, "q_length": LENGTH, "kv_length": LENGTH}
    for padding in (None, LEFT.bool()):
        o, _ = integration.attend(layer, q, k, v, mask(**sizes, attention_mask=padding), scaling=0.25)
        seen = transformers.masking_utils.sdpa_mask(**sizes, attention_mask=padding, allow_is_causal_skip=False)
        keys, values = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, seen, scale=0.25).transpose(1, 2)
        rows = slice(None) if padding is None else padding
        torch.testing.assert_close(o[rows], expected[rows])
    assert (ours.report().catalog, ours.report().pytorch) == (0, 2)


def test_encoders_and_both():
    ids, padding = tokens(), LEFT.flip(1)
    layers = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = transformers.AutoModel.from_config(config_of("bert", vocab_size=99, **layers)).eval()
    vit = transformers.AutoModel.from_config(config_of("vit", image_size=64, patch_size=16, **layers)).eval()
    specials = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    t5 = config_of("t5", d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=99, **specials)
    t5 = transformers.AutoModelForSeq2SeqLM.from_config(t5).eval()
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    sides |= specials | {"num_mel_bins": 8, "max_source_positions": 30}
    # Its decoder's layers say that they are not causal.
    pegasus = config_of("pegasus_x", d_model=64, vocab_size=99, block_size=8, num_global_tokens=4, **sides)
    pegasus = transformers.AutoModelForSeq2SeqLM.from_config(pegasus).eval()
    whisper = config_of("whisper", d_model=64, vocab_size=99, **sides)
    whisper = transformers.WhisperForConditionalGeneration._from_config(whisper).eval()
    images, sound = torch.randn(2, 3, 64, 64), torch.randn(2, 8, 60)
    with torch.no_grad():
        agree(bert, lambda model: model(ids, attention_mask=padding).last_hidden_state[padding.bool()])
        agree(vit, lambda model: model(images).last_hidden_state)
        for shift in (0, 4):  # as many queries as keys, and fewer
            batch = {"input_ids": ids, "attention_mask": padding, "decoder_input_ids": ids.flip(1)[:, shift:]}
            for both_ways in (t5, pegasus):
                agree(both_ways, lambda model, batch=batch: model(**batch).logits)
        agree(whisper, lambda model: model(input_features=sound, decoder_input_ids=ids[:2]).logits)
    assert ours.report().pytorch == 0


def test_compiled_models():
    model, ids = decoder("llama"), tokens()
    with torch.no_grad():
        agree(model, lambda model: torch.compile(model, fullgraph=True)(ids, attention_mask=LEFT).logits[LEFT.bool()])
        options = {"attention_mask": LEFT, "max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
        expected, actual = both(model, lambda model: model.generate(ids, **options))
        assert torch.equal(actual, expected)


def test_what_no_kernel_supports():
    """A soft cap beside an elementwise mask: the model's own attention, or an error if that is wanted."""
    model, ids = decoder("gemma2"), tokens()
    shown = torch.rand(3, 1, LENGTH, LENGTH) < 0.7
    shown |= torch.eye(LENGTH, dtype=torch.bool)
    scores = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    with torch.no_grad():
        agree(model, lambda model: model(ids, attention_mask=scores).logits)
        assert ours.report().pytorch == 2
        integration.register(strict=True)
        with pytest.raises(SelectionError, match="soft"):
            model(ids, attention_mask=scores)


def test_masks_are_few_numbers_until_somebody_looks(monkeypatch):
    """A padded batch's mask has no elements; whoever reads them gets transformers' own."""
    sizes = {"batch_size": 3, "q_length": LENGTH, "kv_length": LENGTH}
    own = transformers.masking_utils.sdpa_mask(**sizes, attention_mask=LEFT.bool(), allow_is_causal_skip=False)
    lazy = mask(**sizes, attention_mask=LEFT.bool())
    assert isinstance(lazy, LazyMask)
    assert lazy.shape == own.shape
    assert lazy.shows.sequences.runs == ((6, LENGTH), (0, LENGTH), (3, LENGTH))
    assert torch.equal(lazy & True, own)
    assert mask(**sizes, attention_mask=torch.ones(3, LENGTH, dtype=torch.bool)).shows.causal
    assert mask(**sizes | {"q_length": 1, "q_offset": LENGTH - 1}) is None
    gap = LEFT.bool()
    gap[1, 5] = False
    assert type(mask(**sizes, attention_mask=gap)) is torch.Tensor
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert mask(**sizes, config=config_of("llama")) is None
    assert type(mask(**sizes, config=config_of("pegasus_x"))) is torch.Tensor
