"""The operators ``catalog::fwd`` and ``catalog::bwd``: kernels, shapes for tracing, gradients.

Both are functional and take Q, K and V in one of the layouts of :class:`~catalog.torch.calls.Options`. All results are
dense.

- ``bias``: (batch, query heads, queries, keys), of the type of Q; any axis may be expanded.
- ``alibi_slopes``: (1 or batch, query heads), float32.
- ``cu_seqlens_q``, ``cu_seqlens_k``: int32, (sequences + 1,), the first tokens of packed sequences and their end.
- ``block_table``: int32, (sequences, pages): K and V are then pages, (pages, tokens, heads, head dim).
- ``rng_state``: int64, (2,), seed and offset of the dropout.
- ``lse``: float32, (batch, query heads, queries), or (query heads, tokens) of packed sequences; ``grad_lse`` likewise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache, partial
from operator import sub
from typing import Any, NamedTuple

import torch
from torch import library
from torch.nn.functional import pad

from catalog.errors import TensorError, UsageError
from catalog.ops.attention.problem import Problem
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.known_call import IN_ORDER, Order
from catalog.torch import native, watchers
from catalog.torch.calls import (
    HDIM_STEP,
    HEADS_FIRST,
    LONG,
    Case,
    Layout,
    Options,
    Shape,
    answer,
    arch_of,
    call_elsewhere,
    gradient_of,
    on_nvidia,
    plain_problem,
    problem_of,
    sizes_of,
    splits_keys,
)
from catalog.torch.dispatch import below, differentiable, last_derivative

_OPTIONS = "str layout, str mask, int left, int right, float? scale, float soft_cap, float dropout, bool deterministic"
_FEATURES = "Tensor? bias, Tensor? alibi_slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"

_library = library.Library("catalog", "DEF")
_library.define(
    f"fwd(Tensor q, Tensor k, Tensor v, {_FEATURES}, Tensor? block_table, Tensor? rng_state, {_OPTIONS})"
    " -> (Tensor o, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"bwd(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_FEATURES},"
    f" Tensor? rng_state, bool dbias, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

Optional = torch.Tensor | None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Optional,
    alibi_slopes: Optional,
    cu_seqlens_q: Optional,
    cu_seqlens_k: Optional,
    block_table: Optional,
    rng_state: Optional,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``catalog::fwd``: O, like Q but with the head dim of V, and LSE; uses PyTorch's dispatcher only if needed.

    LSE is float32, (batch, heads, queries), or (heads, tokens) of packed sequences. Both are differentiable once.

    Raises:
        SelectionError, TensorError, ProblemError, DeviceError, BuildError, ToolchainError: as
            :func:`~catalog.torch.calls.problem_of` and :func:`~catalog.torch.calls.call`.
        UsageError: a gradient is required, but no backward kernel supports the call.
    """
    hdim_q, hdim_v = q.shape[-1], v.shape[-1]
    if (hdim_q % HDIM_STEP or hdim_v % HDIM_STEP) and block_table is None and on_nvidia(q):
        q, k, v = (pad(tensor, (0, -tensor.shape[-1] % HDIM_STEP)) for tensor in (q, k, v))
        options = options._replace(scale=1 / math.sqrt(hdim_q) if options.scale is None else options.scale)
        o, lse = forward(q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_k, None, rng_state, options)
        return o[..., :hdim_v], lse
    tensors = (q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_k, block_table, rng_state)
    result: tuple[torch.Tensor, torch.Tensor]
    if not watchers.unwatched(tensors):
        result = torch.ops.catalog.fwd.default(*tensors, *options)
    elif watchers.has_gradient(tensors):
        result = _differentiable(tensors, _Direct(options, IN_ORDER))
    else:
        result = _computed(*tensors, options=options)[:2]
    return result


