"""The state of AMX: permission, threads, signals, forks, and PyTorch's own use of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host.device import cpu_features, host_archs, why_unavailable

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("state") / "amx_state.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", HERE / "amx_state.cpp", "-o", library, "-ldl"]
    subprocess.run(command, check=True)
    return library


def survive(scenario: str, db: Path, state: Path, **environment: str) -> None:
    paths = os.pathsep.join((str(HERE), str(HERE.parent)))
    environment |= {"LD_PRELOAD": str(state), "PYTHONPATH": paths, "CATALOG_NUM_THREADS": "4"}
    done = subprocess.run(
        [sys.executable, HERE / "amx_machine.py", scenario, db, state],
        check=False,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def db(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "x86_64_v4" not in host_archs() or why_unavailable("x86_64_v4") or "avx512_bf16" not in cpu_features():
        pytest.skip("this CPU has no AVX512-BF16")
    path = Path(shutil.copy(host_file, tmp_path_factory.mktemp("amx") / "catalog.db"))
    with Catalog(path) as catalog:
        catalog.populate("x86_64_v4", operation="gemm")
    return path


@pytest.mark.slow
def test_a_system_that_refuses_amx_is_asked_once(db: Path, state: Path) -> None:
    survive("refused", db, state, CATALOG_TEST_AMX_REFUSED="1")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["permitted", "signals", "forks", "pytorch"])
def test_amx_beside(db: Path, state: Path, scenario: str) -> None:
    if "amx_bf16" not in cpu_features():
        pytest.skip("this CPU has no AMX")
    if scenario == "pytorch":
        pytest.importorskip("torch")
    survive(scenario, db, state)
