"""The plots of a report, drawn by Matplotlib: what :mod:`catalog.report.data` collected, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from catalog.errors import UsageError
from catalog.extras import how_to_install
from catalog.report.svg import GRID, INK, MUTED, PAPER, SERIES_COLOURS, Tips, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from catalog.report.data import Compiles, Coverage, Lengths, Roofline, Selection, Tiles

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_WIDTH = 6.2

_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's font
    "svg.hashsalt": "catalog",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
}


def require() -> None:
    """Check that the libraries for pages are installed.

    Raises:
        UsageError: the extra is not installed.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise UsageError(f"a report needs Matplotlib and Jinja ({error})", hint=how_to_install("report")) from None


@contextmanager
def _axes(height: float) -> Iterator[tuple[Axes, Tips, Callable[[str, str], str]]]:
    """Yield axes to draw into, tooltips, and a function that makes the SVG, given its name and description."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()  # ignore the user's own style
        mpl.rcParams.update(_STYLE)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        tips = Tips()
        yield figure.add_subplot(), tips, lambda name, label: to_svg(figure, name, label, tips)


def number(value: float) -> str:
    """A measured value, to four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _plain(axis: Any) -> None:
    """Numbers as people write them, on an axis with a logarithmic scale: a few ticks within a short one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=15))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _room(values: Sequence[float], factor: float = 1.3) -> tuple[float, float]:
    return min(values) / factor, max(values) * factor


def _scatter(axes: Axes, tips: Tips, points: Sequence[tuple[float, float, str]], series: int, label: str) -> None:
    """Points with their tooltips, in the colour and shape of a series."""
    dots = axes.scatter(
        [x for x, _, _ in points],
        [y for _, y, _ in points],
        s=30,
        c=SERIES_COLOURS[series % len(SERIES_COLOURS)],
        marker=MARKERS[series % len(MARKERS)],
        edgecolors=PAPER,
        linewidths=0.5,
        label=label,
        zorder=3,
    )
    dots.set_gid(tips.add([tip for _, _, tip in points]))


def _legend(axes: Axes, *, columns: int = 4) -> None:
    """Below the plot, where there is more than one series: names of kernels are as long as lines."""
    entries = len(axes.get_legend_handles_labels()[1])
    if entries > 1:
        axes.figure.legend(loc="outside lower left", ncols=min(columns, entries))


def roofline(roof: Roofline, name: str) -> str:
    """TFLOP/s over FLOP a byte of each problem's fastest kernel, a series an operation and element type."""
    with _axes(4.4) as (axes, tips, svg):
        axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity in FLOP/byte", ylabel="TFLOP/s")
        ridge = 1e3 * roof.tflops / roof.gbps
        low, high = _room([point.intensity for point in roof.points] + [ridge], 2)
        xs = [low, ridge, high]
        axes.plot(xs, [min(roof.tflops, x * roof.gbps / 1e3) for x in xs], color=INK, linewidth=1.6)
        axes.annotate(
            f"{number(roof.tflops)} TFLOP/s",
            (high, roof.tflops),
            xytext=(-2, 7),
            textcoords="offset points",
            ha="right",
        )
        slope = (low, low * roof.gbps / 1e3)
        axes.annotate(f"{number(roof.gbps)} GB/s", slope, xytext=(12, -2), textcoords="offset points", va="center")
        groups = _grouped(roof.points, lambda point: point.operation)
        for series, (label, points) in enumerate(groups):
            dots = [(p.intensity, p.tflops, f"{p.problem}: {number(p.tflops)} TFLOP/s\n{p.short}") for p in points]
            _scatter(axes, tips, dots, series, label)
        axes.set_xlim(low, high)
        lowest = min(*(point.tflops for point in roof.points), low * roof.gbps / 1e3)
        axes.set_ylim(lowest / 1.5, max(roof.tflops, *(point.tflops for point in roof.points)) * 1.8)
        _plain(axes.xaxis)
        _plain(axes.yaxis)
        _legend(axes)
        return svg(name, f"Roofline of {roof.device.label}: {len(roof.points)} problems")


