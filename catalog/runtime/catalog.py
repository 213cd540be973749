"""The catalog as a Python object: populate, select, build."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.files import StrPath
from catalog.ops import DEFAULT
from catalog.ops.families import mains
from catalog.registry import timings
from catalog.runtime.builds import Builds
from catalog.runtime.catalog_file import CatalogFile
from catalog.runtime.funnel import Step
from catalog.runtime.here import Devices, resolve_arch
from catalog.runtime.on_default import on_default
from catalog.runtime.plan import Plan
from catalog.runtime.planner import Planners
from catalog.runtime.rows import Rows
from catalog.runtime.select import Candidate, Choice
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import Lineage, Wanted
from catalog.schema.policy import Policy, policy_in_force
from catalog.schema.problem import Problem

if TYPE_CHECKING:
    from typing_extensions import Self

    from catalog.build.builder import Artifact, Builder
    from catalog.registry.adopted import Forgotten
    from catalog.registry.merge import Merged
    from catalog.rules.diff import Difference
    from catalog.rules.explain import Explanation
    from catalog.rules.parity import Comparison, Reference
    from catalog.rules.populate import Populated, Progress
    from catalog.rules.restriction import Restriction
    from catalog.runtime.build_log import BuildLog
    from catalog.runtime.decisions import Questions
    from catalog.runtime.devices import Device, DeviceInfo
    from catalog.runtime.devices.host.device import HostDevice
    from catalog.runtime.learning import Lessons


class Catalog:
    """The kernels of one SQLite file.

    ``Catalog.select(problem)`` works on the default catalog, ``Catalog(path).select(problem)`` on the file at ``path``;
    the file is created if it does not exist, and an arch is populated when it is first selected from.

    Args:
        path: the file; None: the file from the settings.
        num_threads: threads of a host kernel; 0: every core that the process may use; None: from the settings.
        compile: False: start no compiler, use only the kernels in the cache; None: from the settings.
    """

    def __init__(
        self, path: StrPath | None = None, *, num_threads: int | None = None, compile: bool | None = None
    ) -> None:
        self._file = CatalogFile(Path(path) if path is not None else settings.settings().db)
        self._devices = Devices(num_threads)
        self.rows = Rows(self._file)
        self.builds = Builds(self._file, compile)
        self._planners = Planners(self._file, self.builds, self._devices)
        self._plans = self._planners.plans

    @classmethod
    @lru_cache(maxsize=1)
    def default(cls) -> Catalog:
        """The catalog at the path from the settings; one object per process."""
        return cls()

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._file.path

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection to the file, opened when first used. A fork closes it, so do not keep it across a fork.

        Raises:
            RegistryError: the file cannot be opened or is not a catalog.
        """
        return self._file.connection

    def writing(self) -> AbstractContextManager[sqlite3.Connection]:
        """A write transaction on :attr:`connection`; other threads wait for the connection until it ends.

        Raises:
            RegistryError: as :attr:`connection`, or the file cannot be written, in which case nothing changes.
        """
        return self._file.writing()

    @on_default
    def select(
        self, problem: Problem, *, arch: str = "host", revision: str | None = None, mask_impl: str = "generic"
    ) -> Plan:
        """The plan that answers ``problem`` on ``arch``.

        The choice is cached: selecting for an equal problem again runs no SQL, nor does a problem for which the same
        facts decide (:mod:`catalog.runtime.decisions`). :meth:`populate` and :meth:`forget` clear the cache. A problem
        that was never measured is recorded as a miss unless the settings turn that off; see :meth:`misses`. If the
        settings name frozen choices, only these decide, and nothing is recorded.

        Raises:
            SelectionError: no kernel answers the problem; the message names the trait or rule that leaves none.
            ChoicesError: the choices are frozen, and have none for the problem, or a stale one.
            ProblemError: the arch is this machine's CPU, and a run would need more memory than the machine has.
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        key = (problem.identity, arch, revision, mask_impl)
        plan = self._plans.get(key)
        if plan is None:
            with self._file.lock:
                plan = self._planners.plan(problem, key)
        return plan

    def stages(
        self, problem: Problem, *, arch: str = "host", revision: str | None = None, mask_impl: str = "generic"
    ) -> tuple[Kernel, ...]:
        """The kernels of the plan that :meth:`select` makes, for use without running them.

        Nothing is recorded, and the problem may be too large for this machine's memory.

        Raises:
            SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`select`.
        """
        with self._file.lock:
            return self._planners.of(Wanted(arch, revision, mask_impl, problem.operation)).decisions.of(problem).kernels

    def questions(self, problem: Problem, lineage: Lineage) -> Questions:
        """What the rules of a lineage ask about the sizes of problems like this one.

        Raises:
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        with self._file.lock:
            return self._planners.of(lineage.wanted).decisions.questions(problem)

    def plan(self, problem: Problem, kernel: Kernel) -> Plan:
        """Like :meth:`select`, but ``kernel``, one of :meth:`candidates`, runs as the stage of its family.

        Raises:
            SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`select`.
        """
        with self._file.lock:
            return self._planners.of(kernel.lineage.wanted).plan_with(problem, kernel)

    @on_default
    def candidates(
        self,
        problem: Problem,
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        family: str | None = None,
        limit: int = 10,
        static: bool = False,
    ) -> list[Candidate]:
        """The best ``limit`` kernels for ``problem``, best first; :meth:`select` chooses the first.

        ``family`` is a stage of the plan, by default the one that does most of the work: all families that can.
        ``static`` ignores measurements and uses the static order.

        Raises:
            SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`select`.
        """
        with self._file.lock:
            selector = self._planners.of(Wanted(arch, revision, mask_impl, problem.operation)).selector
            families = mains(problem) if family is None else (family,)
            return list(selector.choice(problem, families, limit, static=static).candidates)

    def choice(
        self,
        problem: Problem,
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        limit: int = 10,
    ) -> Choice:
        """What :meth:`select` uses to choose the main stage of ``problem``, and the best ``limit`` candidates.

        Raises:
            SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`select`.
        """
        with self._file.lock:
            return self._planners.of(Wanted(arch, revision, mask_impl, problem.operation)).choice(problem, limit)

    def narrowing(
        self,
        problem: Problem,
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        family: str | None = None,
        limit: int = 5,
    ) -> tuple[tuple[Step, ...], list[Candidate]]:
        """How an arch's kernels narrow down to those of :meth:`candidates`, and the best ``limit`` of these.

        Raises:
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        family = family or mains(problem)[0]
        with self._file.lock:
            selector = self._planners.of(Wanted(arch, revision, mask_impl, problem.operation)).selector
            return selector.steps(problem, family), list(selector.found(problem, (family,), limit).candidates)

    def forget(self) -> None:
        """Forget all choices, because measurements have changed."""
        self._planners.forget()

    def measured_on(self, arch: str) -> int | None:
        """The id of the device whose timings count: this machine's if it runs ``arch``, else the most measured one."""
        return self._planners.measured_on(arch)

    @property
    def builder(self) -> Builder:
        """The builder of this catalog's kernels; it records builds in table ``artifact``."""
        return self.builds.builder

    @property
    def build_log(self) -> BuildLog:
        """The results of builds and first runs of this catalog's kernels."""
        return self.builds.log

    def build(self, kernel: Kernel) -> Artifact:
        """Return the library of ``kernel``, compiled unless it is in the cache.

        If there is no usable compiler, or compiling is disabled, it is the newest intact library of this row in the
        cache, whichever compiler made it.

        Raises:
            BuildError: it does not compile; ``log`` is the compiler's output.
            MissingKernelError: it is not in the cache, and compiling is disabled.
            ToolchainError: there is no usable compiler.
        """
        return self.builds.build(kernel)

    def refusal(self, kernel: Kernel) -> str | None:
        """Why the headers that would compile the kernel cannot, according to its spec; None if they should."""
        return self._file.refusal(kernel)

    def host(self) -> HostDevice:
        """The host CPU as a device."""
        return self._devices.host

    def device(self, arch: str) -> Device[Any]:
        """The device that runs kernels of ``arch``, one object: the host CPU, or the first usable GPU of that arch.

        Raises:
            DeviceError: this machine has no such device; the message says what is missing.
        """
        return self._devices.of(arch)

    def device_info(self, arch: str) -> DeviceInfo:
        """The description that timings of kernels of ``arch`` on this machine are recorded with.

        Raises:
            DeviceError: as :meth:`device`.
        """
        return self._devices.info(arch)

    def spec(
        self, arch: str, revision: str | None = None, space: str | None = None, *, operation: str = DEFAULT
    ) -> ArchSpec:
        """The spec of ``arch``; ``host`` is this machine's CPU. ``space`` is the arch's own or a dispatcher sweep.

        That of an adopted revision is its nearest known revision's, with the receipts of the checkout.

        Raises:
            UsageError: no such arch or revision.
            SpecError: a spec file is wrong.
            DeviceError: ``host``, and no host arch runs on this CPU.
        """
        return self._file.spec(arch, revision, space, operation)

    def populate(
        self,
        arch: str,
        *,
        revision: str | None = None,
        mask_impl: str = "generic",
        receipts: tuple[int, ...] = (),
        force: bool = False,
        space: str | None = None,
        restriction: Restriction | None = None,
        on_progress: Progress | None = None,
        operation: str = DEFAULT,
        ck_root: StrPath | None = None,
        label: str | None = None,
        timeout: float | None = None,
    ) -> Populated:
        """Materialise the kernels of ``arch``; does nothing if they are up to date with the spec, unless ``force``.

        With ``ck_root`` the kernels are those that the generator of that checkout lists: they become a revision of
        their own, and the result is an :class:`~catalog.rules.adopt.Adopted`. The checkout is only read.

        Args:
            arch: the arch; ``host`` is this machine's CPU.
            revision: a known revision; None: the arch's own.
            mask_impl: the mask implementation.
            receipts: only the kernels of these receipts; empty: of all.
            force: populate even if nothing has changed.
            space: the arch's own, or a dispatcher sweep.
            restriction: limits the kernels to a part; existing rows of the same space outside that part are deleted.
            on_progress: called with the fraction of the work that is done.
            operation: what the kernels compute.
            ck_root: a checkout to adopt, which excludes ``revision``, ``space`` and ``restriction``.
            label: name of the adopted revision; None: ``ck-`` with the git commit, or with the digest of the generator.
            timeout: seconds for each run of the checkout's generator; None: ten minutes.

        Raises:
            UsageError, SpecError, DeviceError: as :meth:`spec`, or the mask implementation or receipt is unknown, or
                the label belongs to another revision.
            GeneratorError: the checkout's generator lists nothing usable; nothing changes.
            RegistryError: the file cannot be written; nothing changes.
        """
        return self.rows.populate(
            Wanted(arch, revision, mask_impl, operation),
            receipts=receipts,
            force=force,
            space=space,
            restriction=restriction,
            on_progress=on_progress,
            ck_root=None if ck_root is None else Path(ck_root),
            label=label,
            timeout=timeout,
        )

    def parity(
        self,
        arch: str,
        receipt: int,
        *,
        revision: str | None = None,
        mask_impl: str = "generic",
        reference: Reference | None = None,
    ) -> Comparison:
        """Compare the names of ``receipt`` with upstream's; ``arch`` is populated if necessary.

        ``reference`` has upstream's names: by default the lists in the data folder, otherwise the generator of a CK
        checkout (:func:`~catalog.ops.attention.upstream.live.find_generator`), with ``revision`` as its own.

        Raises:
            MissingReferenceError: there is no list for this arch, revision, mask implementation and receipt.
            GeneratorError: the checkout's generator produces no list.
            UsageError: the catalog was populated with other receipts only, or in part; or as :meth:`spec`.
            SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        return self.rows.parity(Wanted(arch, revision, mask_impl), receipt, reference)

    def adopted(self, revision: str | None = None, *, operation: str = DEFAULT) -> list[list[Any]]:
        """The adopted lineages as rows of :data:`catalog.registry.adopted.COLUMNS`; None: of all revisions.

        Raises:
            UsageError: no such revision was adopted.
            RegistryError: the file cannot be opened or is not a catalog.
        """
        return self.rows.adopted(revision, operation)

    def forget_revision(self, revision: str, *, operation: str = DEFAULT) -> Forgotten:
        """Delete an adopted revision: its kernels, rules, build records and timings. Libraries stay in the cache.

        Raises:
            UsageError: no such revision was adopted.
            RegistryError: the file cannot be written; nothing is deleted.
        """
        return self._file.forget(revision, operation)

    def diff(
        self,
        arch: str,
        before: str,
        after: str,
        *,
        mask_impl: str = "generic",
        receipt: int | None = None,
        operation: str = DEFAULT,
    ) -> Difference:
        """Compare the kernels of the revisions ``before`` and ``after`` of ``arch``.

        Raises:
            UsageError: there is no such arch, revision or receipt; or one of the two is populated only in part.
            SpecError, RegistryError: as :meth:`populate`.
        """
        old, new = (Wanted(arch, revision, mask_impl, operation) for revision in (before, after))
        return self.rows.diff(old, new, receipt)

    def explain(
        self,
        traits: Mapping[str, Any],
        *,
        arch: str = "host",
        revision: str | None = None,
        mask_impl: str = "generic",
        limit: int = 5,
        operation: str = DEFAULT,
        space: str | None = None,
    ) -> Explanation:
        """Explain why kernels with these traits exist or not: every rule's verdict, and the ``limit`` nearest kernels.

        ``space`` is the arch's own or a dispatcher sweep, of which the kernels are those that were populated.

        Raises:
            UsageError: the traits have no family; or as :meth:`populate`.
            SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        return self.rows.explain(traits, Wanted(arch, revision, mask_impl, operation), space, limit)

    def kernels(
        self, where: str, *, arch: str | None = None, limit: int | None = None, operation: str | None = None
    ) -> list[Kernel]:
        """The kernels of ``operation`` (None: any with these columns) that meet a SQL expression, ordered by id.

        Raises:
            QueryError: the expression is invalid or not allowed, or the catalog has no such arch.
            RegistryError: the catalog does not exist or cannot be read.
        """
        return list(self.rows.kernels(where, arch, limit, operation))

    def rules(
        self,
        arch: str | None = None,
        *,
        revision: str | None = None,
        family: str | None = None,
        kind: str | None = None,
        operation: str = DEFAULT,
    ) -> list[list[Any]]:
        """The rules of ``arch``, which is populated if necessary, or of every arch in the file.

        Raises:
            UsageError, SpecError, RegistryError, DeviceError: as :meth:`populate`.
        """
        return self.rows.rules(arch, revision, family, kind, operation)

    def misses(self, arch: str, policy: Policy | None = None) -> list[tuple[str, int]]:
        """Keys of problems selected for ``arch`` but not measured under ``policy``, with counts, most frequent first.

        ``policy`` is by default the one in force; counts not yet written to the file are included. One key stands for
        all problems of a kind and of similar size: no extent is more than twice another's.

        Raises:
            RegistryError: the file cannot be opened or is not a catalog.
        """
        self.build_log.write_misses()
        with self._file.lock:
            return timings.misses(self._file.connection, arch, policy or policy_in_force())

    def foreign_timings(self, problem: Problem, arch: str) -> list[dict[str, Any]]:
        """Imported timings for ``problem``, as rows of ``foreign_timings``: most similar devices, then fastest first.

        Raises:
            RegistryError, DeviceError: as :meth:`populate`.
        """
        return self._planners.foreign_timings(problem, arch)

    def learn(self, arch: str | None = None) -> Lessons:
        """Learn from timings, of ``arch`` or all, which evidence chooses best; selection uses it (:mod:`.learning`).

        Raises:
            RegistryError: the file cannot be written; nothing changes.
            DeviceError: ``arch`` is ``host``, and no host arch runs on this CPU.
        """
        from catalog.runtime.learning import learn

        return learn(self, None if arch is None else resolve_arch(arch))

    def merge(self, paths: Sequence[StrPath]) -> list[Merged]:
        """Import the artifact records and timings of other catalogs, all of them or none.

        Raises:
            UsageError: one of ``paths`` is this catalog.
            RegistryError: one is not a catalog, is damaged or from a newer version, or this file cannot be written.
        """
        return self.rows.merge([Path(path) for path in paths])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, as the end of a ``with`` statement does; using the object again opens it again."""
        if self._file.is_open:
            self.build_log.write_misses()
        self._file.close()
