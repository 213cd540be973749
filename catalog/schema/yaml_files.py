"""Reading hand-written YAML strictly, as plain data.

Words follow YAML 1.2's core schema: ``no`` is a word, as in ``mask: no``; only ``true`` and ``false`` are booleans;
``12:30`` and ``010`` are not numbers. A repeated key is an error, where YAML lets the last one win. So is an alias,
because with aliases a short file can expand to gigabytes.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from catalog.files import read_given

_MAX_DEPTH = 100
"""Lists and mappings inside each other in a hand-written file. libyaml's loader recurses without a limit of its own."""

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]  # libyaml's loader, ten times as fast, where PyYAML was built with it
    """A safe loader: it makes dicts, lists, strings, numbers, booleans and None, nothing else."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (add_implicit_resolver)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is stated twice", problem_mark=key.start_mark)
            seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


_WORDS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(?:0|[1-9][0-9]{0,17})", list("-+0123456789")),
    "float": (r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", list("-+0123456789.")),
}

for _tag, (_expression, _first) in _WORDS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_expression})$"), _first)


def _check_events(text: str) -> None:
    """Make sure that the text has no alias and no deep nesting, before anything is built from it."""
    depth = 0
    for event in yaml.parse(text, Loader=_Base):
        at: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not supported here", problem_mark=at)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=at)


def read_yaml(path: Path) -> Any:
    """The content of ``path``: dicts, lists, strings, numbers, booleans, None.

    Raises:
        ValueError: it cannot be read or is not such YAML; the message starts with the file, and the line if known.
    """
    try:
        text = read_given(path).decode()
        _check_events(text)
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{path}: cannot be read: {reason}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ValueError(f"{path}{at}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{path}: not YAML: it is nested too deeply") from None