def labels(group: Lengths) -> list[str]:
    """Short labels that distinguish the kernels of a group, with a number if the words alone do not."""
    seen: dict[str, int] = {}
    found = []
    for line in group.lines.values():
        short = line[0][1].short
        seen[short] = seen.get(short, 0) + 1
        found.append(short if seen[short] == 1 else f"{short} ({seen[short]})")
    return found


def lengths(group: Lengths, name: str) -> str:
    """TFLOP/s over sequence length, one line per kernel; kernels beyond the number of colours share a muted one."""
    names = labels(group)
    with _axes(3.1 + 0.17 * min(len(names), len(MARKERS))) as (axes, tips, svg):
        axes.set(xscale="log", xlabel="sequence length", ylabel="TFLOP/s")
        for series, (label, line) in enumerate(zip(names, group.lines.values(), strict=True)):
            xs, ys = [length for length, _ in line], [speed.tflops for _, speed in line]
            if series < len(SERIES_COLOURS):
                axes.plot(xs, ys, color=SERIES_COLOURS[series])
                dots = [(x, s.tflops, f"{s.problem}: {number(s.tflops)} TFLOP/s\n{s.short}") for x, s in line]
                _scatter(axes, tips, dots, series, label)
            else:
                axes.plot(xs, ys, color=MUTED, linewidth=0.8, marker=".", markersize=3)
        ticks = sorted({length for line in group.lines.values() for length, _ in line})
        axes.set_xlim(*_room(ticks, 1.15))
        axes.xaxis.set_major_locator(_fixed(_thinned(ticks)))
        axes.xaxis.set_minor_locator(_fixed([]))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(bottom=0)
        _legend(axes, columns=1)
        return svg(name, f"TFLOP/s over sequence length of {group.problems} on {group.device.label}")


def tiles(kind: Tiles, name: str) -> str:
    """One cell per tile; the deeper the colour, the closer to the fastest kernel of the same problem."""
    from matplotlib.patches import Rectangle

    rows, columns = sorted({tile.m0 for tile in kind.tiles}), sorted({tile.n0 for tile in kind.tiles})
    with _axes(1.1 + 0.55 * len(rows)) as (axes, tips, svg):
        axes.grid(False)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(length=0)
        axes.set(xlabel="tile_n0: keys", ylabel="tile_m0: queries", xlim=(0, len(columns)), ylim=(0, len(rows)))
        axes.set_xticks([index + 0.5 for index in range(len(columns))], [str(n0) for n0 in columns])
        axes.set_yticks([index + 0.5 for index in range(len(rows))], [str(m0) for m0 in rows])
        for tile in kind.tiles:
            x, y = columns.index(tile.n0), rows.index(tile.m0)
            alpha = 0.08 + 0.62 * tile.relative**2
            cell = Rectangle((x + 0.02, y + 0.03), 0.96, 0.94, facecolor=SERIES_COLOURS[0], alpha=alpha, linewidth=0)
            about = (
                f"{tile.m0} x {tile.n0}: {tile.relative:.1%} of the fastest, on average over {tile.problems} problems"
            )
            cell.set_gid(tips.add([about]))
            axes.add_patch(cell)
            speed = f"\n{number(tile.tflops)} TFLOP/s" if tile.tflops else ""  # appending multiplies nothing
            axes.text(x + 0.5, y + 0.5, f"{tile.relative:.0%}{speed}", ha="center", va="center")
        return svg(name, f"Speed by tile for {kind.kind} on {kind.device.label}")


