"""Models of the arch specs in data/arch_specs.

A spec states, as data: the tiles of an arch, its pipeline variants with their feature domains, the constraints that
filter their product, which receipts list which kernels, and how a problem selects a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    ValidationInfo,
    field_validator,
    model_validator,
)

from catalog.errors import UsageError
from catalog.messages import did_you_mean
from catalog.ops import DEFAULT, operation
from catalog.ops.protocol import Operation
from catalog.schema.lineage import Lineage
from catalog.schema.relations import Relation, expanded
from catalog.schema.traits import Traits, TraitValue

if TYPE_CHECKING:
    from typing_extensions import Self

OF_VARIANT = "*"
"""Domain of the trait that distinguishes variants: all values that it has in the variant being populated."""

Domain = TraitValue | list[TraitValue]


class _Spec(BaseModel):
    """Base of the parts of a spec, validated in the context of the operation whose kernels the spec lists."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _operation(info: ValidationInfo) -> Operation:
    assert isinstance(info.context, Operation), "a spec is validated in the context of its operation"  # noqa: S101
    return info.context


def _value_of(name: str, value: str, info: ValidationInfo) -> str:
    trait = _operation(info).traits[name]
    if value not in trait.values:
        raise ValueError(f"expected one of {trait.domain}")
    return value


Family = Annotated[str, AfterValidator(partial(_value_of, "family"))]
Dtype = Annotated[str, AfterValidator(partial(_value_of, "dtype"))]


def _check_traits(traits: dict[str, Domain], info: ValidationInfo) -> dict[str, Domain]:
    operation = _operation(info)
    _check_names(traits, operation.traits)
    for name, domain in traits.items():
        if domain == OF_VARIANT and name == operation.variant_trait:
            continue
        trait = operation.traits[name]
        for value in domain if isinstance(domain, list) else [domain]:
            if not trait.admits(value) and trait.kind == "bool":
                raise ValueError(f"{name} is a boolean: true or false, not {value!r}")
            if not trait.admits(value):
                raise ValueError(f"{name} cannot be {value!r}; allowed: {trait.domain}")
    return traits


def _check_names(names: Iterable[str], traits: Traits) -> None:
    for name in names:
        if name not in traits:
            raise ValueError(f"no trait is called {name!r}{did_you_mean(name, traits)}")


class Rule(_Spec):
    """A named SQL boolean expression with its reason and source; ``quirk`` explains an oddity of upstream's."""

    id: str
    expr: str
    reason: str
    source: str
    quirk: str | None = None
    spaces: list[str] | None = Field(None, description="spaces in which the rule holds (default: all)")


_R = TypeVar("_R", bound=Rule)


class Invariant(Rule):
    """A rule that every kernel of its families meets, whichever enumeration made it: a check on enumerations."""

    families: list[Family] = Field([], description="families that the rule applies to (default: all)")

    def concerns(self, family: str) -> bool:
        """Whether the rule applies to ``family``."""
        return not self.families or family in self.families


class SharedRule(Rule):
    """A constraint of several enumerations."""

    enumerations: list[str] = Field([], description="enumerations that it filters (default: all)")

    def filters(self, enumeration: str) -> bool:
        """Whether it is a constraint of ``enumeration``."""
        return not self.enumerations or enumeration in self.enumerations


class HeaderRule(Rule):
    """A rule that kernels must meet to compile.

    Rows that upstream lists compile with the headers of their own revision. Rows of a sweep have none of their own:
    they compile with those of any revision that implements them, so their rules name the revisions.
    """

    headers: list[str] = Field([], description="revisions of the headers that demand it (default: the row's own)")


class Receipt(_Spec):
    """One of upstream's numbered product subsets; several receipts may share a name."""

    receipt: int
    names: list[str]
    about: str


