"""Models of Hugging Face diffusers on the kernels: outputs and gradients are those of PyTorch's own attention.

Models are tiny and have random weights. Outputs are about 1, of a few float32 sums of at most 512 products.
"""

from __future__ import annotations

import importlib
import sys

import pytest
from conftest import missing

try:
    import diffusers
    import torch
except ImportError:
    missing("diffusers")

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from diffusers.models.attention_processor import Attention, IPAdapterAttnProcessor2_0
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from catalog import torch as ours
from catalog.errors import MissingPackageError, SelectionError, UnsupportedArgumentError, UsageError
from catalog.integrations import diffusers as integration

pytestmark = pytest.mark.slow

TOKENS, IMAGE = 7, 8
HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
JOINT = HEADS | {"in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32}
UNET = {
    "sample_size": IMAGE,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "attention_head_dim": 4,
}
CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 32,
}
ADDED = {
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Counts at zero, and the dispatcher as it was afterwards."""
    diffusers.utils.logging.set_verbosity_error()
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE)
    ours.support.counts.clear()
    torch.manual_seed(0)


def padded():
    """Which tokens of two texts are real."""
    return torch.arange(TOKENS) < torch.tensor([[TOKENS], [4]])


def text(width=32):
    return torch.randn(2, TOKENS, width)


def picture():
    return torch.randn(2, 4, IMAGE, IMAGE)


def unet(**options):
    model = diffusers.UNet2DConditionModel(**UNET | CROSS | options)
    return model, {
        "sample": picture(),
        "timestep": 3,
        "encoder_hidden_states": text(),
        "encoder_attention_mask": padded(),
    }


def dit():
    sizes = HEADS | {"sample_size": IMAGE, "num_layers": 1, "norm_num_groups": 4, "caption_channels": 32}
    model = diffusers.PixArtTransformer2DModel(
        **sizes, out_channels=4, cross_attention_dim=32, use_additional_conditions=False
    )
    return model, {
        "hidden_states": picture(),
        "encoder_hidden_states": text(),
        "timestep": torch.tensor([3, 5]),
        "encoder_attention_mask": padded(),
    }


def vae():
    model = diffusers.AutoencoderKL(block_out_channels=(512,), latent_channels=4)
    return model, {"sample": torch.randn(1, 3, IMAGE, IMAGE)}


def sd3():
    model = diffusers.SD3Transformer2DModel(
        **JOINT, sample_size=IMAGE, num_layers=2, caption_projection_dim=32, out_channels=4
    )
    return model, {
        "hidden_states": picture(),
        "encoder_hidden_states": text(),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([3, 5]),
    }


def flux():
    model = diffusers.FluxTransformer2DModel(
        **JOINT, patch_size=1, num_layers=1, num_single_layers=1, axes_dims_rope=(4, 4, 8)
    )
    return model, {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": text(),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.1, 0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(TOKENS, 3),
    }


MODELS = {
    "unet": unet,
    "unet_added_kv": lambda: unet(**ADDED),
    "vae": vae,
    "dit": dit,
    "sd3": sd3,
    "flux": flux,
}


def made(kind):
    model, inputs = MODELS[kind]()
    return model.eval(), inputs


class Calls(TorchFunctionMode):
    """Counts the calls of PyTorch's attention."""

    number = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.number += function is functional.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


def output(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def gradients(model, inputs):
    model.zero_grad()
    model(**inputs).sample.square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_model(kind):
    """Kernels answer every call that PyTorch's attention got, forward and backward, until the model is restored."""
    model, inputs = made(kind)
    with Calls() as calls:
        expected = output(model, inputs)
    slopes = gradients(model, inputs)
    integration.use(model, strict=True)
    close(output(model, inputs), expected)
    assert ours.report() == ours.support.Report(catalog=calls.number)
    assert calls.number > 0
    close(gradients(model, inputs), slopes)
    integration.restore(model)
    seen = ours.report()
    assert torch.equal(output(model, inputs), expected)
    assert ours.report() == seen


def test_processors_of_unets():
    """A processor that a user sets; and plain ones, which do not call PyTorch's function."""
    model, inputs = made("unet")
    expected = output(model, inputs)
    model.set_attn_processor(integration.CatalogAttnProcessor(strict=True))
    close(output(model, inputs), expected)
    answered = ours.report().catalog
    assert answered > 0
    integration.restore(model)
    model.set_default_attn_processor()
    output(model, inputs)
    assert ours.report().catalog == answered
    integration.use(model)
    close(output(model, inputs), expected)
    assert ours.report() == ours.support.Report(catalog=2 * answered)


def test_a_processor_keeps_its_weights():
    """Those of an IP adapter attend twice: to the text and to an image."""
    layer = Attention(32, cross_attention_dim=32, heads=2, dim_head=16)
    layer.set_processor(IPAdapterAttnProcessor2_0(32, cross_attention_dim=32, num_tokens=(4,)))
    x, condition = torch.randn(2, 9, 32), (text(), [torch.randn(2, 1, 4, 32)])
    weights = dict(layer.named_parameters())
    expected = layer(x, condition)
    integration.use(layer, strict=True)
    close(layer(x, condition), expected)
    assert ours.report() == ours.support.Report(catalog=2)
    assert dict(layer.named_parameters()) == weights
    assert isinstance(layer.processor, IPAdapterAttnProcessor2_0)


def test_pipeline():
    transformer = diffusers.DiTTransformer2DModel(
        **HEADS, in_channels=4, out_channels=4, sample_size=IMAGE, num_layers=1, num_embeds_ada_norm=1000
    )
    autoencoder = diffusers.AutoencoderKL(block_out_channels=(32,), latent_channels=4)
    pipeline = diffusers.DiTPipeline(transformer.eval(), autoencoder.eval(), diffusers.DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)

    def images():
        generator = torch.Generator().manual_seed(0)
        return torch.tensor(pipeline([1], num_inference_steps=2, generator=generator, output_type="np").images)

    expected = images()
    integration.use(pipeline)
    close(images(), expected)
    assert ours.report() == ours.support.Report(catalog=3)


CALLS = {
    "keys of each sequence": ({"attn_mask": padded()}, 4, 4),
    "keys of each query": ({"attn_mask": (torch.rand(2, 1, 9, TOKENS) < 0.7) | (torch.arange(TOKENS) < 1)}, 4, 4),
    "bias": ({"attn_mask": torch.randn(2, 4, 9, TOKENS)}, 4, 4),
    "causal": ({"is_causal": True, "scale": 0.3}, 4, 4),
    "grouped heads": ({"enable_gqa": True}, 4, 2),
}


@pytest.mark.parametrize("case", CALLS)
def test_dispatched_call(case):
    options, heads, heads_k = CALLS[case]
    q, k, v = (torch.randn(2, n, h, 16) for n, h in ((9, heads), (TOKENS, heads_k), (TOKENS, heads_k)))
    expected = dispatch_attention_fn(q, k, v, **options)
    integration.register()
    with diffusers.attention_backend("catalog_strict"):
        close(dispatch_attention_fn(q, k, v, **options), expected)
    assert ours.report() == ours.support.Report(catalog=1)


def test_backend_of_a_model():
    model, inputs = made("flux")
    expected = output(model, inputs)
    integration.register()
    model.set_attention_backend("catalog")
    close(output(model, inputs), expected)
    assert ours.report() == ours.support.Report(catalog=2)


@pytest.mark.parametrize("kind", ["unet", "flux"])
def test_what_no_kernel_supports(kind):
    model, inputs = made(kind)
    model = model.double()
    inputs = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    expected = output(model, inputs)
    integration.use(model)
    assert torch.equal(output(model, inputs), expected)
    seen = ours.report()
    assert seen.catalog == 0
    assert seen.pytorch > 0
    assert all("float64" in reason for reason in seen.reasons)
    integration.use(model, strict=True)
    with pytest.raises(SelectionError, match="float64"):
        output(model, inputs)


def test_what_is_refused(monkeypatch):
    q = torch.randn(1, 9, 2, 16)
    integration.register()
    with diffusers.attention_backend("catalog"), pytest.raises(UnsupportedArgumentError, match="LSE"):
        dispatch_attention_fn(q, q, q, attention_kwargs={"return_lse": True})
    with pytest.raises(UsageError, match="no attention processors"):
        integration.use(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="not str"):
        integration.use("unet")
    monkeypatch.delitem(sys.modules, integration.__name__)
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)  # as before diffusers 0.35
    with pytest.raises(MissingPackageError, match=r"needs diffusers 0\.37"):
        importlib.import_module(integration.__name__)


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_compiled_model(kind):
    model, inputs = made(kind)
    expected, slopes = output(model, inputs), gradients(model, inputs)
    integration.use(model, strict=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(output(compiled, inputs), expected)
    close(gradients(compiled, inputs), slopes)
    seen = ours.report()
    assert seen.catalog > seen.pytorch == 0
