"""Lineages: which enumeration rows come from, and the columns that say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

LINEAGE = ("arch", "revision", "space", "mask_impl")
"""The columns of a lineage in the registry, in the order of its fields."""


@dataclass(frozen=True, slots=True, order=True)
class Lineage:
    """The enumeration that rows come from.

    Attributes:
        arch: the compile target.
        revision: the upstream codegen that the rows reproduce; ``native``: our own kernels.
        space: the enumeration: ``ck``, ``native``, or one of the sweeps.
        variant: the choice that upstream's generator leaves open; of attention, the mask implementation.
    """

    arch: str
    revision: str
    space: str
    variant: str

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Lineage:
        """The lineage of a row that has the columns :data:`LINEAGE`; others are ignored."""
        return cls(*(row[column] for column in LINEAGE))

    def columns(self, variant: str) -> dict[str, str]:
        """The value of each column, where that of the variant has an operation's own word for it."""
        return {"arch": self.arch, "revision": self.revision, "space": self.space, variant: self.variant}

    @property
    def parameters(self) -> dict[str, str]:
        """The value of each of :data:`LINEAGE`: a part of a row, and the parameters of :func:`of_lineage`."""
        return self.columns(LINEAGE[-1])

    def __str__(self) -> str:
        return " ".join(self.parameters.values())


class Wanted(NamedTuple):
    """A lineage as a caller asks for it; the catalog's file says which one that is.

    Attributes:
        arch: as :attr:`Lineage.arch`, or ``host`` for this machine's CPU.
        revision: None: the default one, of those that the arch has.
        variant: as :attr:`Lineage.variant`.
    """

    arch: str
    revision: str | None = None
    variant: str = "generic"


def of_lineage(table: str = "") -> str:
    """The SQL condition that selects the rows of ``table``, by default the only one, of a lineage's parameters."""
    prefix = table and f"{table}."
    return " AND ".join(f"{prefix}{column} = :{column}" for column in LINEAGE)
