"""The host device, with libraries compiled here that answer as kernels do."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import archspec.cpu
import pytest
from conftest import load, missing
from tiny_project import make_kernel

import catalog
from catalog import doctor
from catalog.backends import backend_of
from catalog.build.builder import Artifact
from catalog.build.toolchains import digest_of
from catalog.errors import DeviceError
from catalog.ops import operation
from catalog.ops.attention.arguments import ARGUMENTS
from catalog.ops.attention.problem import Problem
from catalog.runtime.devices.host import device as host_device
from catalog.runtime.devices.host.device import HostDevice, host_archs, resolve_host_arch, why_unavailable
from catalog.runtime.inputs import make_inputs
from catalog.runtime.plan import Plan, Shared
from catalog.runtime.tensors import make_outputs
from catalog.schema.arguments import ABI_VERSION

KERNELS = operation().headers["kernels"]
INCLUDES = (f"-I{Path(catalog.__file__).parent / 'build' / 'abi'}", f"-I{KERNELS}")
PROBLEM = Problem(seqlens_q=[3, 0, 5], nhead_q=4, nhead_k=2, hdim_q=16, dtype="fp32", mask="window", window=(7, 0))

KERNEL = r"""
#include "catalog_abi.h"
const char* catalog_describe(void) { return "{\"id\": \"ROW\"}"; }
int32_t catalog_workspace_size(const catalog_args* args, catalog_workspace* size) { return CATALOG_BAD_ARGUMENT; }
int32_t catalog_launch(const catalog_args* args, void* stream) {
    if (args->abi_version != VERSION) return CATALOG_ABI_MISMATCH;
    if (stream || args->batch < 0) return CATALOG_BAD_ARGUMENT;
    float* o = args->o.data;
    o[0] = args->num_threads + args->seqstart_q[args->batch] + 100 * args->window_left;
    o[1] = args->scale;
    o[2] = ((float*)args->v.data)[args->v.stride_seqlen];
    return STATUS;
}
"""


@pytest.fixture(scope="module")
def compiler():
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or missing("a C compiler")


@pytest.fixture
def build(compiler, tmp_path):
    def build(source=KERNEL, row="ROW", version="CATALOG_ABI_VERSION", status="CATALOG_OK"):
        """Compile to a new file, renamed over the old one, as the kernel cache does."""
        for word, value in (("ROW", row), ("VERSION) return", f"{version}) return"), ("STATUS;", f"{status};")):
            source = source.replace(word, value)
        (tmp_path / "kernel.c").write_text(source)
        library = tmp_path / "kernel.so"
        command = [compiler, "-shared", "-fPIC", *INCLUDES, "kernel.c", "-o", "new.so"]
        subprocess.run(command, cwd=tmp_path, check=True)
        (tmp_path / "new.so").replace(library)
        return library

    return build


def test_the_header_of_the_arguments_is_the_one_of_their_list():
    assert (KERNELS / "operation" / "args.h").read_text() == ARGUMENTS.header


def test_the_argument_struct_is_the_headers(compiler, tmp_path):
    structs = {"catalog_tensor": ARGUMENTS.tensor, "catalog_args": ARGUMENTS.args}
    structs["catalog_workspace"] = ARGUMENTS.workspace
    members = [(name, struct, member) for name, struct in structs.items() for member, *_ in struct._fields_]
    lines = [f"{name}, {member})" for name, _, member in members]
    (tmp_path / "layout.c").write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "catalog_abi.h"\n'
        "#define SHOW(type, member) "
        'printf(#member " %zu %zu\\n", offsetof(type, member), sizeof(((type*)0)->member));\n'
        "int main(void) {\n" + "\n".join(f"SHOW({line}" for line in lines) + "\n"
        'printf("%zu %d\\n", sizeof(catalog_args), CATALOG_ABI_VERSION);\n}\n'
    )
    subprocess.run([compiler, *INCLUDES, "layout.c", "-o", "layout"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    ours = [(member, getattr(struct, member)) for _, struct, member in members]
    assert printed.splitlines() == [
        *(f"{member} {place.offset} {place.size}" for member, place in ours),
        f"{ctypes.sizeof(ARGUMENTS.args)} {ABI_VERSION}",
    ]


def test_a_kernel_gets_the_problem_and_writes_the_outputs(build):
    device = HostDevice(num_threads=5)
    kernel = load(device, build())
    inputs, outputs = make_inputs(PROBLEM), make_outputs(PROBLEM)
    call = device.call(PROBLEM, inputs | outputs)
    device.launch(kernel, call)
    first = outputs["o"].ravel()[:3]
    assert first.tolist() == [5 + 8 + 700, PROBLEM.softmax_scale, inputs["v"][1, 0, 0]]
    assert all(duration > 0 for duration in device.time([kernel], call, launches=3))


def test_a_library_is_loaded_once_until_its_content_changes(build):
    device = HostDevice()
    path = build()
    kernel = load(device, path)
    assert load(device, path) is kernel
    with pytest.raises(DeviceError, match="built from row ROW, not from other"):
        load(device, path, "other")
    assert load(device, build(row="rebuilt"), "rebuilt").id == "rebuilt"


@pytest.mark.parametrize("loss", [Path.unlink, lambda path: os.truncate(path, 99)], ids=["dropped", "damaged"])
def test_a_library_that_is_lost_between_build_and_load_is_built_again(build, loss):
    """As when another process drops it from the cache at that moment."""
    builds = []

    def build_and_lose(kernel):
        path = build()
        artifact = Artifact("key", path, digest_of(str(path)), path.stat().st_size, "ROW", 1.0, cached=False)
        builds.append(path)
        if len(builds) == 1:
            loss(path)
        return artifact

    device = HostDevice(num_threads=5)
    kernel = make_kernel()
    services = SimpleNamespace(
        shared=Shared(),
        build=build_and_lose,
        device=lambda arch: device,
        guard=lambda *loaded: None,
    )
    plan = Plan(PROBLEM, resolve_host_arch(), (kernel,), services)
    assert plan.run(make_inputs(PROBLEM)).outputs["o"].ravel()[0] == 5 + 8 + 700
    assert len(builds) == 2


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("CATALOG_BAD_ARGUMENT", "kernel ROW: the kernel was not built for this call"),
        ("CATALOG_NO_MEMORY", "kernel ROW: it could not allocate its scratch memory"),
        (
            "CATALOG_UNSUPPORTED",
            "kernel ROW: this CPU lacks instructions that it uses, or the system does not permit them",
        ),
        ("77", "kernel ROW: unknown status 77"),
    ],
)
def test_a_failed_launch_is_explained(build, status, message):
    device = HostDevice()
    kernel = load(device, build(status=status))
    with pytest.raises(DeviceError, match=message):
        device.launch(kernel, device.call(PROBLEM, make_inputs(PROBLEM) | make_outputs(PROBLEM)))


def test_libraries_that_are_no_kernels(build, tmp_path):
    device = HostDevice()
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    with pytest.raises(DeviceError, match=r"cannot load .*broken\.so"):
        load(device, broken)
    with pytest.raises(DeviceError, match=r"is not a kernel: .*catalog_describe"):
        load(device, build("int other(void) { return 0; }"))
    with pytest.raises(DeviceError, match="another version of the argument struct"):
        load(device, build(version="99"))
    with pytest.raises(DeviceError, match="does not say which row"):
        load(device, build(KERNEL.replace('\\"id\\": ', "")))


HOST_ARCHS = ("x86_64_v4", "x86_64_v3", "aarch64_sve512", "aarch64", "aarch64_sve256")
"""Best first."""


@pytest.mark.parametrize(
    ("found", "resolved", "reasons"),
    [
        (
            "zen4",
            "x86_64_v4",
            {"x86_64_v3": None, "aarch64": "aarch64 needs a CPU of family aarch64: this one is zen4"},
        ),
        ("zen3", "x86_64_v3", {"x86_64_v4": "x86_64_v4 needs avx512bw, .*, which this CPU, zen3, lacks"}),
        ("neoverse_v1", "aarch64", {"x86_64_v3": "x86_64_v3 needs a CPU of family x86_64", "aarch64_sve256": None}),
        (
            "cortex_a72",
            "aarch64",
            {"aarch64_sve256": ".* needs SVE with vectors of 256 bits: .* has no SVE"},
        ),
        ("a64fx", "aarch64_sve512", {"aarch64_sve256": ".* of 256 bits: this CPU, a64fx, has 512 bits"}),
        ("power9le", None, {"gfx942": f"gfx942 is not a CPU arch: host archs are {', '.join(HOST_ARCHS)}$"}),
    ],
)
def test_the_host_arch_is_what_the_cpu_runs(monkeypatch, found, resolved, reasons):
    monkeypatch.setattr(archspec.cpu, "host", lambda: archspec.cpu.TARGETS[found])
    monkeypatch.setattr(host_device, "sve_bits", lambda: {"neoverse_v1": 256, "a64fx": 512}.get(found, 0))
    if resolved:
        assert resolve_host_arch() == resolved
    else:
        with pytest.raises(DeviceError, match=f"no host arch runs on this CPU, {found}"):
            resolve_host_arch()
    for arch, reason in reasons.items():
        assert re.match(reason or "None", str(why_unavailable(arch)))


@pytest.mark.parametrize(
    ("found", "has"),
    [("neoverse_v1", {"asimd", "bf16", "fphp", "i8mm", "sve"}), ("cortex_a72", {"asimd"}), ("zen4", {"avx512_bf16"})],
)
def test_doctor_shows_the_features_that_selection_reads(monkeypatch, found, has):
    archspec.cpu.host()  # what it keeps for the process is this CPU
    monkeypatch.setattr(archspec.cpu.detect, "detected_info", lambda: archspec.cpu.TARGETS[found])
    monkeypatch.setattr(host_device, "cpu_features", host_device.cpu_features.__wrapped__)  # not what was read before
    shown = set(doctor.about_cpu().about.split())
    assert shown & {"amx_bf16", "asimd", "avx512_bf16", "bf16", "fphp", "i8mm", "sve"} == has
    assert shown <= backend_of("host").features


def test_this_machine_is_described():
    device = HostDevice(num_threads=3).device
    assert device.arch in host_archs()
    assert device.cores == 3
    assert device.name
