"""Selection: a problem's traits become one SQL query over the kernels of an arch.

The query requires signature equality, hardware validity, and every applicability rule of the arch's spec. It orders by
the measured medians of this very problem, else by those of the nearest measured problem of its kind
(:attr:`Form.kind`), then by the spec's static order, then by kernel id. The medians are those of one device, under the
measuring policy in force: this device, or its nearest sibling (:mod:`catalog.runtime.siblings`) if nothing of the kind
was measured here. Medians within noise (:attr:`Backend.noise`) of the best count as equal, so two runs make the same
choice. Kernels that did not compile or are quarantined are passed over until their content key changes.

Where ``catalog learn`` has shown that predicted times choose better than the nearest problem and the static order, they
order the first kernels of the static order instead (:mod:`catalog.runtime.learning`).

Each family has rules of its own, and so a query. Where several families may do most of the work of a problem, the best
kernels of each are compared: medians decide between all of them, otherwise the families take turns.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from catalog.backends import backend_of
from catalog.errors import SelectionError
from catalog.messages import counted
from catalog.ops import operation
from catalog.ops.families import mains, stages
from catalog.registry.foreign import Rival, rivals
from catalog.registry.kernels import lineage_id
from catalog.registry.learned import Learned, Place, learned
from catalog.registry.timings import SOUND, Neighbour, best_ms, nearest
from catalog.registry.views import rows_of
from catalog.runtime.funnel import PASSED_OVER, ROWS, Step, funnel, signature_of
from catalog.runtime.siblings import Sibling
from catalog.schema.expressions import parameters_named
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import of_lineage
from catalog.schema.policy import CONDITION, GRAPH, Policy
from catalog.schema.problem import Problem

if TYPE_CHECKING:
    from catalog.ops.protocol import Operation
    from catalog.rules.explain import Finding
    from catalog.runtime.catalog_file import Held

Traits = Mapping[str, Any]
Evidence = Literal["measured", "predicted", "nearest", "sibling", "static"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An applicable kernel, with the measured median or the predicted time in ms that selection uses, if any."""

    kernel: Kernel
    median_ms: float | None
    predicted_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The evidence that selection uses, and the candidates, best first.

    ``neighbour`` is the measured problem that the candidates' medians come from: the problem itself if it was measured.
    It is None if no problem of its kind was measured; then the static order decides. ``sibling`` is the device that it
    was measured on, or None if that was this device. ``policy`` is the measuring policy that was asked for; ``rivals``
    are other projects' implementations timed on the same problem and device, fastest first. ``learned`` is what was
    learned about the kind, where that replaces the neighbour's medians; ``neighbour_ms`` is then the lowest of these.
    """

    neighbour: Neighbour | None
    sibling: Sibling | None
    candidates: tuple[Candidate, ...]
    policy: Policy = GRAPH
    rivals: tuple[Rival, ...] = ()
    learned: Learned | None = None
    neighbour_ms: float | None = None

    @property
    def evidence(self) -> Evidence:
        """The kind of evidence that decides on the first candidate."""
        first = self.candidates[0] if self.candidates else None
        if self.neighbour is None or first is None or (first.median_ms is None and first.predicted_ms is None):
            return "static"
        if self.sibling is not None:
            return "sibling"
        if first.predicted_ms is not None:
            return "predicted"
        return "measured" if self.neighbour.same else "nearest"

    @property
    def about(self) -> str:
        """What decides, as a sentence; ``str()`` of the choice appends the candidates."""
        if self.evidence == "static" or self.neighbour is None:
            base = self.candidates[0].kernel.base if self.candidates else ""
            order = f"Static order, that of {base}, the nearest known revision" if base else "Static order"
            if self.learned is not None:
                unknown = "no prediction for the first kernels"
                why = self.learned.about("static") if self.learned.best == "static" else unknown
                return f"{order}: {why}{self._under}.{self._beaten}"
            return f"{order}: nothing of this problem's kind was measured on this device{self._under}."
        count = sum(candidate.median_ms is not None for candidate in self.candidates)
        if self.learned is not None:
            found = f"{self.learned.about('predicted')}{self._under}"
        elif self.neighbour.same:
            found = f"{count} of these kernels were timed on this very problem{self._under}"
        else:
            found = (
                f"{count} of these kernels were timed{self._under} on a problem of the same kind at distance "
                f"{self.neighbour.distance:.2f}, {self.neighbour.key}"
            )
        if self.sibling is None:
            return f"{self.evidence.capitalize()}: {found}.{self._beaten}"
        where = f"{self.sibling.profile}, the nearest measured sibling of {self.sibling.of}"
        return f"Sibling: on {where}, {found}.{self._beaten}"

    @property
    def _under(self) -> str:
        """The policy, unless it is the default one."""
        return "" if self.policy == GRAPH else f" as {self.policy}"

    @property
    def _beaten(self) -> str:
        """A sentence about the fastest rival, if it beats the first candidate."""
        ours = self.compared_ms
        if not self.rivals or ours is None or self.rivals[0].median_ms >= ours:
            return ""
        best = self.rivals[0]
        return f" {best.title} ({best.name}) took {best.median_ms:.4g} ms there."

    @property
    def compared_ms(self) -> float | None:
        """The median in ms that the rivals' are compared with: on the same problem, of our best kernel there."""
        return self.candidates[0].median_ms if self.learned is None else self.neighbour_ms

    def __str__(self) -> str:
        known = [c.median_ms if c.predicted_ms is None else c.predicted_ms for c in self.candidates]
        times = ["" if ms is None else f"{ms:.4g} ms" for ms in known]
        lines = [f"{time:>12}  {c.kernel.name}" for time, c in zip(times, self.candidates, strict=True)]
        return "\n".join([self.about, *lines])


