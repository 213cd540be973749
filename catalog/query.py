"""Questions to the catalog: the user's SQL expression over the view ``kernels``, run where it can only read.

What stands between an expression and the machine, each enough for most of it:

- the text is one expression in parentheses (:mod:`catalog.query_text`);
- the file is opened read-only, so SQLite itself cannot write to it, and is never created;
- an authorizer admits SELECT, the tables of the catalog and a list of functions, and denies everything else:
  pragmas, other files, extensions, and the functions that make values of any size;
- limits on the size of values and statements, where Python can set them (3.11); before, `replace` is denied too and
  SQLite's own limit of 1 GB holds;
- a time limit, which counts only the time spent inside SQLite: a slow reader of the rows costs nothing.
"""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from catalog.backends import spec_folders
from catalog.errors import CatalogError, QueryError, RegistryError
from catalog.messages import did_you_mean, near
from catalog.query_hints import (
    FUNCTIONS,
    archs_there,
    looks_like_text,
    near_columns,
    near_function,
    populate_command,
    quoted,
    syntax_hint,
)
from catalog.query_text import Expression, Token, check_text, condition, ordering
from catalog.registry import check_side_files, unwritable
from catalog.schema.fields import TRAITS
from catalog.schema.spec_files import known_archs
from catalog.schema.tables import TABLES, VIEW

HAS_LIMITS = sys.version_info >= (3, 11)

BUSY_TIMEOUT_S = 5.0
STEPS_PER_CHECK = 100
ROWS_PER_FETCH = 256
MAX_ROWS = 2**63 - 1

_EQUALITIES = {"=", "==", "!=", "<>", "IS"}
_ARITHMETIC = {"+", "-", "*", "/", "%", "&", "|", "||", "~", "<<", ">>"}

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Query:
    """A question: which rows (``where``; empty: all), of which arch, which columns (none: all), in which order."""

    where: str = ""
    arch: str | None = None
    columns: tuple[str, ...] = ()
    order_by: str | None = None
    limit: int | None = None


