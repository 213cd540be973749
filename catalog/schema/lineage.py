"""Lineages: the enumeration that rows come from, and the columns that identify it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

LINEAGE = ("operation", "arch", "revision", "space", "variant")
"""The columns of a lineage in the registry, in the order of its fields."""


OWN_SPACES = ("ck", "native", "tile_engine")
"""Spaces of the specs in the revisions' own folders: upstream's generators of attention and GEMM, our own kernels."""


@dataclass(frozen=True, slots=True, order=True)
class Lineage:
    """The enumeration that rows come from.

    Attributes:
        operation: name of the operation that the kernels compute.
        arch: the compile target.
        revision: the upstream codegen that the rows reproduce; ``native``: our own kernels.
        space: the enumeration: ``ck``, ``native``, or one of the sweeps.
        variant: the choice that upstream's generator leaves open; for attention, the mask implementation.
        base: for a revision adopted from a checkout, the nearest known revision; otherwise empty. It describes the
            lineage, but does not identify it.
    """

    operation: str
    arch: str
    revision: str
    space: str
    variant: str
    base: str = field(default="", compare=False)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Lineage:
        """The lineage of a row with the columns :data:`LINEAGE` and ``base``; others are ignored."""
        return cls(**{column: row[column] for column in (*LINEAGE, "base")})

    @property
    def known(self) -> str:
        """The revision whose rules and name grammar apply: the base of an adopted revision, otherwise the revision."""
        return self.base or self.revision

    @property
    def wanted(self) -> Wanted:
        """A request for exactly this lineage."""
        return Wanted(self.arch, self.revision, self.variant, self.operation)

    def columns(self, variant: str) -> dict[str, str]:
        """The value of each column; ``variant`` is the operation's own name for the column of the variant."""
        return {"arch": self.arch, "revision": self.revision, "space": self.space, variant: self.variant}

    @property
    def parameters(self) -> dict[str, str]:
        """The value of each of :data:`LINEAGE`: columns of a row, and the parameters of :func:`of_lineage`."""
        return {"operation": self.operation, **self.columns("variant")}

    def __str__(self) -> str:
        return " ".join(self.columns("variant").values())


class Keywords(TypedDict):
    """The keywords by which callers of :class:`catalog.Catalog` ask for a lineage of a problem's operation."""

    arch: str
    revision: str | None
    mask_impl: str


class Wanted(NamedTuple):
    """A lineage as a caller asks for it; the catalog's file resolves what is left open.

    Attributes:
        arch: as :attr:`Lineage.arch`, or ``host`` for this machine's CPU.
        revision: None for the arch's default revision.
        variant: as :attr:`Lineage.variant`.
        operation: as :attr:`Lineage.operation`.
    """

    arch: str
    revision: str | None = None
    variant: str = "generic"
    operation: str = "attention"

    @property
    def keywords(self) -> Keywords:
        """The same in keywords, without the operation."""
        return {"arch": self.arch, "revision": self.revision, "mask_impl": self.variant}


def of_lineage(table: str = "") -> str:
    """SQL condition that selects the rows of ``table`` (by default the only one) of one lineage.

    The lineage is given by its parameters. ``table`` has a column ``lineage``, the id of a row of table ``lineage``.
    """
    is_it = " AND ".join(f"of_them.{column} = :{column}" for column in LINEAGE)
    return f"{table and f'{table}.'}lineage = (SELECT id FROM lineage AS of_them WHERE {is_it})"


BASE = "coalesce((SELECT base FROM adopted WHERE adopted.lineage = lineage.id), '')"
"""SQL expression for :attr:`Lineage.base`, over table ``lineage``."""


LINEAGE_OF_POPULATION = "population JOIN lineage ON lineage.id = population.lineage"
"""The table ``population`` joined with the columns :data:`LINEAGE`."""
