"""A cache of selections, keyed by exactly the facts that decide.

The selection query depends on a problem's form, on the sizes that rules read, and on the nearest measured problem. So
two problems get the same kernels if they have the same form and the same nearest measured problem, and every rule that
reads a size gives the same answers for both. SQLite evaluates such a rule for each combination of the columns it reads
that occurs among the rows of the right signature: a few literals instead of a table. Most rules read no size; those of
the host read none at all.

The query makes every decision. The key only says whether it would make the same decision again.

Where a learned model decides (:mod:`catalog.runtime.learning`), the sizes themselves count. Then the cache has the
kernels among which the model chooses, by the same key, and for each of these the decision for it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from catalog.ops import operation_of
from catalog.ops.families import possible_stages
from catalog.registry.timings import Measured
from catalog.registry.views import rows_of
from catalog.runtime.funnel import ROWS, signature_of
from catalog.schema.expressions import columns_read, parameters_named

if TYPE_CHECKING:
    from catalog.registry.learned import Learned
    from catalog.runtime.select import Choice, Decision, Selector
    from catalog.schema.problem import Problem
    from catalog.schema.problem_form import Form

MOST_DECISIONS = 65_536
"""Maximum number of cached decisions; when it is exceeded, all are dropped."""

MOST_QUESTIONS = 500
"""Up to this many questions about sizes are cheaper than the selection query; beyond it the sizes are the key."""


@dataclass(frozen=True, slots=True)
class Questions:
    """What rules ask about the sizes of the problems of a form.

    ``asking`` is the query for the answers, over no table, with ``parameters``; those in ``sizes`` vary by problem. It
    is None if there are no questions, or too many, in which case the ``sizes`` themselves are the answers.
    """

    asking: str | None
    parameters: Mapping[str, Any]
    sizes: tuple[str, ...]

    def answers(self, problem: Problem, connection: sqlite3.Connection) -> tuple[Any, ...]:
        """The answers for a problem, computed by any connection."""
        operation = operation_of(problem)
        said = {name: operation.parameter(problem, name) for name in self.sizes}
        if self.asking is None:
            return tuple(said.values())
        return tuple(connection.execute(self.asking, {**self.parameters, **said}).fetchone())


@dataclass(frozen=True, slots=True)
class _Deciding:
    """What decides for problems of a form: the nearest measured problem, and the rules' answers about sizes, if any.

    For problems that were not measured, what was ``learned`` replaces the nearest one.
    """

    measured: Measured | None
    learned: Learned | None
    questions: Questions | None


class Decisions:
    """The cached decisions of a selector.

    Args:
        selector: makes the decisions with its query.
    """

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self._connection = selector.connection
        self._deciding: dict[Form, _Deciding] = {}
        self._entrants: dict[tuple[Any, ...], Choice] = {}
        self._made: dict[tuple[Any, ...], Decision] = {}

    def of(self, problem: Problem) -> Decision:
        """The decision for a problem, from the cache or from the query.

        Raises:
            SelectionError: no kernel answers the problem; the message names the trait or rule that leaves none.
        """
        form = problem.form
        deciding = self._deciding.get(form)
        if deciding is None:
            if len(self._deciding) >= MOST_DECISIONS:
                self._deciding.clear()
            deciding = self._deciding[form] = self._deciding_about(problem)
        neighbour = None if deciding.measured is None else deciding.measured.nearest(problem)
        questions = deciding.questions
        answers = () if questions is None else questions.answers(problem, self._connection)
        key: tuple[Any, ...] = (form, neighbour, answers)
        if deciding.learned is not None and neighbour is not None and not neighbour[1]:
            return self._predicted(problem, deciding.learned, key)
        decision = self._made.get(key)
        return self._keep(key, self.selector.decide(problem)) if decision is None else decision

    def _predicted(self, problem: Problem, known: Learned, key: tuple[Any, ...]) -> Decision:
        """The decision by a model among the kernels that the query ranks first, or has ranked for the same ``key``."""
        entrants = self._entrants.get(key)
        if entrants is None:
            if len(self._entrants) >= MOST_DECISIONS:
                self._entrants.clear()
            entrants = self._entrants[key] = self.selector.entrants(problem)
        best = self.selector.reordered(problem, entrants.candidates, known)
        key = (*key, best[0].kernel.id)
        decision = self._made.get(key)
        if decision is None:
            decision = self._keep(key, self.selector.decided(problem, replace(entrants, candidates=tuple(best))))
        return decision

    def _keep(self, key: tuple[Any, ...], decision: Decision) -> Decision:
        if len(self._made) >= MOST_DECISIONS:
            self._made.clear()
        self._made[key] = decision
        return decision

    def forget(self) -> None:
        """Drop all decisions, because measurements or the usable kernels have changed."""
        self._deciding.clear()
        self._entrants.clear()
        self._made.clear()

    def _deciding_about(self, problem: Problem) -> _Deciding:
        kind, selector = problem.form.kind, self.selector
        asked = self.questions(problem)
        questions = asked if asked.sizes or asked.asking is not None else None
        for device, _ in selector.witnesses():
            measured = Measured.of_kind(self._connection, kind, device, selector.policy)
            if measured is not None:
                return _Deciding(measured, selector.learned(problem, device), questions)
        return _Deciding(None, None, questions)

    def questions(self, problem: Problem) -> Questions:
        """What the rules ask about the sizes of problems of this problem's form."""
        questions: dict[str, None] = {}
        parameters: dict[str, Any] = {}
        for family in possible_stages(problem):
            of_family = self.selector.parameters(problem, family)
            questions.update(dict.fromkeys(self._questions(problem, family, of_family)))
            parameters |= of_family
        asked = {name for question in questions for name in parameters_named(question)}
        sizes = tuple(sorted(_varying(problem) & asked))
        few = 0 < len(questions) <= MOST_QUESTIONS
        return Questions(
            f"SELECT {', '.join(questions)}" if few else None,
            {name: value for name, value in parameters.items() if name in asked},
            sizes,
        )

    def _questions(self, problem: Problem, family: str, parameters: Mapping[str, Any]) -> Iterator[str]:
        """SQL over sizes: each rule that reads a size, for each combination of the columns that it reads."""
        varying = _varying(problem)
        for expression in self.selector.expressions(family):
            if varying.isdisjoint(parameters_named(expression)):
                continue
            columns = sorted(columns_read(expression, operation_of(problem))) or ["arch"]
            rows = self._connection.execute(
                f"SELECT DISTINCT {', '.join(columns)} FROM {rows_of(problem.operation)} AS kernel "
                f"WHERE {ROWS} AND {signature_of(problem.operation)}",
                parameters,
            )
            for row in rows:
                literals = [f"{_literal(value)} AS {column}" for column, value in zip(columns, row, strict=True)]
                yield f"(SELECT ({expression}) FROM (SELECT {', '.join(literals)}) AS kernel)"


def _varying(problem: Problem) -> set[str]:
    """The parameters in which problems of one form may differ."""
    return {*problem.extents, *operation_of(problem).varying}


def _literal(value: Any) -> str:
    """A column's value as a SQL literal with the column's affinity."""
    if isinstance(value, str):
        quoted = value.replace("'", "''")
        return f"CAST('{quoted}' AS TEXT)"
    return f"CAST({value!r} AS {'REAL' if isinstance(value, float) else 'INTEGER'})"
