"""PyTorch's own attention, replaced by the catalog's for a whole program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import index

import torch
from torch.nn import functional

from catalog.errors import CatalogError, SelectionError
from catalog.torch.sdpa import scaled_dot_product_attention
from catalog.torch.support import Report, Traits, counts, given, refusal

Attention = Callable[..., torch.Tensor]

_own: Attention = functional.scaled_dot_product_attention
"""PyTorch's own function."""


def install(*, strict: bool = False) -> None:
    """Replace :func:`torch.nn.functional.scaled_dot_product_attention` by the catalog's, for every thread.

    Modules that call it as an attribute of :mod:`torch.nn.functional` use the catalog's kernels from now on, PyTorch's
    own modules, diffusers and transformers' ``sdpa`` among them. A module that has imported the function itself keeps
    PyTorch's, as does a graph that :func:`torch.compile` has made before. Calls that no kernel supports go to PyTorch's
    own function and are counted: see :func:`report`, which starts at zero here.

    Args:
        strict: raise the error of a call that no kernel supports, instead of passing it to PyTorch.
    """
    counts.clear()
    functional.scaled_dot_product_attention = _replacement(strict=strict)


def uninstall() -> None:
    """Put PyTorch's own :func:`torch.nn.functional.scaled_dot_product_attention` back; harmless if it is there."""
    functional.scaled_dot_product_attention = _own


@contextmanager
def installed(*, strict: bool = False) -> Iterator[None]:
    """:func:`install` for the duration of a ``with`` block, after which the function of before is back.

    Args:
        strict: as there.
    """
    before = functional.scaled_dot_product_attention
    install(strict=strict)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def report() -> Report:
    """The attention calls since :func:`install`, by who answered them, and the reasons of those that PyTorch answered.

    ``print(report())`` shows it as a table. Calls of :mod:`catalog.integrations.transformers` count too.
    """
    return counts.report()


def _replacement(*, strict: bool) -> Attention:
    """What :func:`install` puts in the place of PyTorch's function."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        def by(attention: Attention) -> torch.Tensor:
            return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        reason = _reason(query, key, value, attn_mask, dropout_p, is_causal)
        if reason is not None and strict:
            raise SelectionError(reason, hint="Without strict=True, install() leaves such calls to PyTorch.")
        if torch.compiler.is_compiling():
            return by(scaled_dot_product_attention if reason is None else _own)
        if reason is None:
            try:
                o = by(scaled_dot_product_attention)
            except CatalogError as error:
                if strict:
                    raise
                reason = error.message
            else:
                counts.answered()
                return o
        counts.refused(reason)
        return by(_own)

    return attend


def _reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> str | None:
    """Why the catalog should not be asked, as far as the call's traits say it; None if they say nothing."""
    tensors = (query, key, value)
    if not torch.compiler.is_compiling() and (
        torch.overrides.has_torch_function(tensors) or any(tensor.is_nested for tensor in tensors)
    ):
        return f"tensors are {', '.join(sorted({type(tensor).__name__ for tensor in tensors}))}, or nested"
    if min(query.dim(), key.dim(), value.dim()) < 2:
        return "tensors have fewer than two axes"
    kind, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    masked = isinstance(attn_mask, torch.Tensor)
    gradients = torch.is_grad_enabled()
    return refusal(
        Traits(
            query.device,
            dtype,
            (index(query.shape[-3]) if query.dim() > 2 else 1, index(key.shape[-3]) if key.dim() > 2 else 1),
            (index(query.shape[-1]), index(value.shape[-1])),
            masked,
            (
                gradients and (query.requires_grad or key.requires_grad or value.requires_grad),
                gradients and attn_mask is not None and masked and attn_mask.requires_grad,
            ),
            "bhsd",
            "top_left" if is_causal else "no",
            -1,
            0,
            False,
            given(dropout_p),
        )
    )
