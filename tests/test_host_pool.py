"""The pool of threads that all host kernels of a process share; ``pool_driver.cpp`` uses it as kernels do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import missing, slow_but

import catalog
from catalog.build.targets import BUILD_DIR

DRIVER = Path(__file__).with_name("pool_driver.cpp")
SCENARIOS = [
    *("launches", "nodes", "many", "nested", "resized", "team", "ranges"),
    *("forked", "amid", "environment", "ended"),
]
TEAMS = ["late", "slower"]
SANITIZERS = {
    "none": ("g++",),
    "thread": ("clang++", "-fsanitize=thread"),
    "address": ("g++", "-fsanitize=address,undefined"),
}
IDLE = "-DCATALOG_POOL_IDLE_S=3"
"""After fewer seconds than in kernels, a thread that nobody wants ends."""
ABORTED = -signal.SIGABRT


@pytest.fixture(scope="module", params=slow_but(["none"], list(SANITIZERS)))
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, *flags = SANITIZERS[request.param]
    if shutil.which(compiler) is None:
        missing(compiler)
    program = tmp_path_factory.mktemp("pool") / request.param
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-g", "-pthread", *flags, IDLE, f"-I{BUILD_DIR}", DRIVER, "-o", program],
        check=True,
    )
    return program


def run(driver: Path, scenario: str) -> subprocess.CompletedProcess[str]:
    # Without the option the thread sanitizer ends a forked child that starts threads.
    environment = os.environ | {"TSAN_OPTIONS": "die_after_fork=0"}
    return subprocess.run([driver, scenario], check=False, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize("scenario", TEAMS)
def test_threads_of_a_runtime_that_come_late_compute_nothing_for_a_while(driver: Path, scenario: str) -> None:
    done = run(driver, scenario)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("scenario", [*SCENARIOS, pytest.param("idle", marks=pytest.mark.slow)])
def test_every_share_is_computed_once(driver: Path, scenario: str) -> None:
    done = run(driver, scenario)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_an_exception_of_a_share_ends_the_process(driver: Path) -> None:
    done = run(driver, "thrown")
    assert done.returncode == ABORTED
    assert "of a share" in done.stderr


@pytest.mark.slow
def test_a_race_would_be_found(driver: Path) -> None:
    done = run(driver, "raced")
    assert ("WARNING: ThreadSanitizer: data race" in done.stderr) == (driver.name == "thread")


PROCESS = """
import os, shutil, sys, threading
from pathlib import Path
from catalog import Catalog, Problem
from catalog.runtime.bound import bind
from catalog.build.toolchains import digest_of

def threads():
    return len(os.listdir("/proc/self/task"))

catalog = Catalog(sys.argv[1], num_threads=3)
plan = catalog.select(Problem(batch=2, nhead_q=4, seqlen_q=64, hdim_q=32, dtype="fp32"))
first = plan.bind()
copy = Path(shutil.copy(first.kernels[0].path, sys.argv[2]))
kernel = first.device.load(copy, digest_of(str(copy)), first.kernels[0].id)
second = bind(plan, first.device, (kernel,), first._taken)
assert kernel.pool != first.kernels[0].pool
before = threads()
for bound in (second, first) * 3:
    bound.launch()
assert threads() == before + 2
with open("/proc/self/maps") as maps:
    assert "omp" not in maps.read()

def launch():
    while True:
        first.launch()
threading.Thread(target=launch, daemon=True).start()  # the interpreter ends amid a launch
"""


def test_all_kernels_of_a_process_share_their_threads(host_file: Path, tmp_path: Path) -> None:
    path = shutil.copy(host_file, tmp_path / "catalog.db")
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, path, tmp_path / "copy.so"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_kernel_divides_its_work_by_itself() -> None:
    """Compilers would ignore such a pragma: the kernel would run on one thread."""
    sources = [path for path in Path(catalog.__file__).parent.rglob("host/**/*.hpp") if path.is_file()]
    assert sources
    for path in sources:
        assert not re.search(r"#pragma omp (?!simd)|omp\.h", path.read_text()), path


BESIDE_PYTORCH = """
import os, sys
import numpy as np
import torch
from catalog import Catalog, Problem

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
a = torch.randn(500, 500)
a @ a
catalog = Catalog(sys.argv[1], num_threads=3)
problem = Problem(batch=2, nhead_q=4, seqlen_q=64, hdim_q=32, dtype="fp32")
bound = catalog.select(problem).bind()
before = threads()
bound.launch()
assert threads() == before, (before, threads())
for _ in range(5):
    bound.launch()
    a @ a
assert threads() in (before, before + 2)  # the pool's own two threads take over where other processes keep the cores
team = set(os.listdir("/proc/self/task"))
of_two = Catalog(sys.argv[1], num_threads=2).select(problem).bind()
for _ in range(5):
    of_two.launch()
    a @ a
assert team <= set(os.listdir("/proc/self/task"))  # a smaller launch ends none of PyTorch's threads
expected = bound.outputs["o"].copy()
if (child := os.fork()) == 0:  # PyTorch's runtime has no threads here
    bound.outputs["o"][:] = 0
    at_fork = threads()
    bound.launch()
    os._exit(not (np.array_equal(bound.outputs["o"], expected) and threads() == at_fork + 2))
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_kernels_use_pytorchs_threads_where_it_is_imported(host_file: Path, tmp_path: Path) -> None:
    if find_spec("torch") is None:
        missing("torch")
    path = shutil.copy(host_file, tmp_path / "catalog.db")
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_PYTORCH, path], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
