"""The text of a query before SQLite sees it: tokens, early checks, and carets under what is wrong.

SQLite reports no positions, so every error is located here. Text that passes is exactly one SQL expression once it is
in parentheses and SQLite has parsed it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from catalog.errors import QueryError

MAX_LENGTH = 100_000
"""Longest expression, in characters: room for a list of a thousand kernel ids."""

_SHOWN_WIDTH = 96

# What SQLite accepts in a name: ASCII letters and "_", then also digits and "$", and all non-ASCII characters.
_ID_START = r"[^\x00-@\[-^`{-\x7f]"
_ID = r"[^\x00-#%-/:-@\[-^`{-\x7f]"
_TOKEN = re.compile(
    rf"""(?P<space>[ \t\n\f\r]+)
    | (?P<comment>--|/\*)
    | (?P<string>'(?:[^']|'')*'(?!'))
    | (?P<quoted>"(?:[^"]|"")*"(?!") | `(?:[^`]|``)*`(?!`) | \[[^\]]*\])
    | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?{_ID}*)
    | (?P<word>{_ID_START}{_ID}*)
    | (?P<operator><>|!=|==|<=|>=|<<|>>|\|\||->>|->|[-+*/%&|~<>=(),.])
    | (?P<unclosed>['"`\[])
    | (?P<parameter>[?:@$\#])
    | (?P<semicolon>;)
    | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)

_REFUSED = {
    "comment": ("comments are not allowed", None),
    "unclosed": ("the quote is never closed", "Use single quotes for text: 'bf16'; double a quote inside it: ''."),
    "parameter": ("parameters are not allowed", "Write the value itself."),
    "semicolon": ("only one expression is allowed, without ';'", None),
    "other": ("unexpected character", None),
}


@dataclass(frozen=True, slots=True)
class Token:
    """A word of SQL: ``kind`` is string, quoted (an identifier), number, word or operator."""

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        """Position where the token ends in its text."""
        return self.start + len(self.text)

    @property
    def value(self) -> str:
        """The token without its quotes."""
        if self.kind not in {"string", "quoted"}:
            return self.text
        quote = self.text[-1]
        return self.text[1:-1].replace(quote * 2, quote)

    @property
    def sql(self) -> str:
        """The token as passed to SQLite.

        SQLite reads "x" as the text 'x' when there is no column x; `x` can only be a name.
        """
        return f"`{self.value.replace('`', '``')}`" if self.text[0] == '"' else self.text

    @property
    def is_name(self) -> bool:
        """Whether the token may name a column."""
        return self.kind in {"word", "quoted"}

    @property
    def is_literal(self) -> bool:
        """Whether the token is a value."""
        return self.kind in {"string", "number"}

    def is_word(self, *words: str) -> bool:
        """Whether the token is one of these keywords, in any case."""
        return self.kind == "word" and self.text.upper() in words


@dataclass(frozen=True, slots=True)
class Expression:
    """One expression: tokens of ``text``, which may hold more than the expression. ``what`` names it in errors."""

    what: str
    text: str
    tokens: tuple[Token, ...]

    @property
    def sql(self) -> str:
        """The expression as passed to SQLite."""
        return self.prefix(len(self.tokens))

    def prefix(self, count: int) -> str:
        """The SQL of the first ``count`` tokens."""
        parts = []
        end = self.tokens[0].start
        for token in self.tokens[:count]:
            parts += [self.text[end : token.start], token.sql]
            end = token.end
        return "".join(parts)

    def find(self, name: str, *, call: bool = False) -> Token | None:
        """The first token equal to ``name``, in any case; with ``call`` only if a parenthesis follows."""
        follows = (*self.tokens[1:], None)
        for token, following in zip(self.tokens, follows, strict=True):
            if call and (following is None or following.text != "("):
                continue
            if token.kind != "string" and token.value.lower() == name.lower():
                return token
        return None

    def before(self, token: Token) -> Token | None:
        """The token before ``token``."""
        index = self.tokens.index(token)
        return self.tokens[index - 1] if index else None

    def error(self, message: str, token: Token | None = None, *, hint: str | None = None) -> QueryError:
        """An error with ``message`` and, if ``token`` is known, a caret line under it."""
        span = None if token is None else (token.start, token.end)
        return _error(self.what, self.text, message, span, hint)

    def error_at_end(self, message: str) -> QueryError:
        """An error with ``message`` and a caret after the last token."""
        end = self.tokens[-1].end
        return _error(self.what, self.text, message, (end, end + 1), None)


def condition(text: str) -> Expression | None:
    """The condition in ``text``, or None if it is empty: every row.

    Raises:
        QueryError: the text cannot be one SQL expression.
    """
    whole = Expression("expression", text, tuple(_tokens("expression", text)))
    if not whole.tokens:
        return None
    first = whole.tokens[0]
    if first.is_word("SELECT", "VALUES", "WHERE"):
        raise whole.error(f"{first.text} is not part of a condition", first, hint="Write only what follows WHERE.")
    comma = next(_top_level_commas(whole.tokens), None)
    if comma is not None:
        raise whole.error("only one expression is allowed", whole.tokens[comma], hint="Join conditions with AND or OR.")
    return whole


@dataclass(frozen=True, slots=True)
class OrderTerm:
    """One term of an ordering; ``direction`` is the text after it: ASC, DESC, NULLS FIRST, NULLS LAST."""

    expression: Expression
    direction: str

    @property
    def sql(self) -> str:
        """The term as passed to SQLite."""
        return f"({self.expression.sql}) {self.direction}".rstrip()


def ordering(text: str) -> list[OrderTerm]:
    """The terms of ``text``: expressions separated by commas, each with an optional direction.

    Raises:
        QueryError: a term is empty, a bare number, or cannot be one SQL expression.
    """
    whole = Expression("order-by", text, tuple(_tokens("order-by", text)))
    if not whole.tokens:
        return []
    commas = list(_top_level_commas(whole.tokens))
    return [
        _order_term(whole, whole.tokens[start:end])
        for start, end in zip([0, *(i + 1 for i in commas)], [*commas, len(whole.tokens)], strict=True)
    ]


def _order_term(whole: Expression, tokens: tuple[Token, ...]) -> OrderTerm:
    direction: list[str] = []
    for words, before in ((("FIRST", "LAST"), "NULLS"), (("ASC", "DESC"), None)):
        if not tokens or not tokens[-1].is_word(*words):
            continue
        length = 1 if before is None else 2
        if before is None or (len(tokens) > 1 and tokens[-2].is_word(before)):
            direction[:0] = [token.text.upper() for token in tokens[-length:]]
            tokens = tokens[:-length]
    if not tokens:
        raise whole.error("a term is empty", hint="Separate terms by commas: arch DESC, name.")
    if len(tokens) == 1 and tokens[0].kind == "number":
        raise whole.error("a number orders nothing", tokens[0], hint="Order by the name of a column, not its position.")
    return OrderTerm(Expression(whole.what, whole.text, tokens), " ".join(direction))


def check_text(what: str, text: str) -> None:
    """Refuse text that no SQL statement can contain.

    Raises:
        QueryError: ``text`` is too long, contains a NUL, or is not Unicode.
    """
    if len(text) > MAX_LENGTH:
        raise QueryError(f"{what}: {len(text)} characters; at most {MAX_LENGTH} are allowed")
    if "\0" in text:
        raise QueryError(f"{what}: a NUL character is not allowed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QueryError(f"{what}: byte or character {error.start + 1} is not valid UTF-8") from None


def _tokens(what: str, text: str) -> Iterator[Token]:
    check_text(what, text)
    opened: list[Token] = []
    for match in _TOKEN.finditer(text):
        kind = str(match.lastgroup)
        token = Token(kind, match[0], match.start())
        if kind == "space":
            continue
        if kind in _REFUSED:
            message, hint = _REFUSED[kind]
            raise _error(what, text, message, match.span(), hint)
        if token.is_word("WITH"):
            raise _error(what, text, "WITH is not allowed", match.span(), "Write the subquery in place.")
        if token.text == "(":
            opened.append(token)
        elif token.text == ")":
            if not opened:
                raise _error(what, text, "this parenthesis was never opened", match.span(), None)
            opened.pop()
        yield token
    if opened:
        raise _error(what, text, "this parenthesis is never closed", (opened[-1].start, opened[-1].end), None)


def _top_level_commas(tokens: tuple[Token, ...]) -> Iterator[int]:
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token.text == "(") - (token.text == ")")
        if token.text == "," and depth == 0:
            yield index


def _error(what: str, text: str, message: str, span: tuple[int, int] | None, hint: str | None) -> QueryError:
    shown = f"{what}: {message}"
    if span is not None:
        shown += "\n" + _marked(text, *span)
    elif text.strip():
        start = text.strip()
        shown += "\n    " + _printable(start[:_SHOWN_WIDTH]) + ("…" if len(start) > _SHOWN_WIDTH else "")
    return QueryError(shown, hint=hint)


def _marked(text: str, start: int, end: int) -> str:
    """The line of ``text`` around ``start``, and a line with carets from ``start`` to ``end``."""
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", start)
    line_end = len(text) if line_end < 0 else line_end
    left = max(line_start, start - _SHOWN_WIDTH // 2)
    right = min(line_end, left + _SHOWN_WIDTH)
    before = "…" if left > line_start else ""
    after = "…" if right < line_end else ""
    carets = "^" * max(1, min(end, right) - start)
    return f"    {before}{_printable(text[left:right])}{after}\n    {' ' * (len(before) + start - left)}{carets}"


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
