"""Channels last or first, and images that are parts of larger tensors: the same convolution without copies."""

import numpy as np

from catalog import Catalog
from catalog.ops.conv.problem import ConvProblem

N, C, K, SIZE = 3, 24, 40, 20

rng = np.random.default_rng(0)
clips = rng.standard_normal((N, 2, SIZE, SIZE, C), dtype=np.float32)  # two images of each clip
x = clips[:, 0]  # the first of each: images are dense, and have a gap between them
weight = rng.standard_normal((K, 3, 3, C), dtype=np.float32)

last = ConvProblem(n=N, c=C, k=K, size=(SIZE, SIZE), filter=(3, 3), pad=(1, 1), dtype="fp32", layout="nhwgc")
result = Catalog.select(last).run(input=x, weight=weight)
y = result.outputs["output"]
print(f"nhwgc  {y.shape}  {result.kernels[0]}")

first = last.model_copy(update={"layout": "ngchw"})
planes, filters = (np.ascontiguousarray(np.moveaxis(tensor, -1, 1)) for tensor in (x, weight))
result = Catalog.select(first).run(input=planes, weight=filters)
other = result.outputs["output"]
print(f"ngchw  {other.shape}  {result.kernels[0]}")

error = np.abs(np.moveaxis(other, 1, -1) - y).max()
print(f"they differ by {error:.1e}")
assert error < 1e-4

corner = y[:, :1, :1]  # sees two rows and two columns of the image, the others are padding
expected = np.einsum("nyxc,kyxc->nk", x[:, :2, :2].astype(np.float64), weight[:, 1:, 1:])
assert np.allclose(corner.reshape(N, K), expected, atol=1e-4)
