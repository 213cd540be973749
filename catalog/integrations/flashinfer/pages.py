"""Page tables from FlashInfer's vectors, and copies of the pages that a batch uses."""

from __future__ import annotations

from typing import NamedTuple

import torch

from catalog.errors import ArgumentError
from catalog.torch.cached import KvCache


class PageTable(NamedTuple):
    """The pages of a batch.

    ``table`` is (sequences, pages), ``lengths`` are the tokens of each sequence, both int32; ``size`` are those of a
    page. ``used`` are the pages that the sequences have, one after the other, int64, and ``places`` is True where the
    table has them.
    """

    table: torch.Tensor
    lengths: torch.Tensor
    size: int
    used: torch.Tensor
    places: torch.Tensor

    @property
    def capacity(self) -> int:
        """The tokens that a sequence has room for."""
        return int(self.table.shape[1]) * self.size

    @property
    def positions(self) -> torch.Tensor:
        """The positions of the tokens of ``used``, (pages * size,)."""
        first = self.places.nonzero()[:, 1:] * self.size
        return (first + torch.arange(self.size, device=first.device)).flatten()

    def copies(self, pages: torch.Tensor) -> torch.Tensor:
        """Copies of ``used``, in their order, (at least 1, ...); their table is :attr:`of_copies`."""
        if not len(self.used):
            return pages.new_zeros(1, *pages.shape[1:])
        if pages.element_size() > 1:
            return pages[self.used]
        # PyTorch copies elements of 8 bits only as integers.
        return pages.view(torch.uint8)[self.used].view(pages.dtype)

    @property
    def of_copies(self) -> torch.Tensor:
        """The table of a cache that has only copies of ``used``."""
        table = torch.zeros_like(self.table)
        table[self.places] = torch.arange(len(self.used), device=table.device, dtype=table.dtype)
        return table

    def unwritten(self, nhead_k: int, hdim_q: int, hdim_v: int) -> KvCache:
        """The shapes of the smallest cache that has all pages; that of ``run`` may have more."""
        count = int(self.used.max()) + 1 if len(self.used) else 1
        k, v = (torch.empty(count, self.size, nhead_k, hdim, device="meta") for hdim in (hdim_q, hdim_v))
        return KvCache(k, v, self.table)


def page_table(
    indptr: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, page_size: int, device: torch.device
) -> PageTable:
    """The pages of sequences of these lengths, as a table.

    Args:
        indptr: (sequences + 1,): where the pages of each sequence start in ``indices``, and the end of the last.
        indices: the numbers of the pages.
        lengths: (sequences,).
        page_size: tokens of a page.
        device: that of the cache.

    Raises:
        ArgumentError: the vectors do not fit each other.
    """
    lengths = lengths.to("cpu", torch.int64)
    counts = _counts(indptr, indices, len(lengths))
    if bool((lengths < 0).any()) or bool((lengths > counts * page_size).any()):
        raise ArgumentError(
            f"sequences have {lengths.tolist()} tokens, and their {counts.tolist()} pages of page_size={page_size} "
            "have no room for them"
        )
    # The width is a power of two, so a sequence that grows is seldom another problem.
    width = 1 << (max([1, *counts.tolist()]) - 1).bit_length()
    table = torch.zeros((len(counts), width), dtype=torch.int32, device=device)
    places = (torch.arange(width) < counts[:, None]).to(device)
    used = indices[: int(counts.sum())].to(device, torch.int64)
    table[places] = used.to(torch.int32)
    return PageTable(table, lengths.to(table), page_size, used, places)


def lengths_by_last_page(
    indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int, batch: int
) -> torch.Tensor:
    """The lengths of ``batch`` sequences, (sequences,), from the tokens in the last page of each.

    Raises:
        ArgumentError: the vectors do not fit each other.
    """
    last = last_page_len.to("cpu", torch.int64)
    if tuple(last.shape) != (batch,):
        raise ArgumentError(f"last_page_len is {tuple(last.shape)}: expected ({batch},), the number of sequences")
    counts = _counts(indptr, indices, batch)
    if bool(((counts > 0) & ((last < 1) | (last > page_size))).any()):
        raise ArgumentError(f"last_page_len is {last.tolist()}: must be from 1 to page_size={page_size}")
    return torch.where(counts > 0, (counts - 1) * page_size + last, 0)


def _counts(indptr: torch.Tensor, indices: torch.Tensor, batch: int) -> torch.Tensor:
    """The number of pages of each sequence, int64, on the CPU."""
    starts = indptr.to("cpu", torch.int64)
    if tuple(starts.shape) != (batch + 1,):
        raise ArgumentError(f"indptr is {tuple(starts.shape)}: expected ({batch + 1},), for {batch} sequences")
    counts = starts.diff()
    if bool(starts[0] != 0) or bool((counts < 0).any()) or int(starts[-1]) > indices.shape[0]:
        raise ArgumentError(
            f"indptr is {starts.tolist()}: must ascend from 0 to at most {indices.shape[0]}, the number of indices"
        )
    return counts
