"""The weights of a call with dropout: flash-attn's ``S_dmask``, whose signs say which of them were dropped."""

from __future__ import annotations

import math

import torch

from catalog.ops.attention.reference.dropout import BLOCK, largest_kept, random_words
from catalog.torch.calls import Options

Tensors = tuple[torch.Tensor, torch.Tensor]
"""The tensors of a sequence: Q, (queries, heads, head dim), and K, (keys, heads of K, head dim)."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def signed_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    slopes: torch.Tensor | None,
    starts: tuple[torch.Tensor, torch.Tensor] | None,
    rng_state: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """The softmax weights before dropout, negative where dropout drops them.

    They are computed again from Q and K, in float32, and dropout's random numbers are drawn again: this serves tests
    and debugging, not training.

    Args:
        q: (batch, queries, heads, head dim), or (all queries, heads, head dim) of packed sequences.
        k: likewise; its heads divide those of q.
        slopes: (1 or batch, heads).
        starts: the starts of packed sequences in q and k, int32, (batch + 1,) each; None: not packed.
        rng_state: seed and offset of the call's dropout.
        options: the options of the call.

    Returns:
        (batch, heads, queries, keys), of the type of q. A key that a query does not see has weight 0. For packed
        sequences, the last axes are as long as the longest sequence, and padded with zeros.
    """
    if starts is None:
        sequences: list[Tensors] = list(zip(q, k, strict=True))
    else:
        lengths_q, lengths_k = (of.diff().tolist() for of in starts)
        sequences = list(zip(q.split(lengths_q), k.split(lengths_k), strict=True))
    heads = q.shape[-2]
    longest = [max((tensors[axis].shape[0] for tensors in sequences), default=0) for axis in (0, 1)]
    weights = q.new_zeros(len(sequences), heads, *longest)
    seed, offset = (word % 2**64 for word in rng_state.tolist())
    threshold = largest_kept(options.dropout)
    for index, tensors in enumerate(sequences):
        own_slopes = None if slopes is None else slopes[index % len(slopes)]
        own_weights = _weights(tensors, own_slopes, options)
        _, queries, keys = own_weights.shape
        dropped = _random_bytes((seed, offset), index * heads, own_weights) > threshold
        weights[index, :, :queries, :keys] = torch.where(dropped, -own_weights, own_weights)
    return weights


def _random_bytes(rng_state: tuple[int, int], first_head: int, weights: torch.Tensor) -> torch.Tensor:
    """The random byte of each of a sequence's weights, int16, (heads, queries, keys)."""
    heads, queries, keys = (torch.arange(extent, device=weights.device) for extent in weights.shape)
    blocks = torch.arange(-(-len(keys) // BLOCK), device=weights.device)
    words = random_words(rng_state, (first_head + heads)[:, None, None], queries[:, None], blocks)
    every_byte = torch.stack(words, dim=-1).view(torch.uint8)  # the low half of each word comes first
    of_words = every_byte.view(len(heads), len(queries), 4 * len(blocks), 8)[..., :4]
    return of_words.flatten(2)[..., : len(keys)].short()


def _weights(tensors: Tensors, slopes: torch.Tensor | None, options: Options) -> torch.Tensor:
    """The weights of one sequence, float32, (heads, queries, keys)."""
    q, k = (tensor.float().transpose(0, 1) for tensor in tensors)
    scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale
    scores = scale * (q @ k.repeat_interleave(q.shape[0] // k.shape[0], dim=0).mT)
    if options.soft_cap:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    queries, keys = scores.shape[1:]
    query_positions, key_positions = torch.arange(queries, device=q.device), torch.arange(keys, device=q.device)
    distance = query_positions[:, None] + keys - queries - key_positions
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if options.mask != "no":
        if options.left >= 0:
            hidden = hidden | (distance > options.left)
        if options.right >= 0:
            hidden = hidden | (-distance > options.right)
    # Not from LSE, which under slopes and a causal mask is that of other scores. A row that sees no key is all zeros.
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
