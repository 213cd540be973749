"""Host kernels of all operations: against the float64 reference and against PyTorch.

``pytest -rP`` shows how much of the tolerance was used and how large the errors were.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import amx
import numpy as np
import pytest
import torch_attention
from conftest import missing, slow_but
from host_problems import OPS, SEED, Signature, draw_inputs, problem_fields, problems, signatures
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog.build.builder import Artifact
from catalog.errors import DeviceError
from catalog.ops import operation_of
from catalog.ops.attention.fields import Op
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.answers import reference
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host.device import HostDevice, cpu_features, host_archs, why_unavailable
from catalog.runtime.inputs import make_inputs
from catalog.runtime.plan import Plan
from catalog.runtime.tensors import Array, make_outputs
from catalog.runtime.tolerance import max_error
from catalog.schema.kernel import Kernel

ARCHES = tuple(arch for arch in host_archs() if why_unavailable(arch) is None)
FEW, ALL = (1, 20), (None, 340)
"""How many signatures of an op are compiled, and how many problems are drawn of them: 120, and 2,040 in all."""

drawn = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.fixture(scope="module")
def catalog(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """A catalog to run from; it compiles each kernel once for all tests of this file."""
    catalog = Catalog(shutil.copy(host_file, tmp_path_factory.mktemp("host") / "catalog.db"))
    yield catalog
    catalog.close()


def build(catalog: Catalog, kernels: list[Kernel]) -> tuple[Artifact, ...]:
    """Each kernel's library, built in parallel."""
    unique = {kernel.id: kernel for kernel in kernels}
    report = catalog.builder.build_many(unique.values())
    assert not report.failures
    libraries = {artifact.kernel_id: artifact for artifact in report.artifacts}
    return tuple(libraries[kernel.id] for kernel in kernels)


def built_signatures(catalog: Catalog, op: Op, count: int | None) -> tuple[Signature, ...]:
    """The op's first signatures, their kernels compiled."""
    found = signatures(catalog, op)[:count]
    build(catalog, [kernel for signature in found for kernel in catalog.select(largest(signature)).kernels])
    return found


def largest(signature: Signature) -> Problem:
    """A problem of a signature, without a choice."""
    return Problem(**problem_fields(signature, lambda *values: values[-1]))


@dataclass
class Errors:
    """Largest errors by tensor, in all and as a share of the tolerance."""

    largest: dict[str, tuple[float, float]] = field(default_factory=dict)
    count: int = 0

    def add(self, plan: Plan, outputs: Mapping[str, Array], expected: Mapping[str, Array], inputs: Any) -> None:
        """Compare, and fail where an element is too far away."""
        self.count += 1
        of = operation_of(plan.problem)
        allowed = of.tolerances(plan.problem, inputs, plan.arithmetic)
        for name in outputs.keys() & expected.keys():
            share = allowed[name].used(outputs[name], expected[name])
            error = max_error(outputs[name], expected[name])
            known = self.largest.get(name, (0.0, 0.0))
            self.largest[name] = max(known[0], error), max(known[1], share)
            assert share <= 1, (
                f"{name} is off by {error:.2e}, {share:.1f} of the tolerance: {plan.problem.key} on {plan}"
            )

    def report(self, what: str, record: Callable[[str, object], None]) -> None:
        largest = ", ".join(f"{name} {e:.2e} ({share:.0%})" for name, (e, share) in sorted(self.largest.items()))
        text = f"{self.count} problems, max error (of the tolerance) {largest}"
        print(f"{what}: {text}")
        record(what, text)


