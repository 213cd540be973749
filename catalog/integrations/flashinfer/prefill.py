"""Prefills of batches with FlashInfer's interface: over pages, and over packed K and V."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from catalog.integrations.flashinfer.arguments import (
    Attended,
    Dtype,
    as_planned,
    converted,
    dtypes_of,
    elements_given,
    lengths_of,
    options_with,
    refuse,
    refuse_gradient,
    results,
    scale_of,
    starts_of,
    tokens_first,
    unless_hints,
)
from catalog.integrations.flashinfer.positions import encoding_of, places, rotated
from catalog.integrations.flashinfer.scores import Batch, added_to, check_pairs, mask_of
from catalog.integrations.flashinfer.wrapper import PagedWrapper, Pages, Planned, Wrapper
from catalog.torch.cached import KvCache
from catalog.torch.calls import Case, Options, call, problem_of
from catalog.torch.ops import forward


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Like FlashInfer's: packed queries of many sequences over a paged cache."""

    _UNLESS_GIVEN: ClassVar = {**Wrapper._UNLESS_GIVEN, "causal": False}

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
            custom_mask: bool, the (queries, keys) of each sequence, row by row, one sequence after the other; True for
                keys that are seen. Then ``causal`` has no effect.
            packed_custom_mask: uint8, the same, eight elements a byte, the lowest bit first; each sequence starts a new
                byte.
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
        given = dict(locals())
        refuse(**unless_hints(others))
        encoding = encoding_of(pos_encoding_mode, rope_scale, rope_theta)
        dtypes = dtypes_of(q_data_type, kv_data_type, others.get("o_data_type"))
        hdim_v = head_dim_vo or head_dim_qk
        starts = starts_of("qo_indptr", qo_indptr)
        pages = self._page_table(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, starts.shape[0] - 1
        )
        tokens, lengths = lengths_of(starts), tuple(pages.lengths.tolist())
        masks = mask_of(custom_mask, packed_custom_mask, tokens, lengths)
        keys = pages.capacity
        options = options_with("packed", keys, sm_scale, causal and masks is None, window_left, logits_soft_cap)
        batch = Batch(num_qo_heads, tokens, lengths, keys)
        added = added_to(batch, masks, encoding.biases, options, dtypes.q, self._device)
        q = (int(starts[-1]), num_qo_heads, head_dim_qk)
        elements = elements_given(dtypes, encoding.rotates)
        plan = Planned(q, num_kv_heads, hdim_v, dtypes, options, window_left, encoding, added, elements)
        unwritten = pages.unwritten(num_kv_heads, head_dim_qk, hdim_v)
        self._set_plan(plan, lambda plan: problem_of(paged_case(plan, unwritten, tokens, options)), given)
        self._pages, self._tokens = pages, tokens
        self._places = places(tokens, lengths) if encoding.rotates else None

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
        if self._places is not None:
            q = rotated(q, self._places, plan.encoding)
        tensors = [("q", q), *cache.named, ("seqlens_k", self._pages.lengths), *plan.added.named]
        computed = call(paged_case(plan, cache, self._tokens, options), q.device, tensors)
        natural = plan.added.lse(computed["lse"].T)
        return results(computed["o"], natural, return_lse, v_scale, out, lse, plan.dtypes.o)

    def run_return_lse(self, *args: Any, **options: Any) -> Attended:
        """:meth:`run` with ``return_lse=True``."""
        return self.run(*args, **options, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Like FlashInfer's: packed queries over packed K and V. It has gradients."""

    _UNLESS_GIVEN: ClassVar = {**Wrapper._UNLESS_GIVEN, "causal": False}

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
        given = dict(locals())
        refuse(**unless_hints(others))
        encoding = encoding_of(pos_encoding_mode, rope_scale, rope_theta)
        dtypes = dtypes_of(q_data_type, kv_data_type, others.get("o_data_type"))
        hdim_v = head_dim_vo or head_dim_qk
        starts = (starts_of("qo_indptr", qo_indptr), starts_of("kv_indptr", kv_indptr))
        lengths = (lengths_of(starts[0]), lengths_of(starts[1]))
        check_pairs(*lengths)
        masks = mask_of(custom_mask, packed_custom_mask, *lengths)
        queries, keys = (int(start[-1]) for start in starts)
        options = options_with("packed", keys, sm_scale, causal and masks is None, window_left, logits_soft_cap)
        batch = Batch(num_qo_heads, *lengths, max(lengths[1], default=0))
        added = added_to(batch, masks, encoding.biases, options, dtypes.q, self._device)
        q = (queries, num_qo_heads, head_dim_qk)
        k, v = ((keys, num_kv_heads, hdim) for hdim in (head_dim_qk, hdim_v))
        case = Case("fwd", dtypes.q, added.word, added.axes, False, False, options, q, k, v, *lengths, 0)
        plan = Planned(q, num_kv_heads, hdim_v, dtypes, options, window_left, encoding, added, dtypes.q)
        self._set_plan(plan, lambda _: problem_of(case), given)
        self._starts = starts
        self._places = (places(*lengths), places(lengths[1])) if encoding.rotates else None

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
        as_planned("k", k, (*of_keys, plan.q[2]), plan.dtypes.kv)
        as_planned("v", v, (*of_keys, plan.hdim_v), plan.dtypes.kv)
        k, v = (converted(tensor, plan.dtypes.q) for tensor in (k, v))
        if self._places is not None:
            q, k = (rotated(tensor, at, plan.encoding) for tensor, at in zip((q, k), self._places, strict=True))
        options = plan.options._replace(scale=scale_of(plan.options.scale, plan.q[2], q_scale, k_scale))
        o, found = forward(q, k, v, plan.added.bias, plan.added.slopes, *self._starts, None, None, options)
        return results(o, plan.added.lse(found.T), return_lse, v_scale, out, lse, plan.dtypes.o)

    def run_return_lse(self, *args: Any, **options: Any) -> Attended:
        """:meth:`run` with ``return_lse=True``."""
        return self.run(*args, **options, return_lse=True)


def paged_case(plan: Planned, cache: KvCache, tokens: tuple[int, ...], options: Options) -> Case:
    """The problem of packed queries over pages; ``tokens`` are those of each sequence."""
    shapes = (plan.q, tuple(cache.k.shape), tuple(cache.v.shape))
    width = 0 if cache.table is None else cache.table.shape[1]
    added = plan.added
    return Case("pagedkv", plan.elements, added.word, added.axes, False, False, options, *shapes, tokens, None, width)
