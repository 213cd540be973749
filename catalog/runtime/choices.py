"""Frozen choices: a file that says which kernels answer which problems, and in which libraries they are.

Selection from such a file is the same in every process, whatever each of them has measured, and needs neither a catalog
nor a compiler. The file has the problems that were frozen, by form. Another problem of a form gets the kernels of the
nearest frozen one about whose sizes the rules say the same, so lengths need not all be listed.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError

from catalog.backends import target_of
from catalog.build.cache import Cache
from catalog.build.keys import abi_number
from catalog.errors import BuildError, CatalogError, ChoicesError, UsageError
from catalog.files import StrPath, open_given, parse_json, write_file
from catalog.messages import counted, expected
from catalog.ops import AnyKernel
from catalog.registry.rows import Digest, Name, Row
from catalog.runtime.decisions import Questions
from catalog.schema.lineage import Lineage
from catalog.schema.policy import MeasuredAs, Policy, policy_in_force

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.demand import Answers
    from catalog.schema.kernel import Kernel
    from catalog.schema.problem import Problem

MOST_BYTES = 2**28

NAMED = 10
"""Maximum number of kernels that are named when they are not built."""


class Library(Row):
    """A kernel, and the library that it was frozen with: its content key and the number of its C ABI."""

    kernel: AnyKernel
    key: Digest
    abi: int


class Choice(Row):
    """A problem's fields, and the kernels of its stages: places in :attr:`Choices.libraries`."""

    problem: Mapping[str, Any]
    stages: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)


class FormChoices(Row):
    """The choices for problems that differ only in their sizes, from one lineage; see :class:`Questions`."""

    arch: Name
    revision: Name
    variant: Name
    asking: str | None
    parameters: Mapping[str, Any]
    sizes: tuple[str, ...]
    choices: tuple[Choice, ...] = Field(min_length=1)

    @property
    def questions(self) -> Questions:
        """What rules ask about sizes."""
        return Questions(self.asking, self.parameters, self.sizes)


class Choices(Row):
    """The content of a file of frozen choices, and the measuring policy under which they were made."""

    format: Literal[1]
    measured_as: MeasuredAs = "graph"
    cold: bool = False
    libraries: tuple[Library, ...]
    forms: tuple[FormChoices, ...]

    @property
    def policy(self) -> Policy:
        """The measuring policy."""
        return Policy(self.measured_as, self.cold)


@dataclass(frozen=True)
class Frozen:
    """A written file of choices: the numbers of problems and libraries."""

    problems: int
    libraries: int


def freeze(catalog: Catalog, answers: Answers, path: StrPath) -> Frozen:
    """Write the choices of ``answers``, with the libraries that the cache has for them, to ``path``.

    Equal choices make equal files.

    Raises:
        UsageError: a problem has no kernels, or none has any.
        BuildError: a kernel is not in the cache; the message names it.
        ToolchainError: there is no usable compiler, and compiling is not disabled.
        CatalogError: the file cannot be written.
    """
    if not answers.complete:
        raise UsageError("\n".join(answers.reasons), hint="Choices are frozen when every problem has kernels.")
    libraries = _libraries(catalog, answers.kernels)
    places = {library.kernel.id: place for place, library in enumerate(libraries)}
    grouped: dict[tuple[object, Lineage], list[tuple[Problem, Choice]]] = {}
    for (problem, _), stages in answers.plans.items():
        fields = problem.key_fields()
        choice = Choice(problem=fields, stages=tuple(places[kernel.id] for kernel in stages))
        grouped.setdefault((problem.form, stages[0].lineage), []).append((problem, choice))
    forms = []
    for (_, lineage), chosen in grouped.items():
        questions = catalog.questions(chosen[0][0], lineage)
        forms.append(
            FormChoices(
                arch=lineage.arch,
                revision=lineage.revision,
                variant=lineage.variant,
                asking=questions.asking,
                parameters=questions.parameters,
                sizes=questions.sizes,
                choices=tuple(choice for _, choice in chosen),
            )
        )
    content = Choices(format=1, **policy_in_force()._asdict(), libraries=tuple(libraries), forms=tuple(forms))
    write_file(Path(path), content.model_dump_json(indent=1) + "\n")
    return Frozen(len(answers.plans), len(libraries))


