"""GEMM kernels of the host: results against the float64 reference, epilogues, bad calls, and all that commands do."""

from __future__ import annotations

import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import amx
import command
import numpy as np
import pytest
from conftest import missing, slow_but
from gemm_problems import check, on_threads, problem_of_row, rows

from catalog.errors import ProblemError, TensorError
from catalog.ops import operation
from catalog.ops.gemm.arguments import ARGUMENTS
from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime import memory
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host import device
from catalog.runtime.devices.host.device import cpu_features, host_archs, why_unavailable
from catalog.runtime.elements import element_type
from catalog.runtime.guard import guarded_problem
from catalog.runtime.inputs import make_inputs
from catalog.runtime.validate import run_problem
from catalog.schema.kernel import Kernel

SEED = 2026
ARCHES = tuple(arch for arch in host_archs() if why_unavailable(arch) is None)
DTYPES = ("fp32", "fp16", "bf16", "fp8", "bf8", "int8")
LAYOUTS = ("rcr", "rrr", "crr", "ccr")
EPILOGUES = ((0, "PassThrough"), (1, "MultiDAdd"), (2, "MultiDMultiply"), (2, "MultiDAdd"), (1, "MultiDMultiply"))
SCALED_GROUPS = ("grouped_rowwise", "grouped_blockscale")
GEMM = operation("gemm")


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """The host's GEMM kernels, each compiled once for all tests of this file."""
    with Catalog(tmp_path_factory.mktemp("gemm") / "catalog.db") as catalog:
        for arch in ARCHES:
            catalog.populate(arch, operation="gemm")
        yield catalog


