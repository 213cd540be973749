"""Reading of traces, files that :mod:`catalog.runtime.tracing` wrote: their calls by problem."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from catalog.errors import CatalogError, ProblemError, UsageError
from catalog.files import StrPath, open_given, parse_json
from catalog.messages import counted, expected
from catalog.ops import problem_of
from catalog.registry.rows import Amount
from catalog.runtime.array_files import load_arrays
from catalog.runtime.elements import element_type
from catalog.runtime.tensors import Array, check_inputs
from catalog.runtime.tracing import FORMAT, folder_of
from catalog.schema.lineage import Wanted
from catalog.schema.policy import GRAPH, MeasuredAs, Policy
from catalog.schema.problem import Problem
from catalog.settings import settings

MOST_TRACE_BYTES, MOST_LINE_BYTES = 2**36, 2**20

_HEADERS_BYTES = 2**16
"""Maximum overhead in bytes of a file of tensors, besides their elements."""

_START = b'{"format":'
"""The beginning of every line; if it occurs inside a line, the end of an earlier line is missing."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1]
    at: Amount
    pid: int


class _CallLine(_Line):
    call: Literal["run", "launch", "enqueue"]
    ms: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] | None
    launches: int = Field(ge=1, lt=2**31)
    seed: int | None = Field(None, ge=0, lt=2**64)
    error: str | None = None
    tensors: str | None = Field(None, pattern=r"^[0-9a-f-]+\.npz$")
    arch: str
    revision: str
    mask_impl: str
    device: str
    cores: int
    kernels: tuple[str, ...] = Field(min_length=1)
    measured_as: MeasuredAs = "graph"  # older traces do not state the policy
    cold: bool = False
    problem: dict[str, Any]


class _FullLine(_Line):
    call: Literal["full"]
    calls: int


@dataclass(frozen=True, slots=True)
class Recording:
    """The recorded inputs of a call, in a file; ``where`` names the line that refers to it, for messages."""

    path: Path
    where: str

    def load(self, problem: Problem) -> dict[str, Array]:
        """Read the inputs in the form that a run takes.

        Raises:
            UsageError: the file is damaged, or its tensors do not fit the problem.
        """
        size = sum(tensor.bytes for tensor in problem.tensors.values()) + _HEADERS_BYTES
        try:
            bits = load_arrays(self.path, max(size, settings().trace_max_bytes))
            arrays = {name: array.view(element_type(problem, name)) for name, array in bits.items()}
            check_inputs(problem, arrays)
        except (OSError, ValueError, KeyError, TypeError, CatalogError) as error:
            reason = f"no tensor {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
            raise UsageError(f"{self.where}: tensors {self.path.name} cannot be used: {reason}") from None
        return arrays


@dataclass
class Used:
    """The recorded calls of one problem with the kernels of one lineage.

    ``calls`` counts the calls, ``launches`` the launches, since a run may repeat them. ``times`` has the milliseconds
    of a launch for each call that was timed. ``kernels`` are those of the last call, selected by timings of ``policy``;
    ``failed`` counts calls that ended with an error.
    """

    problem: Problem
    wanted: Wanted
    kernels: tuple[str, ...] = ()
    policy: Policy = GRAPH
    calls: int = 0
    launches: int = 0
    failed: int = 0
    total_ms: float = 0.0
    seed: int = 0
    times: list[float] = field(default_factory=list, repr=False)
    recordings: list[Recording] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        """The problem's name."""
        return self.problem.name

    @property
    def median_ms(self) -> float | None:
        """Median milliseconds of a launch; None if no call was timed, because all were only queued."""
        return median(self.times) if self.times else None

    def add(self, line: _CallLine, recording: Recording | None) -> None:
        """Add one call."""
        self.calls += 1
        self.launches += line.launches
        self.kernels = line.kernels
        self.policy = Policy(line.measured_as, line.cold)
        self.seed = self.seed if line.seed is None else line.seed
        if line.error is not None:
            self.failed += 1
        elif line.ms is not None:
            self.times.append(line.ms)
            self.total_ms += line.ms * line.launches
        if recording is not None:
            self.recordings.append(recording)


