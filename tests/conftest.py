"""What the tests share: private settings, kernels that are kept between runs, and populated catalogs."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: threads that spin while they wait would take them from each other. Of matrix products in
    # the reference, which NumPy's OpenBLAS and PyTorch's MKL would divide, that was two thirds of the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest
import typer.main
import typer.testing
from filelock import FileLock
from hip_machine import hip_machine  # noqa: F401 - a fixture

from catalog import backends, ops, plugins
from catalog.backends import target_of
from catalog.build.builder import Builder
from catalog.build.cache import Cache
from catalog.build.cuda.toolchain import cuda_toolchain
from catalog.build.permissions import require_safe
from catalog.build.toolchains import digest_of
from catalog.build.trials import Trials
from catalog.errors import CacheError
from catalog.foreign.installed import plugins as implementations
from catalog.plugins import entry_points_of
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.gpu.device import GpuDevice
from catalog.runtime.devices.host.device import HostDevice
from catalog.runtime.devices.loading import LoadedKernel
from catalog.runtime.here import resolve_arch
from catalog.schema import grammar, traits
from catalog.schema.kernel import Kernel
from catalog.settings import settings

ROOT = Path(__file__).parent.parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As of a shell's background jobs; what tests start and interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def missing(what: str) -> NoReturn:
    """Skip for a missing tool on a user's machine; fail in CI, where every tool must be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is missing in CI")
    pytest.skip(f"{what} is missing", allow_module_level=True)


def load(device: HostDevice | GpuDevice, path: Path, row: str = "ROW") -> LoadedKernel:
    """The library at ``path`` as it is now, built from ``row``."""
    return device.load(path, digest_of(str(path)), row)


def has_nvcc() -> bool:
    """Whether kernels of sm_90 can be compiled here."""
    return Trials(Cache(settings().cache_dir)).diagnose("sm_90", cuda_toolchain).missing is None


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "leave out the tests that FILE names, and add the names of those that pass"
    parser.addoption("--passed", metavar="FILE", help=about)


LONGEST = {"test_docs.py", "test_host_kernels.py"}
"""Files with tests that take a minute or more: they start first, so that at the end no worker waits for the other."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    passed = config.getoption("passed")
    if passed is None or not Path(passed).exists():
        return
    names = set(Path(passed).read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
    items[:] = [item for item in items if item.nodeid not in names]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    passed = config.getoption("passed")
    if passed is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    names = {report.nodeid for report in terminalreporter.getreports("passed")}
    with Path(passed).open("a") as file:
        file.writelines(f"{name}\n" for name in sorted(names))


def pytest_collection_finish() -> None:
    """Exempt what pytest has made of all files from garbage collection, of which many tests ask for a whole one."""
    gc.collect()
    gc.freeze()


@contextmanager
def leaves_nothing(live: Callable[[], int]) -> Iterator[None]:
    """Check that nothing made meanwhile is alive at the end; older objects are not searched, which takes 0.2 s."""
    gc.freeze()
    yield
    gc.collect()
    assert live() == 0


@pytest.fixture(scope="session")
def nvcc() -> None:
    """Skip where nvcc does not work; fail in CI."""
    if not has_nvcc():
        missing("nvcc")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of this run have together."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def between_runs(shared: Path, pytestconfig: pytest.Config) -> Path:
    """A folder for what tests make once, by content key: kept between runs, in pytest's own cache."""
    if not pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        return shared
    folder = pytestconfig.cache.mkdir("kernels")
    try:
        require_safe(folder)
    except CacheError:  # anybody may write to the checkout
        return shared
    return folder


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Typer builds every command anew for each call, which takes 40 ms; a process of a user's makes one call."""
    built = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", built)
        patch.setattr(typer.testing, "_get_command", built)
        yield


