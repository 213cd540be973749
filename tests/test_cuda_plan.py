"""NVIDIA plans from select to outputs, on a stand-in for CUDA, whose GPUs are two H200s, and one for PyTorch.

It keeps their memory on the host, and kernels copy rows of V to O: see fake_gpu.
"""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import missing
from fake_gpu import Exposed, expected, held
from test_select_measured import record_timings

from catalog.backends import why_unavailable
from catalog.errors import DeviceError, TensorError, UsageError
from catalog.ops.attention.problem import Problem
from catalog.runtime.deployed import deployed
from catalog.runtime.devices.cuda import driver as cuda_driver
from catalog.runtime.devices.cuda.runtime import CudaRuntime
from catalog.runtime.devices.gpu.resources import Memory, Stream
from catalog.runtime.devices.known_call import IN_ORDER
from catalog.runtime.here import Devices
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import make_outputs
from catalog.runtime.traces import read_trace
from catalog.runtime.tracing import trace
from catalog.schema.policy import Policy
from catalog.settings import settings

try:
    from fake_cuda import failing
except ImportError:
    missing("cuda-bindings")

from cuda_machine import ONE_KEY, best, catalog_on, machine
from fake_torch import FakeTorch

LATENT = {"batch": 70, "nhead_q": 128, "nhead_k": 1, "seqlen_q": 1, "seqlen_k": 3, "hdim_q": 576, "hdim_v": 512}
DENSE = Problem(batch=2, nhead_q=4, nhead_k=2, seqlen_q=5, seqlen_k=70, hdim_q=128, dtype="fp16", lse=True)
PACKED = Problem(seqlens_q=[3, 0, 5], nhead_q=4, nhead_k=2, hdim_q=128, dtype="fp16", lse=True)
SPLIT = Problem(
    op="splitkv", batch=2, nhead_q=4, nhead_k=2, seqlen_q=1, seqlen_k=900, hdim_q=128, dtype="fp16", lse=True
)


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
def torch(catalog, monkeypatch):
    torch = FakeTorch(CudaRuntime())
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.fixture
def on_gpu(catalog):
    """Makes arrays in the GPU's memory, with what NumPy arrays hold."""

    def on_gpu(array, **changed):
        memory = Memory(catalog.device("sm_90").runtime, 0, array.nbytes)
        held(memory, array)[...] = array
        return Exposed(memory, array.shape, typestr=array.dtype.str, **changed)

    return on_gpu


@pytest.fixture
def bind(catalog, on_gpu):
    """Makes a forward whose arrays are all in the GPU's memory, and what O shall be."""

    def bind():
        inputs = make_inputs(DENSE)
        outputs = {name: on_gpu(array) for name, array in make_outputs(DENSE).items()}
        given = {name: on_gpu(array) for name, array in inputs.items()}
        return catalog.select(DENSE, arch="sm_90").bind(given, outputs=outputs), expected(DENSE, inputs["v"])

    return bind


def written(bound):
    return held(bound.outputs["o"].memory, make_outputs(DENSE)["o"])


def last_stream(bound):
    library = ctypes.CDLL(str(bound.kernels[0].path))
    return ctypes.c_void_p.in_dll(library, "last_stream").value or 0


@pytest.mark.parametrize("problem", [DENSE, PACKED, SPLIT], ids=["dense", "packed", "splitkv"])
def test_a_plan_runs_on_numpy_arrays(catalog, problem):
    assert why_unavailable("sm_90") is None
    result = catalog.select(problem, arch="sm_90").run(seed=3, repeats=2)
    assert np.array_equal(result.outputs["o"], expected(problem, make_inputs(problem, 3)["v"]))
    assert result.time_ms > 0
    assert catalog.device("sm_90").device.name == "NVIDIA H200"


def test_values_that_are_the_beginning_of_keys_are_copied_once(catalog, fake):
    """The kernels of latent attention see it by the address; a launch without parts has no workspace either."""
    problem = Problem(**LATENT, op="splitkv", dtype="bf16")
    inputs = make_inputs(problem)
    inputs["v"] = inputs["k"][..., : problem.hdim_v]
    fake.log.clear()
    result = catalog.select(problem, arch="sm_90").run(inputs)
    assert np.array_equal(result.outputs["o"], expected(problem, inputs["v"]))
    assert [name for name, _ in fake.log].count("cudaMalloc") == len(("q", "k", "o"))


def test_a_launch_on_gpu_arrays_copies_nothing_and_waits(bind, fake):
    plan, o = bind()
    fake.log.clear()
    plan.launch()
    assert np.array_equal(written(plan), o)
    assert set(fake.names()) == {"cudaGetDevice", "cudaStreamIsCapturing", "cudaStreamSynchronize"}


