"""Options of the command line that state a problem, one a field of :class:`Problem`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import typer

_NUMBERS = ("batch", "nhead_q", "nhead_k", "seqlen_q", "seqlen_k", "hdim_q", "hdim_v")
_LISTS = ("seqlens_q", "seqlens_k", "window")
_WORDS = ("op", "dtype", "mask", "layout")

OPTIONS = {
    "op": "Operation: fwd.",
    "dtype": "Element type: fp32, fp16, bf16.",
    "batch": "Number of sequences.",
    "nhead_q": "Query heads.",
    "nhead_k": "Key heads; a divisor of --nhead-q. Default: as many.",
    "seqlen_q": "Queries of a sequence.",
    "seqlen_k": "Keys of a sequence. Default: as many as queries.",
    "seqlens_q": "Queries of each packed sequence, as 128,64,7: group mode.",
    "seqlens_k": "Keys of each packed sequence. Default: as many as queries.",
    "hdim_q": "Head dim of Q and K.",
    "hdim_v": "Head dim of V and O. Default: that of Q.",
    "mask": "no, causal (= top_left), bottom_right, or window (with --window).",
    "window": "Keys seen left and right of the diagonal, as 128,0; -1 for all.",
    "layout": "Axis order of dense tensors: bhsd or bshd.",
    "lse": "Store the log-sum-exp of every row.",
    "scale": "Factor of the scores. Default: 1 / sqrt(hdim_q).",
}
"""Help by field of a problem; written here, as asking for help must not import pydantic."""


def _parameters() -> list[inspect.Parameter]:
    types: dict[str, Any] = (
        dict.fromkeys(_NUMBERS, int) | dict.fromkeys((*_LISTS, *_WORDS), str) | {"lse": bool, "scale": float}
    )
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(None, f"--{name.replace('_', '-')}", help=help_text, show_default=False),
            annotation=types[name] | None,
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
