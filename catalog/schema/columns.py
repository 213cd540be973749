"""The columns of a view of kernels, described in words for queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from catalog.schema.traits import Trait

if TYPE_CHECKING:
    from catalog.ops.protocol import Operation


class Column(NamedTuple):
    """One column: SQL type, domain and default in words (empty: none), meaning."""

    name: str
    type: str
    domain: str
    default: str
    meaning: str


IDENTITY = (
    Column("id", "TEXT", "64 hex digits", "", "SHA-256 of the kernel's canonical JSON"),
    Column("name", "TEXT", "text", "", "canonical name, upstream's where upstream has one; unique in its enumeration"),
    Column("arch", "TEXT", "see catalog doctor", "", "compile target"),
    Column(
        "revision", "TEXT", "2026-05, native", "", "upstream codegen that the row reproduces; native: our own kernels"
    ),
    Column(
        "space",
        "TEXT",
        "ck, native, rules, exhaustive",
        "",
        "enumeration that made the row; ck: upstream's codegen",
    ),
)

BASE = Column(
    "base", "TEXT", "2025-07, 2026-05", "", "nearest known revision of a row from an adopted checkout; empty for others"
)

TARGET = Column("target", "TEXT", "text", "", "codegen target that upstream appends to the name")

SELECTION = (
    Column(
        "hw_valid",
        "INTEGER",
        "0, 1",
        "",
        "the hardware can run it, and it is not known to be wrong; selection skips rows with 0",
    ),
    Column(
        "dispatch_order", "INTEGER", "integer >= 0", "", "place in upstream's dispatch order within its enumeration"
    ),
)

_STATE = (
    Column(
        "receipts",
        "TEXT",
        "numbers separated by spaces",
        "",
        "receipts that list it; table kernel_receipt has one row for each",
    ),
    Column("built", "INTEGER", "0, 1", "", "its library is in the cache"),
    Column("best_ms", "REAL", "number, or NULL", "", "best measured median over all problems, in ms"),
)

BUILD = (
    Column("isa", "TEXT", "text, or NULL", "", "instruction set that its newest library was compiled for"),
    Column("compile_s", "REAL", "number, or NULL", "", "seconds that compiling its newest library took"),
    Column("registers", "INTEGER", "integer >= 0, or NULL", "", "vector registers of a thread"),
    Column("acc_registers", "INTEGER", "integer >= 0, or NULL", "", "matrix accumulator registers of a thread"),
    Column("scalar_registers", "INTEGER", "integer >= 0, or NULL", "", "scalar registers of a wave"),
    Column("spills", "INTEGER", "integer >= 0, or NULL", "", "registers spilled to memory"),
    Column("scratch_bytes", "INTEGER", "integer >= 0, or NULL", "", "private memory of a thread"),
    Column(
        "shared_bytes",
        "INTEGER",
        "integer >= 0, or NULL",
        "",
        "shared memory (LDS) of a block; on AMD, the static part",
    ),
    Column("occupancy", "INTEGER", "integer >= 1, or NULL", "", "waves per SIMD that registers and LDS allow"),
    Column("code_bytes", "INTEGER", "integer >= 0, or NULL", "", "machine code in its newest library, in bytes"),
    Column("stack_bytes", "INTEGER", "integer >= 0, or NULL", "", "largest stack frame of a function, on CPUs"),
    Column(
        "device_functions",
        "INTEGER",
        "integer >= 1, or NULL",
        "",
        "GPU kernels in its newest library; of registers, spills and memory, the maxima are recorded",
    ),
)
"""What the compiler reports for a row's newest library: also columns of table ``artifact``. NULL where there is no
library, or the target has no such resource."""


def _of_trait(trait: Trait) -> Column:
    default = "" if trait.default is None else str(int(trait.default) if trait.kind == "bool" else trait.default)
    return Column(trait.name, trait.sql_type, trait.domain, default, trait.meaning)


def columns_of(operation: Operation) -> Iterator[Column]:
    """Every column of the view of an operation's kernels, in order."""
    traits = operation.traits
    yield from IDENTITY
    yield operation.variant
    yield BASE
    yield TARGET
    yield from (_of_trait(trait) for trait in traits.values() if trait.name not in traits.later)
    yield from SELECTION
    yield from (_of_trait(traits[name]) for name in traits.later)  # last, where ALTER TABLE ADD COLUMN puts them
    yield from operation.columns
    yield from _STATE
    yield from BUILD
