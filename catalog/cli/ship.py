"""Commands that exchange data with other programs and machines: export, merge, import."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli import keys, options
from catalog.cli.demand import DemandCommand, stated_demand
from catalog.cli.options import open_catalog
from catalog.cli.printing import note, print_result, print_rows
from catalog.cli.progress import fraction_done
from catalog.messages import counted

if TYPE_CHECKING:
    from catalog.schema.kernel import Kernel

_OUT = typer.Option("--out", help="Folder to write into. Must be new, empty, or hold a previous export.")
_WHERE = typer.Option("--where", metavar="EXPR", help="SQL expression: which kernels.")
OutOption = Annotated[Path, _OUT]
WhereOption = Annotated[str, _WHERE]
LimitOption = Annotated[int | None, typer.Option(min=1, help="At most N kernels, in order of id.", metavar="N")]
LibraryOption = Annotated[str, typer.Option("--prefix", help="Prefix of the C names and of the library: libPREFIX.so.")]
ProjectOption = Annotated[str, typer.Option("--format", help="Build files: cmake, make or ninja.")]

TableOption = Annotated[str | None, typer.Option("--table", metavar="NAME", help="Table of aiter: a8w8, fmoe, ...")]

app = typer.Typer()
export = typer.Typer(name="export", invoke_without_command=True, no_args_is_help=True)
app.add_typer(export)
app.add_typer(keys.app)


@export.callback()
def project(
    context: typer.Context,
    where: Annotated[str | None, _WHERE] = None,
    out: Annotated[Path | None, _OUT] = None,
    form: ProjectOption = "cmake",
    arch: options.Arch = "host",
    prefix: LibraryOption = "catalog",
    limit: LimitOption = None,
    operation: options.Operation = None,
    ck_root: options.CkRoot = None,
) -> None:
    """Write kernels as a project that builds a library.

    The project has sources, headers, a table and build files, and does not need the catalog.

    A repeated export writes only files that changed, so only their kernels are compiled again.

    Example: catalog export --format ninja --where "hdim_q=64 AND dtype='fp32' AND lse" --out kernels
    """
    from catalog.errors import UsageError

    if context.invoked_subcommand is not None:
        for name in context.params:
            if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
                raise UsageError(
                    f"options of catalog export {context.invoked_subcommand} come after its name",
                    hint=f"As in: catalog export {context.invoked_subcommand} --out kernels",
                )
        return
    if where is None or out is None:
        raise UsageError(
            f"catalog export needs {'--where EXPR' if where is None else '--out FOLDER'}",
            hint="As in: catalog export --where \"dtype='fp32'\" --out kernels",
        )
    from catalog.backends import target_of, toolset_of
    from catalog.build.export.projects import how_to_build, read_format
    from catalog.build.export.rows import export_project

    chosen = read_format(form)
    kernels = _kernels(context, where, arch, limit, operation, ck_root)
    with _each_written(len(kernels)) as on_done:
        written = export_project(kernels, out, prefix, chosen, on_done, targets=target_of, toolsets=toolset_of)
    _print_written(len(kernels), out, written)
    print(f"Build: {how_to_build(chosen, out)}")


@export.command()
def register(
    context: typer.Context,
    where: WhereOption,
    out: OutOption,
    prefix: Annotated[str, typer.Option(help="Prefix of the C names: PREFIX_register_kernels.")] = "catalog",
    arch: options.Arch = "host",
    limit: LimitOption = None,
    operation: options.Operation = None,
    ck_root: options.CkRoot = None,
) -> None:
    """Write translation units and a C function that registers them.

    There is one unit per kernel.

    Example: catalog export register --where "hdim_q=64 AND dtype='fp32' AND lse" --out kernels
    """
    from catalog.backends import target_of, toolset_of
    from catalog.build.export.rows import export_register

    kernels = _kernels(context, where, arch, limit, operation, ck_root)
    with _each_written(len(kernels)) as on_done:
        written = export_register(kernels, out, prefix, on_done, targets=target_of, toolsets=toolset_of)
    _print_written(len(kernels), out, written)


@export.command()
def wrap(
    kernel_dir: Annotated[Path, typer.Option("--kernel-dir", help="Folder of generated headers, one kernel each.")],
    out: OutOption,
    pattern: Annotated[str, typer.Option(help="Which headers; **/*.hpp searches subfolders too.")] = "*.hpp",
    prefix: LibraryOption = "catalog",
    form: ProjectOption = "cmake",
    arch: options.Arch = "host",
    ck_root: options.CkRoot = None,
) -> None:
    """Write a project that builds a library of generated headers.

    There is one unit per header; CK's dispatcher generates such headers.

    Example: catalog export wrap --kernel-dir generated --out wrapped --arch gfx942
    """
    from catalog.backends import target_of, toolset_of
    from catalog.build.export.projects import how_to_build, read_format
    from catalog.build.export.wrap import wrap_headers
    from catalog.runtime.here import resolve_arch
    from catalog.settings import choose

    choose(ck_root=ck_root)
    chosen = read_format(form)
    names: list[str] = []
    written = wrap_headers(
        kernel_dir,
        out,
        prefix,
        chosen,
        arch=resolve_arch(arch),
        pattern=pattern,
        on_done=names.append,
        targets=target_of,
        toolsets=toolset_of,
    )
    _print_written(len(names), out, written)
    print(f"Build: {how_to_build(chosen, out)}")


@export.command("aiter-csv")
def aiter_csv(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder; files of the same names are replaced.")],
    table: TableOption = None,
    arch: options.OneArch = None,
    untuned: Annotated[
        bool, typer.Option("--untuned", help="Write the problems that were selected but never measured.")
    ] = False,
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Write all records of a problem, not only the preferred one.")
    ] = False,
) -> None:
    """Write imported timings as tables of aiter.

    There is one CSV file per table, named as in aiter. With --untuned the recorded misses are written, as input of
    aiter's tuning scripts, for operations whose problems aiter's tables can state.

    Example: catalog export aiter-csv --out configs --arch gfx942
    """
    from catalog.errors import UsageError
    from catalog.foreign.exporting import export_tuned, export_untuned
    from catalog.runtime.here import resolve_arch

    if untuned and superseded:
        raise UsageError("--untuned and --superseded exclude each other")
    catalog, chosen = open_catalog(context), arch and resolve_arch(arch)
    if untuned:
        written = export_untuned(catalog, out, table=table, arch=chosen)
    else:
        written = export_tuned(catalog, out, table=table, arch=chosen, superseded=superseded)
    for path, rows in written.items():
        print(f"{path}: {counted(rows, 'row')}")


def _kernels(
    context: typer.Context, where: str, arch: str, limit: int | None, operation: str | None, ck_root: Path | None
) -> list[Kernel]:
    from catalog.runtime.here import resolve_arch
    from catalog.settings import choose

    choose(ck_root=ck_root)
    catalog = open_catalog(context)
    kernels = catalog.kernels(where, arch=resolve_arch(arch), limit=limit, operation=operation)
    for kernel in kernels:
        catalog.builds.require_checkout(kernel)
    return kernels


@contextmanager
def _each_written(total: int) -> Iterator[Callable[[Kernel], None]]:
    """A bar that advances with every kernel."""
    with fraction_done("sources") as on_progress:
        done = count(1)
        yield lambda _: on_progress(next(done) / total)


def _print_written(kernels: int, out: Path, written: Sequence[Path]) -> None:
    print(f"{counted(kernels, 'kernel')} in {out}: {counted(len(written), 'file')} written or changed")


@export.command("filter", cls=DemandCommand)
def generator_filter(
    context: typer.Context,
    arch: Annotated[str | None, options.arch_option("AMD arch: gfx90a, gfx942, ...")] = None,
    form: options.Format = "table",
) -> None:
    """Print filters for CK's generate.py.

    With them, upstream's generator makes exactly the kernels for a trace, a set or a model. A note on stderr has the
    whole command. An API with several patterns is named once for each: the generator then writes all of the kernels,
    but its dispatcher has only those of the last pattern.

    Example: catalog export filter --model config.json --tp 8 --arch gfx942
    """
    from catalog.errors import UsageError
    from catalog.ops.attention.upstream.filters import COLUMNS, commands, filters_of

    catalog = open_catalog(context)
    answers = stated_demand(context).read(arch).answers(catalog)
    if not answers.complete:
        raise UsageError("\n".join(answers.reasons))
    filters = filters_of(catalog.connection, answers.plans.values())
    print_rows(COLUMNS, [one.row for one in filters], form)
    for line in (*answers.reasons, *commands(filters, answers.kernels[0].lineage)):
        note(line)


@app.command(cls=DemandCommand)
def freeze(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file of choices to write.")],
    arch: Annotated[
        str | None, options.arch_option("Arch: gfx950, host, ... Default: host, or the archs of the trace.")
    ] = None,
    ck_root: options.CkRoot = None,
    form: options.Format = "table",
) -> None:
    """Write the kernels chosen for problems to a file.

    The problems come from a trace, a set or a model. With CATALOG_CHOICES=FILE, selection uses that file alone: every
    process chooses the same kernels, whatever it has measured, and no catalog or compiler is needed. The kernels must
    be built.

    Example: catalog freeze --trace calls.jsonl -o choices.lock
    """
    from catalog.runtime.choices import freeze as freeze_choices
    from catalog.settings import choose

    choose(ck_root=ck_root)
    catalog = open_catalog(context)
    answers = stated_demand(context).read(arch).answers(catalog)
    done = freeze_choices(catalog, answers, out)
    for line in answers.reasons:
        note(line)
    text = f"{counted(done.problems, 'problem')} and {counted(done.libraries, 'library')} -> {out}"
    print_result(text, ["file", "problems", "libraries"], [[str(out), done.problems, done.libraries]], form)


@app.command()
def wheel(
    context: typer.Context,
    where: WhereOption,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the wheels.")] = Path("dist"),
    arch: options.Arch = "host",
    operation: options.Operation = None,
    split: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Wheels for each value of this column, such as dtype.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size limit of a wheel, as in 100M. Default: below 2G.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the distribution. Default: kernel-catalog-ARCH.")] = None,
    platform: Annotated[
        str | None, typer.Option(metavar="TAG", help="Platform tag. Default: the oldest manylinux tag that fits.")
    ] = None,
    build: Annotated[bool, typer.Option("--build", help="First build the kernels that are not built.")] = False,
    ck_root: options.CkRoot = None,
    form: options.Format = "table",
) -> None:
    """Write built kernels as wheels, for pip.

    Where such a wheel is installed, its kernels are found as if they were in the cache, and need no compiler. A new
    catalog uses their timings. A group of kernels that is larger than the size limit is split into parts.

    Example: catalog wheel --where "built AND dtype='bf16'" --arch gfx942 --split hdim_q -o dist
    """
    from catalog.runtime.build_run import about_left_out, kernels_to_build
    from catalog.runtime.wheels import COLUMNS, MOST_BYTES, write_wheels
    from catalog.settings import choose
    from catalog.units import parse_size

    choose(ck_root=ck_root)
    most = MOST_BYTES if max_size is None else parse_size(max_size)
    catalog = open_catalog(context)
    kernels, left_out = kernels_to_build(catalog, where, arch, None, operation)
    if left_out:
        note(about_left_out(left_out, arch, operation))
    if build:
        failures = catalog.builder.build_many(kernels).failures
        if failures:
            raise failures[0].error
    rows = write_wheels(catalog, kernels, out, name=name, split=split, most_bytes=most, platform=platform)
    print_rows(COLUMNS, rows, form)


@app.command()
def merge(
    context: typer.Context,
    others: Annotated[list[Path], typer.Argument(metavar="OTHER.db...", help="Catalogs of other machines; only read.")],
    form: options.Format = "table",
) -> None:
    """Import the records of other machines' catalogs.

    Imports all records of builds and timings, or none if one of the files is unusable.

    Example: catalog merge mi300.db epyc.db
    """
    from catalog.registry.merge import COLUMNS

    merged = open_catalog(context).merge(others)
    print_rows(COLUMNS, [row for one in merged for row in one.rows], form)
    for line in (line for one in merged for line in one.notes):
        note(line)


@app.command("import")
def import_timings(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="aiter-csv, tunableop or miopen-fdb.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Tables of that kind; only read.")],
    table: TableOption = None,
    arch: Annotated[str | None, typer.Option(help="Arch of the device, where a file does not state it.")] = None,
    tool: Annotated[str, typer.Option(help="Program that measured, where a file does not state it.")] = "",
    measured: Annotated[
        str | None, typer.Option(metavar="DATE", help="When it was measured, as in 2026-05-31; newer is preferred.")
    ] = None,
    form: options.Format = "table",
) -> None:
    """Import timings that other projects measured.

    The tables are tuned tables of aiter, results of PyTorch's TunableOp, and find-dbs of MIOpen. Their kernels need no
    row in this catalog, and every field is kept. Imports all files, or none if one is malformed. Duplicates are listed,
    with the reason why one is preferred.

    Example: catalog import aiter-csv configs/a8w8_tuned_gemm.csv
    """
    from catalog.foreign.importing import COLUMNS, import_tables
    from catalog.foreign.parsed import Given, read_date

    given = Given(table, arch, tool, None if measured is None else read_date(measured))
    report = import_tables(open_catalog(context), kind, files, given)
    print_rows(COLUMNS, [one.row for one in report.files], form)
    for line in report.notes:
        note(line)
