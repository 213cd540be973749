"""Options that commands of several modules share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CkRootOption = Annotated[
    Path | None, typer.Option("--ck-root", help="Your CK checkout. Default: CATALOG_CK_ROOT, or ROCm's.")
]
ArchOption = Annotated[str, typer.Option("--arch", help="Arch: gfx950, x86_64_v3, ...; host is this machine's CPU.")]
