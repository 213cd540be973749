"""Attention over a paged K/V cache for servers: batches that mix prompts, parts of prompts, and single new tokens.

A server keeps the K and V of all its sequences in the pages of one :class:`PagedCache`. Each step it chooses some
sequences and the number of their next tokens, :meth:`PagedCache.plan` makes a :class:`Step` of them, and each layer of
the model calls :meth:`Step.forward`, which writes the new K and V and attends to all tokens so far. So do the attention
backends of vLLM and SGLang: metadata once a step, and a forward for each layer that is given slots and page tables.

Sequences with one new token (decoding) run on kernels that divide the keys of a sequence to fill the device; the others
are one packed batch. :meth:`PagedCache.fixed_step` makes steps whose tensors stay where they are, for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from catalog.errors import ArgumentError, TensorError, UsageError
from catalog.runtime.catalog import Catalog
from catalog.runtime.plan import Plan
from catalog.torch.cached import KvCache, attention_problem
from catalog.torch.calls import Case, Layout, Options, arch_of, elements_of, problem_of, ready
from catalog.torch.flash import options_of

_SPARE = 0
"""The page that no sequence owns: unused rows of a fixed step write there."""


@dataclass
class CachedSequence:
    """A sequence in a cache: its pages in order, and the number of tokens whose K and V are in them."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


Batch = Sequence[tuple[CachedSequence, int]]
"""Sequences and the numbers of their new tokens. Those with one token come first, to be decoded."""


