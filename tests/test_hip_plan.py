"""AMD plans from select to outputs, on a stand-in for ROCm, whose GPUs are a gfx942 and a gfx1100.

Its runtime keeps their memory on the host, and kernels copy rows of V to O: see fake_gpu.
"""

from __future__ import annotations

import ctypes
import shutil
import threading

import numpy as np
import pytest
from conftest import leaves_nothing, slow_but
from fake_gpu import Exposed, Shared, expected, held, make_runtime, target
from tiny_project import ARCH

from catalog.backends import why_unavailable
from catalog.build.builder import Builder
from catalog.errors import DeviceError, TensorError
from catalog.ops.attention.problem import Problem
from catalog.runtime.bench import COLUMNS, bench_problem
from catalog.runtime.bench_shapes import BenchOptions
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.gpu.resources import Memory
from catalog.runtime.devices.hip import bindings
from catalog.runtime.devices.hip import driver as hip_driver
from catalog.runtime.here import Devices
from catalog.runtime.inputs import make_inputs
from catalog.runtime.measure import StopRule
from catalog.runtime.tensors import make_outputs
from catalog.runtime.traces import read_trace
from catalog.runtime.tracing import trace
from catalog.runtime.validate import run_problem

DENSE = Problem(batch=2, nhead_q=4, nhead_k=2, seqlen_q=5, seqlen_k=70, hdim_q=128, dtype="fp16")
PACKED = Problem(seqlens_q=[3, 0, 5], nhead_q=4, nhead_k=2, hdim_q=128, dtype="fp16")
SPLIT = Problem(op="splitkv", batch=2, nhead_q=4, nhead_k=2, seqlen_q=1, seqlen_k=900, hdim_q=128, dtype="fp16")
APPEND = Problem(
    op="appendkv", batch=2, nhead_q=4, nhead_k=2, seqlen_q=1, seqlen_k=9, seqlen_new=1, hdim_q=128, dtype="fp16"
)
PAGED = Problem(
    op="pagedkv", batch=2, nhead_q=4, nhead_k=2, seqlen_q=1, seqlen_k=128, page_size=128, hdim_q=128, dtype="fp16"
)


@pytest.fixture(scope="module")
def rocm(tmp_path_factory):
    """A ROCm folder. The library in it is a link: nobody else in this process shall find it loaded under its name."""
    folder = tmp_path_factory.mktemp("rocm")
    (folder / "lib").mkdir()
    (folder / "lib" / "libamdhip64.so").symlink_to(make_runtime(folder, 6))
    return folder


@pytest.fixture
def fake(rocm, tmp_path, monkeypatch):
    """The fake runtime's own functions, on a machine whose driver lists both GPUs; a test leaves nothing."""
    monkeypatch.setenv("ROCM_PATH", str(rocm))
    monkeypatch.setattr(bindings, "_MAPS", tmp_path / "none")
    monkeypatch.setattr(hip_driver, "_DRIVER", tmp_path)
    monkeypatch.setattr(hip_driver, "_TOPOLOGY", tmp_path / "nodes")
    for node, version in enumerate((0, 90402, 110000)):
        (tmp_path / "nodes" / str(node)).mkdir(parents=True)
        properties = f"simd_count {node}\ngfx_target_version {version}\n"
        (tmp_path / "nodes" / str(node) / "properties").write_text(properties)
    library = ctypes.CDLL(str(rocm / "lib" / "libamdhip64.so"))
    library.fake_reset(2)
    with leaves_nothing(library.fake_live):
        yield library


@pytest.fixture(scope="module")
def folder(populated, tmp_path_factory):
    folder = tmp_path_factory.mktemp("amd")
    shutil.copy(populated("gfx942"), folder / "catalog.db")
    return folder


@pytest.fixture
def catalog(fake, folder):
    catalog = Catalog(folder / "catalog.db")
    catalog.builds.builder = Builder(folder / "cache", targets=lambda _arch: target())
    yield catalog
    catalog.close()
    catalog._devices = catalog._planners.devices = Devices(
        None
    )  # pytest keeps the catalog for longer than the runtime's memory may live


