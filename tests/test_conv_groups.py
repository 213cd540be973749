"""Convolutions of narrow groups in AMX tiles, which are computed in software."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import slow_but
from conv_amx import ARCH, SEED, amx_catalog, assert_right_for_any_number_of_threads, chosen, computed, problem_of  # noqa: F401 - a fixture
from conv_problems import CONV

from catalog.ops.conv.problem import ConvProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs

PIPELINE = "host_groups_amx"
DIRECTIONS = ("forward", "bwd_data", "bwd_weight")
PROBLEMS: dict[str, dict[str, Any]] = {
    "groups of 2": {"n": 2, "g": 24, "c": 48, "size": (11, 13), "pad": (1, 1)},
    "groups of 4": {"n": 2, "g": 16, "c": 64, "size": (14, 15), "pad": (1, 1)},
    "groups of 8": {"n": 3, "g": 5, "c": 40, "size": (9, 7), "pad": (1, 1)},
    "groups of 16": {"n": 2, "g": 3, "c": 48, "size": (7, 7), "pad": (1, 1)},
    "groups of 32": {"n": 2, "g": 2, "c": 64, "size": (8, 9), "pad": (1, 1)},
    "strides": {"n": 2, "g": 8, "c": 64, "size": (15, 14), "pad": (1, 1), "stride": (2, 2)},
    "strides without padding": {"n": 1, "g": 4, "c": 64, "size": (12, 17), "stride": (2, 1)},
    "taps far apart": {"n": 1, "g": 8, "c": 64, "size": (12, 11), "pad": (2, 3), "dilation": (2, 3)},
    "more zeros than taps meet": {"n": 1, "g": 8, "c": 32, "size": (6, 5), "pad": (4, 5)},
    "other filters": {"n": 2, "g": 8, "c": 32, "size": (9, 10), "filter": (5, 4), "pad": (2, 1)},
    "parts of rows": {"n": 1, "g": 4, "c": 32, "size": (3, 300), "pad": (1, 1)},
    "one axis": {"n": 2, "g": 8, "c": 64, "size": (150,), "filter": (3,), "pad": (1,)},
    "planes": {"n": 1, "g": 4, "c": 32, "size": (3, 5, 6), "filter": (3, 3, 3), "pad": (1, 1, 1), "stride": (2, 1, 1)},
}


def grouped(direction: str, **fields: Any) -> ConvProblem:
    """A problem with as many output as input channels."""
    return problem_of(direction, **fields, k=fields["c"])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("of", slow_but(["groups of 8", "strides"], PROBLEMS))
def test_results_are_right_for_any_number_of_threads(
    catalog: Catalog, of: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = grouped(direction, **PROBLEMS[of])
    assert_right_for_any_number_of_threads(catalog, problem, PIPELINE, monkeypatch)


@pytest.mark.parametrize("width", slow_but([8], [4, 8, 16]))
@pytest.mark.parametrize("direction", ["forward", "bwd_data"])
def test_elements_that_are_not_finite_reach_only_results_that_see_them(
    catalog: Catalog, direction: str, width: int
) -> None:
    """Zeros among the weights meet other rows and, in groups of 4, other groups."""
    problem = grouped(direction, n=2, g=64 // width, c=64, size=(9, 10), pad=(1, 1))
    inputs = make_inputs(problem, SEED)
    [made] = problem.made
    image = inputs["input" if direction == "forward" else "output"]
    last = image.dtype.type
    image[0, 4, 5, 3], image[1, 0, 0, 63] = last(np.nan), last(np.inf)
    result = computed(catalog, problem, PIPELINE, inputs).astype(np.float32)
    met = np.zeros(result.shape, bool)
    met[0, 3:6, 4:7, :width] = met[1, :2, :2, -width:] = True
    np.testing.assert_array_equal(np.isfinite(result), ~met)
    image[0, 4, 5, 3] = image[1, 0, 0, 63] = last(0)
    expected, allowed = CONV.reference(problem, inputs)[made], CONV.tolerances(problem, inputs)[made]
    assert allowed.used(np.where(met, expected, result), expected) <= 1


def test_elements_that_are_not_finite_reach_no_weights_of_other_groups(catalog: Catalog) -> None:
    """Several groups are multiplied with each other."""
    problem = grouped("bwd_weight", n=2, g=8, c=64, size=(9, 11), pad=(1, 1))
    inputs = make_inputs(problem, SEED)
    last = inputs["input"].dtype.type
    inputs["input"][1, 4, 5, 11] = last(np.inf)
    result = computed(catalog, problem, PIPELINE, inputs).astype(np.float32)
    met = np.zeros(result.shape, bool)
    met[8:16, :, :, 3] = True
    np.testing.assert_array_equal(np.isfinite(result), ~met)


def test_narrow_groups_choose_these_kernels(catalog: Catalog) -> None:
    def pipeline(direction: str, width: int, **fields: Any) -> str:
        of_groups = {"n": 2, "g": 32, "c": 32 * width, "size": (14, 14), "pad": (1, 1)} | fields
        return chosen(catalog, grouped(direction, **of_groups))

    for direction in DIRECTIONS:
        assert [pipeline(direction, width) == PIPELINE for width in (2, 4, 8, 16)] == [False, True, True, True]
        assert pipeline(direction, 8, stride=(2, 2)) == PIPELINE
        others: tuple[dict[str, Any], ...] = ({"layout": "ngchw"}, {"dtype": "fp16"}, {"dtype": "fp32"})
        assert PIPELINE not in [pipeline(direction, 8, **fields) for fields in others]


@pytest.mark.parametrize(
    "fields", [{"c": 24, "g": 3}, {"c": 96, "g": 8}, {"c": 128, "g": 2}, {"c": 64, "k": 128, "g": 8}]
)
def test_other_groups_are_refused_with_a_reason(catalog: Catalog, fields: dict[str, int]) -> None:
    problem = problem_of("forward", **{"n": 1, "k": fields["c"], "size": (8, 8)} | fields)
    assert chosen(catalog, problem) != PIPELINE
    steps, _ = catalog.narrowing(problem, arch=ARCH)
    assert any("groups of 2, 4, 8, 16 or 32 input" in str(step) for step in steps)