@dataclass(frozen=True)
class Trace:
    """The contents of a trace: its problems, those that took the most time first.

    ``torn`` counts lines cut short by a kill, ``full`` the processes that reached their limit of calls. ``elapsed_ms``
    is the time from the start of the first call to the end of the last, added up over processes.
    """

    path: Path
    used: tuple[Used, ...]
    torn: int = 0
    full: int = 0
    elapsed_ms: float = 0.0

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Each problem once, whatever arch it ran on."""
        return tuple(dict.fromkeys(used.problem for used in self.used))

    @property
    def about(self) -> str:
        """A summary of the file, as a sentence."""
        calls, total = sum(used.calls for used in self.used), sum(used.total_ms for used in self.used)
        failed = sum(used.failed for used in self.used)
        parts = [f"{counted(calls, 'call')} of {counted(len(self.problems), 'problem')}, {total:,.1f} ms"]
        parts += [f"{failed:,} failed"] if failed else []
        parts += [f"{self.torn:,} cut short by a kill and left out"] if self.torn else []
        parts += [f"{counted(self.full, 'process')} made more calls than a trace records"] if self.full else []
        return f"{self.path}: {'; '.join(parts)}."


def read_trace(path: StrPath) -> Trace:
    """Read the trace at ``path``; other processes may still be writing it.

    Raises:
        UsageError: the file cannot be read, has no call, or has an invalid line; the message names the line and the
            error.
    """
    path = Path(path)
    try:
        with open_given(path, MOST_TRACE_BYTES) as file:
            return _Reader(path).read(iter(functools.partial(file.readline, MOST_LINE_BYTES), b""))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._used: dict[tuple[str, Wanted], Used] = {}
        self._problems: dict[str, Problem] = {}
        self._torn = self._full = 0
        self._spans: dict[int, tuple[float, float]] = {}

    def read(self, lines: Iterable[bytes]) -> Trace:
        for number, raw in enumerate(lines, start=1):
            where = f"{self._path}: line {number}"
            if len(raw) == MOST_LINE_BYTES and not raw.endswith(b"\n"):
                raise UsageError(f"{where}: longer than {MOST_LINE_BYTES:,} bytes: not a line of a trace")
            for line in self._whole(raw, where):
                self._add(line, where)
        if not self._used:
            raise UsageError(f"{self._path}: the file contains no calls")
        order = sorted(self._used.values(), key=lambda used: (-used.total_ms, -used.calls, used.name, used.wanted.arch))
        elapsed = sum(end - start for start, end in self._spans.values())
        return Trace(self._path, tuple(order), self._torn, self._full, elapsed)

    def _whole(self, raw: bytes, where: str) -> Iterator[dict[str, Any]]:
        """Yield the line's object: the second one if a torn line precedes it, nothing if the line itself is torn."""
        try:
            yield _parsed(raw, where)
        except UsageError:
            last = raw.rfind(_START)
            torn = raw[:last] if last > 0 else raw
            if torn.endswith(b"\n") or torn[: len(_START)] != _START[: len(torn)]:
                raise
            self._torn += 1
            if last > 0:
                yield from self._whole(raw[last:], where)

    def _add(self, fields: dict[str, Any], where: str) -> None:
        if fields.get("format") != FORMAT:
            raise UsageError(f"{where}: format {fields.get('format')!r}: this version reads {FORMAT}")
        try:
            if fields.get("call") == "full":
                _FullLine.model_validate(fields)
                self._full += 1
                return
            line = _CallLine.model_validate(fields)
        except OverflowError:  # raised by some versions of pydantic
            raise UsageError(f"{where}: a number is too large") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise UsageError(f"{where}: {'.'.join(map(str, first['loc']))}: {expected(first)}") from None
        problem = self._problem(line.problem, where)
        wanted = Wanted(line.arch, line.revision, line.mask_impl, problem.operation)
        used = self._used.setdefault((problem.key, wanted), Used(problem, wanted))
        used.add(line, self._recording(line.tensors, where))
        end = line.at * 1e3
        start, last = self._spans.get(line.pid, (end, end))
        self._spans[line.pid] = min(start, end - (line.ms or 0.0) * line.launches), max(last, end)

    def _problem(self, fields: dict[str, Any], where: str) -> Problem:
        text = json.dumps(fields, sort_keys=True)
        if text not in self._problems:
            try:
                self._problems[text] = problem_of(fields)
            except ProblemError as error:
                raise UsageError(f"{where}: problem: {error.message}") from None
        return self._problems[text]

    def _recording(self, name: str | None, where: str) -> Recording | None:
        if name is None:
            return None
        path = folder_of(self._path) / name
        if not path.is_file():
            raise UsageError(f"{where}: tensors {path} are missing", hint="Move the folder together with the file.")
        return Recording(path, where)


def _parsed(raw: bytes, where: str) -> dict[str, Any]:
    try:
        fields = parse_json(raw)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if not isinstance(fields, dict):
        raise UsageError(f"{where}: a {type(fields).__name__}, expected an object")
    return fields
