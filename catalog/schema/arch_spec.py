"""Arch specs: the facts of data/arch_specs as models.

A spec says, as data, which tiles an arch has, which pipeline variants with which feature domains, which constraints
filter their product, which receipt lists what, and how a problem selects a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from catalog.errors import UsageError
from catalog.messages import did_you_mean
from catalog.ops.attention.names import parse_tile
from catalog.ops.attention.traits import TRAITS, Dtype, Family
from catalog.schema.lineage import Lineage

MASK_OF_IMPL = "*"
"""Domain of the mask trait: every mask of the mask implementation that is populated."""

TraitValue = bool | int | str
Domain = TraitValue | list[TraitValue]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _check_traits(traits: dict[str, Domain]) -> dict[str, Domain]:
    for name, domain in traits.items():
        trait = TRAITS.get(name)
        if trait is None:
            raise ValueError(f"no trait is called {name!r}{did_you_mean(name, TRAITS)}")
        if domain == MASK_OF_IMPL and name == "mask":
            continue
        for value in domain if isinstance(domain, list) else [domain]:
            fits = isinstance(value, bool) == (trait.kind == "bool") and (
                value in trait.values if trait.values else isinstance(value, str) == (trait.kind == "text")
            )
            if not fits and trait.kind == "bool":
                raise ValueError(f"{name} is a boolean: true or false, not {value!r}")
            if not fits:
                raise ValueError(f"{name} cannot be {value!r}; allowed: {trait.domain}")
    return traits


class Rule(_Spec):
    """A named SQL boolean expression with its reason and source; ``quirk`` explains upstream's oddities."""

    id: str
    expr: str
    reason: str
    source: str
    quirk: str | None = None
    spaces: list[str] | None = Field(None, description="of several spaces, those that it holds in (default: all)")


class Invariant(Rule):
    """A rule that every kernel of its families meets, whatever made it: a check on the enumerations."""

    families: list[Family] = Field([], description="the families that it concerns (default: all)")

    def concerns(self, family: Family) -> bool:
        """Whether the rule is about ``family``."""
        return not self.families or family in self.families


class Receipt(_Spec):
    """One of upstream's numbered product subsets; several receipts may share a name."""

    receipt: int
    names: list[str]
    about: str


class TileGroup(_Spec):
    """Tiles of one head dim pair, in upstream's order, written in CK's tile notation."""

    dtype: list[Dtype]
    hdim: str = Field(pattern=r"^\d+x\d+$", description="hdim_q x hdim_v")
    traits: dict[str, TraitValue] = {}
    tiles: list[str]

    @field_validator("traits")
    @classmethod
    def _traits(cls, traits: dict[str, TraitValue]) -> dict[str, TraitValue]:
        _check_traits(dict(traits))
        return traits

    @field_validator("tiles")
    @classmethod
    def _tiles(cls, tiles: list[str]) -> list[str]:
        for tile in tiles:
            try:
                parse_tile(tile)
            except UsageError as error:
                raise ValueError(str(error)) from None
        return tiles

    def rows(self) -> Iterator[dict[str, TraitValue]]:
        """The traits of every tile, one mapping a dtype."""
        hdim_q, hdim_v = map(int, self.hdim.split("x"))
        for dtype in self.dtype:
            for tile in self.tiles:
                yield {"dtype": dtype.value, "hdim_q": hdim_q, "hdim_v": hdim_v, **parse_tile(tile), **self.traits}


class Variant(_Spec):
    """A pipeline with its paddings and the domain of each feature; ``when`` says for which tiles and features."""

    id: str
    dtype: list[Dtype]
    domain: str | None = Field(None, description="name of an entry of the enumeration's `domains`")
    traits: dict[str, Domain] = {}
    when: str | None = None
    spaces: list[str] | None = Field(None, description="of several spaces, those that have it (default: all)")
    receipts: list[int] | None = Field(None, description="only these receipts list its combinations (default: any)")
    quirk: str | None = None

    @field_validator("traits")
    @classmethod
    def _traits(cls, traits: dict[str, Domain]) -> dict[str, Domain]:
        return _check_traits(traits)


def _check_names(traits: Any) -> None:
    for name in traits:
        if name not in TRAITS:
            raise ValueError(f"no trait is called {name!r}{did_you_mean(name, TRAITS)}")


class Yield(_Spec):
    """One family of kernels that an enumeration gives: its combinations, projected onto the traits of the family."""

    family: Family
    where: str | None = None
    keep: list[str] | None = Field(None, description="traits taken over; the others get their default (default: all)")
    drop: list[str] = Field([], description="traits set back to their default")
    set: dict[str, str] = Field({}, description="traits computed by SQL from the combination")

    @field_validator("keep", "drop", "set")
    @classmethod
    def _names(cls, traits: Any) -> Any:
        _check_names(traits or ())
        return traits


class Axis(_Spec):
    """Values that a sweep takes for some dtypes, written as in names: 128x128, 32x32x16."""

    dtype: list[Dtype]
    values: list[str]

    @field_validator("values")
    @classmethod
    def _values(cls, values: list[str]) -> list[str]:
        for value in values:
            if not re.fullmatch(r"\d+(x\d+)*", value):
                raise ValueError(f"{value!r}: numbers joined by x")
        return values

    def rows(self) -> Iterator[tuple[str | int, ...]]:
        """The dtype, then the numbers of every value."""
        for dtype in self.dtype:
            for value in self.values:
                yield (dtype.value, *map(int, value.split("x")))