def test_a_queued_launch_asks_for_the_current_gpu_and_no_more(bind, fake):
    plan, o = bind()
    fake.log.clear()
    plan.enqueue()
    assert fake.names() == ["cudaGetDevice"]
    assert np.array_equal(written(plan), o)
    fake.device = 1
    plan.enqueue()
    assert fake.device == 1
    assert [arguments for name, arguments in fake.log if name == "cudaSetDevice"] == [(0,), (1,)]


def test_a_launch_goes_to_the_stream_that_is_given_or_the_callers(bind, monkeypatch, fake):
    plan, _ = bind()
    plan.enqueue()
    assert last_stream(plan) == 0
    with Stream(CudaRuntime(fake), 0) as stream:
        for given in (stream, stream.handle, SimpleNamespace(cuda_stream=stream.handle)):
            plan.enqueue()
            plan.enqueue(given)
            assert last_stream(plan) == stream.handle
        torch = FakeTorch(CudaRuntime(fake))
        torch.current[0] = stream.handle
        monkeypatch.setitem(sys.modules, "torch", torch)
        for start in (plan.launch, plan.enqueue, plan.time):
            plan.enqueue(0)
            start()
            assert last_stream(plan) == stream.handle
    with pytest.raises(UsageError, match="is not a stream"):
        plan.enqueue(object())


def test_numpy_arrays_are_not_queued(catalog, fake):
    plan = catalog.select(DENSE, arch="sm_90")
    for start in (plan.bind().enqueue, lambda: plan.enqueue(make_inputs(DENSE))):
        with pytest.raises(
            TensorError, match=r"of the tensors are NumPy arrays, which are copied.*\nPass outputs in GPU"
        ):
            start()


@pytest.mark.parametrize("start", ["launch", "enqueue"])
def test_a_captured_launch_allocates_copies_and_waits_for_nothing(bind, fake, monkeypatch, start):
    plan, o = bind()
    torch = FakeTorch(CudaRuntime(fake))
    torch.current[0] = 7
    monkeypatch.setitem(sys.modules, "torch", torch)
    fake.captured.add(7)
    fake.log.clear()
    getattr(plan, start)()
    assert set(fake.names()) <= {"cudaGetDevice", "cudaStreamIsCapturing"}
    assert np.array_equal(written(plan), o)
    assert last_stream(plan) == 7
    with pytest.raises(DeviceError, match="launches in a graph cannot be timed"):
        plan.time()
    fake.captured.clear()


def test_timing_as_graph_replays_and_as_eager_calls(catalog, fake):
    """One capture for all replays, of which nothing is left; eager launches are calls that are waited for."""
    plan, inputs = catalog.select(DENSE, arch="sm_90"), make_inputs(DENSE)
    timed = deployed(plan, inputs, make_outputs(DENSE, inputs), Policy("graph"))
    for launches in (2, 3):
        assert len(timed.time(launches, cold=True)) == launches
    names = Counter(fake.names())
    assert (names["cudaStreamBeginCapture"], names["cudaGraphInstantiate"], names["cudaGraphLaunch"]) == (1, 1, 5)
    assert names["cudaMemsetAsync"] == 5
    fake.log.clear()
    device = catalog.device("sm_90")
    assert len(device.awaited(lambda: None, 3)) == 3
    assert Counter(fake.names())["cudaStreamSynchronize"] == 6
    assert "cudaEventRecord" not in fake.names()
    with pytest.raises(UsageError, match="no PyTorch is installed"):
        deployed(plan, inputs, {}, Policy("eager"))


def test_what_cannot_be_captured_is_an_error_that_leaves_nothing(catalog, fake):
    plan = catalog.select(DENSE, arch="sm_90").bind()
    fake.failing = failing(cudaGraphInstantiate=2).failing
    with pytest.raises(DeviceError, match="cudaGraphInstantiate"):
        plan.replayed()
    assert not fake.captured


def test_while_a_graph_is_captured_selection_asks_for_graph_timings(catalog, fake, monkeypatch):
    fast, small = best(catalog, 2)
    device = catalog.device_info("sm_90")
    for policy, winner in ((Policy("graph"), fast), (Policy("eager"), small)):
        medians = {kernel.id: 1.0 if kernel == winner else 2.0 for kernel in (fast, small)}
        record_timings(catalog, ONE_KEY, medians, device=device, policy=policy)
    catalog.forget()
    torch = FakeTorch(CudaRuntime(fake))
    torch.current[0] = 7
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("CATALOG_MEASURED_AS", "eager")
    settings.cache_clear()
    for _ in range(2):
        assert catalog.select(ONE_KEY, arch="sm_90").kernels[0] == small
        fake.captured.add(7)
        assert catalog.select(ONE_KEY, arch="sm_90").kernels[0] == fast
        fake.captured.clear()
    catalog.connection.execute("DELETE FROM timing")
    catalog.forget()


