"""Live parity and adoption: the names that the generator of the user's own CK checkout lists.

:mod:`catalog.build.generators` runs it; this module knows CK's FMHA example: where it is, its options, its lists.
"""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from catalog.build.generators import code_of, digest_of_code, last_lines, run_generator
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
_RECEIPT = "receipt"  # the variable that the code of every API compares


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

    @cached_property
    def _detected(self) -> tuple[str, str]:
        """The revision that matches, and what the generator has in common with it."""
        if not self.takes_targets:
            return "2025-07", f"takes no {_TARGETS}"
        forward = _ops(self.path) / "fmha_fwd.py"
        if forward.is_file() and _NAMED_SQUANT in forward.read_bytes():
            return "2025-11", f"takes {_TARGETS} and calls the scales of forward kernels squant"
        return "2026-05", f"takes {_TARGETS}"

    @property
    def root(self) -> Path:
        """The folder of the example, which has all the code of the generator."""
        return self.path.parent

    @cached_property
    def digest(self) -> str:
        """Hash of the generator's own files, which determine its output."""
        return digest_of_code(self.root)

    @cached_property
    def receipts(self) -> tuple[int, ...]:
        """The receipts that its code compares with, and 0, ascending."""
        return tuple(sorted({0}.union(*map(_receipts_in, code_of(self.root)))))

    def names(self, request: Request, receipt: int) -> frozenset[str]:
        """The kernels that the generator lists for ``receipt``, over all its APIs; cached after the first call.

        Raises:
            GeneratorError: it fails, takes too long or prints something else, or its names are of another revision.
        """
        spec = request.spec
        options = self._options(str(spec.arch), request.variant, receipt)
        if options not in self._listed:
            listed = self.lists(str(spec.arch), request.variant, [receipt], lambda done: None)
            self._listed[options] = frozenset(listed[receipt])
        names = self._listed[options]
        if spec.revision == self.revision:
            self._check_form(names)
        return names

    def lists(
        self, arch: str, variant: str, receipts: Sequence[int], on_progress: Callable[[float], None]
    ) -> Mapping[int, Sequence[str]]:
        """As :meth:`catalog.build.generators.Generator.lists`; several APIs and receipts are asked at a time."""
        stop, asked = threading.Event(), list(product(receipts, self.apis))
        with (
            tempfile.TemporaryDirectory(prefix="catalog-lists-") as scratch,
            ThreadPoolExecutor(min(len(asked), os.cpu_count() or 1)) as pool,
        ):

            def run(receipt: int, api: str) -> list[str]:
                return self._list(api, self._options(arch, variant, receipt), Path(scratch, f"{receipt}.{api}"), stop)

            runs = {pool.submit(run, receipt, api): receipt for receipt, api in asked}
            try:
                for ended, one in enumerate(as_completed(runs), start=1):
                    one.result()
                    on_progress(ended / len(asked))
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
            lists: dict[int, list[str]] = {receipt: [] for receipt in receipts}
            for one, receipt in runs.items():
                lists[receipt] += one.result()
        return lists

    def _options(self, arch: str, variant: str, receipt: int) -> tuple[str, ...]:
        targets = (_TARGETS, arch) if self.takes_targets else ()
        return (*targets, "--mask", variant, "--receipt", str(receipt))

    def _list(self, api: str, options: tuple[str, ...], scratch: Path, stop: threading.Event) -> list[str]:
        scratch.mkdir()
        command = [sys.executable, str(self.path), "--api", api, "--list_blobs", f"{api}.txt", *options]
        output = run_generator(command, scratch, self.timeout, stop)
        listed = scratch / f"{api}.txt"
        if not listed.is_file() or not listed.stat().st_size:
            raise GeneratorError(
                f"{self.path} succeeded but listed nothing for API {api}, not even its API source.{last_lines(output)}",
                hint=f"Run it yourself: {shlex.join(command)}",
            )
        return list(_kernels(listed.read_text(encoding="utf-8", errors="replace"), self.path, api))

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
            f"{path} is not an FMHA generator that the catalog knows: it takes no {', no '.join(lacks)}."
            f"{last_lines(shown)}",
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


def _receipts_in(path: Path) -> Iterator[int]:
    """The whole numbers that a Python file compares the receipt with.

    Raises:
        GeneratorError: the file is not Python.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise GeneratorError(f"{path} cannot be read as Python: {error}", hint="Is the checkout complete?") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == _RECEIPT:
            constants = (one for compared in node.comparators for one in ast.walk(compared))
            yield from (one.value for one in constants if isinstance(one, ast.Constant) and type(one.value) is int)


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
