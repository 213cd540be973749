"""A convolution and its gradients: checked against the definition.

The gradients of a convolution are convolutions too: one for the input, one for the weight.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from catalog import Catalog
from catalog.ops.conv.problem import ConvProblem

N, C, K, SIZE, FILTER, STRIDE, PAD = 2, 32, 48, 28, 3, 2, 1

rng = np.random.default_rng(0)
x = rng.standard_normal((N, SIZE, SIZE, C), dtype=np.float32)
weight = rng.standard_normal((K, FILTER, FILTER, C), dtype=np.float32)

problem = ConvProblem(
    n=N, c=C, k=K, size=(SIZE,) * 2, filter=(FILTER,) * 2, stride=(STRIDE,) * 2, pad=(PAD,) * 2, dtype="fp32"
)
result = Catalog.select(problem).run(input=x, weight=weight)
y = result.outputs["output"]
padded = np.pad(x.astype(np.float64), ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
windows = sliding_window_view(padded, (FILTER, FILTER), (1, 2))[:, ::STRIDE, ::STRIDE]
error = np.abs(y - np.einsum("nhwcyx,kyxc->nhwk", windows, weight, optimize=True)).max()
print(f"forward     {y.shape}  off by {error:.1e}  {result.kernels[0]}")
assert error < 1e-3

dy = rng.standard_normal(y.shape, dtype=np.float32)
of_weight = problem.model_copy(update={"direction": "bwd_weight"})
result = Catalog.select(of_weight).run(input=x, output=dy)
dw = result.outputs["weight"]
error = np.abs(dw - np.einsum("nhwcyx,nhwk->kyxc", windows, dy, optimize=True)).max()
print(f"bwd_weight  {dw.shape}  off by {error:.1e}  {result.kernels[0]}")
assert error < 1e-3

of_input = problem.model_copy(update={"direction": "bwd_data"})
result = Catalog.select(of_input).run(weight=weight, output=dy)
dx = result.outputs["input"]
dots = [np.vdot(one.astype(np.float64), other) for one, other in ((dx, x), (dw, weight), (dy, y))]
print(f"bwd_data    {dx.shape}  {result.kernels[0]}")
print("<dx, x> = <dw, w> = <dy, y>:", *(f"{dot:.3f}" for dot in dots))
assert np.allclose(dots, dots[0], rtol=1e-4)
