"""``catalog cache`` and ``catalog timings``: what is kept between runs, and dropping it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from catalog.build.cache import Cache
    from catalog.build.housekeeping import Collected

cache_app = typer.Typer(
    name="cache", help="The cache of compiled kernels.", no_args_is_help=True, rich_markup_mode=None
)
timings_app = typer.Typer(name="timings", help="The measured times.", no_args_is_help=True, rich_markup_mode=None)

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def _cache() -> Cache:
    from catalog.build.cache import Cache
    from catalog.settings import settings

    return Cache(settings().cache_dir)


def _db(context: typer.Context) -> Path:
    from catalog.settings import settings

    chosen: Path | None = context.find_root().params.get("db")
    return chosen or settings().db


def _print(columns: list[str], rows: list[list[object]]) -> None:
    from catalog.output import Format, write_rows

    write_rows(columns, rows, Format.TABLE, sys.stdout)


def _tell(done: Collected, verb: str) -> None:
    from catalog.units import format_size

    kept = f", {done.in_use:,} in use were kept" if done.in_use else ""
    print(
        f"{verb} {len(done.dropped):,} libraries ({format_size(done.dropped_bytes)}) and {done.leftovers:,} other "
        f"files{kept}; left: {done.left:,} libraries ({format_size(done.left_bytes)})"
    )


@cache_app.command("path")
def show_path() -> None:
    """Show the cache folder, its file system, and how builders lock it.

    Example: catalog cache path
    """
    from catalog.doctor import about_cache

    _print(["what", "value", "about"], [list(finding) for finding in about_cache()])


@cache_app.command("ls")
def list_entries(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list; sizes in bytes.")] = False,
) -> None:
    """List the libraries, the last used first.

    Example: catalog cache ls
    """
    from catalog.build.housekeeping import entries
    from catalog.units import format_size

    found = entries(_cache())
    if as_json:
        print(json.dumps([asdict(entry) for entry in found], indent=1))
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
    _print(["key", "arch", "size", "compile_s", "created", "last_used", "kernel"], rows)
    print(f"{len(found):,} libraries, {format_size(sum(entry.bytes for entry in found))}")


@cache_app.command("verify")
def verify_entries(
    context: typer.Context,
    delete: Annotated[bool, typer.Option("--delete", help="Delete what is damaged.")] = False,
) -> None:
    """Hold every library against its record.

    Exits with 1 when something is damaged: the next build of that kernel replaces it, and until then nothing loads it.

    Example: catalog cache verify --delete
    """
    from catalog.build.housekeeping import entries, tell_registry, verify

    store = _cache()
    damages = verify(store, delete=delete)
    for damage in damages:
        fate = "deleted" if damage.deleted else "the next build replaces it"
        print(f"{damage.key}  {damage.kernel or '?'}: {damage.reason}; {fate}")
    if delete:
        tell_registry(store, _db(context))
    sound = len(entries(store)) - sum(not damage.deleted for damage in damages)
    print(f"{sound:,} libraries are sound, {len(damages):,} damaged")
    if damages:
        raise typer.Exit(1)


@cache_app.command("gc")
def collect_garbage(
    context: typer.Context,
    max_size: Annotated[str | None, typer.Option(help="Drop the longest unused until so much is left: 2G.")] = None,
    older_than: Annotated[str | None, typer.Option(help="Drop what was not used for so long: 30d, 12h.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would go, and leave it.")] = False,
) -> None:
    """Drop libraries that were not used for long, and what killed builders left behind. What is in use stays.

    Example: catalog cache gc --max-size 2G --older-than 30d
    """
    from catalog.build.housekeeping import collect, tell_registry
    from catalog.units import parse_age, parse_size

    max_bytes = None if max_size is None else parse_size(max_size)
    seconds = None if older_than is None else parse_age(older_than)
    store = _cache()
    done = collect(store, max_bytes, seconds, dry_run=dry_run)
    if dry_run:
        for key in done.dropped:
            print(key)
    else:
        tell_registry(store, _db(context))
    _tell(done, "Would drop" if dry_run else "Dropped")


@cache_app.command("clear")
def clear_cache(context: typer.Context, yes: YesOption = False) -> None:
    """Drop every library that is not in use; measured times stay (catalog timings clear).

    Example: catalog cache clear --yes
    """
    from catalog.build.housekeeping import clear, tell_registry

    store = _cache()
    if not yes:
        typer.confirm(f"Drop all libraries in {store.folder}?", abort=True)
    done = clear(store)
    tell_registry(store, _db(context))
    _tell(done, "Dropped")


@timings_app.command("clear")
def drop_timings(
    context: typer.Context,
    where: Annotated[
        str, typer.Option("--where", metavar="EXPR", help="SQL expression: of which kernels. Default: of all.")
    ] = "",
    yes: YesOption = False,
) -> None:
    """Drop measured times; libraries stay (catalog cache clear).

    Example: catalog timings clear --where "arch='gfx942' AND family='fwd'" --yes
    """
    from catalog.runtime.clear import clear_timings

    path = _db(context)
    if not yes:
        typer.confirm(f"Drop the times of {where or 'all kernels'} in {path}?", abort=True)
    print(f"Dropped {clear_timings(path, where):,} timings")
