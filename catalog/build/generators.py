"""Generators of a user's own checkout: what the catalog asks of one, and how it runs one.

A checkout is only read. Its generator runs in a separate process in a scratch folder, is asked only for lists or for
one kernel, and writes no byte code. A generator that fails or hangs raises an error that says what to do.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from catalog.build import processes
from catalog.build.keys import hash_parts
from catalog.build.toolchains import digest_of
from catalog.errors import GeneratorError

TIMEOUT_SECONDS = 600.0
"""Default time limit of one run."""

_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")
_LAST_LINES = 8
_COMMIT_CHARACTERS = 12
_GIT_SECONDS = 30

_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": ""}
"""Keeps the checkout unchanged, and lets the generator find the modules beside it whatever the user's shell sets."""


class Generator(Protocol):
    """The generator of a checkout, as an operation finds it."""

    @property
    def path(self) -> Path:
        """The program."""

    @property
    def root(self) -> Path:
        """The folder of the program and of all code that determines its output."""

    @property
    def digest(self) -> str:
        """Hash of that code."""

    @property
    def receipts(self) -> tuple[int, ...]:
        """The receipts that it distinguishes, ascending."""

    def lists(
        self, arch: str, variant: str, receipts: Sequence[int], on_progress: Callable[[float], None]
    ) -> Mapping[int, Sequence[str]]:
        """The names of the kernels that it lists for each receipt, in its own order.

        Args:
            arch: the compile target.
            variant: the variant of the enumeration.
            receipts: the receipts to ask for.
            on_progress: called with the fraction of the runs that have ended.

        Raises:
            GeneratorError: it fails, takes too long or prints something else.
        """


def run_generator(command: list[str], scratch: Path, timeout: float, stop: threading.Event) -> str:
    """The output of ``command``.

    Raises:
        GeneratorError: it cannot be started, fails, or takes longer than ``timeout`` seconds; no process is left.
        Interrupted: ``stop`` was set.
    """
    try:
        done = processes.run(command, scratch, timeout, stop, variables=_ENVIRONMENT)
    except OSError as error:
        raise GeneratorError(f"{shlex.join(command)}: cannot be started: {error}") from None
    if done.failure is None:
        return done.output
    raise GeneratorError(
        f"{command[1]} {shlex.join(command[2:])}: {done.failure}.{last_lines(done.output)}",
        hint=_remedy(command, done.output, timed_out=done.timed_out),
    )


def _remedy(command: list[str], output: str, *, timed_out: bool) -> str:
    if timed_out:
        return "--timeout gives each run more seconds."
    missing = _MISSING_MODULE.findall(output)
    if missing and missing[-1].partition(".")[0] == "codegen":
        return f"The checkout is incomplete: {missing[-1]} must be beside the generator."
    if missing:
        return f"It needs the module {missing[-1]}: {sys.executable} -m pip install {missing[-1].partition('.')[0]}"
    return f"Run it yourself to see more: {shlex.join(command)}"


def last_lines(output: str) -> str:
    """The last lines of a program's output, indented, as the end of a message."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()][-_LAST_LINES:]
    return "".join(f"\n  {line[:300]}" for line in lines)


def code_of(root: Path) -> list[Path]:
    """The Python files below ``root``, sorted."""
    return sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)


def digest_of_code(root: Path) -> str:
    """Hash of the Python files below ``root``: their paths and contents."""
    return hash_parts({"files": [f"{path.relative_to(root)} {digest_of(str(path))}" for path in code_of(root)]})


def commit_of(root: Path) -> str:
    """The git commit of the code below ``root``, shortened; empty without git, or if the code differs from it."""
    asked = ["--no-optional-locks", "status", "--porcelain=v2", "--branch", "--ignored", "--", "."]
    try:
        done = subprocess.run(  # noqa: S603 - only reads: without optional locks, git does not even refresh its index
            ["git", "-C", str(root), *asked],  # noqa: S607 - the user's own git
            capture_output=True, text=True, errors="replace", check=False, timeout=_GIT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    changes = [line for line in lines if not line.startswith("# ") and "__pycache__" not in line]
    commits = [line.split()[2] for line in lines if line.startswith("# branch.oid ")]
    return "" if changes or not commits or commits[0] == "(initial)" else commits[0][:_COMMIT_CHARACTERS]
