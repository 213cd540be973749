"""FlashInfer's arguments in the catalog's terms, and what no kernel follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from catalog.errors import ArgumentError, UnsupportedArgumentError, UsageError
from catalog.torch.calls import Elements, Layout, Options, elements_of
from catalog.torch.flash import options_of

KvLayout = Literal["NHD", "HND"]
Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Dtype = torch.dtype | str

_LOG2_E = math.log2(math.e)
"""FlashInfer's LSE over the natural one."""

_HINTS = frozenset(
    {"seq_lens", "seq_lens_q", "block_tables", "max_token_per_sequence", "max_sequence_kv", "o_data_type"}
    | {"fixed_split_size", "disable_split_kv"}
)
"""Optional arguments of ``plan`` that only say again what others say, or how FlashInfer computes."""

_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "kv_cache_sf": "Convert K and V to the type of q: kernels read no elements of 4 bits.",
        "sinks": "Multiply O by torch.sigmoid(lse * math.log(2) - sinks), with the lse of return_lse.",
    }
)


def refuse(**arguments: Any) -> None:
    """Check that arguments which no kernel follows are None, False or 0.

    Raises:
        UnsupportedArgumentError: one is not; the message names it.
    """
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) or value:
            raise UnsupportedArgumentError(f"no kernel of the catalog follows {name}", hint=_REMEDIES.get(name))


def refuse_gradient(*tensors: torch.Tensor) -> None:
    """Check that nobody wants a gradient of attention over a cache.

    Raises:
        UsageError: somebody does.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UsageError(
            "attention over a cache has no gradient", hint="Use torch.no_grad(), or single_prefill_with_kv_cache."
        )


def refuse_graph(use_cuda_graph: bool, device: torch.device) -> None:
    """Check that nobody wants to capture the runs of a wrapper on a GPU.

    Raises:
        UnsupportedArgumentError: somebody does.
    """
    if use_cuda_graph and device.type != "cpu":
        raise UnsupportedArgumentError(
            "use_cuda_graph=True: a captured graph would not see the page table of the next plan",
            hint="Capture catalog.torch.flash_attn_with_kvcache, whose page table and lengths are arguments.",
        )


def unless_hints(others: Mapping[str, Any]) -> dict[str, Any]:
    """The optional arguments of ``plan`` that would change the result."""
    return {name: value for name, value in others.items() if name not in _HINTS}


def check_layout(kv_layout: str) -> None:
    """Check the name of a layout.

    Raises:
        ArgumentError: there is no such layout.
    """
    if kv_layout not in ("NHD", "HND"):
        raise ArgumentError(f"kv_layout={kv_layout!r}: expected 'NHD' or 'HND'")


def tokens_first(tensor: torch.Tensor, kv_layout: KvLayout) -> torch.Tensor:
    """K or V of a layout as (tokens, heads, head dim), not copied.

    Raises:
        ArgumentError: there is no such layout, or the tensor does not have three axes.
    """
    check_layout(kv_layout)
    if tensor.dim() != 3:
        raise ArgumentError(f"k or v is {tuple(tensor.shape)}: expected three axes, of tokens, heads and head dim")
    return tensor if kv_layout == "NHD" else tensor.transpose(0, 1)


def dtype_of(name: str, given: Dtype) -> torch.dtype:
    """A type of PyTorch, of floats, from itself or its name.

    Raises:
        ArgumentError: PyTorch has no such type.
    """
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(f"{name}={given!r}: expected a type of PyTorch for floats, or its name")
    return dtype


class Dtypes(NamedTuple):
    """The types of Q, of K and V, and of O."""

    q: torch.dtype
    kv: torch.dtype
    o: torch.dtype


def dtypes_of(
    q_data_type: Dtype | None, kv_data_type: Dtype | None, o_data_type: Dtype | None, data_type: Dtype | None = None
) -> Dtypes:
    """The types of a batch. ``data_type`` is that of Q, K and V where theirs is None; else Q's default is float16.

    Raises:
        ArgumentError: PyTorch has no such type.
    """
    q = dtype_of("q_data_type", q_data_type or data_type or torch.float16)
    kv = dtype_of("kv_data_type", kv_data_type or data_type or q)
    return Dtypes(q, kv, dtype_of("o_data_type", o_data_type or q))


def elements_given(dtypes: Dtypes, rotates: bool) -> Elements:
    """The types that kernels are given: K that is rotated has the type of Q."""
    return dtypes.q if rotates else elements_of(dtypes.q, dtypes.kv)


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """K or V in the type of Q, in which kernels compute; copied if it has another one."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def options_with(
    layout: Layout, keys: int, scale: float | None, causal: bool, window_left: int, logits_soft_cap: float | None
) -> Options:
    """The options of a call; a window begins ``window_left`` keys before that of the query."""
    return options_of(layout, keys, 0.0, scale, causal, (window_left, -1), logits_soft_cap or 0.0, deterministic=False)


def scale_of(sm_scale: float | None, hdim: int, *factors: float | None) -> float | None:
    """The factor of the scores; None for the default."""
    given = [float(factor) for factor in factors if factor is not None]
    return math.prod(given, start=hdim**-0.5 if sm_scale is None else sm_scale) if given else sm_scale


def starts_of(name: str, indptr: torch.Tensor) -> torch.Tensor:
    """The starts of packed sequences, int32, on the CPU.

    Raises:
        ArgumentError: they do not ascend from 0.
    """
    starts = indptr.to("cpu", torch.int32)
    if starts.dim() != 1 or not starts.numel() or int(starts[0]) or bool((starts.diff() < 0).any()):
        raise ArgumentError(f"{name} is {starts.tolist()}: must ascend from 0")
    return starts


def lengths_of(starts: torch.Tensor) -> tuple[int, ...]:
    """The lengths of packed sequences."""
    return tuple(starts.diff().tolist())


def as_planned(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check a tensor of ``run``.

    Raises:
        ArgumentError: it is not what ``plan`` announced.
    """
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ArgumentError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, and the plan is for {dtype} {shape}")


def results(
    o: torch.Tensor,
    lse: torch.Tensor,
    return_lse: bool,
    v_scale: float | None = None,
    out: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    natural_lse: bool = False,
) -> Attended:
    """O, of a type, and FlashInfer's LSE, also written where the caller wants them.

    ``lse`` is the natural one; so is the result with ``natural_lse``, which is of base 2 otherwise.
    """
    if v_scale is not None:
        o = o * v_scale
    if out is not None:
        o = out.copy_(o)
    elif dtype is not None:
        o = o.to(dtype)
    if not return_lse and out_lse is None:
        return o
    lse = (lse if natural_lse else lse * _LOG2_E).contiguous()
    if out_lse is not None:
        lse = out_lse.copy_(lse)
    return (o, lse) if return_lse else o
