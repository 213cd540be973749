"""Attention of Hugging Face transformers' models by the catalog's kernels: ``attn_implementation="catalog"``.

The attention function and the mask function that :func:`register` adds to transformers' registries. Masks stay as few
numbers as long as they can (:mod:`catalog.integrations.masks`): causal and windowed ones are a mask of the kernels,
padded batches become packed sequences. Everything else becomes a bias.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from catalog.errors import ArgumentError, CatalogError, MissingPackageError, SelectionError
from catalog.extras import how_to_install

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
except ImportError as error:
    raise MissingPackageError(
        f"catalog.integrations.transformers needs transformers 5 ({error})", hint=how_to_install("transformers")
    ) from None

from catalog.integrations.masks import LazyMask, View, mask
from catalog.integrations.paged import Step
from catalog.ops.attention.fields import MaskWord
from catalog.torch.calls import Layout, Options
from catalog.torch.inputs import autocast_all, rng_state
from catalog.torch.ops import forward, forward_heads_first
from catalog.torch.sdpa import bias_of
from catalog.torch.support import counts, refusal, traits_of

NAME = "catalog"
"""What ``attn_implementation`` is set to."""
PAGED = "catalog_paged"
"""The same for servers that pass a step over a paged cache: see :func:`attend_paged`."""

Attended = tuple[torch.Tensor, torch.Tensor | None]

_SCORES = frozenset(("softcap", "s_aux", "sinks"))
"""Options that transformers' attention by PyTorch's kernels does not take."""
_KNOWN = _SCORES | {"dropout", "scaling", "position_bias"}


def register(*, strict: bool = False) -> None:
    """Add the implementation ``"catalog"`` to transformers: ``from_pretrained(..., attn_implementation="catalog")``.

    A model that is loaded already switches by ``model.set_attn_implementation("catalog")``. Calls that no kernel
    supports use transformers' own attention, and :func:`catalog.torch.report` counts them.

    Args:
        strict: raise the error of a call that no kernel supports instead.
    """
    AttentionInterface.register(NAME, attend_strictly if strict else attend)
    AttentionMaskInterface.register(NAME, mask)
    AttentionInterface.register(PAGED, attend_paged)
    AttentionMaskInterface.register(PAGED, lambda *_, **__: None)


def attend_strictly(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **others: Any,
) -> Attended:
    """Attention in the form that transformers' models call; differentiable once, also with respect to sinks and bias.

    Args:
        module: the attention layer; its ``is_causal`` holds where the argument is None.
        query: (batch, heads, queries, head dim).
        key: (batch, heads of K and V, keys, head dim).
        value: (batch, heads of K and V, keys, head dim of the result).
        attention_mask: what :func:`~catalog.integrations.masks.mask` returned, or a mask that was prepared elsewhere,
            (batch or 1, heads or 1, queries, keys): bool, True where a key is seen, or added to the scores.
        dropout: the probability that a weight is dropped.
        scaling: factor of the scores; default 1 / sqrt(head dim).
        is_causal: whether a call without mask is causal.
        softcap: c of c * tanh(score / c).
        s_aux: (heads,), the logit of each head's sink, which takes its share of the softmax and has no value.
        sinks: (batch or 1, heads, queries or 1, 1), logits of sinks that differ from query to query.
        position_bias: (batch or 1, heads, queries, keys), added to the scores.
        indices: (batch, queries, number), the keys that an indexer chose for each query; it sees no others.
        block_indices: (batch, heads of the indexer, queries, number), blocks of keys, likewise; -1 is none.
            ``module.indexer.block_size`` is the number of keys of a block.
        others: ignored, unless they could change the result: floating-point tensors.

    Returns:
        O, (batch, queries, heads, head dim of value), and None for the weights, which are not made.

    Raises:
        SelectionError: as :func:`catalog.torch.ops.forward`, or an unknown argument could change the result.
        TensorError, ProblemError, UsageError, DeviceError, BuildError, ToolchainError: as
            :func:`catalog.torch.ops.forward`.
    """
    _refuse_unknown(others)
    query, key, value = autocast_all(query, key, value)
    causal = _is_causal(module, is_causal)
    queries, keys = query.shape[2], key.shape[2]
    attention_mask = _of_chosen(module, query, key, attention_mask, causal, indices, block_indices)
    sink = _sink_of(s_aux, sinks)
    word: MaskWord
    bias = None
    if attention_mask is None and position_bias is None:  # most calls: what the view below shows, without making it
        word, left = ("bottom_right" if causal and queries > 1 else "no"), -1
        if causal and keys > queries > 1:
            key, value = key[:, :, :queries], value[:, :, :queries]
    else:
        view = _view_of(attention_mask, causal, queries, keys)
        if position_bias is not None:
            attention_mask, view = _biased(attention_mask, view, position_bias, queries, key), None
        elif view is not None and view.sequences is not None and queries == 1 and not softcap:
            view = None  # a bias for one query costs less than packing the keys of all sequences
        if view is None and attention_mask is not None:
            word, left = "no", -1
            bias = bias_of(attention_mask, query.dtype, (query.shape[0], query.shape[1], queries, keys))
        else:
            view = view or View(causal=False, keys=keys)
            word, left = view.kernel_mask(queries, view.keys)
            if view.sequences is not None:
                tensors = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
                options = Options("packed", word, left, 0, scaling, softcap or 0.0, dropout, False)
                return _packed(tensors, view, options, sink), None
            if view.keys != keys:
                key, value = key[:, :, : view.keys], value[:, :, : view.keys]
    # One query has the same layout either way: then only O is transposed.
    layout: Layout = "bhsd" if queries == 1 else "bshd"
    options = Options(layout, word, left, 0, scaling, softcap or 0.0, dropout, False)
    _check_support(options, query, key, value, bias, heads=1)
    state = rng_state(dropout, query.device) if dropout else None
    if layout == "bshd":
        o, lse = forward_heads_first(query, key, value, bias, state, options)
    else:
        o, lse = forward(query, key, value, bias, None, None, None, None, state, options)
        o = o.transpose(1, 2)
    return _with_sinks(o, lse.transpose(1, 2), sink), None


def attend_paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step: Step | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> Attended:
    """Attention over a paged cache, ``attn_implementation="catalog_paged"``, for decoders without their own cache.

    A server calls ``model(tokens[None], position_ids=step.positions[None], step=step, use_cache=False)``; tokens are
    those of a step, packed. With ``logits_to_keep=step.last`` there are only logits after the last of each sequence.

    Args:
        module: the attention layer, whose ``layer_idx`` is that of the cache.
        query: (1, heads, tokens, head dim), rotated.
        key: (1, heads of K and V, tokens, head dim), likewise.
        value: (1, heads of K and V, tokens, head dim of the result).
        attention_mask: None: every token sees those before it in its sequence.
        step: what :meth:`catalog.integrations.paged.PagedCache.plan` returned.
        scaling: as of :func:`attend_strictly`.
        softcap: as of :func:`attend_strictly`.
        sliding_window: number of tokens that a token sees, its own included.
        s_aux: as of :func:`attend_strictly`.

    Returns:
        O, (1, tokens, heads, head dim of value), and None.

    Raises:
        ArgumentError: there is no step, or there is a mask.
        TensorError, UsageError, ProblemError, SelectionError, DeviceError, BuildError, ToolchainError: as
            :meth:`catalog.integrations.paged.Step.forward`.
    """
    if step is None or attention_mask is not None:
        raise ArgumentError(f"attn_implementation={PAGED!r} needs step=PagedCache.plan(...), and no attention mask")
    o, lse = step.forward(
        int(module.layer_idx),  # type: ignore[arg-type]  # an int, which modules do not declare
        *(tensor.transpose(1, 2)[0] for tensor in (query, key, value)),
        scale=scaling,
        window_left=-1 if sliding_window is None else sliding_window - 1,
        soft_cap=softcap or 0.0,
    )
    return _with_sinks(o, lse, s_aux)[None], None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> Attended:
    """Like :func:`attend_strictly`; what no kernel supports goes to transformers' own attention, and is counted."""
    try:
        result = attend_strictly(module, query, key, value, attention_mask, **options)
    except CatalogError as error:
        reason = error.message
    else:
        if not torch.compiler.is_compiling():
            counts.answered()
        return result
    if not torch.compiler.is_compiling():
        counts.refused(reason)
    if isinstance(attention_mask, LazyMask):
        shown, keys = attention_mask.shows, key.shape[2]
        if shown == View(shown.causal, keys) and (query.shape[2] == keys or not shown.causal):
            attention_mask, options["is_causal"] = None, shown.causal  # PyTorch's fast kernels take no elements
        else:
            attention_mask = attention_mask.dense()
    causal = _is_causal(module, options.get("is_causal"))
    chosen = options.pop("indices", None), options.pop("block_indices", None)
    attention_mask = _of_chosen(module, query, key, attention_mask, causal, *chosen)
    if not _SCORES & {name for name, value in options.items() if value is not None} | _unknown(options):
        theirs: Attended = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return theirs
    return _eager(module, query, key, value, attention_mask, **options)


