"""The files of a benchmark, one row per shape and kernel: CSV with the columns of CK's own benchmark, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from catalog.errors import INTERRUPTED, UsageError
from catalog.files import check_file, write_file
from catalog.formats import Format, write_rows
from catalog.messages import counted
from catalog.ops import operation_of
from catalog.runtime.bench_shapes import Benched, BenchOptions, Outcome
from catalog.runtime.measure import remedy

if TYPE_CHECKING:
    from catalog.ops.protocol import Operation
    from catalog.runtime.devices import DeviceInfo
    from catalog.schema.shapes import Shape

MEASURED = ("latency_ms", "tflops", "bandwidth_gb_s")
TIMED = ("min_ms", "p10_ms", "p90_ms", "n", "precision", "sound")


@dataclass(frozen=True)
class Columns:
    """The columns of the CSV file, and the fields of a result in the JSON file, for one operation.

    Attributes:
        of_problem: fields of the problem.
        of_kernel: traits of the kernel by column; ``kernel_...`` if the problem or the plan has a column of that name.
        of_timing: values of :data:`TIMED` by column; ``timed_...`` if the problem has a column of that name, whatever
            the case of its letters, which SQLite ignores.
        identity: columns that identify a kernel besides its traits.
    """

    of_problem: tuple[str, ...]
    of_kernel: Mapping[str, str]
    of_timing: Mapping[str, str]
    identity: tuple[str, ...]

    @property
    def shown(self) -> tuple[str, ...]:
        """The columns that are printed."""
        return ("problem_name", "kernel", *MEASURED, *self.of_timing, "verified")

    @property
    def all(self) -> tuple[str, ...]:
        """Every column, in order."""
        of_row = ("kernel_id", *self.identity, "stages", "category", "problem")
        timed = (*MEASURED, *self.of_timing)
        return ("problem_name", *self.of_problem, "kernel", *self.of_kernel, *timed, "verified", *of_row)


@cache
def columns_of(operation: Operation) -> Columns:
    """The columns of an operation; the kernel's algorithm precedes its signature, as in CK's files."""
    first, traits = operation.bench_traits, operation.traits.values()
    names = [*first]
    for group in ("algorithm", "signature"):
        names += [trait.name for trait in traits if trait.group == group and trait.name not in first]
    of_problem = operation.bench_fields or tuple(operation.problem.model_fields)
    others = (*of_problem, "stages")
    of_kernel = {f"kernel_{name}" if name in others else name: name for name in names}
    taken = {name.casefold() for name in of_problem}
    of_timing = {f"timed_{name}" if name in taken else name: name for name in TIMED}
    return Columns(of_problem, MappingProxyType(of_kernel), MappingProxyType(of_timing), operation.traits.identity)


def row_of(benched: Benched) -> dict[str, Any]:
    """The values of :class:`Columns`; None where nothing was measured or verified."""
    problem, kernel = benched.shape.problem, benched.main
    columns = columns_of(operation_of(problem))
    fields, traits = operation_of(problem).bench_values(problem), kernel.to_row()
    times = _times(benched)
    return {
        "problem_name": benched.shape.name,
        **{name: fields[name] for name in columns.of_problem},
        "kernel": kernel.name,
        **{column: traits[name] for column, name in columns.of_kernel.items()},
        **{name: times[name] for name in MEASURED},
        **{column: times[name] for column, name in columns.of_timing.items()},
        "verified": benched.verified,
        "kernel_id": kernel.id,
        **{name: traits[name] for name in columns.identity},
        "stages": " -> ".join(stage.name for stage in benched.stages),
        "category": benched.shape.category,
        "problem": problem.key,
    }


def _times(benched: Benched) -> dict[str, Any]:
    measured, problem = benched.measurement, benched.shape.problem
    if measured is None:
        return dict.fromkeys((*MEASURED, *TIMED))
    return {
        "latency_ms": round(measured.median_ms, 6),
        "tflops": round(problem.flops / measured.median_ms / 1e9, 6),
        "bandwidth_gb_s": round(problem.traffic / measured.median_ms / 1e6, 4),
        "min_ms": round(measured.min_ms, 6),
        "p10_ms": round(measured.p10_ms, 6),
        "p90_ms": round(measured.p90_ms, 6),
        "n": measured.n,
        "precision": round(measured.precision, 4),
        "sound": measured.sound,
    }


@dataclass
class BenchRun:
    """The results so far of a benchmark of ``category``, a set or one problem, for its files and exit code."""

    category: str
    shapes: Sequence[Shape]
    options: BenchOptions
    device: DeviceInfo
    interrupted: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    started: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @property
    def benched(self) -> list[Benched]:
        """The results that have a row: kernels that were timed or are wrong."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Benched)]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per result, with the values of :class:`Columns`."""
        return [row_of(benched) for benched in self.benched]

    @property
    def wrong(self) -> list[Benched]:
        """Kernels that were not timed because their results are wrong."""
        return [benched for benched in self.benched if not benched.timed]

    @property
    def noisy(self) -> list[Benched]:
        """Kernels whose times are too noisy to record."""
        return [benched for benched in self.benched if benched.measurement and not benched.measurement.sound]

    @property
    def shapes_seen(self) -> int:
        """The number of shapes with at least one result."""
        return len({outcome.shape.name for outcome in self.outcomes})

    @property
    def exit_code(self) -> int:
        """1 if a kernel is wrong or nothing was timed, 130 after Ctrl-C, else 0."""
        if self.interrupted:
            return INTERRUPTED
        return int(bool(self.wrong) or not self.benched)

    @property
    def noise_remedy(self) -> str | None:
        """What to do about the noisiest kernel; None if no times are too noisy."""
        worst = max((noisy.measurement.disturbance for noisy in self.noisy if noisy.measurement), default=None)
        return None if worst is None else remedy(worst)

    @property
    def metadata(self) -> dict[str, Any]:
        """The origin and the number of the results."""
        rule, timed = self.options.rule, [benched for benched in self.benched if benched.timed]
        return {
            "arch": self.device.arch,
            "category": self.category,
            "total_kernels": len({benched.main.id for benched in timed}),
            "shapes": len(self.shapes),
            "shapes_benchmarked": len({benched.shape.name for benched in timed}),
            "total_measurements": len(timed),
            "wrong": len(self.wrong),
            "failed": len(self.outcomes) - len(self.benched),
            "noisy": len(self.noisy),
            "interrupted": self.interrupted,
            "device": self.device.name,
            "cores": self.device.cores,
            "started": self.started,
            "candidates": self.options.candidates,
            "precision": rule.precision,
            "least_runs": rule.least,
            "cold": rule.cold,
            "verify": self.options.verify,
            "seed": self.options.seed,
        }

    @property
    def summary(self) -> str:
        """The numbers of :attr:`metadata` as a sentence."""
        about = self.metadata
        return (
            f"{'Interrupted. ' if self.interrupted else ''}{counted(about['total_measurements'], 'measurement')} of "
            f"{counted(about['total_kernels'], 'kernel')} on {about['shapes_benchmarked']:,} of "
            f"{counted(len(self.shapes), 'shape')}; {about['wrong']:,} wrong, {about['failed']:,} could not be timed, "
            f"{about['noisy']:,} too noisy."
        )


