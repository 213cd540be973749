"""Answers about the rows of a catalog file: which exist, why, and how they compare with other lists.

The methods are those of :class:`catalog.Catalog`, which documents them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.ops import operation as named_operation
from catalog.runtime.catalog_file import CatalogFile
from catalog.runtime.devices.here import resolve_arch
from catalog.schema.columns import BASE
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import LINEAGE_OF_POPULATION, OWN_SPACES, Wanted

if TYPE_CHECKING:
    from catalog.rules.diff import Difference
    from catalog.rules.explain import Explanation
    from catalog.rules.parity import Comparison, Reference


class Rows:
    """Answers questions about the rows of ``file``; an arch that a question needs is populated."""

    def __init__(self, file: CatalogFile) -> None:
        self._file = file

    def parity(self, wanted: Wanted, receipt: int, reference: Reference | None) -> Comparison:
        """See :meth:`catalog.Catalog.parity`."""
        from catalog.rules.parity import Lists, compare
        from catalog.rules.populate import Request

        request = Request(self._file.spec(wanted.arch, wanted.revision), wanted.variant)
        self._file.held(wanted._replace(revision=request.spec.revision))
        names = (reference or Lists(settings.data_dir() / "parity")).names(request, receipt)
        with self._file.lock:
            return compare(self._file.connection, request.lineage, receipt, names)

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

    def kernels(self, where: str, arch: str | None, limit: int | None, operation: str | None) -> Iterator[Kernel]:
        """See :meth:`catalog.Catalog.kernels`."""
        from catalog.registry.query import Query, operations_asked, run

        left = limit
        for name in operations_asked(self._file.path, where) if operation is None else (operation,):
            kernel = named_operation(name).kernel
            columns = (*kernel.traits.identity, BASE.name, *kernel.traits)
            with run(self._file.path, Query(where, arch and resolve_arch(arch), columns, "id", left, name)) as result:
                for row in result:
                    left = None if left is None else left - 1
                    yield kernel.from_row(dict(zip(result.columns, row, strict=True)))

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

    def built(self, kernels: Sequence[Kernel]) -> int:
        """See :meth:`catalog.Catalog.built`."""
        asked = json.dumps([kernel.id for kernel in kernels])
        here = (
            "SELECT count(DISTINCT kernel_id) FROM artifact WHERE status = 'built' AND NOT elsewhere "
            "AND dropped IS NULL AND kernel_id IN (SELECT value FROM json_each(?))"
        )
        with self._file.lock:
            return int(self._file.connection.execute(here, (asked,)).fetchone()[0])

    def populated(self, arch: str, operation: str) -> bool:
        """See :meth:`catalog.Catalog.populated`."""
        asked = f"SELECT 1 FROM {LINEAGE_OF_POPULATION} WHERE operation = ? AND arch = ?"
        with self._file.lock:
            return self._file.connection.execute(asked, (operation, resolve_arch(arch))).fetchone() is not None