def run(plan: Plan, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """The outputs; updated tensors are copies."""
    updated = {name: array.copy() for name, array in inputs.items() if plan.problem.tensors[name].role == "updated"}
    return plan.run({**inputs, **updated}).outputs


@pytest.mark.parametrize(("count", "examples"), slow_but([FEW], [FEW, ALL]), ids=["few", "all"])
@pytest.mark.parametrize("op", slow_but(["fwd", "bwd"], OPS))  # test_host_ops.py has the others
def test_random_problems(
    catalog: Catalog, op: Op, count: int | None, examples: int, record_property: Callable[[str, object], None]
) -> None:
    """Problems that are drawn, and one of each signature whose kernels the drawn ones leave out."""
    errors, drawn_signatures, ran = Errors(), built_signatures(catalog, op, count), set[Kernel]()

    def compare(plan: Plan, seed: int) -> None:
        inputs = draw_inputs(plan.problem, seed)
        errors.add(plan, run(plan, inputs), reference(plan.problem, inputs), inputs)
        ran.update(plan.kernels)

    @settings(drawn, max_examples=examples)
    @given(problems(drawn_signatures), st.integers(0, 99))
    def check(problem: Problem, seed: int) -> None:
        compare(catalog.select(problem), seed)

    check()
    for plan in map(catalog.select, map(largest, drawn_signatures)):
        if not ran.issuperset(plan.kernels):
            compare(plan, SEED)
    errors.report(op, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in OPS if op != "appendkv"])
def test_random_problems_against_pytorch(
    catalog: Catalog, op: Op, record_property: Callable[[str, object], None]
) -> None:
    try:
        import torch
    except ImportError:
        missing("PyTorch")
    errors = Errors()
    drawn_signatures = tuple(filter(torch_attention.expresses, built_signatures(catalog, op, None)))

    @settings(drawn, max_examples=120)
    @given(problems(drawn_signatures), st.integers(0, 99))
    def check(problem: Problem, seed: int) -> None:
        inputs = draw_inputs(problem, seed)
        if "sink" in inputs:  # PyTorch has none
            return
        plan = catalog.select(problem)
        outputs, expected = dict(run(plan, inputs)), torch_attention.attention(torch, problem, inputs)
        for name, array in expected.items():
            outputs[name] = np.where(np.isnan(array), np.nan, outputs[name].astype(np.float64))
        errors.add(plan, outputs, expected, inputs)

    check()
    assert errors.count > 10
    errors.report(f"{op} against PyTorch", record_property)


TILED: dict[str, tuple[dict[str, Any], ...]] = {
    "fwd": (
        {"mask": "causal", "lse": True},
        {"bias": "alibi", "dropout": 0.3, "mask": "window", "window": (70, 5), "lse": True},
    ),
    "bwd": ({"mask": "causal"}, {"bias": "bias", "dbias": True, "dropout": 0.3}),
}
TILED_HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("op", TILED)
def test_every_tile(catalog: Catalog, op: Op, arch: str, record_property: Callable[[str, object], None]) -> None:
    """All alternatives of every head dim, not only the one that is selected; features and dtypes in turn."""
    plans = []
    for index, (hdim_q, hdim_v) in enumerate(TILED_HEAD_DIMS):
        dtype, features = ("fp32", "fp16", "bf16")[index % 3], TILED[op][index % 2]
        sizes = {"batch": 1, "nhead_q": 4, "nhead_k": 2, "seqlen_q": 130 + index, "seqlen_k": 260 - index}
        problem = Problem(op=op, **sizes, hdim_q=hdim_q, hdim_v=hdim_v, dtype=dtype, **features)
        tiles = [candidate.kernel for candidate in catalog.candidates(problem, arch=arch, limit=9)]
        alternatives = [kernel for kernel in tiles if kernel.algorithm.pad_d == tiles[0].algorithm.pad_d][:3]
        assert len({kernel.algorithm for kernel in alternatives}) > 1
        plans += [catalog.plan(problem, kernel) for kernel in alternatives]
    build(catalog, [kernel for plan in plans for kernel in plan.kernels])
    errors = Errors()
    for plan in plans:
        inputs = draw_inputs(plan.problem, SEED)
        errors.add(plan, run(plan, inputs), reference(plan.problem, inputs), inputs)
    errors.report(arch, record_property)


