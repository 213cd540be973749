"""Which calls of PyTorch's attention have kernels, and counts of the calls that went elsewhere."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch

from catalog.errors import CatalogError
from catalog.ops.attention.fields import MaskWord
from catalog.runtime.catalog import Catalog
from catalog.settings import settings
from catalog.torch.calls import HDIM_STEP, Case, Layout, Options, Shape, arch_of, problem_of

_LENGTH = 128
"""Queries and keys of the problems that stand for those of any length."""
_MOST_REASONS = 100
"""Maximum number of reasons that are counted one by one: messages may contain sizes, so there is no end of them."""


class Traits(NamedTuple):
    """What decides whether kernels support a call: plain values, so that a traced graph can ask for it.

    ``heads`` are those of Q, and of K and V; ``hdims`` that of Q and K, and that of V. ``gradients``: whether Q, K or V
    needs one, and whether the bias does. ``soft_cap`` and ``dropout``: whether there is one. The rest is as in
    :class:`~catalog.torch.calls.Options`.
    """

    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int]
    hdims: tuple[int, int]
    bias: bool
    gradients: tuple[bool, bool]
    layout: Layout
    mask: MaskWord
    left: int
    right: int
    soft_cap: bool
    dropout: bool

    @property
    def cases(self) -> tuple[Case, ...]:
        """The problems that a call poses, forward and backward, with lengths that stand for any."""
        options = Options(
            self.layout,
            self.mask,
            self.left,
            self.right,
            None,
            self.soft_cap * 30.0,
            self.dropout * 0.5,
            deterministic=False,
        )
        heads_q, heads_k = self.heads
        step = HDIM_STEP if self.device.type == "cuda" and torch.version.hip is None else 1
        hdim_q, hdim_v = (hdim + -hdim % step for hdim in self.hdims)
        axes: Mapping[Layout, Callable[[int, int], Shape]] = {
            "packed": lambda heads, hdim: (_LENGTH, heads, hdim),
            "bshd": lambda heads, hdim: (1, _LENGTH, heads, hdim),
            "bhsd": lambda heads, hdim: (1, heads, _LENGTH, hdim),
        }
        shape = axes[self.layout]
        lengths = (_LENGTH,) if self.layout == "packed" else None
        forward = Case(
            op="fwd",
            dtype=self.dtype,
            bias="bias" if self.bias else "no",
            bias_dims="bh",
            dbias=False,
            dlse=False,
            options=options,
            q=shape(heads_q, hdim_q),
            k=shape(heads_k, hdim_q),
            v=shape(heads_k, hdim_v),
            lengths_q=lengths,
            lengths_k=lengths,
            pages=0,
        )
        backward = forward._replace(op="bwd", dbias=self.gradients[1])
        return (forward, backward) if any(self.gradients) else (forward,)


def traits_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, options: Options, heads: int
) -> Traits:
    """The traits of a call; ``heads`` is the axis of the heads.

    Of graphs with dynamic shapes, heads and head dims become constants: :func:`operator.index` does that, ``int`` not.
    """
    gradients = torch.is_grad_enabled()
    return Traits(
        q.device,
        q.dtype,
        (index(q.shape[heads]), index(k.shape[heads])),
        (index(q.shape[-1]), index(v.shape[-1])),
        bias is not None,
        (
            gradients and (q.requires_grad or k.requires_grad or v.requires_grad),
            gradients and bias is not None and bias.requires_grad,
        ),
        options.layout,
        options.mask,
        options.left,
        options.right,
        given(options.soft_cap),
        given(options.dropout),
    )


def given(option: float) -> bool:
    """Whether an option is not zero; in traced graphs a branch makes a constant of it, ``bool`` does not."""
    if option:  # noqa: SIM103
        return True
    return False


def refusal(traits: Traits) -> str | None:
    """Why no kernel answers calls with these traits; None if kernels do. While a graph is traced it counts the call."""
    if torch.compiler.is_compiling():
        from catalog.torch.graph_constants import constant  # imports Dynamo

        reason: str | None = constant(_counted_refusal, *traits)
        return reason
    return _refusal(traits)


@lru_cache(maxsize=4096)
def _refusal(traits: Traits) -> str | None:
    if settings().choices is not None:  # they say it of each call, and there may be no catalog to ask
        return None
    if any(traits.gradients) and traits.soft_cap and traits.dropout:
        return "the catalog's backward has no dropout together with a soft cap of the scores"
    for case in traits.cases:
        try:
            problem = problem_of(case)
        except CatalogError as error:
            return error.message
        try:
            Catalog.default().stages(problem, arch=arch_of(traits.device))
        except CatalogError as error:
            return error.message.replace(f"answers the problem {problem.key}", "answers such calls")
    return None


def _counted_refusal(*traits: Any) -> str | None:
    reason = _refusal(Traits(*traits))
    if reason is None:
        counts.answered()
    else:
        counts.refused(reason)
    return reason


@dataclass(frozen=True)
class Report:
    """Counts of attention calls by who answered them; a call inside a compiled graph counts whenever it is traced."""

    catalog: int = 0
    """Calls that the catalog's kernels answered."""
    pytorch: int = 0
    """Calls that went to PyTorch's own attention, or to the model's own."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Why they did, most frequent first, with their numbers of calls."""

    def __str__(self) -> str:
        lines = [f"{self.catalog:,} calls by the catalog's kernels, {self.pytorch:,} by PyTorch's own attention"]
        lines += [f"{calls:>9,}  {reason}" for reason, calls in self.reasons.items()]
        return "\n".join(lines)


class Counts:
    """The counts of this process. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Start again at zero."""
        with self._lock:
            self._catalog = 0
            self._reasons: Counter[str] = Counter()

    def answered(self) -> None:
        """Count a call that the catalog answered."""
        with self._lock:
            self._catalog += 1

    def refused(self, reason: str) -> None:
        """Count a call that went elsewhere."""
        with self._lock:
            known = reason in self._reasons or len(self._reasons) < _MOST_REASONS
            self._reasons[reason if known else "other reasons"] += 1

    def report(self) -> Report:
        """The counts so far."""
        with self._lock:
            return Report(self._catalog, self._reasons.total(), dict(self._reasons.most_common()))


counts = Counts()
