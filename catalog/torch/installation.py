"""PyTorch's own attention, replaced by the catalog's for a whole program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import index

import torch
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from catalog.errors import CatalogError, SelectionError
from catalog.torch.sdpa import scaled_dot_product_attention
from catalog.torch.support import Report, Traits, counts, given, refusal

Attention = Callable[..., torch.Tensor]

OWN: Attention = functional.scaled_dot_product_attention
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
    functional.scaled_dot_product_attention = replacement(strict=strict)


def uninstall() -> None:
    """Put PyTorch's own :func:`torch.nn.functional.scaled_dot_product_attention` back; harmless if it is there."""
    functional.scaled_dot_product_attention = OWN


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

    ``print(report())`` shows it as a table. Calls of :mod:`catalog.integrations.transformers` and
    :mod:`catalog.integrations.diffusers` count too.
    """
    return counts.report()


def replacement(*, strict: bool) -> Attention:
    """Attention with the signature of PyTorch's function, which counts calls and leaves to PyTorch what kernels lack.

    Args:
        strict: as of :func:`install`, which puts it in the place of PyTorch's function.
    """

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
            raise SelectionError(reason, hint="Without strict=True, such calls are left to PyTorch.")
        if torch.compiler.is_compiling():
            return by(scaled_dot_product_attention if reason is None else OWN)
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
        return by(OWN)

    return attend


def _overridden(tensors: tuple[torch.Tensor, ...]) -> str | None:
    """What overrides PyTorch's function for these tensors, or makes them another kind; None if nothing does.

    The mode of :func:`torch.set_default_device` does not count: it only says where new tensors are made.
    """
    overrides = torch.overrides.has_torch_function(tensors)
    kinds = {type(tensor) for tensor in tensors}
    if any(tensor.is_nested for tensor in tensors) or (overrides and not kinds <= {torch.Tensor, torch.nn.Parameter}):
        return f"tensors are {', '.join(sorted(kind.__name__ for kind in kinds))}, or nested"
    modes = overrides and {type(mode) for mode in _get_current_function_mode_stack()} - {DeviceContext}
    return f"calls are overridden by {', '.join(sorted(mode.__name__ for mode in modes))}" if modes else None


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
    if not torch.compiler.is_compiling() and (reason := _overridden(tensors)):
        return reason
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
