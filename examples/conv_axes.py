"""One and three axes: audio with a dilated filter, and a clip of video with a stride."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from catalog import Catalog
from catalog.ops.conv.problem import ConvProblem

rng = np.random.default_rng(0)

audio = ConvProblem(n=2, c=16, k=24, size=(400,), filter=(3,), dilation=(4,), pad=(4,), dtype="fp32")
x, weight = (rng.standard_normal(audio.shapes[name], dtype=np.float32) for name in ("input", "weight"))
y = Catalog.select(audio).run(input=x, weight=weight).outputs["output"]
padded = np.pad(x.astype(np.float64), ((0, 0), (4, 4), (0, 0)))
expected = sum(padded[:, 4 * tap : 4 * tap + 400] @ weight[:, tap].T for tap in range(3))
error = np.abs(y - expected).max()
print(f"{audio.name}  {y.shape}  off by {error:.1e}")
assert error < 1e-3

clip = ConvProblem(n=1, c=8, k=12, size=(8, 14, 14), filter=(3, 3, 3), stride=(1, 2, 2), pad=(1, 1, 1), dtype="fp32")
x, weight = (rng.standard_normal(clip.shapes[name], dtype=np.float32) for name in ("input", "weight"))
y = Catalog.select(clip).run(input=x, weight=weight).outputs["output"]
padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (1, 1), (0, 0)))
windows = sliding_window_view(padded, (3, 3, 3), (1, 2, 3))[:, :, ::2, ::2]
error = np.abs(y - np.einsum("ndhwczyx,kzyxc->ndhwk", windows, weight, optimize=True)).max()
print(f"{clip.name}  {y.shape}  off by {error:.1e}")
assert error < 1e-3
