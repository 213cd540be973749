"""Live parity and adoption: the names that the tile engine of the user's own CK checkout lists.

:mod:`catalog.build.generators` runs it; this module knows the tile engine: where it is, its options, its lists.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from catalog.build.generators import Generator, Run, digest_of_code, find_folders
from catalog.errors import GeneratorError, UsageError
from catalog.files import parse_json
from catalog.ops.gemm.traits import Elementwise, Family

_ENGINE = "tile_engine/ops"
_BUILDERS = {
    Family.UNIVERSAL: "gemm",
    Family.MULTI_D: "gemm_multi_d",
    Family.PRESHUFFLE: "gemm_preshuffle",
}
"""The folder of each family, which begins the names of its files."""

_NEWER = "gemm/gemm_universal"
_LAYOUTS = ("rcr", "rrr", "crr", "ccr")
_TYPES = ("fp16", "bf16", "fp8", "bf8")
_FUNCTIONS = {
    "mul": Elementwise.MULTI_D_MULTIPLY,
    "add": Elementwise.MULTI_D_ADD,
    "passthrough": Elementwise.PASS_THROUGH,
}
"""The builder's words for the functions that combine the product with its two D tensors; names leave them out."""


@dataclass(frozen=True)
class TileEngine(Generator):
    """The builders of a CK checkout, each with its default configuration."""

    @property
    def revision(self) -> str:
        """The catalog's revision that has these folders."""
        return "2025-11"

    @property
    def about(self) -> str:
        """What is asked, and which revision has these folders."""
        there = ", ".join(self._builder(family).name for family in self._families)
        return f"{self.root}: {there} list kernels; the folders are those of revision {self.revision}."

    @cached_property
    def digest(self) -> str:
        """Hash of the builders and their configurations."""
        return digest_of_code(self.root, ".py", ".json")

    @property
    def _families(self) -> list[Family]:
        return [family for family in _BUILDERS if self._builder(family).is_file()]

    def _builder(self, family: Family) -> Path:
        name = _BUILDERS[family]
        return self.root / name / f"{name}_instance_builder.py"

    def runs(self, arch: str, variant: str, receipts: Sequence[int]) -> list[Run]:
        """A run for each family, element type and layout; for multi-D also for each elementwise function."""
        return [run for family in self._families for run in self._runs(family, arch)]

    def _runs(self, family: Family, arch: str) -> Iterator[Run]:
        builder = self._builder(family)
        config = builder.parent / "configs" / "default_config.json"
        common = {"family": str(family), **_traits_of(family, config)}
        several = family is Family.MULTI_D
        types = _TYPES[:1] if several else _TYPES
        layouts = _LAYOUTS[:1] if family is Family.PRESHUFFLE else _LAYOUTS
        for dtype, layout, function in product(types, layouts, _FUNCTIONS if several else ("",)):
            traits = {**common, "dtype": dtype, "layout": layout}
            options = {"--working_path": ".", "--gpu_target": arch, "--datatype": dtype, "--config_json": str(config)}
            if several:
                traits |= {"layout": f"{layout}r", "num_d": 2, "elementwise": str(_FUNCTIONS[function])}
                options["--elementwise_function"] = function
            options["--layout"] = traits["layout"]
            words = (word for option in options.items() for word in option)
            yield Run(
                (sys.executable, str(builder), *words, "--list_kernels"),
                f"{_BUILDERS[family]}_kernel_list.txt",
                " ".join([family, dtype, traits["layout"], *filter(None, [function])]),
                traits=traits,
            )

    def kernel(self, line: str) -> str | None:
        """The first column of a line; None for an empty line."""
        name = line.partition("|")[0]
        if name and not re.fullmatch(r"\w+", name):
            raise ValueError("a kernel and its configuration")
        return name or None


def _traits_of(family: Family, config: Path) -> Mapping[str, Any]:
    """The traits that a configuration states for all kernels, and that names leave out.

    Raises:
        GeneratorError: it is not a configuration.
    """
    try:
        stated = parse_json(config.read_bytes())
        traits: dict[str, Any] = {"block_per_cu": int(stated.get("k_block_per_cu") or 1)}
        return traits | ({"permute_n": bool(stated.get("permute_n"))} if family is Family.PRESHUFFLE else {})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise GeneratorError(f"{config}: not a configuration: {error}", hint="Is the checkout complete?") from None


def find_tile_engine(root: Path, timeout: float) -> TileEngine:
    """The tile engine of the CK checkout at ``root``, of one around it, or of a package that contains one.

    ``timeout`` is in seconds, for each list.

    Raises:
        UsageError: there is none, there are several, or its folders are those of another revision.
    """
    found = find_folders(root, _ENGINE, _is_engine)
    if len(found) > 1:
        raise UsageError(f"{root} holds several tile engines", hint="Name one: " + ", ".join(map(str, found)))
    if not found:
        hint = f"A composable_kernel checkout has it in {_ENGINE}; packages of headers leave it out."
        raise UsageError(f"{root} holds no tile engine of CK", hint=hint)
    engine = TileEngine(found[0], timeout)
    if (engine.root / _NEWER).is_dir():
        hint = f"The catalog runs builders of {engine.revision}; newer lists are compared without --ck-root."
        raise UsageError(f"{engine.root} has {_NEWER}, which the catalog cannot run yet", hint=hint)
    return engine


def _is_engine(folder: Path) -> bool:
    builders = (folder / name / f"{name}_instance_builder.py" for name in _BUILDERS.values())
    return (folder / _NEWER).is_dir() or any(builder.is_file() for builder in builders)
