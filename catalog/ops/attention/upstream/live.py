"""Live parity and adoption: the names that the generator of the user's own CK checkout lists.

:mod:`catalog.build.generators` runs it; this module knows CK's FMHA example: where it is, its options, its lists.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path, PurePath

from catalog.build.generators import Generator, Run, code_of, digest_of_code, find_folders, last_lines, run_generator
from catalog.errors import GeneratorError, UsageError

_EXAMPLE = "example/ck_tile/01_fmha"
_LISTING = "kernels.txt"
_OPTIONS = ("--api", "--list_blobs", "--mask", "--receipt")
_TARGETS = "--targets"
_TARGET_SUFFIX = re.compile(r"_gfx[0-9a-z]+$")
_WITHOUT_TARGET = "fmha_batch_prefill_"  # at every revision
_API_SOURCE = re.compile(r"_api(_gfx[0-9a-z]+)?$")
_NAMED_SQUANT = b"F_squant"
"""The generator's field for the scales of a forward kernel, until names had several kinds of scales."""
_RECEIPT = "receipt"  # the variable that the code of every API compares


@dataclass(frozen=True)
class FmhaGenerator(Generator):
    """The generator of a CK checkout.

    It is run when something about it is needed; that raises a GeneratorError if it is not CK Tile's FMHA generator.
    """

    apis: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The program."""
        return self.root / "generate.py"

    @cached_property
    def takes_targets(self) -> bool:
        """Whether it lists kernels for a compile target, rather than the same ones for all."""
        with tempfile.TemporaryDirectory(prefix="catalog-parity-") as scratch:
            command = [sys.executable, str(self.path), "--help"]
            shown = run_generator(command, Path(scratch), self.timeout, threading.Event())
        lacks = [option for option in _OPTIONS if option not in shown]
        if lacks:
            raise GeneratorError(
                f"{self.path} is not an FMHA generator that the catalog knows: it takes no {', no '.join(lacks)}."
                f"{last_lines(shown)}",
                hint=f"It must be {_EXAMPLE}/generate.py of a composable_kernel checkout, of 2024-10 or later.",
            )
        return _TARGETS in shown

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
        forward = _ops(self.root) / "fmha_fwd.py"
        if forward.is_file() and _NAMED_SQUANT in forward.read_bytes():
            return "2025-11", f"takes {_TARGETS} and calls the scales of forward kernels squant"
        return "2026-05", f"takes {_TARGETS}"

    @cached_property
    def digest(self) -> str:
        """Hash of the generator's own files, which determine its output."""
        return digest_of_code(self.root, ".py")

    @cached_property
    def receipts(self) -> tuple[int, ...]:
        """The receipts that its code compares with, and 0, ascending."""
        return tuple(sorted({0}.union(*map(_receipts_in, code_of(self.root, ".py")))))

    def runs(self, arch: str, variant: str, receipts: Sequence[int]) -> list[Run]:
        """A run for each receipt and API."""
        targets = (_TARGETS, arch) if self.takes_targets else ()
        program = (sys.executable, str(self.path))
        return [
            Run(
                (
                    *program,
                    "--api",
                    api,
                    "--list_blobs",
                    _LISTING,
                    *targets,
                    "--mask",
                    variant,
                    "--receipt",
                    str(receipt),
                ),
                _LISTING,
                f"API {api}",
                least=1,
                receipt=receipt,
            )
            for receipt, api in product(receipts, self.apis)
        ]

    def kernel(self, line: str) -> str | None:
        """The name in the path of a source; None for the source of an API, which every list has."""
        path = PurePath(line.strip())
        if path.suffix != ".cpp" or not path.stem.startswith("fmha_"):
            raise ValueError("the path of a kernel")
        return None if _API_SOURCE.search(path.stem) else path.stem

    def check(self, names: Collection[str]) -> None:
        """Check that names carry a target exactly if the command line takes one."""
        suffixed = (name for name in names if not name.startswith(_WITHOUT_TARGET))
        wrong = [name for name in suffixed if bool(_TARGET_SUFFIX.search(name)) != self.takes_targets]
        if wrong:
            carries = "carry no target" if self.takes_targets else "carry a target"
            raise GeneratorError(
                f"{self.path} has the command line of revision {self.revision}, but its names {carries}: {min(wrong)}",
                hint="It lies between the revisions that the catalog has; --revision names another to compare with.",
            )


def find_generator(root: Path, timeout: float) -> FmhaGenerator:
    """The generator of the CK checkout at ``root``; ``timeout`` is in seconds, for each API.

    ``root`` may also be a folder of the checkout, its generate.py, or a package that contains a checkout: flash-attn's
    source distribution, amd-aiter, rocm-libraries, a ROCm installation.

    Raises:
        UsageError: there is none, or there are several.
    """
    found = find_folders(root, _EXAMPLE, lambda folder: _ops(folder).is_dir() and (folder / "generate.py").is_file())
    if len(found) > 1:
        raise UsageError(f"{root} holds several CK checkouts", hint="Name one: " + ", ".join(map(str, found)))
    if not found:
        why = f"A composable_kernel checkout has it in {_EXAMPLE}, with a folder codegen beside it."
        if (root.expanduser() / "include" / "ck_tile").is_dir():
            why = "CK's headers are there, its generator is not: ROCm packages leave it out."
        raise UsageError(f"{root} holds no FMHA generator of CK Tile", hint=why)
    (folder,) = found
    apis = tuple(sorted(m.name.removeprefix("fmha_") for m in pkgutil.iter_modules([str(_ops(folder))])))
    if not apis:
        raise UsageError(f"{_ops(folder)} has no module: no API to list", hint="Is the checkout complete?")
    return FmhaGenerator(folder, timeout, apis)


def _ops(example: Path) -> Path:
    """The folder whose modules are the APIs of the generator."""
    return example / "codegen" / "ops"


def _receipts_in(path: Path) -> Iterator[int]:
    """The whole numbers that a Python file compares the receipt with.

    Raises:
        GeneratorError: the file is not Python.
    """
    try:
        code = path.read_bytes()
        tree = ast.parse(code if _RECEIPT.encode() in code else b"", str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise GeneratorError(f"{path} cannot be read as Python: {error}", hint="Is the checkout complete?") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == _RECEIPT:
            constants = (one for compared in node.comparators for one in ast.walk(compared))
            yield from (one.value for one in constants if isinstance(one, ast.Constant) and type(one.value) is int)
