"""Plan calls with PyTorch tensors: from tensors and options to a problem, its plan, and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from math import gcd
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from catalog.errors import DeviceError, SelectionError, TensorError
from catalog.ops.attention.fields import MaskWord
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.traits import Dtype
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.known_call import IN_ORDER, Order
from catalog.schema.problem_form import Form
from catalog.settings import settings
from catalog.threads import default_threads
from catalog.torch import native

Shape = tuple[int, ...]
Named = Sequence[tuple[str, torch.Tensor]]
Layout = Literal["bhsd", "bshd", "packed"]

_DTYPES: Mapping[torch.dtype, Dtype] = MappingProxyType(
    {torch.float32: Dtype.FP32, torch.float16: Dtype.FP16, torch.bfloat16: Dtype.BF16}
)
_OF_CACHES: Mapping[tuple[torch.dtype, torch.dtype], Dtype] = MappingProxyType(
    {
        (torch.float16, torch.float8_e4m3fn): Dtype.FP16KVFP8,
        (torch.bfloat16, torch.float8_e4m3fn): Dtype.BF16KVFP8,
    }
)
"""The dtypes in which K and V have another type than Q, by both."""
_REMEDIES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float64: "Kernels compute in float32: pass .float() tensors, and call .double() on the result."}
)
_TILE = 64
"""Queries that a kernel processes at a time, about."""
_ROWS_OF_DECODING = 16
"""The rows of a tile of GPU kernels for decoding."""
HDIM_STEP = 8
"""Head dims of kernels for NVIDIA GPUs are multiples of it; others are padded, as flash-attn pads them."""
LONG = 1024
"""Keys of which parts are worth a thread of a CPU each: two parts of 512."""
_VECTOR_BYTES = 16
"""Bytes that GPU kernels load at once; rows must start at multiples of it."""


Elements = torch.dtype | Dtype
"""The type of Q, K, V and O, or the catalog's name of several types."""


def elements_of(q: torch.dtype, kv: torch.dtype) -> Elements:
    """The types of Q and O, and of K and V; those that kernels do not take together are left to :func:`dtype_of`."""
    return q if q == kv else _OF_CACHES.get((q, kv), q)


def dtype_of(dtype: Elements) -> Dtype:
    """The catalog's name of the type of Q, K and V.

    Raises:
        TensorError: no kernel accepts it.
    """
    if isinstance(dtype, Dtype):
        return dtype
    known = _DTYPES.get(dtype)
    if known is None:
        raise TensorError(
            f"query, key and value are {dtype}: kernels accept {', '.join(map(str, _DTYPES))}",
            hint=_REMEDIES.get(dtype),
        )
    return known


class Options(NamedTuple):
    """The options of a call.

    ``layout`` is that of Q, K, V and O: (batch, heads, tokens, head dim), (batch, tokens, heads, head dim), or packed
    (tokens, heads, head dim). ``left`` and ``right`` are the numbers of visible keys on each side of the diagonal, -1
    for all; they only apply under a mask. ``scale`` None is the default; ``soft_cap`` 0 means none.
    """

    layout: Layout
    mask: MaskWord
    left: int
    right: int
    scale: float | None
    soft_cap: float
    dropout: float
    deterministic: bool


class Sizes(NamedTuple):
    """The sizes of Q, K or V: (batch, heads, tokens, head dim); see :func:`sizes_of` for packed ones."""

    batch: int
    heads: int
    tokens: int
    hdim: int


def sizes_of(shape: Shape, layout: Layout) -> Sizes:
    """The sizes of Q, K or V in a layout; batch and tokens of packed ones are 1 and all.

    Raises:
        TensorError: the shape has the wrong number of axes.
    """
    if len(shape) != (3 if layout == "packed" else 4):
        axes = {"bhsd": "(batch, heads, tokens, head dim)", "bshd": "(batch, tokens, heads, head dim)"}
        raise TensorError(f"a tensor is {tuple(shape)}: expected {axes.get(layout, '(tokens, heads, head dim)')}")
    if layout == "packed":
        return Sizes(1, shape[1], shape[0], shape[2])
    if layout == "bhsd":
        return Sizes(shape[0], shape[1], shape[2], shape[3])
    return Sizes(shape[0], shape[2], shape[1], shape[3])


