"""Rows of Arm CPUs: cross-compiled, run under an emulator, and compared with the float64 reference.

An emulator says nothing about speed. That loops consist of vector instructions shows in the libraries.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import archspec.cpu
import numpy as np
import pytest
from arm import COMPILER, EMULATOR, ArmDevice, build_driver
from conftest import missing
from host_problems import draw_inputs

from catalog.errors import DeviceError
from catalog.ops.attention.problem import Problem
from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.here import Devices
from catalog.runtime.devices.host import device as host_device
from catalog.runtime.inputs import make_inputs
from catalog.runtime.plan import Plan
from catalog.runtime.validate import Expected
from catalog.settings import settings

pytestmark = pytest.mark.slow

CPUS = {"cortex-a72": "cortex_a72", "neoverse-n1": "neoverse_n1", "max": "neoverse_v1"}
"""CPUs by the emulator's name and archspec's: Armv8.0; with dot products of int8; with those of bf16, too."""

SIZES = {"batch": 2, "nhead_q": 4, "nhead_k": 2, "seqlen_q": 70, "hdim_q": 64}
RAGGED = {"nhead_q": 4, "nhead_k": 2, "hdim_q": 64, "seqlens_q": [20, 50], "seqlen_k": 80}
FLOATS: dict[str, dict[str, Any]] = {
    "fwd": {**SIZES, "hdim_q": 40, "dtype": "fp16", "mask": "window", "window": (31, 5), "bias": "alibi", "lse": True},
    "splitkv": {**SIZES, "dtype": "bf16", "seqlen_q": 3, "seqlen_k": 300, "num_splits": 3, "lse": True},
    "pagedkv": {**SIZES, "dtype": "fp8", "page_size": 16},
    "batch_prefill": {**RAGGED, "dtype": "fp32", "page_size": 16, "mask": "causal"},
    "appendkv": {**SIZES, "dtype": "fp16", "seqlen_q": 5, "seqlen_k": 80, "seqlen_new": 5, "rope": "half"},
    "bwd": {**SIZES, "dtype": "bf16", "mask": "causal", "dropout": 0.3},
}
PAIRS: dict[str, dict[str, Any]] = {
    "fwd": {**SIZES, "dtype": "bf16", "mask": "causal", "dropout": 0.3, "lse": True},
    "bwd": {**SIZES, "dtype": "bf16", "mask": "causal"},
}
PRODUCTS = [("fp32", 40), ("bf16", 40), ("int8", 40), ("fp16", 3), ("fp8", 3), ("int8", 3)]
"""Types and rows of A: up to 16 of them are streamed."""


@pytest.fixture(scope="module")
def emulated(
    populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[ArmDevice, Catalog]]]:
    """Each CPU, and a catalog for it, whose rows the cross compiler compiles."""
    for program in (COMPILER, EMULATOR):
        if shutil.which(program) is None:
            missing(program)
    folder = tmp_path_factory.mktemp("arm")
    with Catalog(shutil.copy(populated("aarch64"), folder / "catalog.db")) as catalog:
        catalog.populate("aarch64", operation="gemm")
    driver = build_driver(folder)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.setenv("CATALOG_CXX", COMPILER)
        settings.cache_clear()
        yield {
            cpu: (
                ArmDevice(driver, cpu),
                opened.enter_context(Catalog(shutil.copy(folder / "catalog.db", folder / f"{cpu}.db"))),
            )
            for cpu in CPUS
        }


@pytest.fixture
def catalog_on(
    emulated: dict[str, tuple[ArmDevice, Catalog]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Catalog]:
    """The catalog of a CPU, which this machine then is."""

    def catalog_on(cpu: str) -> Catalog:
        device, catalog = emulated[cpu]
        monkeypatch.setattr(Devices, "of", lambda self, arch: device)
        monkeypatch.setattr(host_device, "cpu_features", lambda: archspec.cpu.TARGETS[CPUS[cpu]].features)
        return catalog

    return catalog_on


def pipelines(plan: Plan) -> set[str]:
    return {str(kernel.algorithm.pipeline.value) for kernel in plan.kernels} - {"no", "unused"}


def check(expected: Expected, plan: Plan) -> None:
    for of_tensor in expected.check(expected.run(plan)):
        assert of_tensor.passed, f"{of_tensor}: {expected.problem.key} on {plan}"


@pytest.mark.parametrize("op", FLOATS)
def test_every_family(catalog_on: Callable[[str], Catalog], op: Any) -> None:
    problem = Problem(op=op, **FLOATS[op])
    plan = catalog_on("cortex-a72").select(problem, arch="aarch64")
    assert pipelines(plan) <= {"host_panel"}
    check(Expected(problem, draw_inputs(problem, 1), "aarch64"), plan)


@pytest.mark.parametrize("op", PAIRS)
def test_bf16_by_dot_products(catalog_on: Callable[[str], Catalog], op: Any) -> None:
    """On a CPU that has them; another one refuses."""
    problem = Problem(op=op, **PAIRS[op])
    plan = catalog_on("max").select(problem, arch="aarch64")
    assert pipelines(plan) == {"host_bf16"}
    inputs = draw_inputs(problem, 1)
    check(Expected(problem, inputs, "aarch64"), plan)
    [main] = [kernel for kernel in plan.kernels if kernel.algorithm.pipeline.value == "host_bf16"]
    older = catalog_on("neoverse-n1")
    assert "host_bf16" not in pipelines(older.select(problem, arch="aarch64"))
    with pytest.raises(DeviceError, match="this CPU lacks instructions that it uses"):
        older.plan(problem, main).run(inputs)


@pytest.mark.parametrize(("dtype", "m"), PRODUCTS)
def test_matrix_products(catalog_on: Callable[[str], Catalog], dtype: str, m: int) -> None:
    """A library multiplies in the units that the CPU has."""
    problem = GemmProblem(m=m, n=70, k=131, batch=2, dtype=dtype, bias=True, activation="relu")
    expected = Expected(problem, make_inputs(problem, 1), "aarch64")
    for cpu in CPUS:
        check(expected, catalog_on(cpu).select(problem, arch="aarch64"))


@pytest.mark.parametrize(("dtype", "m", "scales"), [("int8", 3, "block"), ("fp8", 40, "block"), ("fp8", 3, "row")])
def test_products_with_scales(catalog_on: Callable[[str], Catalog], dtype: str, m: int, scales: str) -> None:
    problem = GemmProblem(m=m, n=140, k=300, dtype=dtype, scales=scales, dtype_c="bf16", bias=True)
    expected = Expected(problem, make_inputs(problem, 1), "aarch64")
    for cpu in CPUS:
        check(expected, catalog_on(cpu).select(problem, arch="aarch64"))


def test_products_of_groups(catalog_on: Callable[[str], Catalog]) -> None:
    problem = GemmProblem(groups=(5, 0, 60), n=70, k=33, dtype="int8")
    expected = Expected(problem, make_inputs(problem, 1), "aarch64")
    for cpu in ("cortex-a72", "neoverse-n1"):
        check(expected, catalog_on(cpu).select(problem, arch="aarch64"))


def test_clang_compiles_the_same(
    catalog_on: Callable[[str], Catalog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "clang++"
    compiler.write_text(
        f'#!/bin/sh\nexec {shutil.which("clang++") or missing("clang++")} --target=aarch64-linux-gnu "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CATALOG_CXX", str(compiler))
    settings.cache_clear()
    problem = GemmProblem(m=40, n=70, k=131, dtype="bf16", layout="crr")  # a row that no other test compiles
    expected = Expected(problem, make_inputs(problem, 1), "aarch64")
    for cpu in ("cortex-a72", "max"):
        check(expected, catalog_on(cpu).select(problem, arch="aarch64"))


@pytest.mark.parametrize(("dtype", "m"), [("fp16", 3), ("bf16", 40), ("fp8", 3)])
def test_every_number_is_read_and_rounded_exactly(catalog_on: Callable[[str], Catalog], dtype: str, m: int) -> None:
    """C = B / 3 for every number, where the rows of A are 1."""
    bits = np.uint8 if dtype == "fp8" else np.uint16
    problem = GemmProblem(m=m, n=np.iinfo(bits).max + 1, k=1, dtype=dtype, alpha=1 / 3)
    a, b = (np.array(array) for array in make_inputs(problem, 1).values())
    a[...] = 1
    b.view(bits)[:, 0] = np.arange(problem.n)
    c = catalog_on("cortex-a72").select(problem, arch="aarch64").run(a=a, b=b).outputs["c"]
    with np.errstate(all="ignore"):
        expected = (b.T.astype(np.float32) * np.float32(1 / 3)).astype(c.dtype)
    np.testing.assert_array_equal(c.astype(np.float32), np.broadcast_to(expected, c.shape).astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "m", "instruction"),
    [("fp16", 3, "fcvtl"), ("bf16", 40, "bfdot"), ("int8", 40, "sdot"), ("fp8", 3, "bfdot")],
)
def test_loops_are_of_vector_instructions(
    catalog_on: Callable[[str], Catalog], dtype: str, m: int, instruction: str
) -> None:
    problem = GemmProblem(m=m, n=70, k=131, batch=2, dtype=dtype, bias=True, activation="relu")
    [library] = catalog_on("max").select(problem, arch="aarch64").build()
    command = ["aarch64-linux-gnu-objdump", "--disassemble", "--no-show-raw-insn", library.path]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert re.search(rf"\s{instruction}\s+v", shown)
    assert not re.search(r"\sfcvt\s+[sh]\d+, [sh]\d+|\s[us]bfx\s+w\d+, w\d+, #8, #8", shown), "one element at a time"
