"""What the catalog asks of PyTorch, with tensors in the memory of a fake CUDA runtime."""

from __future__ import annotations

import math
import types
from types import SimpleNamespace

import numpy as np
from fake_gpu import held

from catalog.runtime.devices.gpu.resources import Memory


class Tensor:
    is_cuda, requires_grad, layout = True, False, "strided"

    def __init__(self, memory, shape, dtype, index, step=1):
        self.memory, self.shape, self.dtype, self.index = memory, tuple(shape), dtype, index
        self.strides = tuple(step * math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def data_ptr(self):
        return self.memory.handle

    @property
    def device(self):
        return "cuda", self.index

    def stride(self):
        return self.strides

    def get_device(self):
        return self.index

    def numel(self):
        return math.prod(self.shape)

    def is_neg(self):
        return False

    def __dlpack_device__(self):
        return 2, self.index

    def __dlpack__(self, *, stream):
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    def numpy(self):
        """What the tensor holds, to read and write: a real one's would be out of reach."""
        return held(self.memory, np.empty(self.shape, str(self.dtype).removeprefix("torch.")))


class FakeTorch(types.ModuleType):
    """The module; ``current`` has the current stream of each GPU."""

    Tensor, strided = Tensor, "strided"

    def __init__(self, runtime):
        super().__init__("torch")
        self.runtime, self.current = runtime, {0: 0, 1: 0}
        self.version = SimpleNamespace(cuda="13.0", hip=None)
        self.cuda = SimpleNamespace(is_initialized=lambda: True)
        self._C = SimpleNamespace(_cuda_getCurrentRawStream=self.current.__getitem__)
        for name in ("float16", "float32", "bfloat16", "uint8", "int32", "complex64"):
            setattr(self, name, f"torch.{name}")

    def device(self, kind, index):
        return kind, index

    def empty(self, *extents, dtype, device):
        shape = extents if all(isinstance(extent, int) for extent in extents) else extents[0]
        size = math.prod(shape) * np.dtype(dtype.removeprefix("torch.")).itemsize
        index = device[1]
        return Tensor(Memory(self.runtime, index, size), shape, dtype, index)

    def zeros(self, *extents, dtype, device):
        tensor = self.empty(*extents, dtype=dtype, device=device)
        tensor.numpy()[...] = 0
        return tensor

    def tensor(self, array, index=0):
        tensor = self.empty(array.shape, dtype=f"torch.{array.dtype.name}", device=("cuda", index))
        tensor.numpy()[...] = array
        return tensor
