"""Convolutions in AMX tiles that are computed in software: a catalog, and what its rows compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import amx
import numpy as np
import pytest
from conv_problems import CONV, rows

from catalog.ops.conv.problem import ConvProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host.device import cpu_features, host_archs, why_unavailable
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import Array
from catalog.settings import settings

SEED = 2026
ARCH = "x86_64_v4"


@pytest.fixture(scope="module", name="catalog")
def amx_catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """A catalog of this CPU's rows, as if it had AMX; the test is skipped without AVX512-BF16."""
    if ARCH not in host_archs() or why_unavailable(ARCH) or not amx.PAIRS["host_amx"] - amx.TILES <= cpu_features():
        pytest.skip("this CPU has no AVX512-BF16")
    folder = tmp_path_factory.mktemp("amx")
    with pytest.MonkeyPatch.context() as patch, Catalog(folder / "catalog.db") as catalog:
        amx.pretend("host_amx", folder, patch)
        catalog.populate(ARCH, operation="conv")
        yield catalog
    settings.cache_clear()


def problem_of(direction: str, **fields: Any) -> ConvProblem:
    """A problem in bf16, by default with a filter of 3 x 3."""
    return ConvProblem(**{"direction": direction, "filter": (3, 3), "dtype": "bf16"} | fields)


def computed(catalog: Catalog, problem: ConvProblem, pipeline: str, inputs: Mapping[str, Array]) -> Array:
    """What the row of a pipeline for a problem in bf16 computes."""
    wanted = (
        f"pipeline = '{pipeline}' AND dtype = 'bf16' AND ndim = {problem.ndim} AND direction = '{problem.direction}'"
    )
    [made] = problem.made
    return catalog.plan(problem, rows(catalog, wanted, ARCH)[0]).run(dict(inputs)).outputs[made]


def chosen(catalog: Catalog, problem: ConvProblem) -> str:
    """The pipeline of the row that is selected."""
    return str(catalog.select(problem, arch=ARCH).kernels[0].algorithm.pipeline.value)


def assert_right_for_any_number_of_threads(
    catalog: Catalog, problem: ConvProblem, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of a pipeline is within its tolerance, and computes the same bits with 1, 3 and 16 threads."""
    inputs = make_inputs(problem, SEED)
    [made] = problem.made
    result = computed(catalog, problem, pipeline, inputs)
    expected, allowed = CONV.reference(problem, inputs)[made], CONV.tolerances(problem, inputs)[made]
    assert allowed.used(result, expected) <= 1
    for threads in (1, 3, 16):
        monkeypatch.setenv("CATALOG_NUM_THREADS", str(threads))
        settings.cache_clear()
        other = computed(catalog, problem, pipeline, inputs)
        np.testing.assert_array_equal(other.view(np.uint16), result.view(np.uint16))
