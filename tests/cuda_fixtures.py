"""Fixtures of the tests on a real GPU: a catalog of sm_90, and the rows that are run, compiled once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from cuda_gpu import ARCH, OPS, Row, build, rows
from filelock import FileLock

from catalog.ops.attention.fields import Op
from catalog.runtime.catalog import Catalog


@pytest.fixture(scope="session")
def catalog(populated: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """A catalog of sm_90."""
    with Catalog(shutil.copy(populated(ARCH), tmp_path_factory.mktemp("cuda") / "catalog.db")) as catalog:
        yield catalog


@pytest.fixture(scope="session")
def tested(catalog: Catalog, shared: Path) -> Mapping[Op, list[Row]]:
    """The rows that are run, by operation; the first worker that comes compiles their plans, the others wait."""
    tested = {op: rows(catalog, op) for op in OPS}
    every = (row for of_op in tested.values() for row in of_op)
    plans = (catalog.plan(problem, row.kernel) for row in every for problem in row.problems())
    compiled = shared / "cuda.compiled"
    with FileLock(shared / "cuda.lock"):
        if not compiled.exists():
            build(catalog, (kernel for plan in plans for kernel in plan.kernels))
            compiled.touch()
    return tested
