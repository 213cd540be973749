"""Reading arch specs: the files of data/arch_specs, validated and merged by ``extends``.

Files of one revision are in one folder. ``extends`` names a sibling, or a spec of the data folder. Merging: objects
merge by key, lists append (the parent's items first), scalars override. Files of extensions are merged into the
operation's spec of their name, to which they may only add. What equals a part of another file, such as one of another
revision, is a reference to it: :mod:`catalog.schema.references`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from catalog.errors import SpecError, UsageError
from catalog.files import parse_json, read_given
from catalog.messages import did_you_mean, expected
from catalog.ops import DEFAULT, extensions, operation
from catalog.ops.protocol import Operation
from catalog.schema.arch_spec import (
    ArchSpec,
    Enumeration,
    Fallback,
    Hardware,
    HeaderRule,
    Invariant,
    Receipt,
    Rule,
    Select,
    SharedRule,
    TileGroup,
    Variant,
    Yield,
)
from catalog.schema.expressions import DEVICE_PARAMETERS, what_is_wrong
from catalog.schema.lineage import OWN_SPACES
from catalog.schema.references import REF, files_named, object_in
from catalog.schema.relations import Relation, expanded
from catalog.settings import data_dir

_ADDITIONS = ("enumerations", "select")
"""The fields of an extension's specs."""

DEFAULT_REVISION = "2026-05"
"""The upstream revision used by default when an arch has several."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file and the bytes in it: the key under which this process remembers what it has parsed and validated.

    ``added`` are the files of extensions that add to it.
    """

    path: Path
    content: bytes
    added: tuple[_File, ...] = ()

    @classmethod
    def read(cls, path: Path, added: Iterable[Path] = ()) -> _File:
        try:
            return cls(path, read_given(path), tuple(map(cls.read, added)))
        except OSError as error:
            raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


@lru_cache(maxsize=128)
def _parsed(file: _File) -> dict[str, Any]:
    """The object in a file. It is shared: do not change it."""
    try:
        raw = parse_json(file.content)
    except ValueError as error:
        raise SpecError(f"{file.path}: {error}") from None
    if not isinstance(raw, dict):
        raise SpecError(f"{file.path}: the top level must be an object")
    return raw


def _validate(raw: dict[str, Any], path: Path) -> ArchSpec:
    try:
        of = operation(raw.get("operation", DEFAULT))
        spec = ArchSpec.model_validate(raw, context=of)
    except (UsageError, TypeError) as error:  # an operation that nothing can be called
        raise SpecError(f"{path}: operation: {error}") from None
    except ValidationError as error:
        lines = []
        for item in error.errors():
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).lstrip(".")
            lines.append(f"{path}: {where or 'top level'}: {_explain(item)}")
        raise SpecError("\n".join(lines)) from None
    wrong = [f"{path}: {where}: {reason}" for where, reason in _wrong_expressions(spec, of)]
    if wrong:
        raise SpecError("\n".join(wrong))
    return spec


def _wrong_expressions(spec: ArchSpec, operation: Operation) -> Iterator[tuple[str, str]]:
    for where, expression, parameters in _expressions(spec, (*operation.parameters, *DEVICE_PARAMETERS)):
        reason = what_is_wrong(expression, operation, parameters)
        if reason is not None:
            yield where, reason


def _wrong_relations(spec: ArchSpec, operation: Operation) -> Iterator[tuple[str, str]]:
    for name, relation in spec.relations.items():
        reason = relation.problem(operation.traits)
        if reason:
            yield f"relations.{name}", reason
    for i, rule in enumerate(spec.constraints):
        for name in rule.enumerations:
            if name not in spec.enumerations:
                yield f"constraints[{i}].enumerations", f"no enumeration is called {name!r}"


def _wrong_receipts(spec: ArchSpec) -> Iterator[tuple[str, str]]:
    """Every enumeration must state what it lists of each receipt of the spec, and of no other."""
    there = ", ".join(map(str, spec.receipt_numbers)) or "none"
    for name, enumeration in spec.enumerations.items():
        at = f"enumerations.{name}.receipts"
        for receipt in enumeration.receipts:
            if receipt not in spec.receipt_numbers:
                yield f"{at}.{receipt}", f"no receipt has this number; there are: {there}"
        for receipt in spec.receipt_numbers:
            if receipt not in enumeration.receipts:
                yield at, f"receipt {receipt} is missing"


