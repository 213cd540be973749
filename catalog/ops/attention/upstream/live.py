"""Live parity: the names that the generator of the user's own CK checkout lists.

The checkout is only read: the generator runs in a separate process in a scratch folder, is asked only for lists, and
writes no byte code. A generator that fails, hangs or prints something else raises an error that says what to do.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from catalog.build import processes
from catalog.errors import GeneratorError, UsageError

if TYPE_CHECKING:
    from catalog.rules.populate import Request

_EXAMPLE = "example/ck_tile/01_fmha/generate.py"
_PLACES = (
    "generate.py",
    "01_fmha/generate.py",
    "ck_tile/01_fmha/generate.py",
    _EXAMPLE,
    f"*/{_EXAMPLE}",
    f"*/*/{_EXAMPLE}",
)
"""Places of a generator below what users call their CK, most likely first: the example's own folder, a checkout, and
packages that contain one (flash-attn's csrc/, rocm-libraries' projects/, a ROCm installation's share/)."""

_OPTIONS = ("--api", "--list_blobs", "--mask", "--receipt")
_TARGETS = "--targets"
_TARGET_SUFFIX = re.compile(r"_gfx[0-9a-z]+$")
_WITHOUT_TARGET = "fmha_batch_prefill_"  # at every revision
_API_SOURCE = re.compile(r"_api(_gfx[0-9a-z]+)?$")
_NAMED_SQUANT = b"F_squant"
"""The generator's field for the scales of a forward kernel, until names had several kinds of scales."""
_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")
_LAST_LINES = 8

_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": ""}
"""Keeps the checkout unchanged, and lets the generator find the modules beside it whatever the user's shell sets."""


@dataclass(frozen=True)
class Generator:
    """The generator of a CK checkout: a :class:`~catalog.rules.parity.Reference` that runs it."""

    path: Path
    apis: tuple[str, ...]
    takes_targets: bool
    timeout: float
    _listed: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def revision(self) -> str:
        """The catalog's revision that matches the generator's command line and names."""
        return self._detected[0]

    @property
    def about(self) -> str:
        """What the generator is asked, and why it is compared with that revision."""
        revision, why = self._detected
        return f"{self.path} lists {', '.join(self.apis)}; like revision {revision}, it {why}."

    @functools.cached_property
    def _detected(self) -> tuple[str, str]:
        """The revision that matches, and what the generator has in common with it."""
        if not self.takes_targets:
            return "2025-07", f"takes no {_TARGETS}"
        forward = _ops(self.path) / "fmha_fwd.py"
        if forward.is_file() and _NAMED_SQUANT in forward.read_bytes():
            return "2025-11", f"takes {_TARGETS} and calls the scales of forward kernels squant"
        return "2026-05", f"takes {_TARGETS}"

    def names(self, request: Request, receipt: int) -> frozenset[str]:
        """The kernels that the generator lists for ``receipt``, over all its APIs; cached after the first call.

        Raises:
            GeneratorError: it fails, takes too long or prints something else, or its names are of another revision.
        """
        spec = request.spec
        options: tuple[str, ...] = ("--mask", request.variant, "--receipt", str(receipt))
        if self.takes_targets:
            options = (_TARGETS, str(spec.arch), *options)
        if options not in self._listed:
            self._listed[options] = self._list_all(options)
        names = self._listed[options]
        if spec.revision == self.revision:
            self._check_form(names)
        return names

    def _list_all(self, options: tuple[str, ...]) -> frozenset[str]:
        stop = threading.Event()
        with (
            tempfile.TemporaryDirectory(prefix="catalog-parity-") as scratch,
            ThreadPoolExecutor(min(len(self.apis), os.cpu_count() or 1)) as pool,
        ):
            asked = [pool.submit(self._list, api, options, Path(scratch), stop) for api in self.apis]
            try:
                return frozenset[str]().union(*(done.result() for done in as_completed(asked)))
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)

    def _list(self, api: str, options: tuple[str, ...], scratch: Path, stop: threading.Event) -> frozenset[str]:
        command = [sys.executable, str(self.path), "--api", api, "--list_blobs", f"{api}.txt", *options]
        output = run_generator(command, scratch, self.timeout, stop)
        listed = scratch / f"{api}.txt"
        if not listed.is_file() or not listed.stat().st_size:
            raise GeneratorError(
                f"{self.path} succeeded but listed nothing for API {api}, not even its API source.{_tail(output)}",
                hint=f"Run it yourself: {shlex.join(command)}",
            )
        return frozenset(_kernels(listed.read_text(encoding="utf-8", errors="replace"), self.path, api))

    def _check_form(self, names: frozenset[str]) -> None:
        suffixed = (name for name in names if not name.startswith(_WITHOUT_TARGET))
        wrong = [name for name in suffixed if bool(_TARGET_SUFFIX.search(name)) != self.takes_targets]
        if wrong:
            carries = "carry no target" if self.takes_targets else "carry a target"
            raise GeneratorError(
                f"{self.path} has the command line of revision {self.revision}, but its names {carries}: {min(wrong)}",
                hint="It lies between the revisions that the catalog has; --revision names another to compare with.",
            )