class PagedCache:
    """K and V of all layers, in pages of tokens, and the list of free pages.

    Args:
        layers: number of layers.
        pages: number of pages, of which one is kept back.
        page_size: tokens of a page.
        nhead_k: heads of K and V.
        hdim: head dim of Q and K.
        hdim_v: head dim of V; default: that of K.
        dtype: float32, float16 or bfloat16; or float8_e4m3fn, half of a cache of 16 bits: K and V are rounded to it
            when they are written, and to ±448 if they are larger. Queries then have 16 bits.
        device: where the cache is.

    Attributes:
        k: K of each layer, (pages, page size, heads, head dim).
        v: likewise V.
        page_size: tokens of a page.
        sizes: heads of K and V, head dim of Q and K, head dim of V.
        dtype: element type.
        device: where it is.

    Raises:
        ArgumentError: a size is not positive, or there are fewer than two pages.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        nhead_k: int,
        hdim: int,
        hdim_v: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(layers, page_size, nhead_k, hdim) < 1 or pages < 2:
            raise ArgumentError(
                f"layers={layers}, pages={pages}, page_size={page_size}, nhead_k={nhead_k}, hdim={hdim}: must be "
                "positive, and at least two pages, of which one is kept back"
            )
        self.page_size, self.sizes, self.dtype = page_size, (nhead_k, hdim, hdim_v or hdim), dtype
        self.k, self.v = (
            [torch.zeros(pages, page_size, nhead_k, dim, dtype=dtype, device=device) for _ in range(layers)]
            for dim in (hdim, hdim_v or hdim)
        )
        self.device = self.k[0].device
        self._rows = [
            tuple(_copied(each).flatten(0, 1).flatten(1) for each in pair) for pair in zip(self.k, self.v, strict=True)
        ]
        self._free = [page for page in reversed(range(pages)) if page != _SPARE]

    @property
    def free_pages(self) -> int:
        """The number of pages that belong to no sequence."""
        return len(self._free)

    def grow(self, sequence: CachedSequence, tokens: int) -> bool:
        """Give a sequence the pages for ``tokens`` more tokens; False, and no page, if too few are free."""
        missing = -(-(sequence.length + tokens) // self.page_size) - len(sequence.pages)
        if missing > len(self._free):
            return False
        sequence.pages.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, sequence: CachedSequence) -> None:
        """Take all pages of a sequence back; it is empty then."""
        self._free.extend(reversed(sequence.pages))
        sequence.pages.clear()
        sequence.length = 0

    def plan(self, batch: Batch) -> Step:
        """Plan a step, and count the new tokens of its sequences as cached.

        Args:
            batch: the sequences, which have the pages for their new tokens. Their tokens are packed in this order. Up
                to the first sequence with several new tokens, all are decoded, one query each.

        Raises:
            ArgumentError: there is no sequence or no new token, or a sequence lacks pages.
        """
        widest = self._checked(batch)
        # The width is a power of two, so a sequence that grows is seldom another problem.
        where = _positions(batch, 1 << (widest - 1).bit_length(), self.page_size)
        new = [tokens for _, tokens in batch]
        decoded = next((i for i, tokens in enumerate(new) if tokens > 1), len(new))
        step = Step(self, **where.on(self.device), decoded=decoded, chunks=tuple(new[decoded:]))
        for sequence, tokens in batch:
            sequence.length += tokens
        return step

    def fixed_step(self, sequences: int, tokens: int) -> Step:
        """A step for up to ``sequences`` that are decoded, each with up to ``tokens`` tokens, the new one included.

        Its tensors stay where they are: a CUDA graph of a model's forward with this step can be replayed after each
        :meth:`Step.refill`. Run the forward once before it is captured: kernels are compiled, checked and loaded then.

        Raises:
            ArgumentError: a number is not positive.
        """
        if min(sequences, tokens) < 1:
            raise ArgumentError(f"sequences={sequences}, tokens={tokens}: must be positive")
        where = _positions([], -(-tokens // self.page_size), self.page_size, rows=sequences)
        return Step(self, **where.on(self.device), decoded=sequences, chunks=())

    def _checked(self, batch: Batch) -> int:
        """The largest number of pages of a sequence, of a batch whose sequences have room.

        Raises:
            ArgumentError: as :meth:`plan`.
        """
        if not batch:
            raise ArgumentError("a step needs at least one sequence")
        for i, (sequence, tokens) in enumerate(batch):
            room = len(sequence.pages) * self.page_size
            if tokens < 1 or sequence.length + tokens > room:
                raise ArgumentError(
                    f"sequence {i} of the batch has {sequence.length} tokens, {tokens} new ones, and pages for {room}",
                    hint="Each needs at least one new token, and PagedCache.grow before.",
                )
        return max(len(sequence.pages) for sequence, _ in batch)


class Attended(NamedTuple):
    """O, (tokens, heads, head dim of V), and LSE, float32, (tokens, heads)."""

    o: torch.Tensor
    lse: torch.Tensor


class _Positions(NamedTuple):
    """What the tokens of a step and its sequences are: see :class:`Step`."""

    positions: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    def on(self, device: torch.device) -> dict[str, Any]:
        """The tensors on a device, by name."""
        return {name: tensor.to(device, non_blocking=True) for name, tensor in self._asdict().items()}


def _positions(batch: Batch, width: int, page_size: int, rows: int | None = None) -> _Positions:
    """The positions of a batch, on the CPU, filled up to ``rows`` sequences of length 0 with one token each."""
    unused = 0 if rows is None else rows - len(batch)
    pages = [sequence.pages[:width] + [_SPARE] * (width - len(sequence.pages)) for sequence, _ in batch]
    table = torch.tensor(pages + [[_SPARE] * width] * unused, dtype=torch.int32)
    before = torch.tensor([sequence.length for sequence, _ in batch] + [0] * unused)
    new = torch.tensor([tokens for _, tokens in batch] + [1] * unused)
    ends = new.cumsum(0)
    owner = torch.repeat_interleave(new)
    positions = torch.arange(len(owner)) - (ends - new - before)[owner]
    slots = table[owner, positions // page_size] * page_size + positions % page_size
    lengths = (before + new).to(torch.int32)
    lengths[len(batch) :] = 0
    return _Positions(positions, slots, ends - 1, table, lengths)


@dataclass(frozen=True, eq=False)
class Step:
    """One forward of a model: which tokens of which sequences, and where their K and V go.

    Attributes:
        cache: the cache.
        positions: int64, (tokens,): the position of each token in its sequence.
        slots: int64, (tokens,): its slot, page * page size + place in the page.
        last: int64, (sequences,): the place of the last token of each sequence among all tokens.
        table: int32, (sequences, pages): the pages of each sequence.
        lengths: int32, (sequences,): the tokens of each sequence, the new ones included.
        decoded: the number of leading sequences that have one new token.
        chunks: the numbers of new tokens of the others.
    """

    cache: PagedCache
    positions: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    decoded: int
    chunks: tuple[int, ...]
    _parts: dict[Any, tuple[_Part, ...]] = field(default_factory=dict, repr=False)

    def refill(self, batch: Batch) -> None:
        """Make a fixed step one of other sequences, each with one new token, and count these as cached.

        Raises:
            ArgumentError: as :meth:`PagedCache.plan`, or the step is too small, or a sequence has more new tokens.
        """
        widest = self.cache._checked(batch)
        rows, width = self.table.shape
        if self.chunks or len(batch) > rows or widest > width or any(tokens != 1 for _, tokens in batch):
            raise ArgumentError(
                f"a step of {rows} sequences of {width} pages and {sum(self.chunks)} tokens of prompts cannot take "
                f"{len(batch)} sequences of up to {widest} pages with {[tokens for _, tokens in batch]} new tokens",
                hint="Make one with PagedCache.fixed_step that is large enough, for one new token of each sequence.",
            )
        where = _positions(batch, width, self.cache.page_size, rows)
        for name, tensor in where._asdict().items():
            getattr(self, name).copy_(tensor)
        for sequence, _ in batch:
            sequence.length += 1

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        window_left: int = -1,
        soft_cap: float = 0.0,
    ) -> Attended:
        """Write K and V of the new tokens into the cache of a layer, and attend to all tokens of each sequence.

        A query sees the tokens up to its own. The first call of a kind of layer selects the kernels of the step.

        Args:
            layer: number of the layer.
            q: (tokens, heads, head dim), already rotated.
            k: (tokens, heads of K and V, head dim), likewise.
            v: (tokens, heads of K and V, head dim of V).
            scale: factor of the scores, positive; default 1 / sqrt(head dim).
            window_left: number of tokens that a query sees before its own; -1 for all.
            soft_cap: c of c * tanh(score / c); 0: none.

        Returns:
            :class:`Attended`.

        Raises:
            ArgumentError: the cache has no such layer.
            TensorError: a tensor does not fit the step or the cache.
            UsageError: a gradient is wanted.
            ProblemError, SelectionError, DeviceError, BuildError, ToolchainError: as
                :func:`catalog.torch.flash_attn_with_kvcache`.
        """
        cache = self.cache
        self._check(layer, q, k, v)
        for rows, new in zip(cache._rows[layer], (k, v), strict=True):
            rows.index_copy_(0, self.slots, _copied(_rounded(new, cache.dtype)).flatten(1))
        key = (q.dtype, q.shape[1], scale, window_left, soft_cap)
        parts = self._parts.get(key)
        if parts is None:
            store = KvCache(cache.k[layer], cache.v[layer], self.table)
            parts = self._parts[key] = tuple(self._selected(q, store, scale, window_left, soft_cap))
        if len(parts) == 1:
            return parts[0].attend(q, cache.k[layer], cache.v[layer])
        each = [part.attend(q[part.rows], cache.k[layer], cache.v[layer]) for part in parts]
        return Attended(torch.cat([one.o for one in each]), torch.cat([one.lse for one in each]))

    def _check(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if not 0 <= layer < len(self.cache.k):
            raise ArgumentError(f"layer={layer}, and the cache has {len(self.cache.k)} layers")
        tokens, (heads, hdim, hdim_v) = self.decoded + sum(self.chunks), self.cache.sizes
        of_k, of_v = (tokens, heads, hdim), (tokens, heads, hdim_v)
        if k.shape != of_k or v.shape != of_v or q.dim() != 3 or q.shape[0] != tokens or q.shape[2] != hdim:
            raise TensorError(
                f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: the step has {tokens} tokens, so "
                f"expected q ({tokens}, heads, {hdim}), k {of_k}, v {of_v}"
            )
        stored = self.cache.dtype
        dtype = stored if elements_of(q.dtype, stored) == q.dtype else q.dtype
        if q.dtype != dtype or k.dtype != dtype or v.dtype != dtype:
            raise TensorError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}, and the cache is {stored}")
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise UsageError("attention over a cache has no gradient", hint="Use torch.no_grad().")

    def _selected(
        self, q: torch.Tensor, cache: KvCache, scale: float | None, window_left: int, soft_cap: float
    ) -> Iterator[_Part]:
        """The parts of the step, with the kernels that answer them."""
        heads, hdim, arch = q.shape[1], q.shape[2], arch_of(q.device)
        elements = elements_of(q.dtype, cache.k.dtype)

        def options(layout: Layout, causal: bool) -> Options:
            window = (window_left, -1)
            return options_of(layout, cache.capacity, 0.0, scale, causal, window, soft_cap, deterministic=False)

        if self.decoded:
            # One query sees all tokens without a mask, too; a window needs one.
            last = options("bshd", causal=window_left >= 0)
            problem = attention_problem((self.decoded, 1, heads, hdim), cache, elements, q.device, last)
            rows = slice(self.decoded)
            yield _Part(Catalog.select(problem, arch=arch), rows, self.table[rows], self.lengths[rows], decodes=True)
        if self.chunks:
            shapes = (sum(self.chunks), heads, hdim), tuple(cache.k.shape), tuple(cache.v.shape)
            about = Case(
                "pagedkv",
                elements,
                "no",
                "1h",
                False,
                False,
                options("packed", causal=True),
                *shapes,
                lengths_q=self.chunks,
                lengths_k=None,
                pages=self.table.shape[1],
            )
            rows = slice(self.decoded, None)
            plan = Catalog.select(problem_of(about), arch=arch)
            yield _Part(plan, rows, self.table[rows], self.lengths[rows], decodes=False)


def _rounded(new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Tokens in the type of a cache."""
    if new.dtype == dtype:
        return new
    largest = torch.finfo(dtype).max
    return new.clamp(-largest, largest).to(dtype)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as PyTorch copies it by index: elements of 8 bits only as integers."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


class _Part(NamedTuple):
    """Sequences of a step that one plan computes: its rows in both tokens and sequences."""

    plan: Plan
    rows: slice
    table: torch.Tensor
    lengths: torch.Tensor
    decodes: bool

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attended:
        """The results for its tokens; ``k`` and ``v`` are the pages of a layer."""
        q = ready(q, self.plan.arch)
        found = self.plan.enqueue(
            {
                "q": q.unsqueeze(1) if self.decodes else q,
                "k_cache": k,
                "v_cache": v,
                "block_table": self.table,
                "seqlens_k": self.lengths,
            }
        )
        o, lse = found["o"], found["lse"]
        return Attended(o.squeeze(1), lse.squeeze(2)) if self.decodes else Attended(o, lse.T)
