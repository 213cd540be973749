"""The catalog in a browser: Datasette on the file, with the report's plots, explanations, and a page for each kernel.

Nothing is written to the catalog. The report and the explanations select kernels, which records misses and may populate
an arch: they use a private copy of the file, which is made again when the file has changed.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import socket
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from catalog.errors import CatalogError, UsageError
from catalog.extras import how_to_install
from catalog.ops import DEFAULT, operation, operations
from catalog.report.datasette import metadata
from catalog.report.kernel_page import kernel_page
from catalog.runtime.explained import Explained, explained_problem, explained_traits
from catalog.schema.lineage import Wanted
from catalog.schema.trait_text import read_traits

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog

QUERY_MS = 10_000
"""Time limit of a query in ms."""

_ID = re.compile(r"[0-9a-f]{64}")

_T = TypeVar("_T")


class Snapshot:
    """A private copy of a catalog's file, for what selects kernels; made again when the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = tempfile.TemporaryDirectory(prefix="catalog-serve-")
        self._lock = threading.Lock()
        self._version: tuple[int, ...] | None = None

    def use(self, work: Callable[[Catalog], _T]) -> _T:
        """The result of ``work`` on the copy; one at a time.

        Raises:
            CatalogError: as ``work``.
        """
        from catalog.runtime.catalog import Catalog

        with self._lock:
            copy = Path(self._folder.name) / self._path.name
            version = self._version_now()
            if version != self._version:
                with closing(_reading(self._path)) as source, closing(sqlite3.connect(copy)) as target:
                    source.backup(target)
                self._version = version
            with Catalog(copy) as catalog:
                return work(catalog)

    def close(self) -> None:
        """Delete the copy."""
        self._folder.cleanup()

    def _version_now(self) -> tuple[int, ...]:
        files = (self._path, self._path.with_name(f"{self._path.name}-wal"))
        states = (file.stat() if file.exists() else None for file in files)
        return tuple(number for state in states if state for number in (state.st_mtime_ns, state.st_size))