def forward_heads_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, rng_state: Optional, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`forward` in the layout ``bshd``, in which O is, but Q, K and V are (batch, heads, tokens, head dim).

    Autograd sees one operation for most calls, instead of one more for each tensor that is transposed.

    Raises:
        SelectionError, TensorError, ProblemError, DeviceError, BuildError, ToolchainError, UsageError: as there.
    """
    padded = (q.shape[-1] % HDIM_STEP or v.shape[-1] % HDIM_STEP) and on_nvidia(q)
    if bias is not None or rng_state is not None or padded or not watchers.unwatched((q, k, v)):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return forward(q, k, v, bias, None, None, None, None, rng_state, options)
    tensors = (q, k, v, None, None, None, None, None, None)
    result: tuple[torch.Tensor, torch.Tensor]
    if watchers.has_gradient(tensors):
        result = _differentiable(tensors, _Direct(options, HEADS_FIRST))
    else:
        result = _computed(*tensors, options=options, order=HEADS_FIRST)[:2]
    return result


def elsewhere(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Optional:
    """O by another project's implementation that selection prefers; None if there is none or something sees the call.

    Raises:
        TensorError, ProblemError, DeviceError: as :func:`forward`.
    """
    tensors = (q, k, v)
    if not watchers.unwatched(tensors) or watchers.has_gradient(tensors):
        return None
    case = Case("fwd", q.dtype, "no", "1h", False, False, options, q.shape, k.shape, v.shape, None, None, 0)
    results = call_elsewhere(case, q.device, (("q", q), ("k", k), ("v", v)))
    return None if results is None else results["o"]


def _run_fwd(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _computed(*inputs[:_TENSORS], options=Options(*inputs[_TENSORS:]))[:2]


def _computed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Optional,
    alibi_slopes: Optional,
    cu_seqlens_q: Optional,
    cu_seqlens_k: Optional,
    block_table: Optional,
    rng_state: Optional,
    *,
    options: Options,
    order: Order = IN_ORDER,
) -> tuple[torch.Tensor, torch.Tensor, Problem]:
    """O, LSE, and the problem that they answer. Only tensors without features may be in another order."""
    paged = block_table is not None
    plain = bias is None and alibi_slopes is None and rng_state is None
    dense = cu_seqlens_q is None and cu_seqlens_k is None and not paged
    if plain and dense:  # most calls
        layout: Layout = "bhsd" if order is HEADS_FIRST else options.layout
        if q.is_cpu:
            arch = "host"
            long = k.dim() == 4 and max(k.shape[1], k.shape[2]) >= LONG  # what follows takes a microsecond
            splits = long and _splits_keys(q.device, q.shape, k.shape, layout)
        else:
            arch = arch_of(q.device)
            splits = _splits_keys_on_gpu(q.device, q.shape, k.shape, layout)
        op = "splitkv" if splits else "fwd"
        problem = plain_problem(op, options, q.dtype, order, q.shape, k.shape, v.shape)
        results = answer(problem, arch, {"q": q, "k": k, "v": v}, order)
        return results["o"], results["lse"], problem
    lengths_q = _lengths(cu_seqlens_q)
    case = Case(
        "pagedkv" if paged else "fwd",
        q.dtype,
        *_bias_of(bias, alibi_slopes),
        False,
        False,
        options,
        q.shape,
        k.shape,
        v.shape,
        lengths_q,
        None if paged else lengths_q if cu_seqlens_k is cu_seqlens_q else _lengths(cu_seqlens_k),
        block_table.shape[1] if block_table is not None else 0,
    )
    suffix = "_cache" if paged else ""
    tensors = [("q", q), (f"k{suffix}", k), (f"v{suffix}", v), *_features(bias, alibi_slopes, rng_state)]
    if block_table is not None and cu_seqlens_k is not None:
        tensors += [("block_table", block_table), ("seqlens_k", torch.diff(cu_seqlens_k).to(q.device))]
    problem = problem_of(case)
    results = answer(problem, arch_of(q.device), dict(tensors))
    return results["o"], results["lse"], problem


def _splits_keys(device: torch.device, q: Shape, k: Shape, layout: Layout) -> bool:
    """Whether a forward of sequences that are not packed should split the keys."""
    if layout == "packed":
        return False
    of_q, of_k = sizes_of(q, layout), sizes_of(k, layout)
    return splits_keys(device, of_q.batch, of_q.tokens * of_q.heads, of_k.heads, of_k.tokens)


_splits_keys_on_gpu = lru_cache(maxsize=16_384)(_splits_keys)
"""On a CPU the number of threads decides, too, which is a setting."""


def _run_bwd(
    grad_o: torch.Tensor,
    grad_lse: Optional,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    bias: Optional,
    alibi_slopes: Optional,
    cu_seqlens_q: Optional,
    cu_seqlens_k: Optional,
    rng_state: Optional,
    dbias: bool,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths_q = _lengths(cu_seqlens_q)
    case = Case(
        "bwd",
        q.dtype,
        *_bias_of(bias, alibi_slopes),
        dbias,
        grad_lse is not None,
        Options(*options),
        q.shape,
        k.shape,
        v.shape,
        lengths_q,
        lengths_q if cu_seqlens_k is cu_seqlens_q else _lengths(cu_seqlens_k),
        0,
    )
    features = _features(bias, alibi_slopes, rng_state)
    return _gradients(problem_of(case), features, q=q, k=k, v=v, o=o, lse=lse, do=grad_o, dlse=grad_lse)


def _gradients(
    problem: Problem,
    features: Iterable[tuple[str, torch.Tensor]],
    order: Order = IN_ORDER,
    *,
    dlse: Optional,
    **tensors: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK, dV, and dbias, which is empty if the problem has none."""
    if dlse is not None:
        tensors["dlse"] = dlse
    tensors.update(features)
    q = tensors["q"]
    results = answer(problem, arch_of(q.device), tensors, order)
    return results["dq"], results["dk"], results["dv"], results["dbias"] if problem.dbias else q.new_empty(0)


