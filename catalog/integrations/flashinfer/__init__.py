"""Attention with FlashInfer's Python interface, computed by the catalog's kernels; FlashInfer need not be installed.

``from catalog.integrations import flashinfer`` replaces ``import flashinfer`` for :func:`single_prefill_with_kv_cache`,
:func:`single_decode_with_kv_cache`, :func:`fast_decode_plan`, and the wrappers of batches over pages, over packed K and
V, and of multi-head latent attention. A wrapper's ``plan`` selects and builds the kernels, and ``run`` launches them;
both also take tensors on the CPU, and float32.

K and V are in FlashInfer's layouts: ``NHD``, (tokens, heads, head dim), or ``HND``, (heads, tokens, head dim). Neither
is copied if the head dim is dense, the type is that of Q, and K is not to be rotated. LSE is FlashInfer's: of base 2,
float32, with tokens before heads. What only says how FlashInfer computes (``backend``, ``use_tensor_cores``,
``use_fp16_qk_reduction``, ``non_blocking``, sizes of splits) has no effect. Arguments that no kernel follows raise an
:class:`~catalog.errors.UnsupportedArgumentError`, which is a ``NotImplementedError``.

Only :func:`single_prefill_with_kv_cache` and :class:`BatchPrefillWithRaggedKVCacheWrapper` have gradients.
"""

from __future__ import annotations

from catalog.errors import MissingPackageError
from catalog.extras import how_to_install

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingPackageError(
        f"catalog.integrations.flashinfer needs PyTorch ({error})", hint=how_to_install("torch")
    ) from None

from catalog.integrations.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from catalog.integrations.flashinfer.mla import BatchMLAPagedAttentionWrapper
from catalog.integrations.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from catalog.integrations.flashinfer.single import single_decode_with_kv_cache, single_prefill_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
]
