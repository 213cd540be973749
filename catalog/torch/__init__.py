"""The catalog's attention for PyTorch: functions with PyTorch's and flash-attn's own signatures, and gradients.

``scaled_dot_product_attention`` takes the place of :func:`torch.nn.functional.scaled_dot_product_attention`,
``flash_attn_func`` and ``flash_attn_varlen_func`` that of the package flash-attn. CPU tensors run on the host's
kernels, GPU tensors on those of the GPU's arch, in place, on PyTorch's current stream. What no kernel can do raises an
error of the tree under :class:`~catalog.errors.CatalogError`, a RuntimeError as PyTorch's own errors are, and a
ValueError where PyTorch raises one. PyTorch's own attention never steps in.

It needs the extra ``torch``, and is imported by nobody else.
"""

from __future__ import annotations

from catalog.extras import how_to_install

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(f"catalog.torch needs PyTorch ({error}). {how_to_install('torch')}") from None

from catalog.torch.flash import flash_attn_func, flash_attn_varlen_func
from catalog.torch.sdpa import scaled_dot_product_attention

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "scaled_dot_product_attention"]
