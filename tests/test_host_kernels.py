"""Host forward kernels: against the float64 reference and against PyTorch.

Problems are drawn from a fixed seed, and a failure names its problem: ``make_inputs(problem, SEED)`` are the tensors.
``pytest -rP`` shows how large the errors were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from conftest import missing

from catalog.build.builder import Artifact
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host import HOST_ARCHES, HostDevice, why_unavailable
from catalog.runtime.plan import Plan, Services
from catalog.runtime.reference import attention_fwd, max_error, tolerance
from catalog.runtime.tensors import Array, make_inputs, make_outputs
from catalog.schema.fields import Mask, Mode
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem

SEED = 2026
ARCHES = tuple(arch for arch in HOST_ARCHES if why_unavailable(arch) is None)
DTYPES = ("fp32", "fp16", "bf16")
SEQLENS = (0, 1, 2, 31, 33, 127, 257, 600)
WINDOWS = ((0, 0), (5, 0), (0, 3), (31, 33), (-1, 7), (64, -1), (300, 2), (2**31 - 1, 0))

# Problems of one line run on one row: the kernels' own head dims are exact, the others padded.
HEAD_DIMS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((64, 64),),
    ((40, 40), (64, 33), (48, 64)),
    ((128, 128),),
    ((72, 72), (65, 96)),
    ((192, 128),),
    ((1, 1), (31, 7), (32, 5)),
    ((32, 32),),
    ((136, 104), (192, 1)),
    ((96, 96),),
    ((256, 129), (200, 200)),
    ((256, 256),),
    ((100, 128), (128, 97)),
)


TILE_HEAD_DIMS = tuple(HEAD_DIMS[index] for index in (0, 11, 6, 3, 4, 9))
"""Each head dim of the kernels, exact and padded in turn."""


# Problems and the memory that their tensors lie in


@dataclass(frozen=True)
class Draw:
    """What problems of one kernel have in common; the rest is drawn."""

    dtype: str
    mode: Mode
    mask: Mask
    lse: bool
    head_dims: tuple[tuple[int, int], ...]

    def problem(self, rng: random.Random) -> Problem:
        hdim_q, hdim_v = rng.choice(self.head_dims)
        nhead_k = rng.choice((1, 2, 3))
        fields = {
            "dtype": self.dtype,
            "lse": self.lse,
            "hdim_q": hdim_q,
            "hdim_v": hdim_v,
            "nhead_k": nhead_k,
            "nhead_q": nhead_k * rng.choice((1, 1, 2, 4)),
            "scale": rng.choice((None, None, 0.3 * hdim_q**-0.5, 2 * hdim_q**-0.5)),
            **self._mask(rng),
            **(self._packed(rng) if self.mode is Mode.GROUP else self._dense(rng)),
        }
        return Problem(**fields)

    def _mask(self, rng: random.Random) -> dict[str, Any]:
        corner = rng.choice(("top_left", "bottom_right"))
        match self.mask:
            case Mask.NO:
                return {}
            case Mask.CAUSAL:
                return {"mask": corner}
            case _:
                return {"mask": corner, "window": rng.choice(WINDOWS)}

    def _dense(self, rng: random.Random) -> dict[str, Any]:
        seqlen = rng.choice(SEQLENS)
        return {
            "batch": rng.choice((1, 1, 2, 3)),
            "seqlen_q": seqlen,
            "seqlen_k": rng.choice((seqlen, *SEQLENS)),
            "layout": rng.choice(("bhsd", "bshd")),
        }

    def _packed(self, rng: random.Random) -> dict[str, Any]:
        lengths = tuple(rng.choices(SEQLENS, k=rng.choice((1, 2, 4))))
        return {"seqlens_q": lengths, "seqlens_k": rng.choice((lengths, tuple(rng.sample(lengths, len(lengths)))))}


DRAWS = tuple(
    Draw(*signature, HEAD_DIMS[index * 5 % len(HEAD_DIMS)])
    for index, signature in enumerate(product(DTYPES, Mode, (Mask.NO, Mask.CAUSAL, Mask.GENERIC), (False, True)))
)


def problems(draws: tuple[Draw, ...], each: int) -> list[Problem]:
    def rng(draw: Draw, index: int) -> random.Random:
        return random.Random(f"{SEED} {draw} {index}")  # noqa: S311

    return [draw.problem(rng(draw, index)) for draw in draws for index in range(each)]


def gapped(tensor: Array) -> Array:
    """Every other place of a larger array, at odd offsets; NaN in between."""
    storage = np.full((*(2 * extent + 1 for extent in tensor.shape[:-1]), tensor.shape[-1] + 2), np.nan, tensor.dtype)
    view = storage[(*(slice(1, -1, 2) for _ in tensor.shape[:-1]), slice(1, -1))]
    view[...] = tensor
    return view


def backwards(tensor: Array) -> Array:
    """Negative strides."""
    axes = tuple(range(tensor.ndim - 1))
    return np.flip(np.flip(tensor, axes).copy(), axes)


def fused(problem: Problem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Views of one array of a token's q, k and v heads; with equal head counts, (b, s, 3, h, d)."""

    def swap(tensor: Array) -> Array:
        return tensor if problem.mode is Mode.GROUP or problem.layout == "bshd" else tensor.swapaxes(1, 2)

    parts = np.cumsum([problem.nhead_q, problem.nhead_k])
    storage = np.concatenate([swap(tensor) for tensor in inputs.values()], axis=-2)
    return {name: swap(view) for name, view in zip(inputs, np.split(storage, parts, axis=-2), strict=True)}


