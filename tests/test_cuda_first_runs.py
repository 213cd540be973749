"""First runs of NVIDIA kernels in a process of their own, on a stand-in for CUDA: see fake_gpu."""

from __future__ import annotations

import shutil
from types import MappingProxyType

import numpy as np
import pytest
from conftest import count_processes, missing, slow_but
from fake_gpu import expected, target

from catalog.build.builder import Builder
from catalog.errors import QuarantinedError
from catalog.runtime.catalog import Catalog
from catalog.runtime.here import Devices
from catalog.runtime.inputs import make_inputs
from catalog.runtime.measure import StopRule
from catalog.runtime.tune import TuneOptions, tune
from catalog.settings import settings

try:
    from cuda_machine import ONE_KEY, best, catalog_on, machine
except ImportError:
    missing("cuda-bindings")

FLAWS = {
    'setenv("CUDA_FAULT", "700", 1);': "used an illegal address",
    'setenv("CUDA_FAULT", "719", 1);': "failed while it ran",
    "for (;;);": "did not end within 1 s",
    "abort();": "died of SIGABRT",
    "((char*)args->o.data)[1] ^= 64;": "gave a wrong result: o has an error of ",
}
"""What goes wrong in kernels, and what that is called."""


@pytest.fixture(scope="module")
def folder(populated, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvidia")
    shutil.copy(populated("sm_90"), folder / "catalog.db")
    return folder


@pytest.fixture
def fake(tmp_path, monkeypatch):
    yield from machine(tmp_path, monkeypatch)


@pytest.fixture
def catalog(fake, folder):
    yield from catalog_on(folder)


@pytest.fixture
def guarded(catalog, folder, tmp_path, monkeypatch):
    """A catalog that knows of no build, whose first runs are on the stand-in too, and what makes it with flaws.

    ``guarded(flaws, gpu)``: ``gpu`` is the Python expression of the stand-in that first runs find.
    """
    catalog.select(ONE_KEY, arch="sm_90")
    made = []

    def guarded(flaws=MappingProxyType({}), gpu="fake_cuda.FakeCuda()"):
        catalog.connection.execute("VACUUM INTO ?", [str(tmp_path / "guarded.db")])
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(f"import sys, fake_cuda\nsys.modules['cuda.bindings.runtime'] = {gpu}\n")
        monkeypatch.syspath_prepend(site)
        made.append(Catalog(tmp_path / "guarded.db"))
        record = made[0].build_log.record
        made[0].builds.builder = Builder(tmp_path / "cache", record, targets=lambda _: target(flaws=flaws))
        return made[0]

    monkeypatch.setenv("CATALOG_GUARD", "first_run")
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield guarded
    for one in made:
        one.close()
        one._devices = one._planners.devices = Devices(None)
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.parametrize("flaw", slow_but(list(FLAWS)[-1:], FLAWS))
def test_a_kernel_that_fails_does_so_in_a_process_of_its_own(catalog, guarded, flaw):
    flawed, good = best(catalog, 2)
    catalog, inputs = guarded({flawed.id: flaw}), make_inputs(ONE_KEY)
    for _ in range(2):
        result = catalog.select(ONE_KEY, arch="sm_90").run(inputs)
        assert result.kernels == (good.name,)
        assert np.array_equal(result.outputs["o"], expected(ONE_KEY, inputs["v"]))
    (quarantine,) = catalog.build_log.quarantined()
    assert quarantine.kernel == flawed.name
    assert quarantine.reason.startswith(FLAWS[flaw])
    with pytest.raises(QuarantinedError, match=FLAWS[flaw]):
        catalog.plan(ONE_KEY, flawed).run(inputs)


@pytest.mark.slow
def test_tuning_goes_on_without_the_kernels_that_fail(catalog, guarded, monkeypatch, tmp_path):
    """Sound ones share a process, which one at fault ends."""
    kernels = best(catalog, 5)
    planted = dict(zip((kernels[1].id, kernels[3].id), (next(iter(FLAWS)), list(FLAWS)[-1]), strict=True))
    catalog, started = guarded(planted), count_processes(monkeypatch, tmp_path)
    rule = StopRule(precision=0.5, least=3, seconds=0.1, warm_up_seconds=0.01)
    (tuned,) = tune(catalog, [ONE_KEY], TuneOptions("sm_90", candidates=5, rule=rule)).tuned
    assert started() == 3
    assert tuned.failures.keys() == planted.keys()
    for kernel_id, flaw in planted.items():
        assert FLAWS[flaw] in tuned.failures[kernel_id]
    logs = catalog.connection.execute("SELECT log FROM artifact WHERE status = 'quarantined'").fetchall()
    assert len(logs) == len(planted)
    assert {one.reason.partition(":")[0] for one in catalog.build_log.quarantined()} == {
        "used an illegal address",
        "gave a wrong result",
    }


UNGUARDED = [
    ("fake_cuda.failing(cudaMalloc=2)", "cudaErrorMemoryAllocation"),
    ("fake_cuda.failing(cudaMalloc=46)", "cudaErrorDevicesUnavailable"),
    ("fake_cuda.FakeCuda(0)", "finds no GPU"),
]


@pytest.mark.parametrize(
    ("gpu", "reason"),
    slow_but(UNGUARDED[1:2], UNGUARDED),
    ids=["no memory", "exclusive", "hidden"],
)
def test_a_gpu_that_takes_no_second_process_is_used_unguarded(guarded, gpu, reason, caplog):
    catalog = guarded(gpu=gpu)
    catalog.select(ONE_KEY, arch="sm_90").run()
    (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith("kernels run unguarded: ")
    assert reason in message
    assert not catalog.build_log.quarantined()


def test_a_first_run_leaves_the_process_s_own_gpu_alone(guarded, fake, monkeypatch, tmp_path):
    """It is on the GPU that the plan is on, and may come while a stream is captured."""
    catalog, started = guarded(), count_processes(monkeypatch, tmp_path)
    plan = catalog.select(ONE_KEY, arch="sm_90")
    plan.build()
    device = catalog.device("sm_90")
    assert device.identity == {"arch": "sm_90", "uuid": "00" * 16}
    fake.captured.add(0)
    fake.log.clear()
    for _ in range(2):
        catalog.build_log.guard.check(ONE_KEY, plan.kernels, plan.build(), device)
    fake.captured.clear()
    assert not fake.log
    assert started() == 1


@pytest.mark.slow
def test_a_wrong_result_is_blamed_on_a_stage_that_has_not_run_before(catalog, guarded):
    problem = ONE_KEY.model_copy(update={"op": "splitkv", "num_splits": 2})
    main, combine = catalog.select(problem, arch="sm_90").kernels
    catalog = guarded({combine.id: list(FLAWS)[-1]})
    artifact = catalog.build(main)
    catalog.build_log.runs.remember(artifact.key, artifact.sha256, "sm_90")
    with pytest.raises(QuarantinedError, match=f"{combine.name} gave a wrong result"):
        catalog.plan(problem, main).run()
    assert [one.kernel for one in catalog.build_log.quarantined()] == [combine.name]
