"""Whether the cache can serve kernels without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.backends import target_of
from catalog.build.offline_builder import StoredBuilder
from catalog.registry.artifacts import recorded_keys

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.schema.kernel import Kernel

COLUMNS = ("kernel", "arch", "fault", "id")
"""The columns of :func:`faults_of`."""


def faults_of(catalog: Catalog, kernels: Sequence[Kernel]) -> list[list[Any]]:
    """A row for each kernel that the cache cannot serve without a compiler, with the values of :data:`COLUMNS`.

    Raises:
        BuildError: the cache cannot be read or is open to others.
        RegistryError: the catalog cannot be read.
    """
    builder = StoredBuilder(settings.settings().cache_dir, targets=target_of)
    rows = []
    for kernel in kernels:
        fault = builder.fault(kernel, recorded_keys(catalog.connection, kernel.id))
        if fault is not None:
            rows.append([kernel.name, kernel.arch, fault, kernel.id])
    return rows
