"""Queries of the catalog: the user's SQL expression over the view ``kernels``, run where it can only read.

Several layers protect the machine from an expression:

- The text must be one expression, in parentheses (:mod:`catalog.registry.query_text`).
- It runs in a process of its own (:mod:`catalog.registry.sandbox`), with limited time and memory, which Ctrl-C ends.
- That process opens the file read-only and never creates it. This process migrates an older file first.
- An authorizer admits SELECT, the tables of the catalog and a list of functions. It denies everything else: pragmas,
  other files, extensions.

The time limit counts only time spent inside SQLite: slow reading of the rows costs nothing.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from catalog.backends import spec_folders
from catalog.errors import CatalogError, QueryError, RegistryError
from catalog.messages import did_you_mean, near
from catalog.ops import DEFAULT, operation, operations
from catalog.registry.connection import connect, open_as_allowed
from catalog.registry.journal import journal_for
from catalog.registry.migrate import STEPS
from catalog.registry.query_hints import (
    FUNCTIONS,
    archs_there,
    looks_like_text,
    near_columns,
    near_function,
    populate_command,
    quoted,
    syntax_hint,
)
from catalog.registry.query_text import Expression, Token, check_text, condition, ordering
from catalog.registry.sandbox import Limits, Parameters, Row, Sandbox, SqlError
from catalog.registry.tables import tables_of
from catalog.registry.views import view_of
from catalog.schema.columns import columns_of
from catalog.schema.lineage import LINEAGE_OF_POPULATION
from catalog.schema.spec_files import known_archs
from catalog.schema.traits import Trait

ROWS_PER_FETCH = 256
MAX_ROWS = 2**63 - 1

_EQUALITIES = {"=", "==", "!=", "<>", "IS"}
_ARITHMETIC = {"+", "-", "*", "/", "%", "&", "|", "||", "~", "<<", ">>"}


@dataclass(frozen=True)
class Query:
    """A query: rows (``where``; empty for all), arch, columns (none for all) and order.

    All rows are kernels of one ``operation``, or of ``view``, another view of the catalog. ``runnable``: only kernels
    that the hardware can run, or only the others.
    """

    where: str = ""
    arch: str | None = None
    columns: tuple[str, ...] = ()
    order_by: str | None = None
    limit: int | None = None
    operation: str = DEFAULT
    view: str = ""
    runnable: bool | None = None


class Result:
    """The columns of an answer; iterate over it for the rows, which are fetched as they are read.

    Iterating raises what :func:`run` raises: the time may run out at any row.
    """

    def __init__(self, columns: tuple[str, ...], rows: Iterator[Row], session: Session) -> None:
        self.columns = columns
        self._session = session
        self._rows = _until_end(rows, session)

    def __iter__(self) -> Iterator[Row]:
        return self._rows

    def __enter__(self) -> Result:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the query and close the file; not needed after the last row."""
        self._session.close()


def _until_end(rows: Iterator[Row], session: Session) -> Iterator[Row]:
    with session:
        yield from rows


def run(db_path: Path, query: Query, limits: Limits | None = None) -> Result:
    """The rows that ``query`` selects in the catalog at ``db_path``, within ``limits`` (None: those of the settings).

    Raises:
        QueryError: an expression or column is wrong or refused, the arch has no rows, or a limit was exceeded.
        RegistryError: the file does not exist, is not a catalog, or cannot be read.
    """
    session = Session(db_path, limits, query.operation, query.view)
    try:
        return Result(*session.ask(query), session)
    except BaseException:
        session.close()
        raise


def count(db_path: Path, query: Query, limits: Limits | None = None) -> int:
    """The number of rows that :func:`run` would return.

    Raises:
        QueryError, RegistryError: as in :func:`run`.
    """
    with Session(db_path, limits, query.operation, query.view) as session:
        return session.count(query)