class Case(NamedTuple):
    """The key of a problem, with all sizes last: problems are cached by it, and derived from others of other sizes."""

    op: Literal["fwd", "bwd", "pagedkv", "splitkv"]
    dtype: Elements
    bias: Literal["no", "bias", "alibi"]
    bias_dims: Literal["1h", "bh"]
    dbias: bool
    dlse: bool
    options: Options
    q: Shape
    k: Shape
    v: Shape
    lengths_q: Shape | None
    lengths_k: Shape | None
    pages: int


HEADS_FIRST = Order(dict.fromkeys(("q", "k", "v", "dq", "dk", "dv"), (0, 2, 1, 3)))
"""Q, K, V and their gradients as (batch, heads, tokens, head dim) where the layout has tokens before heads, as O."""

_SIZED = Case._fields.index("q")
"""The first field of a case that says something about sizes."""


@lru_cache(maxsize=16_384)
def problem_of(case: Case) -> Problem:
    """The problem of a case; ``pages`` are columns of the page table.

    Raises:
        TensorError: kernels do not take the dtype, or tensors have the wrong number of axes.
        ProblemError: sizes or options are outside of what a problem may have, or contradict each other.
    """
    op, _, _, _, _, _, options, of_q, of_k, of_v, lengths_q, lengths_k, pages = case
    sizes: dict[str, Any]
    if op == "pagedkv":
        q, page_size, nhead_k = sizes_of(of_q, options.layout), of_k[1], of_k[2]
        dims = (q.heads, nhead_k, q.hdim, of_v[-1], page_size)
        sizes = {"num_pages": of_k[0], "seqlens_q": lengths_q, "seqlen_k": pages * page_size}
    elif options.layout == "packed" and len(of_q) == len(of_k) == 3:
        dims = (of_q[1], of_k[1], of_q[2], of_v[-1], 0)
        sizes = {"seqlens_q": lengths_q, "seqlens_k": lengths_k}
    else:
        q, k = sizes_of(of_q, options.layout), sizes_of(of_k, options.layout)
        dims = (q.heads, k.heads, q.hdim, of_v[-1], 0)
        sizes = {"batch": q.batch, "seqlen_q": q.tokens, "seqlen_k": k.tokens}
    about = (dims, case[:_SIZED])
    form = _forms.get(about)
    if form is not None:
        resized: Problem = form.resized(sizes)
        return resized
    return _remembered(about, Problem(**_fields(case, dims), **sizes))


