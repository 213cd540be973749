"""Selections that are remembered: under a key that holds what decides, and not one value more.

Of a problem the selection query reads its form, the sizes that rules ask for, and which measured problem is nearest. So
two problems get the same kernels where they have the same form and the same nearest measured problem, and every rule
that asks for a size says the same of both. What such a rule says is asked of SQLite itself, of each combination of the
columns that it reads which the rows of the right signature have: a handful of literals instead of a table. Most rules
ask for no size, and the host's for none at all.

The query remains the truth: it makes every decision, the key only says whether it would make the same one again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from catalog.ops import operation_of
from catalog.registry.timings import Measured
from catalog.registry.views import rows_of
from catalog.runtime.funnel import ROWS, signature_of
from catalog.schema.expressions import columns_read

if TYPE_CHECKING:
    from catalog.runtime.select import Decision, Selector
    from catalog.schema.problem import Problem
    from catalog.schema.problem_form import Form

MOST_DECISIONS = 65_536
"""Decisions that are remembered; beyond that all are forgotten."""

MOST_QUESTIONS = 500
"""Questions about sizes that cost less than the selection query; of a form with more, the sizes themselves decide."""

_PARAMETER = re.compile(r":(\w+)")


@dataclass(frozen=True, slots=True)
class _Deciding:
    """What decides about problems of a form: which measured one is nearest, and what the rules say of the sizes.

    ``asking`` is a query of the latter, with ``parameters``, of which those in ``sizes`` are a problem's own. None:
    there is nothing to ask, or too much, and the ``sizes`` themselves decide.
    """

    measured: Measured | None
    asking: str | None
    parameters: dict[str, Any]
    sizes: tuple[str, ...]


class Decisions:
    """What a selector has decided.

    Args:
        selector: makes the decisions, by its query.
    """

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self._connection = selector.connection
        self._deciding: dict[Form, _Deciding] = {}
        self._made: dict[tuple[Any, ...], Decision] = {}

    def of(self, problem: Problem) -> Decision:
        """The decision about a problem, made now or before.

        Raises:
            SelectionError: no kernel answers the problem; says which trait or rule leaves none.
        """
        key = self.key_of(problem)
        decision = self._made.get(key)
        if decision is None:
            decision = self.selector.decide(problem)
            if len(self._made) >= MOST_DECISIONS:
                self._made.clear()
            self._made[key] = decision
        return decision

    def forget(self) -> None:
        """Decide anew from now on: what was measured has changed, or which kernels can be had."""
        self._deciding.clear()
        self._made.clear()

    def key_of(self, problem: Problem) -> tuple[Any, ...]:
        """Equal of two problems only where the selection query gives both the same."""
        form = problem.form
        deciding = self._deciding.get(form)
        if deciding is None:
            if len(self._deciding) >= MOST_DECISIONS:
                self._deciding.clear()
            deciding = self._deciding[form] = self._deciding_about(problem)
        said = {name: getattr(problem, name) for name in deciding.sizes}
        if deciding.asking is not None:
            said = self._connection.execute(deciding.asking, deciding.parameters | said).fetchone()
        neighbour = None if deciding.measured is None else deciding.measured.nearest(problem)
        return form, neighbour, tuple(said) if deciding.asking is not None else tuple(said.values())

    def _deciding_about(self, problem: Problem) -> _Deciding:
        questions: dict[str, None] = {}
        operation = operation_of(problem)
        for family in operation.stages(problem):
            questions.update(dict.fromkeys(self._questions(problem, family)))
        measured = Measured.of_kind(self._connection, problem.form.kind, self.selector.device())
        parameters = self.selector.parameters(problem, operation.main_stage(problem))
        asked = {name for question in questions for name in _PARAMETER.findall(question)}
        sizes = tuple(sorted(problem.extents.keys() & asked))
        few = 0 < len(questions) <= MOST_QUESTIONS
        return _Deciding(
            measured,
            f"SELECT {', '.join(questions)}" if few else None,
            {name: value for name, value in parameters.items() if name in asked},
            sizes,
        )

    def _questions(self, problem: Problem, family: str) -> Iterator[str]:
        """SQL over sizes: what each rule that asks for one says of each combination of the columns that it reads."""
        parameters = self.selector.parameters(problem, family)
        for expression in self.selector.expressions(family):
            if problem.extents.keys().isdisjoint(_PARAMETER.findall(expression)):
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


def _literal(value: Any) -> str:
    """A value of a column as SQL, with the affinity that the column has."""
    if isinstance(value, str):
        quoted = value.replace("'", "''")
        return f"CAST('{quoted}' AS TEXT)"
    return f"CAST({value!r} AS {'REAL' if isinstance(value, float) else 'INTEGER'})"
