"""``catalog keys``: keys that sign the entries of a remote cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from catalog.cli import options
from catalog.cli.printing import print_result

app = typer.Typer(
    name="keys",
    help="Keys that sign the entries of a remote cache.\n\nExample: catalog keys new builder.key",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("new")
def make_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File for the private key; FILE.pub: the public one.")],
    comment: Annotated[str, typer.Option(metavar="TEXT", help="Who signs with it, for the public key's line.")] = "",
    form: options.Format = "table",
) -> None:
    """Make a key, and show its public part.

    The private key is for the machines that write: CATALOG_REMOTE_KEY names it. Add the line that is shown to the
    file that CATALOG_REMOTE_SIGNERS names on the machines that read.

    Example: catalog keys new builder.key --comment "nightly build"
    """
    from catalog.build.signatures import new_key

    line = new_key(file, comment)
    print_result(line, ["private", "public"], [[str(file), line]], form)


@app.command("show")
def show_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A private key.")],
    form: options.Format = "table",
) -> None:
    """Show the public part of a private key.

    Example: catalog keys show builder.key
    """
    from catalog.build.signatures import public_line

    line = public_line(file)
    print_result(line, ["private", "public"], [[str(file), line]], form)