def _eager(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> Attended:
    """The model's own attention in plain PyTorch, whose masks are added to the scores.

    Raises:
        SelectionError: the module that defines the model has none.
    """
    eager: Callable[..., Attended] | None = getattr(
        sys.modules[type(module).__module__], "eager_attention_forward", None
    )
    if eager is None:
        raise SelectionError(
            f"no kernel supports this call, and {type(module).__module__} has no attention of its own",
            hint='Load the model with attn_implementation="eager".',
        )
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and _is_causal(module, options.get("is_causal")):
        rows = torch.arange(queries, device=query.device)[:, None] + keys - queries
        attention_mask = (torch.arange(keys, device=query.device) <= rows)[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    return eager(module, query, key, value, attention_mask, **options)


def _is_causal(module: torch.nn.Module, stated: bool | None) -> bool:
    return stated if stated is not None else bool(getattr(module, "is_causal", True))


def _unknown(options: Mapping[str, Any]) -> set[str]:
    """The names of options that no attention here knows, and that could change its result."""
    return {
        name
        for name, value in options.items()
        if name not in _KNOWN and isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    unknown = _unknown(options)
    if unknown:
        raise SelectionError(f"no kernel knows the argument {min(unknown)} of this model's attention")


def _of_chosen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    causal: bool,
    indices: torch.Tensor | None,
    block_indices: torch.Tensor | None,
) -> torch.Tensor | None:
    """A mask that shows only what an indexer chose: ``indices``, ``block_indices`` of :func:`attend_strictly`.

    The mask as it is, if there is no indexer.

    Raises:
        SelectionError: the module does not say how many keys a block has.
    """
    queries, keys = query.shape[2], key.shape[2]
    if indices is not None:
        chosen = _chosen(indices[:, None], keys)
    elif block_indices is not None:
        block = getattr(getattr(module, "indexer", None), "block_size", 0)
        if not block:
            raise SelectionError(f"{type(module).__name__} has no indexer that says how many keys a block has")
        chosen = _chosen(block_indices, -(-keys // block)).repeat_interleave(block, -1)[..., :keys]
        chosen = chosen.repeat_interleave(query.shape[1] // chosen.shape[1], 1)
    else:
        return attention_mask
    shown = _dense(attention_mask, _view_of(attention_mask, causal, queries, keys), queries, key)
    if shown is None:
        return chosen
    return shown & chosen if shown.dtype == torch.bool else shown.masked_fill(~chosen, -torch.inf)


def _chosen(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Which of ``count`` things each row of numbers names, those below 0 being none."""
    named = numbers.new_zeros((*numbers.shape[:-1], count + 1), dtype=torch.bool)
    return named.scatter(-1, numbers.long().masked_fill(numbers < 0, count), True)[..., :count]


def _view_of(attention_mask: torch.Tensor | None, causal: bool, queries: int, keys: int) -> View | None:
    """What a mask shows, in few numbers; None if only its elements say it.

    A call without mask is causal from the bottom right, but for the first queries over a static cache, whose free
    slots lie behind their keys: transformers' own attention reads it that way too.
    """
    if isinstance(attention_mask, LazyMask):
        return attention_mask.shows
    if attention_mask is not None:
        return None
    if not causal or queries == 1:
        return View(causal=False, keys=keys)
    return View(causal=True, keys=queries if keys > queries else keys)


def _dense(
    attention_mask: torch.Tensor | None, view: View | None, queries: int, key: torch.Tensor
) -> torch.Tensor | None:
    """A mask as an ordinary tensor; None if every query sees every key."""
    if isinstance(attention_mask, LazyMask):
        return attention_mask.dense()
    if attention_mask is None and view is not None and view.causal:
        keys = torch.arange(key.shape[2], device=key.device)
        return (keys <= torch.arange(queries, device=key.device)[:, None] + view.keys - queries)[None, None]
    return attention_mask


def _biased(
    attention_mask: torch.Tensor | None, view: View | None, position_bias: torch.Tensor, queries: int, key: torch.Tensor
) -> torch.Tensor:
    """A mask and a bias of positions, as one mask of floats."""
    shown = _dense(attention_mask, view, queries, key)
    if shown is None:
        return position_bias.to(key.dtype)
    if shown.dtype == torch.bool:
        return position_bias.to(key.dtype).masked_fill(~shown, -torch.inf)
    return (position_bias + shown).to(key.dtype)


def _packed(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    view: View,
    options: Options,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a padded batch without its padding, for which O is zeros.

    Q, K and V are (batch, tokens, heads, head dim).
    """
    query, key, value = tensors
    batch, queries, heads, _ = query.shape
    packed = view.packed(queries, key.shape[1], query.device)
    q = query.reshape(batch * queries, heads, -1)[packed.queries]
    k, v = (tensor.reshape(batch * key.shape[1], key.shape[2], -1)[packed.keys] for tensor in (key, value))
    _check_support(options, q, k, v, None, heads=1)
    state = rng_state(options.dropout, q.device)
    o, lse = forward(q, k, v, None, None, packed.starts_q, packed.starts_k, None, state, options)
    if sink is not None and sink.dim() == 3:
        sink = sink.expand(batch, queries, heads).reshape(batch * queries, heads)[packed.queries]
    o = _with_sinks(o, lse.transpose(0, 1), sink)
    empty = o.new_zeros(batch * queries, heads, v.shape[-1])
    return empty.index_copy(0, packed.queries, o).reshape(batch, queries, heads, -1)


def _sink_of(s_aux: torch.Tensor | None, sinks: torch.Tensor | None) -> torch.Tensor | None:
    """The logits of sinks, (heads,) or, if queries have their own, (batch or 1, queries or 1, heads)."""
    return s_aux if sinks is None else sinks.squeeze(-1).transpose(1, 2)


def _with_sinks(o: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """O with one more logit a row: exp(lse) of exp(lse) + exp(sink) remains. LSE has the axes of O but the last."""
    if sink is None:
        return o
    return (o * torch.sigmoid(lse - sink.float()).unsqueeze(-1)).to(o.dtype)


def _check_support(
    options: Options, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, heads: int
) -> None:
    """Check that kernels support a call and its gradients; ``heads`` is the axis of the heads.

    Raises:
        SelectionError: they do not. A backward would meet it too late for another attention to take over.
    """
    reason = refusal(traits_of(q, k, v, bias, options, heads))
    if reason is not None:
        raise SelectionError(reason)
