"""Where a traced program spends its time: calls by problem, kind, kernels, operation or arch, most time first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from catalog.report.traced import Line, Traced

BY: Mapping[str, Callable[[Line], str]] = {
    "problem": lambda line: line.used.name,
    "kind": lambda line: line.used.problem.kind_words(line.used.problem.kind_fields()),
    "kernels": lambda line: ", ".join(line.used.kernels),
    "operation": lambda line: line.used.problem.operation,
    "arch": lambda line: line.arch,
}
"""What calls can be grouped by."""


def columns_of(by: str) -> tuple[str, ...]:
    """The columns of :func:`rows_of`. ``share`` is that of the time of all calls, in percent."""
    return ("share", by, "calls", "launches", "recorded_ms", "kernel_ms")


def rows_of(traced: Traced, by: str) -> list[list[Any]]:
    """The calls of a program in groups, those that took the most time first.

    Args:
        traced: the program's times.
        by: one of :data:`BY`.

    Returns:
        Values of :func:`columns_of`. ``recorded_ms`` is None for calls that only queued their work: ``kernel_ms``, the
        time of their kernels as measured, counts as theirs. It is None if the kernels were not measured.
    """
    groups: dict[str, list[Line]] = {}
    for line in traced.lines:
        groups.setdefault(BY[by](line), []).append(line)
    spent = {name: sum(map(_spent_ms, lines)) for name, lines in groups.items()}
    whole = sum(spent.values())
    return [
        [
            round(100 * spent[name] / whole, 1) if whole else None,
            name,
            sum(line.used.calls for line in groups[name]),
            sum(line.used.launches for line in groups[name]),
            _sum(line.used.total_ms if line.used.times else None for line in groups[name]),
            _sum(line.kernel_ms for line in groups[name]),
        ]
        for name in sorted(groups, key=lambda name: (-spent[name], name))
    ]


def _spent_ms(line: Line) -> float:
    return line.used.total_ms if line.used.times else line.kernel_ms or 0.0


def _sum(times: Iterable[float | None]) -> float | None:
    """The sum of those that are known; None if none is."""
    known = [ms for ms in times if ms is not None]
    return round(sum(known), 4) if known else None
