"""Progress bars of the command line: on stderr, and only where somebody sees them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from catalog.build.notices import shown_elsewhere


@contextmanager
def fraction_done(what: str) -> Iterator[Callable[[float], None]]:
    """A bar that is told the fraction that is done; silent where stderr is no terminal."""
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
    """A bar of ``total`` problems: what is told how many are done and about the last one, and what prints a line."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"))
    about = TextColumn("{task.description}", markup=False)
    shown = Progress(*columns, TimeRemainingColumn(), about, console=Console(stderr=True))
    with shown_elsewhere(), shown as progress:
        task = progress.add_task("", total=total)

        def advance(done: int, last: str) -> None:
            progress.update(task, completed=done, description=last[:60])

        yield advance, lambda text: progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Pace:
    """How long the kernels that are left take, at the pace of the last :data:`WINDOW` that took a compiler.

    Kernels that the cache had took no time: they say nothing about those that are left. Times are seconds of one clock;
    ``at_once`` is how many kernels are built at a time.
    """

    WINDOW = 64

    def __init__(self, now: float, at_once: int) -> None:
        self._at_once = at_once
        self._ends = deque([now], maxlen=self.WINDOW + 1)

    def ended(self, now: float, *, compiled: bool) -> None:
        """A kernel has ended."""
        if compiled:
            self._ends.append(now)
        elif len(self._ends) == 1:
            self._ends[0] = now  # the compiling starts after what the cache had

    def left(self, kernels: int, now: float) -> float | None:
        """Seconds until ``kernels`` more have ended; None before the first compile has."""
        counted = len(self._ends) - 1
        if not counted:
            return None
        # Kernels that take longer than those before them slow the pace while they are waited for.
        pace = max((self._ends[-1] - self._ends[0]) / counted, (now - self._ends[0]) / (counted + self._at_once))
        return max(0.0, kernels * pace - (now - self._ends[-1]))

    def told(self, kernels: int, now: float) -> str:
        """:meth:`left` as hours, minutes and seconds."""
        seconds = self.left(kernels, now)
        return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))