def gapped(tensor: Array) -> Array:
    """An array of the same shape whose elements have gaps of NaN between them, except along the last axis."""
    wide = np.full((*(2 * extent for extent in tensor.shape[:-1]), tensor.shape[-1]), np.nan).astype(tensor.dtype)
    return wide[(slice(None, None, 2),) * (tensor.ndim - 1)]


# Exact properties

NO_KEY = {
    "no keys": {"seqlen_q": 5, "seqlen_k": 0},
    "no keys, causal": {"seqlen_q": 5, "seqlen_k": 0, "mask": "bottom_right"},
    "more queries than keys": {"seqlen_q": 300, "seqlen_k": 7, "mask": "bottom_right"},
    "window behind the last key": {"seqlen_q": 300, "seqlen_k": 7, "mask": "top_left", "window": (3, 3)},
    "window before the first key": {"seqlen_q": 33, "seqlen_k": 2, "mask": "bottom_right", "window": (4, 1)},
}


@pytest.mark.parametrize("fields", slow_but([NO_KEY["no keys"]], NO_KEY.values()), ids=NO_KEY)
def test_a_query_without_a_key_gives_exactly_zero(catalog: Catalog, fields: dict[str, Any]) -> None:
    problem = Problem(batch=2, nhead_q=4, nhead_k=2, hdim_q=64, dtype="fp16", lse=True, **fields)
    inputs = make_inputs(problem, SEED)
    o, lse = catalog.select(problem).run(inputs).outputs.values()
    blind = np.isneginf(reference(problem, inputs)["lse"])
    assert blind.any()
    np.testing.assert_array_equal(np.isneginf(lse), blind)
    assert not np.count_nonzero(o[blind])
    assert np.isfinite(lse[~blind]).all()


@pytest.mark.parametrize("dtype", slow_but(["fp16"], ["fp16", "bf16", "fp8", "bf8"]))
def test_every_number_is_read_and_rounded_exactly(catalog: Catalog, dtype: str) -> None:
    """Zero queries make O the mean of two keys' values, exact in float32: what is left is rounding to nearest even.

    Pairs of bf16 take subnormal values for zero.
    """
    problem = Problem(batch=1, nhead_q=1024, seqlen_q=5, seqlen_k=2, hdim_q=64, dtype=dtype, lse=True)
    inputs, plan = make_inputs(problem, SEED), catalog.select(problem)
    bits = np.uint8 if dtype in ("fp8", "bf8") else np.uint16
    numbers = np.resize(np.arange(np.iinfo(bits).max + 1, dtype=bits), (2, 2**16))
    numbers = np.random.default_rng(SEED).permuted(numbers, axis=1)
    inputs["q"][...] = 0
    inputs["v"].view(bits)[...] = numbers.reshape(2, 1024, 64).swapaxes(0, 1)
    values = inputs["v"].astype(np.float32)[0]
    if dtype == "bf16" and plan.arithmetic.rounds_factors:
        values[np.abs(values) < np.finfo(np.float32).tiny] = 0
    first, second = values.swapaxes(0, 1)
    with np.errstate(all="ignore"):
        mean = (first + second) * np.float32(0.5)
        if dtype == "bf8":  # infinities saturate
            mean = np.clip(mean, -57344, 57344)
        mean = mean.astype(inputs["v"].dtype).astype(np.float32)
    o = plan.run(inputs).outputs["o"][0].astype(np.float32)
    np.testing.assert_array_equal(o, np.broadcast_to(mean[:, np.newaxis], o.shape))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("hdim", "dtype"),  # 96 is no multiple of what tables convert at a time
    slow_but([(64, "fp16kvfp8")], product((64, 96), ("fp16kvfp8", "bf16kvfp8"))),
)
@pytest.mark.parametrize("ratio", slow_but([8], [1, 2, 3, 4, 8]))
def test_decoding_reads_every_number_of_8_bits(catalog: Catalog, arch: str, dtype: str, hdim: int, ratio: int) -> None:
    """Each of the 256 numbers is all elements of the only key or value of a head."""
    sizes = {"batch": 4, "nhead_q": 64 * ratio, "nhead_k": 64, "seqlen_q": 1, "seqlen_k": 1, "hdim_q": hdim}
    problem = Problem(op="splitkv", **sizes, dtype=dtype, lse=True)
    inputs, plan = make_inputs(problem, SEED), catalog.select(problem, arch=arch)
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64, 1, 1)
    numbers = codes.view(inputs["k"].dtype).astype(np.float32)
    inputs["q"][...] = 1
    inputs["k"][...] = 0
    inputs["v"].view(np.uint8)[...] = codes
    o = plan.run(inputs).outputs["o"].astype(np.float32)
    np.testing.assert_array_equal(o, np.broadcast_to(np.repeat(numbers, ratio, axis=1), o.shape))

    inputs["k"].view(np.uint8)[...] = codes
    lse = plan.run(inputs).outputs["lse"]
    scores = np.repeat(numbers[..., 0], ratio, axis=1) * np.float32(np.sqrt(hdim))
    np.testing.assert_allclose(lse, scores, rtol=2**-18)  # the scale and the base of the exponential are rounded


