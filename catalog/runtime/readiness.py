"""Whether the cache can serve kernels without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.backends import target_of
from catalog.build.cache import Cache, DamagedEntry
from catalog.build.offline_builder import OfflineBuilder
from catalog.errors import BuildError
from catalog.files import StrPath
from catalog.registry.artifacts import recorded_keys
from catalog.runtime.choices import fault_of, read_choices

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.schema.kernel import Kernel

COLUMNS = ("kernel", "arch", "fault", "id")
"""The columns of a kernel that the cache cannot serve."""


def faults_of_kernels(catalog: Catalog, kernels: Sequence[Kernel]) -> list[list[Any]]:
    """A row with :data:`COLUMNS` for each kernel that the cache cannot serve without a compiler.

    Raises:
        BuildError: the cache cannot be read or is open to others.
        RegistryError: the catalog cannot be read.
    """
    builder = OfflineBuilder(settings.settings().cache_dir, targets=target_of)
    faults = {kernel: builder.fault(kernel, recorded_keys(catalog.connection, kernel.id)) for kernel in kernels}
    return [_row(kernel, fault) for kernel, fault in faults.items() if fault is not None]


def faults_of_choices(path: StrPath) -> list[list[Any]]:
    """A row with :data:`COLUMNS` for each library of a file of choices that the cache cannot serve.

    Raises:
        ChoicesError: as :func:`~catalog.runtime.choices.read_choices`.
        BuildError: the cache cannot be read or is open to others.
    """
    cache, rows = Cache(settings.settings().cache_dir), []
    try:
        for library in read_choices(path).libraries:
            fault = fault_of(library, cache)
            if fault is None and cache.load(library.key) is None:
                try:
                    cache.check(library.key)
                except FileNotFoundError:
                    fault = "unsound: the installed library differs from its record"
                except DamagedEntry as damage:
                    fault = f"unsound: {damage}"
            if fault is not None:
                rows.append(_row(library.kernel, fault))
    except OSError as error:
        raise BuildError(f"the cache {cache.folder} cannot be read: {error.strerror}") from None
    return rows


def _row(kernel: Kernel, fault: str) -> list[Any]:
    return [kernel.name, kernel.arch, fault, kernel.id]
