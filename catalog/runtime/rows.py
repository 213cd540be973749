"""The rows of a catalog file: making and merging them, which exist, why, and how they compare with other lists.

Most methods are those of :class:`catalog.Catalog`, which documents them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.errors import UsageError
from catalog.ops import operation as named_operation
from catalog.runtime.catalog_file import CatalogFile, nearest_of, read_spec
from catalog.runtime.here import resolve_arch
from catalog.schema.columns import BASE
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import LINEAGE_OF_POPULATION, OWN_SPACES, Wanted

if TYPE_CHECKING:
    from catalog.registry.merge import Merged
    from catalog.rules.adopt import Nearest
    from catalog.rules.diff import Difference
    from catalog.rules.explain import Explanation
    from catalog.rules.parity import Comparison, Reference
    from catalog.rules.populate import Populated, Progress
    from catalog.rules.restriction import Restriction


class Rows:
    """Makes rows of ``file``, and answers questions about them; an arch that a question needs is populated."""

    def __init__(self, file: CatalogFile) -> None:
        self._file = file

    def populate(
        self,
        wanted: Wanted,
        *,
        receipts: tuple[int, ...],
        force: bool,
        space: str | None,
        restriction: Restriction | None,
        on_progress: Progress | None,
        ck_root: Path | None,
        label: str | None,
        timeout: float | None,
    ) -> Populated:
        """See :meth:`catalog.Catalog.populate`."""
        from catalog.rules.populate import Request
        from catalog.rules.restriction import NOTHING_LEFT_OUT

        if ck_root is not None:
            if (
                wanted.revision is not None
                or restriction not in (None, NOTHING_LEFT_OUT)
                or space not in (None, *OWN_SPACES)
            ):
                raise UsageError(
                    "the rows of a checkout are what its generator lists: no revision, space or restriction applies",
                    hint="--label names the new revision, --receipt and --mask-impl choose lists.",
                )
            return self._file.adopt(
                wanted._replace(revision=label),
                ck_root,
                timeout=timeout,
                receipts=receipts,
                force=force,
                on_progress=on_progress,
            )
        if label is not None:
            raise UsageError("a label names the revision of a checkout", hint="--ck-root names the checkout.")
        self._file.refuse_adopted(wanted)
        spec = read_spec(wanted.arch, wanted.revision, space, wanted.operation)
        request = Request(spec, wanted.variant, receipts, restriction or NOTHING_LEFT_OUT)
        return self._file.populate(request, force=force, on_progress=on_progress)

    def adopted(self, revision: str | None, operation: str) -> list[list[Any]]:
        """See :meth:`catalog.Catalog.adopted`."""
        from catalog.registry.adopted import adopted_lineages

        with self._file.lock:
            return adopted_lineages(self._file.connection, operation, revision)

    def merge(self, paths: Sequence[Path]) -> list[Merged]:
        """See :meth:`catalog.Catalog.merge`."""
        from catalog.registry.merge import merge

        with self._file.lock:
            merged = merge(self._file.connection, self._file.path, paths)
            self._file.rows_changed()
        return merged

    def parity(self, wanted: Wanted, receipt: int, reference: Reference | None) -> Comparison:
        """See :meth:`catalog.Catalog.parity`."""
        from catalog.rules.parity import Lists, compare
        from catalog.rules.populate import Request

        request = Request(self._file.spec(wanted.arch, wanted.revision), wanted.variant)
        self._file.held(wanted._replace(revision=request.spec.revision))
        names = (reference or Lists(settings.data_dir() / "parity")).names(request, receipt)
        with self._file.lock:
            return compare(self._file.connection, request.lineage, receipt, names)

    def parity_of_checkout(
        self, wanted: Wanted, receipt: int, reference: Reference
    ) -> tuple[Comparison, Nearest | None]:
        """Compare a checkout's names with those of ``wanted``, and if they differ with the nearest known revision's.

        Returns the last comparison, and that revision if it was needed.

        Raises:
            CatalogError: as :meth:`parity`.
        """
        comparison = self.parity(wanted, receipt, reference)
        if comparison.passed:
            return comparison, None
        nearest = nearest_of(wanted.arch, wanted.variant, receipt, comparison.reference)
        if nearest.revision != wanted.revision:
            comparison = self.parity(wanted._replace(revision=nearest.revision), receipt, reference)
        return comparison, nearest

    def diff(self, old: Wanted, new: Wanted, receipt: int | None) -> Difference:
        """See :meth:`catalog.Catalog.diff`."""
        from catalog.rules.diff import difference
        from catalog.rules.populate import Request

        before, after = (
            Request(self._file.spec(side.arch, side.revision, of=side.operation), side.variant) for side in (old, new)
        )
        with self._file.lock:
            self._file.held(old._replace(revision=before.spec.revision))
            self._file.held(new._replace(revision=after.spec.revision))
            return difference(self._file.connection, before, after, receipt)

    def explain(self, traits: Mapping[str, Any], wanted: Wanted, space: str | None, limit: int) -> Explanation:
        """See :meth:`catalog.Catalog.explain`."""
        from catalog.rules.explain import explain

        with self._file.lock:
            if space is None or space in OWN_SPACES:
                lineage = self._file.held(wanted).lineage
                spec = self._file.spec(lineage.arch, lineage.revision, of=wanted.operation)
            else:
                spec = self._file.spec(wanted.arch, wanted.revision, space, wanted.operation)
                lineage = spec.lineage(wanted.variant)
            return explain(self._file.connection, spec, lineage, traits, limit)

    def kernels(
        self, where: str, arch: str | None, limit: int | None, operation: str | None, runnable: bool | None = None
    ) -> Iterator[Kernel]:
        """See :meth:`catalog.Catalog.kernels`; ``runnable`` is as in :class:`~catalog.registry.query.Query`."""
        from catalog.registry.query import Query, operations_asked, run

        left = limit
        for name in operations_asked(self._file.path, where) if operation is None else (operation,):
            kernel = named_operation(name).kernel
            columns = (*kernel.traits.identity, BASE.name, *kernel.traits)
            query = Query(where, arch and resolve_arch(arch), columns, "id", left, name, runnable=runnable)
            with run(self._file.path, query) as result:
                for row in result:
                    left = None if left is None else left - 1
                    yield kernel.from_row(dict(zip(result.columns, row, strict=True)))

    def count(self, where: str, arch: str, operation: str | None, runnable: bool | None = None) -> int:
        """The number of kernels that :meth:`kernels` yields without a limit."""
        from catalog.registry.query import Query, count, operations_asked

        asked = operations_asked(self._file.path, where) if operation is None else (operation,)
        queries = (Query(where, resolve_arch(arch), operation=name, runnable=runnable) for name in asked)
        return sum(count(self._file.path, query) for query in queries)

    def rules(
        self, arch: str | None, revision: str | None, family: str | None, kind: str | None, operation: str
    ) -> list[list[Any]]:
        """See :meth:`catalog.Catalog.rules`."""
        from catalog.rules.table import list_rules

        with self._file.lock:
            if arch is not None:
                revision = self._file.spec(arch, revision, of=operation).revision
                self._file.held(Wanted(arch, revision, operation=operation))
            there = self._file.connection.execute(
                f"SELECT DISTINCT arch, revision, space FROM {LINEAGE_OF_POPULATION} "
                "WHERE operation = :operation AND arch = coalesce(:arch, arch) "
                "AND revision = coalesce(:revision, revision) ORDER BY arch, revision, space",
                {
                    "operation": operation,
                    "arch": None if arch is None else resolve_arch(arch),
                    "revision": revision,
                },
            ).fetchall()
            specs = [self._file.spec(row[0], row[1], row[2], operation) for row in there]
            return [row for spec in specs for row in list_rules(self._file.connection, spec, family=family, kind=kind)]

    def built(self, kernels: Sequence[Kernel], keys: Set[str]) -> int:
        """How many of ``kernels`` are recorded as built on this machine, under one of these content ``keys``.

        Raises:
            RegistryError: the file cannot be opened or is not a catalog.
        """
        asked = json.dumps([kernel.id for kernel in kernels])
        here = (
            "SELECT kernel_id, key FROM artifact WHERE status = 'built' AND NOT elsewhere "
            "AND dropped IS NULL AND kernel_id IN (SELECT value FROM json_each(?))"
        )
        with self._file.lock:
            return len({kernel for kernel, key in self._file.connection.execute(here, (asked,)) if key in keys})

    def populated(self, arch: str, operation: str) -> bool:
        """Whether the file holds kernels of ``arch``, of any revision.

        Raises:
            RegistryError, DeviceError: as :meth:`populate`.
        """
        asked = f"SELECT 1 FROM {LINEAGE_OF_POPULATION} WHERE operation = ? AND arch = ?"
        with self._file.lock:
            return self._file.connection.execute(asked, (operation, resolve_arch(arch))).fetchone() is not None