def test_outputs_are_written_where_they_are_and_nowhere_else(catalog: Catalog) -> None:
    problem = Problem(batch=2, nhead_q=4, nhead_k=2, seqlen_q=33, hdim_q=40, dtype="bf16", lse=True, mask="causal")
    [library] = build(catalog, list(catalog.select(problem).kernels))
    inputs, outputs = make_inputs(problem, SEED), make_outputs(problem)
    spaced = {"o": gapped(outputs["o"]), "lse": gapped(outputs["lse"][..., np.newaxis])[..., 0]}
    for name, tensor in spaced.items():
        tensor[...] = np.nan
        outputs[name][...] = np.nan
    launch(library, problem, inputs | spaced)
    launch(library, problem, inputs | outputs)
    for name, tensor in spaced.items():
        np.testing.assert_array_equal(tensor, outputs[name])
        storage = tensor.base
        assert storage is not None
        assert np.isfinite(storage.astype(np.float32)).sum() == outputs[name].size


def launch(library: Artifact, problem: Problem, tensors: Mapping[str, Array], num_threads: int = 0) -> None:
    device = HostDevice(num_threads)
    kernel = device.load(library.path, library.sha256, library.kernel_id)
    device.launch(kernel, device.call(problem, tensors))


def bits(library: Artifact, problem: Problem, num_threads: int) -> list[bytes]:
    """The outputs, bit by bit."""
    inputs, outputs = make_inputs(problem, SEED), make_outputs(problem)
    launch(library, problem, inputs | outputs, num_threads)
    return [tensor.tobytes() for tensor in outputs.values()]


FOUR_HEADS = {"batch": 1, "nhead_q": 4, "hdim_q": 64, "dtype": "fp32", "lse": True}
HIDDEN = {
    "causal": {"mask": "causal"},
    "window": {"mask": "window", "window": (100, 0)},
    "block mask": {"mask": "window", "window": (100, 0), "block_mask_q": 16, "block_mask_kv": 32},
}


@pytest.mark.parametrize("num_threads", slow_but([2], [1, 2]))
@pytest.mark.parametrize("fields", slow_but([HIDDEN["causal"]], HIDDEN.values()), ids=HIDDEN)
def test_results_are_the_same_in_every_run(catalog: Catalog, fields: dict[str, Any], num_threads: int) -> None:
    problem = Problem(**FOUR_HEADS, seqlen_q=600, **fields)
    [library] = build(catalog, list(catalog.select(problem).kernels))
    first = bits(library, problem, num_threads)
    assert all(bits(library, problem, num_threads) == first for _ in range(5))


