"""``catalog cache``: the folder of compiled kernels."""

from __future__ import annotations

import typer

cache_app = typer.Typer(
    name="cache", help="The cache of compiled kernels.", no_args_is_help=True, rich_markup_mode=None
)
