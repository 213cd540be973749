"""The content of a table in any format: entries with fields as texts, turned into records by the roles of columns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
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
    """What the user states about tables: ``table`` replaces a file's name, the rest completes what the file states.

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
        TableError: too many entries are malformed.
    """
    table = form.table(parsed.table)
    roles = {name: column.role for name, column in form.columns.items()}
    problem_text, traits_text = lru_cache(_CACHED)(partial(_problem, form)), lru_cache(_CACHED)(_traits)
    device_of = lru_cache(_CACHED)(partial(_device, parsed, form, given))
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
                traits=traits_text(_items(by_role, "trait")),
                device=device_of(_items(by_role, "arch"), _items(by_role, "units")),
                format=form.name,
                table_name=parsed.table,
                problem=problem_text(_items(by_role, "problem")),
                median_ms=milliseconds(time, form.time_unit_ms),
                n=None,
                tool=parsed.tool or given.tool,
                measured=given.measured,
                fields=_encode(fields),
                file=lines.path.name,
                line=number,
            )
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            lines.wrong(number, f"{'.'.join(map(str, first['loc']))}: {expected(first)}")
        except UsageError as error:
            raise UsageError(f"{lines.path}:{number}: {error.message}", hint=error.hint) from None
        except ValueError as error:
            lines.wrong(number, str(error))


Items = tuple[tuple[str, str], ...]
"""Columns and their values; hashable, because entries of a table repeat them."""

_CACHED = 4096
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _items(by_role: Mapping[str, Mapping[str, str]], role: str) -> Items:
    return tuple(by_role.get(role, {}).items())


def _problem(form: Format, values: Items) -> str:
    fields: dict[str, Any] = {}
    for name, value in values:
        fields |= form.stated(name, value)
    return canonical(fields)


def _traits(values: Items) -> str:
    return canonical({name: plain(value) for name, value in values})


def _device(parsed: Parsed, form: Format, given: Given, archs: Items, units: Items) -> Device:
    """The device of an entry: by its own columns, else the file, else the user, else its number of compute units."""
    arch = "".join(value for _, value in archs) or parsed.arch or given.arch
    stated = "".join(value for _, value in units) or parsed.units
    count = plain(stated)
    if stated and (not isinstance(count, int) or not 0 < count < 100_000):
        raise ValueError(f"{stated[:40]!r} is not a number of compute units")
    arch = arch or form.archs_by_units.get(count if isinstance(count, int) else 0)
    if arch is None:
        raise UsageError("the file does not state the arch of the device", hint="State it: --arch gfx942")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", arch):
        raise ValueError(f"{arch[:40]!r} is not an arch")
    return Device(arch=arch, name="", facts=json.dumps({"cores": count} if stated else {}))
