"""Generators of a user's own checkout: what the catalog asks of one, and how it runs one.

A checkout is only read. Its generator runs in a separate process in a scratch folder, is asked only for lists or for
one kernel, and writes no byte code. A generator that fails or hangs raises an error that says what to do.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from catalog.build import processes
from catalog.build.keys import hash_parts
from catalog.build.toolchains import digest_of
from catalog.errors import GeneratorError

TIMEOUT_SECONDS = 600.0
"""Default time limit of one run."""

MOST_BYTES = 256 * 2**20
"""Limit of what one run may print or list; a list of a million kernels has about 150 MB."""

_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")
_LAST_LINES = 8
_COMMIT_CHARACTERS = 12
_GIT_SECONDS = 30
_DEPTH = 5
"""Levels of folders searched for a checkout; an unpacked wheel has it at the fourth one."""
_MOST_FOLDERS = 10_000
"""Limit of the folders searched at one level."""

_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": ""}
"""Keeps the checkout unchanged, and lets the generator find the modules beside it whatever the user's shell sets."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run of a generator, in an empty folder: it writes a list of kernels.

    Attributes:
        command: the command line.
        listing: name of the file that it writes.
        about: which list it is, in a few words.
        least: number of lines that the list has even without kernels.
        receipt: the receipt whose kernels it lists; None without receipts.
        traits: the traits that all of its kernels share, including those that their names leave out.
    """

    command: tuple[str, ...]
    listing: str
    about: str
    least: int = 0
    receipt: int | None = None
    traits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Generator(ABC):
    """The generator of a checkout, as an operation finds it: parity compares its lists, and adoption makes them rows.

    Attributes:
        root: the folder of its programs and of all code that determines their output.
        timeout: time limit of a run in seconds.
    """

    root: Path
    timeout: float

    @property
    @abstractmethod
    def digest(self) -> str:
        """Hash of that code."""

    @property
    @abstractmethod
    def revision(self) -> str:
        """The known revision that it resembles."""

    @property
    @abstractmethod
    def about(self) -> str:
        """What it is asked, and why it resembles that revision."""

    @property
    def receipts(self) -> tuple[int, ...]:
        """The receipts that it distinguishes, ascending; by default none."""
        return ()

    @abstractmethod
    def runs(self, arch: str, variant: str, receipts: Sequence[int]) -> Sequence[Run]:
        """The lists of some receipts, for a compile target and a variant of the enumeration.

        A generator without receipts has the same lists for all of them, and for none.

        Raises:
            GeneratorError: it does not start, or is not one that the operation knows.
        """

    @abstractmethod
    def kernel(self, line: str) -> str | None:
        """The name of the kernel in a line of a list; None for a line about something else.

        Raises:
            ValueError: no list has such a line; the message says what it should be.
        """

    def check(self, names: Collection[str]) -> None:  # noqa: B027 - optional
        """Check that names are of the revision that it resembles; by default they are.

        Raises:
            GeneratorError: they are not.
        """

    def lists(self, runs: Sequence[Run], on_progress: Callable[[float], None]) -> Mapping[Run, Sequence[str]]:
        """The names of the kernels that each run lists, in the generator's own order; several run at a time.

        ``on_progress`` is called with the fraction of the runs that have ended.

        Raises:
            GeneratorError: a run fails, takes too long, writes too much, or lists something else.
        """
        stop = threading.Event()
        kernel = cache(self.kernel)  # receipts have most of their lines in common
        with (
            tempfile.TemporaryDirectory(prefix="catalog-lists-") as scratch,
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            listed = {
                pool.submit(self._list, run, Path(scratch, str(number)), stop, kernel): run
                for number, run in enumerate(runs)
            }
            try:
                for ended, one in enumerate(as_completed(listed), start=1):
                    one.result()
                    on_progress(ended / len(runs))
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
            return {run: one.result() for one, run in listed.items()}

    def _list(self, run: Run, scratch: Path, stop: threading.Event, kernel: Callable[[str], str | None]) -> list[str]:
        """The names that a run lists; ``kernel`` reads a line as :meth:`kernel` does."""
        scratch.mkdir()
        output = run_generator(run.command, scratch, self.timeout, stop)
        program, listing = run.command[1], scratch / run.listing
        lines = listing.read_text(encoding="utf-8", errors="replace").splitlines() if listing.is_file() else None
        if lines is None or len(lines) < run.least:
            raise GeneratorError(
                f"{program} succeeded but listed nothing for {run.about}.{last_lines(output)}",
                hint=f"Run it yourself: {shlex.join(run.command)}",
            )
        names: list[str | None] = []
        for number, line in enumerate(lines, start=1):
            try:
                names.append(kernel(line))
            except ValueError as error:
                raise GeneratorError(
                    f"{program}: line {number} of the list for {run.about} is not {error}: {line[:300]!r}",
                    hint="It must be CK Tile's generator, unchanged.",
                ) from None
        return [name for name in names if name is not None]


def run_generator(command: Sequence[str], scratch: Path, timeout: float, stop: threading.Event) -> str:
    """The output of ``command``.

    Raises:
        GeneratorError: it cannot be started, fails, takes longer than ``timeout`` seconds, or prints or writes more
            than :data:`MOST_BYTES`; no process is left.
        Interrupted: ``stop`` was set.
    """
    try:
        done = processes.run(command, scratch, timeout, stop, variables=_ENVIRONMENT, most_bytes=MOST_BYTES)
    except OSError as error:
        raise GeneratorError(f"{shlex.join(command)}: cannot be started: {error}") from None
    if done.failure is None:
        return done.output
    raise GeneratorError(
        f"{command[1]} {shlex.join(command[2:])}: {done.failure}.{last_lines(done.output)}",
        hint=_remedy(command, done.output, timed_out=done.timed_out),
    )


def _remedy(command: Sequence[str], output: str, *, timed_out: bool) -> str:
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


def code_of(root: Path, *suffixes: str) -> list[Path]:
    """The files below ``root`` that have one of these suffixes, sorted."""
    found = (path for suffix in suffixes for path in root.rglob(f"*{suffix}"))
    return sorted(path for path in found if "__pycache__" not in path.parts)


def digest_of_code(root: Path, *suffixes: str) -> str:
    """Hash of the files that :func:`code_of` finds: their paths and contents."""
    files = (f"{path.relative_to(root)} {digest_of(str(path))}" for path in code_of(root, *suffixes))
    return hash_parts({"files": [*files]})


def find_folders(root: Path, inner: str, holds: Callable[[Path], bool]) -> list[Path]:
    """The folders for which ``holds`` is true in and around ``root``: ``inner`` of a checkout, or what is found nearby.

    Searched are, in this order: ``root`` itself; each level below it, because a package may contain a checkout; the
    folders above it. Only below ``root`` several are found. Symbolic links are followed.
    """
    root = root.expanduser().resolve()
    if not root.exists():
        return []  # rather than a checkout around it
    level = [root]
    for _ in range(_DEPTH):
        found = {place.resolve() for folder in level for place in (folder, folder / inner) if holds(place)}
        if found:
            return sorted(found)
        level = list(islice((below for folder in level for below in _folders_in(folder)), _MOST_FOLDERS))
    return [place for folder in root.parents for place in (folder, folder / inner) if holds(place)][:1]


def _folders_in(folder: Path) -> Iterator[Path]:
    with suppress(OSError):  # not a folder, or not ours to read
        with os.scandir(folder) as entries:  # which knows most kinds without asking: /usr has thousands of folders
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        yield from (folder / name for name in names)


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
