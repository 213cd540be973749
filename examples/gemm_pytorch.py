"""Matrix products for PyTorch: linear with a fused activation, matmul that broadcasts, gradients, a compiled graph."""

import torch

from catalog.torch import linear, matmul

torch.manual_seed(0)
x, weight, bias = torch.randn(4, 30, 64), torch.randn(128, 64) / 8, torch.randn(128)

y = linear(x, weight, bias, activation="gelu")
theirs = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
print(f"gelu(x W^T + bias)  {tuple(y.shape)}  off by {(y - theirs).abs().max():.1e}")
assert torch.allclose(y, theirs, atol=1e-4)

q, k = torch.randn(2, 8, 50, 64), torch.randn(2, 1, 50, 64)  # one k for 8 heads
scores = matmul(q, k.mT)
print(f"q k^T               {tuple(scores.shape)}  off by {(scores - q @ k.mT).abs().max():.1e}")
assert torch.allclose(scores, q @ k.mT, atol=1e-3)

weight.requires_grad_()
step = torch.compile(
    lambda x: linear(x, weight, bias, activation="silu").square().mean(), fullgraph=True, backend="eager"
)
(ours,) = torch.autograd.grad(step(x), weight)
loss = torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias)).square().mean()
(expected,) = torch.autograd.grad(loss, weight)
print(f"gradient of W       {tuple(ours.shape)}  off by {(ours - expected).abs().max():.1e}")
assert torch.allclose(ours, expected, atol=1e-5)
