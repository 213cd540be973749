"""FlashInfer's wrapper of multi-head latent attention (MLA), which no kernel computes."""

from __future__ import annotations

from typing import Any

from catalog.errors import UnsupportedArgumentError


class BatchMLAPagedAttentionWrapper:
    """Refused: a head of MLA has 512 elements of the compressed K and V, and 64 that are rotated, in another tensor.

    Q and K would have head dim 576, and the kernels of the catalog end at 512 on CPUs and at 256 on GPUs; and K is one
    tensor for all of them.

    Args:
        args: as FlashInfer's.
        options: likewise.

    Raises:
        UnsupportedArgumentError: always, a ``NotImplementedError``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        raise UnsupportedArgumentError(
            "no kernel of the catalog computes multi-head latent attention: Q and K would have head dim 576, in two "
            "tensors",
            hint="Multiply the compressed K and V by their projections, and use BatchPrefillWithRaggedKVCacheWrapper "
            "(head_dim_qk=192, head_dim_vo=128).",
        )
