"""The syntax of each format: a file's lines become entries, with all their fields."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from catalog.errors import UsageError
from catalog.foreign.formats import Format
from catalog.foreign.lines import Lines
from catalog.foreign.parsed import Given, Parsed

MOST_COLUMNS = 200


def read_aiter_csv(lines: Lines, form: Format, given: Given) -> Parsed:
    """A tuned table of aiter: a header, then one problem per line.

    Raises:
        UsageError: the file's name does not say which table it is, nor does the user; or it lacks a column.
        TableError: too many lines are malformed.
    """
    name = given.table or _table_of(lines.path.name, form)
    table = form.table(name)
    rows = ((number, _values(lines, number, line)) for number, line in lines)
    number, header = next(rows, (1, []))
    missing = [column for column in (*table.problem, *form.columns_of("time")) if column not in header]
    if missing:
        lines.check()
        raise UsageError(
            f"{lines.path}:{number}: the header of a tuned table {name} lacks {', '.join(missing)}",
            hint="Untuned tables have no times. If it is another table, name it: --table NAME",
        )
    bad = [column for column in header if not re.fullmatch(r"\w{1,60}", column)]
    if bad or len(set(header)) < len(header) or len(header) > MOST_COLUMNS:
        raise UsageError(f"{lines.path}:{number}: the header must have at most {MOST_COLUMNS} different words")
    needed = {*table.problem, *(name for role in ("arch", "units", "name", "time") for name in form.columns_of(role))}
    shortest = max(index for index, column in enumerate(header, start=1) if column in needed)
    entries = []
    for number, values in rows:
        if shortest <= len(values) <= len(header):  # rows without the last results are common
            entries.append((number, dict(zip(header, values, strict=False))))
        elif values:
            lines.wrong(number, f"it has {len(values)} fields; the header has {len(header)}")
    return Parsed(name, entries, unknown=tuple(column for column in header if column not in form.columns))


def _table_of(file: str, form: Format) -> str:
    found = [name for name, table in form.tables.items() if table.tuned and table.tuned in file]
    if not found:
        raise UsageError(
            f"{file}: the name of the file does not say which table it is",
            hint=f"Name it: --table NAME, one of {', '.join(form.tables)}.",
        )
    return max(found, key=lambda name: len(form.tables[name].tuned))


def _values(lines: Lines, number: int, line: str) -> list[str]:
    """The fields of a line of CSV; none if it is malformed."""
    try:
        return [value.strip() for value in next(csv.reader([line], skipinitialspace=True, strict=True))]
    except csv.Error as error:
        lines.wrong(number, f"not CSV: {error}")
        return []


def read_tunableop(lines: Lines, form: Format, given: Given) -> Parsed:
    """Results of TunableOp: validators, then one result per line.

    Raises:
        TableError: too many lines are malformed.
    """
    [columns, [table]] = list(form.columns), form.tables
    validators, entries = dict[str, str](), []
    for number, line in lines:
        parts = [part.strip() for part in line.split(",", len(columns) - 1)]
        if parts[0] == "Validator" and len(parts) >= 3:
            validators[parts[1]] = ",".join(parts[2:])
        elif len(parts) >= 3 and all(parts[:3]):
            entries.append((number, dict(zip(columns, parts, strict=False))))
        else:
            lines.wrong(number, f"expected at least {', '.join(columns[:3])}, separated by commas")
    arch = validators.get("GCN_ARCH_NAME", "").partition(":")[0]
    return Parsed(table, entries, arch or None, tool=", ".join(f"{name} {value}" for name, value in validators.items()))


def read_miopen_fdb(lines: Lines, form: Format, given: Given) -> Parsed:
    """A find-db of MIOpen: a problem and its solvers on each line.

    Raises:
        TableError: too many lines are malformed.
    """
    [table] = form.tables
    entries = []
    for number, line in lines:
        key, equals, solvers = line.partition("=")
        if not key or not equals or not solvers:
            lines.wrong(number, "expected PROBLEM=SOLVER:TIME,...;...")
            continue
        for entry in filter(None, solvers.split(";")):
            first, colon, rest = entry.partition(":")
            values = rest.split(",")
            names = _FDB_VALUES.get(len(values))
            if not first or not colon or names is None:
                lines.wrong(number, f"{entry[:60]!r}: expected SOLVER:TIME,WORKSPACE,ALGORITHM")
                break
            fields = {"key": key, **dict(zip(names, (first, *values), strict=True))}
            entries.append((number, {name: value.strip() for name, value in fields.items()}))
    return Parsed(table, entries, *_device_of(lines.path.name, form))


_FDB_VALUES: Mapping[int, tuple[str, ...]] = {
    3: ("solver", "ms", "workspace", "algorithm"),
    5: ("algorithm", "solver", "ms", "workspace", "cache_algorithm", "cache_config"),
}
"""The columns of an entry, by the number of values after the colon: of today's files and of older ones."""


def _device_of(file: str, form: Format) -> tuple[str | None, str, str]:
    """The arch, the number of compute units and the tool in a file's name, such as gfx942130.HIP.3_4_0.ufdb.txt."""
    device, *words = re.sub(r"\.u?fdb\.txt$", "", file).split(".")
    archs = [arch for arch in form.archs if device.startswith(arch)]
    if not archs:
        return None, "", ""
    arch = max(archs, key=len)
    rest = device.removeprefix(arch)
    units = rest[1:] if rest.startswith("_") else rest
    if not re.fullmatch(r"_[0-9]{1,3}|[0-9a-f]{1,3}", rest):
        return arch, "", ""
    count = int(units, 10 if rest.startswith("_") else 16)
    return arch, str(count), " ".join(("MIOpen", *words))


READERS: Mapping[str, Callable[[Lines, Format, Given], Parsed]] = MappingProxyType(
    {"aiter-csv": read_aiter_csv, "tunableop": read_tunableop, "miopen-fdb": read_miopen_fdb}
)
"""The reader of each format."""
