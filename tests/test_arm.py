"""Rows of Arm CPUs: cross-compiled, run under an emulator, and compared with the float64 reference.

An emulator says nothing about speed. That loops consist of vector instructions shows in the libraries.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import archspec.cpu
import numpy as np
import pytest
from arm import COMPILER, EMULATOR, ArmDevice, build_driver
from conftest import missing
from host_problems import draw_inputs

from catalog.errors import DeviceError
from catalog.ops.attention.problem import Problem
from catalog.ops.conv.problem import ConvProblem
from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host import device as host_device
from catalog.runtime.here import Devices
from catalog.runtime.inputs import make_inputs
from catalog.runtime.plan import Plan
from catalog.runtime.validate import Expected
from catalog.settings import settings

pytestmark = pytest.mark.slow


class Cpu(NamedTuple):
    """A CPU by the emulator's name and archspec's, and the arch whose rows it runs."""

    emulated: str
    features_of: str
    arch: str = "aarch64"


CPUS = {
    "oldest": Cpu("cortex-a72", "cortex_a72"),
    "int8": Cpu("neoverse-n1", "neoverse_n1"),  # has dot products of int8
    "bf16": Cpu("max", "neoverse_v1"),  # and of bf16
    "sve256": Cpu("max,sve-default-vector-length=32", "neoverse_v1", "aarch64_sve256"),
    "sve512": Cpu("a64fx", "a64fx", "aarch64_sve512"),
}

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
NEON = ("oldest", "int8", "bf16")
PRODUCTS = [("fp32", 40), ("bf16", 40), ("int8", 40), ("fp16", 3), ("fp8", 3), ("int8", 3)]
"""Types and rows of A: up to 16 of them are streamed."""


@pytest.fixture(scope="module")
def emulated(
    populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], tuple[ArmDevice, Catalog]]]:
    """A CPU by its name, and a catalog for it, whose rows the cross compiler compiles."""
    for program in (COMPILER, EMULATOR):
        if shutil.which(program) is None:
            missing(program)
    folder = tmp_path_factory.mktemp("arm")
    driver = build_driver(folder)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.setenv("CATALOG_CXX", COMPILER)
        settings.cache_clear()

        @cache
        def emulated(name: str) -> tuple[ArmDevice, Catalog]:
            cpu = CPUS[name]
            catalog = opened.enter_context(Catalog(shutil.copy(populated(cpu.arch), folder / f"{name}.db")))
            for operation in ("gemm", "conv"):
                catalog.populate(cpu.arch, operation=operation)
            return ArmDevice(driver, cpu.emulated), catalog

        yield emulated


Select = Callable[[str, Any], Plan]


@pytest.fixture
def select(emulated: Callable[[str], tuple[ArmDevice, Catalog]], monkeypatch: pytest.MonkeyPatch) -> Select:
    """The plan of a problem on a CPU, which this machine then is."""

    def select(name: str, problem: Any) -> Plan:
        cpu, (device, catalog) = CPUS[name], emulated(name)
        monkeypatch.setattr(Devices, "of", lambda self, arch: device)
        monkeypatch.setattr(host_device, "cpu_features", lambda: archspec.cpu.TARGETS[cpu.features_of].features)
        return catalog.select(problem, arch=cpu.arch)

    return select


def pipelines(plan: Plan) -> set[str]:
    return {str(kernel.algorithm.pipeline.value) for kernel in plan.kernels} - {"no", "unused"}


def check(expected: Expected, plan: Plan) -> None:
    for of_tensor in expected.check(expected.run(plan)):
        assert of_tensor.passed, f"{of_tensor}: {expected.problem.key} on {plan}"


@pytest.mark.parametrize(
    ("cpu", "op"),
    [
        *(("oldest", op) for op in FLOATS),
        *(("sve256", op) for op in ("fwd", "pagedkv", "appendkv")),
        *(("sve512", op) for op in ("fwd", "splitkv", "bwd")),
    ],
)
def test_every_family(select: Select, cpu: str, op: Any) -> None:
    problem = Problem(op=op, **FLOATS[op])
    plan = select(cpu, problem)
    assert pipelines(plan) <= {"host_panel"}
    check(Expected(problem, draw_inputs(problem, 1), CPUS[cpu].arch), plan)


@pytest.mark.parametrize("cpu", ["oldest", "sve256", "sve512"])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 2)])  # one query row for each K/V head, and several
def test_decoding_over_fp8(select: Select, heads: tuple[int, int], cpu: str) -> None:
    sizes = {"batch": 2, "nhead_q": heads[0], "nhead_k": heads[1], "seqlen_q": 1, "seqlen_k": 150, "hdim_q": 64}
    problem = Problem(op="splitkv", **sizes, dtype="bf16kvfp8", num_splits=2, lse=True)
    check(Expected(problem, draw_inputs(problem, 1), CPUS[cpu].arch), select(cpu, problem))


@pytest.mark.parametrize("cpu", ["bf16", "sve256"])
@pytest.mark.parametrize("op", PAIRS)
def test_bf16_by_dot_products(select: Select, op: Any, cpu: str) -> None:
    problem = Problem(op=op, **PAIRS[op])
    plan = select(cpu, problem)
    assert pipelines(plan) == {"host_bf16"}
    check(Expected(problem, draw_inputs(problem, 1), CPUS[cpu].arch), plan)


@pytest.mark.parametrize("cpu", ["oldest", "bf16", "sve256", "sve512"])
def test_block_masks(select: Select, cpu: str) -> None:
    problem = Problem(**SIZES, dtype="bf16", mask="causal", lse=True, block_mask_q=16, block_mask_kv=32)
    check(Expected(problem, draw_inputs(problem, 1), CPUS[cpu].arch), select(cpu, problem))


def test_a_cpu_without_dot_products_of_bf16_refuses_them(
    select: Select, emulated: Callable[[str], tuple[ArmDevice, Catalog]]
) -> None:
    problem = Problem(op="fwd", **PAIRS["fwd"])
    [main] = select("bf16", problem).kernels
    assert "host_bf16" not in pipelines(select("int8", problem))
    _, catalog = emulated("int8")
    with pytest.raises(DeviceError, match="this CPU lacks instructions that it uses"):
        catalog.plan(problem, main).run(draw_inputs(problem, 1))


def check_on(select: Select, cpus: Iterable[str], problem: Any) -> None:
    expected = Expected(problem, make_inputs(problem, 1), "aarch64")
    for cpu in cpus:
        check(expected, select(cpu, problem))


def product(dtype: Any, m: int) -> GemmProblem:
    return GemmProblem(m=m, n=70, k=131, batch=2, dtype=dtype, bias=True, activation="relu")


@pytest.mark.parametrize(("dtype", "m"), PRODUCTS)
def test_matrix_products(select: Select, dtype: str, m: int) -> None:
    """A library multiplies in the units that the CPU has."""
    sve = ("sve256", "sve512") if dtype in {"fp32", "fp16"} else ("sve256",)
    check_on(select, (*NEON, *sve), product(dtype, m))


@pytest.mark.parametrize(("dtype", "layout"), [("fp32", "rrr"), ("bf16", "ccr"), ("int8", "rrr")])
def test_products_of_few_columns(select: Select, dtype: str, layout: str) -> None:
    problem = GemmProblem(m=131, n=3, k=140, batch=2, dtype=dtype, layout=layout, bias=True, activation="relu")
    assert pipelines(select("oldest", problem)) == {"host_few_columns"}
    check_on(select, (*NEON, "sve256"), problem)


@pytest.mark.parametrize(("dtype", "layout"), [("fp32", "crr"), ("bf16", "rcr")])
def test_products_of_a_deep_k(select: Select, dtype: str, layout: str) -> None:
    """In parts of K; rows of a narrow B are read beyond their ends, and columns in pairs."""
    check_on(select, (*NEON, "sve256"), GemmProblem(m=5, n=3, k=16_500, dtype=dtype, layout=layout, bias=True))


@pytest.mark.parametrize(("dtype", "m", "scales"), [("int8", 3, "block"), ("fp8", 40, "block"), ("fp8", 3, "row")])
def test_products_with_scales(select: Select, dtype: str, m: int, scales: str) -> None:
    problem = GemmProblem(m=m, n=140, k=300, dtype=dtype, scales=scales, dtype_c="bf16", bias=True)
    check_on(select, (*NEON, "sve256", "sve512"), problem)


def test_products_of_groups(select: Select) -> None:
    check_on(select, ("oldest", "int8", "sve256"), GemmProblem(groups=(5, 0, 60), n=70, k=33, dtype="int8"))


@pytest.mark.parametrize(
    ("direction", "fields", "pipeline"),
    [
        ("forward", {"g": 12}, "host_direct"),
        ("forward", {"c": 3, "k": 6, "g": 3}, "host_pixels"),
        ("forward", {"c": 20, "k": 8, "g": 4}, "host_pixels"),
        ("bwd_data", {"c": 5, "k": 10, "g": 5, "stride": (2, 2)}, "host_pixels"),
        ("bwd_weight", {"c": 3, "k": 3, "g": 3}, "host_pixels"),
        ("bwd_weight", {"filter": (2, 3)}, "host_panel"),
        ("bwd_weight", {}, "host_winograd"),
        ("bwd_data", {"size": (9, 23)}, "host_winograd"),
    ],
)
def test_convolutions(select: Select, direction: Any, fields: dict[str, Any], pipeline: str) -> None:
    sizes: dict[str, Any] = {"n": 1, "c": 48, "k": 48, "size": (9, 11), "filter": (3, 3), "pad": (1, 1)}
    problem = ConvProblem(direction=direction, dtype="fp32", **sizes | fields)
    assert select("oldest", problem).kernels[0].algorithm.pipeline == pipeline
    check_on(select, ("oldest", "sve256", "sve512"), problem)


def test_clang_compiles_the_same(select: Select, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "clang++"
    compiler.write_text(
        f'#!/bin/sh\nexec {shutil.which("clang++") or missing("clang++")} --target=aarch64-linux-gnu "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CATALOG_CXX", str(compiler))
    settings.cache_clear()
    problem = GemmProblem(m=40, n=70, k=131, dtype="bf16", layout="crr")  # a row that no other test compiles
    check_on(select, ("oldest", "bf16", "sve256"), problem)


@pytest.mark.parametrize("cpu", ["oldest", "sve512"])
@pytest.mark.parametrize(("dtype", "m"), [("fp16", 3), ("bf16", 40), ("fp8", 3)])
def test_every_number_is_read_and_rounded_exactly(select: Select, cpu: str, dtype: str, m: int) -> None:
    """C = B / 3 for every number, where the rows of A are 1."""
    bits = np.uint8 if dtype == "fp8" else np.uint16
    problem = GemmProblem(m=m, n=np.iinfo(bits).max + 1, k=1, dtype=dtype, alpha=1 / 3)
    a, b = (np.array(array) for array in make_inputs(problem, 1).values())
    a[...] = 1
    b.view(bits)[:, 0] = np.arange(problem.n)
    c = select(cpu, problem).run(a=a, b=b).outputs["c"]
    with np.errstate(all="ignore"):
        expected = (b.T.astype(np.float32) * np.float32(1 / 3)).astype(c.dtype)
    np.testing.assert_array_equal(c.astype(np.float32), np.broadcast_to(expected, c.shape).astype(np.float32))


@pytest.mark.parametrize(("cpu", "register"), [("bf16", "v"), ("sve256", "z")])
@pytest.mark.parametrize(
    ("problem", "instruction"), [(PRODUCTS[3], "fcvtl?"), (PRODUCTS[1], "bfdot"), (PRODUCTS[2], "sdot")]
)
def test_loops_are_of_vector_instructions(
    select: Select, cpu: str, register: str, problem: tuple[str, int], instruction: str
) -> None:
    [library] = select(cpu, product(*problem)).build()
    command = ["aarch64-linux-gnu-objdump", "--disassemble", "--no-show-raw-insn", str(library.path)]
    shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert re.search(rf"\s{instruction}\s+{register}\d", shown)
    assert not re.search(r"\sfcvt\s+[sh]\d+, [sh]\d+|\s[us]bfx\s+w\d+, w\d+, #8, #8", shown), "one element at a time"
