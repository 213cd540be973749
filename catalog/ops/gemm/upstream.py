"""Live parity: the names that the tile engine of the user's own CK checkout lists.

:mod:`catalog.build.generators` runs it; this module knows the tile engine: where it is, its options, its lists.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from catalog.build.generators import last_lines, run_generator
from catalog.errors import GeneratorError, UsageError
from catalog.ops.gemm.traits import Family
from catalog.rules.lists import Key, Listing, digest_of
from catalog.schema.lineage import Lineage

_ENGINE = "tile_engine/ops"
_PLACES = ("ops", _ENGINE, f"*/{_ENGINE}", f"*/*/{_ENGINE}", f"*/*/*/{_ENGINE}")
"""Places of the tile engine's operations below what users call their CK, most likely first."""

_BUILDERS = {
    Family.UNIVERSAL: "gemm",
    Family.MULTI_D: "gemm_multi_d",
    Family.PRESHUFFLE: "gemm_preshuffle",
}
"""The folder of each family, which begins the names of its files."""

_NEWER = "gemm/gemm_universal"
_OPTIONS = {Family.MULTI_D: ("--elementwise_function", "mul")}  # plays no part in the names
_LAYOUTS = ("rcr", "rrr", "crr", "ccr")
_TYPES = ("fp16", "bf16", "fp8", "bf8")


@dataclass(frozen=True)
class TileEngine:
    """The builders of a CK checkout: a :class:`~catalog.rules.lists.ListReference` that runs them."""

    folder: Path
    timeout: float

    @property
    def revision(self) -> str:
        """The catalog's revision that has these folders."""
        return "2025-11"

    @property
    def about(self) -> str:
        """What is asked, and which revision it is compared with."""
        there = ", ".join(self._builder(family).name for family in self._families)
        return f"{self.folder}: {there} list kernels; the folders are those of revision {self.revision}."

    @property
    def _families(self) -> list[Family]:
        return [family for family in _BUILDERS if self._builder(family).is_file()]

    def _builder(self, family: Family) -> Path:
        name = _BUILDERS[family]
        return self.folder / name / f"{name}_instance_builder.py"

    def keys(self, lineage: Lineage) -> Collection[Key]:
        """The lists that the builders of this revision make."""
        return [
            Key(family, dtype, layout)
            for family in self._families
            for dtype in (_TYPES[:1] if family is Family.MULTI_D else _TYPES)
            for layout in _layouts(family)
        ]

    def listing(self, lineage: Lineage, key: Key) -> Listing:
        """The names that the builder lists with its default configuration.

        Raises:
            GeneratorError: it fails, takes too long or lists nothing.
        """
        family = Family(key.family)
        builder = self._builder(family)
        with tempfile.TemporaryDirectory(prefix="catalog-parity-") as scratch:
            options = {
                "--working_path": scratch,
                "--gpu_target": lineage.arch,
                "--datatype": key.dtype,
                "--layout": key.layout,
                "--config_json": str(builder.parent / "configs" / "default_config.json"),
            }
            command = [sys.executable, str(builder), *(word for option in options.items() for word in option)]
            command += [*_OPTIONS.get(family, ()), "--list_kernels"]
            output = run_generator(command, Path(scratch), self.timeout, threading.Event())
            listed = Path(scratch) / f"{_BUILDERS[family]}_kernel_list.txt"
            if not listed.is_file():
                hint = f"Run it yourself: {shlex.join(command)}"
                raise GeneratorError(f"{builder} succeeded but wrote no {listed.name}.{last_lines(output)}", hint=hint)
            lines = listed.read_text(encoding="utf-8", errors="replace").splitlines()
        names = frozenset(line.partition("|")[0] for line in lines if line)
        return Listing(len(names), digest_of(names), names)


def find_tile_engine(root: Path, timeout: float) -> TileEngine:
    """The tile engine of the CK checkout at ``root``, or of a package that contains one.

    ``timeout`` is in seconds, for each list.

    Raises:
        UsageError: there is none, there are several, or its folders are those of another revision.
    """
    root = root.expanduser().resolve()
    folders = {root, *(folder for place in _PLACES for folder in root.glob(place))}
    found = {folder.resolve() for folder in folders if _is_engine(folder)}
    if len(found) > 1:
        raise UsageError(f"{root} holds several tile engines", hint="Name one: " + ", ".join(map(str, sorted(found))))
    if not found:
        hint = f"A composable_kernel checkout has it in {_ENGINE}; packages of headers leave it out."
        raise UsageError(f"{root} holds no tile engine of CK", hint=hint)
    (folder,) = found
    engine = TileEngine(folder, timeout)
    if (folder / _NEWER).is_dir():
        hint = f"The catalog runs builders of {engine.revision}; newer lists are compared without --ck-root."
        raise UsageError(f"{folder} has {_NEWER}, which the catalog cannot run yet", hint=hint)
    return engine


def _is_engine(folder: Path) -> bool:
    builders = (folder / name / f"{name}_instance_builder.py" for name in _BUILDERS.values())
    return (folder / _NEWER).is_dir() or any(builder.is_file() for builder in builders)


def _layouts(family: Family) -> tuple[str, ...]:
    if family is Family.MULTI_D:
        return tuple(f"{layout}r" for layout in _LAYOUTS)
    return _LAYOUTS[:1] if family is Family.PRESHUFFLE else _LAYOUTS
