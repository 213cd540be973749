"""int8 convolution: exact sums in int32, and a layer of quantized images and weights.

An image has a scale, and each output channel of the weight has one. The sums times both are the layer's outputs.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from catalog import Catalog
from catalog.ops.conv.problem import ConvProblem

N, C, K, SIZE = 1, 32, 48, 28

rng = np.random.default_rng(0)
x = rng.standard_normal((N, SIZE, SIZE, C), dtype=np.float32)
weight = rng.standard_normal((K, 3, 3, C), dtype=np.float32)
of_image, of_channels = np.abs(x).max() / 127, np.abs(weight).max(axis=(1, 2, 3)) / 127
pixels = np.rint(x / of_image).astype(np.int8)
filters = np.rint(weight / of_channels[:, None, None, None]).astype(np.int8)

problem = ConvProblem(n=N, c=C, k=K, size=(SIZE, SIZE), filter=(3, 3), dtype="int8")
result = Catalog.select(problem).run(input=pixels, weight=filters)
sums = result.outputs["output"]
windows = sliding_window_view(pixels.astype(np.int64), (3, 3), (1, 2))
print(f"sums are {sums.dtype}, and exact  {result.kernels[0]}")
assert np.array_equal(sums, np.einsum("nhwcyx,kyxc->nhwk", windows, filters.astype(np.int64), optimize=True))

y = sums * of_image * of_channels
expected = np.einsum("nhwcyx,kyxc->nhwk", sliding_window_view(x, (3, 3), (1, 2)), weight, optimize=True)
error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
print(f"the layer is off by {error:.1%}")
assert error < 0.03
