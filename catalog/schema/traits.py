"""Traits: the columns of an operation's kernels, derived from the two models that define them.

An operation defines each trait once, as a field of its Signature (what a kernel computes) or its Algorithm (how it
computes it). The column, its type, domain, default and meaning, the SQL table, the names, ``catalog columns``, command
options and docs all derive from that field. A trait that a family does not use keeps its default.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from catalog.errors import RegistryError
from catalog.plugins import Plugin, entry_points_of, find_plugins

Group = Literal["signature", "algorithm"]
TraitValue = bool | int | str


class Word(str, Enum):
    """An enumerated value, spelled alike in SQL, JSON and names."""

    def __str__(self) -> str:
        return str(self.value)


class OpenWord(Word):
    """A word of an open list: the members are an operation's own words, and other distributions add more.

    A distribution adds a word with an entry point of that name in the list's :attr:`group`. Its word is an instance of
    the list, too: ``Pipeline("theirs")``.

    Attributes:
        group: the group of entry points.
        kind: what the entry points name: instances of this class, such as
            :class:`~catalog.ops.protocol.Extension`.
    """

    group: ClassVar[str]
    kind: ClassVar[type[Any]]

    def __init_subclass__(cls, group: str, kind: type[Any]) -> None:
        cls.group, cls.kind = group, kind

    @classmethod
    def added(cls) -> tuple[str, ...]:
        """The words of other distributions, usable or not."""
        return tuple(sorted(entry_points_of(cls.group).names - {word.value for word in cls}))

    @classmethod
    def plugins(cls) -> tuple[Plugin[Any], ...]:
        """What other distributions add, looked up once; a warning is logged for each unusable one."""
        return _plugins_of(cls)

    @classmethod
    def _missing_(cls, value: object) -> OpenWord | None:
        if value not in cls.added():
            return None
        word = str.__new__(cls, value)
        word._name_ = word._value_ = str(value)
        return word


@cache
def _plugins_of(words: type[OpenWord]) -> tuple[Plugin[Any], ...]:
    own = {word.value for word in words}

    def objection(word: str, added: Any, others: Sequence[Plugin[Any]]) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", word):
            return f"{word!r} cannot be a part of a kernel's name"
        if word in {*own, *(other.name for other in others)}:
            return f"there is another {words.__name__.lower()} called {word}"
        return str(words.kind.objection(added, own))  # of this list: a family may be named as a pipeline, too

    return find_plugins(words.group, words.kind, objection)


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

    ``own`` is the finite domain, empty for numbers and for text that is bounded otherwise; if ``words`` is not None,
    other distributions may add to it. ``minimum`` is the lower bound of a number.
    """

    name: str
    group: Group
    kind: Literal["bool", "int", "text"]
    own: tuple[str | int, ...]
    words: type[OpenWord] | None
    minimum: int | None
    default: TraitValue | None
    meaning: str

    @property
    def values(self) -> tuple[str | int, ...]:
        """The finite domain, including the words of other distributions."""
        return self.own if self.words is None else (*self.own, *self.words.added())

    @property
    def plugins(self) -> tuple[Plugin[Any], ...]:
        """What other distributions add to the domain."""
        return () if self.words is None else self.words.plugins()

    def brought(self, word: str) -> Any:
        """What another distribution brings for its ``word``; None for one of the operation's own.

        Raises:
            RegistryError: it cannot be used; the message says why.
        """
        if self.words is None or word in self.own:
            return None
        plugins = [plugin for plugin in self.plugins if plugin.name == word]
        usable = next((plugin.object for plugin in plugins if plugin.object is not None), None)
        if usable is None:
            reasons = "; ".join(f"{plugin.title} cannot be used: {plugin.broken}" for plugin in plugins)
            raise RegistryError(reasons or f"no installed package adds the {self.name} {word!r}")
        return usable

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
        if not self.own:
            return isinstance(value, str) == (self.kind == "text")
        return value in self.own or value in self.values


class Traits(Mapping[str, Trait]):
    """Every trait of an operation by name, in column order: the signature's, then the algorithm's.

    Args:
        signature: what a kernel computes; its first field is ``family``.
        algorithm: how a kernel computes it.
        variant: the operation's name for the variant of an enumeration (attention: ``mask_impl``).
        spelled: names that ids use for traits that have been renamed since.
        later: traits added after the operation's first catalogs. A later trait is left out of a kernel's id while it
            has its default, and its column comes last, where a migration can add it.

    Attributes:
        columns_of: the signature's columns and the algorithm's, each with whether it holds a boolean.
        open: the traits with an :class:`OpenWord`: the family and the pipeline, in most operations.
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
        self.columns_of = MappingProxyType(
            {
                model: tuple((name, self._traits[name].kind == "bool") for name in model.model_fields)
                for model in (signature, algorithm)
            }
        )
        self.open = tuple(trait for trait in self._traits.values() if trait.words is not None)

    def __getitem__(self, name: str) -> Trait:
        return self._traits[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._traits)

    def items(self) -> ItemsView[str, Trait]:
        """As of any mapping, without a call for each trait."""
        return self._traits.items()

    def values(self) -> ValuesView[Trait]:
        """As of any mapping, without a call for each trait."""
        return self._traits.values()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        return len(self._traits)

    @property
    def own_families(self) -> tuple[str, ...]:
        """The families that come with the operation, in order."""
        return tuple(map(str, self["family"].own))

    @property
    def families(self) -> tuple[str, ...]:
        """The families of the operation in order, then the usable ones of other distributions."""
        plugins = self["family"].plugins
        return (*self.own_families, *(plugin.name for plugin in plugins if plugin.object is not None))


def _base_type(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _as_trait(name: str, group: Group, info: FieldInfo) -> Trait:
    kind: Literal["bool", "int", "text"]
    own: tuple[str | int, ...] = ()
    words = None
    annotation = _base_type(info.annotation)
    if get_origin(annotation) is Literal:
        own = get_args(annotation)
        kind = "text" if isinstance(own[0], str) else "int"
    elif annotation is bool:
        kind = "bool"
    elif annotation is int:
        kind = "int"
    else:
        kind = "text"
        if issubclass(annotation, Enum):
            own = tuple(member.value for member in annotation)
        words = annotation if issubclass(annotation, OpenWord) else None
    minimum = next((m.ge for m in info.metadata if hasattr(m, "ge")), None)
    default = None if info.is_required() else info.default
    if isinstance(default, Enum):
        default = default.value
    return Trait(name, group, kind, own, words, minimum, default, info.description or "")
