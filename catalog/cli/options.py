"""Options that commands share, and the catalog that ``--db`` or the settings name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.schema.policy import Policy


def db_path(context: typer.Context) -> Path:
    """The catalog's file: ``--db``, else the file from the settings.

    Raises:
        UsageError: a setting has an invalid value.
    """
    from catalog.settings import settings

    chosen: Path | None = context.find_root().params["db"]
    return chosen or settings().db


def open_catalog(context: typer.Context, *, num_threads: int | None = None) -> Catalog:
    """The catalog at :func:`db_path`.

    Raises:
        CatalogError: as raised by :class:`~catalog.runtime.catalog.Catalog`.
    """
    from catalog.runtime.catalog import Catalog

    return Catalog(db_path(context), num_threads=num_threads)


def split_columns(text: str | None) -> tuple[str, ...]:
    """The columns that ``--columns`` names."""
    return tuple(text.split(",")) if text else ()


def arch_option(about: str) -> Any:
    """The option ``--arch``; the shell completes names of archs."""
    return typer.Option("--arch", help=about, autocompletion=_arch_names)


def _arch_names() -> list[str]:
    from catalog.backends import spec_folders
    from catalog.schema.spec_files import known_archs

    return ["host", *known_archs(*spec_folders())]


FORMATS = ("table", "json", "jsonl", "csv")
_FORMATS = "table, json, jsonl or csv"


def _known_format(name: str) -> str:
    """Validate the format name before any work starts."""
    from catalog.errors import UsageError
    from catalog.messages import did_you_mean

    if name not in FORMATS:
        raise UsageError(f"--format {name} is not allowed{did_you_mean(name, FORMATS)}", hint=f"Allowed: {_FORMATS}.")
    return name


Format = Annotated[
    str,
    typer.Option("--format", help=f"Output: {_FORMATS}.", callback=_known_format, autocompletion=lambda: list(FORMATS)),
]

MeasuredAs = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="eager|graph",
        help="What a time counts: eager, the whole call; graph, the device alone. Default: CATALOG_MEASURED_AS.",
    ),
]
Cold = Annotated[
    bool | None,
    typer.Option("--cold/--warm", help="Empty the caches before every launch, or not. Default: CATALOG_MEASURED_COLD."),
]


def policy(measured_as: str | None, cold: bool | None) -> Policy:
    """The measuring policy that the options state, completed by the settings.

    Raises:
        UsageError: ``measured_as`` is unknown, or a setting has an invalid value.
    """
    from typing import get_args

    from catalog.errors import UsageError
    from catalog.messages import did_you_mean
    from catalog.schema.policy import MeasuredAs as Word
    from catalog.schema.policy import policy_in_force

    chosen = policy_in_force()
    words: dict[str, Word] = {word: word for word in get_args(Word)}
    if measured_as is not None and measured_as not in words:
        raise UsageError(
            f"--as {measured_as} is not allowed{did_you_mean(measured_as, words)}", hint=f"Allowed: {', '.join(words)}."
        )
    return chosen._replace(
        measured_as=chosen.measured_as if measured_as is None else words[measured_as],
        cold=chosen.cold if cold is None else cold,
    )


Arch = Annotated[str, arch_option("Arch: gfx950, x86_64_v3, ...; host is this machine's CPU.")]
OneArch = Annotated[str | None, arch_option("Only this arch; host is this machine's CPU.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Upstream revision. Default: the arch's own.")]
Operation = Annotated[
    str | None,
    typer.Option("--operation", help="What the kernels compute: attention, gemm, conv or an added operation."),
]
MaskImpl = Annotated[str, typer.Option("--mask-impl", help="Mask implementation: generic or simplified.")]
CkRoot = Annotated[
    Path | None, typer.Option("--ck-root", help="Your CK checkout. Default: CATALOG_CK_ROOT, or ROCm's.")
]
GeneratorTimeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Time limit of the generator for one API, in seconds.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        help="Number of compilers that run in parallel. Default: one per core, or per thread of a worker.",
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Compile on the workers of this Dask scheduler, for example tcp://host:8786."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
