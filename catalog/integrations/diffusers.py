"""Attention of Hugging Face diffusers' models by the catalog's kernels: :func:`use` switches a model or a pipeline.

Models call attention in two ways. Newer ones call diffusers' dispatcher, to which :func:`register` adds the backend
``"catalog"``. Others, such as the UNets of Stable Diffusion, have attention processors that call PyTorch's function:
kernels answer those calls in :class:`CatalogAttnProcessor`, and in classes that :func:`use` derives from any other.

Calls that no kernel supports use PyTorch's own attention, and :func:`catalog.torch.report` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cache, wraps
from types import MappingProxyType
from typing import Any

from catalog.errors import MissingPackageError, UnsupportedArgumentError, UsageError
from catalog.extras import how_to_install

try:
    import torch
    from diffusers import ModelMixin
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    from diffusers.models.attention_processor import (
        AttnAddedKVProcessor,
        AttnAddedKVProcessor2_0,
        AttnProcessor,
        AttnProcessor2_0,
    )
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode
except (ImportError, RuntimeError) as error:  # diffusers imports its modules late, and wraps their errors
    raise MissingPackageError(
        f"catalog.integrations.diffusers needs diffusers 0.37 ({error})", hint=how_to_install("diffusers")
    ) from None

from catalog.torch.installation import OWN, Attention, replacement

NAME = "catalog"
"""The backend of ``model.set_attention_backend`` and ``attention_backend``."""
STRICT = "catalog_strict"
"""The same, which raises the error of a call that no kernel supports."""

_attention = replacement(strict=False)
_strict_attention = replacement(strict=True)


def register() -> None:
    """Add the backends ``"catalog"`` and ``"catalog_strict"`` to diffusers' dispatcher.

    Afterwards ``model.set_attention_backend("catalog")`` and ``with attention_backend("catalog"):`` work for models
    that call the dispatcher. Other models ignore both, and the former also changes the default of all models:
    :func:`use` has neither limit.
    """
    for name, strict in ((NAME, False), (STRICT, True)):
        _AttentionBackendRegistry.register(_member(name))(_backend(strict))


def use(model: Any, *, strict: bool = False) -> None:
    """Let the catalog's kernels compute the attention of a model, or of the models of a pipeline.

    Layers whose processors call diffusers' dispatcher get the backend ``"catalog"``. All others get a processor of a
    class that is derived from that of their own: it has the same weights, arguments and results. Call it after methods
    that replace processors, such as ``fuse_qkv_projections``.

    Args:
        model: a model of diffusers, or a pipeline; models of transformers in it stay as they are.
        strict: raise the error of a call that no kernel supports.

    Raises:
        UsageError: it is neither, or no layer has an attention processor.
    """
    register()
    backend = AttentionBackendName(STRICT if strict else NAME)
    layers = list(_layers(model))
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no attention processors",
            hint="Attention that is called in another way is replaced by catalog.torch.install().",
        )
    for layer, processor in layers:
        if hasattr(processor, "_attention_backend"):
            processor._attention_backend = backend
        else:
            layer.processor = _switched(processor, scaled=getattr(layer, "scale_qk", True), strict=strict)


def restore(model: Any) -> None:
    """Undo :func:`use`: processors have their own classes again, and those of the dispatcher have no backend.

    Args:
        model: as of :func:`use`.

    Raises:
        UsageError: it is neither.
    """
    for layer, processor in _layers(model):
        if getattr(processor, "_attention_backend", None) in (NAME, STRICT):
            processor._attention_backend = None
        elif isinstance(processor, _ByKernels):
            layer.processor = _as(processor, processor.own)


class _ByKernels:
    """A processor in which kernels answer the calls of PyTorch's attention; ``own`` is the class without them."""

    own: type

    def __init__(self, *, strict: bool = False) -> None:
        """Make a processor; if ``strict``, it raises the error of a call that no kernel supports."""
        super().__init__()
        self.strict = strict