class Result:
    """The columns of an answer and, by iteration, its rows, read as they are asked for.

    Iterating raises what :func:`run` raises: a row may be the one where the time is up.
    """

    def __init__(self, columns: tuple[str, ...], rows: Iterator[Row], connection: sqlite3.Connection) -> None:
        self.columns = columns
        self._rows = rows
        self._connection = connection

    def __iter__(self) -> Iterator[Row]:
        return self._rows

    def __enter__(self) -> Result:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; needless after the last row."""
        self._connection.close()


def run(db_path: Path, query: Query, timeout: float) -> Result:
    """The rows of the catalog at ``db_path`` that ``query`` asks for, within ``timeout`` seconds.

    Raises:
        QueryError: an expression or column is wrong or refused, the arch has no rows, or the time is up.
        RegistryError: the file does not exist, is no catalog, or cannot be read.
    """
    session = _Session(db_path, timeout)
    with session.closed_on_error():
        statement = _Statement.of(session, query)
        cursor = session.execute(statement.rows(), statement.parameters)
        return Result(statement.columns, session.rows(cursor), session.connection)


def count(db_path: Path, query: Query, timeout: float) -> int:
    """How many rows :func:`run` would give.

    Raises:
        QueryError, RegistryError: as :func:`run`.
    """
    session = _Session(db_path, timeout)
    with session.closed_on_error():
        statement = _Statement.of(session, query)
        [(rows,)] = session.rows(session.execute(statement.count(), statement.parameters))
    return int(rows)


def read(db_path: Path, statement: str, parameters: Mapping[str, str | int | None], timeout: float) -> list[Row]:
    """All rows of a SELECT of our own, over the catalog's tables, within ``timeout`` seconds.

    Raises:
        QueryError: the time is up.
        RegistryError: as :func:`run`.
    """
    session = _Session(db_path, timeout)
    with session.closed_on_error():
        return list(session.rows(session.execute(statement, parameters)))


def hints(query: Query, domains: Mapping[str, Sequence[str | int]] | None = None) -> list[str]:
    """Why ``query`` may have found nothing: each value that its column can never have, with near values.

    ``domains`` adds the values of columns that are no traits.

    Raises:
        QueryError: the expression is malformed.
    """
    expression = condition(query.where)
    if expression is None:
        return []
    known = {name: _domain(name) for name in TRAITS} | {k: tuple(v) for k, v in (domains or {}).items()}
    found = []
    for column, literal in _comparisons(expression.tokens):
        values = [str(value) for value in known.get(column, ())]
        if not values or literal.value in values:
            continue
        instead = near(literal.value, values) or f"it has: {', '.join(values)}"
        found.append(f"{column} has no value {literal.text}; {instead}")
    return list(dict.fromkeys(found))


def _domain(name: str) -> tuple[str | int, ...]:
    return (0, 1) if TRAITS[name].kind == "bool" else TRAITS[name].values


def _comparisons(tokens: tuple[Token, ...]) -> Iterator[tuple[str, Token]]:
    """Each column and literal of ``column = literal``, ``literal = column`` and ``column IN (literal, ...)``."""
    for index, token in enumerate(tokens):
        if token.text.upper() in _EQUALITIES and 0 < index < len(tokens) - 1:
            around = [tokens[i].text for i in (index - 2, index + 2) if 0 <= i < len(tokens)]
            left, right = tokens[index - 1], tokens[index + 1]
            for column, literal in ((left, right), (right, left)):
                if column.is_name and literal.is_literal and not _ARITHMETIC.intersection(around):
                    yield column.value.lower(), literal
        elif token.is_word("IN") and index:
            column = tokens[max(0, index - 1 - tokens[index - 1].is_word("NOT"))]
            for literal in tokens[index + 2 :]:
                if literal.is_literal:
                    yield column.value.lower(), literal
                elif literal.text != ",":
                    break


@dataclass(frozen=True)
class _Statement:
    columns: tuple[str, ...]
    where: str
    order: str
    parameters: tuple[str | int, ...]

    @classmethod
    def of(cls, session: _Session, query: Query) -> _Statement:
        conditions, parameters = ["TRUE"], list[str | int]()
        if query.arch is not None:
            session.check_arch(query.arch)
            conditions.append("arch = ?")
            parameters.append(query.arch)
        expression = condition(query.where)
        if expression is not None:
            session.check(expression)
            conditions.append(f"(\n{expression.sql}\n)")
        terms = ordering(query.order_by or "")
        for term in terms:
            session.check(term.expression)
        if query.limit is not None and query.limit < 0:
            raise QueryError(f"limit: {query.limit} is negative")
        parameters.append(MAX_ROWS if query.limit is None else min(query.limit, MAX_ROWS))
        order = f"ORDER BY {', '.join(term.sql for term in terms)}" if terms else ""
        return cls(_chosen(query.columns, session.columns), " AND ".join(conditions), order, tuple(parameters))

    def rows(self) -> str:
        names = ", ".join(f'"{name}"' for name in self.columns)
        return f"SELECT {names} FROM {VIEW} WHERE {self.where} {self.order} LIMIT ?"

    def count(self) -> str:
        return f"SELECT count(*) FROM (SELECT 1 FROM {VIEW} WHERE {self.where} LIMIT ?)"


def _chosen(wanted: tuple[str, ...], existing: tuple[str, ...]) -> tuple[str, ...]:
    by_name = {name.lower(): name for name in existing}
    for name in wanted:
        if name.strip().lower() not in by_name:
            raise QueryError(f"columns: no such column: {name.strip()!r}", hint=near_columns(name, existing))
    return tuple(dict.fromkeys(by_name[name.strip().lower()] for name in wanted)) or existing


class _Session:
    """One read-only connection, shut off from everything but reading the catalog, for a limited time."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._guard = _Guard()
        self._clock = _Clock(seconds)
        if path.is_dir():
            raise RegistryError(f"{path} is a folder", hint="Choose a file with --db or CATALOG_DB.")
        if not path.is_file():
            raise RegistryError(f"there is no catalog at {path}", hint=f"Make one: {populate_command(path, 'host')}")
        try:
            self.connection, self.columns = self._open("mode=ro")
        except UnicodeDecodeError as error:  # SQLite's message quotes bytes of the file
            raise self._unreadable(error) from None
        except sqlite3.Error as error:
            self.connection, self.columns = self._open_immutable(error)

    def _open_immutable(self, error: sqlite3.Error) -> tuple[sqlite3.Connection, tuple[str, ...]]:
        parameters = unwritable(self._path, error)
        if parameters is None:
            raise self._unreadable(error) from None
        try:
            return self._open(parameters)
        except sqlite3.Error as second:
            raise self._unreadable(second) from None

    def _open(self, parameters: str) -> tuple[sqlite3.Connection, tuple[str, ...]]:
        check_side_files(self._path)
        uri = f"{self._path.resolve().as_uri()}?{parameters}"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            connection.execute("PRAGMA query_only = ON")
            connection.execute("PRAGMA trusted_schema = OFF")
            _set_limits(connection)
            connection.set_authorizer(self._guard)
            connection.set_progress_handler(self._clock, STEPS_PER_CHECK)
            description = connection.execute(f"SELECT * FROM {VIEW} LIMIT 0").description
        except BaseException:
            connection.close()
            raise
        return connection, tuple(column[0] for column in description)

    def _unreadable(self, error: Exception) -> RegistryError:
        message = str(error)
        if "no such table" in message:
            return RegistryError(f"{self._path} is a SQLite file, but no catalog", hint="Choose another with --db.")
        if "not a database" in message:
            return RegistryError(f"{self._path} is no SQLite file", hint="Choose another with --db.")
        if "locked" in message:
            return RegistryError(f"{self._path} is locked by another process", hint="Try again when it is done.")
        if "malformed" in message or isinstance(error, UnicodeDecodeError):
            return RegistryError(f"{self._path} is damaged", hint="Move it away and populate again.")
        return RegistryError(f"{self._path} cannot be read: {message}")

    def execute(
        self, sql: str, parameters: Sequence[str | int] | Mapping[str, str | int | None] = ()
    ) -> sqlite3.Cursor:
        with self._errors(), self._clock.running():
            return self.connection.execute(sql, parameters)

    def rows(self, cursor: sqlite3.Cursor) -> Iterator[Row]:
        with self.closed_on_error():
            while True:
                with self._errors(), self._clock.running():
                    batch = cursor.fetchmany(ROWS_PER_FETCH)
                if not batch:
                    break
                yield from batch
        self.connection.close()

    def check(self, expression: Expression) -> None:
        """Have SQLite compile the expression alone, so that what it says is about this text."""
        try:
            self._compile(f"({expression.sql}\n)")
        except sqlite3.Error as error:
            raise self._located(error, expression) from None

    def check_arch(self, arch: str) -> None:
        check_text("arch", arch)
        if self.execute(f"SELECT 1 FROM {VIEW} WHERE arch = ? LIMIT 1", (arch,)).fetchone():
            return
        present = [row[0] for row in self.execute("SELECT DISTINCT arch FROM population ORDER BY arch")]
        known = known_archs(*spec_folders())
        if arch not in known:
            raise QueryError(f"no arch is called {arch!r}{did_you_mean(arch, known)}", hint=archs_there(present))
        raise QueryError(
            f"{self._path} has no kernels of {arch}" + (f", but of {', '.join(present)}" if present else ""),
            hint=f"Add them: {populate_command(self._path, arch)}",
        )

    def _compile(self, sql: str) -> None:
        self._guard.denied = None
        with self._clock.running():
            self.connection.execute(f"EXPLAIN SELECT 1 FROM {VIEW} WHERE {sql}").close()

    def _located(self, error: sqlite3.Error, expression: Expression) -> CatalogError:
        if self._guard.denied is not None:
            name, message, hint = self._guard.denied
            return expression.error(message, expression.find(name), hint=hint)
        message = str(error)
        if re.search("syntax error|unrecognized token|incomplete input", message):
            return self._syntax_error(expression)
        if match := re.fullmatch(r"no such column: (.*)", message, re.DOTALL):
            token = expression.find(match[1]) or expression.find(match[1].rpartition(".")[2])
            return expression.error(message, token, hint=self._column_hint(match[1], token, expression))
        if match := re.search(r"function:? (\w+)|(\w+)\(\)", message):
            name = match[1] or match[2]
            hint = near_function(name) if message.startswith("no such") else None
            return expression.error(message, expression.find(name, call=True) or expression.find(name), hint=hint)
        if match := re.search(r"(?:no such table|collation sequence|ambiguous column name): (?:.*\.)?(.+)", message):
            hint = f"Tables: {', '.join(TABLES)}." if "table" in message else None
            return expression.error(message, expression.find(match[1]), hint=hint)
        return self._translated(error) or expression.error(message)

    def _syntax_error(self, expression: Expression) -> QueryError:
        """The error at the first token that SQLite's parser cannot go on from.

        Cut off before that token, the text is merely incomplete; so the token is found by bisection.
        """
        good, bad = 0, len(expression.tokens) + 1
        message = "incomplete input"
        while bad - good > 1:
            middle = (good + bad) // 2
            found = self._prefix_error(expression.prefix(middle))
            if found is None:
                good = middle
            else:
                bad, message = middle, found
        if bad > len(expression.tokens):
            return expression.error_at_end("the expression is incomplete")
        token = expression.tokens[bad - 1]
        return expression.error(message, token, hint=syntax_hint(token, expression))

    def _prefix_error(self, prefix: str) -> str | None:
        try:
            self._compile(f"({prefix}")
        except sqlite3.Error as error:
            return None if "incomplete input" in str(error) else str(error)
        return None

    def _column_hint(self, name: str, token: Token | None, expression: Expression) -> str:
        if token is not None and token.text[0] == '"':
            return f"Double quotes name columns; text takes single quotes: {quoted(token.value)}"
        if token is not None and looks_like_text(token, expression):
            return f"Text takes single quotes: {quoted(token.value)}"
        return near_columns(name.rpartition(".")[2], self.columns)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, MemoryError) as error:
            raise self._translated(error) or QueryError(f"expression: {error or 'out of memory'}") from None

    def _translated(self, error: Exception) -> CatalogError | None:
        """The error as ours where it is about the file or the time, not about the expression."""
        message = str(error)
        if message == "interrupted":
            if not self._clock.expired:
                raise KeyboardInterrupt  # SQLite swallowed it: the handler of a signal ran inside the progress handler
            return QueryError(
                f"the query took longer than {self._clock.seconds:g} s and was stopped",
                hint="Narrow it, or set CATALOG_QUERY_TIMEOUT to more seconds.",
            )
        if re.search("locked|malformed$|disk|not a database|unable to open", message):
            return self._unreadable(error)
        return None

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.connection.close()
            raise


