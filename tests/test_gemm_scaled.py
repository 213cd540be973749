"""Products of 8-bit A and B with scales: the definition, the problems, and kernels of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from catalog.errors import ProblemError, TensorError
from catalog.ops import operation
from catalog.ops.gemm.problem import GemmProblem
from catalog.ops.gemm.traits import ONE_PRODUCT, Family
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.schema.lineage import Lineage

SEED = 2026
GEMM = operation("gemm")


def dequantised(problem: GemmProblem, inputs: dict[str, Any]) -> Any:
    """A B in float64, of matrices whose elements are scaled one by one; ``rrr`` without a batch."""
    a, b = (inputs[name].astype(np.float64) for name in ("a", "b"))
    scale_a, scale_b = inputs["scale_a"], inputs["scale_b"]
    in_blocks = problem.scales == "block"
    for i, k in np.ndindex(a.shape):
        a[i, k] *= scale_a[i, k // 128] if in_blocks else scale_a[i]
    for k, j in np.ndindex(b.shape):
        b[k, j] *= scale_b[j // 128, k // 128] if in_blocks else scale_b[j]
    return a @ b


# The definition


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_the_reference_scales_each_element(dtype: str, scales: str) -> None:
    problem = GemmProblem(m=3, n=130, k=200, dtype=dtype, layout="rrr", scales=scales, dtype_c="fp32")
    inputs = make_inputs(problem, SEED)
    expected, allowed = GEMM.reference(problem, inputs)["c"], GEMM.tolerances(problem, inputs)["c"]
    by_hand = dequantised(problem, inputs)
    np.testing.assert_allclose(expected, by_hand, rtol=1e-12)
    assert allowed.allows(by_hand.astype(np.float32), expected)
    inputs["scale_b"][-1] *= 1.001
    assert not allowed.allows(GEMM.reference(problem, inputs)["c"], expected)


@pytest.mark.parametrize(("scales", "axis"), [("row", "m"), ("row", "k"), ("block", "m")])
def test_groups_have_the_scales_of_their_matrices(scales: str, axis: str) -> None:
    groups = (3, 0, 140)
    sizes: dict[str, Any] = {"m": 5, "n": 130, "k": 150} | {axis: 143, "groups": groups, "group_axis": axis}
    problem = GemmProblem(**sizes, dtype="fp8", layout="rrr", scales=scales)
    inputs = make_inputs(problem, SEED)
    assert inputs["scale_b"].shape[:1] == ((3,) if axis == "m" else (130,))
    expected = GEMM.reference(problem, inputs)["c"]
    for i, (start, end) in enumerate(((0, 3), (3, 3), (3, 143))):
        part: dict[str, Any] = dict(inputs)
        if axis == "m":
            part |= {"a": inputs["a"][start:end], "scale_a": inputs["scale_a"][start:end]}
            part |= {"b": inputs["b"][i], "scale_b": inputs["scale_b"][i]}
        else:
            part |= {"a": inputs["a"][:, start:end], "b": inputs["b"][start:end]}
        one = problem.model_copy(update={"groups": None, "group_axis": "m", axis: end - start})
        of_group = expected[start:end] if axis == "m" else expected[i]
        np.testing.assert_allclose(of_group, dequantised(one, part), rtol=1e-12)


def test_shapes_types_and_keys() -> None:
    """Problems without scales have the keys that they always had; the usual type of C is left out."""
    plain = GemmProblem(m=5, n=7, k=9, dtype="fp8", dtype_c="fp16")
    assert plain.key == '{"dtype":"fp8","k":9,"layout":"rcr","m":5,"n":7,"operation":"gemm"}'
    assert plain == GemmProblem.of_key(plain.key)
    block = GemmProblem(batch=2, m=5, n=129, k=256, dtype="int8", scales="block", dtype_c="bf16", bias=True)
    assert block == GemmProblem.of_key(block.key)
    assert (block.shapes["scale_a"], block.shapes["scale_b"]) == ((2, 5, 2), (2, 2, 2))
    assert (block.tensors["bias"].element, block.tensors["c"].element) == ("bfloat16", "bfloat16")
    assert len(block.coordinates) == len(plain.coordinates) == 3
    assert GemmProblem(m=5, n=7, k=9, dtype="int8", scales="row").type_of_c == "fp16"


@pytest.mark.parametrize("family", ["rowwise", "grouped_blockscale"])
def test_names_state_scales_and_an_unusual_type_of_c(family: str) -> None:
    grammar = GEMM.kernel.grammar(family, Lineage("gemm", "x86_64_v4", "native", "native", "generic"))
    usual = f"gemm_fp8_rcr_host_panel_b96x256x1024_w6x64_{family}_x86_64_v4"
    other = usual.replace(family, f"{family}_bf16")
    for name, dtype_c in ((usual, "fp16"), (other, "bf16")):
        parsed = grammar.parse(name)
        assert parsed is not None
        assert (parsed["family"], parsed["dtype_c"], grammar.name(parsed)) == (family, dtype_c, name)


def test_the_family_follows_from_groups_and_scales() -> None:
    fields: dict[str, Any] = {"n": 8, "k": 8, "dtype": "fp8"}
    assert [GEMM.main_stage(GemmProblem(m=8, scales=scales, **fields)) for scales in ONE_PRODUCT] == [
        Family.UNIVERSAL,
        Family.ROWWISE,
        Family.BLOCKSCALE,
    ]
    assert GEMM.main_stage(GemmProblem(groups=(3, 5), scales="row", **fields)) == Family.GROUPED_ROWWISE


# Bad calls


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "bf16", "scales": "row"}, "scales=row: bf16 has no scales"),
        ({"scales": "column"}, "scales='column' is not allowed"),
        ({"scales": "row", "num_d": 1, "elementwise": "MultiDAdd"}, "scales cannot be combined with D tensors"),
        (
            {"scales": "block", "k": None, "groups": (8, 8), "group_axis": "k"},
            "groups along k cannot have scales of blocks",
        ),
        ({"dtype": "int8", "dtype_c": "bf16"}, "dtype_c=bf16: C of int8 is int32"),
        ({"dtype": "bf16", "dtype_c": "fp32"}, "dtype_c=fp32: C of bf16 is bf16"),
        ({"dtype": "int8", "scales": "row", "dtype_c": "int32"}, "dtype_c=int32: C of int8 is fp16 or bf16 or fp32"),
        ({"dtype_c": "fp64"}, "dtype_c='fp64' is not allowed"),
    ],
)
def test_a_wrong_problem_is_a_message(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        GemmProblem(**{"m": 16, "n": 16, "k": 16, "dtype": "fp8", **fields})


def test_integers_with_scales_take_every_factor_and_activation() -> None:
    fields: dict[str, Any] = {"alpha": 0.5, "beta": 0.25, "activation": "gelu"}
    assert GemmProblem(m=4, n=4, k=4, dtype="int8", scales="row", **fields).type_of_c == "fp16"


def test_a_scale_that_is_not_finite_is_a_message() -> None:
    problem = GemmProblem(m=4, n=6, k=200, dtype="fp8", scales="block")
    inputs = make_inputs(problem, SEED)
    inputs["scale_a"][3, 1] = np.nan
    with pytest.raises(TensorError, match=r"scale_a\[3, 1\] is nan: scales must be finite"):
        GEMM.check_values(problem, inputs)


# Kernels of the host, of which others are compiled in test_gemm_host.py


@pytest.mark.slow
def test_a_scale_that_is_not_finite_is_refused_in_every_launch(tmp_path: Path) -> None:
    """By the kernel: PyTorch's repeated calls skip the checks of the first one."""
    torch = pytest.importorskip("torch")
    with Catalog(tmp_path / "catalog.db") as catalog:
        catalog.populate("host", operation="gemm")
        problem = GemmProblem(m=3, n=70, k=300, dtype="fp8", scales="block", dtype_c="fp32")
        plan, inputs = catalog.select(problem), make_inputs(problem, SEED)
        scales = {name: torch.from_numpy(inputs[name]) for name in ("scale_a", "scale_b")}
        matrices = {name: torch.from_numpy(inputs[name].view(np.uint8)) for name in "ab"}
        given = {name: matrix.view(torch.float8_e4m3fn) for name, matrix in matrices.items()} | scales
        expected, allowed = GEMM.reference(problem, inputs)["c"], GEMM.tolerances(problem, inputs)["c"]
        for _ in range(2):
            assert allowed.allows(plan.enqueue(given)["c"].numpy(), expected)
        scales["scale_b"][0, 2] = torch.inf
        for _ in range(2):
            with pytest.raises(TensorError, match=r"scale_b\[0, 2\] is inf"):
                plan.enqueue(given)
