"""FlashInfer's wrapper of multi-head latent attention (MLA), after the projections of K and V are absorbed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from catalog.errors import ArgumentError
from catalog.integrations.flashinfer.arguments import (
    Attended,
    Dtype,
    Dtypes,
    as_planned,
    converted,
    dtypes_of,
    lengths_of,
    options_with,
    refuse,
    refuse_gradient,
    refuse_graph,
    results,
    starts_of,
)
from catalog.integrations.flashinfer.pages import PageTable, page_table
from catalog.runtime.catalog import Catalog
from catalog.torch.cached import KvCache, attend, attention_problem
from catalog.torch.calls import Case, Options, arch_of, call, problem_of


class _Plan(NamedTuple):
    """What ``plan`` leaves to ``run``; ``tokens`` are the queries of each sequence."""

    pages: PageTable
    tokens: tuple[int, ...]
    heads: int
    hdims: tuple[int, int]
    dtypes: Dtypes
    options: Options

    @property
    def even(self) -> bool:
        """Whether all sequences have the same number of queries: then their keys may be divided among cores."""
        return len(set(self.tokens)) == 1

    def case(self, cache: KvCache) -> Case:
        """The problem of packed queries."""
        q = (sum(self.tokens), self.heads, sum(self.hdims))
        shapes = (q, tuple(cache.k.shape), tuple(cache.v.shape))
        width = self.pages.table.shape[1]
        return Case("pagedkv", self.dtypes.q, "no", "1h", False, False, self.options, *shapes, self.tokens, None, width)


class BatchMLAPagedAttentionWrapper:
    """Like FlashInfer's: packed queries over pages of compressed K and V, which all heads share.

    V is ``ckv``, and K is ``ckv`` and ``kpe``, one after the other. If these caches are slices of one tensor, (pages,
    page size, head dims together), in this order, kernels read it where it is. Otherwise every ``run`` copies the
    batch's pages.

    Args:
        float_workspace_buffer: on the device of the tensors; it is not used otherwise.
        use_cuda_graph: on a GPU only False; no effect on a CPU, where nothing is captured.
        qo_indptr: no effect, as the three after it: the buffers of captured graphs.
        kv_indptr: see there.
        kv_indices: see there.
        kv_len_arr: see there.
        backend: no effect.

    Raises:
        UnsupportedArgumentError: ``use_cuda_graph`` on a GPU.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._device = float_workspace_buffer.device
        refuse_graph(use_cuda_graph, self._device)
        self._plan: _Plan | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: Dtype,
        kv_data_type: Dtype,
        use_profiler: bool = False,
    ) -> None:
        """Select and build the kernels of a batch.

        Args:
            qo_indptr: (sequences + 1,): the first query of each sequence, and the end of the last one.
            kv_indptr: (sequences + 1,): where the pages of each sequence start in ``kv_indices``, and the end; what
                follows has no effect.
            kv_indices: the numbers of the pages.
            kv_len_arr: (sequences,): the tokens of each sequence.
            num_heads: heads of q.
            head_dim_ckv: the head dim of V and O, at most 512.
            head_dim_kpe: the further elements of q and K, at most 64 if V has 512.
            page_size: tokens of a page.
            causal: query i of n sees the keys up to the i-th of the last n.
            sm_scale: factor of the scores, positive.
            q_data_type: the type of q and O, or its name.
            kv_data_type: that of the cache. If it is another type, every ``run`` converts the batch's pages.
            use_profiler: only False.

        Raises:
            UnsupportedArgumentError: ``use_profiler``.
            ArgumentError: the vectors do not fit each other.
            ProblemError, SelectionError, DeviceError, BuildError, ToolchainError: as
                :func:`~catalog.integrations.flashinfer.single_prefill_with_kv_cache`.
        """
        refuse(use_profiler=use_profiler)
        dtypes = dtypes_of(q_data_type, kv_data_type, None)
        tokens = lengths_of(starts_of("qo_indptr", qo_indptr))
        if len(tokens) != len(kv_len_arr):
            raise ArgumentError(f"qo_indptr has {len(tokens)} sequences, and kv_len_arr has {len(kv_len_arr)}")
        pages = page_table(kv_indptr[: len(tokens) + 1], kv_indices, kv_len_arr, page_size, self._device)
        even = len(set(tokens)) == 1
        options = options_with("bshd" if even else "packed", pages.capacity, sm_scale, causal, -1, None)
        hdims = (head_dim_ckv, head_dim_kpe)
        plan = _Plan(pages, tokens, num_heads, hdims, dtypes, options)
        cache = pages.unwritten(1, sum(hdims), head_dim_ckv)
        shape = (len(tokens), tokens[0] if tokens else 0, num_heads, sum(hdims))
        problem = (
            attention_problem(shape, cache, dtypes.q, self._device, options) if even else problem_of(plan.case(cache))
        )
        Catalog.select(problem, arch=arch_of(self._device)).build()
        self._plan = plan

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Attended:
        """O, and LSE with ``return_lse``, by the plan.

        Args:
            q_nope: (queries, heads, head_dim_ckv).
            q_pe: (queries, heads, head_dim_kpe).
            ckv_cache: (pages, page size, head_dim_ckv).
            kpe_cache: (pages, page size, head_dim_kpe).
            out: O is written there.
            lse: LSE is written there.
            return_lse: whether to return (O, LSE).
            profiler_buffer: only None.
            kv_len: only None: the plan has the lengths.
            page_table: only None: the plan has the pages.
            return_lse_base_on_e: LSE of base e; else of base 2.
            o_scale: only None.
            ckv_scale: a factor of ``ckv_cache``; then every ``run`` copies the batch's pages.
            ckv_scale_arr: only None.
            kpe_scale: a factor of ``kpe_cache``, likewise.

        Returns:
            O, as ``q_nope``; LSE is (queries, heads).

        Raises:
            ArgumentError: there is no plan, or tensors do not fit it.
            UnsupportedArgumentError: no kernel follows an argument.
            UsageError: a gradient is wanted.
            TensorError: on the CPU, a page number is out of range.
        """
        refuse(profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table)
        refuse(o_scale=o_scale, ckv_scale_arr=ckv_scale_arr)
        plan = self._plan
        if plan is None:
            raise ArgumentError(f"{type(self).__name__}.run needs a plan: call plan first")
        refuse_gradient(q_nope, q_pe, ckv_cache, kpe_cache)
        rows = (sum(plan.tokens), plan.heads)
        for name, tensor, hdim in zip(("q_nope", "q_pe"), (q_nope, q_pe), plan.hdims, strict=True):
            as_planned(name, tensor, (*rows, hdim), plan.dtypes.q)
        for name, tensor, hdim in zip(("ckv_cache", "kpe_cache"), (ckv_cache, kpe_cache), plan.hdims, strict=True):
            as_planned(name, tensor, (ckv_cache.shape[0], plan.pages.size, hdim), plan.dtypes.kv)
        q = torch.cat([q_nope, q_pe], dim=-1)
        cache = _cache(plan, ckv_cache, kpe_cache, ckv_scale, kpe_scale)
        if plan.even:
            o, found = attend(q.unflatten(0, (len(plan.tokens), -1)), cache, plan.pages.lengths, plan.options)
            o, natural = o.flatten(0, 1), found.transpose(1, 2).flatten(0, 1)
        else:
            tensors = [("q", q), *cache.named, ("seqlens_k", plan.pages.lengths)]
            computed = call(plan.case(cache), q.device, tensors)
            o, natural = computed["o"], computed["lse"].T
        return results(o, natural, return_lse, out=out, out_lse=lse, natural_lse=return_lse_base_on_e)