def operations_asked(db_path: Path, where: str, *others: str) -> tuple[str, ...]:
    """The operations in the catalog whose kernels have all columns that an expression names.

    ``others`` are other texts with column names. Where no operation has all columns, the default one is returned, and
    its query reports what is wrong.

    Raises:
        QueryError: the expression is malformed.
        RegistryError: as :func:`run`.
    """
    columns = {of.name: {column.name for column in columns_of(of)} for of in operations()}
    known = set().union(*columns.values())
    expressions = [condition(where), *(term.expression for text in others for term in ordering(text))]
    tokens = [token.value.lower() for expression in expressions if expression for token in expression.tokens]
    named = known.intersection(tokens)
    fitting = [name for name in columns if named <= columns[name]]
    if fitting in ([], [DEFAULT]):
        return (DEFAULT,)
    with Session(db_path) as session:
        there = [str(name) for (name,) in session.rows("SELECT DISTINCT operation FROM lineage ORDER BY id")]
    return tuple(name for name in there if name in fitting) or (DEFAULT,)


def kernel_ids(db_path: Path, where: str, arch: str | None = None, operation: str | None = None) -> set[str]:
    """The ids of the kernels that an expression selects: of ``operation``; None: of each that has the columns.

    Raises:
        QueryError, RegistryError: as :func:`run`.
    """
    found: set[str] = set()
    for name in operations_asked(db_path, where) if operation is None else (operation,):
        with run(db_path, Query(where, arch, ("id",), operation=name)) as result:
            found.update(kernel_id for (kernel_id,) in result)
    return found


def hints(query: Query, domains: Mapping[str, Sequence[str | int]] | None = None) -> list[str]:
    """Why ``query`` may have found nothing: each value that its column can never have, with similar values.

    ``domains`` adds the values of columns that are not traits.

    Raises:
        QueryError: the expression is malformed.
    """
    expression = condition(query.where)
    if expression is None or query.view:
        return []
    traits = operation(query.operation).traits
    known = {name: _domain(trait) for name, trait in traits.items()}
    known |= {name: tuple(values) for name, values in (domains or {}).items()}
    found = []
    for column, literal in _comparisons(expression.tokens):
        values = [str(value) for value in known.get(column, ())]
        if not values or literal.value in values:
            continue
        instead = near(literal.value, values) or f"it has: {', '.join(values)}"
        found.append(f"{column} has no value {literal.text}; {instead}")
    return list(dict.fromkeys(found))


def _domain(trait: Trait) -> tuple[str | int, ...]:
    return (0, 1) if trait.kind == "bool" else trait.values


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
    view: str
    columns: tuple[str, ...]
    where: str
    order: str
    parameters: tuple[str | int, ...]

    @classmethod
    def of(cls, session: Session, query: Query) -> _Statement:
        conditions, parameters = ["TRUE"], list[str | int]()
        if query.arch is not None:
            if not query.view:
                session.check_arch(query.arch)
            conditions.append("arch = ?")
            parameters.append(query.arch)
        if query.runnable is not None:
            conditions.append("hw_valid" if query.runnable else "NOT hw_valid")
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
        return cls(
            session.view, _chosen(query.columns, session.columns), " AND ".join(conditions), order, tuple(parameters)
        )

    def rows(self) -> str:
        names = ", ".join(f'"{name}"' for name in self.columns)
        return f"SELECT {names} FROM {self.view} WHERE {self.where} {self.order} LIMIT ?"

    def count(self) -> str:
        return f"SELECT count(*) FROM (SELECT 1 FROM {self.view} WHERE {self.where} LIMIT ?)"


def _chosen(wanted: tuple[str, ...], existing: tuple[str, ...]) -> tuple[str, ...]:
    by_name = {name.lower(): name for name in existing}
    for name in wanted:
        if name.strip().lower() not in by_name:
            raise QueryError(f"columns: no such column: {name.strip()!r}", hint=near_columns(name, existing))
    return tuple(dict.fromkeys(by_name[name.strip().lower()] for name in wanted)) or existing


