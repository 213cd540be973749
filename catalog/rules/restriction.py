"""Restrict a population with configuration files of upstream's, an SQL expression, or a Python filter.

A sweep file is ``{"variant": "fwd", "trait_config": {"data_type": {"values": ["fp16"]}, "lse": {"values": [false]}}}``:
``variant`` names enumerations of the spec (its ``sweeps``); each trait lists the values to keep.

Source: CK, dispatcher/codegen/fmha/instance_gen.py: expand_sweep, apply_filter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from catalog.errors import UsageError
from catalog.files import StrPath, parse_json, read_given
from catalog.messages import did_you_mean
from catalog.ops import operation
from catalog.ops.protocol import Operation
from catalog.registry.query_text import condition
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.expressions import what_is_wrong
from catalog.schema.name_parts import sql_literal
from catalog.schema.problem import MAX_SIZE
from catalog.schema.relations import Relation

Values = tuple[bool | int | str, ...]


@dataclass(frozen=True)
class SweepFile:
    """A checked sweep file: a variant, and the values to keep by trait, in our names."""

    path: Path
    variant: str
    traits: Mapping[str, Values]


@dataclass(frozen=True)
class Axes:
    """Checked configuration files of the tile engine or the dispatcher: relations that replace the spec's.

    ``enumerations`` are the only ones that are joined; empty: all.
    """

    paths: tuple[Path, ...]
    relations: Mapping[str, Relation]
    enumerations: tuple[str, ...] = ()


@dataclass(frozen=True)
class Filter:
    """A user's Python function that decides whether to keep a kernel."""

    path: Path
    digest: str
    keep: Callable[[Any], Any] = field(compare=False)
    operation: Operation
    failures: list[str] = field(default_factory=list, compare=False)

    def __call__(self, *values: Any) -> int:
        """Whether to keep the kernel with these trait values, in column order. Called by SQLite."""
        traits = dict(zip(self.operation.traits, values, strict=True))
        also = {name: traits[trait] for name, trait in self.operation.filter_names.items()}
        kernel = SimpleNamespace(**traits, **also)
        try:
            return 1 if self.keep(kernel) else 0
        except (Exception, SystemExit) as error:
            # SQLite reports only that some function raised; keep the message for the user.
            self.failures.append(f"{self.path}: filter_config: {type(error).__name__}: {error}.")
            raise


@dataclass(frozen=True)
class Restriction:
    """The part of a spec to materialise: by default all of it."""

    sweeps: tuple[SweepFile, ...] = ()
    where: str = ""
    filter: Filter | None = None
    families: tuple[str, ...] = ()
    axes: Axes | None = None

    @property
    def text(self) -> str:
        """A description in one line; empty when nothing is restricted."""
        parts = [f"families {', '.join(self.families)}"] if self.families else []
        parts += [f"{sweep.variant} of {sweep.path.name}" for sweep in self.sweeps]
        parts += [f"axes of {', '.join(path.name for path in self.axes.paths)}"] if self.axes else []
        parts += [f"where {self.where}"] if self.where else []
        parts += [f"{self.filter.path.name} {self.filter.digest[:12]}"] if self.filter else []
        return "; ".join(parts)

    def makes(self, family: str) -> bool:
        """Whether kernels of ``family`` are asked for."""
        return not self.families or family in self.families

    def conditions(self, spec: ArchSpec, enumeration: str) -> list[str] | None:
        """The SQL conditions on the combinations of an enumeration; None when all of it is left out."""
        made = spec.enumerations[enumeration]
        if self.axes is not None and self.axes.enumerations and enumeration not in self.axes.enumerations:
            return None
        if (made.on_request and not self.families) or not any(self.makes(one.family) for one in made.yields):
            return None
        kept = [f"({self.where})"] if self.where else []
        if self.filter is not None:
            kept.append(f"filter_config({', '.join(self.filter.operation.traits)})")
        if not self.sweeps:
            return kept
        sweeps = [sweep for sweep in self.sweeps if enumeration in spec.sweeps[sweep.variant]]
        if not sweeps:
            return None
        return [*kept, " OR ".join(f"({_condition(spec, enumeration, sweep)})" for sweep in sweeps)]

    def domains(self, spec: ArchSpec, enumeration: str) -> dict[str, list[bool | int | str]]:
        """Values to sweep in addition to the spec's: block_per_cu, where a sweep file lists it and it may be swept."""
        if "block_per_cu" not in spec.enumerations[enumeration].swept:
            return {}
        values = [
            v for s in self.sweeps if enumeration in spec.sweeps[s.variant] for v in s.traits.get("block_per_cu", ())
        ]
        return {"block_per_cu": list(dict.fromkeys(values))} if values else {}

    def applied(self, spec: ArchSpec) -> ArchSpec:
        """The spec with the axes of the configuration file instead of its own."""
        if self.axes is None:
            return spec
        return spec.model_copy(update={"relations": {**spec.relations, **self.axes.relations}})


NOTHING_LEFT_OUT = Restriction()


