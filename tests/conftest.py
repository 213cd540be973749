"""What the tests share: a private catalog and cache, and one populated gfx950."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from catalog import registry
from catalog.build.cuda.toolchain import cuda_toolchain
from catalog.build.toolchains import digest_of
from catalog.errors import ToolchainError
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.gpu import GpuDevice
from catalog.runtime.devices.host import HostDevice
from catalog.runtime.devices.loading import LoadedKernel
from catalog.settings import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: threads of kernels that spin while they wait would take them from each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def missing(what: str) -> NoReturn:
    """Skip for a missing tool on a user's machine; fail in CI, where every tool must be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is missing in CI")
    pytest.skip(f"{what} is missing", allow_module_level=True)


def load(device: HostDevice | GpuDevice, path: Path, row: str = "ROW") -> LoadedKernel:
    """The library at ``path`` as it is now, built from ``row``."""
    return device.load(path, digest_of(str(path)), row)


def older_catalog(path: Path, steps: int, now: Catalog) -> sqlite3.Connection:
    """A catalog of a program that knew only the first ``steps`` migrations, with one of the kernels of ``now``."""
    row = dict(now.connection.execute("SELECT * FROM kernel WHERE family = 'fwd' LIMIT 1").fetchone())
    with pytest.MonkeyPatch.context() as older:
        older.setattr(registry, "_MIGRATIONS", registry._MIGRATIONS[:steps])
        connection = registry.connect(path)
    there = {column["name"] for column in connection.execute("PRAGMA table_info(kernel)")}
    known = [column for column in row if column in there]
    holes = ", ".join(f":{name}" for name in known)
    connection.execute(f"INSERT INTO kernel ({', '.join(known)}) VALUES ({holes})", row)
    return connection


@pytest.fixture(scope="session")
def nvcc() -> None:
    """Skip where nvcc does not work."""
    try:
        cuda_toolchain("sm_90").verify()
    except ToolchainError as error:
        pytest.skip(f"{error}")


@pytest.fixture(scope="session", autouse=True)
def _private_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's own catalog, cache and settings stay out of the tests."""
    folder = tmp_path_factory.mktemp("settings")
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    shared = tmp_path_factory.getbasetemp().parent if parallel else folder  # what one worker compiled, all have
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("CATALOG_")]:
            patch.delenv(name)
        patch.setenv("CATALOG_DB", str(folder / "catalog.db"))
        patch.setenv("CATALOG_CACHE_DIR", str(shared / "cache"))
        patch.setenv("CATALOG_GUARD", "never")  # its own tests turn it on: a process a kernel would take minutes
        settings.cache_clear()
        Catalog.default.cache_clear()
        yield
    settings.cache_clear()


@pytest.fixture(scope="session")
def gfx950(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """A catalog with every kernel of gfx950, generic masks. Read it only."""
    catalog = Catalog(tmp_path_factory.mktemp("gfx950") / "catalog.db")
    catalog.populate("gfx950")
    return catalog


@pytest.fixture(scope="session")
def host_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a catalog with every kernel of this machine's CPU. Read it, or copy it."""
    catalog = Catalog(tmp_path_factory.mktemp("host") / "catalog.db")
    catalog.populate("host")
    catalog.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    catalog.close()
    return catalog.path


def copy_of(catalog: Catalog, path: Path) -> Catalog:
    """A copy to write to, without what other tests have selected."""
    with sqlite3.connect(path) as target:
        catalog.connection.backup(target)
    target.close()
    copy = Catalog(path)
    for table in ("miss", "problem"):
        copy.connection.execute(f"DELETE FROM {table}")
    return copy


@pytest.fixture
def copied(gfx950: Catalog, tmp_path: Path) -> Catalog:
    """A catalog of gfx950 to write to."""
    return copy_of(gfx950, tmp_path / "copy.db")


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder to change: arch_specs/ copied, the parity lists linked."""
    source = Path(__file__).parent.parent / "data"
    folder = tmp_path / "data"
    shutil.copytree(source / "arch_specs", folder / "arch_specs")
    (folder / "parity").symlink_to(source / "parity")
    (folder / "toolchains").symlink_to(source / "toolchains")
    monkeypatch.setenv("CATALOG_DATA_DIR", str(folder))
    settings.cache_clear()
    return folder


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    yield
    settings.cache_clear()
