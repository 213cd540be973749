"""Decoding of batches over pages with FlashInfer's interface."""

from __future__ import annotations

from typing import Any

import torch

from catalog.integrations.flashinfer.arguments import (
    Attended,
    Dtype,
    dtypes_of,
    elements_given,
    options_with,
    refuse,
    refuse_gradient,
    results,
    scale_of,
)
from catalog.integrations.flashinfer.positions import encoding_of, rotated
from catalog.integrations.flashinfer.scores import Batch, added_to
from catalog.integrations.flashinfer.wrapper import PagedWrapper, Pages, Planned
from catalog.schema.problem import Problem
from catalog.torch.cached import Slopes, attend, attention_problem


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
        q_data_type: Dtype | None = None,
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
            pos_encoding_mode: NONE, ROPE_LLAMA or ALIBI, as of
                :func:`~catalog.integrations.flashinfer.single_prefill_with_kv_cache`. Rotated K is a copy of the
                batch's pages, in every ``run``.
            window_left: as of :func:`~catalog.integrations.flashinfer.single_prefill_with_kv_cache`.
            logits_soft_cap: likewise.
            q_data_type: the type of q, or its name; default: ``data_type``, or float16.
            kv_data_type: that of the cache; default: ``data_type``, or that of q. Where q has 16 bits, kernels take
                float8_e4m3fn as it is; every ``run`` converts the batch's pages of other types than that of q.
            o_data_type: that of O; default: that of q.
            data_type: see there.
            sm_scale: as of :func:`~catalog.integrations.flashinfer.single_prefill_with_kv_cache`.
            rope_scale: as of :func:`~catalog.integrations.flashinfer.single_prefill_with_kv_cache`.
            rope_theta: likewise.
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
        given = dict(locals())
        refuse(window_right=window_right or None)
        encoding = encoding_of(pos_encoding_mode, rope_scale, rope_theta)
        dtypes = dtypes_of(q_data_type, kv_data_type, o_data_type, data_type)
        batch = last_page_len.shape[0]
        pages = self._page_table(indptr, indices, last_page_len, page_size, batch)
        keys, causal = pages.capacity, q_len_per_req > 1
        options = options_with("bshd", keys, sm_scale, causal, window_left, logits_soft_cap)
        sequences = Batch(num_qo_heads, (q_len_per_req,) * batch, tuple(pages.lengths.tolist()), keys)
        added = added_to(sequences, None, encoding.biases, options, dtypes.q, self._device)
        q = (batch * q_len_per_req, num_qo_heads, head_dim)
        splits = 1 if disable_split_kv else 0
        unwritten = pages.unwritten(num_kv_heads, head_dim, head_dim)
        shape = (batch, q_len_per_req, num_qo_heads, head_dim)
        slopes: Slopes = "1h" if encoding.biases else "no"

        def posed(plan: Planned) -> Problem:
            return attention_problem(shape, unwritten, plan.elements, self._device, options, slopes, splits)

        elements = elements_given(dtypes, encoding.rotates)
        plan = Planned(q, num_kv_heads, head_dim, dtypes, options, window_left, encoding, added, elements)
        self._set_plan(plan, posed, given)
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
        if plan.encoding.rotates:
            q = rotated(q, self._last_places(), plan.encoding)
        rows = q.unflatten(0, (self._pages.table.shape[0], self._queries))
        o, found = attend(rows, cache, self._pages.lengths, options, plan.added.slopes, self._splits)
        natural = plan.added.lse(found.transpose(1, 2).flatten(0, 1))
        return results(o.flatten(0, 1), natural, return_lse, v_scale, out, lse, plan.dtypes.o)

    def _last_places(self) -> torch.Tensor:
        """The positions of the queries, (queries,), the last ones of their sequences."""
        steps = torch.arange(-self._queries, 0, device=self._device)
        return (self._pages.lengths[:, None] + steps).flatten()

    def run_return_lse(self, *args: Any, **options: Any) -> Attended:
        """:meth:`run` with ``return_lse=True``."""
        return self.run(*args, **options, return_lse=True)


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    *args: Any,
    global_override_indptr_cpu: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Like ``flashinfer.fast_decode_plan``: ``plan`` of the wrapper's class, with ``indptr`` on the CPU if it is there.

    Args:
        wrapper: what is planned.
        indptr: as of :meth:`BatchDecodeWithPagedKVCacheWrapper.plan`.
        args: likewise.
        global_override_indptr_cpu: the same values as ``indptr``, on the CPU.
        options: as of :meth:`BatchDecodeWithPagedKVCacheWrapper.plan`.

    Raises:
        CatalogError: as :meth:`BatchDecodeWithPagedKVCacheWrapper.plan`.
    """
    starts = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    type(wrapper).plan(wrapper, starts, *args, **options)