def _libraries(catalog: Catalog, kernels: Iterable[Kernel]) -> list[Library]:
    libraries, absent = list[Library](), list[str]()
    for kernel in sorted(kernels, key=lambda kernel: kernel.id):
        try:
            key = catalog.builder.key_of(kernel)
            stored = catalog.builder.cache.read_record(key) if catalog.builder.cache.load(key) else None
        except BuildError:
            stored = None
        if stored is None:
            absent.append(kernel.name)
        else:
            libraries.append(Library(kernel=kernel, key=stored[0].key, abi=stored[1].abi))
    if absent:
        more = [f"and {counted(len(absent) - NAMED, 'more kernel')}"] if len(absent) > NAMED else []
        raise BuildError(
            "\n    ".join(["kernels that are not built cannot be frozen:", *absent[:NAMED], *more]),
            hint="catalog build makes them, with the same options.",
        )
    return libraries


def read_choices(path: StrPath) -> Choices:
    """The content of a file of frozen choices.

    Raises:
        ChoicesError: it cannot be read, or is not such a file; the message names the place.
    """
    path, again = Path(path), "Write it again with catalog freeze."
    try:
        with open_given(path, MOST_BYTES) as file:
            text = file.read()
        found = parse_json(text)
        stated = found.get("format") if isinstance(found, dict) else None
        if stated != 1:
            raise ChoicesError(f"{path} has format {stated!r}; this version knows 1", hint=again)
        choices = Choices.model_validate_json(text)
    except OSError as error:
        raise ChoicesError(f"{path}: {error.strerror}", hint="CATALOG_CHOICES names the file.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ChoicesError(f"{path}: {'.'.join(map(str, first['loc']))}: {expected(first)}", hint=again) from None
    except ValueError as error:
        raise ChoicesError(f"{path} is not a file of choices: {error}", hint=again) from None
    for number, form in enumerate(choices.forms):
        for choice in form.choices:
            if max(choice.stages) >= len(choices.libraries):
                raise ChoicesError(f"{path}: forms.{number}: a choice names a library that is not listed", hint=again)
    return choices


def fault_of(library: Library, cache: Cache) -> str | None:
    """Why the choice of a library is stale, by its record in the cache; None if it is not.

    Raises:
        CacheError: others have access to the cache.
        OSError: the cache cannot be read.
    """
    abi = abi_number(target_of(library.kernel.arch).abi_header)
    if library.abi != abi:
        return f"frozen with ABI {library.abi}, this version has ABI {abi}"
    stored = cache.read_record(library.key)
    if stored is not None:
        same = (stored[0].kernel_id, stored[1].abi) == (library.kernel.id, abi)
        return None if same else f"library {library.key} is of another kernel or another ABI"
    records = filter(None, map(cache.read_record, sorted(cache.all_keys())))
    others = [record.key for record, _ in records if record.kernel_id == library.kernel.id]
    has = f"which has {', '.join(others)} instead" if others else "which has no library of this kernel"
    return f"frozen as library {library.key}, absent from the cache {cache.folder}, {has}"


class ChosenForm:
    """The choices for one form, parsed: which problem gets which stages.

    Args:
        form: the choices as the file has them.
        connection: evaluates the rules' questions; any connection will do.
    """

    def __init__(self, form: FormChoices, connection: sqlite3.Connection) -> None:
        from catalog.ops import problem_of

        self._questions = form.questions
        self._connection = connection
        self._frozen: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._by_answers: dict[tuple[Any, ...], list[tuple[tuple[float, ...], tuple[int, ...]]]] = {}
        for choice in form.choices:
            problem = problem_of(choice.problem)
            self._frozen[problem.identity] = choice.stages
            self._by_answers.setdefault(self._answers(problem), []).append((problem.coordinates, choice.stages))

    def _answers(self, problem: Problem) -> tuple[Any, ...]:
        return self._questions.answers(problem, self._connection)

    def stages(self, problem: Problem) -> tuple[int, ...] | None:
        """The stages of the problem itself, or of the nearest one for which the rules say the same; None without.

        Of equally near ones, the first in the file counts.
        """
        stages = self._frozen.get(problem.identity)
        if stages is not None:
            return stages
        near, here = self._by_answers.get(self._answers(problem), ()), problem.coordinates
        return min(near, key=lambda known: math.dist(known[0], here))[1] if near else None


def parsed(form: FormChoices, connection: sqlite3.Connection, path: Path) -> ChosenForm:
    """The choices of a form.

    Raises:
        ChoicesError: a problem or a question is invalid; ``path`` is named.
    """
    try:
        return ChosenForm(form, connection)
    except (CatalogError, sqlite3.Error, TypeError) as error:
        raise ChoicesError(f"{path}: {error}", hint="Write it again with catalog freeze.") from None
