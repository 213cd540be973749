"""Options that commands share, and those of commands that have many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CkRootOption = Annotated[
    Path | None, typer.Option("--ck-root", help="Your CK checkout. Default: CATALOG_CK_ROOT, or ROCm's.")
]


def arch_names() -> list[str]:
    """What the shell offers after ``--arch``."""
    from catalog.backends import spec_folders
    from catalog.schema.spec_files import known_archs

    return ["host", *known_archs(*spec_folders())]


ArchOption = Annotated[
    str,
    typer.Option("--arch", help="Arch: gfx950, x86_64_v3, ...; host is this machine's CPU.", autocompletion=arch_names),
]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Upstream revision. Default: the arch's own.")]
MaskImplOption = Annotated[str, typer.Option("--mask-impl", help="Mask implementation: generic or simplified.")]

Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Compilers at a time. Default: one a core, or a thread of a worker."),
]
Scheduler = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Build on the workers of this Dask scheduler, as tcp://host:8786."),
]
KeepGoing = Annotated[
    bool,
    typer.Option(
        "--keep-going/--fail-fast", help="Build the others when a kernel fails, or stop there. Default: keep going."
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="A line a kernel: compiled, cached or failed, seconds, size, name.")
]
CompileOnly = Annotated[
    bool,
    typer.Option(
        "--compile-only", help="Load and run nothing, so that no GPU is needed. It is what this command does by itself."
    ),
]
