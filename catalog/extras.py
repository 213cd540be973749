"""The package's optional dependencies, its *extras*."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Return instructions for installing an extra from a checkout or a wheel; the package is on no index."""
    return f"In a checkout: pip install '.[{extra}]'; with a wheel: pip install 'WHEEL[{extra}]'."
