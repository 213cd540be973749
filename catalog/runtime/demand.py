"""Problems that kernels must be ready for: those of a trace, of a set of problems, or of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from catalog.errors import SelectionError, UsageError
from catalog.files import StrPath
from catalog.messages import counted
from catalog.ops import operations
from catalog.runtime.build_run import EVERYTHING, Shard, populate_to_build
from catalog.runtime.here import resolve_arch
from catalog.runtime.traces import read_trace
from catalog.schema.deployment import Deployment, read_model
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import Wanted
from catalog.schema.problem import Problem
from catalog.schema.shapes import load_shapes

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog

Call = tuple[Problem, Wanted]
"""A problem, and the lineage that it is selected from."""


@dataclass(frozen=True)
class Demand:
    """Problems that kernels must be ready for.

    Attributes:
        source: where they come from, for messages.
        calls: each problem once, with its lineage.
        derived: whether they were derived from a model instead of stated. An engine makes such calls in one of several
            ways, so an arch need not have kernels for all of them.
    """

    source: str
    calls: tuple[Call, ...]
    derived: bool = False

    @classmethod
    def of_trace(cls, path: StrPath, arch: str | None, revision: str | None = None) -> Demand:
        """The problems of a trace; on ``arch`` and of ``revision``, or None: on the lineages recorded with them.

        Raises:
            UsageError: as :func:`~catalog.runtime.traces.read_trace`.
        """
        path = Path(path)
        used = read_trace(path).used
        if arch is not None:
            return cls._on(str(path), dict.fromkeys(one.problem for one in used), arch, revision)
        calls = ((one.problem, one.wanted._replace(revision=revision or one.wanted.revision)) for one in used)
        return cls(str(path), tuple(dict.fromkeys(calls)))

    @classmethod
    def of_shapes(cls, name_or_path: StrPath, arch: str, revision: str | None = None) -> Demand:
        """The problems of a set; ``revision`` None: the arch's own.

        Raises:
            UsageError, SpecError: as :func:`~catalog.schema.shapes.load_shapes`.
        """
        return cls._on(
            os.fspath(name_or_path), (shape.problem for shape in load_shapes(name_or_path).shapes), arch, revision
        )

    @classmethod
    def of_model(cls, path: StrPath, deployment: Deployment, arch: str, revision: str | None = None) -> Demand:
        """The problems that every operation derives from a model's ``config.json``; ``revision`` None: the arch's own.

        Raises:
            UsageError: the file or a field of it is wrong, or no operation derives a problem from it.
        """
        path = Path(path)
        config = read_model(path)
        try:
            problems = [problem for of in operations() for problem in of.problems_of_model(config, deployment)]
        except UsageError as error:
            raise UsageError(f"{path}: {error.message}", hint=error.hint) from None
        if not problems:
            raise UsageError(f"{path}: no operation derives problems from this model")
        return cls._on(f"{path}, {counted(deployment.tp, 'rank')}", problems, arch, revision, derived=True)

    @classmethod
    def _on(
        cls, source: str, problems: Iterable[Problem], arch: str, revision: str | None, *, derived: bool = False
    ) -> Demand:
        resolved = resolve_arch(arch)
        calls = tuple((problem, Wanted(resolved, revision, operation=problem.operation)) for problem in problems)
        return cls(source, calls, derived)

    def answers(self, catalog: Catalog) -> Answers:
        """The kernels that the catalog selects for each call now. An arch that it lacks is populated.

        Raises:
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`Catalog.populate`.
        """
        plans: dict[Call, tuple[Kernel, ...]] = {}
        unanswered: dict[Call, SelectionError] = {}
        for wanted in dict.fromkeys(wanted for _, wanted in self.calls):
            if wanted.revision is None:
                populate_to_build(catalog, wanted.arch, wanted.operation)
        for call in self.calls:
            problem, wanted = call
            try:
                plans[call] = catalog.stages(problem, **wanted.keywords)
            except SelectionError as error:
                unanswered[call] = error
        return Answers(self, plans, unanswered)

    def rounds(self, catalog: Catalog, shard: Shard = EVERYTHING) -> Iterator[Sequence[Kernel]]:
        """The kernels to build: a builder's part of those selected now, then those selected instead of failed ones.

        Only the builder that saw a kernel fail knows what is selected instead, so it builds that whatever its part.
        """
        first = self.answers(catalog).kernels
        tried = {kernel.id for kernel in first}
        yield shard.part(first)
        while left := [kernel for kernel in self.answers(catalog).kernels if kernel.id not in tried]:
            tried.update(kernel.id for kernel in left)
            yield left


@dataclass(frozen=True)
class Answers:
    """The kernels of each call of a demand, stage by stage, and why other calls have none."""

    demand: Demand
    plans: Mapping[Call, tuple[Kernel, ...]]
    unanswered: Mapping[Call, SelectionError]

    @cached_property
    def kernels(self) -> list[Kernel]:
        """Each kernel once."""
        return list({kernel.id: kernel for stages in self.plans.values() for kernel in stages}.values())

    @property
    def complete(self) -> bool:
        """Whether every call has kernels. Of derived calls, some must."""
        return not self.unanswered or (self.demand.derived and bool(self.plans))

    @property
    def about(self) -> str:
        """The numbers of problems and kernels, as a sentence."""
        answered = f"{len(self.plans):,}" if self.unanswered else "all"
        problems, kernels = counted(len(self.demand.calls), "problem"), counted(len(self.kernels), "kernel")
        return f"{self.demand.source}: {problems}, {answered} answered by {kernels}"

    @property
    def reasons(self) -> list[str]:
        """A line for each form of problem without kernels: the first problem's reason, and the number of others."""
        by_form: dict[tuple[object, Wanted], list[SelectionError]] = {}
        for (problem, wanted), error in self.unanswered.items():
            by_form.setdefault((problem.form.kind, wanted), []).append(error)
        return [
            errors[0].message + (f" (and {counted(len(errors) - 1, 'more problem')} like it)" if errors[1:] else "")
            for errors in by_form.values()
        ]