@pytest.mark.parametrize("fields", slow_but([HIDDEN["causal"]], HIDDEN.values()), ids=HIDDEN)
def test_results_do_not_depend_on_the_number_of_threads(catalog: Catalog, fields: dict[str, Any]) -> None:
    [kernel] = catalog.select(Problem(**FOUR_HEADS, seqlen_q=1, **fields)).kernels
    [library] = build(catalog, [kernel])
    for tiles, extra in product((1, 2, 3), (0, 1)):
        problem = Problem(**FOUR_HEADS, seqlen_q=tiles * kernel.algorithm.tile_m0 + extra, seqlen_k=600, **fields)
        single, *others = [bits(library, problem, num_threads) for num_threads in (1, 2, 3)]
        assert all(other == single for other in others), problem.key


# What a CPU has


@pytest.fixture
def catalog_on(host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Catalog]]:
    """A catalog as on a CPU with the features of a pipeline; AMX tiles are computed in software."""
    if "x86_64_v4" not in ARCHES:
        pytest.skip("this CPU has no AVX-512")
    opened: list[Catalog] = []

    def open_as(pipeline: str, halves: bool = False) -> Catalog:
        amx.pretend(pipeline, tmp_path, monkeypatch, halves)
        opened.append(Catalog(shutil.copy(host_file, tmp_path / f"{pipeline}.db")))
        return opened[-1]

    yield open_as
    for catalog in opened:
        catalog.close()


@pytest.mark.parametrize("pipeline", amx.PAIRS)
def test_what_the_cpu_has_decides_on_the_pipeline(catalog_on: Callable[..., Catalog], pipeline: str) -> None:
    catalog = catalog_on(pipeline)
    types = {"bf16": pipeline, "fp16": "host_amx" if pipeline == "host_amx" else "host_panel", "fp32": "host_panel"}
    for (dtype, expected), op in product(types.items(), ("fwd", "splitkv")):
        problem = Problem(op=op, batch=1, nhead_q=2, seqlen_q=64, hdim_q=64, dtype=dtype)
        assert catalog.select(problem, arch="x86_64_v4").kernels[0].algorithm.pipeline.value == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "dtype", "count", "halves"),
    [
        ("host_panel", "bf16", 1, False),
        ("host_bf16", "bf16", 1, False),
        ("host_amx", "bf16", 2, False),
        *(("host_amx", "fp16", 1, halves) for halves in amx.HALVES),
    ],
)
def test_16_bits_in_every_pipeline(
    *,
    catalog_on: Callable[..., Catalog],
    pipeline: str,
    dtype: str,
    count: int,
    halves: bool,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    if not amx.PAIRS[pipeline] - amx.TILES <= cpu_features():
        pytest.skip("this CPU has no AVX512-BF16")
    catalog, errors = catalog_on(pipeline, halves), Errors()
    ops: tuple[Op, ...] = ("fwd", "splitkv", "bwd") if dtype == "bf16" else ("fwd", "splitkv")
    found = [
        signature
        for op in ops
        for signature in [one for one in signatures(catalog, op, "x86_64_v4") if one.traits["dtype"] == dtype][:count]
    ]

    @settings(drawn, max_examples=60)
    @given(problems(found), st.integers(0, 99))
    def check(problem: Problem, seed: int) -> None:
        inputs, plan = draw_inputs(problem, seed), catalog.select(problem, arch="x86_64_v4")
        assert {kernel.algorithm.pipeline.value for kernel in plan.kernels} <= {pipeline, "no", "unused"}
        assert plan.arithmetic.rounds_factors == (pipeline != "host_panel")
        errors.add(plan, run(plan, inputs), reference(problem, inputs), inputs)

    check()
    errors.report(pipeline, record_property)
    if pipeline == "host_amx":
        problem = Problem(**problem_fields(found[0], lambda *values: values[-1]))
        plan = catalog.select(problem, arch="x86_64_v4")
        monkeypatch.setenv("CATALOG_TEST_AMX_REFUSED", "1")
        with pytest.raises(
            DeviceError, match="this CPU lacks instructions that it uses, or the system does not permit"
        ):
            plan.run(draw_inputs(problem, SEED))


def few_rows(catalog: Catalog, dtype: str, hdim: int) -> Errors:
    """Up to 16 query rows for each K/V head, beside K and V of many lengths."""
    errors = Errors()
    for seqlen_q, ratio, seqlen_k, window in product((1, 2), (1, 3, 8), (1, 31, 64, 257, 700), (None, (37, 0))):
        fields = {"mask": "bottom_right", "window": window} if window else {}
        problem = Problem(
            op="splitkv" if seqlen_k == 700 else "fwd",
            batch=2,
            nhead_q=2 * ratio,
            nhead_k=2,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            hdim_q=hdim,
            dtype=dtype,
            **fields,
        )
        inputs, plan = draw_inputs(problem, ratio), catalog.select(problem)
        errors.add(plan, run(plan, inputs), reference(problem, inputs), inputs)
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_few_rows_of_whole_vectors(
    catalog: Catalog, dtype: str, record_property: Callable[[str, object], None]
) -> None:
    """K and V are read in place; pairs may end after one key."""
    few_rows(catalog, dtype, 64).report(dtype, record_property)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "hdim"), [("bf16", 128), ("fp16", 64)])
