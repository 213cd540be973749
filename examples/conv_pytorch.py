"""Convolutions for PyTorch: conv2d with gradients, in channels_last and under torch.compile, and depthwise conv1d."""

import torch

from catalog.torch import conv1d, conv2d

torch.manual_seed(0)
x = torch.randn(2, 16, 28, 28).to(memory_format=torch.channels_last)
weight, bias = torch.randn(24, 16, 3, 3, requires_grad=True), torch.randn(24)

y = conv2d(x, weight, bias, stride=2, padding=1)
theirs = torch.nn.functional.conv2d(x.double(), weight.double(), bias.double(), stride=2, padding=1)
print(f"conv2d              {tuple(y.shape)}  off by {(y - theirs).abs().max():.1e}")
assert torch.allclose(y, theirs.float(), atol=1e-4)
assert y.is_contiguous(memory_format=torch.channels_last)

(ours,) = torch.autograd.grad(y.square().mean(), weight)
(expected,) = torch.autograd.grad(theirs.square().mean(), weight)
print(f"gradient of weight  {tuple(ours.shape)}  off by {(ours - expected).abs().max():.1e}")
assert torch.allclose(ours, expected, atol=1e-5)

compiled = torch.compile(lambda image: conv2d(image, weight, bias, stride=2, padding=1).relu(), fullgraph=True)
error = (compiled(x) - theirs.relu()).abs().max()
print(f"compiled            off by {error:.1e}")
assert error < 1e-4

tones, filters = torch.randn(2, 32, 100), torch.randn(32, 1, 5)
y = conv1d(tones, filters, padding="same", groups=32)
theirs = torch.nn.functional.conv1d(tones.double(), filters.double(), padding="same", groups=32)
print(f"depthwise conv1d    {tuple(y.shape)}  off by {(y - theirs).abs().max():.1e}")
assert torch.allclose(y, theirs.float(), atol=1e-4)
