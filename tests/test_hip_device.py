"""AMD GPUs: the real HIP runtime, which finds none here, and a controllable fake one over host memory."""

from __future__ import annotations

import ctypes
import gc
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import leaves_nothing, load, missing
from fake_gpu import Exposed, Shared, call_of, compile_c, compile_kernel, expected, make_runtime

from catalog.errors import DeviceError, TensorError
from catalog.ops.attention.arguments import ARGUMENTS
from catalog.ops.attention.problem import Problem
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.devices.gpu.resources import Event, Memory, Stream
from catalog.runtime.devices.hip.device import HipDevice
from catalog.runtime.devices.hip.runtime import REMEDIES, HipRuntime
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import make_outputs

PACKED = Problem(seqlens_q=[3, 0, 5], nhead_q=4, nhead_k=2, hdim_q=16, dtype="fp32")
SPLIT = Problem(op="splitkv", batch=2, nhead_q=4, nhead_k=2, seqlen_q=1, seqlen_k=900, hdim_q=16, dtype="fp32")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The fake runtime by ROCm's version."""
    return {version: make_runtime(tmp_path_factory.mktemp("hip"), version) for version in (5, 6)}


@pytest.fixture
def fake(libraries):
    """The fake's own functions; a test leaves nothing that it made."""
    library = ctypes.CDLL(str(libraries[6]))
    library.fake_reset(2)
    with leaves_nothing(library.fake_live):
        yield library


@pytest.fixture
def runtime(fake, libraries):
    return HipRuntime(libraries[6])


@pytest.fixture
def kernel(tmp_path):
    return partial(compile_kernel, tmp_path)


@pytest.fixture(scope="module")
def real():
    try:
        HipRuntime().version  # noqa: B018
    except DeviceError:
        missing("libamdhip64")
    if Path("/dev/kfd").exists():
        pytest.skip("this machine may have an AMD GPU")
    return HipRuntime()


def test_the_real_runtime_says_that_there_is_no_gpu(real):
    assert int(real.version.split(".")[0]) >= 5
    for ask in (
        lambda: HipDevice().device,
        lambda: call_of(HipDevice(), PACKED, make_inputs(PACKED) | make_outputs(PACKED)),
    ):
        with pytest.raises(DeviceError, match=r"finds no GPU \(hipGetDeviceCount failed: hipErrorNoDevice") as raised:
            ask()
        assert "render and video" in str(raised.value)


def test_every_remedy_is_for_an_error_of_the_real_runtime(real):
    assert REMEDIES.keys() <= {real.error_name(status) for status in range(1100)}


def test_numbers_are_those_of_the_real_header(tmp_path):
    if not Path("/usr/include/hip/hip_runtime_api.h").exists() and not Path("/opt/rocm/include/hip").exists():
        missing("hip_runtime_api.h")
    program = compile_c(
        tmp_path,
        "#include <stddef.h>\n#include <stdio.h>\n#include <hip/hip_runtime_api.h>\n"
        'int main(void) { printf("%zu %d %zu %d %d", offsetof(hipDeviceProp_t, gcnArchName), '
        "hipDeviceAttributeMultiprocessorCount, offsetof(hipPointerAttribute_t, device), hipMemcpyHostToDevice, "
        "hipMemcpyDeviceToHost); }",
        "-D__HIP_PLATFORM_AMD__",
        "-I/opt/rocm/include",
    )
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert printed in ("396 63 4 1 2", "1160 63 4 1 2")  # ROCm 5, ROCm 6


def test_a_runtime_that_is_missing_and_one_that_does_not_load(tmp_path):
    with pytest.raises(DeviceError, match=r"libamdhip64\.so, is missing\n.*libamdhip64-5 .*hip-runtime-amd"):
        HipRuntime(tmp_path / "libamdhip64.so").gpus  # noqa: B018
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    with pytest.raises(DeviceError, match=r"cannot load the HIP runtime .*broken\.so"):
        HipRuntime(broken).gpus  # noqa: B018
    with pytest.raises(DeviceError, match=r"unusable: .*hipGetErrorName\nInstall ROCm"):
        HipRuntime(compile_c(tmp_path, "int other;", "-shared")).gpus  # noqa: B018


@pytest.mark.parametrize("version", [5, 6])
def test_gpus_are_described(libraries, version):
    runtime = HipRuntime(libraries[version])
    ctypes.CDLL(str(libraries[version])).fake_reset(2)
    assert runtime.version == f"{version}.2.41133"
    assert [gpu.info for gpu in runtime.gpus] == [
        DeviceInfo("gfx942", "AMD Instinct MI300X", 304),
        DeviceInfo("gfx1100", "gfx1100", 303),
    ]
    assert runtime.gpus[0].memory_bytes == 192 << 30
    with pytest.raises(DeviceError, match=r"there is no GPU 2\nGPU 0 is AMD Instinct MI300X, gfx942; GPU 1 is gfx1100"):
        HipDevice(2, runtime=runtime).device  # noqa: B018


