"""``catalog cache``: the folder of compiled kernels."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli import options
from catalog.cli.options import db_path, open_catalog
from catalog.cli.printing import print_result, print_rows
from catalog.messages import counted, subject

if TYPE_CHECKING:
    from catalog.build.cache import Cache
    from catalog.build.housekeeping import Collected

app = typer.Typer(
    name="cache",
    help="The cache of compiled kernels.\n\nExample: catalog cache ls",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _cache() -> Cache:
    from catalog.build.cache import Cache
    from catalog.settings import settings

    return Cache(settings().cache_dir)


@app.command("path")
def show_path(form: options.Format = "table") -> None:
    """Show the cache folder, its locks, and its size cap.

    Example: catalog cache path
    """
    from catalog.doctor import Finding, about_cache

    print_rows(Finding._fields, about_cache(), form)


@app.command("ls")
def list_entries(
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    form: options.Format = "table",
) -> None:
    """List the libraries, most recently used first.

    Example: catalog cache ls
    """
    from catalog.build.housekeeping import Entry, entries
    from catalog.units import format_size

    found = entries(_cache())
    if as_json or form != "table":
        columns = [field.name for field in fields(Entry)]
        print_rows(columns, [list(asdict(entry).values()) for entry in found], "json" if as_json else form)
        return
    rows = [
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


@app.command("verify")
def verify_entries(
    context: typer.Context,
    delete: Annotated[bool, typer.Option("--delete", help="Delete damaged libraries.")] = False,
    form: options.Format = "table",
) -> None:
    """Check every library against its record.

    Exits with 1 if any is damaged. A damaged library is never loaded; the next build of its kernel replaces it.

    Example: catalog cache verify --delete
    """
    from catalog.build.housekeeping import entries, sync_registry, verify

    store = _cache()
    damages = verify(store, delete=delete)
    if delete:
        sync_registry(store, db_path(context))
    sound = len(entries(store)) - sum(not damage.deleted for damage in damages)
    text = "\n".join(
        [*(damage.about for damage in damages), f"{subject(sound, 'library')} intact, {len(damages):,} damaged"]
    )
    rows = [[damage.key, damage.kernel, damage.reason, int(damage.deleted)] for damage in damages]
    print_result(text, ["key", "kernel", "reason", "deleted"], rows, form)
    if damages:
        raise typer.Exit(1)


@app.command("gc")
def collect_garbage(
    context: typer.Context,
    max_size: Annotated[
        str | None, typer.Option(help="Drop the least recently used libraries down to this total size: 2G.")
    ] = None,
    older_than: Annotated[str | None, typer.Option(help="Drop libraries not used for this long: 30d, 12h.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be dropped; drop nothing.")] = False,
    form: options.Format = "table",
) -> None:
    """Drop libraries that have not been used for a long time.

    Leftovers of killed builders are dropped too. Libraries in use are kept.

    Example: catalog cache gc --max-size 2G --older-than 30d
    """
    from catalog.build.housekeeping import collect, sync_registry
    from catalog.units import parse_age, parse_size

    max_bytes = None if max_size is None else parse_size(max_size)
    seconds = None if older_than is None else parse_age(older_than)
    store = _cache()
    done = collect(store, max_bytes, seconds, dry_run=dry_run)
    if dry_run:
        _print_dropped("".join(f"{key}\n" for key in done.dropped) + "Would drop", done, form)
    else:
        sync_registry(store, db_path(context))
        _print_dropped("Dropped", done, form)


@app.command("clear")
def clear_cache(context: typer.Context, yes: options.Yes = False, form: options.Format = "table") -> None:
    """Drop every library that is not in use.

    Measured times are kept (catalog timings clear drops them).

    Example: catalog cache clear --yes
    """
    from catalog.build.housekeeping import clear, sync_registry

    store = _cache()
    if not yes:
        typer.confirm(f"Drop all libraries in {store.folder}?", abort=True)
    done = clear(store)
    sync_registry(store, db_path(context))
    _print_dropped("Dropped", done, form)


def _print_dropped(verb: str, done: Collected, form: str) -> None:
    facts = {**asdict(done), "dropped": len(done.dropped)}
    print_result(f"{verb} {done.about}", list(facts), [list(facts.values())], form)


@app.command("export")
def export_libraries(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The bundle to write.")],
    where: Annotated[str, typer.Option(metavar="EXPR", help="SQL expression: which kernels. Default: all.")] = "",
    arch: options.OneArch = None,
    operation: options.Operation = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Only kernels for the calls of a trace.")] = None,
    by: Annotated[str, typer.Option(metavar="calls|time", help="Which calls of the trace come first.")] = "calls",
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size limit, as in 1900M: the most used kernels that fit.")
    ] = None,
    form: options.Format = "table",
) -> None:
    """Write built kernels to one file for other machines.

    The file includes the records of their builds and their timings. With a trace, only the kernels that are selected
    for its calls are written, and the share of calls that they serve is shown. A size limit leaves out those that
    are used least.

    Example: catalog cache export --where "hdim_q=128" --arch host kernels.bundle

    Example: catalog cache export --max-size 1900M --by calls --trace calls.jsonl kernels.bundle
    """
    from catalog.errors import UsageError
    from catalog.runtime.exchange import Usage, export_bundle
    from catalog.runtime.here import resolve_arch
    from catalog.units import parse_size

    if max_size is not None and trace is None:
        raise UsageError("--max-size needs --trace FILE, which says which kernels are used most")
    catalog, most = open_catalog(context), None if max_size is None else parse_size(max_size)
    usage = None if trace is None else Usage.of_trace(catalog, trace, by, most)
    done = export_bundle(catalog, where, file, None if arch is None else resolve_arch(arch), operation, usage=usage)
    what = f"{counted(done.libraries, 'library')} and {counted(done.timings, 'timing')}"
    unbuilt = f"\n{subject(done.unbuilt, 'more kernel')} selected but not built." if done.unbuilt else ""
    served = "" if done.covered is None else f"\nThey serve {done.covered:.1%} of the {by} of {trace}."
    facts = {"file": str(file), **asdict(done)}
    text = f"{what} -> {file} ({done.bytes / 1e6:.1f} MB){served}{unbuilt}"
    print_result(text, list(facts), [list(facts.values())], form)


@app.command("import")
def import_libraries(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A bundle that catalog cache export wrote.")],
    trust: Annotated[bool, typer.Option("--trust", help="I trust its source: its libraries are code.")] = False,
    form: options.Format = "table",
) -> None:
    """Import the built kernels of a bundle.

    The whole bundle is checked before anything is written.

    Example: catalog cache import --trust kernels.bundle
    """
    from catalog.runtime.exchange import import_bundle

    done = import_bundle(open_catalog(context), file, trust=trust)
    text = (
        f"{subject(done.new, 'library')} new, {done.present:,} already present; {counted(done.timings, 'new timing')}"
    )
    if done.no_rows:
        text += f"\n{subject(done.no_rows, 'library')} not in this catalog: cached but not recorded."
    print_result(text, list(asdict(done)), [list(asdict(done).values())], form)


@app.command("push")
def push_libraries(
    replace: Annotated[bool, typer.Option("--replace", help="Also write entries that are already there.")] = False,
    form: options.Format = "table",
) -> None:
    """Write the libraries of the cache to the remote cache.

    CATALOG_REMOTE names it, as in s3://bucket/kernels. Damaged libraries are left out. Each library is signed if
    CATALOG_REMOTE_KEY names a key.

    Example: catalog cache push
    """
    from catalog.build.remote import Remote, push
    from catalog.errors import UsageError
    from catalog.settings import settings

    remote = Remote.of(settings())
    if remote is None:
        raise UsageError("there is no remote cache", hint="CATALOG_REMOTE names one, as in s3://bucket/kernels.")
    done = push(_cache(), remote, replace=replace)
    text = f"{counted(done.written, 'library')} -> {remote.shown}, {done.present:,} already there"
    print_result(text, list(asdict(done)), [list(asdict(done).values())], form)


@app.command()
def quarantined(context: typer.Context, form: options.Format = "table") -> None:
    """List the kernels that failed in their first run.

    They crashed, hung or gave a wrong result. They are not selected until the listed time.

    Example: catalog cache quarantined
    """
    found = open_catalog(context).build_log.quarantined()
    columns = ["when", "until", "kernel", "arch", "reason", "problem", "id"]
    rows = [[one.when, one.until, one.kernel, one.arch, one.reason, one.problem, one.kernel_id] for one in found]
    print_rows(columns, rows, form)


@app.command()
def unquarantine(
    context: typer.Context,
    which: Annotated[
        str | None, typer.Argument(metavar="[NAME|ID]", help="Name or id of a quarantined kernel.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every quarantined kernel.")] = False,
    form: options.Format = "table",
) -> None:
    """Release quarantined kernels.

    They can be selected again, and their next run is a guarded one.

    Example: catalog cache unquarantine --all
    """
    from catalog.errors import UsageError

    if everything is (which is not None):
        raise UsageError(
            "name a kernel or use --all" if which is None else "a kernel cannot be named together with --all",
            hint="catalog cache quarantined lists the kernels.",
        )
    released = open_catalog(context).build_log.release(which)
    text = "\n".join(f"released {one.kernel}" for one in released) or "No kernel is quarantined."
    print_result(text, ["kernel", "arch", "id"], [[one.kernel, one.arch, one.kernel_id] for one in released], form)