@cache
def _derived(own: type) -> type:
    """A subclass of a class of processors, in which kernels answer the calls of PyTorch's attention."""
    call: Callable[..., Any] = own.__call__

    @wraps(call)  # diffusers reads the names of parameters
    def answered(self: Any, *args: Any, **kwargs: Any) -> Any:
        if functional.scaled_dot_product_attention is not OWN:  # catalog.torch.install() answers them
            return call(self, *args, **kwargs)
        with _Answers(_strict_attention if self.strict else _attention):
            return call(self, *args, **kwargs)

    return type(f"Catalog{own.__name__}", (_ByKernels, own), {"__call__": answered, "own": own})


class CatalogAttnProcessor(_derived(AttnProcessor2_0)):  # type: ignore[misc]
    """diffusers' ``AttnProcessor2_0`` on the catalog's kernels, for ``unet.set_attn_processor``.

    Arguments and results are the same. With ``strict=True`` a call that no kernel supports raises its error.
    """


class CatalogAttnAddedKVProcessor(_derived(AttnAddedKVProcessor2_0)):  # type: ignore[misc]
    """diffusers' ``AttnAddedKVProcessor2_0``, likewise, for UNets that add keys of the text to those of the image."""


_CLASSES: Mapping[type, type] = MappingProxyType(
    {
        AttnProcessor: CatalogAttnProcessor,
        AttnProcessor2_0: CatalogAttnProcessor,
        AttnAddedKVProcessor: CatalogAttnAddedKVProcessor,
        AttnAddedKVProcessor2_0: CatalogAttnAddedKVProcessor,
    }
)
"""Classes for those of diffusers; the two without 2_0 compute the same without calling PyTorch's function."""


def _switched(processor: Any, *, scaled: bool, strict: bool) -> Any:
    """A copy of a processor with the attention of kernels.

    ``scaled`` says whether scores are divided by sqrt(head dim): PyTorch's function does it, plain processors may not.
    """
    own: Any = type(processor)
    if own in (AttnProcessor, AttnAddedKVProcessor) and not scaled:
        return processor
    kind = own if isinstance(processor, _ByKernels) else _CLASSES.get(own) or _derived(own)
    switched = _as(processor, kind)
    switched.strict = strict
    return switched


def _as(processor: Any, kind: type) -> Any:
    """A copy of a processor, with the same weights, as one of another class."""
    other = copy(processor)
    other.__class__ = kind
    return other


def _layers(model: Any) -> Iterator[tuple[torch.nn.Module, Any]]:
    """The layers with an attention processor of a model, or of a pipeline's models, and their processors."""
    if isinstance(model, torch.nn.Module):
        models = [model]
    elif isinstance(getattr(model, "components", None), dict):
        models = [part for part in model.components.values() if isinstance(part, ModelMixin)]
    else:
        raise UsageError(f"expected a model or a pipeline of diffusers, not {type(model).__name__}")
    for each in models:
        for layer in each.modules():
            processor = getattr(layer, "processor", None)
            if callable(processor):
                yield layer, processor


class _Answers(TorchFunctionMode):
    """While it is active, in one thread, another function answers calls of PyTorch's attention."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function, or the one that answers for it."""
        return (self._attention if function is OWN else function)(*args, **(kwargs or {}))


def _member(name: str) -> Any:
    """The member of diffusers' enumeration of backends with this value, which it does not have at first."""
    names = AttentionBackendName
    if name not in names._value2member_map_:
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper(), name
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[name] = member
        type.__setattr__(names, member._name_, member)
    return names(name)


@cache
def _backend(strict: bool) -> Attention:
    """A function with the arguments that diffusers' dispatcher passes."""
    attention = _strict_attention if strict else _attention

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> torch.Tensor:
        if return_lse or _parallel_config is not None:
            raise UnsupportedArgumentError(
                f'the attention backend "{NAME}" has no context parallelism, and returns no LSE',
                hint='Use the backend "native".',
            )
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]  # which keys of each sequence are seen
        o = attention(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return o.transpose(1, 2)

    return attend
