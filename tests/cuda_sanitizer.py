"""The kernels of sm_90 under NVIDIA's compute-sanitizer, on small shapes: make test-cuda."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import missing
from cuda_gpu import ARCH, build, need_gpu
from sanitize_cuda import HEAD_DIMS, OF_OP, plans

from catalog.build.cuda.toolchain import cuda_toolchain
from catalog.runtime.catalog import Catalog

need_gpu()

TOOLS = ("memcheck", "racecheck")
RUNS = [(op, form) for op, forms in OF_OP.items() for form in forms]

FLAWED = """
__global__ void flawed(int* memory) {
    __shared__ int next[64];
    next[threadIdx.x] = threadIdx.x;
    BARRIER
    memory[threadIdx.x] = next[threadIdx.x ^ 32];
}

int main() {
    int* memory;
    cudaMalloc(&memory, INTS * sizeof(int));
    flawed<<<1, 64>>>(memory);
    return cudaDeviceSynchronize() != cudaSuccess;
}
"""
FLAWS = {
    "memcheck": ({"BARRIER": "__syncthreads();", "INTS": "63"}, "Invalid __global__ write of size 4 bytes"),
    "racecheck": ({"BARRIER": "", "INTS": "64"}, "Race reported between"),
}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog with all that is run, compiled."""
    path = tmp_path_factory.mktemp("sanitizer") / "catalog.db"
    with Catalog(path) as catalog:
        catalog.populate(ARCH)
        of = (plan for op, form in RUNS for plan in plans(catalog, op, form))
        build(catalog, (kernel for plan in of for kernel in plan.kernels))
    return path


def watched(tool: str, *command: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which("compute-sanitizer")
    if program is None:
        missing("compute-sanitizer")
    options = ("--tool", tool, "--error-exitcode", "99")
    words = [program, *options, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize(("op", "form"), RUNS)
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing(database: Path, tool: str, op: str, form: str) -> None:
    done = watched(tool, sys.executable, Path(__file__).with_name("sanitize_cuda.py"), database, op, form)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    with Catalog(database) as catalog:
        there = len(list(plans(catalog, op, form)))
    assert re.search(rf"^{there}$", done.stdout, re.MULTILINE), "every plan ran"
    assert there >= len(HEAD_DIMS)
    assert re.search(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)", done.stdout), done.stdout[-4000:]


@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_would_find(tmp_path: Path, tool: str) -> None:
    changes, finding = FLAWS[tool]
    source = tmp_path / "flawed.cu"
    source.write_text(re.sub("|".join(changes), lambda found: changes[found[0]], FLAWED))
    nvcc = cuda_toolchain(ARCH).compiler.path
    subprocess.run([nvcc, "-arch=sm_90", source, "-o", tmp_path / "flawed"], check=True, timeout=120)
    done = watched(tool, tmp_path / "flawed")
    assert done.returncode == 99
    assert finding in done.stdout
