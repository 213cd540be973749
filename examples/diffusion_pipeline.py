"""A diffusion pipeline on the kernels: its images are those of PyTorch's attention, and a report counts the calls."""

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

import catalog.torch
from catalog.integrations import diffusers

SIZES = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 4, "sample_size": 16}
STEPS = 5

torch.manual_seed(0)
transformer = DiTTransformer2DModel(**SIZES, in_channels=4, out_channels=4).eval()
autoencoder = AutoencoderKL(block_out_channels=(64,)).eval()
pipeline = DiTPipeline(transformer, autoencoder, DDIMScheduler())  # of random weights: images are noise
pipeline.set_progress_bar_config(disable=True)


def images() -> np.ndarray:
    generator = torch.Generator().manual_seed(1)
    drawn = pipeline([207, 360], num_inference_steps=STEPS, generator=generator, output_type="np")
    return np.asarray(drawn.images)


expected = images()

diffusers.use(pipeline)
actual = images()
report = catalog.torch.report()
print(f"{len(actual)} images of {actual.shape[1]} x {actual.shape[2]}, off by {np.abs(actual - expected).max():.1e}")
print(report)
assert np.allclose(actual, expected, atol=1e-4)
assert report.pytorch == 0
assert report.catalog == STEPS * SIZES["num_layers"] + 1  # the decoder has one layer

diffusers.restore(pipeline)
assert np.array_equal(images(), expected)
