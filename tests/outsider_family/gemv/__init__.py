"""Vectors times matrices on the host CPU: a family of GEMM for products with a single row."""

from pathlib import Path

from catalog.build.describe import c_string
from catalog.ops.gemm.names import implied
from catalog.ops.gemm.traits import TRAITS
from catalog.ops.protocol import Family
from catalog.schema.grammar import Grammar
from catalog.schema.name_parts import Extents, Literal, Target, Word

HERE = Path(__file__).parent
FIXED = {"pipeline": "gemv", "scheduler": "default", "epilogue": "default", "general": True}
FIXED |= dict.fromkeys(("pad_m", "pad_n", "pad_k"), True)
NAME = (Literal("gemv"), Word("_", "dtype"), Word("_", "layout"), Extents("_n", ("tile_n",)), Target(r"_\w+"))


class Gemv(Family):
    """The family ``gemv``."""

    about = "GEMM with one row, on the host"
    specs = HERE / "specs"
    headers = {"gemv": HERE / "include"}
    beside = ("universal",)
    order = -1  # before the operation's own family, until they are measured

    def grammar(self, family, lineage):
        """A name shows three traits; the others follow from them or are the same in all kernels."""
        return Grammar(TRAITS, family, NAME, lambda row: implied(row | FIXED) | FIXED)

    def smoke_fields(self, problems, traits):
        """One row, and numbers of columns that no tile divides."""
        return [{**problem, "m": 1, "n": 37} for problem in problems]

    def emit(self, kernel, backend, memory):
        """The source of a row: its tile for the header that implements all rows."""
        launch = f"catalog::gemv::launch<{kernel.algorithm.tile_n}>(args)"
        return f"""\
// {kernel.name}
#include "gemv/gemv.hpp"
CATALOG_ENTRY_POINTS({c_string(kernel)}, catalog::no_workspace(args, size), {launch})
"""


FAMILY = Gemv()