def stored(problem: Problem, index: int) -> dict[str, Array]:
    """The problem's inputs: contiguous, gapped, backwards, or fused where they can be."""
    inputs = make_inputs(problem, SEED)
    same_tokens = problem.seqlens_q == problem.seqlens_k and problem.seqlen_q == problem.seqlen_k
    if same_tokens and problem.hdim_q == problem.hdim_v and index % 2:
        return fused(problem, inputs)
    change: Callable[[Array], Array] = (np.asarray, gapped, backwards)[index % 3]
    return {name: change(tensor) for name, tensor in inputs.items()}


def test_inputs_are_stored_in_every_way() -> None:
    problem = Problem(batch=2, nhead_q=4, nhead_k=2, seqlen_q=3, hdim_q=8, dtype="bf16")
    ways = [stored(problem, index) for index in range(6)]
    for way in ways:
        for name, tensor in make_inputs(problem, SEED).items():
            np.testing.assert_array_equal(way[name], tensor)
    assert len({way["k"].strides for way in ways}) == 4
    assert ways[1]["q"].base is ways[1]["v"].base


# Running


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """A catalog to run from; it compiles each kernel once for all tests of this file."""
    catalog = Catalog(tmp_path_factory.mktemp("host") / "catalog.db")
    yield catalog
    catalog.close()


def plan_of(catalog: Catalog, problem: Problem, kernel: Kernel) -> Plan:
    """A plan that runs this kernel and no other."""
    return Plan(problem, kernel.arch, (kernel,), Services(catalog.build, lambda: (kernel,), catalog.host))


def build(catalog: Catalog, kernels: list[Kernel]) -> tuple[Artifact, ...]:
    """Each kernel's library, built in parallel."""
    unique = {kernel.id: kernel for kernel in kernels}
    report = catalog.builder.build_many(unique.values())
    assert not report.failures
    libraries = {artifact.kernel_id: artifact for artifact in report.artifacts}
    return tuple(libraries[kernel.id] for kernel in kernels)


@dataclass
class Errors:
    """Largest errors by tensor, and the problems whose errors exceed the tolerance."""

    largest: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, plan: Plan, outputs: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
        self.count += 1
        for name in outputs.keys() & expected.keys():
            error = max_error(outputs[name], expected[name])
            self.largest[name] = max(self.largest.get(name, 0.0), error)
            allowed = tolerance(plan.problem.dtype, name)  # type: ignore[arg-type]
            if not allowed.allows(outputs[name], expected[name]):
                self.wrong.append(f"{name} is off by {error:.2e}: {plan.problem.key} on {plan}")

    def report(self, what: str, record: Callable[[str, object], None]) -> None:
        """Print, and fail if anything is wrong."""
        largest = ", ".join(f"{name} {error:.2e}" for name, error in sorted(self.largest.items(), reverse=True))
        text = f"{self.count} problems, max error {largest}"
        print(f"{what}, seed {SEED}: {text}")
        record(what, text)
        assert not self.wrong, "\n".join(self.wrong)


