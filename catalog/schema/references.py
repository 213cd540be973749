"""References between JSON files: ``{"$ref": "../2026-05/ck.json#/select/fwd"}`` stands for the value that it names.

The path is relative to the file; behind ``#`` follows a JSON pointer, whose step into a list is the ``id`` of an item.
Other keys beside ``$ref`` change the value as a JSON merge patch (RFC 7396): objects merge by key, ``null`` removes a
key, anything else replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from catalog.errors import SpecError

REF = "$ref"


class References:
    """Files whose references are resolved, each read once."""

    def __init__(self, read: Callable[[Path], dict[str, Any]], locate: Callable[[Path, str], Path]) -> None:
        """``read`` returns the object in a file; ``locate`` returns the path that a file means by a relative one."""
        self._read = read
        self._locate = locate
        self._objects: dict[Path, dict[str, Any]] = {}
        self._reading: list[Path] = []

    def object_in(self, path: Path) -> dict[str, Any]:
        """The object in ``path`` without references.

        Raises:
            SpecError: a reference names nothing, or files refer to each other in a circle.
        """
        if path not in self._objects:
            if path in self._reading:
                circle = " -> ".join(str(each) for each in (*self._reading, path))
                raise SpecError(f"{self._reading[-1]}: {REF}: files refer to each other in a circle: {circle}")
            self._reading.append(path)
            self._objects[path] = self._resolved(self._read(path), path)
            self._reading.pop()
        return self._objects[path]

    def _resolved(self, value: Any, path: Path) -> Any:
        if isinstance(value, list):
            return [self._resolved(item, path) for item in value]
        if not isinstance(value, dict):
            return value
        resolved = {key: self._resolved(item, path) for key, item in value.items() if key != REF}
        if REF not in value:
            return resolved
        named = self._named(value[REF], path)
        if resolved and not isinstance(named, dict):
            raise SpecError(f"{path}: {REF}: {value[REF]} is no object, so no key can stand beside it")
        return _patched(named, resolved) if resolved else named

    def _named(self, reference: Any, path: Path) -> Any:
        where, hash_sign, pointer = str(reference).partition("#/")
        if not hash_sign:
            raise SpecError(f"{path}: {REF}: {reference!r}: expected a file and a path in it: ck.json#/select")
        other = self._locate(path, where)
        if not other.is_file():
            raise SpecError(f"{path}: {REF}: {reference}: there is no file {other}")
        value: Any = self.object_in(other)
        for step in pointer.split("/"):
            items = {item.get("id"): item for item in value} if isinstance(value, list) else value
            if not isinstance(items, dict) or step not in items:
                there = ", ".join(map(str, items)) if isinstance(items, dict) else "nothing"
                raise SpecError(f"{path}: {REF}: {reference}: there is no {step!r}; there are: {there}")
            value = items[step]
        return value


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
