"""What can go wrong around the host kernels: builds that fail, devices that are not there, memory errors."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import amx
import conv_problems
import pytest
from conftest import missing
from gemm_problems import problem_of_row, rows
from host_problems import OPS, SEED, problem_fields, signatures
from test_host_kernels import ARCHES

from catalog.build import targets
from catalog.build.builder import Builder
from catalog.build.toolchains import Toolchain, find_host_toolchain
from catalog.errors import DeviceError, ToolchainError
from catalog.ops import operation_of
from catalog.ops.attention.fields import Op
from catalog.ops.attention.kernels.host import emit as host
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.answers import reference
from catalog.ops.attention.tolerance import tolerances
from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host import device as host_device
from catalog.runtime.devices.host.device import cpu_features
from catalog.runtime.inputs import make_inputs
from catalog.runtime.plan import Plan
from catalog.schema.kernel import Kernel


@pytest.fixture(scope="module")
def catalog(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return Catalog(shutil.copy(host_file, tmp_path_factory.mktemp("host") / "catalog.db"))


# Builds that fail, devices that are not there


def test_a_kernel_that_does_not_compile_gives_way_to_the_next(
    host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(batch=1, nhead_q=2, seqlen_q=33, hdim_q=32, dtype="fp32")
    catalog = Catalog(shutil.copy(host_file, tmp_path / "catalog.db"))
    best, second = (candidate.kernel for candidate in catalog.candidates(problem, limit=2))

    def emit(kernel: Kernel, _memory: Path) -> str:
        refusal = 'static_assert(Row::hdim_q < 0, "this tile is too large");' if kernel == best else ""
        return f"{host.emit(kernel)}{refusal}"

    with monkeypatch.context() as patch:
        patch.setattr(targets, "HOST", replace(targets.HOST, emit=emit))
        plan = catalog.select(problem)
        assert plan.kernels == (best,)
        inputs = make_inputs(problem, SEED)
        result = plan.run(inputs)
        catalog.close()
        assert Catalog(catalog.path).select(problem).kernels == (second,)
    assert result.kernels == (second.name,)
    allowed = tolerances(problem, inputs)["o"]
    assert allowed.allows(result.outputs["o"], reference(problem, inputs)["o"])
    [(key, log)] = catalog.connection.execute("SELECT key, log FROM artifact WHERE status = 'failed'")
    assert "this tile is too large" in log
    assert Path(catalog.builder.build(second).path).with_name("logs").joinpath(f"{key}.log").read_text().startswith(log)
    assert Catalog(catalog.path).select(problem).kernels == (best,), "its source is another now"


def test_what_is_missing_to_run_a_gpu_kernel(gfx950: Catalog) -> None:
    plan = gfx950.select(Problem(batch=1, nhead_q=2, seqlen_q=33, hdim_q=128, dtype="fp16"), arch="gfx950")
    with pytest.raises(DeviceError, match=r"gfx950 kernels cannot run on this machine: .*(GPU|HIP)"):
        plan.run()


# Sanitizers


@dataclass(frozen=True)
class Sanitizer:
    """Builds kernels with AddressSanitizer and UndefinedBehaviorSanitizer, and runs them in a process of their own."""

    builder: Builder
    runtime: Path
    folder: Path

    def run(self, plans: list[Plan], flaw: str | None = None) -> subprocess.CompletedProcess[str]:
        """Every plan with its kernels, built with the sanitizers."""
        report = self.builder.build_many({k.id: k for plan in plans for k in plan.kernels}.values())
        assert not report.failures
        libraries = {
            artifact.kernel_id: {"path": str(artifact.path), "sha256": artifact.sha256, "kernel_id": artifact.kernel_id}
            for artifact in report.artifacts
        }
        jobs = [
            {
                "problem": plan.problem.key,
                "seed": index if flaw is None else SEED,
                "flaw": flaw,
                "arithmetic": asdict(plan.arithmetic),
                "num_splits": operation_of(plan.problem).splits(plan.problem, plan.kernels, 2, whole_waves=False),
                "libraries": [libraries[kernel.id] for kernel in plan.kernels],
            }
            for index, plan in enumerate(plans)
        ]
        file = self.folder / "cases.json"
        file.write_text(json.dumps(jobs))
        environment = {"LD_PRELOAD": str(self.runtime), "ASAN_OPTIONS": "detect_leaks=0"}
        return subprocess.run(
            [sys.executable, str(Path(__file__).with_name("sanitize_host.py")), str(file)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


@pytest.fixture(scope="module")
def sanitizer(tmp_path_factory: pytest.TempPathFactory) -> Sanitizer:
    folder = tmp_path_factory.mktemp("sanitizer")
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

    def toolchain(arch: str) -> Toolchain:
        plain = find_host_toolchain(arch, "g++", None, os.environ.get("PATH", os.defpath))
        return replace(
            plain,
            compile_flags=(
                # -Og compiles in half the time of -O1
                *(*plain.compile_flags, "-Og", "-fno-omit-frame-pointer", *checks),
                *("-include", str(amx.EMULATED)),
            ),
            link_flags=(*plain.link_flags, *checks),
        )

    try:
        compiler = toolchain(ARCHES[0]).compiler.path
    except ToolchainError:
        missing("g++")
    ask = [str(compiler), "-print-file-name=libasan.so"]
    runtime = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    if not runtime.is_absolute():
        missing("libasan")
    target = replace(targets.HOST, toolchain=toolchain)
    return Sanitizer(Builder(folder / "cache", targets=lambda arch: target), runtime.resolve(), folder)


PROBLEMS_OF_A_SIGNATURE = 9


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_sanitizers_find_nothing(catalog: Catalog, sanitizer: Sanitizer, op: Op) -> None:
    """Some signatures of the op, over shapes that are drawn, on each of this machine's archs in turn."""
    rng = random.Random(SEED)  # noqa: S311
    plans, found = [], signatures(catalog, op)
    widest = max(found, key=lambda signature: signature.traits["hdim_q"])
    for index, signature in enumerate([*found[::10], widest]):
        for _ in range(PROBLEMS_OF_A_SIGNATURE):
            problem = Problem(**problem_fields(signature, lambda *values: rng.choice(values)))
            plans.append(catalog.select(problem, arch=ARCHES[index % len(ARCHES)]))
    assert len(plans) >= 2 * PROBLEMS_OF_A_SIGNATURE
    done = sanitizer.run(plans)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(plans)


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "dtype"), [("host_bf16", "bf16"), ("host_amx", "bf16"), ("host_amx", "fp16")])
def test_sanitizers_find_nothing_in_pairs(
    *,
    host_file: Path,
    tmp_path: Path,
    sanitizer: Sanitizer,
    pipeline: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes that leave parts of pairs, of vectors and of tiles; AMX in software."""
    if "avx512_bf16" not in cpu_features():
        pytest.skip("this CPU has no AVX512-BF16")
    monkeypatch.setattr(host_device, "cpu_features", lambda: amx.PAIRS[pipeline])
    sizes = {"batch": 2, "nhead_q": 6, "nhead_k": 2, "hdim_q": 61, "hdim_v": 33, "dtype": dtype}
    sizes |= {"mask": "top_left", "window": (40, 5)}
    with Catalog(shutil.copy(host_file, tmp_path / "catalog.db")) as catalog:
        plans = [
            catalog.select(Problem(**sizes, lse=True, seqlen_q=seqlen_q, seqlen_k=seqlen_k), arch="x86_64_v4")
            for seqlen_q, seqlen_k in ((6, 1), (45, 33), (67, 531), (70, 29))
        ]
        whole_vectors = sizes | {"hdim_q": 64, "hdim_v": 64, "seqlen_q": 4}
        plans += [
            catalog.select(Problem(**whole_vectors, seqlen_k=seqlen_k), arch="x86_64_v4") for seqlen_k in (1, 33, 259)
        ]
        plans += [
            catalog.select(Problem(**sizes, op="bwd", seqlen_q=seqlen_q, seqlen_k=seqlen_k), arch="x86_64_v4")
            for seqlen_q, seqlen_k in (((6, 1), (45, 33), (67, 531)) if dtype == "bf16" else ())
        ]
        assert all(pipeline in {kernel.algorithm.pipeline.value for kernel in plan.kernels} for plan in plans)
        done = sanitizer.run(plans)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(plans)


FINDINGS = {
    "q": "AddressSanitizer.*READ of size",
    "k": "AddressSanitizer.*READ of size",
    "v": "AddressSanitizer.*READ of size",
    "bias": "AddressSanitizer.*READ of size",
    "o": "AddressSanitizer.*WRITE of size",
    "lse": "AddressSanitizer.*WRITE of size",
    "misaligned": "runtime error: store to misaligned address",
}


@pytest.mark.slow
@pytest.mark.parametrize("flaw", FINDINGS)
def test_sanitizers_would_find(catalog: Catalog, sanitizer: Sanitizer, flaw: str) -> None:
    problem = Problem(batch=1, nhead_q=1, seqlen_q=33, hdim_q=64, dtype="fp32", lse=True, bias="bias", bias_dims="11")
    done = sanitizer.run([catalog.select(problem)], flaw)
    assert done.returncode != 0
    assert re.search(FINDINGS[flaw], done.stderr, re.DOTALL)


@pytest.fixture(scope="module")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    catalog = Catalog(tmp_path_factory.mktemp("gemm") / "catalog.db")
    for arch in ARCHES:
        catalog.populate(arch, operation="gemm")
    return catalog


@pytest.mark.slow
def test_sanitizers_find_nothing_in_gemm(gemm: Catalog, sanitizer: Sanitizer) -> None:
    """Tensors without a spare byte, for vector kernels of each arch, and for AMX in software."""
    rng, plans = random.Random(SEED), []  # noqa: S311
    found = [
        (arch, layout, *of)
        for arch, layout in product(ARCHES, ("rcr", "crr"))
        for of in (("host_panel", "bf16"), ("host_stream", "int8"), ("host_few_columns", "bf16"))
    ]
    if "avx512_bf16" in cpu_features():
        found += [("x86_64_v4", "rcr", "host_amx", "int8"), ("x86_64_v4", "crr", "host_amx", "bf16")]
        found += [("x86_64_v4", "rrr", "host_amx", "fp16")]
    for arch, layout, pipeline, dtype in found:
        wanted = f"dtype = '{dtype}' AND layout LIKE '{layout}%' AND pipeline = '{pipeline}' AND num_d = 1"
        kernel = rows(gemm, wanted, arch)[0]
        plans += [gemm.plan(problem_of_row(kernel, rng), kernel) for _ in range(12)]
    for family, pipeline in (("rowwise", "panel"), ("blockscale", "stream"), ("grouped_blockscale", "panel")):
        wanted = f"family = '{family}' AND dtype = 'int8' AND layout = 'rcr' AND pipeline = 'host_{pipeline}'"
        kernel = rows(gemm, wanted)[0]
        plans += [gemm.plan(problem_of_row(kernel, rng), kernel) for _ in range(8)]
    done = sanitizer.run(plans)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(plans)


@pytest.mark.slow
def test_sanitizers_find_nothing_in_convolutions(tmp_path: Path, sanitizer: Sanitizer) -> None:
    """Tensors without a spare byte, for each pipeline and direction."""
    rng, plans = random.Random(SEED), []  # noqa: S311
    wanted = [("host_panel", "forward", "bf16"), ("host_panel", "bwd_weight", "fp32")]
    wanted += [("host_scatter", "bwd_data", "fp32")]
    wanted += [("host_direct", "bwd_data", "fp16"), ("host_direct", "bwd_weight", "fp32")]
    wanted += [
        (pipeline, direction, "fp32")
        for pipeline in ("host_winograd", "host_pixels")
        for direction in ("forward", "bwd_data", "bwd_weight")
    ]
    wanted += [("host_depthwise", "forward", "fp16"), ("host_depthwise", "bwd_weight", "bf16")]
    wanted += [("host_padded", "forward", "fp32"), ("host_two_rows", "bwd_data", "fp32")]
    if "avx512_bf16" in cpu_features():
        wanted += [("host_two_rows_dot", "forward", "bf16"), ("host_padded_dot", "forward", "bf16")]
        wanted += [("host_depthwise_dot", "bwd_weight", "bf16")]
        wanted += [("host_groups_amx", direction, "bf16") for direction in ("forward", "bwd_data", "bwd_weight")]
    with Catalog(tmp_path / "catalog.db") as catalog:
        for arch in ARCHES:
            catalog.populate(arch, operation="conv")
        for index, (pipeline, direction, dtype) in enumerate(wanted):
            where = f"pipeline = '{pipeline}' AND direction = '{direction}' AND dtype = '{dtype}' AND ndim = 2"
            found = [conv_problems.rows(catalog, f"{where} AND layout = 'nhwgc'", arch) for arch in ARCHES]
            having = [one for one in found if one]  # not each arch has each pipeline
            if not having:
                continue
            kernel = having[index % len(having)][0]
            plans += [catalog.plan(conv_problems.problem_of_row(kernel, rng), kernel) for _ in range(12)]
        done = sanitizer.run(plans)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(plans)


@pytest.mark.slow
@pytest.mark.parametrize(("flaw", "found"), [("a", "READ"), ("b", "READ"), ("bias", "READ"), ("c", "WRITE")])
def test_sanitizers_would_find_flaws_in_gemm(gemm: Catalog, sanitizer: Sanitizer, flaw: str, found: str) -> None:
    problem = GemmProblem(m=7, n=33, k=19, dtype="fp32", layout="rrr", bias=True)
    kernel = rows(gemm, "dtype = 'fp32' AND layout = 'rrr' AND pipeline = 'host_panel'")[0]
    done = sanitizer.run([gemm.plan(problem, kernel)], flaw)
    assert done.returncode != 0
    assert re.search(f"AddressSanitizer.*{found} of size", done.stderr, re.DOTALL)
