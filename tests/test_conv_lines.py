"""Convolutions whose AMX tiles are loaded from lines of pixels; the tiles are computed in software."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conv_amx import SEED, amx_catalog, assert_right_for_any_number_of_threads, chosen, computed, problem_of  # noqa: F401 - a fixture
from conv_problems import CONV

from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs

PIPELINE = "host_lines_amx"
PROBLEMS: dict[str, dict[str, Any]] = {
    "a first layer": {"n": 2, "c": 3, "k": 64, "size": (57, 40), "filter": (7, 7), "stride": (2, 2), "pad": (3, 3)},
    "zeros shared by rows": {"n": 2, "c": 64, "k": 40, "size": (23, 30), "pad": (1, 1)},
    "no zeros around": {"n": 2, "c": 33, "k": 130, "size": (17, 29)},
    "more zeros than taps meet": {"n": 1, "c": 17, "k": 5, "size": (13, 12), "pad": (5, 7)},
    "one tap among zeros": {"n": 2, "c": 5, "k": 7, "size": (6, 9), "filter": (1, 1), "pad": (2, 2)},
    "parts of rows": {"n": 1, "c": 8, "k": 16, "size": (5, 700), "pad": (1, 1)},
    "several tiles of channels": {"n": 1, "c": 40, "k": 300, "size": (9, 9), "pad": (1, 1)},
    "groups": {"n": 2, "c": 99, "k": 66, "g": 3, "size": (14, 15), "pad": (1, 1)},
    "phases": {"n": 1, "c": 32, "k": 32, "size": (31, 40), "pad": (2, 6), "stride": (3, 2), "dilation": (2, 3)},
    "one axis": {"n": 2, "c": 24, "k": 48, "size": (1100,), "filter": (5,), "pad": (2,)},
    "planes": {
        "n": 1,
        "c": 20,
        "k": 33,
        "size": (5, 9, 11),
        "filter": (3, 3, 3),
        "pad": (1, 1, 1),
        "stride": (2, 1, 1),
    },
    "lines too large": {"n": 1, "c": 16, "k": 16, "size": (9, 900), "pad": (4200, 0), "dilation": (4200, 1)},
}


@pytest.mark.parametrize("direction", ["forward", "bwd_data"])
@pytest.mark.parametrize("of", PROBLEMS)
def test_results_are_right_for_any_number_of_threads(
    catalog: Catalog, of: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(direction, **PROBLEMS[of])
    assert_right_for_any_number_of_threads(catalog, problem, PIPELINE, monkeypatch)


@pytest.mark.parametrize("direction", ["forward", "bwd_data"])
def test_elements_that_are_not_finite_reach_only_results_that_see_them(catalog: Catalog, direction: str) -> None:
    """Runs that are not whole tiles end among other elements, which meet zeros."""
    problem = problem_of(direction, n=2, c=5, k=5, size=(13, 17), pad=(1, 1))
    inputs = make_inputs(problem, SEED)
    [made] = problem.made
    image = inputs["input" if direction == "forward" else "output"]
    last = image.dtype.type
    image[0, 4, 9, 3], image[1, 0, 0, 4] = last(np.nan), last(np.inf)
    result = computed(catalog, problem, PIPELINE, inputs).astype(np.float32)
    met = np.zeros(result.shape, bool)
    met[0, 3:6, 8:11] = met[1, :2, :2] = True
    np.testing.assert_array_equal(np.isfinite(result), ~met)
    image[0, 4, 9, 3] = image[1, 0, 0, 4] = last(0)
    expected, allowed = CONV.reference(problem, inputs)[made], CONV.tolerances(problem, inputs)[made]
    assert allowed.used(np.where(met, expected, result), expected) <= 1


def test_wide_images_choose_these_kernels(catalog: Catalog) -> None:
    def pipeline(direction: str = "forward", **fields: Any) -> str:
        return chosen(catalog, problem_of(direction, **{"n": 2, "c": 64, "k": 64, "size": (56, 56)} | fields))

    first_layer = {"c": 3, "size": (224, 224), "filter": (7, 7), "stride": (2, 2), "pad": (3, 3)}
    assert pipeline() == pipeline("bwd_data") == pipeline(**first_layer) == PIPELINE
    others: tuple[dict[str, Any], ...] = ({"filter": (1, 1)}, {"c": 512}, {"size": (9, 9)}, {"stride": (2, 2)})
    assert [pipeline(**fields) for fields in others] == ["host_amx"] * 4