def find_generator(root: Path, timeout: float) -> Generator:
    """The generator of the CK checkout at ``root``; ``timeout`` is in seconds, for each API.

    ``root`` may also be the example's folder, its generate.py, or a package that contains a checkout: flash-attn's
    source distribution, rocm-libraries, a ROCm installation.

    Raises:
        UsageError: there is none, or there are several.
        GeneratorError: it does not start, or is not CK Tile's FMHA generator.
    """
    path = _locate(root.expanduser().resolve())
    apis = tuple(sorted(m.name.removeprefix("fmha_") for m in pkgutil.iter_modules([str(_ops(path))])))
    if not apis:
        raise UsageError(f"{_ops(path)} has no module: no API to list", hint="Is the checkout complete?")
    with tempfile.TemporaryDirectory(prefix="catalog-parity-") as scratch:
        shown = run_generator([sys.executable, str(path), "--help"], Path(scratch), timeout, threading.Event())
    lacks = [option for option in _OPTIONS if option not in shown]
    if lacks:
        raise GeneratorError(
            f"{path} is not an FMHA generator that the catalog knows: it takes no {', no '.join(lacks)}.{_tail(shown)}",
            hint="It must be example/ck_tile/01_fmha/generate.py of a composable_kernel checkout, of 2024-10 or later.",
        )
    return Generator(path, apis, _TARGETS in shown, timeout)


def _ops(generator: Path) -> Path:
    """The folder whose modules are the APIs of the generator."""
    return generator.parent / "codegen" / "ops"


def _locate(root: Path) -> Path:
    if root.is_file() and _ops(root).is_dir():
        return root
    for place in _PLACES:
        found = sorted({path.resolve() for path in root.glob(place) if _ops(path).is_dir()})
        if len(found) > 1:
            raise UsageError(f"{root} holds several CK checkouts", hint="Name one: " + ", ".join(map(str, found)))
        if found:
            return found[0]
    if (root / "include" / "ck_tile").is_dir():
        why = "CK's headers are there, its generator is not: ROCm packages leave it out."
    else:
        why = f"A composable_kernel checkout has it as {_EXAMPLE}, with a folder codegen beside it."
    raise UsageError(f"{root} holds no FMHA generator of CK Tile", hint=why)


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
        f"{command[1]} {shlex.join(command[2:])}: {done.failure}.{_tail(done.output)}",
        hint=_remedy(command, done.output, timed_out=done.timed_out),
    )


def _remedy(command: list[str], output: str, *, timed_out: bool) -> str:
    if timed_out:
        return "--timeout gives each API more seconds."
    missing = _MISSING_MODULE.findall(output)
    if missing and missing[-1].partition(".")[0] == "codegen":
        return f"The checkout is incomplete: {missing[-1]} must be beside the generator."
    if missing:
        return f"It needs the module {missing[-1]}: {sys.executable} -m pip install {missing[-1].partition('.')[0]}"
    return f"Run it yourself to see more: {shlex.join(command)}"


def _tail(output: str) -> str:
    lines = [line.rstrip() for line in output.splitlines() if line.strip()][-_LAST_LINES:]
    return "".join(f"\n  {line[:300]}" for line in lines)


def _kernels(listing: str, generator: Path, api: str) -> Iterator[str]:
    """The kernels of a list of paths; API sources are left out."""
    for number, line in enumerate(listing.splitlines(), start=1):
        path = PurePath(line.strip())
        if path.suffix != ".cpp" or not path.stem.startswith("fmha_"):
            raise GeneratorError(
                f"{generator}: line {number} of the list for API {api} is not the path of a kernel: {line[:300]!r}",
                hint="It must be CK Tile's FMHA generator, unchanged, which lists one .cpp file a line.",
            )
        if not _API_SOURCE.search(path.stem):
            yield path.stem
