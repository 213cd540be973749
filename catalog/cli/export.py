"""``catalog export``: rows, or a folder of generated headers, as sources for another build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli.options import ArchOption, CkRootOption
from catalog.messages import counted

if TYPE_CHECKING:
    from catalog.schema.kernel import Kernel

OutOption = Annotated[Path, typer.Option("--out", help="Folder to write into: new, empty, or with a previous export.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="At most N kernels, in order of id.", metavar="N")]
ProjectOption = Annotated[str, typer.Option("--format", help="Build files: cmake, make or ninja.")]

export = typer.Typer(invoke_without_command=True, no_args_is_help=True)


@export.callback()
def project(
    context: typer.Context,
    where: Annotated[str | None, typer.Option("--where", metavar="EXPR", help="SQL expression: which kernels.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write into: new, empty, or with a previous export.")
    ] = None,
    form: ProjectOption = "cmake",
    arch: ArchOption = "host",
    prefix: Annotated[str, typer.Option(help="Of the C names and of the library: libPREFIX.so.")] = "catalog",
    limit: LimitOption = None,
    ck_root: CkRootOption = None,
) -> None:
    """Write kernels as a project that builds a library.

    Sources, headers, a table and build files, which do not need the catalog.

    Written again, only files that changed are touched, so that only their kernels compile again.

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
            hint="As in: catalog export --where \"hdim_q=64 AND dtype='fp32'\" --out kernels",
        )
    from catalog.backends import target_of, toolset_of
    from catalog.build.export.projects import how_to_build, read_format
    from catalog.build.export.rows import export_project

    chosen = read_format(form)
    kernels = _kernels(context, where, arch, limit, ck_root)
    with _each_told(len(kernels)) as on_done:
        written = export_project(kernels, out, prefix, chosen, on_done, targets=target_of, toolsets=toolset_of)
    print(f"{counted(len(kernels), 'kernel')} in {out}: {counted(len(written), 'file')} written or changed")
    print(f"Build: {how_to_build(chosen, out)}")


@export.command()
def register(
    context: typer.Context,
    where: Annotated[str, typer.Option("--where", metavar="EXPR", help="SQL expression: which kernels.")],
    out: OutOption,
    prefix: Annotated[str, typer.Option(help="Of the C names: PREFIX_register_kernels.")] = "catalog",
    arch: ArchOption = "host",
    limit: LimitOption = None,
    ck_root: CkRootOption = None,
) -> None:
    """Write translation units and a C function that registers them.

    One unit for each kernel.

    Example: catalog export register --where "hdim_q=64 AND dtype='fp32' AND lse" --out kernels
    """
    from catalog.backends import target_of, toolset_of
    from catalog.build.export.rows import export_register

    kernels = _kernels(context, where, arch, limit, ck_root)
    with _each_told(len(kernels)) as on_done:
        written = export_register(kernels, out, prefix, on_done, targets=target_of, toolsets=toolset_of)
    print(f"{counted(len(kernels), 'kernel')} in {out}: {counted(len(written), 'file')} written or changed")


@export.command()
def wrap(
    kernel_dir: Annotated[Path, typer.Option("--kernel-dir", help="Folder of generated headers, one kernel each.")],
    out: OutOption,
    pattern: Annotated[str, typer.Option(help="Which headers; **/*.hpp searches below the folder.")] = "*.hpp",
    prefix: Annotated[str, typer.Option(help="Of the C names and of the library: libPREFIX.so.")] = "catalog",
    form: ProjectOption = "cmake",
    arch: ArchOption = "host",
    ck_root: CkRootOption = None,
) -> None:
    """Write a project that builds a library of generated headers.

    One unit for each header, as the dispatcher of CK generates them.

    Example: catalog export wrap --kernel-dir generated --out wrapped --arch gfx942
    """
    from catalog.backends import target_of, toolset_of
    from catalog.build.export.projects import how_to_build, read_format
    from catalog.build.export.wrap import wrap_headers
    from catalog.runtime.devices.here import resolve_arch
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
    print(f"{counted(len(names), 'kernel')} in {out}: {counted(len(written), 'file')} written or changed")
    print(f"Build: {how_to_build(chosen, out)}")


def _kernels(context: typer.Context, where: str, arch: str, limit: int | None, ck_root: Path | None) -> list[Kernel]:
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.devices.here import resolve_arch
    from catalog.settings import choose, settings

    choose(ck_root=ck_root)
    catalog = Catalog(context.find_root().params["db"] or settings().db)
    return catalog.kernels(where, arch=resolve_arch(arch), limit=limit)


@contextmanager
def _each_told(count: int) -> Iterator[Callable[[Kernel], None]]:
    """A bar that moves with every kernel."""
    from catalog.cli.progress import fraction_done

    with fraction_done("sources") as on_progress:
        done = 0

        def advance(_kernel: Kernel) -> None:
            nonlocal done
            done += 1
            on_progress(done / count)

        yield advance