class TileGroup(_Spec):
    """Tiles that share some traits, in upstream's order; each is in the operation's notation or a mapping of traits.

    Numbers of one axis may be written together: ``hdim: 128x128`` sets the traits hdim_q and hdim_v.
    """

    dtype: list[Dtype]
    traits: dict[str, TraitValue] = {}
    tiles: list[dict[str, TraitValue]]

    @model_validator(mode="before")
    @classmethod
    def _axes(cls, raw: Any, info: ValidationInfo) -> Any:
        if not isinstance(raw, dict):
            return raw
        axes = _operation(info).axes
        traits = raw.get("traits", {})
        if not isinstance(traits, dict):
            return raw
        for axis in axes.keys() & raw.keys():
            if not re.fullmatch(r"\d+(x\d+)*", str(raw[axis])) or str(raw[axis]).count("x") + 1 != len(axes[axis]):
                raise ValueError(f"{axis}: {raw[axis]!r}: expected {' x '.join(axes[axis])}")
            traits = traits | dict(zip(axes[axis], map(int, str(raw[axis]).split("x")), strict=True))
        return {name: value for name, value in raw.items() if name not in axes} | {"traits": traits}

    @field_validator("traits")
    @classmethod
    def _traits(cls, traits: dict[str, TraitValue], info: ValidationInfo) -> dict[str, TraitValue]:
        _check_traits(dict(traits), info)
        return traits

    @field_validator("tiles", mode="before")
    @classmethod
    def _tiles(cls, tiles: Any, info: ValidationInfo) -> Any:
        if not isinstance(tiles, list):
            return tiles
        try:
            return [_operation(info).read_tile(tile) if isinstance(tile, str) else tile for tile in tiles]
        except UsageError as error:
            raise ValueError(str(error)) from None

    @field_validator("tiles")
    @classmethod
    def _known(cls, tiles: list[dict[str, TraitValue]], info: ValidationInfo) -> list[dict[str, TraitValue]]:
        for tile in tiles:
            _check_names(tile, _operation(info).traits)
        return tiles

    def rows(self) -> Iterator[dict[str, TraitValue]]:
        """The traits of every tile, one mapping per dtype."""
        for dtype in self.dtype:
            for tile in self.tiles:
                yield {"dtype": dtype, **tile, **self.traits}


class Variant(_Spec):
    """A pipeline with its paddings and the domain of each feature; ``when`` restricts its tiles and features."""

    id: str
    dtype: list[Dtype]
    domain: str | None = Field(None, description="name of an entry in the enumeration's `domains`")
    traits: dict[str, Domain] = {}
    when: str | None = None
    spaces: list[str] | None = Field(None, description="spaces that have the variant (default: all)")
    receipts: list[int] | None = Field(None, description="the only receipts that list its combinations (default: any)")
    quirk: str | None = None

    @field_validator("traits")
    @classmethod
    def _traits(cls, traits: dict[str, Domain], info: ValidationInfo) -> dict[str, Domain]:
        return _check_traits(traits, info)


class Yield(_Spec):
    """One family of kernels made by an enumeration: its combinations, projected onto the traits of the family."""

    family: Family
    where: str | None = None
    keep: list[str] | None = Field(None, description="traits to keep; the others get their default (default: all)")
    drop: list[str] = Field([], description="traits to reset to their default")
    set: dict[str, str] = Field({}, description="traits computed by SQL from the combination")

    @field_validator("keep", "drop", "set")
    @classmethod
    def _names(cls, traits: Any, info: ValidationInfo) -> Any:
        _check_names(traits or (), _operation(info).traits)
        return traits


class Axis(_Spec):
    """Values of a sweep for some dtypes, written as in names: 128x128, 32x32x16."""

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
        """One row per value: the dtype, then the numbers of the value."""
        for dtype in self.dtype:
            for value in self.values:
                yield (dtype, *map(int, value.split("x")))


class Sweep(RootModel[dict[str, list[Axis] | list[int]]]):
    """Tiles as a product of axes instead of a table; constraints keep the valid ones.

    An axis is a trait with its values, or one of the operation's axes with its values for each dtype. Axes are joined
    in the order in which they are written.
    """

    model_config = ConfigDict(frozen=True)


class Fallback(_Spec):
    """What a join of relations does where one of them, a table of curated choices, has nothing that is possible.

    Where no row of the join of ``survivors`` has the same values of the traits in ``same``, the enumeration's relations
    are joined without ``relation``: an anti-join, reported and listed like a rule.
    """

    id: str
    relation: str = Field(description="the relation that is left out, one of the enumeration's join")
    survivors: list[str] = Field(description="relations whose join, filtered by the constraints, is what is possible")
    same: list[str] = Field(description="traits that both joins have")
    reason: str
    source: str
    quirk: str | None = None

    @property
    def expr(self) -> str:
        """The rule in the form of SQL, for people."""
        return f"({', '.join(self.same)}) NOT IN ({' JOIN '.join(self.survivors)})"