@pytest.fixture(scope="session", autouse=True)
def _private_settings(tmp_path_factory: pytest.TempPathFactory, between_runs: Path) -> Iterator[None]:
    """The user's own catalog, cache and settings stay out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("CATALOG_")]:
            patch.delenv(name)
        patch.setenv("CATALOG_DB", str(tmp_path_factory.mktemp("settings") / "catalog.db"))
        patch.setenv("CATALOG_CACHE_DIR", str(between_runs / "cache"))
        patch.setenv("CATALOG_QUERY_TIMEOUT", "60")  # workers share the cores
        patch.setenv("CATALOG_GUARD", "never")  # its own tests turn it on: one process per kernel would take minutes
        settings.cache_clear()
        Catalog.default.cache_clear()
        yield
    settings.cache_clear()


def program_digest() -> str:
    """Digest of everything that decides about rows: the program, its data, Python and SQLite."""
    digest = hashlib.sha256(f"{sys.version} {sqlite3.sqlite_version}".encode())
    for path in sorted(path for folder in ("catalog", "data") for path in (ROOT / folder).rglob("*.*")):
        if path.suffix in {".py", ".sql", ".json"}:
            digest.update(f"{path.relative_to(ROOT)} {digest_of(str(path))}".encode())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="session")
def populated(shared: Path, between_runs: Path) -> Callable[..., Path]:
    """The file of a catalog with every kernel of an arch, of some revisions and mask implementations. Copy it.

    It is made once for all workers, and again when the program or its data change.
    """
    program = program_digest()

    def populated(
        arch: str, *revisions: str | None, masks: tuple[str, ...] = ("generic",), receipts: tuple[int, ...] = ()
    ) -> Path:
        name = "-".join(map(str, (resolve_arch(arch), *(revisions or (None,)), *masks, *receipts)))
        made, new = between_runs / f"{program}.{name}", between_runs / f"{name}.new"
        with FileLock(between_runs / f"{name}.lock"):
            if not made.exists():
                for left in (*between_runs.glob(f"{new.name}*"), *between_runs.glob(f"*.{name}")):
                    left.unlink()
                first, *others = list(product(revisions or (None,), masks))
                if others:  # the first alone is also used by itself
                    shutil.copy(populated(arch, first[0], masks=first[1:], receipts=receipts), new)
                with Catalog(new) as catalog:
                    for revision, mask_impl in others or [first]:
                        catalog.populate(arch, revision=revision, mask_impl=mask_impl, receipts=receipts)
                    catalog.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                new.replace(made)
        return made

    return populated


@pytest.fixture(scope="session")
def catalog_of(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Catalog]:
    """A catalog with every kernel of an arch, generic masks. Read it only."""

    @cache
    def catalog_of(arch: str) -> Catalog:
        return Catalog(shutil.copy(populated(arch), tmp_path_factory.mktemp(arch) / "catalog.db"))

    return catalog_of


@pytest.fixture(scope="session")
def gfx950(catalog_of: Callable[[str], Catalog]) -> Catalog:
    """A catalog with every kernel of gfx950, generic masks. Read it only."""
    return catalog_of("gfx950")


@pytest.fixture(scope="session")
def host_file(populated: Callable[..., Path]) -> Path:
    """The file of a catalog with every kernel of this machine's CPU. Copy it."""
    return populated("host")


def fill(folder: Path, kernels: Iterable[Kernel]) -> Path:
    """A new cache with the libraries of ``kernels``, copied from the one that is kept between runs."""
    report = Builder(targets=target_of).build_many(kernels)
    assert not report.failures
    folder.mkdir(mode=0o700)
    for artifact in report.artifacts:
        for path in (artifact.path, artifact.path.with_suffix(".json")):
            shutil.copy(path, folder)
    return folder


def count_processes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[], int]:
    """How many processes for first runs are started from now on."""
    script, started = folder / "python", folder / "started"
    script.write_text(f'#!/bin/sh\necho started >> "{started}"\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return lambda: len(started.read_text().splitlines()) if started.exists() else 0


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test, tuples as rows of several; ``make test`` runs those in ``quick`` only."""
    parameters = []
    for value in values:
        row = value if isinstance(value, tuple) else (value,)
        parameters.append(pytest.param(*row, marks=() if value in quick else pytest.mark.slow))
    return parameters


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
    source = ROOT / "data"
    folder = tmp_path / "data"
    shutil.copytree(source / "arch_specs", folder / "arch_specs")
    (folder / "parity").symlink_to(source / "parity")
    (folder / "toolchains").symlink_to(source / "toolchains")
    monkeypatch.setenv("CATALOG_DATA_DIR", str(folder))
    settings.cache_clear()
    return folder


def forget_packages() -> None:
    """What is installed is looked up again, as by a new process."""
    looked_up = (backends.plugins, ops.plugins, ops.operation, traits._plugins_of, implementations)
    for cached in (plugins._all_entry_points, entry_points_of, *looked_up, grammar._pattern):
        cached.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str | Path, str], None]]:
    """Puts a distribution, a module or a package, where this process and those that it starts look for packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    installed = list[str]()

    def install(name: str, code: str | Path, entry_points: str) -> None:
        if isinstance(code, Path):
            shutil.copytree(code, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / f"{name}.py").write_text(code)
        facts = tmp_path / f"{name}-1.2.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (facts / "entry_points.txt").write_text(entry_points)
        installed.append(name)

    forget_packages()
    yield install
    forget_packages()
    for name in installed:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    yield
    settings.cache_clear()
