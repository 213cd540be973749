"""The columns of the view ``kernels``: what a query may use, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from catalog.schema.traits import Trait, Traits


class Column(NamedTuple):
    """One column: SQL type, domain and default in words (empty: none), meaning."""

    name: str
    type: str
    domain: str
    default: str
    meaning: str


_IDENTITY = (
    Column("id", "TEXT", "64 hex digits", "", "SHA-256 of the kernel's canonical JSON"),
    Column("name", "TEXT", "text", "", "upstream's canonical name; unique per arch, revision, mask_impl and space"),
    Column("arch", "TEXT", "see catalog doctor", "", "compile target"),
    Column(
        "revision", "TEXT", "2026-05, native", "", "upstream codegen that the row reproduces; native: our own kernels"
    ),
    Column(
        "space",
        "TEXT",
        "ck, native, rules, exhaustive",
        "",
        "enumeration that the row comes from; ck: upstream's codegen",
    ),
    Column("mask_impl", "TEXT", "generic, simplified", "", "upstream's mask classes: no/causal/generic, or no/mask"),
    Column("target", "TEXT", "text", "", "codegen target that upstream appends to the name"),
)

_SELECTION = (
    Column("hw_valid", "INTEGER", "0, 1", "", "the hardware can run it; selection skips the others"),
    Column(
        "dispatch_order", "INTEGER", "integer >= 0", "", "place in upstream's dispatch order within its enumeration"
    ),
)

_STATE = (
    Column("dispatcher_name", "TEXT", "text", "", "what CK's dispatcher calls it; empty for the spaces ck and native"),
    Column(
        "receipts",
        "TEXT",
        "numbers separated by spaces",
        "",
        "receipts that list it; table kernel_receipt has a row each",
    ),
    Column("built", "INTEGER", "0, 1", "", "a library of it is in the cache"),
    Column("best_ms", "REAL", "number, or NULL", "", "best measured median over all problems, in ms"),
)

BUILD = (
    Column("isa", "TEXT", "text, or NULL", "", "instruction set that its newest library was compiled for"),
    Column("compile_s", "REAL", "number, or NULL", "", "seconds that compiling its newest library took"),
    Column("registers", "INTEGER", "integer >= 0, or NULL", "", "vector registers of a thread"),
    Column("acc_registers", "INTEGER", "integer >= 0, or NULL", "", "matrix accumulator registers of a thread"),
    Column("scalar_registers", "INTEGER", "integer >= 0, or NULL", "", "scalar registers of a wave"),
    Column("spills", "INTEGER", "integer >= 0, or NULL", "", "registers that live in memory"),
    Column("scratch_bytes", "INTEGER", "integer >= 0, or NULL", "", "private memory of a thread"),
    Column(
        "shared_bytes",
        "INTEGER",
        "integer >= 0, or NULL",
        "",
        "shared memory (LDS) of a block; AMD: what is static of it",
    ),
    Column("occupancy", "INTEGER", "integer >= 1, or NULL", "", "waves a SIMD that registers and LDS leave room for"),
    Column("code_bytes", "INTEGER", "integer >= 0, or NULL", "", "machine code in its newest library"),
    Column("stack_bytes", "INTEGER", "integer >= 0, or NULL", "", "largest stack frame of a function, on CPUs"),
)
"""What the compiler knows of a row's newest library: columns of table ``artifact`` too. NULL where there is no library,
or no such thing on the target."""


def _of_trait(trait: Trait) -> Column:
    default = "" if trait.default is None else str(int(trait.default) if trait.kind == "bool" else trait.default)
    return Column(trait.name, trait.sql_type, trait.domain, default, trait.meaning)


def columns_of(traits: Traits) -> Iterator[Column]:
    """Every column of the view of an operation's kernels, in order."""
    yield from _IDENTITY
    yield from (_of_trait(trait) for trait in traits.values() if trait.name not in traits.later)
    yield from _SELECTION
    yield from (_of_trait(traits[name]) for name in traits.later)  # where a migration can add a column
    yield from _STATE
    yield from BUILD
