"""The command line: the program ``catalog``, its global options, and its commands by section.

A command parses its options, calls the library and prints the result. Heavy modules are imported inside the commands,
so that ``catalog --help`` imports little more than typer.
"""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from catalog.cli import build, check, look, run, ship, tune

SECTIONS = {
    "Look": look.app,
    "Run": run.app,
    "Tune": tune.app,
    "Build": build.app,
    "Ship": ship.app,
    "Check": check.app,
}
"""The commands by purpose, as ``catalog --help`` lists them."""


class Commands(UserDict[str, Any]):
    """The commands of all sections by name. Each is made when it is first used, because making all takes 50 ms."""

    def __init__(self) -> None:
        super().__init__()
        section: Any
        for title, section in SECTIONS.items():
            for part in (*section.registered_commands, *section.registered_groups):
                part.rich_help_panel = title
            for command in section.registered_commands:
                alone = typer.Typer(rich_markup_mode=None)
                alone.registered_commands = [command]
                self[command.name or command.callback.__name__.replace("_", "-")] = alone
            for group in section.registered_groups:
                alone = typer.Typer(rich_markup_mode=None)
                alone.registered_groups = [group]
                self[group.typer_instance.info.name] = alone

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, typer.Typer):
            found = self[name] = typer.main.get_group(found).commands[name]
        return found


class Program(TyperGroup):
    """A group that lists its commands under the titles of :data:`SECTIONS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = Commands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one line per command, aligned across all sections."""
        width = max(map(len, self.commands))
        for title in SECTIONS:
            listed = ((name, one) for name, one in self.commands.items() if one.rich_help_panel == title)
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), one.get_short_help_str(formatter.width - 6 - width)) for name, one in listed]
                )


app = typer.Typer(
    name="catalog",
    cls=Program,
    help="One queryable catalog of every attention, GEMM and convolution kernel that can exist: whether it is built, "
    "and how fast it is."
    "\n\nExample: catalog run --batch 1 --nhead-q 8 --seqlen-q 512 --hdim-q 64 --dtype fp32 --validate",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"catalog {version('kernel-catalog')}")
        raise typer.Exit


@app.callback()
def _options(
    db: Annotated[Path | None, typer.Option("--db", help="The catalog's SQLite file. Default: CATALOG_DB.")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Global options: :func:`catalog.cli.options.db_path` reads ``--db``."""