@pytest.fixture
def on_gpu(catalog):
    """Makes arrays in the GPU's memory, with what NumPy arrays hold."""

    def on_gpu(array, **changed):
        memory = Memory(catalog.device("gfx942").runtime, 0, array.nbytes)
        held(memory, array)[...] = array
        return Exposed(memory, array.shape, typestr=array.dtype.str, **changed)

    return on_gpu


@pytest.mark.parametrize("arch", slow_but(["gfx942"], ["gfx942", "gfx1100"]))
@pytest.mark.parametrize("problem", [DENSE, PACKED, SPLIT], ids=["dense", "packed", "splitkv"])
def test_a_plan_runs_on_the_first_gpu_of_its_arch(catalog, arch, problem):
    assert why_unavailable(arch) is None
    result = catalog.select(problem, arch=arch).run(seed=3, repeats=2)
    assert np.array_equal(result.outputs["o"], expected(problem, make_inputs(problem, 3)["v"]))
    assert result.kernels == tuple(kernel.name for kernel in catalog.select(problem, arch=arch).kernels)
    assert result.time_ms > 0
    assert catalog.device(arch).device.arch == arch
    assert catalog.select(problem, arch=arch).run().compile_seconds == 0


def test_numpy_arrays_are_copied_at_each_launch(catalog):
    inputs = {name: array.copy() for name, array in make_inputs(DENSE).items()}
    interleaved = np.full((2, 5, 4, 128), np.nan, np.float16)
    bound = catalog.select(DENSE, arch="gfx942").bind(inputs, outputs={"o": interleaved.swapaxes(1, 2)})
    assert np.isnan(interleaved).all()
    for fill in (1, 2):
        inputs["v"][...] = fill
        bound.launch()
        assert (interleaved == fill).all()
    inputs["v"][...] = 3
    assert len(bound.time(4)) == 4
    assert (interleaved == 3).all()


@pytest.mark.parametrize("shared_by", ["interface", "dlpack"])
def test_arrays_in_gpu_memory_are_used_where_they_are(catalog, fake, on_gpu, shared_by):
    arrays = make_inputs(DENSE) | make_outputs(DENSE)
    given = {name: Shared(array) for name, array in arrays.items()}
    if shared_by == "interface":
        given = {name: on_gpu(array) for name, array in arrays.items()}
        arrays = {name: held(array.memory, arrays[name]) for name, array in given.items()}
    o = given.pop("o")
    bound = catalog.select(DENSE, arch="gfx942").bind(given, outputs={"o": o})
    for fill in (1, 2):
        arrays["v"][...] = fill
        bound.launch()
        assert (arrays["o"] == fill).all()
    assert bound.outputs["o"] is o
    assert fake.fake_calls(b"hipMemcpyAsync") == 0


def test_outputs_of_gpu_inputs_are_numpy_arrays_where_none_are_given(catalog, on_gpu):
    inputs = make_inputs(DENSE)
    outputs = catalog.select(DENSE, arch="gfx942").run(inputs | {"v": on_gpu(inputs["v"])}).outputs
    assert np.array_equal(outputs["o"], expected(DENSE, inputs["v"]))


@pytest.mark.parametrize("in_memory_of", ["the host", "the GPU"])
def test_updated_inputs_are_updated_where_they_are(catalog, on_gpu, in_memory_of):
    inputs = {name: array.copy() for name, array in make_inputs(APPEND).items()}
    given = dict(inputs)
    cache = inputs["k_cache"]
    if in_memory_of == "the GPU":
        given["k_cache"] = on_gpu(cache)
        cache = held(given["k_cache"].memory, cache)
    outputs = catalog.select(APPEND, arch="gfx942").run(given).outputs
    assert outputs["k_cache"] is given["k_cache"]
    assert np.array_equal(cache.reshape(-1)[:128], inputs["k_new"].reshape(-1)[:128])
    assert np.array_equal(cache.reshape(-1)[128:], make_inputs(APPEND)["k_cache"].reshape(-1)[128:])


