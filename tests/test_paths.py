"""Public functions take paths as ``Path``, as text and as any object with a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from catalog.errors import CatalogError
from catalog.files import StrPath
from catalog.foreign.importing import import_tables
from catalog.report.traced import read_traced
from catalog.rules.parity import Lists
from catalog.rules.populate import Request
from catalog.rules.restriction import restriction
from catalog.runtime.catalog import Catalog
from catalog.runtime.catalog_file import read_spec
from catalog.runtime.choices import read_choices
from catalog.runtime.demand import Demand
from catalog.runtime.exchange import Usage, import_bundle
from catalog.runtime.readiness import faults_of_choices
from catalog.runtime.traces import read_trace
from catalog.runtime.tracing import trace
from catalog.schema.deployment import Deployment
from catalog.schema.shapes import load_shapes

ARCH = "gfx942"


class Location(os.PathLike[str]):
    """A path that is neither text nor a ``Path``, such as an entry of ``os.scandir``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


READERS: dict[str, Callable[[Catalog, StrPath], object]] = {
    "populate": lambda catalog, path: catalog.populate(ARCH, ck_root=path),
    "merge": lambda catalog, path: catalog.merge([path]),
    "trace": lambda _, path: trace(path).__enter__(),
    "read_trace": lambda _, path: read_trace(path),
    "read_traced": read_traced,
    "load_shapes": lambda _, path: load_shapes(path),
    "Demand.of_trace": lambda _, path: Demand.of_trace(path, ARCH),
    "Demand.of_shapes": lambda _, path: Demand.of_shapes(path, ARCH),
    "Demand.of_model": lambda _, path: Demand.of_model(path, Deployment(), ARCH),
    "Usage.of_trace": lambda catalog, path: Usage.of_trace(catalog, path, "calls", None),
    "import_bundle": lambda catalog, path: import_bundle(catalog, path, trust=True),
    "import_tables": lambda catalog, path: import_tables(catalog, "aiter-csv", [path]),
    "read_choices": lambda _, path: read_choices(path),
    "faults_of_choices": lambda _, path: faults_of_choices(path),
    "restriction": lambda _, path: restriction(read_spec(ARCH), [path], "", None),
    "filter": lambda _, path: restriction(read_spec(ARCH), [], "", path),
    "Lists": lambda _, path: Lists(path).names(Request(read_spec(ARCH)), 0),
}


@pytest.mark.parametrize("given", [str, Location], ids=["text", "path-like"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_a_path_may_be_text(
    read: Callable[[Catalog, StrPath], object], given: Callable[[Path], StrPath], tmp_path: Path
) -> None:
    path = tmp_path / "absent" / "file.yaml"
    path.parent.touch()  # nothing can be read or made below a file
    reads = partial(read, Catalog(tmp_path / "catalog.db"))
    with pytest.raises(CatalogError) as expected:
        reads(path)
    with pytest.raises(type(expected.value)) as raised:
        reads(given(path))
    assert str(raised.value) == str(expected.value)
    assert str(path) in str(raised.value)
