"""Filters for CK's own generator: with them it makes exactly the kernels that some problems need.

``generate.py --api A,B --filter P,Q`` takes one pattern of :mod:`fnmatch` for each API; an API whose plans have several
stages takes one for each stage, joined by ``@``, and an API may be named several times. Patterns have no alternatives,
so a set of kernels needs several of them. Two are joined to a wider one where that matches no other kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from catalog.errors import UsageError
from catalog.ops.attention.upstream.sources import ck_facts
from catalog.registry.views import rows_of
from catalog.schema.lineage import Lineage, of_lineage

if TYPE_CHECKING:
    import sqlite3

    from catalog.schema.kernel import Kernel

COLUMNS = ("receipt", "api", "filter", "kernels")
"""The columns of :attr:`Filter.row`."""


@dataclass(frozen=True)
class Filter:
    """One pattern for an API of the generator, with the receipt that lists its kernels.

    ``patterns`` has the pattern of each stage, in the generator's order; ``names`` the kernels that they select.
    """

    receipt: int
    api: str
    patterns: tuple[str, ...]
    names: frozenset[str]

    @property
    def row(self) -> list[Any]:
        """The values of :data:`COLUMNS`."""
        return [self.receipt, self.api, "@".join(self.patterns), len(self.names)]


def commands(filters: Sequence[Filter], lineage: Lineage) -> list[str]:
    """Calls of the generator with ``filters``, one for each receipt; it must be of the lineage's revision."""
    lines = []
    for receipt in sorted({one.receipt for one in filters}):
        rows = [one.row for one in filters if one.receipt == receipt]
        apis, patterns = (",".join(str(row[place]) for row in rows) for place in (1, 2))
        which = f"--receipt {receipt} --mask {lineage.variant}"
        if lineage.known != "2025-07":  # whose generator makes the kernels of every target
            which += f" --targets {lineage.arch}"
        lines.append(f"generate.py {which} --api {apis} --filter '{patterns}'")
    return lines


def filters_of(connection: sqlite3.Connection, plans: Iterable[Sequence[Kernel]]) -> list[Filter]:
    """The filters that select exactly the kernels of ``plans``, all of one lineage.

    Args:
        connection: to the catalog.
        plans: the kernels of each plan, stage by stage.

    Raises:
        UsageError: the kernels are of several lineages, or not upstream's; or no receipt lists all of a plan's.
    """
    distinct = list({tuple(kernel.id for kernel in stages): stages for stages in plans}.values())
    lineages = {kernel.lineage for stages in distinct for kernel in stages}
    if len(lineages) != 1 or next(iter(lineages)).space != "ck":
        raise UsageError(
            f"upstream's generator makes no kernels of {', '.join(map(str, sorted(lineages))) or 'no arch'}",
            hint="Name one AMD arch, as in --arch gfx942.",
        )
    [lineage] = lineages
    filters = dict.fromkeys(_exact(connection, stages) for stages in distinct)
    return _joined(connection, list(filters), lineage)


def _exact(connection: sqlite3.Connection, stages: Sequence[Kernel]) -> Filter:
    """The filter of one plan."""
    facts, patterns, apis = ck_facts().families, dict[int, str](), set[str]()
    width = 1
    for kernel in stages:
        places = facts[kernel.family].filter.split("@")
        width = len(places)
        place = next(place for place, part in enumerate(places) if "{name}" in part)
        patterns[place] = _without_target(kernel.name, kernel.target)
        apis.add(facts[kernel.family].api)
    [api] = apis
    holes = ", ".join("?" for _ in stages)
    asked = (
        f"SELECT receipt FROM kernel_receipt WHERE kernel_id IN ({holes}) "
        "GROUP BY receipt HAVING count(*) = ? ORDER BY receipt LIMIT 1"
    )
    found = connection.execute(asked, [*(kernel.id for kernel in stages), len(stages)]).fetchone()
    if found is None:
        raise UsageError(f"no receipt lists all of {', '.join(kernel.name for kernel in stages)}")
    ordered = tuple(patterns.get(place, "*") for place in range(width))
    return Filter(found[0], api, ordered, frozenset(_without_target(kernel.name, kernel.target) for kernel in stages))


def _without_target(name: str, target: str) -> str:
    """The name that the generator compares with patterns: it appends the target only to the names of files."""
    return name.removesuffix(f"_{target}")


def _joined(connection: sqlite3.Connection, filters: list[Filter], lineage: Lineage) -> list[Filter]:
    """Filters joined two by two for as long as the joined one selects only kernels that are wanted."""
    wanted: dict[tuple[int, str], set[str]] = {}
    for one in filters:
        wanted.setdefault((one.receipt, one.api), set()).update(one.names)
    others = {
        (receipt, api): _names(connection, lineage, receipt, api) - names for (receipt, api), names in wanted.items()
    }
    done: list[Filter] = []
    for one in sorted(filters, key=lambda one: (one.receipt, one.api, one.patterns)):
        for place, there in enumerate(done):
            wider = _wider(there, one)
            if wider is not None and not any(map(_matcher(wider), others[one.receipt, one.api])):
                done[place] = wider
                break
        else:
            done.append(one)
    return done


def _matcher(one: Filter) -> Callable[[str], object]:
    """A function that returns whether a name matches a pattern of the filter."""
    expression = re.compile("|".join(translate(pattern) for pattern in one.patterns if pattern != "*"))
    return expression.match


def _names(connection: sqlite3.Connection, lineage: Lineage, receipt: int, api: str) -> set[str]:
    """The kernels that the generator lists for an API and a receipt."""
    families: Mapping[str, Any] = ck_facts().families
    of_api = [family for family, facts in families.items() if facts.api == api]
    holes = ", ".join(f":family{place}" for place, _ in enumerate(of_api))
    asked = (
        f"SELECT name, target FROM {rows_of(lineage.operation)} AS kernel JOIN kernel_receipt ON kernel_id = kernel.id "
        f"WHERE {of_lineage('kernel')} AND receipt = :receipt AND family IN ({holes})"
    )
    parameters = {f"family{place}": family for place, family in enumerate(of_api)} | {"receipt": receipt}
    return {_without_target(*row) for row in connection.execute(asked, {**parameters, **lineage.parameters})}


def _wider(a: Filter, b: Filter) -> Filter | None:
    """A filter that selects what both select; None if they have little in common."""
    if (a.receipt, a.api) != (b.receipt, b.api):
        return None
    patterns = []
    for one, other in zip(a.patterns, b.patterns, strict=True):
        words, others = one.split("_"), other.split("_")
        if len(words) != len(others):
            return None
        patterns.append("_".join(x if x == y else "*" for x, y in zip(words, others, strict=True)))
    return Filter(a.receipt, a.api, tuple(patterns), a.names | b.names)