@dataclass(frozen=True, slots=True)
class Decision:
    """The kernels of a plan, stage by stage, and the evidence for the main one.

    ``faster`` are the rivals that beat the main kernel by more than noise, fastest first.
    """

    kernels: tuple[Kernel, ...]
    evidence: Evidence
    faster: tuple[Rival, ...] = ()


class Selector:
    """The selection query of one lineage, built once from its rules in the registry.

    Args:
        connection: connection to the catalog.
        held: the lineage in the file.
        forbidding: returns the constraints that allow no kernel with the given traits.
        usable: whether a kernel may be selected, given whether its newest build failed or is quarantined.
        witnesses: returns the row ids of the devices whose timings count, the best first, each with what it is a
            sibling as, or None.
        policy: the measuring policy whose timings count.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        held: Held,
        *,
        forbidding: Callable[[Traits], list[Finding]],
        usable: Callable[[Kernel, bool], bool],
        witnesses: Callable[[], Iterable[tuple[int, Sibling | None]]],
        policy: Policy,
    ) -> None:
        self.connection = connection
        self.lineage = held.lineage
        self._operation = operation(held.lineage.operation)
        self.witnesses = witnesses
        self.policy = policy
        self._compute_units = held.compute_units
        self._forbidding = forbidding
        self._usable = usable
        self._rules: dict[str, list[sqlite3.Row]] = {}
        self._asked: dict[str, tuple[str, ...]] = {}
        self._queries: dict[tuple[str, bool], str] = {}

    def decide(self, problem: Problem, without: Set[str] = frozenset()) -> Decision:
        """The best kernel of each stage of a plan, except the ids ``without``.

        Raises:
            SelectionError: as :meth:`choice`.
        """
        return self.decided(problem, self.choice(problem, mains(problem), without=without), without)

    def decided(self, problem: Problem, choice: Choice, without: Set[str] = frozenset()) -> Decision:
        """The plan whose main kernel is the first of a choice.

        Raises:
            SelectionError: as :meth:`choice`.
        """
        kernels = self.stages(problem, choice.candidates[0].kernel, without)
        return Decision(kernels, choice.evidence, self._faster(choice))

    def entrants(self, problem: Problem) -> Choice:
        """The choice for a problem before :meth:`reordered`, with all kernels that take part in it.

        Raises:
            SelectionError: as :meth:`choice`.
        """
        choice = self._entrants(problem, mains(problem), 1)
        if not choice.candidates:
            raise self._nothing(problem, mains(problem))
        return choice

    def stages(self, problem: Problem, main: Kernel, without: Set[str] = frozenset()) -> tuple[Kernel, ...]:
        """The kernels of a plan whose ``main`` kernel does most of the work, except the ids ``without``.

        Raises:
            SelectionError: as :meth:`choice`.
        """
        return tuple(
            main
            if family == main.family
            else self.choice(problem, (family,), static=True, without=without).candidates[0].kernel
            for family in stages(problem, main)
        )

    def _faster(self, choice: Choice) -> tuple[Rival, ...]:
        ours = choice.compared_ms
        if ours is None:
            return ()
        return tuple(rival for rival in choice.rivals if rival.median_ms * self._as_good < ours)

    @property
    def _as_good(self) -> float:
        """The largest ratio of two medians that count as equal."""
        return 1 + backend_of(self.lineage.arch).noise

    def choice(
        self,
        problem: Problem,
        families: Sequence[str],
        limit: int = 1,
        *,
        static: bool = False,
        without: Set[str] = frozenset(),
    ) -> Choice:
        """As :meth:`found`, but there is at least one kernel.

        Raises:
            SelectionError: no kernel answers the problem; the message names the trait or rule that leaves none.
        """
        choice = self.found(problem, families, limit, static=static, without=without)
        if not choice.candidates:
            raise self._nothing(problem, families)
        return choice

    def found(
        self,
        problem: Problem,
        families: Sequence[str],
        limit: int,
        *,
        static: bool = False,
        without: Set[str] = frozenset(),
    ) -> Choice:
        """The best ``limit`` kernels of ``families`` for ``problem``, perhaps none, and the evidence for them.

        If no answering kernel is usable, returns those that have not failed.

        Args:
            problem: the problem to answer.
            families: the families of one stage, in order while nothing is measured.
            limit: maximum number of kernels.
            static: whether to ignore measurements.
            without: ids of kernels to leave out.
        """
        choice = self._entrants(problem, families, limit, static=static, without=without)
        best: Sequence[Candidate] = choice.candidates
        if choice.learned is not None:
            best = self.reordered(problem, best, choice.learned)
        return replace(choice, candidates=tuple(best[:limit]))

    def _entrants(
        self,
        problem: Problem,
        families: Sequence[str],
        limit: int,
        *,
        static: bool = False,
        without: Set[str] = frozenset(),
    ) -> Choice:
        """As :meth:`found`, before :meth:`reordered`, with at least as many candidates as that needs."""
        neighbour, sibling, known, neighbour_ms = None, None, None, None
        measured: dict[str, int | None] = {"device": None, "measured": None}
        there: list[Rival] = []
        for device, kin in () if static else self.witnesses():
            neighbour = nearest(self.connection, problem, device, self.policy)
            if neighbour is None:
                continue
            sibling = kin
            there = rivals(self.connection, neighbour.id, device, self.policy)
            known = None if neighbour.same else self.learned(problem, device)
            if known is None:
                measured = {"device": device, "measured": neighbour.id}
            else:
                neighbour_ms = best_ms(self.connection, neighbour.id, device, self.policy)
                limit = max(limit, known.candidates)
            break
        usable: list[list[Candidate]] = []
        others: list[list[Candidate]] = []
        for family in families:
            ranked = self._ranked(family, self.parameters(problem, family) | measured, sibling)
            of_family, unusable = self._sorted_out(ranked, limit, without)
            usable.append(of_family)
            others.append(unusable)
        best = self._merged(usable if any(usable) else others)
        return Choice(neighbour, sibling, tuple(best), self.policy, tuple(there), known, neighbour_ms)

    def learned(self, problem: Problem, device: int) -> Learned | None:
        """What was learned about the problem's kind on a device, if it is better than the nearest problem's medians."""
        lineage = lineage_id(self.connection, self.lineage)
        known = learned(self.connection, Place(problem.form.kind, lineage, device, self.policy))
        return None if known is None or known.best == "nearest" else known

    def reordered(self, problem: Problem, ranked: Sequence[Candidate], known: Learned) -> list[Candidate]:
        """Kernels in their static order, reordered by what is known about the problem's kind.

        If predictions are the best evidence, the first :attr:`Learned.candidates` of them are ordered by their
        predicted times. Kernels without a prediction follow in the static order.
        """
        if known.best != "predicted":
            return list(ranked)
        found = []
        for candidate in ranked[: known.candidates]:
            kernel, ms = candidate.kernel, None
            if kernel.id in known.model.factors:
                ms = known.model.ms(kernel.id, self._operation.work(problem, kernel, known.units))
            found.append(replace(candidate, predicted_ms=ms))
        ordered = sorted(found, key=lambda candidate: inf if candidate.predicted_ms is None else candidate.predicted_ms)
        return [*ordered, *ranked[known.candidates :]]

    def _sorted_out(
        self, ranked: Iterable[tuple[Candidate, bool]], limit: int, without: Set[str]
    ) -> tuple[list[Candidate], list[Candidate]]:
        """The first ``limit`` usable kernels, and the unusable ones before the last of them that have not failed."""
        usable: list[Candidate] = []
        others: list[Candidate] = []
        for candidate, passed_over in ranked:
            if candidate.kernel.id in without:
                continue
            if self._usable(candidate.kernel, passed_over):
                usable.append(candidate)
                if len(usable) == limit:
                    break
            elif not passed_over:
                others.append(candidate)
        return usable, others

    def _merged(self, ranked: Sequence[Sequence[Candidate]]) -> list[Candidate]:
        """The kernels of several families, each ranked: by the medians; without one, by their ranks."""
        if len(ranked) == 1:
            return list(ranked[0])
        turns = [candidate for turn in zip_longest(*ranked) for candidate in turn if candidate is not None]
        best = min((one.median_ms for one in turns if one.median_ms is not None), default=0.0)

        def place(one: Candidate) -> tuple[float, str]:
            if one.median_ms is None:
                return inf, ""
            return (0, one.kernel.id) if one.median_ms <= self._as_good * best else (one.median_ms, "")

        return sorted(turns, key=place)

    def _ranked(
        self, family: str, parameters: Mapping[str, Any], sibling: Sibling | None
    ) -> Iterator[tuple[Candidate, bool]]:
        """The kernels that answer the problem, best first, each with whether its newest build is bad."""
        bound = {**self.policy.parameters, **parameters, "as_good": self._as_good}
        timed_here = sibling is None or sibling.profile.arch == self.lineage.arch
        for row in self.connection.execute(self._query(family, timed_here), bound):
            yield Candidate(self._operation.kernel.from_row(row), row["median_ms"]), bool(row["passed_over"])

    def steps(self, problem: Problem, family: str) -> tuple[Step, ...]:
        """The funnel from the lineage's kernels to those that answer the problem."""
        return funnel(self.connection, self.parameters(problem, family), self._rules_of(family, "applicability"))

    def expressions(self, family: str) -> list[str]:
        """The rules and orders of ``family``: SQL over columns of table ``kernel`` and :meth:`parameters`."""
        return [rule["expr"] for kind in ("applicability", "order") for rule in self._rules_of(family, kind)]

    def parameters(self, problem: Problem, family: str) -> dict[str, Any]:
        """The parameters of the selection query: of the lineage, and those of the problem that rules or orders name."""
        if family not in self._asked:
            named = {name for expression in self.expressions(family) for name in parameters_named(expression)}
            self._asked[family] = tuple(name for name in self._operation.parameters if name in named)
        required = self._operation.required_traits(problem, family, self.lineage)
        return {
            **{f"want_{name}": value for name, value in required.items()},
            **self.lineage.parameters,
            **{name: self._operation.parameter(problem, name) for name in self._asked[family]},
            "compute_units": self._compute_units,
            "features": " ".join(("", *sorted(backend_of(self.lineage.arch).features), "")),
        }

    def _query(self, family: str, timed_here: bool) -> str:
        """The selection query, with the timings of this arch's own kernels or those of their twins of another arch."""
        if (family, timed_here) not in self._queries:
            rules = [f"({rule['expr']})" for rule in self._rules_of(family, "applicability")]
            order = [rule["expr"] for rule in self._rules_of(family, "order")]
            kept = " AND ".join([ROWS, signature_of(self.lineage.operation), "hw_valid", *rules])
            best = "median_ms <= :as_good * best_ms"
            by = ["median_ms IS NULL", f"iif({best}, 0, median_ms)", f"iif({best}, id, NULL)", *order, "id"]
            timed = "SELECT kernel_id, median_ms, max(created) FROM timing" if timed_here else _twins(self._operation)
            self._queries[family, timed_here] = (
                "SELECT * FROM ("
                f"SELECT kernel.*, median_ms, min(median_ms) OVER () AS best_ms, {PASSED_OVER} AS passed_over "
                f"FROM {rows_of(self.lineage.operation)} AS kernel LEFT JOIN ("
                # If a row has several libraries, the last measured one counts: with max() SQLite takes its columns.
                f"  {timed} WHERE problem_id = :measured AND device_id = :device AND {CONDITION} AND {SOUND} GROUP BY 1"
                f") AS measured ON measured.kernel_id = kernel.id WHERE {kept}) AS kernel "
                f"ORDER BY {', '.join(by)}"
            )
        return self._queries[family, timed_here]

    def _rules_of(self, family: str, kind: str) -> list[sqlite3.Row]:
        if family not in self._rules:
            self._rules[family] = self.connection.execute(
                "SELECT * FROM rule WHERE operation = ? AND arch = ? AND revision = ? AND space = ? AND scope = ? "
                "ORDER BY position",
                (self.lineage.operation, self.lineage.arch, self.lineage.revision, self.lineage.space, family),
            ).fetchall()
        return [rule for rule in self._rules[family] if rule["kind"] == kind]

    def _nothing(self, problem: Problem, families: Sequence[str]) -> SelectionError:
        arch, family = self.lineage.arch, families[0]
        reasons = "; ".join(f"no {other} kernel: {self._reason(problem, other)}" for other in families[1:])
        return SelectionError(
            f"no {family} kernel of {arch} answers the problem {problem.key}: {self._reason(problem, family)}"
            + (f"; {reasons}" if reasons else ""),
            hint=f"To list the kernels: catalog query \"family='{family}'\" --arch {arch}",
        )

    def _reason(self, problem: Problem, family: str) -> str:
        """The traits or rules that leave no kernel of ``family`` for ``problem``."""
        steps = self.steps(problem, family)
        reason = _rejections(steps)
        if steps[-1].kind == "trait":
            required = self._operation.required_traits(problem, family, self.lineage)
            rules = {finding.id: finding for finding in self._forbidding(required)}
            forbidden = [f"{rule.id} forbids {', '.join(rule.traits)}: {rule.reason}" for rule in rules.values()]
            reason = "; ".join([steps[-1].reason, *forbidden])
        return reason


def _twins(operation: Operation) -> str:
    """SQL for the timings of kernels of another arch, as those of the lineage's kernels with the same traits."""
    rows = rows_of(operation.name)
    alike = " AND ".join(f"twin.{name} = theirs.{name}" for name in ("revision", "space", "variant", *operation.traits))
    return (
        "SELECT twin.id AS kernel_id, median_ms, max(timing.created) FROM timing "
        f"JOIN {rows} AS theirs ON theirs.id = timing.kernel_id JOIN {rows} AS twin ON {of_lineage('twin')} AND {alike}"
    )


def _rejections(steps: Sequence[Step]) -> str:
    """The rules that reject kernels of the right signature, strictest first, as text."""
    total = next(step.left for step in reversed(steps) if step.kind == "trait")
    biting = sorted((step for step in steps if step.kind != "trait" and step.rejects), key=lambda step: -step.rejects)
    rejections = "; ".join(f"{step.id} rejects {step.rejects:,} ({step.reason})" for step in biting)
    return f"of {counted(total, 'kernel')} with its signature, {rejections or 'none could be built and run'}"
