"""``catalog cache`` and ``catalog timings``: what is kept between runs, and dropping it."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli.printing import FormatOption, print_rows, print_told
from catalog.messages import counted, subject

if TYPE_CHECKING:
    from catalog.build.cache import Cache
    from catalog.build.housekeeping import Collected
    from catalog.runtime.catalog import Catalog

cache_app = typer.Typer(
    name="cache",
    help="The cache of compiled kernels.\n\nExample: catalog cache ls",
    no_args_is_help=True,
    rich_markup_mode=None,
)
timings_app = typer.Typer(
    name="timings",
    help="The measured times.\n\nExample: catalog timings clear --yes",
    no_args_is_help=True,
    rich_markup_mode=None,
)

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def _cache() -> Cache:
    from catalog.build.cache import Cache
    from catalog.settings import settings

    return Cache(settings().cache_dir)


def _db(context: typer.Context) -> Path:
    from catalog.settings import settings

    chosen: Path | None = context.find_root().params.get("db")
    return chosen or settings().db


def open_catalog(context: typer.Context) -> Catalog:
    """The catalog of ``--db``, else that of the settings."""
    from catalog.runtime.catalog import Catalog

    return Catalog(_db(context))


def _tell(done: Collected, verb: str, form: str, before: str = "") -> None:
    from catalog.units import format_size

    kept = f", {done.in_use:,} in use were kept" if done.in_use else ""
    told = (
        f"{verb} {counted(len(done.dropped), 'library')} ({format_size(done.dropped_bytes)}) and "
        f"{counted(done.leftovers, 'other file')}{kept}; "
        f"left: {counted(done.left, 'library')} ({format_size(done.left_bytes)})"
    )
    facts = {**asdict(done), "dropped": len(done.dropped)}
    print_told(before + told, list(facts), [list(facts.values())], form)


@cache_app.command("path")
def show_path(form: FormatOption = "table") -> None:
    """Show the cache folder, how it is locked, and its size cap.

    Example: catalog cache path
    """
    from catalog.doctor import about_cache

    print_rows(["what", "value", "about"], [list(finding) for finding in about_cache()], form)


@cache_app.command("ls")
def list_entries(
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    form: FormatOption = "table",
) -> None:
    """List the libraries, the last used first.

    Example: catalog cache ls
    """
    from catalog.build.housekeeping import Entry, entries
    from catalog.units import format_size

    found = entries(_cache())
    if as_json or form != "table":
        columns = [field.name for field in fields(Entry)]
        print_rows(columns, [list(asdict(entry).values()) for entry in found], "json" if as_json else form)
        return
    rows: list[list[object]] = [
        [
            entry.key[:12],
            entry.arch or "?",
            format_size(entry.bytes),
            entry.compile_s and f"{entry.compile_s:.2f}",
            entry.created,
            entry.last_used,
            entry.kernel or "? (catalog cache verify)",
        ]
        for entry in found
    ]
    print_rows(["key", "arch", "size", "compile_s", "created", "last_used", "kernel"], rows, form)
    print(f"{counted(len(found), 'library')}, {format_size(sum(entry.bytes for entry in found))}")


@cache_app.command("verify")
def verify_entries(
    context: typer.Context,
    delete: Annotated[bool, typer.Option("--delete", help="Delete what is damaged.")] = False,
    form: FormatOption = "table",
) -> None:
    """Hold every library against its record.

    Exits with 1 when something is damaged: the next build of that kernel replaces it, and until then nothing loads it.

    Example: catalog cache verify --delete
    """
    from catalog.build.housekeeping import entries, tell_registry, verify

    store = _cache()
    damages = verify(store, delete=delete)
    if delete:
        tell_registry(store, _db(context))
    sound = len(entries(store)) - sum(not damage.deleted for damage in damages)
    lines = [
        f"{damage.key}  {damage.kernel or '?'}: {damage.reason}; "
        f"{'deleted' if damage.deleted else 'the next build replaces it'}"
        for damage in damages
    ]
    told = "\n".join([*lines, f"{subject(sound, 'library')} sound, {len(damages):,} damaged"])
    rows = [[damage.key, damage.kernel, damage.reason, int(damage.deleted)] for damage in damages]
    print_told(told, ["key", "kernel", "reason", "deleted"], rows, form)
    if damages:
        raise typer.Exit(1)


@cache_app.command("gc")
def collect_garbage(
    context: typer.Context,
    max_size: Annotated[str | None, typer.Option(help="Drop the longest unused until so much is left: 2G.")] = None,
    older_than: Annotated[str | None, typer.Option(help="Drop what was not used for so long: 30d, 12h.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be dropped, and drop nothing.")] = False,
    form: FormatOption = "table",
) -> None:
    """Drop libraries that were not used for long.

    Leftovers of killed builders are dropped too. Libraries in use stay.

    Example: catalog cache gc --max-size 2G --older-than 30d
    """
    from catalog.build.housekeeping import collect, tell_registry
    from catalog.units import parse_age, parse_size

    max_bytes = None if max_size is None else parse_size(max_size)
    seconds = None if older_than is None else parse_age(older_than)
    store = _cache()
    done = collect(store, max_bytes, seconds, dry_run=dry_run)
    if not dry_run:
        tell_registry(store, _db(context))
    keys = "".join(f"{key}\n" for key in done.dropped) if dry_run else ""
    _tell(done, "Would drop" if dry_run else "Dropped", form, keys)


@cache_app.command("clear")
def clear_cache(context: typer.Context, yes: YesOption = False, form: FormatOption = "table") -> None:
    """Drop every library that is not in use.

    Measured times stay (catalog timings clear).

    Example: catalog cache clear --yes
    """
    from catalog.build.housekeeping import clear, tell_registry

    store = _cache()
    if not yes:
        typer.confirm(f"Drop all libraries in {store.folder}?", abort=True)
    done = clear(store)
    tell_registry(store, _db(context))
    _tell(done, "Dropped", form)


@timings_app.command("clear")
def drop_timings(
    context: typer.Context,
    where: Annotated[
        str, typer.Option("--where", metavar="EXPR", help="SQL expression: of which kernels. Default: of all.")
    ] = "",
    yes: YesOption = False,
    form: FormatOption = "table",
) -> None:
    """Drop measured times; libraries stay (catalog cache clear).

    Example: catalog timings clear --where "arch='gfx942' AND family='fwd'" --yes
    """
    from catalog.registry.clear import clear_timings

    path = _db(context)
    if not yes:
        typer.confirm(f"Drop the times of {where or 'all kernels'} in {path}?", abort=True)
    dropped = clear_timings(path, where)
    print_told(f"Dropped {counted(dropped, 'timing')}", ["dropped"], [[dropped]], form)
