"""What FlashInfer's wrappers of batches have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from catalog.errors import ArgumentError, SelectionError
from catalog.integrations.flashinfer.arguments import (
    Attended,
    Dtypes,
    KvLayout,
    as_planned,
    check_layout,
    converted,
    refuse,
    refuse_graph,
)
from catalog.integrations.flashinfer.pages import PageTable, lengths_by_last_page, page_table
from catalog.integrations.flashinfer.positions import Encoding, rotated
from catalog.integrations.flashinfer.scores import Added
from catalog.runtime.catalog import Catalog
from catalog.schema.problem import Problem
from catalog.torch.cached import KvCache
from catalog.torch.calls import Elements, Options, arch_of

Pages = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A paged cache: (pages, 2, page size, heads, head dim), or K and V; in HND heads come before the page's tokens."""

_BUFFERS = frozenset(
    {"paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"}
    | {"qo_indptr_buf", "kv_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"}
    | {"custom_mask_buf", "mask_indptr_buf"}
)
"""Arguments that name the memory of captured graphs."""


class Planned(NamedTuple):
    """What every ``plan`` leaves to ``run``; ``q`` is (tokens, heads, head dim).

    ``options`` lack the scales that are arguments of ``run``. ``elements`` are the types that kernels are given: K and
    V of another type are converted to that of Q where no kernel takes them as they are.
    """

    q: tuple[int, int, int]
    nhead_k: int
    hdim_v: int
    dtypes: Dtypes
    options: Options
    window_left: int
    encoding: Encoding
    added: Added
    elements: Elements

    @property
    def converts(self) -> bool:
        """Whether K and V are given to kernels in the type of Q, and have another one."""
        return self.elements == self.dtypes.q != self.dtypes.kv


