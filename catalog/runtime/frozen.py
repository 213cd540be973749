"""Selection from frozen choices: plans whose kernels a file names, served from the cache alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.build.builder import Artifact
from catalog.build.cache import Cache
from catalog.build.first_runs import FirstRuns
from catalog.errors import ChoicesError, ProblemError, SelectionError
from catalog.ops import problem_of
from catalog.runtime.choices import ChosenForm, FormChoices, Library, fault_of, parsed, read_choices
from catalog.runtime.devices.here import Devices, resolve_arch
from catalog.runtime.guard import Guard
from catalog.runtime.plan import Plan, Shared
from catalog.runtime.select import Choice
from catalog.runtime.splits import check_fits
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import Wanted
from catalog.schema.problem import Problem
from catalog.schema.spec_files import DEFAULT_REVISION

if TYPE_CHECKING:
    from catalog.runtime.devices import Device

_Place = tuple[str, str, str]
"""The text of a form, an arch and a variant."""


class FrozenPlanner:
    """Makes plans from a file of frozen choices, and provides their services; nothing is written or compiled.

    Args:
        path: the file.
        devices: the devices that run the kernels.

    Raises:
        ChoicesError: as :func:`~catalog.runtime.choices.read_choices`.
    """

    def __init__(self, path: Path, devices: Devices) -> None:
        self.path = path
        self.shared = Shared()
        self._devices = devices
        self._choices = read_choices(path)
        self._libraries = {library.kernel.id: library for library in self._choices.libraries}
        self._checked: set[str] = set()
        self._cache = Cache(settings.settings().cache_dir)
        self._calculator = sqlite3.connect(":memory:", check_same_thread=False)
        self._forms: dict[_Place, list[FormChoices]] = {}
        self._parsed: dict[int, ChosenForm] = {}
        for form in sorted(self._choices.forms, key=lambda form: (form.revision != DEFAULT_REVISION, form.revision)):
            self._forms.setdefault((self._text(form), form.arch, form.variant), []).append(form)

    def _text(self, form: FormChoices) -> str:
        try:
            return problem_of(form.choices[0].problem).form.text
        except ProblemError as error:
            raise ChoicesError(f"{self.path}: {error}", hint="Write it again with catalog freeze.") from None

    def plan(self, problem: Problem, wanted: Wanted) -> Plan:
        """The plan that the file names for ``problem``, or for the nearest problem with the same answers of rules.

        Raises:
            ChoicesError: the file has none, or the cache does not have its libraries; the message names them.
            ProblemError: a run would need more memory than this machine has.
        """
        arch = resolve_arch(wanted.arch)
        stages = next(filter(None, (form.stages(problem) for form in self._candidates(problem, arch, wanted))), None)
        if stages is None:
            raise ChoicesError(
                f"{self.path} has no choice for the problem {problem.key} on {arch}",
                hint="Add it to the trace, set or model that catalog freeze reads, and freeze again.",
            )
        kernels = tuple(self._choices.libraries[place].kernel for place in stages)
        for kernel in kernels:
            if kernel.id not in self._checked:
                self._check(self._libraries[kernel.id])
                self._checked.add(kernel.id)
        check_fits(problem, kernels, self._devices.host_of(wanted.arch))
        return Plan(problem, arch, kernels, self)

    def _candidates(self, problem: Problem, arch: str, wanted: Wanted) -> list[ChosenForm]:
        forms = self._forms.get((problem.form.text, arch, wanted.variant), ())
        found = []
        for form in forms:
            if wanted.revision in (None, form.revision):
                if id(form) not in self._parsed:
                    self._parsed[id(form)] = parsed(form, self._calculator, self.path)
                found.append(self._parsed[id(form)])
        return found

    def _check(self, library: Library) -> None:
        """Check the record of a library, which is quick; its bytes are checked when it is loaded.

        Raises:
            ChoicesError: the choice is stale.
        """
        fault = fault_of(library, self._cache)
        if fault is not None:
            raise self._stale(library, fault)

    def _stale(self, library: Library, fault: str) -> ChoicesError:
        return ChoicesError(
            f"{self.path}: kernel {library.kernel.name}: {fault}",
            hint="Build the kernels of this version with catalog build, then write the file again with catalog freeze.",
        )

    def choice(self, problem: Problem, limit: int) -> Choice:
        """Nothing to explain: no measurement decides.

        Raises:
            ChoicesError: always.
        """
        raise ChoicesError(
            f"the kernels for {problem.key} are frozen in {self.path}: no measurement decides",
            hint="Without CATALOG_CHOICES, the catalog explains its choices.",
        )

    def build(self, kernel: Kernel) -> Artifact:
        """The library that the kernel was frozen with, from the cache.

        Raises:
            ChoicesError: the cache does not have it, or it is damaged.
        """
        library = self._libraries[kernel.id]
        record = self._cache.load(library.key)
        if record is None:
            raise self._stale(library, fault_of(library, self._cache) or "its library is damaged")
        self._cache.use(library.key)
        path, size = self._cache.so_path(library.key), record.so_bytes or 0
        return Artifact(library.key, path, record.so_sha256 or "", size, kernel.id, record.compile_s, cached=True)

    def reselect(self, problem: Problem, without: Set[str]) -> tuple[Kernel, ...]:
        """Nothing to select from: frozen kernels are never replaced.

        Raises:
            SelectionError: always.
        """
        raise SelectionError(f"the kernels for {problem.key} are frozen in {self.path}")

    def device(self, arch: str) -> Device[Any]:
        """As :meth:`catalog.Catalog.device`."""
        return self._devices.of(arch)

    def guard(
        self, problem: Problem, kernels: Sequence[Kernel], artifacts: Sequence[Artifact], device: Device[Any]
    ) -> None:
        """As :meth:`catalog.runtime.guard.Guard.check`; a quarantine is stored beside the cache only."""
        self._guard.check(problem, kernels, artifacts, device)

    @cached_property
    def _guard(self) -> Guard:
        return Guard(FirstRuns(self._cache.folder), lambda quarantine: None)
