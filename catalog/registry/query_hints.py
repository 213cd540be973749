"""Hints for an expression, a column, a function or an arch that a query cannot use."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from catalog.messages import near
from catalog.ops import DEFAULT
from catalog.registry.query_text import Expression, Token
from catalog.settings import settings

_FUNCTION_NAMES = """
    -> ->> abs acos asin atan atan2 avg ceil ceiling coalesce cos count cume_dist current_date current_time
    current_timestamp date datetime dense_rank exp first_value floor glob group_concat ifnull if iif instr
    json_array_length json_extract json_type json_valid julianday lag last_value lead length like likelihood likely
    ln log log10 log2 lower ltrim max median min mod nth_value ntile nullif percent_rank pi pow power random rank
    replace round row_number rtrim sign sin sqrt strftime substr substring sum tan time total trim trunc typeof
    unicode unixepoch unlikely upper
"""

FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
"""Functions that an expression may call: none has side effects or makes a value of arbitrary size from a number."""

_FEW = 30
"""Number of columns that a hint can list."""

_COMPARISONS = {"=", "==", "!=", "<>", "IS", "<", ">", "<=", ">="}


def near_columns(name: str, existing: tuple[str, ...]) -> str:
    """Columns that ``name`` may mean, or else all columns if they are few, or where they are listed."""
    listed = f"Columns: {', '.join(existing)}." if len(existing) <= _FEW else "`catalog columns` lists every column."
    return _meant(name, existing) or listed


def near_function(name: str) -> str | None:
    """Functions that ``name`` may mean; None if none is similar."""
    if name.upper() == "REGEXP":
        return "Use LIKE ('%async%') or GLOB ('*async*')."
    return _meant(name, FUNCTIONS)


def archs_there(present: Sequence[str]) -> str:
    """The archs that have kernels, and where to find the list of all archs."""
    return f"The catalog has {', '.join(present) or 'no kernels'}; `catalog doctor` lists all archs."


def populate_command(path: Path, arch: str, of: str = DEFAULT) -> str:
    """The command that populates the catalog at ``path`` with an operation's kernels of ``arch``."""
    chosen = "" if path == settings().db else f"--db {shlex.quote(str(path))} "
    return f"catalog {chosen}populate {'' if of == DEFAULT else f'{of} '}--arch {shlex.quote(arch)}"


def looks_like_text(token: Token, expression: Expression, words: Collection[str]) -> bool:
    """Whether ``token``, which names no column, may be text without quotes; ``words`` are values of columns."""
    before, known = expression.before(token), token.value.lower() in words
    return before is not None and (before.text.upper() in _COMPARISONS or (before.text in {"(", ","} and known))


def syntax_hint(token: Token, expression: Expression, words: Collection[str]) -> str | None:
    """How to write what ``token``, where the parser stopped, may be meant to say; ``words`` are values of columns."""
    if token.is_word("ORDER"):
        return "Order with --order-by."
    if token.is_word("LIMIT"):
        return "Limit with --limit."
    if token.kind == "word" and looks_like_text(token, expression, words):
        return f"Use single quotes for text: {quoted(token.value)}"
    if token.text in {"&", "|"}:
        return "Join conditions with AND or OR."
    return None


def quoted(text: str) -> str:
    """``text`` as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def _meant(name: str, known: Iterable[str]) -> str | None:
    question = near(name, known)
    return f"{question[0].upper()}{question[1:]}" if question else None
