"""Attention of batches with FlashInfer's interface: over pages, and over packed K and V."""

from __future__ import annotations

from typing import Any

import torch

from catalog.integrations.flashinfer.arguments import (
    Attended,
    Dtype,
    as_planned,
    lengths_of,
    options_with,
    refuse,
    refuse_encoding,
    refuse_gradient,
    results,
    scale_of,
    starts_of,
    tokens_first,
    type_of,
    unless_hints,
)
from catalog.integrations.flashinfer.wrapper import PagedWrapper, Pages, Planned, Wrapper
from catalog.torch.cached import KvCache, attend, attention_problem
from catalog.torch.calls import Case, Options, call, problem_of
from catalog.torch.ops import forward


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Like FlashInfer's: the last tokens of many sequences over a paged cache; keys are divided to fill the device."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
        o_data_type: Dtype | None = None,
        data_type: Dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        window_right: int = 0,
    ) -> None:
        """Select and build the kernels of a batch.

        Args:
            indptr: (sequences + 1,): where the pages of each sequence start in ``indices``, and the end of the last.
            indices: the numbers of the pages.
            last_page_len: (sequences,): the tokens in the last page of each sequence.
            num_qo_heads: heads of q.
            num_kv_heads: heads of the cache, a divisor.
            head_dim: that of q and the cache.
            page_size: tokens of a page.
            pos_encoding_mode: only NONE.
            window_left: as of :func:`~catalog.integrations.flashinfer.single_prefill_with_kv_cache`.
            logits_soft_cap: likewise.
            q_data_type: the type of q, or its name.
            kv_data_type: the same type.
            o_data_type: the same type.
            data_type: the same type.
            sm_scale: as of :func:`~catalog.integrations.flashinfer.single_prefill_with_kv_cache`.
            rope_scale: no effect.
            rope_theta: no effect.
            non_blocking: no effect.
            block_tables: no effect: ``indices`` states the same.
            seq_lens: no effect: ``last_page_len`` states the same.
            fixed_split_size: no effect.
            disable_split_kv: True: keys are not divided.
            q_len_per_req: queries of each sequence, its last tokens; they see the tokens up to their own.
            window_right: only 0.

        Raises:
            UnsupportedArgumentError: no kernel follows an argument.
            ArgumentError: the vectors do not fit each other.
            ProblemError, SelectionError, DeviceError, BuildError, ToolchainError: as
                :func:`~catalog.integrations.flashinfer.single_prefill_with_kv_cache`.
        """
        refuse(window_right=window_right or None)
        refuse_encoding(pos_encoding_mode)
        dtype = type_of(q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type, data_type=data_type)
        batch = last_page_len.shape[0]
        pages = self._page_table(indptr, indices, last_page_len, page_size, batch)
        keys = pages.table.shape[1] * page_size
        options = options_with("bshd", keys, sm_scale, q_len_per_req > 1, window_left, logits_soft_cap)
        q = (batch * q_len_per_req, num_qo_heads, head_dim)
        splits = 1 if disable_split_kv else 0
        problem = attention_problem(
            (batch, q_len_per_req, num_qo_heads, head_dim),
            self._unwritten(pages, num_kv_heads, head_dim, head_dim),
            dtype,
            self._device,
            options,
            num_splits=splits,
        )
        self._set_plan(Planned(q, num_kv_heads, head_dim, dtype, options, window_left), problem)
        self._pages, self._queries, self._splits = pages, q_len_per_req, splits

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pages,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Attended:
        """O, and LSE with ``return_lse``, by the plan.

        Args:
            q: (sequences * q_len_per_req, heads, head dim).
            paged_kv_cache: (pages, 2, page size, heads, head dim), in HND (pages, 2, heads, page size, head dim); or
                the pair of K and V, without the 2. Only the head dim must be dense.
            args: none.
            q_scale: another factor of the scores.
            k_scale: likewise.
            v_scale: a factor of O.
            out: O is written there.
            lse: LSE is written there.
            return_lse: whether to return (O, LSE).
            enable_pdl: no effect.
            window_left: that of the plan.
            sinks: not supported.

        Returns:
            O, as q; LSE is (tokens, heads).

        Raises:
            ArgumentError: there is no plan, or tensors do not fit it.
            UnsupportedArgumentError: no kernel follows an argument.
            UsageError: a gradient is wanted.
            TensorError: on the CPU, a page number is out of range.
        """
        plan = self._planned(q, window_left, args=args, sinks=sinks)
        cache = self._cache(paged_kv_cache, plan)
        refuse_gradient(q, cache.k, cache.v)
        options = plan.options._replace(scale=scale_of(plan.options.scale, plan.q[2], q_scale, k_scale))
        rows = q.unflatten(0, (self._pages.table.shape[0], self._queries))
        o, found = attend(rows, cache, self._pages.lengths, options, num_splits=self._splits)
        return results(o.flatten(0, 1), found.transpose(1, 2).flatten(0, 1), return_lse, v_scale, out, lse)

    def run_return_lse(self, *args: Any, **options: Any) -> Attended:
        """:meth:`run` with ``return_lse=True``."""
        return self.run(*args, **options, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Like FlashInfer's: packed queries of many sequences over a paged cache."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
        non_blocking: bool = True,
        **others: Any,
    ) -> None:
        """Select and build the kernels of a batch.

        Arguments and errors are those of :meth:`BatchDecodeWithPagedKVCacheWrapper.plan`, with these differences.

        Args:
            qo_indptr: (sequences + 1,): the first query of each sequence, and the end of the last one.
            paged_kv_indptr: as ``indptr`` there.
            paged_kv_indices: as ``indices`` there.
            paged_kv_last_page_len: as ``last_page_len`` there.
            num_qo_heads: as there.
            num_kv_heads: as there.
            head_dim_qk: the head dim of q and K.
            page_size: as there.
            head_dim_vo: the head dim of V and O; default: that of q.
            custom_mask: not supported.
            packed_custom_mask: not supported.
            causal: query i of n sees the keys up to the i-th of the last n.
            pos_encoding_mode: as there.
            use_fp16_qk_reduction: no effect; sums are float32.
            sm_scale: as there.
            window_left: as there.
            logits_soft_cap: as there.
            rope_scale: as there.
            rope_theta: as there.
            q_data_type: as there.
            kv_data_type: as there.
            non_blocking: as there.
            others: no effect if they only say how FlashInfer computes; else only None.
        """
        refuse(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, **unless_hints(others))
        refuse_encoding(pos_encoding_mode)
        dtype = type_of(q_data_type, kv_data_type=kv_data_type, o_data_type=others.get("o_data_type"))
        hdim_v = head_dim_vo or head_dim_qk
        starts = starts_of("qo_indptr", qo_indptr)
        pages = self._page_table(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, starts.shape[0] - 1
        )
        keys = pages.table.shape[1] * page_size
        options = options_with("packed", keys, sm_scale, causal, window_left, logits_soft_cap)
        q = (int(starts[-1]), num_qo_heads, head_dim_qk)
        plan = Planned(q, num_kv_heads, hdim_v, dtype, options, window_left)
        unwritten, tokens = self._unwritten(pages, num_kv_heads, head_dim_qk, hdim_v), lengths_of(starts)
        self._set_plan(plan, problem_of(_paged_case(plan, unwritten, tokens, options)))
        self._pages, self._tokens = pages, tokens

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pages,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Attended:
        """O, (queries, heads, head dim of v), and LSE with ``return_lse``, by the plan.

        Arguments and errors are those of :meth:`BatchDecodeWithPagedKVCacheWrapper.run`; q is packed.
        """
        plan = self._planned(q, window_left, args=args, sinks=sinks)
        cache = self._cache(paged_kv_cache, plan)
        refuse_gradient(q, cache.k, cache.v)
        options = plan.options._replace(scale=scale_of(plan.options.scale, plan.q[2], q_scale, k_scale))
        tensors = [("q", q), *cache.named, ("seqlens_k", self._pages.lengths)]
        computed = call(_paged_case(plan, cache, self._tokens, options), q.device, tensors)
        return results(computed["o"], computed["lse"].T, return_lse, v_scale, out, lse)

    def run_return_lse(self, *args: Any, **options: Any) -> Attended:
        """:meth:`run` with ``return_lse=True``."""
        return self.run(*args, **options, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Like FlashInfer's: packed queries over packed K and V. It has gradients."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
        non_blocking: bool = True,
        **others: Any,
    ) -> None:
        """Select and build the kernels of a batch.

        ``kv_indptr`` has the first key of each sequence and the end of the last one. The other arguments and the errors
        are those of :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        refuse(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, **unless_hints(others))
        refuse_encoding(pos_encoding_mode)
        dtype = type_of(q_data_type, kv_data_type=kv_data_type, o_data_type=others.get("o_data_type"))
        hdim_v = head_dim_vo or head_dim_qk
        starts = (starts_of("qo_indptr", qo_indptr), starts_of("kv_indptr", kv_indptr))
        queries, keys = (int(start[-1]) for start in starts)
        options = options_with("packed", keys, sm_scale, causal, window_left, logits_soft_cap)
        q, (lengths_q, lengths_k) = (
            (queries, num_qo_heads, head_dim_qk),
            map(lengths_of, starts),
        )
        k, v = ((keys, num_kv_heads, hdim) for hdim in (head_dim_qk, hdim_v))
        case = Case("fwd", dtype, "no", "1h", False, False, options, q, k, v, lengths_q, lengths_k, 0)
        plan = Planned(q, num_kv_heads, hdim_v, dtype, options, window_left)
        self._set_plan(plan, problem_of(case))
        self._starts = starts

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Attended:
        """O, (queries, heads, head dim of v), and LSE with ``return_lse``, by the plan.

        k is (keys, heads, head dim) in NHD, (heads, keys, head dim) in HND, and v likewise. The other arguments and the
        errors are those of :meth:`BatchDecodeWithPagedKVCacheWrapper.run`.
        """
        plan = self._planned(q, window_left, args=args, sinks=sinks)
        k, v = (tokens_first(tensor, self._layout) for tensor in (k, v))
        of_keys = (int(self._starts[1][-1]), plan.nhead_k)
        as_planned("k", k, (*of_keys, plan.q[2]), plan.dtype)
        as_planned("v", v, (*of_keys, plan.hdim_v), plan.dtype)
        options = plan.options._replace(scale=scale_of(plan.options.scale, plan.q[2], q_scale, k_scale))
        o, found = forward(q, k, v, None, None, *self._starts, None, None, options)
        return results(o, found.T, return_lse, v_scale, out, lse)

    def run_return_lse(self, *args: Any, **options: Any) -> Attended:
        """:meth:`run` with ``return_lse=True``."""
        return self.run(*args, **options, return_lse=True)


def _paged_case(plan: Planned, cache: KvCache, tokens: tuple[int, ...], options: Options) -> Case:
    """The problem of packed queries over pages; ``tokens`` are those of each sequence."""
    shapes = (plan.q, tuple(cache.k.shape), tuple(cache.v.shape))
    width = 0 if cache.table is None else cache.table.shape[1]
    return Case("pagedkv", plan.dtype, "no", "1h", False, False, options, *shapes, tokens, None, width)
