"""NVIDIA GPUs: the real cuda-bindings, which find none here, and a stand-in for its functions over host memory."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from conftest import leaves_nothing, load, missing
from fake_gpu import Exposed, Shared, call_of, compile_kernel, expected

from catalog.errors import DeviceError, TensorError, UsageError
from catalog.ops.attention.arguments import ARGUMENTS
from catalog.ops.attention.problem import Problem
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.devices.cuda import nvml
from catalog.runtime.devices.cuda.device import CudaDevice
from catalog.runtime.devices.cuda.runtime import REMEDIES, CudaRuntime
from catalog.runtime.devices.gpu.resources import Event, Memory, Stream
from catalog.runtime.devices.gpu.streams import current_stream, handle_of
from catalog.runtime.devices.gpu.vendors import AMD, NVIDIA
from catalog.runtime.devices.loading import LoadedKernel
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import make_outputs

try:
    from cuda.bindings.runtime import cudaError_t
except ImportError:
    missing("cuda-bindings")

from fake_cuda import FakeCuda
from fake_torch import FakeTorch

PACKED = Problem(seqlens_q=[3, 0, 5], nhead_q=4, nhead_k=2, hdim_q=16, dtype="fp32")
SPLIT = Problem(op="splitkv", batch=2, nhead_q=4, nhead_k=2, seqlen_q=1, seqlen_k=900, hdim_q=16, dtype="fp32")
Q = np.zeros((8, 4, 16), np.float32)


@pytest.fixture
def fake():
    """A test leaves nothing that it made."""
    fake = FakeCuda()
    with leaves_nothing(lambda: fake.live):
        yield fake


@pytest.fixture
def runtime(fake):
    return CudaRuntime(fake)


@pytest.fixture
def kernel(tmp_path):
    return partial(compile_kernel, tmp_path)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine may have an NVIDIA GPU")
def test_the_real_bindings_say_that_there_is_no_gpu():
    for ask in (
        lambda: CudaDevice().device,
        lambda: call_of(CudaDevice(), PACKED, make_inputs(PACKED) | make_outputs(PACKED)),
    ):
        with pytest.raises(DeviceError, match=r"the CUDA runtime \d+\.\d+ \(no driver\) finds no GPU \(cuda") as raised:
            ask()
        assert "NVIDIA's driver, of version 580" in str(raised.value)


def test_every_remedy_is_for_an_error_of_the_real_runtime():
    assert REMEDIES.keys() <= {error.name for error in cudaError_t}


def test_bindings_that_are_missing_or_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(DeviceError, match=r"package cuda-bindings is missing\npip install 'cuda-bindings>=13'"):
        CudaDevice().device  # noqa: B018
    monkeypatch.setattr(
        "catalog.runtime.devices.cuda.runtime.import_module", lambda _: ctypes.CDLL("/nowhere/libcudart.so")
    )
    with pytest.raises(DeviceError, match=r"cuda-bindings does not load: /nowhere/libcudart\.so"):
        CudaDevice().device  # noqa: B018


def test_gpus_are_described(runtime):
    assert runtime.version == "13.5 (driver: 13.0)"
    assert runtime.gpus[0].info == runtime.gpus[1].info == DeviceInfo("sm_90", "NVIDIA H200", 132)
    assert runtime.gpus[2].info.arch == "sm_80"
    assert runtime.gpus[0].memory_bytes == 141 << 30
    assert runtime.first("sm_80") == 2
    with pytest.raises(DeviceError, match=r"there is no GPU 3\nGPU 0 is NVIDIA H200, sm_90; GPU 1 is "):
        CudaDevice(3, runtime=runtime).device  # noqa: B018
    with pytest.raises(DeviceError, match=r"no GPU of arch sm_100, but NVIDIA H200 of .*\(CUDA_VISIBLE_DEVICES may"):
        runtime.first("sm_100")


def test_no_gpu_is_one_clear_error():
    runtime = CudaRuntime(FakeCuda(0))
    with pytest.raises(
        DeviceError, match=r"finds no GPU \(cudaGetDeviceCount failed: cudaErrorNoDevice \(100\)\)\nCUDA"
    ):
        CudaDevice(runtime=runtime).device  # noqa: B018


def test_a_child_of_a_fork_is_advised_to_spawn_and_leaves_the_parents_gpu_alone(runtime, fake):
    memory, device = Memory(runtime, 0, 100), CudaDevice(runtime=runtime)
    device.gpu  # noqa: B018
    calls = len(fake.log)
    pid = os.fork()
    if not pid:
        refused = 0
        for use in (lambda: device.stream, runtime.current, lambda: Memory(runtime, 0, 1)):
            try:
                use()
            except DeviceError as error:
                refused += "forked after CUDA was used" in error.message and "spawn" in error.hint
        memory.close()
        os._exit(0 if refused == 3 and len(fake.log) == calls else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    memory.close()
    assert fake.live == 0


@pytest.mark.parametrize(("kind", "size"), [(Memory, [100]), (Memory, [0]), (Stream, []), (Event, [])])
def test_what_is_made_is_released_once(runtime, fake, kind, size):
    with kind(runtime, 1, *size) as made:
        assert made.handle
        assert fake.live == 1
        assert fake.device == 0
        assert runtime.owner(made.handle) == (1 if kind is Memory else None)
    made.close()
    assert fake.live == 0
    made = kind(runtime, 1, *size)
    del made
    gc.collect()
    assert fake.live == 0


@pytest.mark.parametrize("problem", [PACKED, SPLIT], ids=lambda problem: problem.op)
def test_a_kernel_is_given_no_address_of_the_host(runtime, problem):
    call = call_of(CudaDevice(1, runtime=runtime), problem, make_inputs(problem) | make_outputs(problem), 3)
    pointers = [getattr(call.args, name).data for name in ARGUMENTS.slots] + [
        call.args.seqstart_q,
        call.args.seqstart_k,
    ]
    given = [pointer for pointer in pointers if pointer is not None]
    assert len(given) == 6  # Q, K, V, O and what the mode or the stages add
    assert {runtime.owner(pointer) for pointer in given} == {1}


@pytest.mark.parametrize("shared_by", ["numpy", "dlpack", "interface"])
@pytest.mark.parametrize("problem", [PACKED, SPLIT], ids=lambda problem: problem.op)
def test_a_kernel_reads_and_writes_the_tensors(runtime, fake, kernel, problem, shared_by):
    with Stream(runtime, 0) as stream:
        device = CudaDevice(stream=stream, runtime=runtime)
        path = kernel(arch="sm_90")
        loaded = load(device, path)
        arrays = make_inputs(problem) | make_outputs(problem)
        tensors = dict(arrays)
        if shared_by == "dlpack":
            tensors |= {name: Shared(arrays[name], kind=2) for name in ("q", "k", "o")}
        if shared_by == "interface":
            memory = Memory(runtime, 0, arrays["v"].nbytes)
            ctypes.memmove(memory.handle, arrays["v"].ctypes.data, arrays["v"].nbytes)
            tensors["v"] = Exposed(memory, arrays["v"].shape, stream=1)
            del memory
        call = call_of(device, problem, tensors, num_splits=3)
        assert all(duration > 0 for duration in device.time([loaded, loaded], call, 4))
        assert np.array_equal(arrays["o"], expected(problem, arrays["v"]))
        assert ctypes.c_void_p.in_dll(ctypes.CDLL(str(path)), "last_stream").value == stream.handle
        if shared_by == "dlpack":
            assert tensors["q"].streams == [stream.handle]
        if shared_by == "interface":  # what has been queued elsewhere is waited for by the stream, not by the host
            assert [arguments[0] for name, arguments in fake.log if name == "cudaStreamWaitEvent"] == [stream.handle]
        del call, tensors, device


def test_the_default_stream_is_dlpacks_first(runtime):
    shared = Shared(Q, kind=2)
    CudaDevice(runtime=runtime).array(PACKED, "q", shared)
    assert shared.streams == [1]


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (
            ("cudaMalloc", 2),
            r"cudaMalloc of 2,048 bytes on GPU 0 failed: cudaErrorMemoryAllocation, out of memory \(2\)",
        ),
        (("cudaMemcpyAsync", 1), r"cudaMemcpyAsync of [\d,]+ bytes failed: cudaErrorInvalidValue \(1\)\nThe memory"),
        (
            ("cudaStreamSynchronize", 700),
            r"cudaStreamSynchronize failed: cudaErrorIllegalAddress \(700\)\nThe GPU stop",
        ),
        (("cudaEventCreateWithFlags", 46), r"cudaEventCreateWithFlags on GPU 0 failed: cudaErrorDevicesUnavailable"),
        (
            ("cudaEventElapsedTime", 600),
            r"cudaEventElapsedTime failed: cudaErrorNotReady \(600\)\nCUDA_LAUNCH_BLOCKING",
        ),
        (("cudaGetDevice", 3), r"cudaGetDevice failed: cudaErrorInitializationError"),
    ],
)
def test_a_call_that_fails_is_named_and_leaves_nothing(runtime, fake, kernel, failing, message):
    device = CudaDevice(runtime=runtime)
    loaded = load(device, kernel(arch="sm_90"))
    name, status = failing
    fake.failing[name] = cudaError_t(status)
    with pytest.raises(DeviceError, match=message):
        device.time([loaded], call_of(device, PACKED, make_inputs(PACKED) | make_outputs(PACKED)), 2)
    fake.failing.clear()
    assert runtime.take_last_error() == 0  # the next caller does not see it
    del device


def test_a_refused_launch_says_what_is_wrong_with_the_gpu(runtime, fake):
    refused = LoadedKernel("ROW", Path("x.so"), "sm_90", ARGUMENTS, lambda pointer, stream: 4, lambda args, size: 0)
    with pytest.raises(DeviceError, match=r"kernel ROW: the device's runtime refused the launch"):
        runtime.launch(refused, None, 0)
    fake.broken = True
    with pytest.raises(DeviceError, match=r"the launch of kernel ROW failed: cudaErrorIllegalAddress \(700\)\nThe GPU"):
        runtime.launch(refused, None, 0)
    fake.captured.add(7)
    with pytest.raises(DeviceError, match=r"kernel ROW: the device's runtime refused the launch"):
        runtime.launch(refused, None, 7)  # asking the stream would end the capture
    assert fake.names().count("cudaStreamQuery") == 2


def test_a_kernel_of_another_arch_is_refused(runtime, kernel):
    with pytest.raises(DeviceError, match=r"for sm_80, and GPU 0 is of arch sm_90\nSelect with arch='sm_90'"):
        load(CudaDevice(runtime=runtime), kernel(arch="sm_80"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", Shared(Q, kind=1), "q is in memory of the CPU: expected an NVIDIA GPU's"),
        ("q", Shared(Q, kind=10), "q is in memory of an AMD GPU"),
        ("q", Shared(Q, kind=2, index=1), "q is on GPU 1: the kernel runs on GPU 0"),
        ("q", {"data": (1 << 20, False)}, "q is in memory that the CUDA runtime does not know"),
        ("q", {"typestr": ">f4"}, "q has elements that no kernel accepts: >f4"),
        ("o", {"strides": (0, 64, 4)}, "o is a broadcast view"),
        ("seqlens_k", np.array([3, 0, 6], np.int32), r"seqlens_k\[2\] is 6: must be from 0 to 5"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(runtime, name, value, message):
    if isinstance(value, dict):
        value = Exposed(Memory(runtime, 0, Q.nbytes), Q.shape, **value)
    with pytest.raises(TensorError, match=message):
        call_of(CudaDevice(runtime=runtime), PACKED, make_inputs(PACKED) | make_outputs(PACKED) | {name: value})


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (77, 77),
        (SimpleNamespace(cuda_stream=5), 5),
        (SimpleNamespace(ptr=6), 6),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 8)), 8),
        (SimpleNamespace(__cuda_stream__=(0, 9)), 9),
    ],
)
def test_streams_of_other_libraries_tell_their_handle(stream, handle):
    assert handle_of(stream) == handle


def test_streams_of_ours_and_of_cuda_bindings_tell_their_handle(runtime):
    from cuda.bindings.driver import CUstream
    from cuda.bindings.runtime import cudaStream_t

    with Stream(runtime, 0) as stream:
        assert handle_of(stream) == stream.handle
    assert (handle_of(cudaStream_t(11)), handle_of(CUstream(12))) == (11, 12)
    with pytest.raises(UsageError, match=r"'legacy' is not a stream\nA stream is a handle, or has cuda_stream"):
        handle_of("legacy")


def test_the_current_stream_is_pytorchs_then_cupys(monkeypatch, runtime):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert current_stream(NVIDIA, 0) == 0
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(is_hip=False), get_current_stream=lambda index: SimpleNamespace(ptr=40 + index)
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert (current_stream(NVIDIA, 1), current_stream(AMD, 1)) == (41, 0)
    torch = FakeTorch(runtime)
    torch.current[1] = 21
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert (current_stream(NVIDIA, 1), current_stream(AMD, 1)) == (21, 0)
    torch = FakeTorch(runtime)
    torch.cuda.is_initialized = lambda: False
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert current_stream(NVIDIA, 1) == 41
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # one that is still being imported
    assert current_stream(NVIDIA, 1) == 41


def test_the_clock_is_the_drivers(monkeypatch, runtime):
    assert CudaDevice(runtime=runtime).clock_mhz() is None  # without the driver's library

    def clock(gpu, kind, filled):
        filled._obj.value = 1980
        return 0

    library = SimpleNamespace(nvmlDeviceGetHandleByPciBusId_v2=lambda bus, gpu: 0, nvmlDeviceGetClockInfo=clock)
    monkeypatch.setattr(nvml, "_library", lambda: library)
    assert CudaDevice(1, runtime=runtime).clock_mhz() == 1980