def test_numpy_arrays_are_not_captured(catalog, fake, monkeypatch):
    plan = catalog.select(DENSE, arch="sm_90").bind()
    fake.captured.add(0)
    fake.log.clear()
    with pytest.raises(TensorError, match="NumPy arrays, which are copied"):
        plan.launch()
    assert "cudaErrorStreamCaptureUnsupported" not in str(fake.last)
    fake.captured.clear()


def test_a_graph_keeps_the_workspace_of_a_plan_that_is_gone(catalog, fake, on_gpu):
    inputs = {name: on_gpu(array) for name, array in make_inputs(SPLIT).items()}
    outputs = {name: on_gpu(array) for name, array in make_outputs(SPLIT).items()}
    plan = catalog.select(SPLIT, arch="sm_90").bind(inputs, outputs=outputs)
    others = len(inputs) + len(outputs)
    assert fake.live == others + 2
    fake.captured.add(0)
    plan.launch()
    fake.captured.clear()
    del plan
    gc.collect()
    assert fake.live == others + 2
    catalog._devices = catalog._planners.devices = Devices(None)
    gc.collect()
    assert fake.live == others


@pytest.mark.parametrize("problem", [DENSE, PACKED, SPLIT], ids=["dense", "packed", "splitkv"])
def test_pytorchs_tensors_make_pytorchs_outputs_without_a_wait(catalog, fake, torch, problem):
    plan = catalog.select(problem, arch="sm_90")
    inputs = make_inputs(problem)
    plan.enqueue({name: torch.tensor(array) for name, array in inputs.items()})  # builds, loads, sends starts
    given = {name: torch.tensor(array) for name, array in inputs.items()}
    fake.log.clear()
    outputs = plan.enqueue(given)
    assert {type(tensor) for tensor in outputs.values()} == {torch.Tensor}
    assert np.array_equal(outputs["o"].numpy(), expected(problem, inputs["v"]))
    assert (outputs["lse"].dtype, outputs["lse"].shape) == ("torch.float32", problem.shapes["lse"])
    made = fake.names().count("cudaMalloc")  # by the stand-in for PyTorch
    assert made == {DENSE: 2, PACKED: 2, SPLIT: 4}[problem]
    assert set(fake.names()) - {"cudaMalloc", "cudaFree"} <= {"cudaGetDevice", "cudaStreamIsCapturing"}
    assert fake.names().count("cudaFree") == made - 2
    ran = plan.run(given)
    assert np.array_equal(ran.outputs["o"].numpy(), expected(problem, inputs["v"]))
    assert ran.time_ms > 0


@pytest.mark.parametrize("problem", [DENSE, PACKED, SPLIT], ids=["dense", "packed", "splitkv"])
def test_known_calls_use_the_current_stream_and_share_one_workspace(catalog, fake, torch, problem):
    plan, inputs = catalog.select(problem, arch="sm_90"), make_inputs(problem, 1)
    for _ in range(6):
        plan.enqueue({name: torch.tensor(array) for name, array in make_inputs(problem).items()})
    assert (plan, IN_ORDER) in plan.services.shared.known
    given = {name: torch.tensor(array) for name, array in inputs.items()}
    torch.current[0] = 0x77
    fake.log.clear()
    outputs = plan.enqueue(given)
    assert np.array_equal(outputs["o"].numpy(), expected(problem, inputs["v"]))
    assert fake.names().count("cudaMalloc") == {DENSE: 2, PACKED: 2, SPLIT: 3}[problem]
    library = ctypes.CDLL(str(plan.services.shared.loaded[plan.kernels[0].id].path))
    assert ctypes.c_void_p.in_dll(library, "last_stream").value == 0x77
    elsewhere = {name: torch.tensor(array, index=1) for name, array in inputs.items()}
    assert {tensor.get_device() for tensor in plan.enqueue(elsewhere).values()} == {1}


def test_a_trace_has_queued_calls_on_tensors_of_a_known_layout_too(catalog, torch, tmp_path):
    plan, inputs = catalog.select(DENSE, arch="sm_90"), make_inputs(DENSE)
    given = {name: torch.tensor(array) for name, array in inputs.items()}
    plan.enqueue(given)
    with trace(tmp_path / "calls.jsonl", tensors=1):
        for _ in range(3):
            plan.enqueue(given)
    plan.enqueue(given)
    (used,) = read_trace(tmp_path / "calls.jsonl").used
    assert (used.calls, used.times, used.wanted.arch) == (3, [], "sm_90")
    (recording,) = used.recordings
    kept = recording.load(DENSE)
    assert all(np.array_equal(kept[name], inputs[name]) for name in inputs)


