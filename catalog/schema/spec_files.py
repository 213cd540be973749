"""Reading arch specs: the files of data/arch_specs, validated and merged by ``extends``.

Files of one revision are in one folder. ``extends`` names a sibling, or a spec of the data folder. Merging: objects
merge by key, lists append (the parent's items first), scalars override.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from catalog.errors import SpecError, UsageError
from catalog.files import parse_json, read_given
from catalog.messages import did_you_mean, expected
from catalog.ops import DEFAULT, operation
from catalog.ops.protocol import Operation
from catalog.schema.arch_spec import (
    ArchSpec,
    Enumeration,
    Hardware,
    HeaderRule,
    Invariant,
    Receipt,
    Rule,
    Select,
    TileGroup,
    Variant,
    Yield,
)
from catalog.schema.expressions import DEVICE_PARAMETERS, what_is_wrong
from catalog.schema.lineage import OWN_SPACES
from catalog.settings import data_dir

DEFAULT_REVISION = "2026-05"
"""The upstream revision used by default when an arch has several."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file and the bytes in it: the key under which this process remembers what it has parsed and validated."""

    path: Path
    content: bytes

    @classmethod
    def read(cls, path: Path) -> _File:
        try:
            return cls(path, read_given(path))
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
        ("header_rules", spec.header_rules),
        ("invariants", spec.invariants),
    )
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
            yield f"select.{family}.rules[{i}].expr", rule.expr, of_selection
        for i, expr in enumerate(select.order):
            yield f"select.{family}.order[{i}]", expr, of_selection


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
        "constraints": Rule,
        "yields": Yield,
    }
    steps |= dict.fromkeys(("rules", "hw_rules"), Rule) | {"header_rules": HeaderRule}
    steps |= {"select": Select, "invariants": Invariant, "hardware": Hardware}
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


def _chain(path: Path) -> tuple[_File, ...]:
    """The spec file and those that it extends, directly and indirectly, itself first."""
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
        chain.append(_File.read(path))
        parent = _parsed(chain[-1]).get("extends")
        if parent is None:
            return tuple(chain)
        if not isinstance(parent, str):
            raise SpecError(f"{path}: extends: must be the name of a spec")
        path = _base(path, parent)


def _base(path: Path, name: str) -> Path:
    """The spec ``name`` that ``path`` extends: its sibling, or else the one in the data folder."""
    beside = path.with_name(f"{name}.json")
    return beside if beside.is_file() else data_dir() / "arch_specs" / path.parent.name / beside.name


def load_spec_file(path: Path, space: str | None = None, of: str = DEFAULT) -> ArchSpec:
    """The spec in ``path``, of the operation ``of``, merged with what it extends.

    A file of sweeps describes several spaces; ``space`` selects one.

    Raises:
        UsageError: the file describes no such space.
        SpecError: a file of the chain is missing or wrong; the message names file, path inside it, and what is allowed.
    """
    return _loaded(_chain(path), space, of)


@lru_cache(maxsize=64)
def _loaded(chain: tuple[_File, ...], space: str | None, of: str) -> ArchSpec:
    path = chain[0].path
    merged: dict[str, Any] = {}
    for file in reversed(chain):
        raw = {"operation": of} | _parsed(file)
        _validate(raw, file.path)
        merged = _merge(merged, raw)
    merged.pop("extends", None)
    spec = _validate(merged, path)
    wrong = [f"{path}: {where}: {reason}" for where, reason in _wrong_receipts(spec)]
    if wrong:
        raise SpecError("\n".join(wrong))
    if space is not None and space not in OWN_SPACES:
        spec = _of_space(spec, space)
    for field in ("arch", "revision", "space"):
        if getattr(spec, field) is None:
            raise SpecError(f"{path}: {field}: missing; state it here or in a spec that this file extends")
    return spec


def _of_space(spec: ArchSpec, space: str) -> ArchSpec:
    """The part of a spec that belongs to ``space``."""
    if space not in spec.spaces:
        raise UsageError(f"no space is called {space!r}", hint=f"There are: {', '.join(['ck', *spec.spaces])}.")

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
        raise UsageError(f"{arch} has no space {space!r}", hint=f"Archs with sweeps: {', '.join(sorted(archs))}.")
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


def load_spec(root: Path, arch: str, revision: str | None = None, space: str | None = None) -> ArchSpec:
    """The spec that :func:`find_spec` finds below ``root``.

    Raises:
        UsageError: no such arch, revision or space.
        SpecError: a spec file is wrong.
    """
    return load_spec_file(find_spec((root,), arch, revision, space), space)