@lru_cache(maxsize=16_384)
def gradient_of(problem: Problem, dbias: bool, dlse: bool, deterministic: bool) -> Problem:
    """The problem of the gradients of a forward, as :func:`problem_of` makes it of the case ``bwd``.

    Raises:
        ProblemError: as :func:`problem_of`.
    """
    about = (problem.form, dbias, dlse, deterministic)
    form = _forms.get(about)
    if form is not None:
        gradient: Problem = form.like(problem)
        return gradient
    sizes: dict[str, Any] = {"seqlens_q": problem.seqlens_q, "seqlens_k": problem.seqlens_k}
    if problem.seqlens_q is None:
        sizes = {"batch": problem.batch, "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k}
    alike = problem.model_dump(exclude={"op", "lse", "num_splits", *problem.sizes})
    features = {"dbias": dbias, "dlse": dlse, "deterministic": deterministic}
    return _remembered(about, Problem(op="bwd", **{**alike, **features}, **sizes))


def _remembered(about: tuple[Any, ...], problem: Problem) -> Problem:
    """The problem, whose form is kept for others of other sizes."""
    if len(_forms) >= _MOST_FORMS:
        _forms.clear()
    _forms[about] = problem.form
    return problem


@lru_cache(maxsize=16_384)
def plain_problem(
    op: Literal["fwd", "splitkv"], options: Options, dtype: torch.dtype, order: Order, q: Shape, k: Shape, v: Shape
) -> Problem:
    """The problem of a forward on dense tensors without a bias: as :func:`problem_of`, with a key that costs less.

    The shapes are those of tensors in the ``order``.
    """
    if order is HEADS_FIRST:
        q, k, v = (tuple([shape[axis] for axis in order.axes["q"]]) for shape in (q, k, v))
    problem: Problem = problem_of.__wrapped__(
        Case(op, dtype, "no", "1h", False, False, options, q, k, v, None, None, 0)
    )
    return problem


_MOST_FORMS = 4096
"""Maximum number of cached forms of problems; beyond it, all are dropped."""

_forms: dict[tuple[Any, ...], Form] = {}


def _fields(case: Case, dims: tuple[int, ...]) -> dict[str, Any]:
    """The fields of a case's problem that are not sizes."""
    options = case.options
    nhead_q, nhead_k, hdim_q, hdim_v, page_size = dims
    fields: dict[str, Any] = {
        "op": case.op,
        "dtype": dtype_of(case.dtype),
        "nhead_q": nhead_q,
        "nhead_k": nhead_k,
        "hdim_q": hdim_q,
        "hdim_v": hdim_v,
        "mask": options.mask,
        "window": None if options.mask == "no" else (options.left, options.right),
        "scale": options.scale,
        "bias": case.bias,
        "bias_dims": case.bias_dims,
        "logits_soft_cap": options.soft_cap or None,
    }
    if case.op == "pagedkv":
        fields |= {"page_size": page_size}
    elif options.layout != "packed":
        fields |= {"layout": options.layout}
    if case.op in ("fwd", "bwd"):
        fields |= {"dropout": options.dropout}
    if case.op == "bwd":
        fields |= {"dbias": case.dbias, "dlse": case.dlse, "deterministic": options.deterministic}
    else:
        fields |= {"lse": True}
    return fields


def call(case: Case, device: torch.device, tensors: Named) -> Mapping[str, torch.Tensor]:
    """Compute the results of a case: new tensors by name; on a GPU its current stream writes them.

    Args:
        case: the case.
        device: device of the tensors.
        tensors: the inputs by the names of :attr:`Problem.tensors`, with any strides.

    Raises:
        SelectionError: no kernel answers the problem; the message names the missing trait and an alternative.
        TensorError: a tensor has the wrong shape or dtype, or is on another device.
        DeviceError, BuildError, ToolchainError: as :meth:`catalog.runtime.plan.Plan.enqueue`.
    """
    return answer(problem_of(case), arch_of(device), dict(tensors))


def answer(
    problem: Problem, arch: str, tensors: dict[str, torch.Tensor], order: Order = IN_ORDER
) -> Mapping[str, torch.Tensor]:
    """Compute the results of a problem; the tensors are on a device of ``arch``, and in the ``order``, as the results.

    Raises:
        SelectionError, TensorError, DeviceError, BuildError, ToolchainError: as :func:`call`.
    """
    try:
        plan = Catalog.select(problem, arch=arch)
    except SelectionError as error:
        instead = "torch.nn.functional.scaled_dot_product_attention or torch.nn.attention.flex_attention may do."
        raise SelectionError(error.message, hint=f"{error.hint}\nInstead: {instead}") from None
    results = plan.known(tensors, differentiated=True, order=order)
    if results is not None:
        return results
    if order is not IN_ORDER:
        tensors = order.applied(tensors)
    # Loads of GPU kernels are wider than elements, so they may need copies of tensors that are dense.
    if arch != "host":
        tensors = {name: tensor if _is_aligned(tensor) else _vectors(tensor) for name, tensor in tensors.items()}
    native.load()  # before a call is kept that the module may repeat
    results = plan.again(tensors, differentiated=True, order=order)
    if results is None:
        results = plan.enqueue({name: _dense(tensor) for name, tensor in tensors.items()})
    return results if order is IN_ORDER else order.applied(results)


def call_elsewhere(case: Case, device: torch.device, tensors: Named) -> Mapping[str, torch.Tensor] | None:
    """The results by another project's implementation that selection prefers for a case; None if there is none.

    Results that it does not compute are left out.

    Raises:
        TensorError, ProblemError, DeviceError: as :func:`call`.
    """
    problem = problem_of(case)
    try:
        instead = Catalog.select(problem, arch=arch_of(device)).instead
    except SelectionError:  # call() raises it with a hint
        return None
    if instead is None:
        return None
    results: Mapping[str, torch.Tensor] = instead.implementation.bind(problem, dict(tensors))()
    return results


@cache
def arch_of(device: torch.device) -> str:
    """The catalog's name of a device's arch; ``host`` for the CPU.

    Raises:
        DeviceError: the catalog has no kernels for such devices.
    """
    if device.type == "cpu":
        return "host"
    if device.type != "cuda":
        raise DeviceError(f"tensors are on {device}: there are kernels for the CPU and for CUDA devices")
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(facts.gcnArchName).partition(":")[0]
    return f"sm_{facts.major}{facts.minor}"


def on_nvidia(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in the memory of an NVIDIA GPU; PyTorch for ROCm calls AMD's CUDA devices, too."""
    return tensor.is_cuda and torch.version.hip is None


def splits_keys(device: torch.device, batch: int, rows: int, heads_k: int, keys: int = LONG) -> bool:
    """Whether a forward takes less time with its keys divided into parts, which are computed in parallel.

    That holds where its queries keep only some parts of the device busy, and on a CPU if there are :data:`LONG` keys.
    On a GPU it also holds in decoding, whatever the batch: a tile of those kernels has the rows of all query heads that
    share a head of K.

    Args:
        device: where the tensors are.
        batch: number of sequences.
        rows: the queries of all heads of a sequence.
        heads_k: heads of K and V.
        keys: of a sequence.
    """
    rows_of_head = -(-rows // max(heads_k, 1))
    of_gpu = device.type != "cpu"
    if of_gpu and rows_of_head <= _ROWS_OF_DECODING:
        return True
    if not of_gpu and keys < LONG:
        return False
    units = _units(device) if of_gpu else settings().num_threads or default_threads()
    return batch * heads_k * -(-rows_of_head // _TILE) < units


@cache
def _units(device: torch.device) -> int:
    """The number of parts of a GPU that compute at once."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def ready(tensor: torch.Tensor, arch: str) -> torch.Tensor:
    """The tensor without its gradient, copied if kernels of ``arch`` cannot read it where it is."""
    return _dense(tensor) if arch == "host" else _vectors(tensor)


def in_place(name: str, tensor: torch.Tensor, arch: str) -> torch.Tensor:
    """The tensor ``name``, which a kernel of ``arch`` writes where it is.

    Raises:
        TensorError: it would have to be copied.
    """
    as_it_is = ready(tensor, arch)
    if as_it_is.data_ptr() != tensor.data_ptr():
        raise TensorError(
            f"{name} has strides {tuple(tensor.stride())}: kernels write it in place, so its last axis must be dense, "
            f"and on a GPU its rows must start at multiples of {_VECTOR_BYTES} bytes"
        )
    return as_it_is


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient, copied if its innermost axis is strided."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.size(-1) == 1 else tensor.contiguous()


def _vectors(tensor: torch.Tensor) -> torch.Tensor:
    """Like :func:`_dense`, with rows that also start at the alignment of a GPU's vector loads."""
    tensor = _dense(tensor)
    if tensor.dim() < 3 or not tensor.is_floating_point() or _is_aligned(tensor):
        return tensor
    vector = _VECTOR_BYTES // tensor.element_size()
    axes = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    fits = tensor.data_ptr() % _VECTOR_BYTES == 0 and all(step % vector == 0 for size, step in axes if size > 1)
    return tensor if fits else tensor.contiguous()


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is certainly one that :func:`_vectors` would not copy."""
    *outer, inner = tensor.stride() or (1,)
    return inner == 1 and gcd(*outer) * tensor.itemsize % _VECTOR_BYTES == tensor.data_ptr() % _VECTOR_BYTES == 0