class Enumeration(_Spec):
    """Tiles x variants x feature domains, filtered by constraints, projected onto families."""

    source: str | None = None
    about: str | None = None
    spaces: list[str] | None = Field(None, description="spaces that have the enumeration (default: all)")
    target: str = ""
    tiles: list[TileGroup] = []
    tiles_of: str | None = Field(None, description="enumeration whose target and tiles this one shares")
    first_tiles: int | None = Field(
        None, ge=1, description="number of tiles taken from each shared group (default: all)"
    )
    sweep: Sweep | None = None
    join: list[str] = Field([], description="relations whose natural join, in this order, gives the tiles")
    fallback: Fallback | None = Field(None, description="the join where a relation has nothing that is possible")
    on_request: bool = Field(False, description="populate leaves it out unless its family is named")
    swept: list[str] = Field([], description="traits that a sweep file may restrict")
    domains: dict[str, dict[str, Domain]] = {}
    variants: list[Variant] = []
    derived: dict[str, str] = Field({}, description="traits computed by SQL from the others")
    constraints: list[Rule] = []
    receipts: dict[int, str] = {}
    receipt_quirks: dict[int, str] = {}
    yields: list[Yield] = []
    order: str = Field("0", description="SQL integer: upstream's dispatch order, before tile and variant order")

    @property
    def by_family(self) -> tuple[Enumeration, ...]:
        """The enumeration in parts, each with one of its yields."""
        return tuple(self.model_copy(update={"yields": [made]}) for made in self.yields)

    @model_validator(mode="after")
    def _own_or_shared_tiles(self) -> Enumeration:
        if self.tiles_of is not None and (self.tiles or self.target):
            raise ValueError("tiles_of cannot be combined with tiles or target")
        if self.join and (self.tiles or self.tiles_of or self.sweep):
            raise ValueError("join cannot be combined with tiles, tiles_of or sweep")
        for relation in () if self.fallback is None else (self.fallback.relation, *self.fallback.survivors):
            if relation not in self.join:
                raise ValueError(f"fallback names the relation {relation!r}, which is not in join")
        if self.tiles_of is None and self.first_tiles is not None:
            raise ValueError("first_tiles needs tiles_of")
        return self

    @field_validator("domains")
    @classmethod
    def _domains(cls, domains: dict[str, dict[str, Domain]], info: ValidationInfo) -> dict[str, dict[str, Domain]]:
        for traits in domains.values():
            _check_traits(traits, info)
        return domains

    @field_validator("derived")
    @classmethod
    def _derived(cls, derived: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        _check_names(derived, _operation(info).traits)
        return derived


class Select(_Spec):
    """How a problem finds a kernel of one family: applicability rules, and the order of the applicable kernels."""

    rules: list[Rule] = []
    order: list[str] = Field([], description="SQL over kernel columns and :parameters of the problem")


class Hardware(_Spec):
    """Facts about the machine that rules and selection use."""

    vendor: str
    compute_units: int | None = None
    lds_bytes: int | None = None
    wavefront: int | None = None
    isa: str | None = Field(None, description="ISA passed to the compiler, never `native`")
    family: str | None = Field(None, description="archs of one family stand in for each other in selection")
    generation: float | None = Field(None, description="place within the family: archs of near generations are alike")


class ArchSpec(_Spec):
    """A whole spec: one file, or several merged by ``extends``."""

    about: str | None = None
    extends: str | None = None
    operation: str = Field(DEFAULT, description="what the kernels compute (default: attention)")
    arch: str | None = None
    revision: str | None = None
    space: str | None = None
    spaces: list[str] = Field([], description="in a file of sweeps: the spaces that it describes")
    reference: str | None = Field(None, description="name of the target in data/parity (default: arch)")
    hardware: Hardware | None = None
    variants: dict[str, list[str]] = Field(
        {"generic": []}, description="values of a trait in each variant (default: generic, without values)"
    )
    receipts: list[Receipt] = []
    hw_rules: list[Rule] = []
    header_rules: list[HeaderRule] = Field([], description="what upstream's headers demand of kernels to compile")
    invariants: list[Invariant] = []
    relations: dict[str, Relation] = Field({}, description="tables of facts that enumerations join")
    quantities: dict[str, str] = Field({}, description="SQL over columns, parameters and earlier quantities")
    constraints: list[SharedRule] = Field([], description="constraints of several enumerations")
    enumerations: dict[str, Enumeration] = {}
    sweeps: dict[str, list[str]] = Field({}, description="enumerations of each variant of sweep files")
    select: dict[Family, Select] = {}

    @model_validator(mode="before")
    @classmethod
    def _named_variants(cls, raw: Any, info: ValidationInfo) -> Any:
        """Accept the operation's own name for variants: attention's are ``mask_impls``."""
        named = f"{_operation(info).traits.variant}s"
        if not isinstance(raw, dict) or named not in raw:
            return raw
        return {"variants" if key == named else key: value for key, value in raw.items()}

    @model_validator(mode="after")
    def _references_exist(self) -> Self:
        if self.extends is not None:  # what is named may be in the other file
            return self
        for name, enumeration in self.enumerations.items():
            for relation in enumeration.join:
                if relation not in self.relations and self.extends is None:
                    raise ValueError(
                        f"enumerations.{name}: join names the relation {relation!r}; "
                        f"there are: {', '.join(self.relations) or 'none'}"
                    )
            if enumeration.tiles_of is not None and enumeration.tiles_of not in self.enumerations:
                raise ValueError(
                    f"enumerations.{name}: tiles_of names the enumeration {enumeration.tiles_of!r}; "
                    f"there are: {', '.join(self.enumerations)}"
                )
            for variant in enumeration.variants:
                if variant.domain is not None and variant.domain not in enumeration.domains:
                    raise ValueError(
                        f"enumerations.{name}: variant {variant.id!r} names the domain {variant.domain!r}; "
                        f"there are: {', '.join(enumeration.domains) or 'none'}"
                    )
        return self

    def lineage(self, variant: str = "generic") -> Lineage:
        """The lineage of the rows that this spec makes for one of its variants."""
        return Lineage(self.operation, str(self.arch), str(self.revision), str(self.space), variant)

    def tiles_of(self, enumeration: Enumeration) -> tuple[str, list[TileGroup]]:
        """The target of an enumeration and its tiles, its own or shared."""
        if enumeration.tiles_of is None:
            return enumeration.target, enumeration.tiles
        source = self.enumerations[enumeration.tiles_of]
        first = enumeration.first_tiles
        return source.target, [group.model_copy(update={"tiles": group.tiles[:first]}) for group in source.tiles]

    def constraints_of(self, name: str) -> list[Rule]:
        """The constraints of an enumeration, shared ones first, as expressions over the columns of kernels."""
        rules = [*(rule for rule in self.constraints if rule.filters(name)), *self.enumerations[name].constraints]
        return [self._over_columns(rule) for rule in rules]

    @property
    def demands(self) -> list[HeaderRule]:
        """The rules of headers, as expressions over the columns of kernels."""
        return [self._over_columns(rule) for rule in self.header_rules]

    def _over_columns(self, rule: _R) -> _R:
        return rule.model_copy(update={"expr": expanded(rule.expr, self.quantities)})

    def applicability_of(self, family: str) -> list[Rule]:
        """The rules of selection of a family, as expressions over the columns of kernels and parameters."""
        return [self._over_columns(rule) for rule in self.select[family].rules]

    def order_of(self, family: str) -> list[str]:
        """The static order of a family, as expressions over the columns of kernels and parameters."""
        return [expanded(expr, self.quantities) for expr in self.select[family].order]

    def yields_of(self, family: str) -> dict[str, Yield]:
        """The yield of each enumeration that makes kernels of ``family``."""
        return {
            name: made
            for name, enumeration in self.enumerations.items()
            for made in enumeration.yields
            if made.family == family
        }

    @property
    def families(self) -> tuple[str, ...]:
        """The families that have kernels, in the operation's order."""
        return tuple(family for family in operation(self.operation).traits.families if self.yields_of(family))

    @property
    def receipt_numbers(self) -> tuple[int, ...]:
        """Every receipt, ascending."""
        return tuple(sorted(receipt.receipt for receipt in self.receipts))
