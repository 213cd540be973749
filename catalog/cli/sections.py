"""``catalog --help``: the commands, grouped by purpose."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

SECTIONS = {
    "Look": ("query", "columns", "explain", "rules", "shapes", "report", "datasette-metadata"),
    "Run": ("select", "run", "replay"),
    "Tune": ("tune", "bench", "timings"),
    "Build": ("populate", "build", "fallback", "cache"),
    "Ship": ("export", "merge"),
    "Check": ("doctor", "parity", "diff", "conformance"),
}
"""Each command appears once."""


class Sections(TyperGroup):
    """Lists its commands under the titles of :data:`SECTIONS`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line for each command, in columns that are the same in all sections."""
        width = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                summaries = [self.commands[name].get_short_help_str(formatter.width - 6 - width) for name in names]
                formatter.write_dl([(name.ljust(width), text) for name, text in zip(names, summaries, strict=True)])