def _cache(
    plan: _Plan, ckv: torch.Tensor, kpe: torch.Tensor, ckv_scale: float | None, kpe_scale: float | None
) -> KvCache:
    """K and V as kernels read them, (pages, page size, 1, head dim); copies of the batch's pages if they must be."""
    pages, hdim_v = plan.pages, plan.hdims[0]
    scales = (ckv_scale, kpe_scale)
    if plan.dtypes.kv == plan.dtypes.q and scales == (None, None):
        joined = _joined(ckv, kpe)
        if joined is not None:
            return KvCache(joined[:, :, None], ckv[:, :, None], pages.table)
    parts = []
    for tensor, scale in zip((ckv, kpe), scales, strict=True):
        copies = pages.copies(tensor)
        parts.append(converted(copies if scale is None else copies.float() * scale, plan.dtypes.q))
    k = torch.cat(parts, dim=-1)[:, :, None]
    return KvCache(k, k[..., :hdim_v], pages.of_copies)


def _joined(ckv: torch.Tensor, kpe: torch.Tensor) -> torch.Tensor | None:
    """Both caches as one tensor, if they are neighbouring slices of one; else None."""
    if not kpe.shape[-1]:
        return ckv
    end = ckv.data_ptr() + ckv.shape[-1] * ckv.element_size()
    alike = ckv.stride() == kpe.stride() and ckv.stride(-1) == 1
    same = ckv.untyped_storage().data_ptr() == kpe.untyped_storage().data_ptr()
    if not (alike and same and kpe.data_ptr() == end and ckv.stride(1) >= ckv.shape[-1] + kpe.shape[-1]):
        return None
    return ckv.as_strided((*ckv.shape[:2], ckv.shape[2] + kpe.shape[2]), ckv.stride())
