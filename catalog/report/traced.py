"""The time of a traced program: from end to end, in its calls, and in the kernels alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.files import StrPath
from catalog.messages import counted
from catalog.runtime.here import resolve_arch
from catalog.runtime.traces import Used, read_trace
from catalog.schema.policy import CONDITION, Policy

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog

COLUMNS = (
    "problem",
    "arch",
    "selected as",
    "calls",
    "launches",
    "recorded ms",
    "eager ms",
    "kernel ms",
    "kernel share",
)
"""Columns of :attr:`Line.row`. The times are of all launches together."""


@dataclass(frozen=True, slots=True)
class Line:
    """The calls of one problem: recorded ms, and what its launches take by the measurements of each kind, if any."""

    used: Used
    arch: str
    eager_ms: float | None
    kernel_ms: float | None

    @property
    def row(self) -> tuple[Any, ...]:
        """The values of :data:`COLUMNS`."""
        used, kernel = self.used, self.kernel_ms
        whole = self.eager_ms or (used.total_ms if used.times else None)
        return (
            *(used.name, self.arch, str(used.policy), used.calls, used.launches, used.total_ms if used.times else None),
            *(self.eager_ms, kernel, None if kernel is None or not whole else f"{kernel / whole:.1%}"),
        )


@dataclass(frozen=True, slots=True)
class Traced:
    """The times of a traced program.

    ``elapsed_ms`` is from the start of the first call to the end of the last, added up over processes.
    """

    path: Path
    elapsed_ms: float
    lines: Sequence[Line]

    @property
    def kernel_ms(self) -> float:
        """The time in kernels, as far as they were measured."""
        return sum(line.kernel_ms or 0.0 for line in self.lines)

    @property
    def about(self) -> str:
        """End-to-end time and kernel time, as sentences."""
        calls = sum(line.used.total_ms for line in self.lines)
        unmeasured = sum(line.kernel_ms is None for line in self.lines)
        share = f" ({self.kernel_ms / self.elapsed_ms:.1%})" if self.elapsed_ms else ""
        return (
            f"End to end, from the first call to the end of the last: {self.elapsed_ms:,.1f} ms. In calls, as "
            f"recorded: {calls:,.1f} ms. In kernels alone: {self.kernel_ms:,.1f} ms{share}"
            + (f", without {counted(unmeasured, 'problem')} whose kernels were not measured." if unmeasured else ".")
        )


def read_traced(catalog: Catalog, path: StrPath) -> Traced:
    """The times of the program that wrote the trace at ``path``, by the measurements in the catalog.

    Raises:
        UsageError: as :func:`~catalog.runtime.traces.read_trace`.
        RegistryError: the catalog cannot be read.
    """
    trace = read_trace(path)
    lines = []
    for used in trace.used:
        arch = resolve_arch(used.wanted.arch)
        times = [_launch_ms(catalog, used, arch, policy) for policy in (Policy("eager"), Policy("graph"))]
        eager, kernel = (None if ms is None else ms * used.launches for ms in times)
        lines.append(Line(used, arch, eager, kernel))
    return Traced(trace.path, trace.elapsed_ms, lines)


def _launch_ms(catalog: Catalog, used: Used, arch: str, policy: Policy) -> float | None:
    """The median of a launch of the kernels that ran, measured under a policy; None if it was not measured."""
    row = catalog.connection.execute(
        "SELECT median_ms, max(timing.created) FROM timing JOIN problem ON problem.id = problem_id "
        "JOIN kernel ON kernel.id = kernel_id JOIN json_each(:names) ON json_each.value = kernel.name "
        f"WHERE problem.key = :problem AND device_id = :device AND {CONDITION} HAVING count(*)",
        {
            "names": json.dumps(used.kernels),
            "problem": used.problem.key,
            "device": catalog.measured_on(arch),
            **policy.parameters,
        },
    ).fetchone()
    return None if row is None else float(row[0])
