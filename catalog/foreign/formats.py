"""The formats of other projects' tables, as ``data/foreign`` describes them: columns, roles, tables, sources."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from catalog.errors import SpecError, UsageError
from catalog.messages import did_you_mean, expected
from catalog.schema.yaml_files import read_yaml

FORMATS = ("aiter-csv", "tunableop", "miopen-fdb")
"""The names of the formats; each has a file in ``data/foreign``."""


def _is_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Column(_Model):
    """A column: its role and its meaning.

    ``problem`` columns state the problem, ``name`` columns the kernel. ``trait`` columns state what else is known about
    the kernel, ``result`` columns what was measured besides the ``time``. ``arch`` and ``units`` describe the device.
    """

    role: Literal["problem", "name", "trait", "time", "result", "arch", "units"]
    about: str


class Table(_Model):
    """A kind of table: the operation, what the names of its files contain, and the columns of a list of problems."""

    operation: str
    tuned: str = ""
    untuned: str = ""
    problem: tuple[str, ...] = ()


class Format(_Model):
    """A format: what it is, the project that its kernels belong to, and where the facts here are from.

    Attributes:
        time_unit_ms: the unit of its times, in ms.
        one_kernel_per_problem: whether a second kernel of a problem contradicts the first one.
        patterns: regular expressions whose groups are fields of the problem, by the column that they match as a whole.
        archs: archs that the name of a file may begin with.
        archs_by_units: the arch of devices that are known only by their number of compute units.
    """

    name: str
    about: str
    source: str
    origin: tuple[str, ...]
    time_unit_ms: float
    one_kernel_per_problem: bool
    columns: Mapping[str, Column]
    tables: Mapping[str, Table]
    patterns: Mapping[str, Annotated[str, AfterValidator(_is_pattern)]] = {}
    archs: tuple[str, ...] = ()
    archs_by_units: Mapping[int, str] = {}

    def columns_of(self, role: str) -> tuple[str, ...]:
        """The names of the columns with a role, in order."""
        return tuple(name for name, column in self.columns.items() if column.role == role)

    def table(self, name: str) -> Table:
        """The table called ``name``.

        Raises:
            UsageError: the format has no such table.
        """
        if name not in self.tables:
            raise UsageError(
                f"{self.name} has no table {name!r}{did_you_mean(name, self.tables)}",
                hint=f"Tables: {', '.join(self.tables)}.",
            )
        return self.tables[name]

    def stated(self, column: str, value: str) -> dict[str, Any]:
        """The fields that a value of ``column`` states: by the column's pattern, or else the value itself."""
        pattern = self.patterns.get(column)
        found = None if pattern is None else re.fullmatch(pattern, value)
        groups = {} if found is None else {name: text for name, text in found.groupdict().items() if text is not None}
        return {column: plain(value)} | {name: plain(text) for name, text in groups.items()}


def plain(text: str) -> int | str:
    """An integer if ``text`` is one in its usual form, else the text."""
    return int(text) if re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) else text


@functools.cache
def read_format(name: str, data: Path) -> Format:
    """The format called ``name``, from the data folder ``data``.

    Raises:
        UsageError: there is no such format.
        SpecError: its file is malformed.
    """
    if name not in FORMATS:
        raise UsageError(
            f"no format of tables is called {name!r}{did_you_mean(name, FORMATS)}",
            hint=f"Formats: {', '.join(FORMATS)}.",
        )
    path = data / "foreign" / f"{name}.yaml"
    try:
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise ValueError(f"{path}: expected an object")
        return Format.model_validate({**content, "name": name})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SpecError(f"{path}: {'.'.join(map(str, first['loc']))}: {expected(first)}") from None
    except ValueError as error:
        raise SpecError(str(error)) from None