def _condition(spec: ArchSpec, enumeration: str, sweep: SweepFile) -> str:
    """The condition that a sweep file puts on an enumeration. Like upstream, ignore traits not swept there."""
    swept = spec.enumerations[enumeration].swept
    asked = {trait: values for trait, values in sweep.traits.items() if trait in swept}
    return " AND ".join(f"{trait} IN ({', '.join(map(sql_literal, values))})" for trait, values in asked.items()) or "1"


def restriction(
    spec: ArchSpec,
    configs: Sequence[StrPath],
    where: str,
    filter_file: StrPath | None,
    families: tuple[str, ...] = (),
) -> Restriction:
    """Combine configuration files, an SQL expression, a filter file and families into one restriction.

    Raises:
        UsageError: one of them is wrong; the message names the file, the place in it, and what is allowed.
    """
    expression = condition(where)
    reason = what_is_wrong(expression.sql, operation(spec.operation)) if expression else None
    if reason is not None:
        hint = "It must be an SQL expression over the columns of one row; `catalog columns` lists them."
        raise UsageError(f"--where: {reason}", hint=hint)
    for family in families:
        if family not in spec.families:
            raise UsageError(
                f"{spec.arch} has no family {family!r} in the space {spec.space}{did_you_mean(family, spec.families)}",
                hint=f"There are: {', '.join(spec.families)}.",
            )
    sql = expression.sql if expression else ""
    kept = _read_filter(Path(filter_file), operation(spec.operation)) if filter_file is not None else None
    files = [Path(path) for path in configs]
    if files and spec.relations:
        documents = {path: _read_object(path) for path in files}
        listed = _read_instances(spec, documents)
        if listed is not None:
            made = (one.family for name in listed.enumerations for one in spec.enumerations[name].yields)
            return Restriction((), sql, kept, families or tuple(dict.fromkeys(made)), listed)
        if len(files) > 1:
            raise UsageError("more than one configuration of axes", hint="Populate with one --config at a time.")
        [(path, document)] = documents.items()
        chosen = families or _family_of(spec, path, document) or spec.families[:1]
        return Restriction((), sql, kept, chosen, _read_axes(spec, path, document, chosen))
    return Restriction(tuple(_read_sweep(spec, path) for path in files), sql, kept, families)


