"""``catalog cache quarantined`` and ``catalog cache unquarantine``."""

from __future__ import annotations

from typing import Annotated

import typer

from catalog.cli.cache import cache_app
from catalog.cli.printing import FormatOption, print_rows, print_told


@cache_app.command()
def quarantined(form: FormatOption = "table") -> None:
    """List the kernels that failed in their first run.

    They crashed, hung or gave a wrong result, and are not selected until the listed time.

    Example: catalog cache quarantined
    """
    from catalog.cli.main import _catalog

    columns = ["when", "until", "kernel", "arch", "reason", "problem", "id"]
    found = _catalog().build_log.quarantined()
    print_rows(
        columns,
        [[one.when, one.until, one.kernel, one.arch, one.reason, one.problem, one.kernel_id] for one in found],
        form,
    )


@cache_app.command()
def unquarantine(
    which: Annotated[str | None, typer.Argument(metavar="[NAME|ID]", help="Of a quarantined kernel.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every quarantined kernel.")] = False,
    form: FormatOption = "table",
) -> None:
    """Give quarantined kernels another chance.

    They are selected again, and their next run is a guarded one.

    Example: catalog cache unquarantine --all
    """
    from catalog.cli.main import _catalog
    from catalog.errors import UsageError

    if everything is (which is not None):
        raise UsageError(
            "no kernel is named" if which is None else "a kernel and --all are both named",
            hint="Name one, or give --all; catalog cache quarantined lists them.",
        )
    released = _catalog().build_log.release(which)
    told = "\n".join(f"released {one.kernel}" for one in released) or "No kernel is quarantined."
    print_told(told, ["kernel", "arch", "id"], [[one.kernel, one.arch, one.kernel_id] for one in released], form)