def cover(catalog: Catalog, arch: str = "host") -> list[Kernel]:
    """Rows in which each type meets all pipelines, and these each layout; epilogues, tiles and scales take turns."""
    rng, chosen = random.Random(SEED), []  # noqa: S311
    pipelines = ("host_panel", "host_stream", "host_few_columns")
    for number, (dtype, pipeline) in enumerate(product(DTYPES, pipelines)):
        num_d, elementwise = EPILOGUES[number % len(EPILOGUES)]
        layout = LAYOUTS[number // len(pipelines) % len(LAYOUTS)]
        wanted = f"dtype = '{dtype}' AND layout LIKE '{layout}%' AND pipeline = '{pipeline}'"
        wanted += f" AND num_d = {num_d} AND elementwise = '{elementwise}'"
        chosen.append(rng.choice(rows(catalog, f"{wanted} AND family <> 'grouped'", arch)))
    vectors = "family = 'grouped' AND pipeline <> 'host_amx'"
    grouped = [rows(catalog, f"dtype = '{dtype}' AND {vectors}", arch) for dtype in DTYPES]
    chosen += [rng.choice(of_type) for of_type in grouped]
    eight_bits = product(("rowwise", "blockscale"), DTYPES[3:], ("host_panel", "host_stream"))
    for family, dtype, pipeline in (*eight_bits, *product(SCALED_GROUPS, DTYPES[4:], ("host_panel",))):
        wanted = f"family = '{family}' AND dtype = '{dtype}' AND pipeline = '{pipeline}'"
        chosen.append(rng.choice(rows(catalog, wanted, arch)))
    return chosen


def test_kernels_compute_any_problem(catalog: Catalog) -> None:
    check(catalog, rows(catalog, "dtype = 'fp32' AND layout = 'rcr' AND pipeline = 'host_panel'")[0], 40)


@pytest.mark.parametrize(
    ("dtype", "layout", "family"),
    slow_but(
        [("bf16", "rrr", "universal"), ("int8", "rcr", "rowwise")],
        [
            *product(DTYPES, LAYOUTS, ("universal",)),
            *product(("fp32", "bf16", "int8"), ("rcrr", "ccrr"), ("multi_d",)),
            *product(("fp8", "int8"), ("rrr", "crr"), ("rowwise",)),
        ],
    ),
)
def test_few_columns_are_rows_of_the_transpose(catalog: Catalog, dtype: str, layout: str, family: str) -> None:
    """One column, those of one block and of two, of few rows and of many, and parts of vectors and of blocks of K."""
    wanted = f"dtype = '{dtype}' AND layout = '{layout}' AND family = '{family}' AND pipeline = 'host_few_columns'"
    kernel = rows(catalog, wanted)[0]
    rng = random.Random(f"{dtype} {layout} {family}")  # noqa: S311
    drawn = [problem_of_row(kernel, rng).model_dump(exclude_defaults=True) for _ in range(12)]
    sizes = [(8, 2, 1), (300, 1, 70), (301, 7, 1100), (130, 32, 65), (259, 64, 300), (1030, 17, 0)]
    problems = [
        GemmProblem(**fields | {"m": m, "n": n, "k": k}) for fields, (m, n, k) in zip(drawn, 2 * sizes, strict=True)
    ]
    used = check(catalog, kernel, 0, *problems)
    assert used > 0.01 or (dtype == "int8" and family != "rowwise"), "tolerances are far too wide"


FLOATS = (("fp8", "rcr"), ("fp8", "rrr"), ("bf8", "rcr"), ("bf8", "rrr"))


@pytest.mark.parametrize(("dtype", "layout"), slow_but(FLOATS[:1], FLOATS))
def test_streams_read_every_8_bit_float_exactly(catalog: Catalog, dtype: str, layout: str) -> None:
    """A sum of zeros and one element of B, which fp16 can hold; NaN and infinity too. One row and several."""
    wanted = f"dtype = '{dtype}' AND layout = '{layout}' AND pipeline = 'host_stream' AND dtype_c = 'fp16'"
    kernel = rows(catalog, f"{wanted} AND family = 'universal'")[0]
    for m in (1, 3):
        problem = GemmProblem(m=m, n=256, k=70, dtype=dtype, layout=layout)
        b = np.zeros((256, 70), np.uint8)
        b[np.arange(256), np.arange(256) % 70] = np.arange(256)
        b = b if layout == "rcr" else np.ascontiguousarray(b.T)
        element = element_type(problem, "b")
        result = catalog.plan(problem, kernel).run(a=np.ones((m, 70), element), b=b.view(element))
        expected = np.arange(256, dtype=np.uint8).view(element).astype(np.float32)
        np.testing.assert_array_equal(result.outputs["c"].astype(np.float32), np.tile(expected, (m, 1)))


def test_work_counts_parts_of_k_and_whole_tiles_of_threads(catalog: Catalog) -> None:
    """The busiest of two threads has two of three tiles, and two of four; sums of parts are added."""
    wanted = "dtype = 'fp32' AND layout = 'rcr' AND family = 'universal' AND pipeline"
    stream, panel = (rows(catalog, f"{wanted} = '{pipeline}'")[0] for pipeline in ("host_stream", "host_panel"))

    def work(kernel: Kernel, units: int, **sizes: Any) -> dict[str, float]:
        found = GEMM.work(GemmProblem(m=4, dtype="fp32", **sizes), kernel, units)
        return {name.split()[1]: amount for name, amount in found.items()}

    assert work(stream, 2, n=192, k=512)["held"] == work(stream, 2, n=256, k=512)["held"]
    assert work(stream, 1, n=192, k=512)["held"] == 0.75 * work(stream, 1, n=256, k=512)["held"]
    for kernel in (stream, panel):
        whole, parts = work(kernel, 1, n=256, k=4096), work(kernel, 1, n=256, k=4096, k_batch=3)
        assert (whole["parts"], parts["parts"]) == (0, 2 * 4 * 256)
        chosen = work(kernel, 8, n=64, k=4096, k_batch=0)
        assert chosen["parts"] > 0, "one tile for eight threads"


def test_groups_are_products_of_their_own(catalog: Catalog) -> None:
    """Rows of A by expert, each with its own weights; a kernel of groups and one launch."""
    problem = GemmProblem(groups=(5, 0, 40, 300), n=70, k=33, dtype="fp32", bias=True, activation="relu")
    assert problem.m == 345
    inputs = make_inputs(problem, SEED)
    assert inputs["b"].shape == (4, 70, 33)
    expected, allowed = GEMM.reference(problem, inputs)["c"], GEMM.tolerances(problem, inputs)["c"]
    for i, (start, end) in enumerate(((0, 5), (5, 5), (5, 45), (45, 345))):
        by_hand = inputs["a"][start:end].astype(np.float64) @ inputs["b"][i].T + inputs["bias"]
        np.testing.assert_allclose(expected[start:end], np.maximum(by_hand, 0))
    result = catalog.select(problem).run(inputs)
    assert allowed.allows(result.outputs["c"], expected)
    assert "_grouped_" in result.kernels[0]
    check(catalog, rows(catalog, "dtype = 'fp32' AND layout = 'rcr' AND family = 'grouped'")[0], 40)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_of_all_types_and_layouts_compute_any_problem(catalog: Catalog, arch: str) -> None:
    kernels = cover(catalog, arch)[:: 1 if arch == ARCHES[0] else 4]
    assert not catalog.builder.build_many(kernels).failures
    used = {kernel.name: check(catalog, kernel, 25) for kernel in kernels}
    assert max(used.values()) > 0.02, "tolerances are far too wide"


@pytest.mark.slow
def test_products_in_amx_tiles(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are computed in software."""
    if not amx.PAIRS["host_amx"] - amx.TILES <= cpu_features():
        pytest.skip("this CPU has no AVX512-BF16")
    amx.pretend("host_amx", tmp_path, monkeypatch)
    with Catalog(catalog.path) as other:
        for dtype, layout, family in (
            ("bf16", "rcr", "universal"),
            ("fp8", "ccr", "multi_d"),
            ("int8", "rcr", "universal"),
            ("int8", "crr", "grouped"),
            ("fp16", "rrr", "grouped"),
            ("bf16", "rrr", "universal"),
            ("fp8", "crr", "rowwise"),
            ("fp8", "rcr", "blockscale"),
            ("int8", "rcr", "grouped_blockscale"),
            ("fp16", "rcr", "universal"),
        ):
            wanted = f"dtype = '{dtype}' AND layout LIKE '{layout}%' AND family = '{family}' AND pipeline = 'host_amx'"
            kernel = rows(other, wanted, "x86_64_v4")[0]
            # B is read once: as tiles, or a few rows at a time.
            few = [(300, 650, 70)] if layout[1] == "c" else [(5, 1333, 1100), (40, 1333, 1100)]
            others = ((96, 330, 160), (130, 95, 1050))  # whole tiles of A, several steps of K
            special = [GemmProblem(m=m, n=n, k=k, dtype=dtype, layout=layout) for m, n, k in (*few, *others)]
            check(other, kernel, 20, *special if family == "universal" else ())
        amx.pretend("host_amx", tmp_path, monkeypatch, halves=True)
        for layout in ("rcr", "rrr"):
            wanted = f"dtype = 'fp16' AND layout = '{layout}' AND family = 'universal' AND pipeline = 'host_amx'"
            few_rows = GemmProblem(m=5, n=1333, k=1100, dtype="fp16", layout=layout)
            check(other, rows(other, wanted, "x86_64_v4")[0], 20, few_rows)


def test_infinite_elements_reach_only_their_column(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles, few rows of A have zeros beside them, which meet neighbouring columns of B."""
    if not amx.PAIRS["host_amx"] - amx.TILES <= cpu_features():
        pytest.skip("this CPU has no AVX512-BF16")
    amx.pretend("host_amx", tmp_path, monkeypatch)
    problem = GemmProblem(m=8, n=300, k=130, dtype="bf16", layout="rrr")
    wanted = "dtype = 'bf16' AND layout = 'rrr' AND family = 'universal' AND pipeline = 'host_amx'"
    with Catalog(catalog.path) as other:
        plan, inputs = other.plan(problem, rows(other, wanted, "x86_64_v4")[0]), make_inputs(problem, SEED)
        inputs["a"] = np.abs(inputs["a"])
        finite = plan.run(inputs).outputs["c"].astype(np.float64)
        inputs["b"][3, 7], inputs["b"][129, 298] = np.inf, -np.inf
        spoilt = plan.run(inputs).outputs["c"].astype(np.float64)
    assert np.all(spoilt[:, 7] == np.inf)
    assert np.all(spoilt[:, 298] == -np.inf)
    others = np.setdiff1d(np.arange(300), (7, 298))
    np.testing.assert_allclose(spoilt[:, others], finite[:, others], rtol=2**-6, atol=2**-6)


@pytest.mark.slow
@pytest.mark.skipif("x86_64_v4" not in ARCHES or not shutil.which("objdump"), reason="needs AVX-512 and objdump")
def test_sums_of_pairs_stay_in_registers(catalog: Catalog) -> None:
    """No dot product of the loop that g++ inlines has its sum loaded from the stack, or stored there."""
    wanted = "dtype = 'bf16' AND layout = 'rcr' AND warp_tile_m = 12 AND family = 'universal'"
    (kernel,) = rows(catalog, wanted, "x86_64_v4")
    library = catalog.build(kernel).path
    code = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout.splitlines()
    products = [number for number, line in enumerate(code) if "vdpbf16ps" in line]
    near = {line for number in products for line in code[number - 2 : number + 3]}
    assert products
    assert not [line for line in near if re.search(r"vmov\w+ .*%zmm.*\(%r[sb]p\)|vmov\w+ .*\(%r[sb]p\),%zmm", line)]


@pytest.mark.slow
@pytest.mark.parametrize("m", [37, 300])
def test_tiles_threads_and_strides_do_not_change_results(catalog: Catalog, m: int) -> None:
    """Each thread packs what it multiplies, or all of them together if there is much: 300 rows for 3 threads."""
    problem = GemmProblem(m=m, n=1100, k=700, dtype="fp32", layout="rrr")
    inputs = make_inputs(problem, SEED)
    kernels = rows(catalog, "dtype = 'fp32' AND layout = 'rrr' AND pipeline = 'host_panel' AND family = 'universal'")
    first = catalog.plan(problem, kernels[0]).run(inputs).outputs["c"]
    expected, allowed = GEMM.reference(problem, inputs)["c"], GEMM.tolerances(problem, inputs)["c"]
    assert allowed.used(first, expected) <= 1
    for kernel, threads in product(kernels, (1, 2, 3, 7)):
        with on_threads(threads):
            np.testing.assert_array_equal(catalog.plan(problem, kernel).run(inputs).outputs["c"], first)
    top = GemmProblem(m=5, n=1100, k=700, dtype="fp32", layout="rrr")
    part = catalog.plan(top, kernels[0]).run(a=inputs["a"][:5], b=inputs["b"]).outputs["c"]
    np.testing.assert_array_equal(part, first[:5])


@pytest.mark.parametrize("pipeline", slow_but(["host_panel"], ["host_panel", "host_stream"]))
def test_parts_of_k_are_added_in_order(catalog: Catalog, pipeline: str) -> None:
    """Bit for bit the float32 sum of the products of the parts, so the same on any number of threads."""
    kernel = rows(catalog, f"dtype = 'fp32' AND layout = 'rcr' AND pipeline = '{pipeline}'")[0]
    fields: dict[str, Any] = {"m": 5, "n": 1100, "batch": 2, "dtype": "fp32"}
    problem = GemmProblem(**fields, k=2049, k_batch=3, bias=True)
    inputs = make_inputs(problem, SEED)
    added = np.float32(0)
    for start, end in ((0, 768), (768, 1536), (1536, 2049)):
        part = {name: inputs[name][:, :, start:end] for name in "ab"}
        added = added + catalog.plan(GemmProblem(**fields, k=end - start), kernel).run(part).outputs["c"]
    c = catalog.plan(problem, kernel).run(inputs).outputs["c"]
    np.testing.assert_array_equal(c, added + inputs["bias"])
    chosen = problem.model_copy(update={"k_batch": 0})
    assert GEMM.splits(chosen, [kernel], 256, whole_waves=False) > 1
    assert GEMM.splits(chosen, [kernel], 1, whole_waves=False) == 1


def test_numbers_that_are_not_finite_pass_through(catalog: Catalog) -> None:
    kernel = rows(catalog, "dtype = 'fp32' AND layout = 'rcr' AND pipeline = 'host_panel'")[0]
    for activation in ("no", "relu", "gelu", "silu"):
        problem = GemmProblem(m=3, n=33, k=2, dtype="fp32", activation=activation)
        a, b = np.ones((3, 2), np.float32), np.ones((33, 2), np.float32)
        a[0, 0], a[1, 0], a[2, 0] = np.nan, np.inf, -300
        c = catalog.plan(problem, kernel).run(a=a, b=b).outputs["c"]
        assert np.isnan(c[0]).all()
        assert np.isposinf(c[1]).all()
        assert (c[2] == (-299 if activation == "no" else 0)).all()


# The reference


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["no", "relu", "gelu", "silu"])
def test_the_reference_is_pytorchs(activation: str) -> None:
    try:
        import torch
    except ImportError:
        missing("PyTorch")
    fields = {"batch": 2, "alpha": 0.5, "beta": -2, "bias": True, "num_d": 2, "elementwise": "MultiDMultiply"}
    problem = GemmProblem(m=7, n=9, k=11, dtype="fp32", layout="crr", activation=activation, **fields)
    inputs = make_inputs(problem, SEED)
    a, b, bias, d0, d1, c = (torch.from_numpy(inputs[name]).double() for name in problem.needed)
    functions = {"no": lambda x: x, "relu": torch.relu}
    function = functions.get(activation) or getattr(torch.nn.functional, activation)
    expected = function(0.5 * a.mT @ b - 2 * c + bias) * d0 * d1
    np.testing.assert_allclose(GEMM.reference(problem, inputs)["c"], expected.numpy(), rtol=1e-12)


def test_tolerances_catch_a_lost_term() -> None:
    for dtype in DTYPES:
        problem = GemmProblem(m=4, n=5, k=64, dtype=dtype, layout="rrr")
        inputs = make_inputs(problem, SEED)
        allowed, expected = GEMM.tolerances(problem, inputs)["c"], GEMM.reference(problem, inputs)["c"]
        a, b = (inputs[name].astype(np.float64) for name in ("a", "b"))
        assert allowed.allows(expected, a @ b)
        assert not allowed.allows(a[:, :-1] @ b[:-1], expected), dtype


def test_the_header_derives_from_the_list_of_arguments() -> None:
    folder = GEMM.headers["kernels"]
    assert (folder / "operation" / "args.h").read_text() == ARGUMENTS.header


def test_first_runs_of_large_problems_are_small() -> None:
    large = GemmProblem(m=100_003, n=50_000, k=30_001, dtype="bf16", batch=64, bias=True, activation="gelu")
    small = guarded_problem(large)
    assert small.flops < large.flops / 1e6
    assert small.form.text == large.model_copy(update={"batch": 2}).form.text
    assert guarded_problem(small) == small
    experts = GemmProblem(groups=(100_003,) * 64, n=50_000, k=30_001, dtype="bf16")
    assert guarded_problem(experts).flops < experts.flops / 1e4


# Bad calls


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"m": -1}, "m=-1: expected an integer from 0"),
        ({"batch": -1}, "batch=-1: expected an integer from 0"),
        ({"m": 2**31}, "m=2147483648: expected an integer from 0 to 2147483647"),
        ({"m": 2**31 - 1, "n": 2**31 - 1, "batch": 2**20}, "do not fit in 63 bits"),
        ({"alpha": math.nan}, "alpha=nan: "),
        ({"beta": 1e39}, "beta=1e"),
        ({"activation": "tanh"}, "activation='tanh' is not allowed"),
        ({"groups": (1, 2)}, "groups add up to 3, but m=64"),
        ({"groups": (32, 32), "batch": 2}, "groups cannot be combined with a batch"),
        ({"groups": (32, 32), "k_batch": 2}, "groups cannot be combined with k_batch"),
        ({"k_batch": 2000}, "k_batch=2000: "),
        ({"groups": (32, -1)}, "groups[1]=-1: "),
        ({"groups": (32, 32), "num_d": 1, "elementwise": "MultiDAdd"}, "groups cannot be combined with D tensors"),
        ({"m": None}, "a problem needs m: rows of A and C"),
        ({"dtype": "int8", "alpha": 0.5}, "sums of int8 are int32: alpha=0.5"),
        ({"dtype": "int8", "activation": "gelu"}, "activation=gelu would round them"),
    ],
)
def test_a_wrong_problem_is_a_message(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=re.escape(message)):
        GemmProblem(**{"m": 64, "n": 64, "k": 64, **fields})