def test_few_rows_in_tiles(
    catalog_on: Callable[..., Catalog], dtype: str, hdim: int, record_property: Callable[[str, object], None]
) -> None:
    """From 4 rows on keys are tiles in place; those of a tile that ends before, or on pages, are copied."""
    if not amx.PAIRS["host_bf16"] <= cpu_features():
        pytest.skip("this CPU has no AVX512-BF16")
    catalog = catalog_on("host_amx", True)
    errors = few_rows(catalog, dtype, hdim)
    for nhead_q, page_size, mask in product((4, 7), (1, 16, 48), ("no", "bottom_right")):
        sizes = {"batch": 4, "seqlen_q": 2, "seqlen_k": 600, "nhead_k": 1, "hdim_q": hdim, "dtype": dtype}
        problem = Problem(op="pagedkv", nhead_q=nhead_q, page_size=page_size, mask=mask, **sizes)
        inputs, plan = draw_inputs(problem, page_size), catalog.select(problem)
        errors.add(plan, run(plan, inputs), reference(problem, inputs), inputs)
    errors.report(dtype, record_property)


@pytest.mark.parametrize("pipeline", ["host_bf16", "host_amx"])
def test_infinite_values_stay_in_their_columns(catalog_on: Callable[..., Catalog], pipeline: str) -> None:
    """In tiles, weights of few rows have zeros beside them, which meet neighbouring columns; vectors read pairs."""
    if not amx.PAIRS["host_bf16"] <= cpu_features():
        pytest.skip("this CPU has no AVX512-BF16")
    problem = Problem(op="splitkv", batch=1, nhead_q=8, nhead_k=1, seqlen_q=1, seqlen_k=299, hdim_q=128, dtype="bf16")
    inputs, plan = draw_inputs(problem, SEED), catalog_on(pipeline).select(problem)
    finite = run(plan, inputs)["o"].astype(np.float64)
    inputs["v"][..., 7, 3], inputs["v"][..., 298, 64] = np.inf, -np.inf
    spoilt = run(plan, inputs)["o"].astype(np.float64)
    assert np.all(spoilt[..., 3] == np.inf)
    assert np.all(spoilt[..., 64] == -np.inf)
    others = np.setdiff1d(np.arange(128), (3, 64))
    np.testing.assert_allclose(spoilt[..., others], finite[..., others], rtol=2**-7, atol=2**-9)
