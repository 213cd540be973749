"""Families of kernels in plans: an operation's own, and those that other distributions add to it.

An operation says which of its families does most of the work of a problem, and which ones run before and after it. An
added family stands beside some of them (:attr:`~catalog.ops.protocol.Family.beside`) and answers the same problems. So
kernels of several families may do most of the work of a problem, and selection compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from catalog.ops import operation_of

if TYPE_CHECKING:
    from catalog.ops.protocol import Family, Operation
    from catalog.schema.kernel import Kernel
    from catalog.schema.problem import Problem


def added(of: Operation) -> dict[str, Family]:
    """The usable families that other distributions add to an operation, by name."""
    plugins = of.traits["family"].plugins
    return {plugin.name: plugin.object for plugin in plugins if plugin.object is not None}


def main_families(of: Operation) -> tuple[str, ...]:
    """The families of kernels that do most of the work of some problem."""
    return (*of.main_families, *added(of))


def mains(problem: Problem) -> tuple[str, ...]:
    """The families of which one does most of the work of ``problem``, in order while nothing is measured."""
    of = operation_of(problem)
    own = of.main_stage(problem)
    beside = [(family.order, name) for name, family in added(of).items() if own in family.beside]
    return tuple(name for _, name in sorted([(0, own), *beside]))


def stages(problem: Problem, main: Kernel) -> tuple[str, ...]:
    """The families of the kernels that run in order, if ``main`` does most of the work."""
    of = operation_of(problem)
    family = added(of).get(main.family)
    return of.stages(problem, main) if family is None else (*family.before, main.family, *family.after)


def possible_stages(problem: Problem) -> tuple[str, ...]:
    """The families of all kernels that may run: the operation's own, then those that compete with them."""
    of = operation_of(problem)
    theirs = ((name, added(of)[name]) for name in mains(problem) if name in added(of))
    competing = (stage for name, family in theirs for stage in (*family.before, name, *family.after))
    return tuple(dict.fromkeys((*of.stages(problem), *competing)))


def main_stage(problem: Problem, kernels: Sequence[Kernel]) -> int:
    """The place among the ``kernels`` of a plan of the one that does most of the work."""
    own = operation_of(problem).main_stage(problem)
    places = {kernel.family: place for place, kernel in enumerate(kernels)}
    # Beside an added family, the operation's own may only prepare or finish its work.
    return next(places[family] for family in sorted(mains(problem), key=lambda one: one == own) if family in places)


def smoke_fields(of: Operation, family: str, traits: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Fields of small problems that kernels of ``family`` may answer; ``traits`` as in the operation's method."""
    its = added(of).get(family)
    if its is None:
        return of.smoke_fields(family, traits)
    return its.smoke_fields((fields for own in its.beside for fields in of.smoke_fields(own, traits)), traits)
