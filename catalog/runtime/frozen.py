"""Selection from frozen choices: plans whose kernels a file names, served from the cache and the remote cache."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.build.builder import Artifact
from catalog.build.cache import Cache
from catalog.build.first_runs import FirstRuns
from catalog.build.remote import Remote
from catalog.errors import ChoicesError, ProblemError, SelectionError
from catalog.ops import problem_of
from catalog.runtime.choices import ChosenForm, FormChoices, Library, fault_of, parsed, read_choices
from catalog.runtime.guard import Guard
from catalog.runtime.here import Devices, resolve_arch
from catalog.runtime.plan import Plan, Shared
from catalog.runtime.select import Choice
from catalog.runtime.splits import check_fits
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem
from catalog.schema.spec_files import DEFAULT_REVISION

if TYPE_CHECKING:
    from catalog.runtime.devices import Device
    from catalog.schema.problem_form import Form

_Place = tuple[str, str, str]
"""The text of a form, an arch and a variant."""


class FrozenPlanner:
    """Makes plans from a file of frozen choices, and provides their services.

    Nothing is compiled, and nothing is written except libraries of the remote cache.

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
        self.policy = self._choices.policy
        self._libraries = {library.kernel.id: library for library in self._choices.libraries}
        self._cache = Cache(settings.settings().cache_dir)
        self._remote = Remote.of(settings.settings())
        self._calculator = sqlite3.connect(":memory:", check_same_thread=False)
        self._forms: dict[_Place, list[FormChoices]] = {}
        self._ways: dict[tuple[Form, str, str | None, str], tuple[str, list[ChosenForm]]] = {}
        self._sound: dict[tuple[int, ...], tuple[Kernel, ...]] = {}
        for form in sorted(self._choices.forms, key=lambda form: (form.revision != DEFAULT_REVISION, form.revision)):
            self._forms.setdefault((self._text(form), form.arch, form.variant), []).append(form)

    def _text(self, form: FormChoices) -> str:
        try:
            return problem_of(form.choices[0].problem).form.text
        except ProblemError as error:
            raise ChoicesError(f"{self.path}: {error}", hint="Write it again with catalog freeze.") from None

    def plan(self, problem: Problem, arch: str, revision: str | None, variant: str) -> Plan:
        """The plan that the file names for ``problem``, or for the nearest problem with the same answers of rules.

        The other arguments are those of :meth:`catalog.Catalog.select`, its ``mask_impl`` last.

        Raises:
            ChoicesError: the file has none, or the cache does not have its libraries; the message names them.
            ProblemError: a run would need more memory than this machine has.
        """
        asked = (problem.form, arch, revision, variant)
        resolved, forms = self._ways.get(asked) or self._way(*asked)
        for form in forms:
            stages = form.stages(problem)
            if stages is not None:
                break
        else:
            raise ChoicesError(
                f"{self.path} has no choice for the problem {problem.key} on {resolved}",
                hint="Add it to the trace, set or model that catalog freeze reads, and freeze again.",
            )
        kernels = self._sound.get(stages)
        if kernels is None:
            kernels = self._sound[stages] = self._kernels(stages)
        check_fits(problem, kernels, self._devices.host_of(arch))
        return Plan(problem, resolved, kernels, self)

    def _way(self, form: Form, arch: str, revision: str | None, variant: str) -> tuple[str, list[ChosenForm]]:
        """The arch, and the choices for problems of this form, those of the default revision first."""
        resolved = resolve_arch(arch)
        there = self._forms.get((form.text, resolved, variant), ())
        asked = [one for one in there if revision in (None, one.revision)]
        way = resolved, [parsed(one, self._calculator, self.path) for one in asked]
        if asked:
            self._ways[form, arch, revision, variant] = way
        return way

    def _kernels(self, stages: Sequence[int]) -> tuple[Kernel, ...]:
        """The kernels of a plan, after a check of their libraries' records; the bytes are checked by a load.

        Raises:
            ChoicesError: a choice is stale.
        """
        libraries = [self._choices.libraries[place] for place in stages]
        for library in libraries:
            with self._readable():
                if self._remote is not None and self._cache.load(library.key) is None:
                    self._remote.fetch(library.key, self._cache, threading.Event())
                fault = fault_of(library, self._cache)
            if fault is not None:
                raise self._stale(library, fault)
        return tuple(library.kernel for library in libraries)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ChoicesError(
                f"{self.path}: the cache {self._cache.folder} cannot be read: {error.strerror}"
            ) from None

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
        with self._readable():
            record = self._cache.load(library.key)
            if record is None:
                raise self._stale(library, fault_of(library, self._cache) or "its library is damaged")
        self._cache.use(library.key)
        path, size = self._cache.loaded_path(library.key), record.so_bytes or 0
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
