"""One line for people waiting at a terminal: a first call compiles its kernels, which takes seconds."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_log = logging.getLogger("catalog")

PATIENCE_SECONDS = 1.0
"""Duration of a build after which the line appears, in seconds."""

_shown_elsewhere = ContextVar("_shown_elsewhere", default=False)
"""Whether something else shows progress, such as a progress bar."""


@contextmanager
def shown_elsewhere() -> Iterator[None]:
    """Print no line in this block, because the progress is shown elsewhere."""
    before = _shown_elsewhere.set(True)
    try:
        yield
    finally:
        _shown_elsewhere.reset(before)


@contextmanager
def compiling(kernel: str) -> Iterator[None]:
    """Print one line if this block takes longer than :data:`PATIENCE_SECONDS` and stderr is a terminal.

    Nothing is printed inside :func:`shown_elsewhere`, or when the log shows the build at level INFO.
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
    """Whether somebody can read stderr. A program without a console has none, and others close it."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