def test_an_output_that_shares_memory_with_another_tensor_is_refused(catalog, on_gpu):
    problem = Problem(batch=2, nhead_q=4, seqlen_q=5, hdim_q=128, dtype="fp16")
    plan = catalog.select(problem, arch="gfx942")
    room = on_gpu(np.zeros((2, 5, 4, 4, 128), np.float16))  # one buffer of Q, K, V and O, each with its own elements

    def part(byte, strides=(20480, 256, 4096, 2)):
        place = {"data": (room.memory.handle + byte, False), "strides": strides}
        return Exposed(room.memory, problem.shapes["o"], typestr="<f2", **place)

    q, k, v, o = (part(1024 * i) for i in range(4))
    for other, shared in (
        ("q", part(0)),
        ("k", part(1024)),
        ("v", part(2048 + 256)),
        ("q", part(0, (5120, 256, 1024, 2))),
    ):
        with pytest.raises(TensorError, match=f"the output o shares memory with {other}"):
            plan.bind(q=q, k=k, v=v, outputs={"o": shared})
    plan.bind(q=q, k=k, v=v, outputs={"o": o}).launch()


def test_lengths_and_pages_in_numpy_arrays_are_checked(catalog, on_gpu):
    plan, inputs = catalog.select(PAGED, arch="gfx942"), make_inputs(PAGED)
    too_long = {"seqlens_k": np.array([128, 129], np.int32)}
    beyond = np.full_like(inputs["block_table"], PAGED.num_pages)
    for change in (too_long, too_long | {"block_table": on_gpu(inputs["block_table"])}):
        with pytest.raises(TensorError, match=r"seqlens_k\[1\] is 129: must be from 0 to 128"):
            plan.bind(inputs | change)
    with pytest.raises(TensorError, match=r"block_table\[0\] is 2: must be from 0 to 1"):
        plan.bind(inputs | {"block_table": beyond})
    plan.bind(inputs | {"block_table": on_gpu(beyond)})  # the host cannot read it


def test_tensors_are_checked_before_anything_is_compiled(catalog, tmp_path):
    catalog.builds.builder = Builder(tmp_path / "cache", targets=lambda _arch: target())
    plan, inputs = catalog.select(DENSE, arch="gfx942"), make_inputs(DENSE)
    for change, message in (
        ({"q": Shared(inputs["q"], index=1)}, "q is on GPU 1: the kernel runs on GPU 0"),
        ({"q": Shared(inputs["q"][:1])}, r"q is float16 \(1, 4, 5, 128\): expected float16 \(2, 4, 5, 128\)"),
        ({"k": None}, "k is missing"),
        ({"extra": object()}, "extra is not a tensor of this problem: expected q, k, v"),
    ):
        with pytest.raises(TensorError, match=message):
            plan.run(inputs | change)
    assert not (tmp_path / "cache").exists()


def test_a_library_of_another_arch_is_refused(catalog, tmp_path):
    wrong = target(lambda row: row.replace('"arch":"gfx942"', '"arch":"gfx950"'))
    catalog.builds.builder = Builder(tmp_path / "cache", targets=lambda _arch: wrong)
    with pytest.raises(DeviceError, match="is for gfx950, and GPU 0 is of arch gfx942"):
        catalog.select(DENSE, arch="gfx942").run()


@pytest.fixture
def lacking(request, fake, monkeypatch, tmp_path):
    """The machine without something."""
    if request.param == "the driver":
        monkeypatch.setattr(hip_driver, "_DRIVER", tmp_path / "kfd")
    if request.param == "the GPU":
        (tmp_path / "nodes" / "2" / "properties").unlink()
    if request.param == "the runtime":
        monkeypatch.setattr(bindings, "_candidates", lambda: iter(()))
    fake.fake_reset({"permission": 0, "visibility": 1}.get(request.param, 2))


LACKING = [
    ("the driver", r"it needs an AMD GPU of arch gfx1100, and there is none \(.*/kfd, the amdgpu driver's device"),
    ("the GPU", "it needs an AMD GPU of arch gfx1100; the GPUs here are gfx942"),
    ("permission", r"the HIP runtime 6\.2\.41133 finds no GPU"),
    ("visibility", r"finds no GPU of arch gfx1100, but AMD Instinct MI300X of arch gfx942 \(HIP_VISIBLE"),
    ("the runtime", r"libamdhip64\.so, is missing"),
]