def _expressions(spec: ArchSpec, of_selection: tuple[str, ...]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Every SQL expression of a spec: the path to it, its text, and the parameters that it may use."""
    general: tuple[tuple[str, Sequence[Rule]], ...] = (
        ("hw_rules", spec.hw_rules),
        ("header_rules", spec.demands),
        ("invariants", spec.invariants),
    )
    for field, rules in general:
        yield from ((f"{field}[{i}].expr", rule.expr, ()) for i, rule in enumerate(rules))
    for i, shared in enumerate(spec.constraints):
        yield f"constraints[{i}].expr", expanded(shared.expr, spec.quantities), ()
    for name, enumeration in spec.enumerations.items():
        yield from _of_enumeration(f"enumerations.{name}", enumeration, spec.quantities)
    for family in spec.select:
        for i, rule in enumerate(spec.applicability_of(family)):
            yield f"select.{family}.rules[{i}].expr", rule.expr, of_selection
        for i, expr in enumerate(spec.order_of(family)):
            yield f"select.{family}.order[{i}]", expr, of_selection


def _of_enumeration(
    at: str, enumeration: Enumeration, quantities: Mapping[str, str]
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for i, variant in enumerate(enumeration.variants):
        if variant.when is not None:
            yield f"{at}.variants[{i}].when", variant.when, ()
    for i, rule in enumerate(enumeration.constraints):
        yield f"{at}.constraints[{i}].expr", expanded(rule.expr, quantities), ()
    for receipt, expr in enumeration.receipts.items():
        yield f"{at}.receipts.{receipt}", expr, ()
    for trait, expr in enumeration.derived.items():
        yield f"{at}.derived.{trait}", expr, ()
    yield f"{at}.order", enumeration.order, ()
    for i, made in enumerate(enumeration.yields):
        yield from ((f"{at}.yields[{i}].set.{trait}", expr, ()) for trait, expr in made.set.items())
        if made.where is not None:
            yield f"{at}.yields[{i}].where", made.where, ()


def _explain(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        allowed = _fields_at(item["loc"][:-1])
        return f"unknown field; allowed: {', '.join(allowed)}{did_you_mean(str(item['loc'][-1]), allowed)}"
    return expected(item)


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """The fields of the model at ``location`` of a spec."""
    model: Any = ArchSpec
    steps = {
        "enumerations": Enumeration,
        "tiles": TileGroup,
        "variants": Variant,
        "constraints": SharedRule,
        "relations": Relation,
        "yields": Yield,
    }
    steps |= dict.fromkeys(("rules", "hw_rules"), Rule) | {"header_rules": HeaderRule}
    steps |= {"fallback": Fallback, "select": Select, "invariants": Invariant, "hardware": Hardware}
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


def _chain(path: Path, of: str) -> tuple[_File, ...]:
    """The spec file and those that it extends, directly and indirectly, itself first."""
    folders = [plugin.object.specs for plugin in extensions(of) if plugin.object is not None]
    extending = sorted({folder for folder in folders if folder is not None})
    chain: list[_File] = []
    while True:
        seen = [file.path for file in chain]
        if path in seen:
            raise SpecError(
                f"{seen[-1]}: extends: {path.stem!r} extends itself, by way of {' -> '.join(p.stem for p in seen)}"
            )
        if not path.is_file():
            there = ", ".join(sorted(p.stem for p in path.parent.glob("*.json")))
            raise SpecError(f"{(seen or [path])[-1]}: extends: no spec {path.stem!r} here; there are: {there}")
        additions = (folder / path.parent.name / path.name for folder in extending)
        chain.append(_File.read(path, filter(Path.is_file, additions)))
        parent = _parsed(chain[-1]).get("extends")
        if parent is None:
            return tuple(chain)
        if not isinstance(parent, str):
            raise SpecError(f"{path}: extends: must be the name of a spec")
        path = _beside(path, f"{parent}.json")


def _beside(path: Path, name: str) -> Path:
    """The file ``name`` relative to the spec file ``path``, or else to its counterpart in the data folder."""
    beside, there = (folder / name for folder in (path.parent, data_dir() / "arch_specs" / path.parent.name))
    return Path(os.path.normpath(beside if beside.is_file() else there))


@lru_cache(maxsize=128)
def _names_in(file: _File) -> frozenset[str]:
    """The files that references in a file name. Most files have none, and their whole content need not be searched."""
    return files_named(_parsed(file)) if REF.encode() in file.content else frozenset()


def _reached(chain: Sequence[_File]) -> tuple[_File, ...]:
    """The files of ``chain``, and those that they refer to, directly and indirectly."""
    reached = list(chain)
    for file in reached:
        paths = {_beside(file.path, name) for name in _names_in(file)} - {each.path for each in reached}
        reached += [_File.read(path) for path in sorted(paths) if path.is_file()]
    return tuple(reached)


def _without_references(file: _File, files: Sequence[_File]) -> dict[str, Any]:
    if not _names_in(file):
        return _parsed(file)
    return object_in(file.path, {each.path: _parsed(each) for each in files}, _beside)


def own_content(path: Path) -> dict[str, Any]:
    """What the spec file ``path`` itself states, without what it extends.

    Raises:
        SpecError: the file cannot be read, or a reference in it names nothing.
    """
    file = _File.read(path)
    return _without_references(file, _reached([file]))


def load_spec_file(path: Path, space: str | None = None, of: str = DEFAULT) -> ArchSpec:
    """The spec in ``path``, of the operation ``of``, merged with what it extends.

    A file of sweeps describes several spaces; ``space`` selects one.

    Raises:
        UsageError: the file describes no such space.
        SpecError: a file of the chain is missing or wrong; the message names file, path inside it, and what is allowed.
    """
    chain = _chain(path, of)
    return _loaded(_reached(chain), len(chain), space, of)


@lru_cache(maxsize=64)
def _loaded(files: tuple[_File, ...], chain: int, space: str | None, of: str) -> ArchSpec:
    """The spec in the first file; the first ``chain`` files extend each other, the others are referred to."""
    path = files[0].path
    merged: dict[str, Any] = {}
    for file in reversed(files[:chain]):
        raw = {"operation": of} | _without_references(file, files)
        _validate(raw, file.path)
        for more in file.added:
            raw = _merge(raw, _addition(more, raw, file.path))
        merged = _merge(merged, raw)
    merged.pop("extends", None)
    spec = _validate(merged, path)
    found = (*_wrong_receipts(spec), *_wrong_relations(spec, operation(of)))
    wrong = [f"{path}: {where}: {reason}" for where, reason in found]
    if wrong:
        raise SpecError("\n".join(wrong))
    if space is not None and space != spec.space:
        spec = _of_space(spec, space)
    for field in ("arch", "revision", "space"):
        if getattr(spec, field) is None:
            raise SpecError(f"{path}: {field}: missing; state it here or in a spec that this file extends")
    return spec


def _addition(file: _File, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The content of an extension's file, which adds to that of the spec in ``path``, ``raw``."""
    added = _parsed(file)
    _validate({"operation": raw["operation"], "extends": path.stem} | added, file.path)
    for field in added.keys() - _ADDITIONS:
        raise SpecError(f"{file.path}: {field}: an extension may only add {' and '.join(_ADDITIONS)}")
    for name in added.get("enumerations", {}).keys() & raw.get("enumerations", {}).keys():
        raise SpecError(f"{file.path}: enumerations.{name}: {path} has an enumeration of that name")
    return added


def _of_space(spec: ArchSpec, space: str) -> ArchSpec:
    """The part of a spec that belongs to ``space``."""
    if space not in spec.spaces:
        there = [operation(spec.operation).main_space, *spec.spaces]
        raise UsageError(f"no space is called {space!r}", hint=f"There are: {', '.join(there)}.")

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


def known_archs(*roots: Path, kind: str = "") -> dict[str, dict[str, Path]]:
    """The spec files of every arch, by revision, below folders like data/arch_specs. The first with an arch wins.

    A folder is named after its revision. Folders of ``kind`` "sweeps" add it as a suffix: 2026-05.sweeps.
    """
    archs: dict[str, dict[str, Path]] = {}
    for root in roots:
        here: dict[str, dict[str, Path]] = {}
        for path in sorted(root.glob("*/*.json")):
            revision, _, suffix = path.parent.name.partition(".")
            if suffix == kind and "arch" in _parsed(_File.read(path)):
                here.setdefault(path.stem, {})[revision] = path
        archs = archs | {arch: specs for arch, specs in here.items() if arch not in archs}
    return archs


def find_spec(roots: Sequence[Path], arch: str, revision: str | None = None, space: str | None = None) -> Path:
    """The spec file of ``arch`` at ``revision``: by default the default revision, or the only one.

    ``space`` is one of the sweeps' spaces; None, ck and native select the arch's own spec.

    Raises:
        UsageError: no such arch or revision.
        SpecError: a spec file cannot be read.
    """
    kind = "" if space is None or space in OWN_SPACES else "sweeps"
    archs = known_archs(*roots, kind=kind)
    revisions = archs.get(arch)
    if revisions is None and kind and arch in known_archs(*roots):
        there = (
            f"Archs with sweeps: {', '.join(sorted(archs))}." if archs else "Leave the space out: there are no sweeps."
        )
        raise UsageError(f"{arch} has no space {space!r}", hint=there)
    if revisions is None:
        raise UsageError(
            f"no arch is called {arch!r}{did_you_mean(arch, ['host', *archs])}",
            hint=f"There are: {', '.join(sorted(archs))}" + (", and host for this machine's CPU." if not kind else "."),
        )
    if revision is None:
        revision = DEFAULT_REVISION if DEFAULT_REVISION in revisions else next(iter(revisions))
    if revision not in revisions:
        raise UsageError(f"{arch} has no revision {revision!r}", hint=f"There are: {', '.join(revisions)}.")
    return revisions[revision]
