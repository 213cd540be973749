"""Masks of transformers in few numbers, which become tensors only if somebody looks at their elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from catalog.ops.attention.fields import MaskWord


class Packed(NamedTuple):
    """A padded batch as packed sequences.

    ``queries`` and ``keys`` are the places of the real tokens among all (batch * tokens) of a batch, int64 on the
    batch's device. ``starts_q`` and ``starts_k`` are the first tokens of the packed sequences and their end, int32 on
    the CPU, where their values are read.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    starts_q: torch.Tensor
    starts_k: torch.Tensor


@dataclass(frozen=True)
class Sequences:
    """The real keys of each sequence of a padded batch, a run of neighbours: (first, end) each.

    If queries are tokens of the same sequences, ``last`` is the end of their storage: the real ones are those that lie
    in the run. Otherwise it is None, and all queries are real.
    """

    runs: tuple[tuple[int, int], ...]
    last: int | None


@dataclass(frozen=True)
class View:
    """What a mask shows.

    ``keys`` is the number of keys that some query may see, from the first on; further ones are free slots of a cache.
    A causal mask lets the last query see the last of them, and a ``window`` of w lets a query see w keys, its own
    included. ``sequences`` are those of a padded batch.
    """

    causal: bool
    keys: int
    window: int | None = None
    sequences: Sequences | None = None

    def packed(self, queries: int, keys: int, device: torch.device) -> Packed:
        """The places of a padded batch's real tokens; each sequence has storage for these numbers of tokens."""
        return _packed(self.sequences or Sequences((), None), queries, keys, device)

    def kernel_mask(self, queries: int, keys: int) -> tuple[MaskWord, int]:
        """The mask of a call with these numbers of queries and keys, and the keys to the left that a query sees.

        As of :class:`~catalog.torch.calls.Options`, in which ``right`` is 0.
        """
        left = -1 if self.window is None or self.window >= keys else self.window - 1
        if not self.causal or (queries == 1 and left < 0 and self.sequences is None):
            return "no", -1
        return "bottom_right", left


@lru_cache(maxsize=64)
def _packed(sequences: Sequences, queries: int, keys: int, device: torch.device) -> Packed:
    of_queries = [(0, queries)] * len(sequences.runs)
    if sequences.last is not None:
        before = sequences.last - queries
        of_queries = [(max(first, before) - before, max(end, before) - before) for first, end in sequences.runs]
    places, starts = [], []
    for runs, stride in ((of_queries, queries), (sequences.runs, keys)):
        spans = [torch.arange(row * stride + first, row * stride + end) for row, (first, end) in enumerate(runs)]
        lengths = torch.tensor([0, *(len(span) for span in spans)])
        places.append(torch.cat(spans).to(device))
        starts.append(lengths.cumsum(0).to(torch.int32))
    return Packed(*places, *starts)


class LazyMask(torch.Tensor):
    """A mask of bools, (batch, 1, queries, keys), whose elements are computed when something reads them.

    ``shows`` says in few numbers what it shows.
    """

    shows: View
    _elements: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device, view: View, elements: Callable[[], torch.Tensor]
    ) -> LazyMask:
        """A mask of this shape, whose ``elements`` are asked for once, if ever."""
        self: LazyMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.shows = view
        self._elements = lru_cache(maxsize=1)(elements)
        return self

    def dense(self) -> torch.Tensor:
        """The mask as an ordinary tensor."""
        return self._elements()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute with the elements."""

        def read(value: Any) -> Any:
            return value.dense() if isinstance(value, LazyMask) else value

        return function(*torch.utils._pytree.tree_map(read, args), **torch.utils._pytree.tree_map(read, kwargs or {}))


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **options: Any,
) -> torch.Tensor | None:
    """The mask of a forward pass, called by transformers with the arguments of its own mask functions.

    Args:
        batch_size: the number of sequences.
        q_length: queries of each sequence.
        kv_length: keys in each sequence's storage.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: of indices, says what is seen.
        attention_mask: (batch, tokens), bool, True for real tokens; None: all are.
        local_size: the window or the chunk of a local mask.
        allow_is_causal_skip: False if something was added to a causal mask, or the caller wants its elements.
        allow_is_bidirectional_skip: likewise for a mask that shows everything.
        device: where the mask lies.
        config: the model's configuration.
        options: passed to transformers' own mask function.

    Returns:
        None for one query that sees every key, a :class:`LazyMask` for what else kernels know, else all elements.
    """
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "local_size": local_size,
        "device": device,
        **options,
    }
    if torch.compiler.is_compiling():
        # Layers of some models that encode and decode say that they are not causal, and need the mask.
        whole: torch.Tensor | None = sdpa_mask(
            **arguments,
            allow_is_causal_skip=allow_is_causal_skip and not getattr(config, "is_encoder_decoder", False),
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        )
        return whole

    def elements() -> torch.Tensor:
        every: torch.Tensor = sdpa_mask(**arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return every

    shown = _shown(mask_function, local_size, config)
    if shown is None or not (allow_is_causal_skip if shown[0] else allow_is_bidirectional_skip):
        return elements()
    causal, window = shown
    keys = min(kv_length, int(q_offset) + q_length - kv_offset) if causal else kv_length
    sequences = None
    if attention_mask is not None:
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + keys]
        if not padding.all():
            runs = _runs(padding)
            if runs is None or (causal and keys < q_length):
                return elements()
            sequences = Sequences(runs, keys if causal else None)
    if causal and keys < q_length:  # a cache that has dropped keys of these queries
        return elements()
    view = View(causal, keys, window, sequences)
    # Without a mask, more queries would see what a layer's own is_causal says, which is wrong in some models.
    if sequences is None and keys == kv_length and window is None and q_length == 1:
        return None
    return LazyMask((batch_size, 1, q_length, kv_length), torch.device(device), view, elements)


def _shown(mask_function: Callable[..., Any], local_size: int | None, config: Any) -> tuple[bool, int | None] | None:
    """Whether a mask to which nothing was added is causal, and its window; None for one that kernels do not know.

    transformers makes a window's function anew for each mask. It is one if the model has a window of this size; the
    local size of a chunked mask is the chunk's.
    """
    if mask_function is causal_mask_function:
        return True, None
    if mask_function is bidirectional_mask_function:
        return False, None
    chunk = getattr(config, "attention_chunk_size", None)
    if local_size is not None and chunk is None and local_size == getattr(config, "sliding_window", None):
        return True, local_size
    return None


def _runs(padding: torch.Tensor) -> tuple[tuple[int, int], ...] | None:
    """The run of real tokens of each sequence, (first, end); None if some sequence has a gap."""
    counts = padding.sum(1)
    first = padding.to(torch.uint8).argmax(1)
    last = padding.shape[1] - padding.to(torch.uint8).flip(1).argmax(1)
    if bool(((last - first != counts) & (counts > 0)).any()):
        return None
    rows = zip(first.tolist(), counts.tolist(), strict=True)
    return tuple((start, start + count) if count else (0, 0) for start, count in rows)
