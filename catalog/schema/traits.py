"""Traits: the columns of an operation's kernels, derived from the two models that define them.

An operation defines each trait once, as a field of its Signature (what a kernel computes) or its Algorithm (how it
computes it). The column, its type, domain, default and meaning, the SQL table, the names, ``catalog columns``, command
options and docs all derive from that field. A trait that a family does not use keeps its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Group = Literal["signature", "algorithm"]
TraitValue = bool | int | str


class Word(str, Enum):
    """An enumerated value, spelled alike in SQL, JSON and names."""

    def __str__(self) -> str:
        return str(self.value)


Count = Annotated[int, Field(ge=0)]


def trait(default: Any, meaning: str) -> Any:
    """A field for a trait with a default."""
    return Field(default, description=meaning)


class TraitModel(BaseModel):
    """Base of an operation's Signature and Algorithm."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class Trait:
    """One column of the kernels of an operation.

    ``values`` is the finite domain, empty for numbers and for text that is bounded otherwise. ``minimum`` is the lower
    bound of a number.
    """

    name: str
    group: Group
    kind: Literal["bool", "int", "text"]
    values: tuple[str | int, ...]
    minimum: int | None
    default: TraitValue | None
    meaning: str

    @property
    def sql_type(self) -> str:
        """STRICT column type; booleans are 0 and 1."""
        return "TEXT" if self.kind == "text" else "INTEGER"

    @property
    def domain(self) -> str:
        """The domain in words."""
        if self.kind == "bool":
            return "0, 1"
        if self.values:
            return ", ".join(map(str, self.values))
        return f"integer >= {self.minimum}" if self.kind == "int" else "text"

    def admits(self, value: Any) -> bool:
        """Whether the column may hold ``value``; the lower bound is not checked."""
        if isinstance(value, bool) or self.kind == "bool":
            return isinstance(value, bool) and self.kind == "bool"
        return value in self.values if self.values else isinstance(value, str) == (self.kind == "text")


class Traits(Mapping[str, Trait]):
    """Every trait of an operation by name, in column order: the signature's, then the algorithm's.

    Args:
        signature: what a kernel computes; its first field is ``family``.
        algorithm: how a kernel computes it.
        variant: the operation's name for the variant of an enumeration (attention: ``mask_impl``).
        spelled: names that ids use for traits that have been renamed since.
        later: traits added after the operation's first catalogs. A later trait is left out of a kernel's id while it
            has its default, and its column comes last, where a migration can add it.
    """

    def __init__(
        self,
        signature: type[TraitModel],
        algorithm: type[TraitModel],
        *,
        variant: str = "variant",
        later: tuple[str, ...] = (),
        spelled: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.signature, self.algorithm, self.variant, self.later = signature, algorithm, variant, later
        self.spelled = spelled
        self.identity = ("arch", "revision", "space", variant, "target")
        self._traits = {name: _as_trait(name, "signature", info) for name, info in signature.model_fields.items()}
        self._traits |= {name: _as_trait(name, "algorithm", info) for name, info in algorithm.model_fields.items()}

    def __getitem__(self, name: str) -> Trait:
        return self._traits[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._traits)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        return len(self._traits)

    @property
    def families(self) -> tuple[str, ...]:
        """The families of the operation, in order."""
        return tuple(map(str, self["family"].values))


def _base_type(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _as_trait(name: str, group: Group, info: FieldInfo) -> Trait:
    kind: Literal["bool", "int", "text"]
    values: tuple[str | int, ...] = ()
    annotation = _base_type(info.annotation)
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        kind = "text" if isinstance(values[0], str) else "int"
    elif annotation is bool:
        kind = "bool"
    elif annotation is int:
        kind = "int"
    else:
        kind = "text"
        if issubclass(annotation, Enum):
            values = tuple(member.value for member in annotation)
    minimum = next((m.ge for m in info.metadata if hasattr(m, "ge")), None)
    default = None if info.is_required() else info.default
    if isinstance(default, Enum):
        default = default.value
    return Trait(name, group, kind, values, minimum, default, info.description or "")
