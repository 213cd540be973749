"""Sets of problems for tuning and benchmarks: the grids of data/shapes, or of a user's file, expanded and validated.

A file states ``about`` and ``grids``. It may state ``operation``, and ``extends``: the set whose shapes come before its
own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from catalog.errors import CatalogError, ProblemError, SpecError, UsageError
from catalog.files import StrPath
from catalog.messages import did_you_mean, expected
from catalog.ops import DEFAULT, operation
from catalog.schema.problem import Problem

MAX_SHAPES = 100_000
"""Maximum number of shapes in a set."""

_SUFFIXES = (".yaml", ".yml")


def _one_value(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return value
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise ValueError("a word, a number, true, false or a list of integers")


def _known_field(name: Any, info: ValidationInfo) -> Any:
    """Check that the class of problems in the context (by default attention's) has the field."""
    known = (info.context or operation().problem).model_fields
    if name not in known:
        raise ValueError(f"a problem has no field {name!r}{did_you_mean(str(name), known)}")
    return name


def _filled(value: Any) -> Any:
    if isinstance(value, (list, dict)) and not value:
        raise ValueError("must not be empty")
    return value


Word = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=60)]
Value = Annotated[Any, BeforeValidator(_one_value)]
FieldName = Annotated[str, BeforeValidator(_known_field)]
Fields: TypeAlias = dict[FieldName, Value]


class Grid(BaseModel):
    """Problems that differ in some fields: every combination of ``vary`` and ``together``.

    ``vary`` lists values of single fields. A group of ``together`` lists settings of several fields, one of which is
    used at a time: ``{heads: [{nhead_q: 32, nhead_k: 8}, {nhead_q: 32, nhead_k: 1}]}``. A field that a setting leaves
    out has its default there. The last axis varies fastest, ``vary`` before ``together``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Word
    about: str = ""
    category: Word
    fixed: Fields = {}
    vary: dict[FieldName, Annotated[list[Value], BeforeValidator(_filled)]] = {}
    together: dict[Word, Annotated[list[Fields], BeforeValidator(_filled)]] = Field({}, max_length=16)

    @model_validator(mode="after")
    def _stated_once(self) -> Grid:
        homes: dict[str, str] = {}
        groups = {f"together.{group}": settings for group, settings in self.together.items()}
        places = {"fixed": [self.fixed], "vary": [self.vary], **groups}
        for place, settings in places.items():
            for field in dict.fromkeys(field for setting in settings for field in setting):
                if field in homes:
                    raise ValueError(f"{field} is stated in {homes[field]} and in {place}")
                homes[field] = place
        return self

    @property
    def size(self) -> int:
        """Number of problems: the product of the axes."""
        return math.prod(map(len, (*self.vary.values(), *self.together.values())))

    def instances(self) -> Iterator[dict[str, Any]]:
        """The fields of each problem, in order."""
        axes: list[list[Fields]] = [[{field: value} for value in values] for field, values in self.vary.items()]
        for settings in product(*axes, *self.together.values()):
            yield {**self.fixed, **{field: value for setting in settings for field, value in setting.items()}}


class ShapeFile(BaseModel):
    """The contents of a file of shapes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    operation: str = DEFAULT
    extends: str | None = None
    grids: Annotated[list[Grid], BeforeValidator(_filled)]


@dataclass(frozen=True)
class Shape:
    """A problem with a name, unique in its set, and the category of work that it represents."""

    name: str
    category: str
    problem: Problem


@dataclass(frozen=True)
class ShapeSet:
    """Problems of one operation to tune or benchmark, in the order of the grids."""

    operation: str
    name: str
    about: str
    shapes: tuple[Shape, ...]

    @property
    def categories(self) -> dict[str, int]:
        """Number of shapes in each category, in order of first appearance."""
        counts: dict[str, int] = {}
        for shape in self.shapes:
            counts[shape.category] = counts.get(shape.category, 0) + 1
        return counts


