"""References between JSON files: ``{"$ref": "../2026-05/ck.json#/select/fwd"}`` stands for the value that it names.

The path is relative to the file; behind ``#`` follows a JSON pointer, whose step into a list is the ``id`` of an item.
Other keys beside ``$ref`` change the value as a JSON merge patch (RFC 7396): objects merge by key, ``null`` removes a
key, anything else replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from catalog.errors import SpecError

REF = "$ref"


def files_named(value: Any) -> frozenset[str]:
    """The files that the references in ``value`` name, as they name them."""
    return frozenset(str(reference).partition("#")[0] for reference in _references(value))


def _references(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if REF in value:
            yield value[REF]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _references(item)


def object_in(
    path: Path, objects: Mapping[Path, dict[str, Any]], locate: Callable[[Path, str], Path]
) -> dict[str, Any]:
    """The object in the file ``path`` without references.

    ``objects`` has what is in that file and in all that it refers to; ``locate`` returns the path that a file means by
    a relative one.

    Raises:
        SpecError: a reference names nothing, or files refer to each other in a circle.
    """
    resolved: dict[str, Any] = _Resolver(objects, locate).object_in(path)
    return resolved


class _Resolver:
    def __init__(self, objects: Mapping[Path, dict[str, Any]], locate: Callable[[Path, str], Path]) -> None:
        self._objects = objects
        self._locate = locate
        self._resolved: dict[Path, Any] = {}
        self._open: list[Path] = []

    def object_in(self, path: Path) -> Any:
        if path in self._open:
            circle = " -> ".join(str(each) for each in (*self._open, path))
            raise SpecError(f"{self._open[-1]}: {REF}: files refer to each other in a circle: {circle}")
        if path not in self._resolved:
            self._open.append(path)
            self._resolved[path] = self._without_references(self._objects[path], path)
            self._open.pop()
        return self._resolved[path]

    def _without_references(self, value: Any, path: Path) -> Any:
        if isinstance(value, list):
            return [self._without_references(item, path) for item in value]
        if not isinstance(value, dict):
            return value
        beside = {key: self._without_references(item, path) for key, item in value.items() if key != REF}
        if REF not in value:
            return beside
        named = self._named(value[REF], path)
        if beside and not isinstance(named, dict):
            raise SpecError(f"{path}: {REF}: {value[REF]} is no object, so no key can stand beside it")
        return _patched(named, beside) if beside else named

    def _named(self, reference: Any, path: Path) -> Any:
        where, hash_sign, pointer = str(reference).partition("#/")
        if not hash_sign:
            raise SpecError(f"{path}: {REF}: {reference!r}: expected a file and a path in it: ck.json#/select")
        other = self._locate(path, where)
        if other not in self._objects:
            raise SpecError(f"{path}: {REF}: {reference}: there is no file {other}")
        value = self.object_in(other)
        for step in pointer.split("/"):
            steps = _steps(value)
            if step not in steps:
                raise SpecError(
                    f"{path}: {REF}: {reference}: there is no {step!r}; there are: {', '.join(steps) or 'none'}"
                )
            value = steps[step]
        return value


def _steps(value: Any) -> dict[str, Any]:
    """What a step of a pointer may name in ``value``."""
    if isinstance(value, list):
        items = (item for item in value if isinstance(item, dict))
        return {item["id"]: item for item in items if isinstance(item.get("id"), str)}
    return value if isinstance(value, dict) else {}


def _patched(value: Any, patch: Any) -> Any:
    """``value`` changed by a JSON merge patch."""
    if not isinstance(patch, dict):
        return patch
    patched = dict(value) if isinstance(value, dict) else {}
    for key, change in patch.items():
        if change is None:
            patched.pop(key, None)
        else:
            patched[key] = _patched(patched.get(key), change)
    return patched
