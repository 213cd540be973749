"""A report as one self-contained HTML page, with plots and the numbers behind them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from catalog.backends import HOST, Backend, GpuBackend, backend_of, why_unavailable
from catalog.files import StrPath, write_file
from catalog.messages import counted
from catalog.report import plots
from catalog.report.collect import collect
from catalog.report.data import (
    Compiles,
    Coverage,
    Device,
    Lengths,
    Report,
    Roofline,
    Selection,
    Tiles,
)
from catalog.report.traced import COLUMNS, Traced, read_traced
from catalog.report.winners import sections as lists
from catalog.schema.policy import GRAPH

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.peaks import Peaks

_log = logging.getLogger(__name__)

T = TypeVar("T")
G = TypeVar("G", Lengths, Tiles)

PAGE = "index.html"

MOST_FIGURES = 6
"""Maximum number of figures of one kind per device; the largest are drawn."""

MOST_POINTS = 300
"""Maximum number of points of a figure and rows of its table."""

_TUNE = "catalog tune --shapes smoke"


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, its caption, and the rows that it was drawn from; without a plot, the rows alone."""

    svg: str
    title: str
    about: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Section:
    """Figures of one kind. If there are none, ``missing`` says why, and ``command`` is the command to run."""

    id: str
    title: str
    about: str
    figures: tuple[Figure, ...]
    missing: str
    command: str
    left_out: str = ""


def write_report(
    catalog: Catalog, out: StrPath, arch: str | None = None, *, peaks: bool = False, trace: StrPath | None = None
) -> Path:
    """Write the page of ``catalog`` into the folder ``out``, creating it, and return the page's path.

    A warning is logged for each operation in the catalog that no installed package has: the page leaves it out.

    Args:
        catalog: the catalog; only read, except for the effects of selecting from it.
        out: the folder.
        arch: limit the page to this arch, with ``host`` resolved; None: all archs.
        peaks: measure the peaks of this machine's CPU for its rooflines; takes about a second per arch.
        trace: show the times of the program that wrote this trace.

    Raises:
        UsageError: the extra ``report`` is not installed, or the trace cannot be read.
        CatalogError: the page cannot be written.
        QueryError, RegistryError: as :func:`~catalog.report.collect.collect`.
        DeviceError, BuildError, ToolchainError: the peaks cannot be measured.
    """
    plots.require()
    report = collect(catalog, arch, {})  # errors of the catalog are raised before the peaks are measured
    for name in report.left_out:
        _log.warning("the operation %s is left out: no installed package has it", name)
    if peaks:
        report = collect(catalog, arch, _peaks(catalog, report.devices))
    traced = None if trace is None else read_traced(catalog, trace)
    return write_file(Path(out) / PAGE, render(report, traced))


def _peaks(catalog: Catalog, devices: Sequence[Device]) -> dict[int, Peaks]:
    """The peaks of those ``devices`` that are this machine's CPU."""
    from catalog.registry.timings import device_id
    from catalog.runtime.peaks import measure_peaks

    here = [device for device in devices if backend_of(device.arch) is HOST and why_unavailable(device.arch) is None]
    return {
        device.id: measure_peaks(catalog.builder, device.arch, catalog.host().threads)
        for device in here
        if device_id(catalog.connection, catalog.device_info(device.arch)) == device.id
    }