def expected(problem: Problem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    return dict(zip(("o", "lse"), attention_fwd(problem, **inputs), strict=True))


def run_all(plans: list[Plan]) -> Errors:
    errors = Errors()
    for index, plan in enumerate(plans):
        inputs = stored(plan.problem, index)
        errors.add(plan, plan.run(inputs).outputs, expected(plan.problem, inputs))
    return errors


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_problems(catalog: Catalog, dtype: str, record_property: Callable[[str, object], None]) -> None:
    """Every signature of the dtype, eight problems each, on the selected kernel."""
    draws = tuple(draw for draw in DRAWS if draw.dtype == dtype)
    plans = [catalog.select(problem) for problem in problems(draws, each=8)]
    kernels = [kernel for plan in plans for kernel in plan.kernels]
    assert len({kernel.id for kernel in kernels}) == len(draws)
    build(catalog, kernels)
    run_all(plans).report(dtype, record_property)


@pytest.mark.parametrize("arch", ARCHES)
def test_every_tile(catalog: Catalog, arch: str, record_property: Callable[[str, object], None]) -> None:
    """All alternatives of every head dim, exact and padded in turn, not only the one that is selected."""
    plans = []
    draws = (DRAWS[index * 7 % len(DRAWS)] for index in range(len(TILE_HEAD_DIMS)))
    for draw, head_dims in zip(draws, TILE_HEAD_DIMS, strict=True):
        drawn = problems((replace(draw, head_dims=head_dims),), each=4)
        # One problem's candidates are the others' too: their signature and head dims choose alike.
        tiles = [candidate.kernel for candidate in catalog.candidates(drawn[0], arch=arch, limit=3)]
        assert len({(tile.signature, tile.algorithm.pad_d) for tile in tiles}) == 1
        assert len({tile.algorithm for tile in tiles}) == 3
        plans += [plan_of(catalog, problem, tile) for problem in drawn for tile in tiles]
    build(catalog, [kernel for plan in plans for kernel in plan.kernels])
    run_all(plans).report(arch, record_property)


def torch_attention(torch: Any, problem: Problem, inputs: Mapping[str, Array]) -> Array:
    """O by PyTorch in float64."""

    def sequences(name: str, lengths: tuple[int, ...] | None) -> Any:
        tensor = torch.from_numpy(inputs[name].astype(np.float64))
        if lengths is not None:
            return [part.transpose(0, 1)[None] for part in tensor.split(lengths)]
        return [tensor if problem.layout == "bhsd" else tensor.transpose(1, 2)]

    def attend(q: Any, k: Any, v: Any) -> Any:
        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        visible = None
        if problem.mask == "bottom_right" or problem.window is not None:
            diagonal = seqlen_k - seqlen_q if problem.mask == "bottom_right" else 0
            left, right = problem.window or (-1, 0)
            visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
            visible = visible.tril(diagonal + right) if right >= 0 else visible
            visible = visible.triu(diagonal - left) if left >= 0 else visible
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible,
            is_causal=problem.mask == "top_left" and visible is None,
            scale=problem.softmax_scale,
            enable_gqa=True,
        )

    q, k, v = (sequences(*arguments) for arguments in zip("qkv", lengths_of(problem), strict=True))
    attended = [attend(*tensors) for tensors in zip(q, k, v, strict=True)]
    if problem.mode is Mode.GROUP:
        result = torch.cat([part[0].transpose(0, 1) for part in attended])
    else:
        result = attended[0] if problem.layout == "bhsd" else attended[0].transpose(1, 2)
    return np.asarray(result)


def lengths_of(problem: Problem) -> tuple[tuple[int, ...] | None, ...]:
    return problem.seqlens_q, problem.seqlens_k, problem.seqlens_k


