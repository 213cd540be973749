"""Wheels of a catalog's built kernels and their timings, split by the values of a column and by size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from catalog import settings
from catalog.build.bundle import Entry
from catalog.build.cache import Cache
from catalog.build.wheel import Wheel, check_name, parts, platform_of, write_wheel
from catalog.errors import UsageError
from catalog.files import StrPath
from catalog.messages import counted
from catalog.registry.query import Query, operations_asked, run
from catalog.registry.rows import Timing
from catalog.runtime.exchange import built_entries
from catalog.runtime.manifests import valid_timings

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.schema.kernel import Kernel

COLUMNS = ("wheel", "kernels", "libraries", "bytes")
"""Columns of a written wheel."""

MOST_BYTES = 2**31 - 1
"""Size limit by default: indices and hosts of releases refuse files of 2 GiB."""

NAMED = 10
"""Maximum number of kernels that a message names."""


def write_wheels(
    catalog: Catalog,
    kernels: Sequence[Kernel],
    folder: StrPath,
    *,
    name: str | None = None,
    split: str | None = None,
    most_bytes: int = MOST_BYTES,
    platform: str | None = None,
) -> list[list[object]]:
    """Write the built libraries of ``kernels``, with their timings, as wheels; return a row of :data:`COLUMNS` each.

    Args:
        catalog: the catalog with the kernels; the settings name the cache.
        kernels: rows that are built.
        folder: the folder for the wheels; files of the same names are replaced.
        name: name of the distribution; None: ``kernel-catalog-`` and the arch. With a split, the column and its value
            follow; of several parts, the number.
        split: a column; each of its values gets wheels of its own.
        most_bytes: size limit of a wheel; what does not fit goes into further parts.
        platform: the platform tag; None: that of the libraries.

    Raises:
        UsageError: there are no kernels, some are not built, a library is larger than the limit, or an argument is
            invalid. Nothing is written then.
        QueryError: there is no column ``split``.
        BundleError: a file cannot be written.
    """
    if not kernels:
        raise UsageError("no kernel meets the expression: nothing to pack", hint="catalog query EXPR lists kernels.")
    archs = sorted({kernel.arch for kernel in kernels})
    base = check_name(name or f"kernel-catalog-{'-'.join(archs)}")
    if platform is not None and not re.fullmatch(r"[a-z0-9_]+", platform):
        raise UsageError(f"{platform!r} is not a platform tag", hint="As in: manylinux_2_28_x86_64.")
    cache = Cache(settings.settings().cache_dir)
    entries = _built(catalog, cache, kernels)
    timings: dict[str, list[Timing]] = {}
    for timing in valid_timings(catalog.connection, {entry.artifact.key for entry in entries}):
        timings.setdefault(timing.artifact_key, []).append(timing)
    wheels = []
    for value, of_value in _groups(catalog, entries, split).items():
        whole = base if split is None else check_name(f"{base}-{split}-{_word(value)}")
        chosen = list(parts(of_value, timings, cache, most_bytes))
        for number, part in enumerate(chosen, start=1):
            about = f"Compiled kernels of {', '.join(archs)}" + ("" if split is None else f" with {split}={value}")
            tag = platform or platform_of(part, cache)
            own = [timing for entry in part for timing in timings.get(entry.artifact.key, ())]
            wheels.append(Wheel(whole if len(chosen) == 1 else f"{whole}-part-{number}", tag, about, part, own))
    if len({wheel.name for wheel in wheels}) < len(wheels):
        raise UsageError(f"several values of {split} give wheels the same name", hint="Split by another column.")
    rows: list[list[object]] = []
    for wheel in wheels:
        path = write_wheel(Path(folder), wheel, cache)
        ids = {entry.kernel.id for entry in wheel.entries}
        rows.append([str(path), len(ids), len(wheel.entries), path.stat().st_size])
    return rows


def _built(catalog: Catalog, cache: Cache, kernels: Sequence[Kernel]) -> list[Entry]:
    """The entries of the kernels.

    Raises:
        UsageError: a kernel has none; the message names it.
    """
    entries = built_entries(catalog.connection, cache, {kernel.id for kernel in kernels})
    there = {entry.kernel.id for entry in entries}
    absent = [kernel.name for kernel in kernels if kernel.id not in there]
    if absent:
        more = [f"and {counted(len(absent) - NAMED, 'more kernel')}"] if len(absent) > NAMED else []
        raise UsageError(
            "\n    ".join([f"{len(absent):,} of {counted(len(kernels), 'kernel')} not built:", *absent[:NAMED], *more]),
            hint='Add --build, or build them first with catalog build. --where "built AND ..." leaves them out.',
        )
    return entries


def _groups(catalog: Catalog, entries: Sequence[Entry], split: str | None) -> Mapping[object, list[Entry]]:
    """The entries by their value of the column ``split``; without one, all together."""
    if split is None:
        return {None: list(entries)}
    values: dict[str, object] = {}
    for operation in operations_asked(catalog.path, split):
        with run(catalog.path, Query(columns=("id", split), operation=operation)) as result:
            values |= {str(id_): value for id_, value in result}
    groups: dict[object, list[Entry]] = {}
    for entry in entries:  # kernels of an operation without the column are a group, too
        groups.setdefault(values.get(entry.kernel.id), []).append(entry)
    return dict(sorted(groups.items(), key=lambda group: (str(type(group[0])), group[0])))


def _word(value: object) -> str:
    """A value as a part of a distribution's name."""
    return re.sub(r"[^a-z0-9]+", "-", str(value).lower().replace("-", "minus-")).strip("-") or "none"