def test_no_gpu_is_one_clear_error(runtime, fake):
    fake.fake_reset(0)
    with pytest.raises(DeviceError, match=r"the HIP runtime 6\.2\.41133 finds no GPU\nHIP needs an AMD GPU"):
        HipDevice(runtime=runtime).device  # noqa: B018


@pytest.mark.parametrize(("kind", "size"), [(Memory, [100]), (Memory, [0]), (Stream, []), (Event, [])])
def test_what_is_made_is_released_once(runtime, fake, kind, size):
    with kind(runtime, 1, *size) as made:
        assert made.handle
        assert fake.fake_live() == 1
        assert runtime.owner(made.handle) == 1
        runtime.call("hipGetDevice", ctypes.byref(current := ctypes.c_int(-1)))
        assert current.value == 0
    made.close()
    assert fake.fake_live() == 0
    made = kind(runtime, 1, *size)
    del made
    gc.collect()
    assert fake.fake_live() == 0
    assert runtime.owner(0) is None


@pytest.mark.parametrize("problem", [PACKED, SPLIT], ids=lambda problem: problem.op)
def test_a_kernel_is_given_no_address_of_the_host(runtime, problem):
    call = call_of(HipDevice(1, runtime=runtime), problem, make_inputs(problem) | make_outputs(problem), 3)
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
        device = HipDevice(stream=stream, runtime=runtime)
        path = kernel(arch="gfx942")
        loaded = load(device, path)
        arrays = make_inputs(problem) | make_outputs(problem)
        shared = {}
        tensors = dict(arrays)
        if shared_by == "dlpack":
            shared = {name: Shared(arrays[name]) for name in ("q", "k", "o")}
        if shared_by == "interface":
            memory = Memory(runtime, 0, arrays["v"].nbytes)
            ctypes.memmove(memory.handle, arrays["v"].ctypes.data, arrays["v"].nbytes)
            tensors["v"] = Exposed(memory, arrays["v"].shape, stream=1)
            del memory
        call = call_of(device, problem, tensors | shared, num_splits=3)
        assert call.args.num_splits == 3
        assert all(duration > 0 for duration in device.time([loaded, loaded], call, 4))
        assert np.array_equal(arrays["o"], expected(problem, arrays["v"]))
        assert ctypes.c_void_p.in_dll(ctypes.CDLL(str(path)), "last_stream").value == stream.handle
        assert [(tensor.streams, tensor.deleted) for tensor in shared.values()] == [([stream.handle], 0)] * len(shared)
        assert fake.fake_calls(b"hipMalloc") == fake.fake_live() - 1  # but for the stream: events are gone
        del call, tensors, device  # which remembers where sequences start
        gc.collect()
        assert [tensor.deleted for tensor in shared.values()] == [1] * len(shared)
        assert fake.fake_live() == 1


@pytest.mark.parametrize("version", [5, 6])
def test_a_captured_stream_is_given_launches_and_nothing_else(libraries, kernel, version):
    """A runtime that cannot report captures counts as having none."""
    fake, runtime = ctypes.CDLL(str(libraries[version])), HipRuntime(libraries[version])
    fake.fake_reset(2)
    with Stream(runtime, 0) as stream:
        device = HipDevice(stream=stream, runtime=runtime)
        loaded = load(device, kernel(arch="gfx942"))
        problem = Problem(batch=8, nhead_q=4, seqlen_q=1, hdim_q=16, dtype="fp32")
        tensors = {name: Exposed(Memory(runtime, 0, Q.nbytes), problem.shapes[name]) for name in ("q", "k", "v", "o")}
        call = call_of(device, problem, tensors)
        device.run([loaded], call)
        waits = fake.fake_calls(b"hipStreamSynchronize")
        assert waits == 1
        fake.fake_capture(ctypes.c_void_p(stream.handle))
        device.run([loaded], call)
        assert fake.fake_calls(b"hipStreamSynchronize") == waits + (version == 5)
        fake.fake_capture(None)
        del call, device, tensors


def test_numpy_arrays_are_sent_and_fetched_whatever_their_strides(runtime, kernel):
    device = HipDevice(runtime=runtime)
    loaded = load(device, kernel(arch="gfx942"))
    inputs = make_inputs(PACKED) | {"v": np.zeros((2, 8, 16), np.float32).swapaxes(0, 1)}
    o = np.full((4, 8, 16), np.nan, np.float32).swapaxes(0, 1)
    call = call_of(device, PACKED, inputs | {"o": o})
    for fill in (1, 2):
        inputs["v"][...] = fill
        device.run([loaded], call)
        assert (o == fill).all()


