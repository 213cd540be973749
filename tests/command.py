"""``catalog`` as main() runs it, in this process: a call saves half a second of imports."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from catalog.__main__ import main
from catalog.runtime.catalog import Catalog
from catalog.settings import settings


def catalog(*words: object, db: Path | None = None, **variables: object) -> subprocess.CompletedProcess[str]:
    """What the command line prints and its exit code; ``variables`` are environment variables."""
    command = [str(word) for word in ("catalog", *(("--db", db) if db else ()), *words)]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "stdin", io.StringIO())
        for name, value in variables.items():
            patch.setenv(name, str(value))
        _forget()
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    _forget()
    output, errors = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(command, code, output, errors)


def _forget() -> None:
    """Read settings anew, as a new process does."""
    settings.cache_clear()
    Catalog.default.cache_clear()
