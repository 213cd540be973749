"""Arch specs: the facts of data/arch_specs, validated and merged along ``extends``.

A spec says, as data, which tiles an arch has, which pipeline variants with which feature domains, which constraints
filter their product, which receipt lists what, and how a problem selects a row. Files of one revision lie in one
folder; ``extends`` names a sibling. Merging: objects merge by key, lists append (the parent's items first), scalars
override.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from catalog.errors import SpecError, UsageError
from catalog.schema.expressions import SELECT_PARAMETERS, what_is_wrong
from catalog.schema.fields import TRAITS, Dtype, Family
from catalog.schema.names import parse_tile

DEFAULT_REVISION = "2026-05"
"""The upstream revision meant when an arch has several."""

OWN_SPACES = ("ck", "native")
"""The spaces of the specs in the folders of the revisions: upstream's codegen, and our own kernels."""

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
            near = get_close_matches(name, TRAITS, n=3)
            raise ValueError(f"no trait is called {name!r}" + (f"; near: {', '.join(near)}" if near else ""))
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
            raise ValueError(f"no trait is called {name!r}; near: {', '.join(get_close_matches(name, TRAITS, n=3))}")


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


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SpecError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise SpecError(f"{path}: the top level must be an object")
    return raw


def _validate(raw: dict[str, Any], path: Path) -> ArchSpec:
    try:
        spec = ArchSpec.model_validate(raw)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).lstrip(".")
            lines.append(f"{path}: {where or 'top level'}: {_explain(item)}")
        raise SpecError("\n".join(lines)) from None
    wrong = [f"{path}: {where}: {reason}" for where, reason in _wrong_expressions(spec)]
    if wrong:
        raise SpecError("\n".join(wrong))
    return spec


def _wrong_expressions(spec: ArchSpec) -> Iterator[tuple[str, str]]:
    for where, expression, parameters in _expressions(spec):
        reason = what_is_wrong(expression, parameters)
        if reason is not None:
            yield where, reason