class Session:
    """A series of queries about kernels of one operation, or about ``view``, to the catalog at ``path``.

    Each query is within ``limits`` (None: those of the settings).

    A new query ends the previous one. An exceeded limit ends the session.

    Raises:
        RegistryError: the file does not exist, is not a catalog, or cannot be read.
    """

    def __init__(self, path: Path, limits: Limits | None = None, of: str = DEFAULT, view: str = "") -> None:
        self._path = path
        self._of, self.view, self._tables = of, view or view_of(of), tuple(tables_of(operation(of)))
        self._statements = self._version = 0
        if path.is_dir():
            raise RegistryError(f"{path} is a folder", hint="Choose a file with --db or CATALOG_DB.")
        if not path.is_file():
            command = populate_command(path, "host", of)
            raise RegistryError(f"there is no catalog at {path}", hint=f"Make one: {command}")
        self._sandbox = Sandbox(limits or Limits.of_settings())
        try:
            self.columns = self._open()
        except BaseException:
            self.close()
            raise

    def ask(self, query: Query) -> tuple[tuple[str, ...], Iterator[Row]]:
        """The columns and rows of a query; rows are fetched as they are read.

        Raises:
            QueryError, RegistryError: as in :func:`run`; reading the rows raises them too.
        """
        self._sandbox.restart_clock()
        statement = _Statement.of(self, query)
        self._execute(statement.rows(), statement.parameters)
        return statement.columns, self._fetched()

    def count(self, query: Query) -> int:
        """The number of rows of a query.

        Raises:
            QueryError, RegistryError: as in :func:`run`.
        """
        self._sandbox.restart_clock()
        statement = _Statement.of(self, query)
        self._execute(statement.count(), statement.parameters)
        [(rows,)] = self._fetched()
        return int(rows)

    def rows(self, statement: str, parameters: Parameters = ()) -> list[Row]:
        """All rows of one of our own SELECT statements over the catalog's tables.

        Raises:
            QueryError, RegistryError: as in :func:`run`.
        """
        self._sandbox.restart_clock()
        self._execute(statement, parameters)
        return list(self._fetched())

    def close(self) -> None:
        """End the current query and close the file."""
        self._sandbox.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> tuple[str, ...]:
        """Open the file, and return the columns of its view."""
        with suppress(RegistryError):  # a file that cannot be written can be read as it is
            if self._path.is_file() and journal_for(self._path) != "wal":
                connect(self._path).close()  # which leaves WAL mode
        try:
            self._version = open_as_allowed(self._path, "mode=ro", self._open_with)
            if 0 < self._version < len(STEPS):
                with suppress(RegistryError):  # a read-only file answers from its older view
                    connect(self._path).close()
            return self._sandbox.execute(f"SELECT * FROM {self.view} LIMIT 0")
        except sqlite3.Error as error:
            raise self._unreadable(error) from None

    def _open_with(self, path: Path, parameters: str) -> int:
        # Statements of our own may read the tables of any operation.
        readable = {name for of in operations() for name in tables_of(of)}
        return self._sandbox.open(f"{path.resolve().as_uri()}?{parameters}", tuple(readable), FUNCTIONS)

    def _unreadable(self, error: Exception) -> RegistryError:
        message = str(error)
        if "no such table" in message and self._version and self._of != DEFAULT:
            command = populate_command(self._path, "ARCH", self._of)
            return RegistryError(f"{self._path} has no kernels of {self._of}", hint=f"To add them: {command}")
        if "no such table" in message:
            return RegistryError(f"{self._path} is an SQLite file, but not a catalog", hint="Choose another with --db.")
        if "not a database" in message:
            return RegistryError(f"{self._path} is not an SQLite file", hint="Choose another with --db.")
        if "locked" in message:
            return RegistryError(f"{self._path} is locked by another process", hint="Try again when it is done.")
        if "malformed" in message:
            return RegistryError(f"{self._path} is damaged", hint="Move it away and populate again.")
        return RegistryError(f"{self._path} cannot be read: {message}")

    def _execute(self, sql: str, parameters: Parameters = ()) -> None:
        self._statements += 1
        try:
            self._sandbox.execute(sql, parameters)
        except SqlError as error:
            raise self._translated(error) from None

    def _fetched(self) -> Iterator[Row]:
        """The rows of the last statement, fetched as they are read."""
        return self._fetch(self._statements)

    def _fetch(self, statement: int) -> Iterator[Row]:
        more = True
        while more:
            if statement != self._statements:
                raise QueryError(
                    "the session has since run another query", hint="Read all rows of a query before the next one."
                )
            try:
                batch = self._sandbox.fetch(ROWS_PER_FETCH)
            except SqlError as error:
                raise self._translated(error) from None
            yield from batch
            more = len(batch) == ROWS_PER_FETCH

    def check(self, expression: Expression) -> None:
        """Have SQLite compile the expression alone, so that its messages are about this text."""
        try:
            self._compile(f"({expression.sql}\n)")
        except SqlError as error:
            raise self._located(error, expression) from None

    def check_arch(self, arch: str) -> None:
        """Refuse an arch that has no kernels here."""
        check_text("arch", arch)
        self._execute(f"SELECT 1 FROM {self.view} WHERE arch = ? LIMIT 1", (arch,))
        if list(self._fetched()):
            return
        asked = f"SELECT DISTINCT arch FROM {LINEAGE_OF_POPULATION} WHERE operation = ? ORDER BY arch"
        self._execute(asked, (self._of,))
        present = [row[0] for row in self._fetched()]
        known = known_archs(*spec_folders())
        if arch not in known:
            raise QueryError(f"no arch is called {arch!r}{did_you_mean(arch, known)}", hint=archs_there(present))
        raise QueryError(
            f"{self._path} has no kernels of {arch}" + (f", but of {', '.join(present)}" if present else ""),
            hint=f"Add them: {populate_command(self._path, arch, self._of)}",
        )

    def _compile(self, sql: str) -> None:
        self._sandbox.compile(f"SELECT 1 FROM {self.view} WHERE {sql}")

    def _located(self, error: SqlError, expression: Expression) -> CatalogError:
        if error.denied is not None:
            return _refusal(*error.denied, expression, self._tables)
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
            hint = f"Tables: {', '.join(self._tables)}." if "table" in message else None
            return expression.error(message, expression.find(match[1]), hint=hint)
        return self._about_file(error) or expression.error(message)

    def _syntax_error(self, expression: Expression) -> QueryError:
        """The error at the first token that SQLite's parser rejects.

        Text cut off before that token is merely incomplete, so bisection finds it.
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
        return expression.error(message, token, hint=syntax_hint(token, expression, self._words))

    @property
    def _words(self) -> set[str]:
        """The words that the operation's traits take, for hints."""
        return {str(word) for trait in operation(self._of).traits.values() for word in trait.values}

    def _prefix_error(self, prefix: str) -> str | None:
        try:
            self._compile(f"({prefix}")
        except SqlError as error:
            return None if "incomplete input" in str(error) else str(error)
        return None

    def _column_hint(self, name: str, token: Token | None, expression: Expression) -> str:
        if token is not None and token.text[0] == '"':
            return f"Double quotes name columns; use single quotes for text: {quoted(token.value)}"
        if token is not None and looks_like_text(token, expression, self._words):
            return f"Use single quotes for text: {quoted(token.value)}"
        return near_columns(name.rpartition(".")[2], self.columns)

    def _translated(self, error: SqlError) -> CatalogError:
        return self._about_file(error) or QueryError(f"expression: {error}")

    def _about_file(self, error: SqlError) -> RegistryError | None:
        about_file = re.search("locked|malformed$|disk|not a database|unable to open", str(error))
        return self._unreadable(error) if about_file else None


def _refusal(kind: str, name: str, expression: Expression, readable: Sequence[str]) -> QueryError:
    """The error for a ``name`` refused by the authorizer."""
    tables = f"Tables: {', '.join(readable)}."
    message, hint = {
        "table": (f"'{name}' cannot be read here", tables),
        "function": (f"function {name} is not allowed", None),
        "statement": ("only the tables of the catalog can be read", tables),
    }[kind]
    return expression.error(message, expression.find(name), hint=hint)