def test_a_kernel_of_another_arch_or_of_none_is_refused(runtime, kernel):
    device = HipDevice(runtime=runtime)
    with pytest.raises(DeviceError, match=r"for gfx950, and GPU 0 is of arch gfx942\nSelect with arch='gfx942'"):
        load(device, kernel(arch="gfx950"))
    with pytest.raises(DeviceError, match="does not say which arch"):
        load(device, kernel())


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (
            (b"hipMalloc", 2),
            r"hipMalloc of 2,048 bytes on GPU 0 failed: hipErrorOutOfMemory, out of memory \(2\)\nFree",
        ),
        ((b"hipMemcpyAsync", 1), r"hipMemcpyAsync of [\d,]+ bytes failed: hipErrorInvalidValue \(1\)\nThe memory"),
        (
            (b"hipStreamSynchronize", 700),
            r"hipStreamSynchronize failed: hipErrorIllegalAddress \(700\)\nThe GPU stopped",
        ),
        ((b"hipGetLastError", 209), r"launch of kernel ROW failed: hipErrorNoBinaryForGpu \(209\)\nThe library has no"),
        ((b"hipEventCreateWithFlags", 77), r"hipEventCreateWithFlags on GPU 0 failed: hipErrorUnknown \(77\)\nAMD_LOG"),
        ((b"hipEventElapsedTime", 1), r"hipEventElapsedTime failed: hipErrorInvalidValue"),
    ],
)
def test_a_call_that_fails_is_named_and_leaves_nothing(runtime, fake, kernel, failing, message):
    device = HipDevice(runtime=runtime)
    loaded = load(device, kernel(arch="gfx942"))
    fake.fake_fail(*failing)
    with pytest.raises(DeviceError, match=message):
        device.time([loaded], call_of(device, PACKED, make_inputs(PACKED) | make_outputs(PACKED)), 2)
    fake.fake_fail(failing[0], 0)
    assert runtime.take_last_error() == 0  # the next caller does not see it


def test_what_cannot_be_released_by_itself_is_logged(runtime, fake, caplog):
    memory = Memory(runtime, 0, 1)
    fake.fake_fail(b"hipFree", 700)
    del memory
    gc.collect()
    assert "hipFree failed: hipErrorIllegalAddress" in caplog.text
    fake.fake_reset(2)


Q = np.zeros((8, 4, 16), np.float32)
HALVES = np.zeros((8, 4, 16), np.uint16)
READ_ONLY = np.zeros((8, 4, 16), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", [1.0], "q is a list: expected a NumPy array, or an array in GPU memory"),
        ("q", None, r"q is missing: expected float32 \(8, 4, 16\)"),
        ("other", Q, "other is not a tensor of this problem"),
        ("q", Q[:4], r"q is float32 \(4, 4, 16\): expected float32 \(8, 4, 16\)"),
        ("q", Shared(Q, kind=1), "q is in memory of the CPU: expected an AMD GPU's"),
        ("q", Shared(Q, kind=2), "q is in memory of an NVIDIA GPU"),
        ("q", Shared(Q, index=1), "q is on GPU 1: the kernel runs on GPU 0"),
        ("q", Shared(Q.astype(np.complex64)), "q has elements that no kernel accepts: DLPack's type 5 of 64 bits"),
        ("q", Shared(HALVES, code=4), r"q is bfloat16 \(8, 4, 16\): expected float32"),
        ("q", Shared(Q.astype(np.uint8), code=10), "q is float8_e4m3fn"),
        ("q", Shared(Q[..., ::2]), r"q is float32 \(8, 4, 8\)"),
        ("q", Shared(READ_ONLY), "q cannot be shared: .*read-?only"),
        ("o", Shared(np.broadcast_to(np.float32(0), (8, 4, 16))), "o cannot be shared|o is a broadcast view"),
        ("q", {"typestr": ">f4"}, "q has elements that no kernel accepts: >f4"),
        ("q", {"typestr": "<f1"}, "q has a __cuda_array_interface__ that cannot be read"),
        ("q", {"mask": 1}, "q is a masked array"),
        ("q", {"data": (1 << 20, False)}, "q is in memory that the HIP runtime does not know"),
        ("q", {"strides": (8, 4, 256)}, "q has a stride of 256 bytes along its last axis"),
        ("o", {"data": READ_ONLY}, "o is read-only, but the kernel writes to it"),
        ("o", {"strides": (0, 64, 4)}, "o is a broadcast view"),
        ("seqlens_k", np.array([3, 0, 6], np.int32), r"seqlens_k\[2\] is 6: must be from 0 to 5"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(runtime, name, value, message):
    if isinstance(value, dict):
        memory = Memory(runtime, 0, Q.nbytes)
        if value.get("data") is READ_ONLY:
            value = value | {"data": (memory.handle, True)}
        value = Exposed(memory, Q.shape, **value)
    tensors = make_inputs(PACKED) | make_outputs(PACKED) | {name: value}
    with pytest.raises(TensorError, match=message):
        call_of(HipDevice(runtime=runtime), PACKED, tensors)
    gc.collect()
    if isinstance(value, Shared):
        assert value.deleted == len(value.streams)  # what was lent is given back


def test_empty_tensors_have_an_address(runtime):
    problem = Problem(batch=1, nhead_q=1, seqlen_q=0, seqlen_k=4, hdim_q=16, dtype="fp32")
    tensors = make_inputs(problem) | make_outputs(problem)
    nowhere = Exposed(Memory(runtime, 0, 0), problem.shapes["q"], data=(0, False))
    args = call_of(HipDevice(runtime=runtime), problem, tensors | {"q": nowhere}).args
    assert args.q.data
    assert args.o.data