@pytest.mark.parametrize(("lacking", "reason"), slow_but(LACKING[:1], LACKING), indirect=["lacking"])
@pytest.mark.usefixtures("lacking")
def test_a_machine_without_such_a_gpu_says_what_it_lacks(catalog, reason):
    with pytest.raises(DeviceError, match=f"gfx1100 kernels cannot run on this machine: .*{reason}") as raised:
        catalog.select(DENSE, arch="gfx1100").run()
    assert str(why_unavailable("gfx1100")) in str(raised.value)


def test_a_gpu_that_stops_a_kernel_is_reported_and_leaves_nothing(catalog, fake):
    bound = catalog.select(DENSE, arch="gfx942").bind()
    fake.fake_fail(b"hipStreamSynchronize", 700)
    for run in (bound.launch, bound.time):
        with pytest.raises(DeviceError, match=r"hipErrorIllegalAddress \(700\)\nThe GPU stopped a kernel"):
            run()


def test_stages_share_the_workspaces(catalog):
    inputs = make_inputs(SPLIT)
    bound = catalog.select(SPLIT, arch="gfx942").bind(inputs)
    assert len(bound.kernels) == 2
    bound.launch()
    assert np.array_equal(bound.outputs["o"], expected(SPLIT, inputs["v"]))


def test_threads_share_one_device_of_an_arch(catalog):
    barrier, devices = threading.Barrier(8), []

    def ask(arch):
        barrier.wait()
        devices.append(catalog.device(arch))

    threads = [threading.Thread(target=ask, args=(arch,)) for arch in ["gfx942"] * 4 + ["gfx1100"] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(devices) == 8
    assert {id(device) for device in devices} == {id(catalog.device(arch)) for arch in ("gfx942", "gfx1100")}
    assert catalog.device("host") is catalog.device(ARCH) is catalog.host()


def test_a_trace_keeps_what_is_in_gpu_memory(catalog, on_gpu, tmp_path):
    inputs = {name: array.copy() for name, array in make_inputs(DENSE).items()}
    apart = np.zeros((2, 2, 2, 70, 128), np.float16)  # every second batch is another's
    apart[:, 0] = inputs["k"]
    held_apart = on_gpu(apart)
    strides = {"strides": (apart.strides[0], *apart.strides[2:])}
    given = {
        "q": on_gpu(inputs["q"]),
        "k": Exposed(held_apart.memory, DENSE.shapes["k"], typestr="<f2", **strides, **pointing_to(held_apart)),
        "v": on_gpu(inputs["v"]),
    }
    outputs = {"o": on_gpu(make_outputs(DENSE)["o"])}
    plan = catalog.select(DENSE, arch="gfx942")
    with trace(tmp_path / "calls.jsonl", tensors=2):
        plan.bind(given, outputs=outputs).launch()
        plan.enqueue(given, outputs=outputs)
    (used,) = read_trace(tmp_path / "calls.jsonl").used
    assert len(used.times) == 1, "what is only queued has no time"
    assert len(used.recordings) == 2
    for recording in used.recordings:
        kept = recording.load(DENSE)
        assert all(np.array_equal(kept[name], inputs[name]) for name in inputs)


def pointing_to(exposed):
    return {"data": exposed.__cuda_array_interface__["data"]}


@pytest.mark.slow
def test_benchmarks_and_the_comparison_with_the_reference_run_on_a_gpu(catalog):
    report = bench_problem(catalog, DENSE, BenchOptions("gfx942", candidates=2, rule=StopRule(least=2)))
    assert len(report.benchmarks) == 2
    assert (report.device, report.peaks) == (catalog.device("gfx942").device, None)
    assert report.about == "Timed by the clock of AMD Instinct MI300X, gfx942; its peaks were not measured."
    row = dict(zip(COLUMNS, report.benchmarks[0].row, strict=True))
    assert row["median_ms"] > 0
    assert row["percent_of_peak"] is row["percent_of_bandwidth"] is None

    one_key = Problem(batch=1, nhead_q=4, nhead_k=2, seqlen_q=1, seqlen_k=1, hdim_q=128, dtype="fp16")  # O is V
    for problem, right in ((one_key, True), (DENSE, False)):
        facts, passed = run_problem(catalog, problem, arch="gfx942", seed=0, repeats=1, validate=True)
        assert passed is right
        assert facts["arch"] == "gfx942"