def builtin_sets() -> tuple[str, ...]:
    """Names of the sets that come with the catalog, in alphabetical order."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def load_shapes(name_or_path: StrPath) -> ShapeSet:
    """The set of :func:`builtin_sets` with this name, or the set in a file: a path with a separator or YAML suffix.

    Raises:
        UsageError: there is no such set or file, or the user's file is wrong.
        SpecError: a file that comes with the catalog is wrong. Both name the file, and the grid and field or the
            problem at fault.
    """
    path = _path_of(os.fspath(name_or_path), Path())
    chain = _chain(path, ())
    of = chain[-1][1].operation
    grids = [(source, grid) for source, file in chain for grid in file.grids]
    _check_names(grids)
    _check_size(path, [grid for _, grid in grids])
    shapes: dict[str, Shape] = {}
    homes: dict[str, str] = {}
    for source, grid in grids:
        for shape in _shapes_of(grid, operation(of).problem, source):
            key = shape.problem.key
            if key in shapes:
                also = "twice" if homes[key] == grid.name else f"as in grid {homes[key]!r}"
                raise _error(source, f"grid {grid.name!r} has the problem {shape.problem.name} {also}")
            shapes[key], homes[key] = shape, grid.name
    return ShapeSet(
        of,
        path.stem if _is_builtin(path) else os.fspath(name_or_path),
        chain[-1][1].about.strip(),
        tuple(shapes.values()),
    )


def _folder() -> Path:
    from catalog.settings import data_dir

    return data_dir() / "shapes"


def _is_builtin(path: Path) -> bool:
    return path.parent == _folder()


def _error(path: Path, reason: str) -> CatalogError:
    """The error class by owner: SpecError for a file that comes with the catalog, UsageError for a user's."""
    kind = SpecError if _is_builtin(path) else UsageError
    return kind(f"{path}: {reason}")


def _path_of(name: str, folder: Path) -> Path:
    """The file of a built-in set, or the path ``name`` relative to ``folder``."""
    if "/" in name or os.sep in name or name.endswith(_SUFFIXES):
        return folder / Path(name).expanduser()
    path = _folder() / f"{name}.yaml"
    if name not in builtin_sets():
        raise UsageError(
            f"no set of shapes is called {name!r}{did_you_mean(name, builtin_sets())}",
            hint=f"There are: {', '.join(builtin_sets()) or 'none'}; a file of your own is a path that ends in .yaml.",
        )
    return path


def _chain(path: Path, seen: tuple[Path, ...]) -> list[tuple[Path, ShapeFile]]:
    """The file and the files that it extends, outermost ancestor first."""
    file = _read(path)  # first: a name with a NUL byte cannot even be resolved
    if path.resolve() in seen:
        raise _error(path, f"extends: {path.stem!r} extends itself, by way of {' -> '.join(p.stem for p in seen)}")
    if file.extends is None:
        return [(path, file)]
    try:
        parent = _path_of(file.extends, path.parent)
    except UsageError as error:
        raise _error(path, f"extends: {error}") from None
    chain = _chain(parent, (*seen, path.resolve()))
    if chain[-1][1].operation != file.operation:
        raise _error(
            path, f"extends: {file.extends} is of the operation {chain[-1][1].operation}, not {file.operation}"
        )
    return [*chain, (path, file)]


def _read(path: Path) -> ShapeFile:
    from catalog.schema.yaml_files import read_yaml

    try:
        raw = read_yaml(path)
    except ValueError as error:
        raise (SpecError if _is_builtin(path) else UsageError)(str(error)) from None
    if not isinstance(raw, dict):
        raise _error(path, "the top level must be about: and grids:, as docs/reference/shapes.md shows")
    try:
        of = operation(str(raw.get("operation", DEFAULT)))
        return ShapeFile.model_validate(raw, context=of.problem)
    except UsageError as error:
        raise _error(path, f"operation: {error}") from None
    except ValidationError as error:
        reasons = [f"{_where(item['loc'], raw)}: {_explain(item)}" for item in error.errors(include_url=False)]
        raise _error(path, f"\n{path}: ".join(reasons)) from None


def _where(location: tuple[int | str, ...], raw: dict[str, Any]) -> str:
    """``grid 'gqa': vary.batch[1]``: a grid is identified by its name if it has one."""
    rest, where = location, ""
    if len(location) > 1 and location[0] == "grids" and isinstance(location[1], int):
        grid = raw["grids"][location[1]]
        name = grid.get("name") if isinstance(grid, dict) else None
        where, rest = f"grid {name!r}" if name else f"grids[{location[1]}]", location[2:]
    steps = [part for part in rest if part != "[key]"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in steps).lstrip(".")
    return f"{where}: {path}" if where and path else where or path


