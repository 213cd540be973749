"""Collects the data of a report from the rows of a catalog.

Speeds are those that selection uses: medians of the policy in force, and the fastest if a kernel has several libraries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from catalog.errors import SelectionError
from catalog.ops import kind_words, operation_name, operation_of, operations, problem_of_key
from catalog.registry import query
from catalog.registry.sandbox import Limits, Row
from catalog.registry.views import rows_of, view_of
from catalog.report.data import (
    Compiled,
    Compiles,
    Coverage,
    Device,
    Lengths,
    Miss,
    Report,
    Roofline,
    Selected,
    Selection,
    Speed,
    Tile,
    Tiles,
)
from catalog.report.winners import winners
from catalog.schema.lineage import OWN_SPACES, Lineage, Wanted
from catalog.schema.policy import CONDITION, policy_in_force
from catalog.schema.problem import Problem
from catalog.settings import settings

if TYPE_CHECKING:
    from catalog.ops.protocol import Operation
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.peaks import Peaks


REPORT_SECONDS = 600.0
"""Minimum time limit of a report's statement in seconds; the setting for queries is meant for users' expressions."""


def collect(catalog: Catalog, arch: str | None, peaks: Mapping[int, Peaks]) -> Report:
    """What the file of ``catalog`` holds of ``arch``, resolved, or of every arch; ``peaks`` by row of the device.

    Raises:
        QueryError: there are no kernels of the arch, or a query took too long.
        RegistryError: the file does not exist, is no catalog, or cannot be read.
    """
    limits = Limits(max(REPORT_SECONDS, settings().query_timeout), settings().query_memory)
    with ExitStack() as stack:
        session = stack.enter_context(query.Session(catalog.path, limits))
        there = session.rows("SELECT DISTINCT operation, arch FROM lineage ORDER BY 1")
        if arch is not None and arch not in {of for _, of in there}:
            session.count(query.Query(arch=arch, limit=1))  # says what is there
        installed = {of.name: of for of in operations()}
        names = dict.fromkeys(name for name, _ in there)
        sessions = {
            installed[name]: stack.enter_context(query.Session(catalog.path, limits, name))
            for name in names
            if name in installed
        }
        left_out = tuple(name for name in names if name not in installed)
        return _Collector(catalog, arch, session, sessions, left_out).report(peaks)


_TIMED = (
    "FROM timing JOIN device ON device.id = device_id WHERE device.arch = coalesce(:arch, device.arch) "
    "AND (SELECT instr(:left_out, ' ' || operation || ' ') = 0 FROM problem WHERE problem.id = problem_id)"
)
"""The timings of the arch, except those of operations that are left out."""

_WARM = f"{_TIMED} AND {CONDITION}"
"""The timings that selection may use: those of the policy in force."""

_SPEED = "problem.key, kernel.id, kernel.name, tflops, gbps, median_ms"
_JOINED = "JOIN problem ON problem.id = problem_id JOIN kernel ON kernel.id = timing.kernel_id"


class _Collector:
    """Reads what a report shows: of all operations by ``session``, of the rows of each by one of ``sessions``."""

    def __init__(
        self,
        catalog: Catalog,
        arch: str | None,
        session: query.Session,
        sessions: Mapping[Operation, query.Session],
        left_out: tuple[str, ...],
    ) -> None:
        self._catalog = catalog
        self._arch = arch
        self._policy = policy_in_force()
        self._session = session
        self._sessions = sessions
        self._left_out = left_out
        self._devices = {device.id: device for device in self._read_devices()}
        self._short_names = dict(self._read_short_names())

    def report(self, peaks: Mapping[int, Peaks]) -> Report:
        lineages = tuple(self._lineages())
        statuses = self._rows(
            "SELECT status, count(*) FROM artifact WHERE arch = coalesce(:arch, arch) GROUP BY status ORDER BY status"
        )
        [(problems,)] = self._rows(f"SELECT count(DISTINCT problem_id) {_WARM}")
        return Report(
            arch=self._arch,
            left_out=self._left_out,
            devices=tuple(self._devices.values()),
            problems=problems,
            lineages=lineages,
            artifacts=dict(statuses),
            misses=tuple(self._misses()),
            rooflines=tuple(self._rooflines(peaks)),
            lengths=tuple(self._lengths()),
            tiles=tuple(self._tiles()),
            selections=tuple(self._selections()),
            compiles=tuple(self._compiles()),
            winners=winners(self._session.rows, self._arch, self._left_out),
            policy=self._policy,
            coverage=tuple(self._coverage(lineages)),
        )

    def _rows(self, statement: str, of: Operation | None = None) -> list[Row]:
        session = self._session if of is None else self._sessions[of]
        return session.rows(
            statement, {"arch": self._arch, "left_out": f" {' '.join(self._left_out)} ", **self._policy.parameters}
        )

    def _read_devices(self) -> Iterator[Device]:
        rows = self._rows(
            "SELECT device.id, arch, name, json_extract(facts, '$.cores'), count(DISTINCT problem_id), "
            f"count(DISTINCT kernel_id), count(*), sum(cold), max(created) {_TIMED} "
            "GROUP BY device.id ORDER BY arch, device.id"
        )
        return (Device(*row) for row in rows)

    def _read_short_names(self) -> Iterator[tuple[str, str]]:
        """Short names by id that distinguish the timed kernels of one signature."""
        for one in self._sessions:
            columns = ", ".join(("id", *one.short_traits))
            timed = self._rows(f"SELECT {columns} FROM {rows_of(one.name)} WHERE id IN (SELECT kernel_id {_WARM})", one)
            for kernel_id, *values in timed:
                yield kernel_id, one.short_name(dict(zip(one.short_traits, values, strict=True)))

    def _lineages(self) -> Iterator[Coverage]:
        for one in self._sessions:
            rows = self._rows(
                f"SELECT {_place(one)}, count(*), sum(built), sum(best_ms IS NOT NULL) FROM {view_of(one.name)} "
                "WHERE arch = coalesce(:arch, arch) GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4",
                one,
            )
            yield from (Coverage(Lineage(one.name, *row[:4]), None, "", *row[4:]) for row in rows)

    def _coverage(self, lineages: Iterable[Coverage]) -> Iterator[Coverage]:
        by_receipt = defaultdict(list)
        for one in self._sessions:
            rows = self._rows(
                f"WITH state AS MATERIALIZED (SELECT id, {_place(one)}, built, best_ms IS NOT NULL AS timed "
                f"  FROM {view_of(one.name)} WHERE arch = coalesce(:arch, arch)), "
                "about AS (SELECT arch, revision, space, id AS receipt, min(reason) AS reason FROM rule "
                f"  WHERE kind = 'receipt' AND operation = '{one.name}' GROUP BY arch, revision, space, id) "
                f"SELECT {_place(one, 'state.')}, kernel_receipt.receipt, coalesce(about.reason, ''), count(*), "
                "  sum(built), sum(timed) FROM kernel_receipt JOIN state ON state.id = kernel_id "
                "LEFT JOIN about ON about.arch = state.arch AND about.revision = state.revision "
                "  AND about.space = state.space AND about.receipt = CAST(kernel_receipt.receipt AS TEXT) "
                "GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5",
                one,
            )
            for row in rows:
                lineage = Lineage(one.name, *row[:4])
                by_receipt[lineage].append(Coverage(lineage, *row[4:]))
        for every in lineages:
            yield every
            yield from by_receipt[every.lineage]

    def _rooflines(self, peaks: Mapping[int, Peaks]) -> Iterator[Roofline]:
        rows = self._rows(
            f"SELECT device_id, {_SPEED}, max(tflops) {_joined()} AND tflops > 0 AND gbps > 0 "
            "GROUP BY device_id, problem_id ORDER BY tflops DESC"
        )
        limits = self._rows(f"SELECT device_id, max(tflops), max(gbps) {_WARM} GROUP BY device_id")
        for device, tflops, gbps in limits:
            points = tuple(self._speed(row[1:-1]) for row in rows if row[0] == device)
            measured = peaks.get(device)
            if measured is not None:
                tflops, gbps = measured.gflops / 1e3, measured.gb_per_s  # noqa: PLW2901 - the roof instead of the best
            if points:
                yield Roofline(self._devices[device], tflops, gbps, measured is not None, points)

    def _lengths(self) -> Iterator[Lengths]:
        rows = self._rows(
            f"SELECT device_id, kernel_id, {_SPEED}, max(tflops) {_joined()} AND tflops > 0 "
            "GROUP BY device_id, problem_id, kernel_id ORDER BY device_id"
        )
        groups: dict[tuple[int, str], dict[str, list[tuple[int, Speed]]]] = defaultdict(lambda: defaultdict(list))
        for device, kernel, *values, _ in rows:
            for group, length in _by_length(values[0]):
                groups[device, group][kernel].append((length, self._speed(values)))
        for (device, group), lines in groups.items():
            if len({length for line in lines.values() for length, _ in line}) > 1:
                fastest = sorted(lines.values(), key=lambda line: -max(speed.tflops for _, speed in line))
                ordered = {line[0][1].kernel: tuple(sorted(line, key=lambda point: point[0])) for line in fastest}
                yield Lengths(self._devices[device], group, ordered)

    def _tiles(self) -> Iterator[Tiles]:
        rows = [row for one in self._sessions if one.tile_axes for row in self._rows(_tiles_sql(one), one)]
        kinds: dict[tuple[int, str], list[Tile]] = defaultdict(list)
        for device, kind, *tile in rows:
            kinds[device, kind].append(Tile(*tile))
        for (device, kind), tiles in kinds.items():
            if len(tiles) > 1:
                yield Tiles(self._devices[device], kind_words(kind), tuple(tiles))

    def _selections(self) -> Iterator[Selection]:
        for device in self._devices.values():
            if self._catalog.measured_on(device.arch) == device.id:
                yield self._selection(device)

    def _selection(self, device: Device) -> Selection:
        """What selection takes on ``device`` from each lineage whose kernels were timed there."""
        spaces = ", ".join(f"'{space}'" for space in OWN_SPACES)
        best: dict[str, tuple[str, float]] = {}
        timed: dict[tuple[str, str], float] = {}
        wanted: dict[tuple[str, Wanted], None] = {}
        rows = self._rows(
            f"SELECT problem.key, kernel.id, kernel.name, revision, variant, space IN ({spaces}), max(tflops) "
            f"{_joined('JOIN lineage ON lineage.id = kernel.lineage')} AND tflops > 0 AND device_id = {device.id} "
            "GROUP BY problem_id, kernel.id ORDER BY tflops DESC"
        )
        for key, kernel, name, revision, variant, own, tflops in rows:
            best.setdefault(key, (name, tflops))
            timed[key, kernel] = tflops
            if own:
                wanted[key, Wanted(device.arch, revision, variant)] = None
        found, unanswered = [], 0
        for key, asked in wanted:
            problem = _problem(key)
            try:
                choice = self._catalog.choice(problem, **asked.keywords, limit=1)
                first = self._catalog.candidates(problem, **asked.keywords, limit=1, static=True)[0].kernel
            except SelectionError:
                unanswered += 1
                continue
            taken = choice.candidates[0].kernel
            found.append(
                Selected(
                    _name(key),
                    choice.evidence,
                    taken.name,
                    timed.get((key, taken.id)),
                    timed.get((key, first.id)),
                    *best[key],
                )
            )
        return Selection(device, tuple(found), unanswered)

    def _compiles(self) -> Iterator[Compiles]:
        rows = self._rows(
            f"SELECT device_id, family, compile_s, {_SPEED}, max(tflops) "
            f"{_joined('JOIN artifact ON artifact.key = artifact_key')} AND tflops > 0 AND compile_s > 0 "
            "GROUP BY device_id, artifact_key ORDER BY tflops DESC"
        )
        libraries = defaultdict(list)
        for device, family, compile_s, *values, _ in rows:
            libraries[device].append(Compiled(family, compile_s, self._speed(values)))
        return (Compiles(self._devices[device], tuple(found)) for device, found in sorted(libraries.items()))

    def _speed(self, values: Iterable[Any]) -> Speed:
        key, kernel_id, name, tflops, gbps, median_ms = values
        problem = _problem(key)
        label, short = operation_of(problem).label(problem), self._short_names[kernel_id]
        return Speed(_name(key), label, name, short, tflops, gbps, median_ms)

    def _misses(self) -> Iterator[Miss]:
        archs = self._rows("SELECT DISTINCT arch FROM miss WHERE arch = coalesce(:arch, arch) ORDER BY arch")
        for (arch,) in archs:
            for key, count in self._catalog.misses(arch):
                if operation_name(key) not in self._left_out:
                    yield Miss(arch, _name(key), count)


def _place(of: Operation, prefix: str = "") -> str:
    """The columns of an operation's view that say which lineage a kernel is of."""
    return ", ".join(f"{prefix}{column}" for column in of.traits.identity[:4])


