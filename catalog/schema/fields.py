"""The fields of a model, described for messages and for the command line: derived from its JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Described:
    """A field: its description, the name of its type in JSON Schema, and its domain.

    ``default`` is None where there is none, or where it follows from other fields. ``words`` are the words that a
    string may be, empty where any string is allowed. The bounds apply to integers and numbers.
    """

    about: str
    type: str
    default: Any
    words: tuple[str, ...]
    minimum: float | None
    maximum: float | None

    @property
    def domain(self) -> str:
        """The values of an integer or a boolean in words; empty for other types."""
        if self.type == "boolean":
            return "True or False"
        if self.type != "integer":
            return ""
        bounds = (("from", self.minimum), ("to", self.maximum))
        return " ".join(["an integer", *(f"{word} {bound}" for word, bound in bounds if bound is not None)])


@lru_cache
def fields_of(model: type[BaseModel]) -> Mapping[str, Described]:
    """The fields of ``model`` by name, in order."""
    schema = model.model_json_schema()
    return MappingProxyType({name: _described(field, schema) for name, field in schema["properties"].items()})


def _described(field: Mapping[str, Any], schema: Mapping[str, Any]) -> Described:
    given = next((one for one in field.get("anyOf", ()) if one.get("type") != "null"), field)  # None is the default
    if "$ref" in given:
        given = schema["$defs"][given["$ref"].rpartition("/")[2]]
    return Described(
        field.get("description", ""),
        given["type"],
        field.get("default"),
        tuple(given.get("enum", [given["const"]] if "const" in given else ())),
        given.get("minimum"),
        given.get("maximum"),
    )