def selection(found: Selection, name: str) -> str:
    """TFLOP/s of what selection takes, and of the static order's first, over those of the best kernel."""
    series = (
        ("static order", [(p.best, p.static, p) for p in found.problems]),
        ("selected now", [(p.best, p.tflops, p) for p in found.problems]),
    )
    with _axes(4.4) as (axes, tips, svg):
        axes.set(xscale="log", yscale="log", xlabel="best measured TFLOP/s", ylabel="TFLOP/s")
        drawn = [value for _, points in series for best, speed, _ in points if speed for value in (best, speed)]
        low, high = _room(drawn or [1.0])
        axes.plot([low, high], [low, high], color=MUTED, linewidth=1)
        for index, (label, points) in enumerate(series):
            dots = [
                (best, speed, f"{p.problem}, {label}: {speed / best:.1%} of the best")
                for best, speed, p in points
                if speed
            ]
            _scatter(axes, tips, dots, 1 - index, label)
        axes.set(xlim=(low, high), ylim=(low, high))
        _plain(axes.xaxis)
        _plain(axes.yaxis)
        _legend(axes)
        return svg(name, f"Selected against best kernels of {len(found.problems)} problems on {found.device.label}")


def compiles(found: Compiles, name: str) -> str:
    """TFLOP/s over the seconds that a library took to compile, a series a family."""
    with _axes(4.2) as (axes, tips, svg):
        axes.set(xscale="log", yscale="log", xlabel="compile time in s", ylabel="TFLOP/s")
        groups = _grouped(found.libraries, lambda library: library.family)
        for series, (label, libraries) in enumerate(groups):
            dots = [
                (
                    one.compile_s,
                    one.speed.tflops,
                    f"{one.compile_s:.3g} s, {number(one.speed.tflops)} TFLOP/s\n{one.speed.short}",
                )
                for one in libraries
            ]
            _scatter(axes, tips, dots, series, label)
        axes.set_xlim(*_room([library.compile_s for library in found.libraries]))
        axes.set_ylim(*_room([library.speed.tflops for library in found.libraries]))
        _plain(axes.xaxis)
        _plain(axes.yaxis)
        _legend(axes)
        return svg(name, f"Speed over compile time of {len(found.libraries)} libraries on {found.device.label}")


def coverage(found: Sequence[Coverage], name: str) -> str:
    """Three bars a receipt, on a logarithmic axis: kernels, built, timed."""
    with _axes(0.9 + 0.45 * len(found)) as (axes, tips, svg):
        axes.set(xscale="symlog", xlabel="kernels, logarithmic")
        axes.grid(axis="y", visible=False)
        places = range(len(found))
        for series, what in enumerate(("kernels", "built", "timed")):
            counts = [getattr(one, what) for one in found]
            bars = axes.barh(
                [place + 0.26 * (series - 1) for place in places],
                counts,
                height=0.24,
                color=SERIES_COLOURS[series],
                label={"kernels": "exist"}.get(what, what),
            )
            for bar, one, count in zip(bars, found, counts, strict=True):
                bar.set_gid(tips.add([f"{one.label}: {count:,} {what}"]))
            axes.bar_label(bars, [f"{count:,}" for count in counts], padding=2, fontsize=6.5)
        axes.set_yticks(list(places), [_cut(one.label, 34) for one in found])
        axes.set_xlim(0, 6 * max(one.kernels for one in found))
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0)
        return svg(name, f"Kernels, built and timed, of {found[0].lineage} by receipt")


def _grouped(items: Sequence[Any], by: Callable[[Any], str]) -> list[tuple[str, list[Any]]]:
    """The largest groups first; those beyond the series are one."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(by(item), []).append(item)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    if len(ordered) > len(SERIES_COLOURS):
        rest = [item for _, group in ordered[len(SERIES_COLOURS) - 1 :] for item in group]
        ordered = [*ordered[: len(SERIES_COLOURS) - 1], ("others", rest)]
    return ordered


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _thinned(ticks: Sequence[int]) -> Sequence[int]:
    """Ticks that do not run into each other on a logarithmic axis: a twelfth of it apart."""
    gap = math.log(ticks[-1] / ticks[0]) / 12 if ticks[0] else 0
    kept: list[int] = []
    for tick in ticks:
        if not kept or math.log(tick / kept[-1]) >= gap:
            kept.append(tick)
    return kept


def _fixed(ticks: Sequence[float]) -> Any:
    from matplotlib.ticker import FixedLocator

    return FixedLocator(ticks)
