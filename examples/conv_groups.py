"""Groups of channels: a dense layer, one of 32 groups, and a depthwise one.

A group of output channels sees its own group of input channels only. Kernels of their own multiply no zeros between
groups.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from catalog import Catalog
from catalog.ops.conv.problem import ConvProblem

N, C, SIZE = 2, 128, 28

rng = np.random.default_rng(0)
x = rng.standard_normal((N, SIZE, SIZE, C), dtype=np.float32)
windows = sliding_window_view(np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0))), (3, 3), (1, 2))

for groups in (1, 32, C):
    weight = rng.standard_normal((C, 3, 3, C // groups), dtype=np.float32)
    problem = ConvProblem(n=N, c=C, k=C, g=groups, size=(SIZE, SIZE), filter=(3, 3), pad=(1, 1), dtype="fp32")
    result = Catalog.select(problem).run(input=x, weight=weight)
    grouped = windows.reshape(*windows.shape[:3], groups, C // groups, 3, 3)
    expected = np.einsum("nhwgcyx,gkyxc->nhwgk", grouped, weight.reshape(groups, C // groups, 3, 3, -1), optimize=True)
    error = np.abs(result.outputs["output"] - expected.reshape(x.shape)).max()
    print(f"{groups:>3} groups  {problem.flops / 1e6:>6.1f} MFLOP  off by {error:.1e}  {result.kernels[0]}")
    assert error < 1e-3
