"""Gradients of weights from shifted lines of pixels, whose AMX tiles are computed in software."""

from __future__ import annotations

from typing import Any

import conv_amx
import numpy as np
import pytest
from conv_amx import SEED, amx_catalog, assert_right_for_any_number_of_threads, chosen, computed  # noqa: F401 - a fixture
from conv_problems import CONV

from catalog.ops.conv.problem import ConvProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import Array

PROBLEMS: dict[str, dict[str, Any]] = {
    "rows of several chunks": {"n": 2, "c": 64, "k": 64, "size": (56, 56), "pad": (1, 1)},
    "chunks of several images": {"n": 9, "c": 33, "k": 70, "size": (7, 7), "pad": (1, 1)},
    "one position for each image": {"n": 40, "c": 16, "k": 16, "size": (3, 3)},
    "parts of rows": {"n": 1, "c": 16, "k": 16, "size": (20, 150), "pad": (1, 1)},
    "no zeros around": {"n": 2, "c": 48, "k": 130, "size": (17, 29)},
    "more zeros than taps meet": {"n": 2, "c": 17, "k": 5, "size": (13, 12), "pad": (5, 7)},
    "a row of taps": {"n": 2, "c": 16, "k": 40, "size": (57, 55), "filter": (1, 3), "pad": (0, 1)},
    "many taps": {"n": 2, "c": 40, "k": 16, "size": (19, 23), "filter": (5, 5), "pad": (2, 2)},
    "groups": {"n": 3, "c": 96, "k": 66, "g": 3, "size": (14, 14), "pad": (1, 1)},
    "several tiles": {"n": 1, "c": 160, "k": 140, "size": (9, 9), "pad": (1, 1)},
    "phases": {"n": 2, "c": 32, "k": 32, "size": (57, 56), "pad": (1, 1), "stride": (2, 2)},
    "distant taps": {"n": 2, "c": 32, "k": 32, "size": (31, 40), "pad": (2, 6), "stride": (3, 2), "dilation": (2, 3)},
    "taps too far apart": {"n": 1, "c": 16, "k": 16, "size": (9, 900), "pad": (0, 3800), "dilation": (1, 4200)},
}


def problem_of(**fields: Any) -> ConvProblem:
    return conv_amx.problem_of("bwd_weight", **fields)


def gradient(catalog: Catalog, problem: ConvProblem, inputs: dict[str, Array]) -> Array:
    return computed(catalog, problem, "host_shift_amx", inputs)


@pytest.mark.parametrize("of", PROBLEMS)
def test_gradients_are_right_for_any_number_of_threads(
    catalog: Catalog, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(**PROBLEMS[of])
    assert_right_for_any_number_of_threads(catalog, problem, "host_shift_amx", monkeypatch)


@pytest.mark.parametrize("pad", [0, 1])
def test_elements_that_are_not_finite_reach_no_other_taps(catalog: Catalog, pad: int) -> None:
    """Zeros between the gradients meet pixels that no gradient meets in that tap."""
    problem = problem_of(n=2, c=16, k=33, size=(9, 11), pad=(pad, pad))
    inputs = make_inputs(problem, SEED)
    last = inputs["input"].dtype.type
    inputs["input"][0, 4, 10, 3], inputs["input"][1, 0, 0, 7] = last(np.nan), last(np.inf)
    result = gradient(catalog, problem, inputs).astype(np.float32)
    numbers = {**inputs, "input": np.nan_to_num(inputs["input"].astype(np.float32), posinf=0).astype(last)}
    expected, allowed = CONV.reference(problem, numbers)["weight"], CONV.tolerances(problem, numbers)["weight"]
    met = np.zeros(result.shape, bool)
    met[:, :, 2 - pad :, 3] = met[:, : 1 + pad, : 1 + pad, 7] = True
    np.testing.assert_array_equal(np.isfinite(result), ~met)
    assert allowed.used(np.where(met, expected, result), expected) <= 1


def test_filters_of_several_taps_choose_these_kernels(catalog: Catalog) -> None:
    def pipeline(**fields: Any) -> str:
        return chosen(catalog, problem_of(**{"n": 2, "c": 64, "k": 64, "size": (14, 14), "pad": (1, 1)} | fields))

    assert pipeline() == pipeline(stride=(2, 2)) == pipeline(size=(14,), filter=(3,), pad=(1,)) == "host_shift_amx"
    others: tuple[dict[str, Any], ...] = ({"filter": (1, 1)}, {"c": 3}, {"layout": "ngchw"}, {"dtype": "fp16"})
    assert [pipeline(**fields) for fields in others] == ["host_amx"] * 4
