"""Options of the command line that state a problem, one a field of :class:`Problem`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import typer

_LISTS = ("seqlens_q", "seqlens_k", "window")
_FLAGS = ("lse", "randval", "dbias", "dlse", "deterministic")
_FLOATS = ("scale", "logits_soft_cap", "dropout")
_WORDS = (
    *("op", "dtype", "mask", "layout", "bias", "bias_dims", "qscale", "rope"),
    *("kv_memory_layout", "kv_lookup_table"),
)

OPTIONS = {
    "op": "Operation: fwd, splitkv, pagedkv, appendkv, batch_prefill, bwd.",
    "dtype": "Element type: fp32, fp16, bf16, fp8, bf8, fp8bf16, fp8fp32.",
    "page_size": "Tokens of a page of the K/V cache. Default: the cache is dense.",
    "seqlens_q": "Queries of each packed sequence, as 128,64,7: group mode.",
    "seqlens_k": "Keys of each packed sequence. Default: as many as queries.",
    "batch": "Number of sequences.",
    "nhead_q": "Query heads.",
    "nhead_k": "Key heads; a divisor of --nhead-q. Default: as many.",
    "seqlen_q": "Queries of a sequence.",
    "seqlen_k": "Keys of a sequence, or that a paged sequence has room for. Default: as many as queries.",
    "hdim_q": "Head dim of Q and K.",
    "hdim_v": "Head dim of V and O. Default: that of Q.",
    "mask": "no, causal (= top_left), bottom_right, or window (with --window).",
    "window": "Keys seen left and right of the diagonal, as 128,0; -1 for all.",
    "sink_size": "First keys that stay visible to the left of a window.",
    "lse": "Store the log-sum-exp of every row.",
    "scale": "Factor of the scores. Default: 1 / sqrt(hdim_q).",
    "bias": "What is added to the scores: no, bias, alibi.",
    "bias_dims": "Batch and head axes of the bias or the slopes: 11, 1h, bh.",
    "logits_soft_cap": "c of c * tanh(score / c). Default: no cap.",
    "dropout": "Probability that an attention weight is dropped.",
    "randval": "Store the dropout's random bytes.",
    "qscale": "Scales of fp8 and bf8: no, pertensor, blockscale, kv_blockscale.",
    "block_scale_size_q": "Queries that share a block scale. Default: 128.",
    "block_scale_size_kv": "Keys that share a block scale. Default: 128.",
    "min_seqlen_q": "Skip packed sequences of so many queries or fewer.",
    "num_splits": "Parts that the keys are divided into. Default: chosen.",
    "num_pages": "Pages of the K/V cache. Default: as many as the sequences fill.",
    "kv_memory_layout": "Order of the elements inside a page: linear, vectorized.",
    "kv_lookup_table": "Form of the page table: vllm, sglang.",
    "seqlen_new": "Tokens that are appended to each sequence.",
    "rope": "Rotary embedding: no, inter, half.",
    "rotary_dim": "Leading elements of a head that are rotated. Default: all.",
    "dbias": "Compute the gradient of the bias.",
    "dlse": "The gradient of LSE is an input too.",
    "deterministic": "dQ is the same in every run.",
    "layout": "Axis order of dense tensors: bhsd or bshd.",
}
"""Help by field of a problem; written here, as asking for help must not import pydantic."""


def _parameters() -> list[inspect.Parameter]:
    types: dict[str, Any] = (
        dict.fromkeys((*_LISTS, *_WORDS), str) | dict.fromkeys(_FLAGS, bool) | dict.fromkeys(_FLOATS, float)
    )
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(None, f"--{name.replace('_', '-')}", help=help_text, show_default=False),
            annotation=types.get(name, int) | None,
        )
        for name, help_text in OPTIONS.items()
    ]


def with_problem(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` an option for every field of a problem; it gets the fields that were stated, as ``fields``."""
    signature = inspect.signature(command)
    own = [parameter for name, parameter in signature.parameters.items() if name != "fields"]

    @functools.wraps(command)
    def wrapper(**options: Any) -> None:
        stated = {name: options.pop(name) for name in OPTIONS}
        fields = {name: _listed(name, value) for name, value in stated.items() if value is not None}
        command(**options, fields=fields)

    hints = inspect.get_annotations(command, eval_str=True)
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in own]
    wrapper.__signature__ = signature.replace(parameters=[*_parameters(), *own], return_annotation=None)  # type: ignore[attr-defined]
    del wrapper.__wrapped__
    wrapper.__annotations__ = {}
    return wrapper


def _listed(name: str, value: Any) -> Any:
    if name not in _LISTS:
        return value
    try:
        return [int(number) for number in str(value).split(",") if number.strip()]
    except ValueError:
        raise typer.BadParameter(
            f"{value!r}: integers separated by commas", param_hint=f"--{name.replace('_', '-')}"
        ) from None