def test_wrong_tensors_are_a_message(catalog: Catalog) -> None:
    problem = GemmProblem(m=4, n=6, k=8, dtype="fp32", layout="rrr", beta=1)
    a, b, c = (np.ones(shape, np.float32) for shape in ((4, 8), (8, 6), (4, 6)))
    plan = catalog.select(problem)
    for tensors, message in (
        ({"a": a, "b": b.T, "c": c}, r"b is float32 \(6, 8\): expected float32 \(8, 6\)"),
        ({"a": a, "b": b}, "c is missing"),
        ({"a": a, "b": b.astype(np.float16), "c": c}, "b is float16"),
        ({"a": a, "b": b, "c": c, "bias": a[0]}, "bias is not a tensor of this problem"),
        ({"a": a, "b": np.ones((8, 12), np.float32)[:, ::2], "c": c}, "b has a stride of 8 bytes"),
        ({"a": a, "b": b, "c": np.lib.stride_tricks.as_strided(np.ones(99, np.float32), (4, 6), (8, 4))}, "overlap"),
        ({"a": c.repeat(2, 1)[:, :8], "b": b, "c": np.broadcast_to(c[0], c.shape)}, "c is read-only"),
        ({"a": b.T[:4], "b": b, "c": b[:4]}, "shares memory"),
    ):
        given = {**tensors, "a": np.ascontiguousarray(tensors["a"])}
        with pytest.raises(TensorError, match=message):
            plan.bind(given)


