"""What a compiled kernel of an NVIDIA GPU may take."""

from __future__ import annotations

from catalog.registry.query import Query, run
from catalog.runtime.catalog import Catalog
from catalog.schema.kernel import Kernel

MOST_SHARED_BYTES = 232_448
"""227 KiB: what a block may have."""


def assert_fits(catalog: Catalog, kernel: Kernel, operation: str) -> None:
    """A built kernel spills no registers, its products are in flight together, and its block fits."""
    columns = ("spills", "scratch_bytes", "shared_bytes")
    query = Query(f"id = '{kernel.id}' AND built", columns=columns, operation=operation)
    ((spills, scratch, shared),) = run(catalog.path, query)
    assert (spills, scratch) == (0, 0)
    assert shared <= MOST_SHARED_BYTES
    ((log,),) = catalog.connection.execute("SELECT log FROM artifact WHERE kernel_id = ?", [kernel.id])
    assert "wgmma.mma_async instructions are serialized" not in log
