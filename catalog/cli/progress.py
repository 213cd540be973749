"""Progress of the command line, on stderr: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING

from catalog.build.notices import shown_elsewhere

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

LOG_EVERY_S = 10.0
"""The least time between two lines that stand for a bar in a file."""


@contextmanager
def fraction_done(what: str) -> Iterator[Callable[[float], None]]:
    """A bar. Yields a function that moves it to a fraction; does nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with shown_elsewhere(), Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def each_timed(what: str, total: int) -> Iterator[tuple[Callable[[int, str], None], Callable[[str], None]]]:
    """A bar of ``total`` problems. Yields ``(advance, say)``.

    ``advance(done, about)`` sets the number of finished problems and the text about the last one; ``say(text)`` prints
    a line above the bar.
    """
    from rich.progress import TextColumn, TimeRemainingColumn

    about = TextColumn("{task.description}", markup=False)
    with shown_elsewhere(), _bar(what, TextColumn("left:"), TimeRemainingColumn(), about) as progress:
        task, log = progress.add_task("", total=total), _Log(progress, what, total)

        def advance(done: int, last: str) -> None:
            progress.update(task, completed=done, description=last[:60])
            log(done, last)

        yield advance, _line(progress)


@contextmanager
def each_built(total: int, at_once: int) -> Iterator[tuple[Callable[[bool], None], Callable[[str], None]]]:
    """A bar of ``total`` kernels, built ``at_once`` at a time. Yields ``(advance, say)``.

    ``advance(compiled)`` counts a finished kernel, compiled or cached; ``say(text)`` prints a line above the bar.
    """
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    pace = Pace(time.monotonic(), at_once)

    class Left(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"left: {pace.left_text(int(task.remaining or 0), time.monotonic())}")

    with _bar("building", Left()) as progress:
        task, log, ended = progress.add_task("", total=total), _Log(progress, "building", total), count(1)

        def advance(compiled: bool) -> None:
            now, done = time.monotonic(), next(ended)
            pace.ended(now, compiled=compiled)
            progress.update(task, completed=done)
            log(done, f"left: {pace.left_text(total - done, now)}")

        yield advance, _line(progress)


def _bar(what: str, *more: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, *more, console=Console(stderr=True))


def _line(progress: Progress) -> Callable[[str], None]:
    return lambda text: progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Log:
    """Lines instead of a bar where stderr is no terminal, at most one in :data:`LOG_EVERY_S`."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._say = None if progress.console.is_terminal else _line(progress)
        self._what, self._total, self._last = what, total, time.monotonic()

    def __call__(self, done: int, about: str) -> None:
        now = time.monotonic()
        if self._say and now - self._last >= LOG_EVERY_S:
            self._say(f"{self._what}: {done} of {self._total}, {about}")
            self._last = now


class Pace:
    """Estimates how long the remaining kernels take, from the pace of the last :data:`WINDOW` compiled ones.

    Cached kernels take no time and do not count. Times are in seconds of one clock; ``at_once`` is the number of
    kernels built in parallel.
    """

    WINDOW = 64

    def __init__(self, now: float, at_once: int) -> None:
        self._at_once = at_once
        self._ends = deque([now], maxlen=self.WINDOW + 1)

    def ended(self, now: float, *, compiled: bool) -> None:
        """Count a finished kernel."""
        if compiled:
            self._ends.append(now)
        elif len(self._ends) == 1:
            self._ends[0] = now  # compiling starts after the cached kernels

    def left(self, kernels: int, now: float) -> float | None:
        """Seconds until ``kernels`` more are finished; None before the first one is compiled."""
        counted = len(self._ends) - 1
        if not counted:
            return None
        # A kernel that takes longer than the previous ones lowers the pace while it is being compiled.
        pace = max((self._ends[-1] - self._ends[0]) / counted, (now - self._ends[0]) / (counted + self._at_once))
        return max(0.0, kernels * pace - (now - self._ends[-1]))

    def left_text(self, kernels: int, now: float) -> str:
        """:meth:`left` as hours, minutes and seconds."""
        seconds = self.left(kernels, now)
        return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))
