"""The optional dependencies of the package, its *extras*."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The command that installs an extra; no index has the package."""
    return f"In a checkout: pip install '.[{extra}]'; with a wheel: pip install 'WHEEL[{extra}]'."