def _features(bias: Optional, alibi_slopes: Optional, rng_state: Optional) -> list[tuple[str, torch.Tensor]]:
    features = []
    if bias is not None:
        features.append(("bias", bias))
    if alibi_slopes is not None:
        features.append(("alibi_slopes", alibi_slopes))
    if rng_state is not None:
        features.append(("rng_state", rng_state.view(torch.uint64)))
    return features


def _bias_of(bias: Optional, alibi_slopes: Optional) -> tuple[Any, Any]:
    if bias is not None:
        return "bias", "bh"
    if alibi_slopes is not None:
        return "alibi", "1h" if alibi_slopes.shape[0] == 1 else "bh"
    return "no", "1h"


def _lengths(starts: Optional) -> Shape | None:
    """The lengths of packed sequences; for a GPU's tensor this waits for the values.

    Raises:
        TensorError: ``starts`` is not an int32 vector that ascends from 0.
    """
    if starts is None:
        return None
    if starts.dtype != torch.int32 or starts.dim() != 1 or not starts.numel():
        raise TensorError(f"cu_seqlens is {starts.dtype} {tuple(starts.shape)}: expected int32 (sequences + 1,)")
    values = starts.tolist()
    lengths = tuple(map(sub, values[1:], values))
    if values[0] != 0 or min(lengths, default=0) < 0:
        raise TensorError(f"cu_seqlens is {values}: must ascend from 0")
    return lengths


def _check_devices(*tensors: Optional) -> None:
    """Check that all tensors are on one device, for tracing; real kernels check it themselves.

    Raises:
        TensorError: they are not.
    """
    devices = sorted({str(tensor.device) for tensor in tensors if tensor is not None})
    if len(devices) > 1:
        raise TensorError(f"tensors are on {' and '.join(devices)}: expected one device")


def _fake_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _check_devices(q, k, v, *rest[:2], *rest[4:6])
    layout = rest[6]
    sizes = sizes_of(q.shape, layout)
    rows = (sizes.heads, sizes.tokens) if layout == "packed" else (sizes.batch, sizes.heads, sizes.tokens)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows, dtype=torch.float32)


