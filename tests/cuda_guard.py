"""Guarded first runs on a real GPU of arch sm_90, of kernels that really fail: make test-cuda."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import command
import pytest
from cuda_gpu import ARCH, build, need_gpu, wrong

from catalog.build.builder import Builder
from catalog.build.describe import describe
from catalog.build.targets import cuda_target
from catalog.errors import QuarantinedError
from catalog.ops.attention.problem import Problem
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.runtime.measure import StopRule
from catalog.runtime.tune import TuneOptions, tune
from catalog.schema.kernel import Kernel
from catalog.settings import settings

need_gpu()

PROBLEM = Problem(batch=2, nhead_q=4, nhead_k=2, seqlen_q=300, hdim_q=128, dtype="bf16", mask="causal")

SOURCE = """\
#include "abi/catalog_abi.h"
#include <cuda_runtime.h>
#define EXPORT extern "C" __attribute__((visibility("default")))
__global__ void flawed(volatile char* o) {{ {flaw} }}
EXPORT const char* catalog_describe() {{ return {description}; }}
EXPORT int32_t catalog_workspace_size(const catalog_args* args, catalog_workspace* size) {{
    *size = {{args->num_splits}};
    return 0;
}}
EXPORT int32_t catalog_launch(const catalog_args* args, void* stream) {{
    if (args->batch < 0) return 2;  // asked for its ABI
    flawed<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<char*>(args->o.data));
    return cudaGetLastError() == cudaSuccess ? 0 : 4;
}}
"""
FLAWS = {
    "illegal address": ("o[1ll << 46] = 1;", "used an illegal address"),
    "endless loop": ("for (;;) o[0] = 1;", "did not end within 1 s"),
    "wrong result": ("o[threadIdx.x] = 64;", "gave a wrong result: o has an error of"),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """The first of the static order."""
    with Catalog(tmp_path_factory.mktemp("cuda") / "catalog.db") as catalog:
        catalog.populate(ARCH)
        return [one.kernel for one in catalog.candidates(PROBLEM, arch=ARCH, limit=5, static=True)]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, str]], Catalog]]:
    """Makes a catalog with flaws, names by kernel id, on which first runs are guarded."""
    monkeypatch.setenv("CATALOG_GUARD", "first_run")
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    catalog = Catalog(tmp_path / "catalog.db")

    def planted(flaws: Mapping[str, str]) -> Catalog:
        target = cuda_target(ARCH)

        def emit(kernel: Kernel, memory: Path) -> str:
            if kernel.id not in flaws:
                return target.emit(kernel, memory)
            return SOURCE.format(description=json.dumps(describe(kernel)), flaw=FLAWS[flaws[kernel.id]][0])

        changed = replace(target, emit=emit)
        catalog.builds.builder = Builder(tmp_path / "cache", catalog.build_log.record, targets=lambda _: changed)
        catalog.populate(ARCH)
        return catalog

    yield planted
    catalog.close()
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_kernel_that_fails_does_not_fail_in_this_process(
    planted: Callable[[Mapping[str, str]], Catalog], kernels: list[Kernel], flaw: str
) -> None:
    flawed, good = kernels[:2]
    catalog = planted({flawed.id: flaw})
    build(catalog, (flawed, good))
    plan = catalog.select(PROBLEM, arch=ARCH)
    assert plan.kernels == (flawed,)
    assert not wrong(plan, make_inputs(PROBLEM))
    assert plan.kernels == (good,)
    with pytest.raises(QuarantinedError, match=FLAWS[flaw][1]):
        catalog.plan(PROBLEM, flawed).run()
    assert not wrong(catalog.select(PROBLEM, arch=ARCH), make_inputs(PROBLEM, 1)), "the GPU is as good as before"


def test_tuning_goes_on_without_the_kernels_that_fail(
    planted: Callable[[Mapping[str, str]], Catalog], kernels: list[Kernel]
) -> None:
    flaws = dict(zip([kernel.id for kernel in kernels[::2]], FLAWS, strict=True))
    catalog = planted(flaws)
    rule = StopRule(precision=0.5, least=3, seconds=0.1, warm_up_seconds=0.01)
    (tuned,) = tune(catalog, [PROBLEM], TuneOptions(ARCH, candidates=len(kernels), rule=rule)).tuned
    assert tuned.failures.keys() == flaws.keys()
    for kernel_id, flaw in flaws.items():
        assert FLAWS[flaw][1] in tuned.failures[kernel_id]
    logs = catalog.connection.execute("SELECT log FROM artifact WHERE status = 'quarantined'").fetchall()
    assert len(logs) == len(flaws)
    listed = command.catalog("cache", "quarantined", "--format", "json", db=catalog.path)
    reasons = [row["reason"] for row in json.loads(listed.stdout)]
    assert all(any(reason.startswith(words) for reason in reasons) for _, words in FLAWS.values()), reasons
    assert not wrong(catalog.select(PROBLEM, arch=ARCH), make_inputs(PROBLEM)), "the GPU is as good as before"
