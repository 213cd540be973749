"""A kernel: arch + signature + algorithm, with a stable id and its canonical name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer, model_validator

from catalog.errors import RegistryError
from catalog.schema.lineage import Lineage
from catalog.schema.name_parts import sql_literal
from catalog.schema.traits import TraitModel, Traits, TraitValue

if TYPE_CHECKING:
    from typing_extensions import Self

    from catalog.schema.grammar import Grammar

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


class Kernel(BaseModel):
    """One row of the catalog; each operation has a subclass, with its Signature and Algorithm.

    ``revision`` is the upstream codegen that the row reproduces (``native``: our own kernels), ``space`` the
    enumeration that made it, ``variant`` the variant of that enumeration (attention: the mask implementation),
    ``target`` the codegen target that upstream appends to the kernel's name (empty where it appends none). ``base`` is
    the nearest known revision if ``revision`` was adopted from a checkout, otherwise empty; it is not part of the id.

    Attributes:
        operation: name of the operation that the kernels compute.
        traits: the columns of its signature and algorithm.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    operation: ClassVar[str]
    traits: ClassVar[Traits]

    arch: str
    revision: str
    space: str
    variant: str
    target: str
    base: str = ""
    signature: Any
    algorithm: Any

    @classmethod
    def grammar(cls, family: str, lineage: Lineage) -> Grammar:
        """How the kernels of ``family``, one of the operation's own, are named in the enumeration ``lineage``."""
        raise NotImplementedError

    @classmethod
    def naming(cls, family: str, lineage: Lineage) -> Grammar:
        """The :meth:`grammar` of ``family``, or that of the distribution which adds the family.

        Raises:
            RegistryError: that distribution cannot be used.
        """
        grammar: Grammar = (cls.traits["family"].brought(family) or cls).grammar(family, lineage)
        return grammar

    @classmethod
    def family_named(cls, name: str, lineage: Lineage) -> str | None:
        """The family of the kernel called ``name``; None if no family has such names in the enumeration ``lineage``."""
        families = cls.traits.families
        return next((family for family in families if cls.naming(family, lineage).parse(name) is not None), None)

    @model_validator(mode="before")
    @classmethod
    def _with_a_variant(cls, fields: Any) -> Any:
        """Accept the variant under the operation's own name for it, as in JSON."""
        if not isinstance(fields, dict) or cls.traits.variant not in fields:
            return fields
        others = {name: value for name, value in fields.items() if name not in ("operation", cls.traits.variant)}
        return _renamed(others, {old: new for new, old in cls.traits.spelled.items()}) | {
            "variant": fields[cls.traits.variant]
        }

    @model_serializer(mode="wrap")
    def _by_its_own_words(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return self._in_its_own_words(handler(self))

    def _in_its_own_words(self, fields: dict[str, Any]) -> dict[str, Any]:
        fields[self.traits.variant] = fields.pop("variant")
        if not self.base:
            del fields["base"]
        return _renamed(fields, self.traits.spelled) | _operation_member(self.operation)

    @cached_property
    def name(self) -> str:
        """The canonical name, which parity compares."""
        return self.naming(self.family, self.lineage).name(self.to_row())

    @cached_property
    def id(self) -> str:
        """SHA-256, in hex, of the canonical JSON."""
        return hashlib.sha256(self.canonical_json.encode()).hexdigest()

    @property
    def lineage(self) -> Lineage:
        """The enumeration that made the row."""
        return Lineage(self.operation, self.arch, self.revision, self.space, self.variant, self.base)

    @property
    def canonical_json(self) -> str:
        """The fields that identify it, keys sorted, no spaces: equal kernels have equal bytes.

        Later traits are absent at their defaults.
        """
        # Group by group: the serializer of the whole would go through its result once more.
        stated = {name: getattr(self, name) for name in type(self).model_fields}
        groups = {name: stated[name].model_dump(mode="json") for name in ("signature", "algorithm")}
        fields = self._in_its_own_words(stated | groups)
        fields.pop("base", None)
        for name in self.traits.later:
            group = fields[self.traits[name].group]
            spelled = self.traits.spelled.get(name, name)
            if group[spelled] == self.traits[name].default:
                del group[spelled]
        return _CANONICAL.encode(fields)

    @property
    def family(self) -> str:
        """The family: a shortcut to the trait used most."""
        return str(self.signature.family)

    def to_row(self) -> dict[str, Any]:
        """Identity and traits as one flat mapping of plain values; booleans are ``bool``."""
        signature, algorithm = (group.model_dump(mode="json") for group in (self.signature, self.algorithm))
        *identity, variant, target = self.traits.identity
        stated = {name: getattr(self, name) for name in identity} | {variant: self.variant, target: self.target}
        return {**stated, **signature, **algorithm}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """The kernel of a row of the operation's view, or of :meth:`to_row`. Other columns are ignored.

        Raises:
            RegistryError: no installed distribution has its pipeline, or a usable one its family.
            pydantic.ValidationError: a column is missing or outside its domain.
        """
        for open_trait in cls.traits.open:
            if not open_trait.admits(word := row[open_trait.name]):
                raise RegistryError(
                    f"{row['arch']}: no installed package adds the {open_trait.name} {word!r} to {cls.operation}",
                    hint=f"Install the package, or drop its kernels: catalog populate --arch {row['arch']}",
                )
        cls.traits["family"].brought(row["family"])  # names it
        *identity, variant, target = cls.traits.identity
        stated = {name: row[name] for name in (*identity, *({"base"} & set(row.keys())))}
        signature, algorithm = (
            _group(model, tuple([bool(row[name]) if is_bool else row[name] for name, is_bool in columns]))
            for model, columns in cls.traits.columns_of.items()
        )
        return cls(**stated, variant=row[variant], target=row[target], signature=signature, algorithm=algorithm)


@lru_cache(maxsize=8192)
def _group(model: type[TraitModel], values: tuple[TraitValue, ...]) -> TraitModel:
    """The signature or algorithm with these values, in the order of its fields. Many kernels share one."""
    return model(**dict(zip(model.model_fields, values, strict=True)))


def _renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a kernel, with some traits of its groups renamed by ``names``."""
    renamed = dict(fields)
    for group in ("signature", "algorithm"):
        traits = fields.get(group)
        if isinstance(traits, Mapping) and not names.keys().isdisjoint(traits):
            renamed[group] = {names.get(trait, trait): value for trait, value in traits.items()}
    return renamed


def _operation_member(operation: str) -> dict[str, str]:
    """The operation's member of the canonical JSON: empty for attention, whose ids predate other operations."""
    return {} if operation == "attention" else {"operation": operation}


def canonical_json_sql(kernel: type[Kernel], constants: Mapping[str, TraitValue] = MappingProxyType({})) -> str:
    """SQL expression for :attr:`Kernel.canonical_json` over the columns of an operation's kernels.

    One printf call: five times faster than joining the pieces with ``||``. Its format has the values of the columns
    in ``constants``, each of which would take as long as another argument.
    """
    traits, arguments = kernel.traits, list[str]()

    def member(column: str, kind: str) -> str:
        if column in constants:
            value = bool(constants[column]) if kind == "bool" else constants[column]
            text = json.dumps(value, ensure_ascii=False).replace("%", "%%").replace("'", "''")
            return f'"{traits.spelled.get(column, column)}":{text}'
        arguments.append(
            {"bool": f"iif({column}, 'true', 'false')", "int": column, "text": f"json_quote({column})"}[kind]
        )
        return f'"{traits.spelled.get(column, column)}":%{"d" if kind == "int" else "s"}'

    def later(column: str, kind: str) -> str:
        text = member(column, kind)
        if column in constants:
            return "" if constants[column] == (traits[column].default or 0) else f"{text},"
        shown = f"printf('{text},', {arguments.pop()})"
        arguments.append(f"iif({column} = {sql_literal(traits[column].default or 0)}, '', {shown})")
        return "%s"

    def group(name: str) -> str:
        columns = sorted(
            ((trait.name, trait.kind) for trait in traits.values() if trait.group == name),
            key=lambda column: traits.spelled.get(column[0], column[0]),
        )
        members = "".join(
            later(column, kind) if column in traits.later else member(column, kind) + "," for column, kind in columns
        )
        return f'"{name}":{{' + members.removesuffix(",") + "}"

    fixed = _operation_member(kernel.operation)
    members = [
        group(name)
        if name in {"signature", "algorithm"}
        else f'"{name}":"{fixed[name]}"'
        if name in fixed
        else member(name, "text")
        for name in sorted((*traits.identity, *fixed, "signature", "algorithm"))
    ]
    return f"printf('{{{','.join(members)}}}', {', '.join(arguments)})"
