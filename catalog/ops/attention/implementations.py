"""Other projects' attention: which problems each function computes, and how it is called.

All of them compute O of a dense forward. They differ in dtypes, masks, features and the layout of tensors. LSE is left
out, because most of them do not return it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from catalog.ops.attention.traits import Bias, Dtype, Mode, Qscale
from catalog.ops.implementation import Implementation

if TYPE_CHECKING:
    from catalog.ops.attention.problem import Problem

_HALF = (Dtype.FP16, Dtype.BF16)


class Dense(Implementation):
    """A function for dense forward problems, by the features that it has.

    Attributes:
        places: PyTorch's types of the devices that it runs on.
        dtypes: element types of Q, K and V.
        layout: its axis order of Q, K, V and O.
        masks: masks that it knows; with as many keys as queries, causal masks of both corners are the same.
        windows: whether a mask may be a sliding window.
        soft_cap: whether scores may have a soft cap.
        bias: whether an elementwise bias may be added.
        slopes: whether ALiBi slopes may be added.
        batches: whether there may be several sequences.
        hdims_differ: whether V may have another head dim than Q.
    """

    operation = "attention"
    places: ClassVar[Collection[str]] = ("cuda",)
    dtypes: ClassVar[Collection[Dtype]] = _HALF
    layout: ClassVar[str] = "bshd"
    masks: ClassVar[Collection[str]] = ("no", "bottom_right")
    windows: ClassVar[bool] = False
    soft_cap: ClassVar[bool] = False
    bias: ClassVar[bool] = False
    slopes: ClassVar[bool] = False
    batches: ClassVar[bool] = True
    hdims_differ: ClassVar[bool] = False

    def objection(self, problem: Problem, place: str) -> str:
        """As :meth:`Implementation.objection`."""
        unknown = {
            f"no kernels for {place}": place not in self.places,
            f"not op={problem.op}": problem.op != "fwd",
            "no packed sequences": problem.mode is not Mode.BATCH,
            f"no {problem.dtype.value}": problem.dtype not in self.dtypes,
            "no scales of elements": problem.qscale is not Qscale.NO,
            "no block mask": problem.block_masked,
            "no dropout that can be compared": bool(problem.dropout or problem.randval),
            "no sink": bool(problem.sink_size),
            f"no mask {problem.mask}": self._mask(problem) not in self.masks,
            "no sliding window": problem.window is not None and not self.windows,
            "no soft cap": problem.logits_soft_cap is not None and not self.soft_cap,
            "no elementwise bias": problem.bias is Bias.BIAS and not self.bias,
            "no ALiBi": problem.bias is Bias.ALIBI and not self.slopes,
            "one sequence only": problem.batch != 1 and not self.batches,
            "one head dim only": problem.hdim_q != problem.hdim_v and not self.hdims_differ,
            "rows without a key": problem.seqlen_k == 0
            or (problem.seqlen_q > problem.seqlen_k and (problem.mask == "bottom_right" or problem.window is not None)),
        }
        return ", ".join(reason for reason, applies in unknown.items() if applies)

    def _mask(self, problem: Problem) -> str:
        """The mask, in the corner that the function knows where both corners are the same."""
        square = problem.seqlen_q == problem.seqlen_k
        return next((mask for mask in self.masks if square and problem.mask != "no" != mask), problem.mask)

    def bind(self, problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
        """As :meth:`Implementation.bind`."""
        arranged = partial(_arranged, swap=problem.layout != self.layout)
        given = {name: arranged(tensor) if name in ("q", "k", "v") else tensor for name, tensor in tensors.items()}
        compute = self.call(problem, given)
        return lambda: {"o": arranged(compute())}

    def call(self, problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Any]:
        """A function that computes O on tensors in :attr:`layout`."""
        raise NotImplementedError


def _arranged(tensor: Any, swap: bool) -> Any:
    return tensor.transpose(1, 2) if swap else tensor


class Sdpa(Dense):
    """PyTorch's own function."""

    name = "sdpa"
    title = "PyTorch"
    modules = ("torch",)
    distribution = "torch"
    places: ClassVar[Collection[str]] = ("cpu", "cuda")
    dtypes: ClassVar[Collection[Dtype]] = (Dtype.FP32, *_HALF)
    layout = "bhsd"
    masks = ("no", "top_left")
    bias = True
    hdims_differ = True

    def objection(self, problem: Problem, place: str) -> str:
        """As :meth:`Implementation.objection`: a mask and a bias exclude each other."""
        both = problem.bias is Bias.BIAS and problem.mask != "no"
        return ", ".join(filter(None, (super().objection(problem, place), "a mask or a bias" if both else "")))

    def call(self, problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Any]:
        """As :meth:`Dense.call`."""
        compute = import_module("torch").nn.functional.scaled_dot_product_attention
        more = {"attn_mask": tensors["bias"]} if problem.bias is Bias.BIAS else {}
        more |= {"enable_gqa": True} if problem.ratio > 1 else {}
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        return partial(compute, q, k, v, is_causal=problem.mask != "no", scale=problem.scale, **more)


