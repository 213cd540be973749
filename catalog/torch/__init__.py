"""The catalog's kernels for PyTorch: functions with the signatures of PyTorch and flash-attn, and gradients.

``scaled_dot_product_attention`` replaces :func:`torch.nn.functional.scaled_dot_product_attention`, the functions
``flash_attn_...`` replace those of the package flash-attn, ``block_sparse_attention`` skips the blocks that a bitmap
leaves out, ``linear``, ``matmul`` and ``grouped_mm`` replace :func:`torch.nn.functional.linear`, :func:`torch.matmul`
and :func:`torch.nn.functional.grouped_mm`, ``scaled_mm`` and ``scaled_grouped_mm`` multiply 8-bit matrices with scales
as :func:`torch._scaled_mm` does, and ``conv1d``, ``conv2d`` and ``conv3d`` replace :func:`torch.nn.functional.conv2d`
and its like. CPU tensors run on the host's kernels, GPU tensors on those of the GPU's arch, in place, on PyTorch's
current stream. If no kernel supports a call, it raises a :class:`~catalog.errors.CatalogError`, which is a RuntimeError
like PyTorch's own errors, and also a ValueError where PyTorch raises one. There is no fallback to PyTorch's own
functions, unless the setting ``CATALOG_ALLOW_FOREIGN`` allows it where it was measured as faster.

``install`` replaces PyTorch's own function for a whole program, ``installed`` for a block. Both leave to PyTorch what
no kernel supports, and ``report`` counts it.

It needs the extra ``torch``; the rest of the package never imports it.
"""

from __future__ import annotations

from catalog.errors import MissingPackageError
from catalog.extras import how_to_install

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingPackageError(f"catalog.torch needs PyTorch ({error})", hint=how_to_install("torch")) from None

from catalog.torch.block_sparse import block_sparse_attention
from catalog.torch.cached import flash_attn_with_kvcache
from catalog.torch.conv import conv1d, conv2d, conv3d
from catalog.torch.flash import flash_attn_func, flash_attn_varlen_func
from catalog.torch.grouped import grouped_mm
from catalog.torch.installation import install, installed, report, uninstall
from catalog.torch.native import compile_calls
from catalog.torch.products import linear, matmul
from catalog.torch.scaled import scaled_grouped_mm, scaled_mm
from catalog.torch.sdpa import scaled_dot_product_attention
from catalog.torch.stacked import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "block_sparse_attention",
    "compile_calls",
    "conv1d",
    "conv2d",
    "conv3d",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "grouped_mm",
    "install",
    "installed",
    "linear",
    "matmul",
    "report",
    "scaled_dot_product_attention",
    "scaled_grouped_mm",
    "scaled_mm",
    "uninstall",
]