def _joined(more: str = "") -> str:
    """The warm timings with their problems and kernels."""
    return _WARM.replace(" WHERE", f" {_JOINED} {more} WHERE", 1)


def _tiles_sql(of: Operation) -> str:
    """A row for each tile that was tried on problems of a kind of an operation."""
    m0, n0 = of.tile_axes or ("0", "0")
    return (
        f"WITH tile AS (SELECT device_id, problem_id, {m0} AS m0, {n0} AS n0, min(median_ms) AS ms, "
        "  max(tflops) AS tflops, count(DISTINCT kernel_id) AS kernels "
        f"  {_WARM.replace(' WHERE', f' JOIN {rows_of(of.name)} AS kernel ON kernel.id = kernel_id WHERE', 1)} "
        "  GROUP BY device_id, problem_id, m0, n0), "
        "best AS (SELECT device_id, problem_id, min(ms) AS ms FROM tile GROUP BY device_id, problem_id) "
        "SELECT device_id, kind, m0, n0, avg(best.ms / tile.ms), max(tflops), count(*), max(kernels) "
        "FROM tile JOIN best USING (device_id, problem_id) JOIN problem ON problem.id = problem_id "
        "WHERE kind <> '' GROUP BY device_id, kind, m0, n0 ORDER BY device_id, kind, m0, n0"
    )


@lru_cache(maxsize=65_536)
def _problem(key: str) -> Problem:
    return problem_of_key(key)


@lru_cache(maxsize=65_536)
def _name(key: str) -> str:
    return _problem(key).name


def _by_length(key: str) -> Iterator[tuple[str, int]]:
    """The groups of problems that a problem belongs to, and its length there."""
    problem = _problem(key)
    return operation_of(problem).lengths(problem)
