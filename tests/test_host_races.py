"""ThreadSanitizer over the backward kernels; :mod:`test_host_pool` has the pool of threads that they bring along."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import missing

from catalog.build.targets import HEADERS
from catalog.ops import operation
from catalog.ops.attention.kernels.host.emit import emit
from catalog.ops.attention.problem import Problem
from catalog.runtime.catalog import Catalog
from catalog.schema.kernel import Kernel

DRIVER = Path(__file__).with_name("race_driver.cpp")
SIZES = {"op": "bwd", "batch": 2, "nhead_q": 4, "nhead_k": 2, "seqlen_q": 150, "seqlen_k": 768, "hdim_q": 64}
PROBLEMS = {
    "causal, dropout": SIZES | {"dtype": "fp32", "mask": "bottom_right", "dropout": 0.2, "randval": True},
    "bias, window": SIZES
    | {"dtype": "fp32", "mask": "window", "window": (70, 0), "bias": "bias", "dbias": True, "deterministic": True},
}
pytestmark = pytest.mark.slow

MACHINE = ("-march=x86-64",) if platform.machine() == "x86_64" else ()
"""Vectors of 16 bytes: the sanitizer does not watch accesses to wider ones."""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Path]]]:
    """Programs that launch each stage of each problem once, built with the sanitizer."""
    if shutil.which("clang++") is None:
        missing("clang++")
    folder = tmp_path_factory.mktemp("races")
    catalog = Catalog(folder / "catalog.db")
    plans = {name: catalog.select(Problem(**fields)) for name, fields in PROBLEMS.items()}
    yield {name: [program(folder, kernel) for kernel in plan.kernels] for name, plan in plans.items()}
    catalog.close()


def program(folder: Path, kernel: Kernel) -> Path:
    source, done = folder / f"{kernel.id}.cpp", folder / kernel.id
    source.write_text(emit(kernel))
    flags = [
        "-std=c++17",
        "-O1",
        "-g",
        "-pthread",
        "-fsanitize=thread",
        *MACHINE,
        *(f"-I{folder}" for folder in (*HEADERS.values(), *operation().headers.values())),
    ]
    built = subprocess.run(["clang++", *flags, source, DRIVER, "-o", done], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return done


def watch(stage: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run until the first race; the sanitizer remembers as many accesses as it can."""
    options = os.environ | {"TSAN_OPTIONS": "history_size=7 halt_on_error=1"}
    return subprocess.run([stage, *arguments], capture_output=True, text=True, check=False, timeout=300, env=options)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_backward_has_no_races(stages: dict[str, list[Path]], problem: str) -> None:
    for stage in stages[problem]:
        done = watch(stage)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_race_would_be_found(stages: dict[str, list[Path]]) -> None:
    for stage in stages["causal, dropout"]:
        done = watch(stage, "race")
        assert done.returncode != 0
        assert "WARNING: ThreadSanitizer: data race" in done.stderr