# What commands do


def test_a_reference_that_does_not_fit_is_refused_before_the_run(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C in float64 takes four times as much memory as in fp16."""
    problem = GemmProblem(m=340, n=340, k=4)
    monkeypatch.setattr(memory, "memory_bytes", lambda: 2**20)
    memory.check_memory(problem)
    with pytest.raises(ProblemError, match=r"float64 reference needs 1,161,440 bytes.*1,048,576 bytes of memory"):
        run_problem(catalog, problem, arch="host", seed=0, repeats=1, validate=True)


@pytest.mark.parametrize("amx_bf16", [False, True])
def test_few_rows_are_streamed(catalog: Catalog, amx_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows by a B from memory, or fewer by one that stays in the cache. With AMX, tiles stream columns of B, or a
    large B for 6 rows or more, and multiply all other products. A short depth is not worth a stream along columns.
    """
    in_tiles, newest, old = amx_bf16 and ARCHES[0] == "x86_64_v4", ARCHES[0] == "x86_64_v4", ARCHES[0] == "x86_64_v3"
    monkeypatch.setattr(device, "cpu_features", lambda: {"avx512_bf16", "amx_bf16"} if in_tiles else set())
    many, streamed = ("host_amx" if in_tiles else "host_panel"), ("host_amx" if in_tiles else "host_stream")
    few = 64 if newest else 48 if old else 16
    for m, pipeline in ((1, "host_stream"), (4, streamed), (few, streamed), (few + 1, many), (4096, many)):
        (best,) = catalog.candidates(GemmProblem(m=m, n=4096, k=4096, dtype="bf16"), limit=1)
        assert best.kernel.algorithm.pipeline == pipeline
    for sizes, pipeline in (
        ({"m": 65, "k": 4096, "dtype": "int8"}, "host_panel"),
        ({"m": 17, "k": 4096, "dtype": "int8"}, "host_stream" if newest or old else "host_panel"),
        ({"m": 4, "k": 65, "dtype": "bf16"}, "host_stream"),
        ({"m": 4, "k": 64, "dtype": "bf16"}, streamed),
        ({"m": 4, "k": 63, "dtype": "bf16"}, many),
        ({"m": 9, "n": 256, "k": 1023, "dtype": "bf16"}, many),
        ({"m": 17, "n": 1024, "k": 1024, "dtype": "bf16"}, many),
        ({"m": 4, "k": 64, "dtype": "fp32"}, "host_stream"),
        ({"m": 24, "n": 1024, "k": 1024, "dtype": "fp32"}, "host_stream" if newest else "host_panel"),
        ({"m": 16, "k": 16, "dtype": "bf16", "layout": "rrr"}, "host_stream"),
        ({"m": 5, "k": 4096, "dtype": "bf16", "layout": "rrr"}, "host_stream"),
        ({"m": 6, "k": 4096, "dtype": "bf16", "layout": "rrr"}, streamed),
        ({"m": 65, "k": 4096, "dtype": "bf16", "layout": "rrr"}, many),
        ({"m": 4, "k": 256, "dtype": "fp8", "layout": "rrr"}, "host_stream"),
        ({"m": 5, "k": 256, "dtype": "fp8", "layout": "rrr"}, "host_stream" if newest or old else many),
        ({"m": 9, "n": 1024, "k": 1024, "dtype": "fp32", "layout": "rrr"}, "host_panel" if newest else "host_stream"),
        ({"m": 5, "k": 4096, "dtype": "fp8", "layout": "rrr"}, "host_stream"),
    ):
        (best,) = catalog.candidates(GemmProblem(**{"n": 4096} | sizes), limit=1)
        assert best.kernel.algorithm.pipeline == pipeline, sizes


def test_few_columns_are_streamed(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few columns of a large A, or fewer of one in the cache. One column needs no depth."""
    amx.hide(monkeypatch)
    newest = ARCHES[0] == "x86_64_v4"
    cases = (
        *(("r", 4096, n, 4096, few) for n, few in ((16, True), (64, newest), (65, False))),
        ("r", 4096, 16, 256, newest),
        *(("r", 4096, n, 64, few) for n, few in ((4, True), (5, False))),
        *(("r", 65536, *columns) for columns in ((40, 512, False), (1, 8, True), (1, 7, False))),
        *(("r", *sizes, 8192, False) for sizes in ((15, 16), (79, 20), (400, 101))),
        *(("c", 4096, *columns) for columns in ((4, 15, newest), (16, 16, newest), (16, 4096, True))),
        *(("c", *sizes, 256, newest) for sizes in ((32, 16), (1024, 32))),
        *(("c", *sizes, 256, False) for sizes in ((31, 16), (1023, 17), (4096, 33))),
    )
    for (of_a, m, n, k, are_few), of_b in product(cases, "rc"):
        problem = GemmProblem(m=m, n=n, k=k, layout=f"{of_a}{of_b}r", dtype="bf16")
        best = catalog.candidates(problem, limit=1, arch=ARCHES[0])[0]
        assert (best.kernel.algorithm.pipeline == "host_few_columns") == are_few, problem.key
    for m, pipeline in ((8, "host_stream"), (9, "host_few_columns")):
        problem = GemmProblem(m=m, n=7, k=8192, layout="rcr", dtype="bf16")
        best = catalog.candidates(problem, limit=1, arch=ARCHES[0])[0]
        assert best.kernel.algorithm.pipeline == pipeline, problem.key


LAUNCH = """
import resource, sys
from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime.inputs import make_inputs
catalog, problem = Catalog(sys.argv[1]), GemmProblem(m=131072, n=72, k=32, dtype="fp16", layout=sys.argv[2])
plan, inputs = catalog.select(problem), make_inputs(problem, 0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plan.bind(inputs).launch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rcr", "crr"])
def test_a_short_depth_takes_little_memory(catalog: Catalog, layout: str) -> None:
    """Copies of many short rows take no more than those of a few long ones: about 64 MB, beside C and the library."""
    catalog.build(catalog.select(GemmProblem(m=131072, n=72, k=32, dtype="fp16", layout=layout)).kernels[0])
    launch = [sys.executable, "-c", LAUNCH, str(catalog.path), layout]
    done = subprocess.run(launch, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200 * 1024


@pytest.mark.skipif("x86_64_v4" not in ARCHES, reason="needs AVX-512")
def test_narrow_register_tiles_are_for_columns_that_fill_them(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take longer for a column, but there are fewer columns of zeros."""
    amx.hide(monkeypatch)

    def width(n: int) -> int:
        problem = GemmProblem(m=512, n=n, k=512, dtype="fp16")
        return catalog.select(problem, arch="x86_64_v4").kernels[0].algorithm.warp_tile_n

    wide = {n: width(n) for n in (20, 32, 48, 64, 80, 96, 128, 144, 192, 224, 256, 4096)}
    assert wide == {
        **{20: 32, 32: 32, 48: 64, 64: 64, 80: 32, 96: 32},
        **{128: 64, 144: 32, 192: 64, 224: 32, 256: 64, 4096: 64},
    }


def test_commands_run_trace_and_replay(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C is updated in place: the result of one launch is compared, not that of several."""
    monkeypatch.setenv("CATALOG_TRACE", str(tmp_path / "calls.jsonl"))
    fields = ("--m", 33, "--n", 65, "--k", 70, "--dtype", "fp32", "--beta", 0.5, "--bias", "--activation", "gelu")
    done = command.catalog("run", "gemm", *fields, "--validate", db=catalog.path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^validation +passed$", done.stdout, re.MULTILINE)
    monkeypatch.delenv("CATALOG_TRACE")
    replayed = command.catalog("replay", tmp_path / "calls.jsonl", "--verify", db=catalog.path)
    assert replayed.returncode == 0, replayed.stderr
    assert "gemm-m33-n65-k70" in replayed.stdout