def _read_document(path: Path) -> Any:
    try:
        return parse_json(read_given(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
    document = _read_document(path)
    if not isinstance(document, dict):
        raise UsageError(f"{path}: a configuration must be an object with tile_config and trait_config")
    return document


def _read_instances(spec: ArchSpec, documents: Mapping[Path, dict[str, Any]]) -> Axes | None:
    """The relations that configurations fill which list kernels one by one; None if one of them does not."""
    of = operation(spec.operation)
    rows: dict[str, list[dict[str, Any]]] = {}
    for path, document in documents.items():
        try:
            listed = of.instances(document)
        except UsageError as error:
            raise UsageError(f"{path}: {error.message}", hint=error.hint) from None
        if listed is None:
            return None
        relation, its = listed
        if relation not in spec.relations:
            raise UsageError(f"{path}: revision {spec.revision} of {spec.arch} takes no list of kernels")
        columns = _columns(spec, relation)
        wrong = Relation(columns=columns, rows=[[row[column] for column in columns] for row in its]).problem(of.traits)
        if wrong:
            raise UsageError(f"{path}: instances: {wrong}")
        rows.setdefault(relation, []).extend(row for row in its if row not in rows.get(relation, ()))
    relations = {
        name: Relation(columns=_columns(spec, name), rows=[[row[c] for c in _columns(spec, name)] for row in its])
        for name, its in rows.items()
    }
    joining = [name for name, made in spec.enumerations.items() if not relations.keys().isdisjoint(made.join)]
    return Axes(tuple(documents), MappingProxyType(relations), tuple(joining))


def _family_of(spec: ArchSpec, path: Path, document: Mapping[str, Any]) -> tuple[str, ...]:
    """The family that a configuration of axes is for, if it states one."""
    if "variant" not in document:
        return ()
    _check_known(path, "variant", "family", [document["variant"]], spec.families)
    return (document["variant"],)


def _read_axes(spec: ArchSpec, path: Path, document: Mapping[str, Any], families: tuple[str, ...]) -> Axes:
    """Read a configuration as the tile engine has it: ``{"tile_config": {"tile_m": {"values": [128]}}, ...}``.

    An axis has the name of a relation, or of its part behind the point where several enumerations differ in the axis.
    """
    traits = operation(spec.operation).traits
    _check_known(path, "top level", "field", document, (*_AXES, *_SWITCHES, "problem", "variant"))
    joined = {name for family in families for made in spec.yields_of(family) for name in spec.enumerations[made].join}
    asked = {(part, name): axis for part in _AXES for name, axis in _members(document, part, path).items()}
    asked |= {("top level", name): [document.get(name, default)] for name, default in _SWITCHES.items()}
    relations = {}
    for (part, name), axis in asked.items():
        replaced = [known for known in joined if known.rpartition(".")[2] == name and len(_columns(spec, known)) == 1]
        if not replaced and part == "top level":
            continue
        _check_known(path, part, "axis", [name] if not replaced else [], sorted(joined))
        for known in replaced:
            values = _axis_values(path, f"{part}.{name}", axis)
            relation = Relation(columns=_columns(spec, known), rows=[[value] for value in values])
            wrong = relation.problem(traits)
            if wrong:
                raise UsageError(f"{path}: {part}.{name}: {wrong}")
            relations[known] = relation
    return Axes((path,), MappingProxyType(relations))


_AXES = ("tile_config", "trait_config")
_SWITCHES = {"permute_n": False, "k_block_per_cu": 1}
"""Fields of a configuration with one value, and what upstream takes where they are missing."""

MOST_VALUES = 1024
"""Maximum number of values of an axis of a configuration file."""


def _columns(spec: ArchSpec, relation: str) -> list[str]:
    return spec.relations[relation].columns


def _members(document: Mapping[str, Any], part: str, path: Path) -> Mapping[str, Any]:
    members = document.get(part, {})
    if not isinstance(members, dict):
        raise UsageError(f"{path}: {part}: must be an object")
    return members


def _axis_values(path: Path, at: str, axis: Any) -> list[Any]:
    """The values of an axis: a list, ``{"values": [...]}``, or ``{"min": ..., "max": ..., "step": ...}``."""
    values = axis.get("values") if isinstance(axis, dict) and axis.get("values") is not None else axis
    if isinstance(values, dict) and set(values) - {"values"} == {"min", "max", "step"}:
        first, last, step = (values[name] for name in ("min", "max", "step"))
        if all(type(number) is int for number in (first, last, step)) and step > 0:
            values = list(range(first, last + 1, step)[: MOST_VALUES + 1])
    if not isinstance(values, list) or not values or not all(isinstance(v, (bool, int, str)) for v in values):
        raise UsageError(f'{path}: {at}: must be {{"values": [...]}} or {{"min": ..., "max": ..., "step": ...}}')
    if len(values) > MOST_VALUES:
        raise UsageError(f"{path}: {at}: more than {MOST_VALUES:,} values")
    if any(isinstance(value, int) and not 0 <= value <= MAX_SIZE for value in values):
        raise UsageError(f"{path}: {at}: integers must be from 0 to {MAX_SIZE}")
    return list(dict.fromkeys(values))


def _read_sweep(spec: ArchSpec, path: Path) -> SweepFile:
    document = _read_document(path)
    if not isinstance(document, dict) or not isinstance(document.get("trait_config", {}), dict):
        raise UsageError(f"{path}: a sweep file must be an object with variant and trait_config")
    _check_known(path, "top level", "field", document, ("variant", "trait_config"))
    variant = document.get("variant", "fwd")
    if not spec.sweeps:
        raise UsageError(f"the space {spec.space} of {spec.arch} has no sweeps", hint="Add --space rules.")
    _check_known(path, "variant", "variant", [variant], spec.sweeps)
    of, traits = operation(spec.operation), {}
    names = of.sweep_names
    for name, entry in document.get("trait_config", {}).items():
        _check_known(path, "trait_config", "trait", [name], names)
        traits[names[name]] = _values(path, name, entry, of)
    return SweepFile(path, variant, MappingProxyType(traits))


def _values(path: Path, name: str, entry: Any, operation: Operation) -> Values:
    at = f"trait_config.{name}"
    if not isinstance(entry, dict) or set(entry) != {"values"}:
        raise UsageError(f'{path}: {at}: must be {{"values": [...]}}')
    values = entry["values"] if isinstance(entry["values"], list) else [entry["values"]]
    trait = operation.traits[operation.sweep_names[name]]
    words = operation.sweep_words.get(trait.name, {})
    allowed: tuple[Any, ...] = (False, True) if trait.kind == "bool" else tuple(words) or trait.values
    for value in values:
        if trait.kind == "int":
            fits = isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value > 0)
        else:
            fits = value in allowed and isinstance(value, bool) == (trait.kind == "bool")
        if not fits:
            shown = "integers above 0, or -1" if trait.kind == "int" else ", ".join(json.dumps(v) for v in allowed)
            raise UsageError(f"{path}: {at}.values: {json.dumps(value)} is not allowed", hint=f"Allowed: {shown}.")
    return tuple(words.get(value, value) for value in values)


def _check_known(path: Path, at: str, kind: str, words: Any, known: Any) -> None:
    for word in words:
        if word not in known:
            raise UsageError(
                f"{path}: {at}: no {kind} is called {word!r}{did_you_mean(str(word), known)}",
                hint=f"There are: {', '.join(known)}.",
            )


def _read_filter(path: Path, operation: Operation) -> Filter:
    """Run the user's file. It is the user's own code, as in upstream's dispatcher."""
    try:
        content = read_given(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    module = ModuleType("filter_file")
    module.__file__ = str(path)
    try:
        exec(compile(content, path, "exec"), vars(module))  # noqa: S102
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path}: {type(error).__name__}: {error}", hint="The filter file itself failed.") from None
    keep = getattr(module, "filter_config", None)
    if not callable(keep):
        raise UsageError(f"{path}: defines no function filter_config(c) that returns whether to keep the kernel c")
    return Filter(path, hashlib.sha256(content).hexdigest(), keep, operation)