def _explain(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        model = Grid if len(item["loc"]) > 1 else ShapeFile
        meant = did_you_mean(str(item["loc"][-1]), model.model_fields)
        return f"unknown field; allowed: {', '.join(model.model_fields)}{meant}"
    if item["type"] == "string_pattern_mismatch":
        return f"{item['input']!r}: lower-case letters, digits, '_', '.' and '-', beginning with a letter or digit"
    return _PLAIN.get(item["type"]) or expected(item)


_PLAIN = {
    "missing": "missing",
    "dict_type": "must be a mapping, as field: value",
    "model_type": "must be a mapping, as field: value",
    "list_type": "must be a list",
    "string_type": "must be text",
}


def _check_names(grids: list[tuple[Path, Grid]]) -> None:
    names: dict[str, Path] = {}
    for source, grid in grids:
        if grid.name in names:
            other = "" if names[grid.name] == source else f", one of them in {names[grid.name]}"
            raise _error(source, f"two grids are called {grid.name!r}{other}")
        names[grid.name] = source


def _check_size(path: Path, grids: list[Grid]) -> None:
    total, largest = sum(grid.size for grid in grids), max(grids, key=lambda grid: grid.size)
    if total > MAX_SHAPES:
        raise _error(
            path, f"{total:,} shapes, at most {MAX_SHAPES:,}; grid {largest.name!r} alone has {largest.size:,}"
        )


def _shapes_of(grid: Grid, problem_type: type[Problem], source: Path) -> Iterator[Shape]:
    for fields in grid.instances():
        try:
            problem = problem_type(**fields)
        except ProblemError as error:
            stated = ", ".join(f"{name}: {value}" for name, value in fields.items())
            raise _error(source, f"grid {grid.name!r}: {{{stated}}}: {error}") from None
        yield Shape(f"{grid.name}/{problem.name}", grid.category, problem)


SET_COLUMNS = ("name", "shapes", "categories", "about")


def list_sets() -> list[list[Any]]:
    """One row for each built-in set, with the columns :data:`SET_COLUMNS`, smallest set first.

    Raises:
        SpecError: as in :func:`load_shapes`.
    """
    sets = sorted(map(load_shapes, builtin_sets()), key=lambda found: len(found.shapes))
    return [
        [found.name, len(found.shapes), ", ".join(f"{name} {n}" for name, n in found.categories.items()), found.about]
        for found in sets
    ]


def choose_columns(shapes: ShapeSet, chosen: Sequence[str] = ()) -> tuple[str, ...]:
    """``chosen``, or by default: name, category, GFLOP, MB, and the fields that any problem of the set uses.

    Raises:
        UsageError: there is no such column.
    """
    fields_of_problem = operation(shapes.operation).problem.model_fields
    all_columns = (*_WORK, *fields_of_problem)
    for name in chosen:
        if name not in all_columns:
            raise UsageError(
                f"no column of shapes is called {name!r}{did_you_mean(name, all_columns)}",
                hint=f"There are: {', '.join(all_columns)}.",
            )
    dumped = [shape.problem.model_dump() for shape in shapes.shapes]
    used = (
        name
        for name, field in fields_of_problem.items()
        if field.is_required() or any(fields[name] != field.default for fields in dumped)
    )
    return tuple(chosen) or (*_WORK, *used)


_WORK = ("name", "category", "gflop", "mb")


def rows_of(shapes: ShapeSet, columns: Sequence[str]) -> Iterator[list[Any]]:
    """One row for each shape: work in GFLOP, tensors in MB of 10^6 bytes, fields in normal form."""
    for shape in shapes.shapes:
        work = (shape.name, shape.category, round(shape.problem.flops / 1e9, 6), round(shape.problem.bytes / 1e6, 6))
        facts = dict(zip(_WORK, work, strict=True)) | shape.problem.model_dump(mode="json")
        yield [facts[column] for column in columns]