def render(report: Report, traced: Traced | None = None) -> str:
    """The page as HTML, with all text from the catalog escaped; ``traced`` has the times of a traced program."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _cell
    return environment.get_template("page.html.jinja").render(
        report=report,
        sections=[*_sections(report), *_traced(traced)],
        speeds="warm medians" if report.policy == GRAPH else f"medians measured as {report.policy}",
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        tune=_TUNE,
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return plots.number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _sections(report: Report) -> Iterator[Section]:
    no_timings = "Nothing was timed yet" + ("" if report.arch is None else f" on {report.arch}") + "."
    figures = _Figures()
    yield Section(
        "roofline",
        "Rooflines",
        "The fastest kernel of each problem, by how many FLOP it does for a byte of its tensors. The roof is what the "
        "device reaches: the slope where memory limits, the level where arithmetic does.",
        tuple(map(figures.roofline, report.rooflines)),
        no_timings,
        _TUNE,
    )
    lengths, left_out = _largest(report.lengths, lambda group: group.size)
    yield Section(
        "lengths",
        "Speed over sequence length",
        "Problems that differ in sequence length only, one line per kernel. The star in a name is the length. Packed "
        "sequences have many lengths and are left out.",
        tuple(map(figures.lengths, lengths)),
        no_timings if not report.devices else "No kernel was timed on problems that differ in sequence length only.",
        _TUNE,
        left_out,
    )
    kinds, left_out = _largest(report.tiles, lambda kind: sum(tile.problems for tile in kind.tiles))
    yield Section(
        "tiles",
        "Tiles",
        "How near the best kernel of a tile comes to the best of all, on average over the problems of one kind, and "
        "the most TFLOP/s that it reaches.",
        tuple(map(figures.tiles, kinds)),
        no_timings if not report.devices else "On no kind of problem were kernels of two tiles timed.",
        "catalog tune --shapes smoke --candidates 12",
        left_out,
    )
    yield Section(
        "selection",
        "Selected and best",
        "What selection takes now for each measured problem, and the first of the static order, which it took before "
        "anything was measured. On the diagonal it is the best of all measured kernels. Medians within "
        f"{Backend.noise:.0%} of the best, on GPUs {GpuBackend.noise:.0%}, count as equal.",
        tuple(figures.selection(found) for found in report.selections if found.problems),
        no_timings
        if not report.devices
        else "Selection uses none of these timings: this machine is another device of these archs.",
        _TUNE,
    )
    yield Section(
        "compile",
        "Compile time and speed",
        "Each library by the seconds that it took to compile, and the most TFLOP/s that it reaches.",
        tuple(map(figures.compiles, report.compiles)),
        no_timings if not report.devices else "Of no library that was timed is it known how long it took to compile.",
        _TUNE,
    )
    yield Section(
        "winners",
        "Against other implementations",
        "The fastest of the catalog's kernels and of other projects' implementations that were timed in the same runs, "
        "by the geometric mean over the problems of a line. The margin is how much longer the runner-up takes, as a "
        "share.",
        tuple(
            Figure("", arch, f"{counted(len(rows), 'line')}.", tuple(columns), rows)
            for arch, columns, rows in lists(report.winners)
        ),
        "No other project's implementation was timed yet.",
        "catalog tune --shapes smoke --against sdpa",
    )
    by_lineage = defaultdict(list)
    for one in report.coverage:
        by_lineage[str(one.lineage)].append(one)
    command = f"catalog populate --arch {report.arch or 'host'}"
    yield Section(
        "coverage",
        "Coverage",
        "How many kernels each receipt, a product's subset, lists; how many of them have a library in the cache of "
        "this machine, and how many were timed anywhere.",
        tuple(figures.coverage(lineage, found) for lineage, found in by_lineage.items()),
        "There are no kernels yet.",
        command,
    )


def _traced(traced: Traced | None) -> Iterator[Section]:
    """The times of a traced program, if there is one."""
    if traced is not None:
        rows = [line.row for line in traced.lines]
        yield Section(
            "traced",
            "Traced program",
            "The time of a program from end to end, and the time of its kernels alone. Recorded times are those of its "
            "own calls. Eager and kernel times are medians of catalog tune, --as eager and --as graph, times the "
            "number of launches.",
            (Figure("", str(traced.path), traced.about, COLUMNS, rows),),
            "",
            "",
        )


def _largest(groups: Sequence[G], size: Callable[[G], int]) -> tuple[list[G], str]:
    """The :data:`MOST_FIGURES` largest groups of each device, and what is left out."""
    by_device: dict[int, list[G]] = defaultdict(list)
    for group in sorted(groups, key=size, reverse=True):
        by_device[group.device.id].append(group)
    kept = [group for found in by_device.values() for group in found[:MOST_FIGURES]]
    left = len(groups) - len(kept)
    return kept, f"{left} smaller groups are not drawn." if left else ""


def _thinned(items: Sequence[T]) -> tuple[Sequence[T], str]:
    """At most :data:`MOST_POINTS` of items that are in order, at even distances with both ends, and what that does."""
    if len(items) <= MOST_POINTS:
        return items, ""
    step = (len(items) - 1) / (MOST_POINTS - 1)
    shown = [items[round(index * step)] for index in range(MOST_POINTS)]
    return shown, f" {len(shown)} of {len(items):,} are shown, at even distances from the fastest to the slowest."


class _Figures:
    """Makes figures, each with a name of its own."""

    def __init__(self) -> None:
        self._count = 0

    def _name(self) -> str:
        self._count += 1
        return f"f{self._count}"

    def roofline(self, roof: Roofline) -> Figure:
        points, left_out = _thinned(roof.points)
        source = (
            "measured peaks of this machine: fp32 multiply-adds between registers, reads of memory in order. Tensors "
            "that stay in the caches are read faster than memory"
            if roof.peaks
            else "the best measured TFLOP/s and GB/s of all timings of the device"
        )
        about = f"Roof: {plots.number(roof.tflops)} TFLOP/s and {plots.number(roof.gbps)} GB/s, {source}.{left_out}"
        columns = ("problem", "FLOP/byte", "TFLOP/s", "GB/s", "ms", "kernel")
        rows = [(p.problem, p.intensity, p.tflops, p.gbps, p.median_ms, p.kernel) for p in points]
        svg = plots.roofline(replace(roof, points=tuple(points)), self._name())
        return Figure(svg, roof.device.label, about, columns, rows)

    def lengths(self, group: Lengths) -> Figure:
        columns = ("length", "TFLOP/s", "ms", "label", "kernel")
        labels = plots.labels(group)
        rows = [
            (length, speed.tflops, speed.median_ms, label, speed.kernel)
            for label, line in zip(labels, group.lines.values(), strict=True)
            for length, speed in line
        ]
        drawn = len(plots.MARKERS)
        muted = "" if len(labels) <= drawn else f"; the {drawn} fastest have a colour"
        about = f"{group.device.label}. {counted(len(labels), 'kernel')}{muted}. A label is pipeline, "
        about += "tile (m0 x n0 x k0 x n1 x k1), warp tile and padded axes."
        return Figure(plots.lengths(group, self._name()), group.problems, about, columns, rows)

    def tiles(self, kind: Tiles) -> Figure:
        columns = ("tile_m0", "tile_n0", "of the fastest", "TFLOP/s", "problems", "kernels at most")
        rows = [(t.m0, t.n0, f"{t.relative:.1%}", t.tflops, t.problems, t.kernels) for t in kind.tiles]
        return Figure(plots.tiles(kind, self._name()), kind.kind, f"{kind.device.label}.", columns, rows)

    def selection(self, found: Selection) -> Figure:
        problems, left_out = _thinned(sorted(found.problems, key=lambda problem: -problem.best))
        rows = [
            (
                p.problem,
                p.evidence,
                p.best,
                p.tflops,
                _part(p.tflops, p.best),
                p.static,
                _part(p.static, p.best),
                p.kernel,
            )
            for p in problems
        ]
        columns = (
            "problem",
            "evidence",
            "best TFLOP/s",
            "selected",
            "of best",
            "static order",
            "of best",
            "selected kernel",
        )
        untimed = sum(problem.tflops is None for problem in problems)
        about = _mean("What is selected now reaches", [(p.tflops, p.best) for p in found.problems])
        about += _mean("The static order's first reaches", [(p.static, p.best) for p in found.problems])
        about += f" Selected, but not timed on its problem: {counted(untimed, 'kernel')}." if untimed else ""
        about += f" Without a kernel now: {counted(found.unanswered, 'problem')}." if found.unanswered else ""
        svg = plots.selection(replace(found, problems=tuple(problems)), self._name())
        return Figure(svg, found.device.label, about.strip() + left_out, columns, rows)

    def compiles(self, found: Compiles) -> Figure:
        libraries, left_out = _thinned(found.libraries)
        columns = ("compile s", "TFLOP/s", "family", "problem", "kernel")
        rows = [(one.compile_s, one.speed.tflops, one.family, one.speed.problem, one.speed.kernel) for one in libraries]
        svg = plots.compiles(replace(found, libraries=tuple(libraries)), self._name())
        return Figure(svg, found.device.label, f"{len(found.libraries):,} libraries.{left_out}", columns, rows)

    def coverage(self, lineage: str, found: Sequence[Coverage]) -> Figure:
        columns = ("receipt", "kernels", "built", "timed")
        rows = [(one.label, one.kernels, one.built, one.timed) for one in found]
        about = "Arch, revision, space and mask implementation are in the title. The axis is logarithmic."
        return Figure(plots.coverage(found, self._name()), lineage, about, columns, rows)


def _part(speed: float | None, best: float) -> str | None:
    return None if speed is None else f"{speed / best:.1%}"


def _mean(what: str, speeds: Sequence[tuple[float | None, float]]) -> str:
    """The share of the best that is reached: the geometric mean over the problems where it was timed."""
    from statistics import geometric_mean

    parts = [speed / best for speed, best in speeds if speed]
    return (
        f" {what} {geometric_mean(parts):.1%} of the best, the geometric mean of {len(parts)} problems."
        if parts
        else ""
    )
