"""What FlashInfer's custom masks and ALiBi add to the scores of packed queries, and to their LSE."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

from catalog.errors import ArgumentError
from catalog.integrations.flashinfer.positions import places, slopes_of
from catalog.torch.calls import Options

Lengths = tuple[int, ...]


class Added(NamedTuple):
    """What is added to scores; at most one of ``bias`` and ``slopes``.

    ``bias`` is (heads, queries, keys), of the type of Q, ``slopes`` is (1, heads), float32, for the kernels' own ALiBi.
    ``shift`` is (queries, heads), float32: the natural LSE that kernels return lacks it.
    """

    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    @property
    def word(self) -> Literal["no", "bias", "alibi"]:
        """The problem's word for it."""
        return "bias" if self.bias is not None else "no" if self.slopes is None else "alibi"

    @property
    def axes(self) -> Literal["1h", "bh"]:
        """The axes that it has."""
        return "1h" if self.bias is None else "bh"

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Its tensors by the names of a problem."""
        tensors = (("bias", self.bias), ("alibi_slopes", self.slopes))
        return [(name, tensor) for name, tensor in tensors if tensor is not None]

    def lse(self, lse: torch.Tensor) -> torch.Tensor:
        """The LSE of the scores, (queries, heads), from that of the kernels."""
        return lse if self.shift is None else lse + self.shift


class Batch(NamedTuple):
    """Packed queries and their keys: heads of Q, lengths of the sequences, and the longest one that fits a bias."""

    heads: int
    lengths_q: Lengths
    lengths_k: Lengths
    keys: int


def check_pairs(lengths_q: Lengths, lengths_k: Lengths) -> None:
    """Check that there are as many sequences of keys as of queries.

    Raises:
        ArgumentError: there are not.
    """
    if len(lengths_q) != len(lengths_k):
        raise ArgumentError(
            f"qo_indptr has {len(lengths_q)} sequences, and kv_indptr has {len(lengths_k)}: expected the same number"
        )


def mask_of(
    custom_mask: torch.Tensor | None, packed: torch.Tensor | None, lengths_q: Lengths, lengths_k: Lengths
) -> list[torch.Tensor] | None:
    """The custom masks of a batch, (queries, keys) of bools for each sequence; None if there are none.

    Args:
        custom_mask: bool, the masks of all sequences, row by row, one after the other; of any shape.
        packed: uint8, the same, eight elements a byte, the lowest bit first; each sequence starts a new byte. It
            precedes ``custom_mask``, as in FlashInfer.
        lengths_q: the queries of each sequence.
        lengths_k: the keys of each sequence.

    Raises:
        ArgumentError: a mask does not have an element for each pair of a query and a key.
    """
    pairs = [queries * keys for queries, keys in zip(lengths_q, lengths_k, strict=True)]
    if packed is not None:
        sizes = [-(-count // 8) for count in pairs]
        _check_count("packed_custom_mask", packed, sum(sizes), "bytes")
        bits = (packed.reshape(-1, 1).to(torch.uint8) >> torch.arange(8, device=packed.device)) & 1
        parts = [part.reshape(-1)[:count] for part, count in zip(bits.split(sizes), pairs, strict=True)]
    elif custom_mask is not None:
        _check_count("custom_mask", custom_mask, sum(pairs), "elements")
        parts = list(custom_mask.reshape(-1).split(pairs))
    else:
        return None
    shapes = zip(lengths_q, lengths_k, strict=True)
    return [part.bool().reshape(*shape) for part, shape in zip(parts, shapes, strict=True)]


def _check_count(name: str, mask: torch.Tensor, count: int, unit: str) -> None:
    if mask.numel() != count:
        raise ArgumentError(f"{name} has {mask.numel()} {unit}, and the sequences need {count}: queries * keys of each")


def added_to(
    batch: Batch,
    masks: Sequence[torch.Tensor] | None,
    alibi: bool,
    options: Options,
    dtype: torch.dtype,
    device: torch.device,
) -> Added:
    """What masks and ALiBi add; ALiBi's scores are slope * (key - query), both counted from the sequence's first.

    Args:
        batch: the sequences.
        masks: as :func:`mask_of` returns them.
        alibi: whether there are slopes.
        options: their mask and its window.
        dtype: the type of Q.
        device: where the results are.
    """
    if not alibi:
        if masks is None:
            return Added()
        return Added(_rows(batch, masks, None, dtype, device).expand(batch.heads, -1, -1))
    slopes = slopes_of(batch.heads, device)
    query = places(batch.lengths_q).to(device)
    causal = options.mask != "no" and options.right == 0
    if masks is None and (causal or max(batch.lengths_q, default=0) <= 1):
        # Kernels add slope * key under a causal mask; else -slope * distance, which is 0 on the diagonal.
        diagonal = places(batch.lengths_q, batch.lengths_k).to(device)
        lacking = -query if causal and options.left < 0 else diagonal - query
        return Added(slopes=slopes, shift=lacking[:, None] * slopes)
    # 0 at the last key that a row sees: elsewhere the bias is small where the weight is not, so its type suffices.
    if masks is None:
        masks = [torch.ones(shape, dtype=torch.bool) for shape in zip(batch.lengths_q, batch.lengths_k, strict=True)]
    last = torch.cat([_last_seen(mask) for mask in masks]).to(device)
    bias = _rows(batch, masks, slopes[0], dtype, device)
    return Added(bias=bias, shift=(last - query)[:, None] * slopes)


def _last_seen(mask: torch.Tensor) -> torch.Tensor:
    """The last key that each query sees, (queries,); 0 if it sees none."""
    keys = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, keys, 0).amax(dim=1) if mask.shape[1] else mask.new_zeros(mask.shape[0], dtype=torch.int64)


def _rows(
    batch: Batch,
    masks: Sequence[torch.Tensor],
    slopes: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The bias of masks, (1 or heads, queries, keys): -inf where a key is hidden, slope * (key - last) elsewhere."""
    starts = [0]
    for queries in batch.lengths_q:
        starts.append(starts[-1] + queries)
    heads = 1 if slopes is None else len(slopes)
    bias = torch.full((heads, starts[-1], batch.keys), -torch.inf, dtype=dtype, device=device)
    for (first, end), mask in zip(pairwise(starts), masks, strict=True):
        keys = mask.shape[1]
        seen = mask.to(device)
        if slopes is None:
            values = torch.zeros((1, *seen.shape), device=device)
        else:
            distances = torch.arange(keys, device=device) - _last_seen(seen)[:, None]
            values = slopes[:, None, None] * distances
        bias[:, first:end, :keys] = values.masked_fill(~seen, -torch.inf).to(dtype)
    return bias
