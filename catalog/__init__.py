"""The kernel catalog: every attention, GEMM and convolution kernel that can exist, whether it is built, and its speed.

``Catalog.select(Problem(...)).run()`` goes from a problem to its result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from catalog.errors import CatalogError
    from catalog.ops.attention.problem import Problem
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.tracing import trace

__all__ = ["Catalog", "CatalogError", "Problem", "trace"]

_HOMES = {
    "Catalog": "catalog.runtime.catalog",
    "CatalogError": "catalog.errors",
    "Problem": "catalog.ops.attention.problem",
    "trace": "catalog.runtime.tracing",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line loads only what it needs."""
    if name not in _HOMES:
        raise AttributeError(f"module 'catalog' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