class Cudnn(Sdpa):
    """PyTorch's own function with cuDNN's kernels, which PyTorch does not choose by itself on every GPU."""

    name = "cudnn"
    title = "PyTorch with cuDNN"
    places = ("cuda",)
    dtypes = _HALF

    def call(self, problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Any]:
        """As :meth:`Dense.call`."""
        attention: Any = import_module("torch.nn.attention")
        compute = super().call(problem, tensors)

        def o() -> Any:
            with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
                return compute()

        return o


class FlashAttn(Dense):
    """The package flash-attn."""

    name = "flash_attn"
    title = "flash-attn"
    modules = ("flash_attn", "torch")
    distribution = "flash_attn"
    windows = True
    soft_cap = True
    slopes = True

    def call(self, problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Any]:
        """As :meth:`Dense.call`. The mask is causal from the bottom right, or a window."""
        windowed = problem.window is not None
        return partial(
            import_module(self.modules[0]).flash_attn_func,
            *(tensors[name] for name in ("q", "k", "v")),
            softmax_scale=problem.scale,
            **({"alibi_slopes": tensors.get("alibi_slopes")} if self.slopes else {}),
            **({"window_size": problem.window} if windowed else {"causal": problem.mask != "no"}),
            **({"softcap": problem.logits_soft_cap or 0.0} if self.soft_cap else {}),
        )


class FlashAttn3(FlashAttn):
    """FlashAttention-3, for Hopper GPUs: a package of its own, with flash-attn's arguments except the slopes."""

    name = "flash_attn_3"
    title = "FlashAttention-3"
    modules = ("flash_attn_interface", "torch")
    distribution = "flash_attn_3"
    slopes = False

    def call(self, problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Any]:
        """As :meth:`FlashAttn.call`; older versions return O and LSE."""
        compute = super().call(problem, tensors)

        def o() -> Any:
            found = compute()
            return found[0] if isinstance(found, tuple) else found

        return o


class Aiter(FlashAttn):
    """AMD's package aiter, whose function has flash-attn's arguments except the soft cap."""

    name = "aiter"
    title = "aiter"
    modules = ("aiter", "torch")
    distribution = "amd-aiter"
    soft_cap = False
    hdims_differ = True


class Xformers(Dense):
    """The memory-efficient attention of xFormers."""

    name = "xformers"
    title = "xFormers"
    modules = ("xformers", "torch")
    distribution = "xformers"
    dtypes = (Dtype.FP32, *_HALF)
    masks = ("no", "top_left", "bottom_right")
    hdims_differ = True

    def call(self, problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Any]:
        """As :meth:`Dense.call`; grouped heads are an axis of their own, (batch, tokens, groups, heads, head dim)."""
        ops = import_module("xformers.ops")
        masks = {
            "no": lambda: None,
            "top_left": ops.LowerTriangularMask,
            "bottom_right": import_module("xformers.ops.fmha.attn_bias").LowerTriangularFromBottomRightMask,
        }
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        grouped = problem.ratio > 1
        if grouped:
            q = q.unflatten(2, (problem.nhead_k, problem.ratio))
            k, v = (tensor.unsqueeze(3).expand(-1, -1, -1, problem.ratio, -1) for tensor in (k, v))
        compute = partial(
            ops.memory_efficient_attention, q, k, v, attn_bias=masks[self._mask(problem)](), scale=problem.scale
        )
        return (lambda: compute().flatten(2, 3)) if grouped else compute


class Flashinfer(Dense):
    """FlashInfer's prefill of a single sequence."""

    name = "flashinfer"
    title = "FlashInfer"
    modules = ("flashinfer", "torch")
    distribution = "flashinfer-python"
    soft_cap = True
    batches = False

    def call(self, problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Any]:
        """As :meth:`Dense.call`; the tensors have no batch axis there."""
        compute = partial(
            import_module("flashinfer").single_prefill_with_kv_cache,
            *(tensors[name][0] for name in ("q", "k", "v")),
            causal=problem.mask != "no",
            sm_scale=problem.scale,
            logits_soft_cap=problem.logits_soft_cap,
        )
        return lambda: compute().unsqueeze(0)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *(Sdpa(), Cudnn(), FlashAttn(), FlashAttn3()),
    *(Xformers(), Flashinfer(), Aiter()),
)
"""The implementations that the catalog knows how to call."""