def _fake_bwd(
    grad_o: torch.Tensor,
    grad_lse: Optional,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    _check_devices(grad_o, grad_lse, q, k, v, o, *rest[:3], rest[5])
    bias, dbias = rest[1], rest[6]
    like = [q.new_empty(x.shape) for x in (q, k, v)]
    return *like, q.new_empty(bias.shape if dbias else 0)


BACKWARD = (
    "Use backward() or torch.autograd.grad() once; or torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)."
)
"""How to get gradients that kernels do not compute: a hint."""

_BIAS, _TABLE, _RNG = 3, 7, 8
_TENSORS = 9
"""Places of tensors among the inputs of the forward, and their number."""


class _Direct(NamedTuple):
    """What a call that bypasses the dispatcher has beside its tensors."""

    options: Options
    order: Order


class _Attention(torch.autograd.Function):
    """The forward with its gradient; ``how`` is a :class:`_Direct`, or the dispatcher's keys, and options come last."""

    @staticmethod
    def forward(ctx: Any, how: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        direct = isinstance(how, _Direct)
        options, ctx.order = how if direct else (Options(*inputs[_TENSORS:]), IN_ORDER)
        if options.soft_cap and options.dropout:
            raise UsageError(
                "the catalog's backward has no dropout together with a soft cap of the scores",
                hint="Without gradients: torch.no_grad(). With them: torch.nn.attention.flex_attention, a score_mod.",
            )
        ctx.problem = None
        if direct:
            o, lse, ctx.problem = _computed(*inputs, options=options, order=ctx.order)
        else:
            o, lse = below(torch.ops.catalog.fwd.default, how, inputs)
        ctx.save_for_backward(*inputs[:_TABLE], inputs[_RNG], o, lse)
        ctx.options, ctx.paged = options, inputs[_TABLE] is not None
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, grad_o: Optional, grad_lse: Optional) -> tuple[Any, ...]:
        rest = [None] * (_TENSORS - _BIAS - 1 + (len(ctx.options) if ctx.problem is None else 0))
        if grad_o is None and grad_lse is None:
            return None, None, None, None, None, *rest
        if ctx.paged:
            raise UsageError("attention over a paged cache has no gradient", hint="Use packed K and V.")
        q, k, v, bias, alibi_slopes, *starts, rng_state, o, lse = ctx.saved_tensors
        dbias = ctx.needs_input_grad[1 + _BIAS]
        tensors = (grad_o, grad_lse, q, k, v, o, lse, bias, alibi_slopes, *starts, rng_state)
        gradients = _backward(ctx.problem, _Direct(ctx.options, ctx.order), tensors, dbias)
        return None, *gradients[:3], gradients[3] if dbias else None, *rest


def _backward(problem: Problem | None, how: _Direct, tensors: tuple[Any, ...], dbias: bool) -> tuple[torch.Tensor, ...]:
    """dQ, dK, dV and dbias of a forward; its problem is known where the forward bypassed the dispatcher."""
    grad_o, grad_lse, q, k, v, o, lse, bias, alibi_slopes, *_, rng_state = tensors
    if grad_o is None:
        grad_o = torch.zeros_like(o)
    tensors = (grad_o, *tensors[1:])
    options, order = how
    if (
        not torch.is_grad_enabled()
        and watchers.unwatched(tensors if problem is None else tensors[:2])  # a direct forward saw the others
        and watchers.alike(grad_o, o)
        and (grad_lse is None or watchers.alike(grad_lse, lse))
    ):
        if problem is None:
            return _run_bwd(*tensors, dbias, *options)
        # Lengths are not read again: a GPU would be waited for.
        gradient = gradient_of(problem, dbias, grad_lse is not None, options.deterministic)
        features = _features(bias, alibi_slopes, rng_state)
        return _gradients(gradient, features, order, q=q, k=k, v=v, o=o, lse=lse, do=grad_o, dlse=grad_lse)
    q, k, v = (order.view("q", tensor) for tensor in (q, k, v))
    *of_views, of_bias = torch.ops.catalog.bwd.default(grad_o, grad_lse, q, k, v, *tensors[5:], dbias, *options)
    return *(order.view("q", of_view) for of_view in of_views), of_bias


def _differentiable(tensors: tuple[Any, ...], how: _Direct) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of an unwatched call, with their gradient: in compiled code where there is some, and no feature."""
    compiled = native.load()
    if compiled is None or how.options.dropout or any(tensor is not None for tensor in tensors[_BIAS:]):
        differentiable: tuple[torch.Tensor, torch.Tensor] = _apply(how, *tensors)
        return differentiable
    o, lse, problem = _computed(*tensors, options=how.options, order=how.order)
    _compiled_gradient(problem, how).attach(tensors[:_BIAS], (o, lse))
    return o, lse


@lru_cache(maxsize=1024)
def _compiled_gradient(problem: Problem, how: _Direct) -> Any:
    """The object that attaches the gradient to a problem's results; Python computes it until the call is known."""
    return native.load().Gradient(partial(_first_gradients, problem, how))


def _first_gradients(
    problem: Problem, how: _Direct, grad_o: Optional, grad_lse: Optional, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """dQ, dK and dV; after some calls, later ones are compiled."""
    gradients = _backward(problem, how, (grad_o, grad_lse, *tensors, *[None] * (_TENSORS - _BIAS - 1)), False)
    if grad_o is not None and grad_lse is None:
        gradient = gradient_of(problem, False, False, how.options.deterministic)
        call = Catalog.select(gradient, arch=arch_of(tensors[0].device)).compiled(how.order)
        if call is not None:
            _compiled_gradient(problem, how).repeat(call)
    return gradients[:3]


_apply: Any = super(torch.autograd.Function, _Attention).apply
"""Applies the function to what is unwatched: without the search of all arguments for tensors of transforms."""

for _name, _kernel, _fake, _function in (
    ("fwd", _run_fwd, _fake_fwd, _Attention),
    ("bwd", _run_bwd, _fake_bwd, last_derivative(torch.ops.catalog.bwd.default, "attention", BACKWARD)),
):
    _op = getattr(torch.ops.catalog, _name).default
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    _library.impl(_name, differentiable(_function, _op, "attention", BACKWARD), "Autograd", with_keyset=True)
    library.register_fake(f"catalog::{_name}", _fake, lib=_library)