@dataclass(frozen=True)
class BenchFiles:
    """The files to write results to, if any; each is replaced as a whole.

    Raises:
        UsageError: on construction, if a file cannot be written or both are the same.
    """

    csv: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        for path in filter(None, (self.csv, self.json)):
            check_file(path)
        if self.csv is not None and self.json is not None and self.csv.resolve() == self.json.resolve():
            raise UsageError(f"--csv and --json are the same file, {self.csv}")

    @contextmanager
    def of(self, run: BenchRun) -> Iterator[None]:
        """Write the results of ``run`` when the block ends, even if an error or Ctrl-C ends it.

        Raises:
            CatalogError: as :meth:`write`.
        """
        try:
            yield
        except BaseException as error:
            run.interrupted = isinstance(error, KeyboardInterrupt)
            if run.benched:  # without results, keep the files of an earlier benchmark
                self.write(run)
            raise
        self.write(run)

    def write(self, run: BenchRun) -> None:
        """Write the results so far.

        Raises:
            CatalogError: a file cannot be written; an existing one is unchanged.
        """
        rows = run.rows
        if self.csv is not None:
            write_file(self.csv, _csv(columns_of(operation_of(run.shapes[0].problem)).all, rows))
        if self.json is not None:
            whole = {"metadata": run.metadata, "results": rows}
            write_file(self.json, json.dumps(whole, indent=1, allow_nan=False) + "\n")


def printed(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[list[Any]]:
    """The values of ``columns``; booleans are 0 and 1, as everywhere except in JSON."""
    return [[int(row[name]) if isinstance(row[name], bool) else row[name] for name in columns] for row in rows]


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    stream = StringIO()
    write_rows(columns, printed(rows, columns), Format.CSV, stream)
    return stream.getvalue()
