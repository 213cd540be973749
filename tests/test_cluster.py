"""Builds on a Dask cluster: real schedulers, workers and compilers; some are killed."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import command
import pytest
from build_command import WHERE, build_command
from cluster_processes import Processes, wait_until
from conftest import missing

from catalog.build.builder import Artifact, BuildFailure
from catalog.build.cache import Cache
from catalog.build.cluster import _task, connect
from catalog.build.toolchains import find_host_toolchain
from catalog.errors import ClusterError
from catalog.runtime.catalog import Catalog
from catalog.runtime.tune_there import task
from catalog.schema.kernel import Kernel
from catalog.settings import settings

if find_spec("distributed") is None:
    missing("distributed")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder whose host compilers do not optimise."""
    folder = tmp_path_factory.mktemp("quick") / "data"
    shutil.copytree(ROOT / "data" / "toolchains", folder / "toolchains")
    for name in ("arch_specs", "parity"):
        (folder / name).symlink_to(ROOT / "data" / name)
    facts = folder / "toolchains" / "host.json"
    facts.write_text(facts.read_text().replace('"-O3"', '"-O0"'))
    return folder


@pytest.fixture(autouse=True)
def launcher(quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What workers call compilers by: it notes who asked, waits while there is a file ``wait``, refuses ``refused``."""
    script = tmp_path / "launcher"
    script.write_text(
        f'#!/bin/sh\ncd_to="{tmp_path}"\necho $PPID > "$cd_to/asked.$$"\n'
        'while [ -e "$cd_to/wait" ]; do sleep 0.02; done\n'
        'if [ -e "$cd_to/refused" ] && grep -q "$(cat "$cd_to/refused")" kernel.cpp; then\n'
        '  echo "kernel.cpp:1: error: refused by request"; exit 1\nfi\nexec "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CATALOG_DATA_DIR", str(quick))
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CATALOG_DB", str(tmp_path / "catalog.db"))
    settings.cache_clear()
    find_host_toolchain.cache_clear()  # it was, and will be, read from another data folder
    yield script
    find_host_toolchain.cache_clear()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Processes]:
    folder = tmp_path / "processes"
    folder.mkdir()
    processes = Processes(folder)
    yield processes
    processes.end()


@pytest.fixture
def catalog(host_file: Path) -> Iterator[Catalog]:
    shutil.copy(host_file, settings().db)
    catalog = Catalog()
    yield catalog
    catalog.close()


def kernels_of(catalog: Catalog, number: int) -> list[Kernel]:
    return catalog.kernels(WHERE, arch="host", limit=number)


def compilers(folder: Path) -> dict[int, int]:
    """The process id of every compiler that was started, and of the worker that did."""
    asked = {path: path.read_text() for path in folder.glob("asked.*")}
    return {int(path.suffix[1:]): int(text) for path, text in asked.items() if text}


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def check(artifact: Artifact, kernel: Kernel) -> None:
    record = Cache(settings().cache_dir).load(artifact.key)
    assert record is not None, "the library is what its record says, and both are here"
    assert (record.kernel_id, record.so_sha256) == (kernel.id, artifact.sha256)
    library = ctypes.CDLL(str(artifact.path))
    library.catalog_describe.restype = ctypes.c_char_p
    assert json.loads(library.catalog_describe())["id"] == kernel.id


@pytest.mark.slow
def test_no_kernel_is_lost_with_a_worker(cluster: Processes, catalog: Catalog, launcher: Path, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    workers = [cluster.worker(CATALOG_COMPILER_LAUNCHER=str(launcher)) for _ in range(3)]
    kernels = kernels_of(catalog, 6)
    local = catalog.build(kernels[0])

    def kill_one() -> None:
        wait_until(lambda: {worker.pid for worker in workers} == set(compilers(tmp_path).values()), "all compile")
        cluster.end(workers[0])
        (tmp_path / "wait").unlink()

    killer = threading.Thread(target=kill_one)
    killer.start()
    done: list[Artifact | BuildFailure] = []
    with connect(cluster.address) as pool:
        report = catalog.builder.build_many(kernels, on_done=done.append, pool=pool)
    killer.join()

    assert report.failures == ()
    assert len(done) == len(kernels)
    for artifact, kernel in zip(report.artifacts, kernels, strict=True):
        check(artifact, kernel)
    assert [artifact.cached for artifact in report.artifacts] == [True] + [False] * 5, "one was here before"
    assert report.artifacts[0].key == local.key
    assert catalog.rows.built(kernels, catalog.builder.cache.all_keys()) == 6
    assert catalog.rows.built(kernels, set()) == 0


@pytest.mark.slow
def test_a_worker_with_another_compiler_is_passed_over(
    cluster: Processes, catalog: Catalog, launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "elsewhere" / "g++"
    other.parent.mkdir()
    other.symlink_to(shutil.which("g++") or pytest.fail("the tests need g++"))
    cluster.worker(CATALOG_CXX=str(other))
    one, two, three = kernels_of(catalog, 3)
    with connect(cluster.address) as pool:
        [failure] = catalog.builder.build_many([one], pool=pool).failures
        message = str(failure.error)
        assert "its compiler differs" in message
        for compiler in (str(other), str(catalog.builder.job(one, threading.Event()).toolchain.compiler.path)):
            assert compiler in message

        (tmp_path / "refused").write_text(two.name)
        cluster.worker(CATALOG_COMPILER_LAUNCHER=str(launcher))
        wait_until(lambda: len(pool.workers()) == 2, "the second worker comes")
        report = catalog.builder.build_many([one, two], pool=pool)
        check(report.artifacts[0], one)
        [failure] = report.failures
        assert f"kernel {two.name} does not compile on tcp://" in str(failure.error)
        log = next(Path(settings().cache_dir, "logs").glob("*.log"))
        assert str(log) in str(failure.error)
        assert "refused by request" in log.read_text()

        # A client without a compiler takes what the workers have.
        monkeypatch.setenv("CATALOG_CXX", "no-such-compiler")
        settings.cache_clear()
        [artifact] = catalog.builder.build_many([three], pool=pool).artifacts
        check(artifact, three)


@pytest.mark.slow
def test_workers_of_another_release_are_named(cluster: Processes, tmp_path: Path) -> None:
    package = tmp_path / "older" / "catalog"
    shutil.copytree(ROOT / "catalog", package)
    header = package / "build" / "abi" / "catalog_abi.h"
    header.write_text(header.read_text().replace("#define CATALOG_ABI_VERSION ", "#define CATALOG_ABI_VERSION 9"))
    cluster.worker(PYTHONPATH=str(package.parent))
    message = r"which has kernel-catalog .*ABI \d, .*it has kernel-catalog .*ABI 9\d,"
    with pytest.raises(ClusterError, match=message), connect(cluster.address):
        pass


@pytest.mark.parametrize("task", [_task, task])
def test_a_scheduler_needs_no_package_of_ours(task: Callable[[], object]) -> None:
    from cloudpickle import dumps

    code = "import sys; sys.modules['catalog'] = None; import cloudpickle; cloudpickle.loads(sys.stdin.buffer.read())"
    subprocess.run([sys.executable, "-c", code], input=dumps(task()), check=True)


@pytest.mark.slow
def test_a_cluster_that_vanishes_is_an_error(
    cluster: Processes, catalog: Catalog, launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catalog.build.cluster.WORKERLESS_SECONDS", 1.0)
    (tmp_path / "wait").touch()
    worker = cluster.worker(CATALOG_COMPILER_LAUNCHER=str(launcher))

    def end(process: subprocess.Popen[bytes], number: int) -> threading.Thread:
        def work() -> None:
            wait_until(lambda: len(compilers(tmp_path)) == number, "a compiler starts")
            cluster.end(process)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    kernels = kernels_of(catalog, 1)
    with connect(cluster.address) as pool:
        killer = end(worker, 1)
        with pytest.raises(ClusterError, match="has no workers any more"):
            catalog.builder.build_many(kernels, pool=pool)
        killer.join()
        cluster.worker(CATALOG_COMPILER_LAUNCHER=str(launcher))
        wait_until(pool.workers, "the next worker comes")
        killer = end(cluster.scheduler, 2)
        with pytest.raises(ClusterError, match=r"the scheduler at tcp://.* is gone"):
            catalog.builder.build_many(kernels, pool=pool)
        killer.join()
    (tmp_path / "wait").unlink()


@pytest.mark.slow
def test_workers_measure_on_their_own_devices(
    cluster: Processes, catalog: Catalog, launcher: Path, tmp_path: Path
) -> None:
    """Two threads and one are two devices. A worker is killed while it compiles; another one like it goes on."""
    problems = tmp_path / "ours.yaml"
    fixed = "{batch: 1, nhead_q: 2, hdim_q: 64, dtype: fp32}"
    problems.write_text(
        f"about: Two.\ngrids:\n  - {{name: two, category: prefill, fixed: {fixed}, vary: {{seqlen_q: [64, 96]}}}}\n"
    )
    (tmp_path / "wait").touch()
    killed = cluster.worker(CATALOG_NUM_THREADS="1", CATALOG_COMPILER_LAUNCHER=str(launcher))
    cluster.worker(CATALOG_NUM_THREADS="1")
    cluster.worker(CATALOG_NUM_THREADS="2")
    cluster.wait_for_workers(3)  # tuning uses those that are there when it begins

    def kill() -> None:
        wait_until(lambda: compilers(tmp_path), "it compiles")
        cluster.end(killed)
        (tmp_path / "wait").unlink()

    killer = threading.Thread(target=kill)
    killer.start()
    options = ("--shapes", problems, "--candidates", 2, "--precision", 0.2, "--scheduler", cluster.address, "--there")

    def tuned() -> list[bool]:
        """Whether each problem has times on each device; those are too noisy where neighbours had the cores."""
        done = command.catalog("tune", *options, "--format", "json", db=catalog.path)
        measured = [row["best"] is not None for row in json.loads(done.stdout)]
        assert done.returncode == 0 or not any(measured), done.stderr
        return measured

    measured = tuned()
    killer.join()
    for _ in range(20):
        assert len(measured) == 4, "two problems on two devices"
        if any(measured):
            break
        measured = tuned()
    rows = catalog.connection.execute(
        "SELECT facts, problem.key, count(*), min(elsewhere) FROM timing JOIN device ON device.id = device_id "
        "JOIN problem ON problem.id = problem_id JOIN artifact ON artifact.key = artifact_key GROUP BY 1, 2"
    ).fetchall()
    assert len(rows) == sum(measured)
    assert {row["facts"] for row in rows} <= {'{"cores": 1}', '{"cores": 2}'}
    assert all(tuple(row)[2:] == (2, 1) for row in rows), "the libraries stayed with the workers"
    assert len(tuned()) <= 4 - sum(measured), "what was measured is not measured again"


# The command line


THREE = ("--limit", "3")


@pytest.mark.slow
def test_ctrl_c_ends_the_compilers_of_the_workers(cluster: Processes, launcher: Path, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    for _ in range(2):
        cluster.worker(CATALOG_COMPILER_LAUNCHER=str(launcher))
    words = build_command(*THREE, "--scheduler", cluster.address)
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(compilers(tmp_path)) == 2, "two compile")
    running.send_signal(signal.SIGINT)
    printed, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert "Interrupted. 3 kernels: 0 compiled" in printed
    assert "3 left: the same command continues" in printed
    assert "Traceback" not in errors
    wait_until(lambda: not any(map(is_alive, compilers(tmp_path))), "the compilers end")

    (tmp_path / "wait").unlink()
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "3 kernels: 3 compiled" in done.stdout
    assert done.stderr.count("compiled ") == 3


@pytest.mark.slow
def test_a_missing_scheduler_is_reported_within_seconds() -> None:
    started = time.monotonic()
    done = subprocess.run(
        build_command(*THREE, "--scheduler", "tcp://127.0.0.1:9"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: no Dask scheduler answers at tcp://127.0.0.1:9")
    assert len(done.stderr.splitlines()) == 2, done.stderr
    assert time.monotonic() - started < 60


def test_the_missing_extra_is_named() -> None:
    words = build_command(
        *THREE, "--scheduler", "tcp://127.0.0.1:9", before="import sys; sys.modules['distributed'] = None\n"
    )
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "pip install '.[cluster]'" in done.stderr
    assert "Traceback" not in done.stderr