class Sweep(_Spec):
    """Tiles as a product instead of a table: head dims x warp tiles x block tiles; constraints leave the valid ones."""

    hdim: list[Axis]
    warp: list[Axis]
    tile_m0: list[int]
    tile_n0: list[int]
    tile_k0: list[int]


class Enumeration(_Spec):
    """Tiles x variants x feature domains, filtered by constraints, projected onto families."""

    source: str | None = None
    about: str | None = None
    spaces: list[str] | None = Field(None, description="of several spaces, those that have it (default: all)")
    target: str = ""
    tiles: list[TileGroup] = []
    tiles_of: str | None = Field(None, description="the enumeration whose target and tiles it shares")
    first_tiles: int | None = Field(
        None, ge=1, description="of shared tiles, only so many of each group (default: all)"
    )
    sweep: Sweep | None = None
    swept: list[str] = Field([], description="traits that a sweep file may restrict here")
    domains: dict[str, dict[str, Domain]] = {}
    variants: list[Variant] = []
    derived: dict[str, str] = Field({}, description="traits computed by SQL from the others")
    constraints: list[Rule] = []
    receipts: dict[int, str] = {}
    receipt_quirks: dict[int, str] = {}
    yields: list[Yield] = []
    order: str = Field("0", description="SQL integer: upstream's dispatch order, before tile and variant order")

    @model_validator(mode="after")
    def _own_or_shared_tiles(self) -> Enumeration:
        if self.tiles_of is not None and (self.tiles or self.target):
            raise ValueError("tiles_of goes with neither tiles nor target")
        if self.tiles_of is None and self.first_tiles is not None:
            raise ValueError("first_tiles needs tiles_of")
        return self

    @field_validator("domains")
    @classmethod
    def _domains(cls, domains: dict[str, dict[str, Domain]]) -> dict[str, dict[str, Domain]]:
        for traits in domains.values():
            _check_traits(traits)
        return domains

    @field_validator("derived")
    @classmethod
    def _derived(cls, derived: dict[str, str]) -> dict[str, str]:
        _check_names(derived)
        return derived


class Select(_Spec):
    """How a problem finds a kernel of one family: applicability rules and the order among the applicable."""

    rules: list[Rule] = []
    order: list[str] = Field([], description="SQL over kernel columns and :parameters of the problem")


class Hardware(_Spec):
    """Facts of the machine that rules and selection use."""

    vendor: str
    compute_units: int | None = None
    lds_bytes: int | None = None
    wavefront: int | None = None
    isa: str | None = Field(None, description="what the compiler is told, never `native`")


class ArchSpec(_Spec):
    """A whole spec: one file, or several merged along ``extends``."""

    about: str | None = None
    extends: str | None = None
    arch: str | None = None
    revision: str | None = None
    space: str | None = None
    spaces: list[str] = Field([], description="sweeps: the spaces that the file describes, one of which is asked for")
    reference: str | None = Field(None, description="the target that data/parity calls it by (default: arch)")
    hardware: Hardware | None = None
    mask_impls: dict[str, list[str]] = {}
    receipts: list[Receipt] = []
    hw_rules: list[Rule] = []
    header_rules: list[Rule] = Field([], description="what the revision's own headers compile")
    invariants: list[Invariant] = []
    enumerations: dict[str, Enumeration] = {}
    sweeps: dict[str, list[str]] = Field({}, description="the enumerations of every variant of sweep files")
    select: dict[Family, Select] = {}

    @model_validator(mode="after")
    def _references_exist(self) -> ArchSpec:
        for name, enumeration in self.enumerations.items():
            if enumeration.tiles_of is not None and enumeration.tiles_of not in self.enumerations:
                raise ValueError(
                    f"enumerations.{name}: tiles_of names the enumeration {enumeration.tiles_of!r}; "
                    f"there are: {', '.join(self.enumerations)}"
                )
            for variant in enumeration.variants:
                if variant.domain is not None and self.extends is None and variant.domain not in enumeration.domains:
                    raise ValueError(
                        f"enumerations.{name}: variant {variant.id!r} names the domain {variant.domain!r}; "
                        f"there are: {', '.join(enumeration.domains) or 'none'}"
                    )
        return self

    def lineage(self, variant: str = "generic") -> Lineage:
        """The lineage of the rows that this spec gives for one of its mask implementations."""
        return Lineage(str(self.arch), str(self.revision), str(self.space), variant)

    def tiles_of(self, enumeration: Enumeration) -> tuple[str, list[TileGroup]]:
        """The target of an enumeration and its tiles, its own or those that it shares."""
        if enumeration.tiles_of is None:
            return enumeration.target, enumeration.tiles
        source = self.enumerations[enumeration.tiles_of]
        first = enumeration.first_tiles
        return source.target, [group.model_copy(update={"tiles": group.tiles[:first]}) for group in source.tiles]

    def yields_of(self, family: Family) -> dict[str, Yield]:
        """How each enumeration that gives kernels of ``family`` does so."""
        return {
            name: made
            for name, enumeration in self.enumerations.items()
            for made in enumeration.yields
            if made.family is family
        }

    @property
    def families(self) -> tuple[Family, ...]:
        """The families that have kernels."""
        return tuple(family for family in Family if self.yields_of(family))

    @property
    def receipt_numbers(self) -> tuple[int, ...]:
        """Every receipt, ascending."""
        return tuple(sorted(receipt.receipt for receipt in self.receipts))