def _reading(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    return connection


@contextmanager
def application(path: Path) -> Iterator[Any]:
    """The Datasette object of the catalog at ``path``, which must exist, with the pages of this module.

    Raises:
        UsageError: Datasette is not installed.
    """
    try:
        from datasette.app import Datasette
        from datasette.plugins import pm
    except ImportError as error:
        raise UsageError(f"serving needs Datasette ({error})", hint=how_to_install("datasette,report")) from None
    snapshot = Snapshot(path)
    pages = _pages(path, snapshot)
    pm.register(pages, "kernel_catalog")
    try:
        yield Datasette(
            [str(path)],
            metadata=metadata(path.stem),
            settings={"sql_time_limit_ms": QUERY_MS},
            template_dir=str(Path(__file__).parent / "templates"),
        )
    finally:
        pm.unregister(pages)
        snapshot.close()


def _pages(path: Path, snapshot: Snapshot) -> ModuleType:
    """The plugin of Datasette that adds the pages."""
    from datasette import NotFound, Response, hookimpl
    from markupsafe import Markup

    async def kernel(datasette: Any, request: Any) -> Any:
        def read() -> Any:
            with closing(_reading(path)) as connection:
                return kernel_page(connection, request.url_vars["kernel_id"])

        try:
            page = await asyncio.to_thread(read)
        except UsageError as error:
            raise NotFound(error.message) from None
        explain = _explain_address(page.kernel)
        return Response.html(
            await datasette.render_template("kernel.html", {"page": page, "explain": explain}, request)
        )

    async def explain(datasette: Any, request: Any) -> Any:
        asked = {name: request.args.get(name) or default for name, default in _ASKED.items()}
        explained, error = None, ""
        if asked["words"]:
            try:
                explained = await asyncio.to_thread(snapshot.use, lambda catalog: explanation(catalog, asked))
            except CatalogError as refusal:
                error = str(refusal)
        shown = {"asked": asked, "operations": [of.name for of in operations()], "explained": explained, "error": error}
        return Response.html(await datasette.render_template("explain.html", shown, request))

    async def report(datasette: Any, request: Any) -> Any:
        def write(catalog: Catalog) -> str:
            from catalog.report import plots
            from catalog.report.collect import collect
            from catalog.report.page import render

            plots.require()
            return render(collect(catalog, request.args.get("arch"), {}))

        try:
            return Response.html(await asyncio.to_thread(snapshot.use, write))
        except CatalogError as error:
            return Response.text(str(error), status=500)

    def register_routes() -> list[tuple[str, Any]]:
        return [
            (r"^/-/kernel/(?P<kernel_id>[0-9a-f]{64})$", kernel),
            (r"^/-/explain$", explain),
            (r"^/-/report$", report),
        ]

    def menu_links() -> list[dict[str, str]]:
        return [{"href": "/-/report", "label": "Report"}, {"href": "/-/explain", "label": "Explain"}]

    def render_cell(value: Any, column: str, table: str | None) -> Any:
        label = ""
        if isinstance(value, dict):  # a foreign key, with the name of the row that it refers to
            value, label = value["value"], value["label"]
        is_kernel = column == "kernel_id" or (column == "id" and table is not None)
        if is_kernel and isinstance(value, str) and _ID.fullmatch(value):
            return Markup('<a href="/-/kernel/{0}">{1}</a>').format(value, label or value[:12])
        return None

    plugin = ModuleType("kernel_catalog")  # Datasette asks plugins for a module's name
    for hook in (register_routes, menu_links, render_cell):
        setattr(plugin, hook.__name__, hookimpl(hook))
    return plugin


_ASKED: Mapping[str, str] = {
    "operation": DEFAULT,
    "arch": "host",
    "revision": "",
    "mask_impl": "generic",
    "space": "",
    "words": "",
}
"""The fields of the page that explains, with their defaults."""


def explanation(catalog: Catalog, asked: Mapping[str, str]) -> Explained:
    """The answer to ``asked``, whose ``words`` are traits with a family, or the fields of a problem: ``NAME=VALUE``.

    Raises:
        CatalogError: as :meth:`catalog.Catalog.explain` and :func:`~catalog.runtime.explained.explained_problem`.
    """
    of = operation(asked["operation"])
    try:
        words = shlex.split(asked["words"])
    except ValueError as error:
        raise UsageError(f"{asked['words']}: {error}") from None
    wanted = Wanted(asked["arch"], asked["revision"] or None, asked["mask_impl"], of.name)
    if any(word.startswith("family=") for word in words):
        space = asked["space"] or None
        traits = read_traits(words, of.traits)
        return explained_traits(catalog.explain(traits, **wanted.keywords, operation=of.name, space=space))
    fields = dict(word.partition("=")[::2] for word in words)
    return explained_problem(catalog, of.problem(**{name: _value(text) for name, text in fields.items()}), wanted)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _explain_address(kernel: Any) -> str:
    """The address of the page that explains why a kernel exists."""
    from urllib.parse import urlencode

    row = kernel.to_row()
    words = " ".join(f"{name}={row[name]}" for name in kernel.traits if row[name] != "")
    asked = {"operation": kernel.operation, "arch": kernel.arch, "revision": kernel.revision, "words": words}
    return f"/-/explain?{urlencode(asked | {'mask_impl': kernel.variant or 'generic', 'space': kernel.space})}"


def serve(path: Path, host: str, port: int, on_start: Callable[[str], None]) -> None:
    """Serve the catalog at ``path`` until Ctrl-C.

    Args:
        path: the catalog's file.
        host: address to listen at.
        port: port to listen at; 0: a free one.
        on_start: called with the URL once it answers.

    Raises:
        UsageError: Datasette is not installed, there is no file, or the address cannot be used.
    """
    if not path.exists():
        raise UsageError(f"there is no catalog at {path}", hint="catalog populate makes one.")
    with application(path) as datasette, closing(socket.socket()) as listener:
        import rich
        import uvicorn

        rich.reconfigure(quiet=True)  # Datasette prints a traceback for each page that does not exist
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            raise UsageError(f"{host}:{port} cannot be listened at: {error}", hint="Choose another --port.") from None
        listener.listen()
        on_start(f"http://{host}:{listener.getsockname()[1]}/")
        with suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(datasette.app(), log_level="warning")).run(sockets=[listener])