class _Guard:
    """The authorizer; ``denied`` is the last refusal: what it was about, the message and a hint."""

    def __init__(self) -> None:
        self.denied: tuple[str, str, str | None] | None = None
        self._functions = FUNCTIONS if HAS_LIMITS else FUNCTIONS - {"replace"}

    def __call__(
        self, action: int, first: str | None, second: str | None, database: str | None, source: str | None
    ) -> int:
        if action == sqlite3.SQLITE_SELECT:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ and first is not None:
            if first.lower() in TABLES:
                return sqlite3.SQLITE_OK
            self.denied = first, f"'{first}' cannot be read here", f"Tables: {', '.join(TABLES)}."
        elif action == sqlite3.SQLITE_FUNCTION and second is not None:
            if second.lower() in self._functions:
                return sqlite3.SQLITE_OK
            self.denied = second, f"function {second} is not allowed", None
        else:
            self.denied = first or "", "only the tables of the catalog can be read", f"Tables: {', '.join(TABLES)}."
        return sqlite3.SQLITE_DENY


class _Clock:
    """The progress handler: true, which interrupts SQLite, once more than ``seconds`` were spent :meth:`running`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.expired = False
        self._left = seconds
        self._deadline = float("inf")

    def __call__(self) -> bool:
        self.expired = time.monotonic() > self._deadline
        return self.expired

    @contextmanager
    def running(self) -> Iterator[None]:
        self._deadline = time.monotonic() + self._left
        try:
            yield
        finally:
            self._left = self._deadline - time.monotonic()
            self._deadline = float("inf")


def _set_limits(connection: sqlite3.Connection) -> None:
    if sys.version_info >= (3, 11):
        for limit, value in {
            sqlite3.SQLITE_LIMIT_LENGTH: 256 * 1024,  # a function of two values takes the product of their lengths
            sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1_000_000,
            sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
            sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 1_000,
            sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
            sqlite3.SQLITE_LIMIT_VDBE_OP: 250_000,
            sqlite3.SQLITE_LIMIT_ATTACHED: 0,
            sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
        }.items():
            connection.setlimit(limit, value)
