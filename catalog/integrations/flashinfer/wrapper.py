"""What FlashInfer's wrappers of batches have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from catalog.errors import ArgumentError, UnsupportedArgumentError
from catalog.integrations.flashinfer.arguments import KvLayout, as_planned, check_layout, refuse
from catalog.runtime.catalog import Catalog
from catalog.schema.problem import Problem
from catalog.torch.cached import KvCache
from catalog.torch.calls import Options, arch_of

Pages = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A paged cache: (pages, 2, page size, heads, head dim), or K and V; in HND heads come before the page's tokens."""


class PageTable(NamedTuple):
    """A page table: (sequences, pages), the tokens of each sequence, both int32, and the tokens of a page."""

    table: torch.Tensor
    lengths: torch.Tensor
    size: int


class Planned(NamedTuple):
    """What every ``plan`` leaves to ``run``; ``q`` is (tokens, heads, head dim).

    ``options`` lack the scales that are arguments of ``run``.
    """

    q: tuple[int, int, int]
    nhead_k: int
    hdim_v: int
    dtype: torch.dtype
    options: Options
    window_left: int


class Wrapper:
    """What the wrappers of batches have in common.

    Args:
        float_workspace_buffer: on the device of the tensors; it is not used otherwise.
        kv_layout: NHD or HND.
        use_cuda_graph: only False.
        use_tensor_cores: no effect.
        backend: no effect.
        others: only None.

    Raises:
        UnsupportedArgumentError: an argument asks for what no kernel does.
        ArgumentError: there is no such layout.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: KvLayout = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        *,
        backend: str = "auto",
        **others: Any,
    ) -> None:
        if use_cuda_graph:
            raise UnsupportedArgumentError(
                "use_cuda_graph=True: a captured graph would not see the page table of the next plan",
                hint="Capture catalog.torch.flash_attn_with_kvcache, whose page table and lengths are arguments.",
            )
        refuse(**others)
        check_layout(kv_layout)
        self._device = float_workspace_buffer.device
        self._layout: KvLayout = kv_layout
        self._plan: Planned | None = None

    def reset_workspace_buffer(self, *buffers: torch.Tensor) -> None:
        """Do nothing: the catalog's plans have their own workspaces."""

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer."""

    def _set_plan(self, plan: Planned, problem: Problem) -> None:
        """Select the kernels of a problem and build them, so that ``run`` only launches."""
        Catalog.select(problem, arch=arch_of(self._device)).build()
        self._plan = plan

    def _planned(self, q: torch.Tensor, window_left: int | None, **refused: Any) -> Planned:
        """The plan, which the arguments of ``run`` must fit."""
        refuse(**refused)
        if self._plan is None:
            raise ArgumentError(f"{type(self).__name__}.run needs a plan: call plan first")
        if window_left not in (None, self._plan.window_left):
            raise ArgumentError(f"window_left={window_left}, and the plan is for window_left={self._plan.window_left}")
        as_planned("q", q, self._plan.q, self._plan.dtype)
        return self._plan


class PagedWrapper(Wrapper):
    """What the wrappers of batches over pages have in common."""

    _pages: PageTable

    def _cache(self, cache: Pages, plan: Planned) -> KvCache:
        """A paged cache as kernels read it, not copied: (pages, page size, heads, head dim)."""
        k, v = cache.unbind(1) if isinstance(cache, torch.Tensor) else cache
        if self._layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        of_page = (k.shape[0], self._pages.size, plan.nhead_k)
        as_planned("the cache of K", k, (*of_page, plan.q[2]), plan.dtype)
        as_planned("the cache of V", v, (*of_page, plan.hdim_v), plan.dtype)
        return KvCache(k, v, self._pages.table)

    def _page_table(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int, batch: int
    ) -> PageTable:
        """The pages of ``batch`` sequences as a table, from FlashInfer's three vectors."""
        starts, last = (tensor.to("cpu", torch.int64) for tensor in (indptr, last_page_len))
        if tuple(starts.shape) != (batch + 1,) or tuple(last.shape) != (batch,):
            raise ArgumentError(
                f"indptr {tuple(starts.shape)} and last_page_len {tuple(last.shape)} do not fit {batch} sequences: "
                f"expected ({batch + 1},) and ({batch},)"
            )
        counts = starts.diff()
        if bool(starts[0] != 0) or bool((counts < 0).any()) or int(starts[-1]) > indices.shape[0]:
            raise ArgumentError(
                f"indptr is {starts.tolist()}: must ascend from 0 to at most {indices.shape[0]}, the number of indices"
            )
        if bool(((counts > 0) & ((last < 1) | (last > page_size))).any()):
            raise ArgumentError(f"last_page_len is {last.tolist()}: must be from 1 to page_size={page_size}")
        # The width is a power of two, so a sequence that grows is seldom another problem.
        width = 1 << (max([1, *counts.tolist()]) - 1).bit_length()
        table = torch.zeros((batch, width), dtype=torch.int32, device=self._device)
        table[(torch.arange(width) < counts[:, None]).to(self._device)] = indices[: int(starts[-1])].to(table)
        lengths = torch.where(counts > 0, (counts - 1) * page_size + last, 0).to(table)
        return PageTable(table, lengths, page_size)

    @staticmethod
    def _unwritten(pages: PageTable, nhead_k: int, hdim_q: int, hdim_v: int) -> KvCache:
        """The shapes of the smallest cache that has all pages of a table; that of ``run`` may have more."""
        count = max(1, int(pages.table.max()) + 1 if pages.table.numel() else 1)
        k, v = (torch.empty(count, pages.size, nhead_k, hdim, device="meta") for hdim in (hdim_q, hdim_v))
        return KvCache(k, v, pages.table)