def test_a_trace_waits_for_nothing_while_a_stream_is_captured(bind, fake, tmp_path):
    plan, _ = bind()
    fake.captured.add(0)
    fake.log.clear()
    with trace(tmp_path / "calls.jsonl", tensors=1):
        plan.launch()
        assert set(fake.names()) <= {"cudaGetDevice", "cudaStreamIsCapturing"}
        fake.captured.clear()
        plan.launch()
    captured, waited = map(json.loads, (tmp_path / "calls.jsonl").read_text().splitlines())
    assert "tensors" not in captured
    assert "tensors" in waited


def test_outputs_with_rows_that_no_kernel_writes_begin_as_zeros(catalog, torch):
    inputs = {name: torch.tensor(array) for name, array in make_inputs(DENSE).items()}
    inputs["seqlens_k"] = torch.tensor(np.array([70, 7], np.int32))
    outputs = catalog.select(DENSE, arch="sm_90").enqueue(inputs)
    assert not outputs["lse"].numpy().any()


def test_tensors_choose_the_gpu_of_the_arch(catalog, fake, torch):
    plan, inputs = catalog.select(DENSE, arch="sm_90"), make_inputs(DENSE)
    torch.current[1] = 0
    given = {name: torch.tensor(array, index=1) for name, array in inputs.items()}
    bound = plan.bind(given)
    bound.launch()
    assert bound.device.index == bound.outputs["o"].get_device() == 1
    assert bound.device is plan.bind(given).device
    assert catalog.device("sm_90").index == 0
    assert np.array_equal(plan.run(given).outputs["o"].numpy(), expected(DENSE, inputs["v"]))
    given["k"] = torch.tensor(inputs["k"], index=0)
    with pytest.raises(TensorError, match="k is on GPU 0: the kernel runs on GPU 1"):
        plan.bind(given)
    with pytest.raises(TensorError, match="q is on GPU 2: the kernel runs on GPU 0"):
        plan.bind({name: torch.tensor(array, index=2) for name, array in inputs.items()})
    assert fake.device == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"requires_grad": True}, "q cannot be shared: Can't export tensors that require gradient"),
        ({"dtype": "torch.complex64"}, "q cannot be shared"),
        ({"shape": (2, 4, 5, 64)}, r"q is float16 \(2, 4, 5, 64\): expected float16 \(2, 4, 5, 128\)"),
        ({"strides": (2560, 640, 128, 2)}, "q has a stride of 4 bytes along its last axis"),
    ],
)
def test_pytorchs_tensors_that_do_not_fit_are_refused(catalog, torch, changed, message):
    inputs = {name: torch.tensor(array) for name, array in make_inputs(DENSE).items()}
    vars(inputs["q"]).update(changed)
    with pytest.raises(TensorError, match=message):
        catalog.select(DENSE, arch="sm_90").enqueue(inputs)


def test_a_failed_kernel_is_reported_by_the_next_call_that_waits(bind, fake):
    plan, _ = bind()
    plan.enqueue()
    fake.broken = True
    for start in (plan.launch, plan.time):
        with pytest.raises(DeviceError, match=r"failed: cudaErrorIllegalAddress \(700\)\nThe GPU stopped a kernel"):
            start()


def test_a_machine_without_such_a_gpu_says_what_it_lacks(catalog, fake, monkeypatch, tmp_path):
    assert "no GPU of arch sm_100, but NVIDIA H200 of arch sm_90" in str(why_unavailable("sm_100"))
    fake.count = 0
    assert "finds no GPU (cudaGetDeviceCount failed: cudaErrorNoDevice (100))" in str(why_unavailable("sm_90"))
    monkeypatch.setattr(cuda_driver, "_has_bindings", lambda: False)
    assert "cuda-bindings: pip install 'cuda-bindings>=13'" in str(why_unavailable("sm_90"))
    monkeypatch.setattr(cuda_driver, "_DRIVER", (tmp_path / "nvidiactl",))
    with pytest.raises(DeviceError, match=r"sm_90 kernels cannot run on this machine: .*/nvidiactl, the device of NV"):
        catalog.select(DENSE, arch="sm_90").run()


def test_bindings_are_looked_for_without_importing_them(monkeypatch):
    assert cuda_driver._has_bindings()
    for name in ("cuda.bindings.runtime", "cuda.bindings", "cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "cuda.bindings.runtime")
    assert not cuda_driver._has_bindings()


def test_selecting_loads_neither_numpy_nor_cuda(folder, catalog):
    catalog.select(DENSE, arch="sm_90")
    code = (
        "import sys\nfrom catalog import Catalog, Problem\n"
        "problem = Problem(batch=1, nhead_q=4, seqlen_q=64, hdim_q=128, dtype='bf16')\n"
        f"Catalog({str(folder / 'catalog.db')!r}).select(problem, arch='sm_90')\n"
        "print(sorted({'numpy', 'cuda.bindings.runtime', 'ml_dtypes'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