def _expressions(spec: ArchSpec) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Every SQL expression of a spec: the path to it, its text, the parameters that it may use."""
    general: tuple[tuple[str, Sequence[Rule]], ...] = (("hw_rules", spec.hw_rules), ("invariants", spec.invariants))
    for field, rules in general:
        yield from ((f"{field}[{i}].expr", rule.expr, ()) for i, rule in enumerate(rules))
    for name, enumeration in spec.enumerations.items():
        at = f"enumerations.{name}"
        for i, variant in enumerate(enumeration.variants):
            if variant.when is not None:
                yield f"{at}.variants[{i}].when", variant.when, ()
        for i, rule in enumerate(enumeration.constraints):
            yield f"{at}.constraints[{i}].expr", rule.expr, ()
        for receipt, expr in enumeration.receipts.items():
            yield f"{at}.receipts.{receipt}", expr, ()
        for trait, expr in enumeration.derived.items():
            yield f"{at}.derived.{trait}", expr, ()
        yield f"{at}.order", enumeration.order, ()
        for i, made in enumerate(enumeration.yields):
            yield from ((f"{at}.yields[{i}].set.{trait}", expr, ()) for trait, expr in made.set.items())
            if made.where is not None:
                yield f"{at}.yields[{i}].where", made.where, ()
    for family, select in spec.select.items():
        for i, rule in enumerate(select.rules):
            yield f"select.{family}.rules[{i}].expr", rule.expr, SELECT_PARAMETERS
        for i, expr in enumerate(select.order):
            yield f"select.{family}.order[{i}]", expr, SELECT_PARAMETERS


def _explain(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        allowed = _fields_at(item["loc"][:-1])
        near = get_close_matches(str(item["loc"][-1]), allowed, n=1)
        return f"unknown field; allowed: {', '.join(allowed)}" + (f" (near: {near[0]})" if near else "")
    return str(item["msg"]).removeprefix("Value error, ")


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """The fields of the model that lies at ``location`` of a spec."""
    model: Any = ArchSpec
    steps = {
        "enumerations": Enumeration,
        "tiles": TileGroup,
        "variants": Variant,
        "constraints": Rule,
        "yields": Yield,
        "sweep": Sweep,
    }
    steps |= {"select": Select, "rules": Rule, "hw_rules": Rule, "invariants": Invariant, "hardware": Hardware}
    for part in location:
        if part == "receipts" and model is ArchSpec:
            model = Receipt
        model = steps.get(str(part), model)
    return list(model.model_fields)


def _merge(parent: Any, child: Any) -> Any:
    if isinstance(parent, dict) and isinstance(child, dict):
        return parent | {key: _merge(parent[key], value) if key in parent else value for key, value in child.items()}
    if isinstance(parent, list) and isinstance(child, list):
        return parent + child
    return child


def _load_raw(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path in seen:
        raise SpecError(
            f"{seen[-1]}: extends: {path.stem!r} extends itself, by way of {' -> '.join(p.stem for p in seen)}"
        )
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.json")))
        raise SpecError(f"{seen[-1] if seen else path}: extends: no spec {path.stem!r} here; there are: {there}")
    raw = _read_object(path)
    _validate(raw, path)
    parent = raw.get("extends")
    if parent is None:
        return raw
    merged: dict[str, Any] = _merge(_load_raw(path.with_name(f"{parent}.json"), (*seen, path)), raw)
    return merged


def load_spec_file(path: Path, space: str | None = None) -> ArchSpec:
    """The spec of ``path``, merged with what it extends; of a file that describes several spaces, one of them.

    Raises:
        UsageError: the file describes no such space.
        SpecError: a file of the chain is missing or wrong; names file, path inside it, and what is allowed.
    """
    merged = {key: value for key, value in _load_raw(path).items() if key != "extends"}
    spec = _validate(merged, path)
    if space is not None:
        spec = _of_space(spec, space)
    for field in ("arch", "revision", "space"):
        if getattr(spec, field) is None:
            raise SpecError(f"{path}: {field}: missing; it must be said here or in what this file extends")
    return spec


def _of_space(spec: ArchSpec, space: str) -> ArchSpec:
    """The part of a spec that ``space`` has."""
    if space not in spec.spaces:
        raise UsageError(f"No space is called {space!r}.", hint=f"There are: {', '.join(['ck', *spec.spaces])}.")

    def kept(items: list[Any]) -> list[Any]:
        return [item for item in items if item.spaces is None or space in item.spaces]

    enumerations = {
        name: enumeration.model_copy(
            update={"variants": kept(enumeration.variants), "constraints": kept(enumeration.constraints)}
        )
        for name, enumeration in spec.enumerations.items()
        if enumeration.spaces is None or space in enumeration.spaces
    }
    sweeps = {variant: [name for name in names if name in enumerations] for variant, names in spec.sweeps.items()}
    return spec.model_copy(update={"space": space, "enumerations": enumerations, "sweeps": sweeps})


def known_archs(root: Path, kind: str = "") -> dict[str, tuple[str, ...]]:
    """The revisions of every arch that has a spec below ``root``, a data/arch_specs folder.

    Folders are called by the revision; those of sweeps, of the ``kind`` "sweeps", have it as a suffix: 2026-05.sweeps.
    """
    archs: dict[str, list[str]] = {}
    for path in sorted(root.glob("*/*.json")):
        revision, _, suffix = path.parent.name.partition(".")
        if suffix == kind and "arch" in _read_object(path):
            archs.setdefault(path.stem, []).append(revision)
    return {arch: tuple(revisions) for arch, revisions in archs.items()}


def load_spec(root: Path, arch: str, revision: str | None = None, space: str | None = None) -> ArchSpec:
    """The spec of ``arch`` at ``revision``, by default the default revision, or the only one.

    ``space`` is one of the sweeps' spaces; None, ck and native mean the arch's own.

    Raises:
        UsageError: no such arch, revision or space.
        SpecError: a spec file is wrong.
    """
    kind = "" if space is None or space in OWN_SPACES else "sweeps"
    archs = known_archs(root, kind)
    revisions = archs.get(arch)
    if revisions is None:
        near = get_close_matches(arch, archs, n=1)
        raise UsageError(
            f"No arch is called {arch!r}" + (f"; did you mean {near[0]}?" if near else "."),
            hint=f"There are: {', '.join(sorted(archs))}" + (", and host for this machine's CPU." if not kind else "."),
        )
    if revision is None:
        revision = DEFAULT_REVISION if DEFAULT_REVISION in revisions else revisions[0]
    if revision not in revisions:
        raise UsageError(f"{arch} has no revision {revision!r}.", hint=f"There are: {', '.join(revisions)}.")
    folder = f"{revision}.{kind}".rstrip(".")
    return load_spec_file(root / folder / f"{arch}.json", space if kind else None)