def every_query_sees_a_key(problem: Problem) -> bool:
    """PyTorch does not say what it answers to the others."""
    ones = {name: np.ones(problem.shapes[name], np.float32) for name in ("q", "k", "v")}
    return bool(np.isfinite(attention_fwd(problem, **ones)[1]).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_problems_against_pytorch(
    catalog: Catalog, dtype: str, record_property: Callable[[str, object], None]
) -> None:
    try:
        import torch
    except ImportError:
        missing("PyTorch")
    draws = tuple(draw for draw in DRAWS if draw.dtype == dtype)
    asked = [problem for problem in problems(draws, each=4) if every_query_sees_a_key(problem)]
    plans = [catalog.select(problem) for problem in asked]
    build(catalog, [kernel for plan in plans for kernel in plan.kernels])
    errors = Errors()
    for plan in plans:
        inputs = make_inputs(plan.problem, SEED)
        errors.add(plan, plan.run(inputs).outputs, {"o": torch_attention(torch, plan.problem, inputs)})
    assert errors.count > 20
    errors.report(f"{dtype} against PyTorch", record_property)


# Exact properties

NO_KEY = {
    "no keys": {"seqlen_q": 5, "seqlen_k": 0},
    "no keys, causal": {"seqlen_q": 5, "seqlen_k": 0, "mask": "bottom_right"},
    "more queries than keys": {"seqlen_q": 300, "seqlen_k": 7, "mask": "bottom_right"},
    "window behind the last key": {"seqlen_q": 300, "seqlen_k": 7, "mask": "top_left", "window": (3, 3)},
    "window before the first key": {"seqlen_q": 33, "seqlen_k": 2, "mask": "bottom_right", "window": (4, 1)},
}


@pytest.mark.parametrize("fields", NO_KEY.values(), ids=NO_KEY)
def test_a_query_without_a_key_gives_exactly_zero(catalog: Catalog, fields: dict[str, Any]) -> None:
    problem = Problem(batch=2, nhead_q=4, nhead_k=2, hdim_q=64, dtype="fp16", lse=True, **fields)
    inputs = make_inputs(problem, SEED)
    o, lse = catalog.select(problem).run(inputs).outputs.values()
    blind = np.isneginf(attention_fwd(problem, **inputs)[1])
    assert blind.any()
    np.testing.assert_array_equal(np.isneginf(lse), blind)
    assert not np.count_nonzero(o[blind])
    assert np.isfinite(lse[~blind]).all()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_number_is_read_and_rounded_exactly(catalog: Catalog, dtype: str) -> None:
    """Zero queries make O the mean of two keys' values, exact in float32: what is left is rounding to nearest even."""
    problem = Problem(batch=1, nhead_q=1024, seqlen_q=5, seqlen_k=2, hdim_q=64, dtype=dtype)
    inputs = make_inputs(problem, SEED)
    numbers = np.random.default_rng(SEED).permuted(np.tile(np.arange(2**16, dtype=np.uint16), (2, 1)), axis=1)
    inputs["q"][...] = 0
    inputs["v"].view(np.uint16)[...] = numbers.reshape(2, 1024, 64).swapaxes(0, 1)
    first, second = inputs["v"].astype(np.float32)[0].swapaxes(0, 1)
    with np.errstate(all="ignore"):
        mean = ((first + second) * np.float32(0.5)).astype(inputs["v"].dtype)
    o = catalog.select(problem).run(inputs).outputs["o"][0].astype(np.float32)
    np.testing.assert_array_equal(o, np.broadcast_to(mean.astype(np.float32)[:, np.newaxis], o.shape))


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


@pytest.mark.parametrize("num_threads", [1, 2])
def test_results_are_the_same_in_every_run(catalog: Catalog, num_threads: int) -> None:
    for fields in ({"mask": "causal"}, {"mask": "window", "window": (100, 0)}):
        problem = Problem(**FOUR_HEADS, seqlen_q=600, **fields)
        [library] = build(catalog, list(catalog.select(problem).kernels))
        first = bits(library, problem, num_threads)
        assert all(bits(library, problem, num_threads) == first for _ in range(5))


@pytest.mark.parametrize(
    "fields", [{"mask": "causal"}, {"mask": "window", "window": (100, 0)}], ids=["causal", "window"]
)
def test_results_do_not_depend_on_the_number_of_threads(catalog: Catalog, fields: dict[str, Any]) -> None:
    [kernel] = catalog.select(Problem(**FOUR_HEADS, seqlen_q=1, **fields)).kernels
    [library] = build(catalog, [kernel])
    for tiles, extra in product((1, 2, 3), (0, 1)):
        problem = Problem(**FOUR_HEADS, seqlen_q=tiles * kernel.algorithm.tile_m0 + extra, seqlen_k=600, **fields)
        single, *others = [bits(library, problem, num_threads) for num_threads in (1, 2, 3)]
        assert all(other == single for other in others), problem.key
