"""The content of a table in any format: entries with fields as texts, turned into records by the roles of columns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from catalog.errors import UsageError
from catalog.foreign.formats import Format, plain
from catalog.foreign.lines import Lines, milliseconds
from catalog.messages import expected
from catalog.registry.rows import Device, ForeignTiming, is_future
from catalog.schema.problem_form import canonical


@dataclass(frozen=True)
class Given:
    """What the user states about tables: it completes what the files state, and never replaces it.

    ``measured`` is a date in ISO 8601, as in :data:`~catalog.registry.rows.PastStamp`.
    """

    table: str | None = None
    arch: str | None = None
    tool: str = ""
    measured: str | None = None


def read_date(text: str) -> str:
    """A date as 2026-05-31, as the stamp of its first second in UTC.

    Raises:
        UsageError: it is not a date, or in the future.
    """
    stamp = f"{text}T00:00:00+00:00"
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text) or is_future(stamp):
        raise UsageError(f"{text!r} is not a past date", hint="Dates are written as in 2026-05-31.")
    return stamp


@dataclass(frozen=True)
class Parsed:
    """A table: its name in the format, its entries by line, and what the file states about all of them."""

    table: str
    entries: list[tuple[int, dict[str, str]]]
    arch: str | None = None
    units: str = ""
    tool: str = ""
    unknown: tuple[str, ...] = field(default=())


def records(parsed: Parsed, lines: Lines, form: Format, given: Given) -> Iterator[ForeignTiming]:
    """The records of a table. Malformed entries are noted in ``lines``.

    Raises:
        UsageError: an entry does not state its arch, and the user does not either.
        MalformedTableError: too many entries are malformed.
    """
    table = form.table(parsed.table)
    roles = {name: column.role for name, column in form.columns.items()}
    for number, fields in parsed.entries:
        by_role: dict[str, dict[str, str]] = {}
        for name, value in fields.items():
            if value:
                by_role.setdefault(roles.get(name, "problem"), {})[name] = value
        try:
            [time] = by_role.get("time", {"": ""}).values()
            yield ForeignTiming(
                source=form.source,
                operation=table.operation,
                name=" + ".join(by_role.get("name", {}).values()) or parsed.table,
                traits=canonical({name: plain(value) for name, value in by_role.get("trait", {}).items()}),
                device=_device(lines, parsed, form, given, by_role),
                format=form.name,
                table_name=parsed.table,
                problem=canonical(_problem(form, by_role.get("problem", {}))),
                median_ms=milliseconds(time, form.time_unit_ms),
                n=None,
                tool=parsed.tool or given.tool,
                measured=given.measured,
                fields=json.dumps(fields, ensure_ascii=False, separators=(",", ":")),
                file=lines.path.name,
                line=number,
            )
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            lines.wrong(number, f"{'.'.join(map(str, first['loc']))}: {expected(first)}")
        except ValueError as error:
            lines.wrong(number, str(error))


def _problem(form: Format, values: Mapping[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in values.items():
        fields |= form.stated(name, value)
    return fields


def _device(
    lines: Lines, parsed: Parsed, form: Format, given: Given, by_role: Mapping[str, Mapping[str, str]]
) -> Device:
    """The device of an entry: by its own columns, else the file, else the user, else its number of compute units."""
    [arch] = by_role.get("arch", {"": parsed.arch or given.arch}).values()
    [stated] = by_role.get("units", {"": parsed.units}).values()
    units = plain(stated)
    if stated and (not isinstance(units, int) or not 0 < units < 100_000):
        raise ValueError(f"{stated[:40]!r} is not a number of compute units")
    arch = arch or form.archs_by_units.get(units if isinstance(units, int) else 0)
    if arch is None:
        raise UsageError(f"{lines.path} does not state the arch of its device", hint="State it: --arch gfx942")
    return Device(arch=arch, name="", facts=json.dumps({"cores": units} if stated else {}))
