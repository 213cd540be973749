"""The kernels of sm_90 under NVIDIA's compute-sanitizer, on small shapes: make test-cuda."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from conftest import missing
from cuda_gpu import ARCH, RUNS, Row, build, many_heads, need_gpu, part

from catalog.build.cuda.toolchain import cuda_toolchain
from catalog.ops.attention.fields import Op
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.stages import MAIN_STAGE
from catalog.runtime.catalog import Catalog
from catalog.schema.kernel import Kernel

need_gpu()
pytest_plugins = ("cuda_fixtures",)

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")

FLAWED = """
__global__ void flawed(int* memory) {
    __shared__ int next[64];
    next[threadIdx.x] = FIRST;
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
CORRECT = {"FIRST": "threadIdx.x", "BARRIER": "__syncthreads();", "INTS": "64"}
FLAWS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "memcheck": ({"INTS": "63"}, "Invalid __global__ write of size 4 bytes"),
    "racecheck": ({"BARRIER": ""}, "Race reported between"),
    "synccheck": ({"BARRIER": "if (threadIdx.x % 32 < 16) __syncthreads();"}, "Barrier error detected"),
    "initcheck": ({"FIRST": "memory[threadIdx.x]"}, "Uninitialized __global__ memory read of size 4 bytes"),
}
MARKS = re.compile(r"Uninitialized __global__ memory read of size 8 bytes\n=+ +at void catalog::cuda::attend_stream<")
"""A look at the mark of another block's part, which that block may not have set yet: stream_parts.hpp says why."""
PRODUCTS = {
    "gemm": ("(family = 'universal' AND layout IN ('rcr', 'crr') OR family = 'grouped' AND tile_m = 128)", 5),
    "conv": ("ndim = 2", 2),
}
"""Rows of bf16, of which every n-th is run: tiles of every form, all directions of convolutions."""


def watched(tool: str, *command: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which("compute-sanitizer")
    if program is None:
        missing("compute-sanitizer")
    options = ("--tool", tool, "--error-exitcode", "99", "--print-limit", "100000")
    words = [program, *options, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)


def finds_nothing(tool: str, database: Path, op: str, kernels: Sequence[Kernel]) -> None:
    script = Path(__file__).with_name("sanitize_cuda.py")
    done = watched(tool, sys.executable, script, database, op, *(kernel.id for kernel in kernels))
    marks = len(MARKS.findall(done.stdout))
    assert done.returncode == (99 if marks else 0), done.stdout[-4000:] + done.stderr[-4000:]
    assert re.search(rf"^{len(kernels)}$", done.stdout, re.MULTILINE), f"a row is wrong: {done.stderr[-4000:]}"
    assert re.search(rf"(ERROR SUMMARY: {marks} error|RACECHECK SUMMARY: 0 hazards)", done.stdout), done.stdout[-4000:]


@pytest.mark.parametrize(("op", "number"), RUNS)
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing(
    catalog: Catalog, tested: Mapping[Op, list[Row]], tool: str, op: Op, number: int
) -> None:
    finds_nothing(tool, catalog.path, op, [row.kernel for row in part(tested[op], number)])


@pytest.mark.parametrize("hdim", [64, 128])
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing_in_backward_of_many_heads(catalog: Catalog, tool: str, hdim: int) -> None:
    problem = Problem(op="bwd", **many_heads(hdim), mask="causal", dtype="bf16")
    plan = catalog.select(problem, arch=ARCH)
    build(catalog, plan.kernels)
    finds_nothing(tool, catalog.path, "many_heads", [main for main in plan.kernels if main.family == MAIN_STAGE["bwd"]])


@pytest.mark.parametrize("operation", PRODUCTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing_in_products(catalog: Catalog, tool: str, operation: str) -> None:
    catalog.populate(ARCH, operation=operation)
    where, step = PRODUCTS[operation]
    kernels = catalog.kernels(f"dtype = 'bf16' AND {where}", arch=ARCH, operation=operation)[::step]
    build(catalog, kernels)
    finds_nothing(tool, catalog.path, operation, kernels)


@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_would_find(tmp_path: Path, tool: str) -> None:
    flaw, finding = FLAWS[tool]
    changes = {**CORRECT, **flaw}
    source = tmp_path / "flawed.cu"
    source.write_text(re.sub("|".join(changes), lambda found: changes[found[0]], FLAWED))
    nvcc = cuda_toolchain(ARCH).compiler.path
    subprocess.run([nvcc, "-arch=sm_90", source, "-o", tmp_path / "flawed"], check=True, timeout=120)
    done = watched(tool, tmp_path / "flawed")
    assert done.returncode == 99
    assert finding in done.stdout