class Wrapper:
    """What the wrappers of batches have in common.

    Args:
        float_workspace_buffer: on the device of the tensors; it is not used otherwise.
        kv_layout: NHD or HND.
        use_cuda_graph: on a GPU only False; no effect on a CPU, where nothing is captured.
        use_tensor_cores: no effect.
        backend: no effect.
        others: the buffers of captured graphs, which have no effect; else only None.

    Raises:
        UnsupportedArgumentError: an argument asks for what no kernel does.
        ArgumentError: there is no such layout.
    """

    _UNLESS_GIVEN: ClassVar[Mapping[str, Any]] = {
        "pos_encoding_mode": "NONE",
        "window_left": -1,
        "logits_soft_cap": None,
        "sm_scale": None,
        "rope_scale": None,
        "rope_theta": None,
    }
    """The options of a plan that :meth:`forward` sets, and their defaults."""

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
        self._device = float_workspace_buffer.device
        refuse_graph(use_cuda_graph, self._device)
        refuse(**{name: value for name, value in others.items() if name not in _BUFFERS})
        check_layout(kv_layout)
        self._layout: KvLayout = kv_layout
        self._plan: Planned | None = None
        self._given: Mapping[str, Any] = {}
        self.is_cuda_graph_enabled = use_cuda_graph
        self.use_tensor_cores = use_tensor_cores

    def reset_workspace_buffer(self, *buffers: torch.Tensor) -> None:
        """Do nothing: the catalog's plans have their own workspaces."""

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer."""

    def forward(
        self,
        *tensors: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        use_fp16_qk_reduction: bool = False,
        return_lse: bool = False,
        **options: Any,
    ) -> Attended:
        """``run`` with these options instead of the plan's, as FlashInfer's older interface has it.

        Args:
            tensors: those of ``run``.
            q_scale: as of ``run``.
            k_scale: as of ``run``.
            v_scale: as of ``run``.
            use_fp16_qk_reduction: no effect.
            return_lse: as of ``run``.
            options: options of ``plan``, by keyword: ``pos_encoding_mode``, ``window_left``, ``logits_soft_cap``,
                ``sm_scale``, ``rope_scale``, ``rope_theta``, and ``causal`` of prefills. Those left out have their
                defaults, not the plan's values. If they change, the batch is planned again.

        Raises:
            ArgumentError: there is no plan, or no such option.
            CatalogError: as ``plan`` and ``run``.
        """
        unknown = sorted(options.keys() - self._UNLESS_GIVEN.keys())
        if unknown:
            raise ArgumentError(f"forward has no option {unknown[0]}: it has {', '.join(self._UNLESS_GIVEN)}")
        if self._plan is None:
            raise ArgumentError(f"{type(self).__name__}.forward needs a plan: call begin_forward first")
        wanted = {**self._UNLESS_GIVEN, **options}
        if any(self._given[name] != value for name, value in wanted.items()):
            type(self).plan(self, **{**self._given, **wanted})  # type: ignore[attr-defined]
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        result: Attended = self.run(*tensors, **scales, return_lse=return_lse)  # type: ignore[attr-defined]
        return result

    def forward_return_lse(self, *tensors: Any, **options: Any) -> Attended:
        """:meth:`forward` with ``return_lse=True``."""
        return self.forward(*tensors, **options, return_lse=True)

    def _set_plan(self, plan: Planned, posed: Callable[[Planned], Problem], given: Mapping[str, Any]) -> None:
        """Select the kernels of a problem and build them, so that ``run`` only launches.

        ``posed`` gives the problem of a plan. ``given`` are the local variables of ``plan`` at its beginning, its
        arguments.
        """
        arch = arch_of(self._device)
        try:
            selected = Catalog.select(posed(plan), arch=arch)
        except SelectionError:
            if plan.elements == plan.dtypes.q:
                raise
            plan = plan._replace(elements=plan.dtypes.q)
            selected = Catalog.select(posed(plan), arch=arch)
        selected.build()
        self._plan = plan
        self._given = {name: value for name, value in given.items() if name not in ("self", "others", "__class__")}
        self._given |= given.get("others", {})

    def _planned(self, q: torch.Tensor, window_left: int | None, **refused: Any) -> Planned:
        """The plan, which the arguments of ``run`` must fit."""
        refuse(**refused)
        if self._plan is None:
            raise ArgumentError(f"{type(self).__name__}.run needs a plan: call plan first")
        if window_left not in (None, self._plan.window_left):
            raise ArgumentError(f"window_left={window_left}, and the plan is for window_left={self._plan.window_left}")
        as_planned("q", q, self._plan.q, self._plan.dtypes.q)
        return self._plan


class PagedWrapper(Wrapper):
    """What the wrappers of batches over pages have in common."""

    _pages: PageTable

    def _cache(self, cache: Pages, plan: Planned) -> KvCache:
        """A paged cache as kernels read it: (pages, page size, heads, head dim).

        It is not copied, unless K is rotated, or kernels do not take its type with that of Q: then the used pages are.
        """
        k, v = cache.unbind(1) if isinstance(cache, torch.Tensor) else cache
        if self._layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        pages = self._pages
        of_page = (k.shape[0], pages.size, plan.nhead_k)
        as_planned("the cache of K", k, (*of_page, plan.q[2]), plan.dtypes.kv)
        as_planned("the cache of V", v, (*of_page, plan.hdim_v), plan.dtypes.kv)
        if not plan.encoding.rotates and not plan.converts:
            return KvCache(k, v, pages.table)
        k, v = (converted(pages.copies(tensor), plan.dtypes.q) for tensor in (k, v))
        if plan.encoding.rotates and len(pages.used):
            k = rotated(k.flatten(0, 1), pages.positions, plan.encoding).unflatten(0, (-1, pages.size))
        return KvCache(k, v, pages.of_copies)

    def _page_table(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int, batch: int
    ) -> PageTable:
        """The pages of ``batch`` sequences, from FlashInfer's three vectors."""
        lengths = lengths_by_last_page(indptr, indices, last_page_len, page_size, batch)
        return page_table(indptr, indices, lengths, page_size, self._device)
