"""One line for somebody who waits at a terminal: a first call compiles its kernels, which takes seconds."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_log = logging.getLogger("catalog")

PATIENCE_SECONDS = 1.0
"""How long a build may take before it is mentioned."""

_shown_elsewhere = ContextVar("_shown_elsewhere", default=False)
"""Whether there is a progress bar, which says more."""


@contextmanager
def shown_elsewhere() -> Iterator[None]:
    """No line in this block: something else shows that work is being done."""
    before = _shown_elsewhere.set(True)
    try:
        yield
    finally:
        _shown_elsewhere.reset(before)


@contextmanager
def compiling(kernel: str) -> Iterator[None]:
    """Print one line if this block takes longer than :data:`PATIENCE_SECONDS` and stderr is a terminal.

    Nothing is printed inside :func:`shown_elsewhere`, or where the log shows it at level INFO.
    """
    logged = _log.isEnabledFor(logging.INFO) and _log.hasHandlers()
    if _shown_elsewhere.get() or logged or not _on_terminal():
        yield
        return
    line = f"catalog: compiling {kernel}; later calls find it in the cache"
    timer = threading.Timer(PATIENCE_SECONDS, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _on_terminal() -> bool:
    """Whether somebody could read stderr; a program without a console has none, and others close theirs."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
