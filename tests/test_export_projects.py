"""Rows as projects that build without the catalog: compiled by real build tools, loaded, registered, run."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import command
import pytest
from build_tools import build, library
from conftest import slow_but

from catalog.backends import target_of, toolset_of
from catalog.build.export import rows
from catalog.build.export.projects import ProjectFormat
from catalog.errors import BuildError, UsageError
from catalog.ops import operation_of
from catalog.ops.attention.problem import Problem
from catalog.runtime.bound import take
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host.device import HostDevice
from catalog.runtime.devices.loading import LoadedKernel
from catalog.runtime.tensors import results
from catalog.schema.arguments import ABI_VERSION
from catalog.schema.arithmetic import Arithmetic
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem as AnyProblem

export_project = partial(rows.export_project, targets=target_of, toolsets=toolset_of)
export_register = partial(rows.export_register, targets=target_of, toolsets=toolset_of)

PROBLEMS = (
    Problem(batch=1, nhead_q=2, seqlen_q=33, hdim_q=32, dtype="fp32"),
    Problem(batch=2, nhead_q=4, nhead_k=2, seqlen_q=20, seqlen_k=70, hdim_q=32, dtype="bf16", mask="causal", lse=True),
    Problem(batch=1, nhead_q=1, seqlen_q=17, hdim_q=64, dtype="fp32", mask="bottom_right"),
)

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)


class Entry(ctypes.Structure):
    """PREFIX_kernel of the exported header."""

    _fields_ = (
        ("id", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("arch", ctypes.c_char_p),
        ("describe", ctypes.CFUNCTYPE(ctypes.c_char_p)),
        ("workspace_size", LAUNCH),
        ("launch", LAUNCH),
    )


ADD = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(Entry), ctypes.c_void_p)


@pytest.fixture(scope="module")
def catalog(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return Catalog(shutil.copy(host_file, tmp_path_factory.mktemp("export") / "catalog.db"))


@pytest.fixture(scope="module")
def kernels(catalog: Catalog) -> list[Kernel]:
    """What answers each of the problems."""
    return [catalog.select(problem).kernels[0] for problem in PROBLEMS]


@pytest.fixture(params=slow_but([ProjectFormat.MAKE], ProjectFormat), ids=[form.value for form in ProjectFormat])
def form(request: pytest.FixtureRequest) -> ProjectFormat:
    return ProjectFormat(request.param)


def registered(path: Path) -> dict[str, Entry]:
    """The kernels of a library by id, from its table and from its registration, which agree."""
    opened = ctypes.CDLL(str(path))
    opened.mine_kernels.restype = ctypes.POINTER(Entry)
    count = ctypes.c_size_t()
    table = opened.mine_kernels(ctypes.byref(count))
    added = []
    assert opened.mine_register_kernels(ADD(lambda entry, _: added.append(entry.contents.name) or 0), None) == 0
    assert added == [table[index].name for index in range(count.value)] == sorted(added)
    return {table[index].id.decode(): table[index] for index in range(count.value)}


def run(entry: Entry, problem: AnyProblem) -> set[str]:
    """Launch a kernel of the table; what it writes is what the reference says. The names of its results."""
    device = HostDevice()
    tensors = dict(take(problem, device, {}, None, 0).arrays)
    inputs = {name: array for name, array in tensors.items() if problem.tensors[name].role == "input"}
    of = operation_of(problem)
    kernel = LoadedKernel(entry.id.decode(), Path(), None, of.arguments, entry.launch, entry.workspace_size)
    device.launch(kernel, device.call(problem, tensors))
    rounds = any(f"_{pipeline}_" in entry.name.decode() for pipeline in ("host_bf16", "host_amx"))
    arithmetic = Arithmetic(rounds_factors=rounds, transforms_factors="_host_winograd_" in entry.name.decode())
    allowed, expected = of.tolerances(problem, inputs, arithmetic), of.reference(problem, inputs)
    outputs = results(problem.form, tensors)
    for name, written in outputs.items():
        assert allowed[name].used(written, expected[name]) <= 1
    return set(outputs)


def test_each_tool_builds_a_library_of_kernels_that_compute_what_the_reference_does(
    kernels: list[Kernel], form: ProjectFormat, tmp_path: Path
) -> None:
    out = tmp_path / "it's $HOME kernels"
    two = [f"kernels/{kernel.name}" for kernel in sorted(kernels[:2], key=lambda kernel: kernel.name)]
    assert export_project(kernels[:2], out, "mine", form)
    assert sorted(build(form, out, CXXFLAGS="-O1")) == [*two, "mine_register"]

    before = registered(library(form, out, "libmine.so"))
    assert set(before) == {kernel.id for kernel in kernels[:2]}
    for kernel, problem in zip(kernels[:2], PROBLEMS, strict=False):
        entry = before[kernel.id]
        assert entry.arch.decode() == kernel.arch
        assert json.loads(entry.describe())["id"] == kernel.id
        assert run(entry, problem) == ({"o", "lse"} if problem.lse else {"o"})

    assert export_project(kernels[:2], out, "mine", form) == []
    assert build(form, out, CXXFLAGS="-O1") == [], "nothing changed, nothing compiles"

    export_project(kernels, out, "mine", form)
    assert sorted(build(form, out, CXXFLAGS="-O1")) == [f"kernels/{kernels[2].name}", "mine_register"]
    loaded = subprocess.run(
        [sys.executable, "-c", LIST, str(library(form, out, "libmine.so"))], capture_output=True, text=True, check=True
    )
    assert loaded.stdout == "3\n"


LIST = """
import ctypes, sys
count = ctypes.c_size_t()
ctypes.CDLL(sys.argv[1]).mine_kernels(ctypes.byref(count))
print(count.value)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("nvcc")
def test_each_tool_builds_a_library_of_kernels_for_nvidia_gpus(
    form: ProjectFormat, populated: Callable[..., Path], tmp_path: Path
) -> None:
    with Catalog(shutil.copy(populated("sm_90"), tmp_path / "catalog.db")) as catalog:
        kernels = catalog.kernels("family = 'bwd_convert_dq' AND dtype = 'bf16'", arch="sm_90")[:2]
    export_project(kernels, tmp_path / "out", "mine", form)
    environment = {"CXX": "false", "CXXFLAGS": "-Wall", "LDFLAGS": "-Wl,--no-undefined"}
    assert len(build(form, tmp_path / "out", **environment)) == len(kernels) + 1

    table = registered(library(form, tmp_path / "out", "libmine.so"))
    assert {json.loads(entry.describe())["id"] for entry in table.values()} == {kernel.id for kernel in kernels}
    assert build(form, tmp_path / "out", **environment) == []


@pytest.mark.slow
def test_the_compiler_is_a_variable(kernels: list[Kernel], form: ProjectFormat, tmp_path: Path) -> None:
    export_project(kernels[:1], tmp_path / "out", "mine", form)
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "$@" >> "$0.log"\nexec g++ -O1 "$@"\n')
    compiler.chmod(0o755)
    build(form, tmp_path / "out", CXX=str(compiler))
    assert "-shared" in (tmp_path / "compiler.log").read_text()


def test_the_inventory_says_with_what_which_file_is_compiled(kernels: list[Kernel], tmp_path: Path) -> None:
    export_project(kernels, tmp_path, "mine", ProjectFormat.MAKE)
    inventory = json.loads((tmp_path / "inventory.json").read_text())
    arch = kernels[0].arch
    assert inventory["isa"] == {arch: arch.replace("_", "-")}
    assert f"-march={inventory['isa'][arch]}" in inventory["compile_flags"][arch]
    assert "-shared" in inventory["link_flags"][arch]
    assert inventory["abi"] == ABI_VERSION
    assert {row["id"]: row["file"] for row in inventory["kernels"]} == {
        kernel.id: f"kernels/{kernel.name}.cpp" for kernel in kernels
    }
    there = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert there == {*inventory["files"], "inventory.json"}


def test_files_of_rows_no_longer_selected_go_and_nothing_else_is_touched(kernels: list[Kernel], tmp_path: Path) -> None:
    export_project(kernels, tmp_path, "mine", ProjectFormat.NINJA)
    units = {kernel.id: tmp_path / "kernels" / f"{kernel.name}.cpp" for kernel in kernels}
    (tmp_path / "kernels" / "notes.cpp").write_text("mine")
    kept = units[kernels[0].id]
    os.utime(kept, (1, 1))
    changed = export_project(kernels[:2], tmp_path, "mine", ProjectFormat.MAKE)
    assert not units[kernels[2].id].exists()
    assert not (tmp_path / "build.ninja").exists()
    assert kept.stat().st_mtime == 1
    assert kept not in changed
    assert (tmp_path / "kernels" / "notes.cpp").read_text() == "mine"


def test_an_inventory_can_remove_nothing_outside_of_its_folder(kernels: list[Kernel], tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "precious"
    export_register(kernels[:1], out, "mine")
    outside.write_text("mine")
    inventory = json.loads((out / "inventory.json").read_text())
    inventory["files"] += ["../precious", str(outside)]
    (out / "inventory.json").write_text(json.dumps(inventory))
    export_register(kernels[:1], out, "mine")
    assert outside.exists()


def test_a_folder_of_somebody_else_is_refused(kernels: list[Kernel], tmp_path: Path) -> None:
    for content in ("", "[1]", '{"files": ["precious"]}'):
        (tmp_path / "precious").write_text("mine")
        (tmp_path / "inventory.json").write_text(content)
        with pytest.raises(UsageError, match="is not empty"):
            export_project(kernels, tmp_path, "mine", ProjectFormat.CMAKE)
    assert {path.name for path in tmp_path.iterdir()} == {"precious", "inventory.json"}
    with pytest.raises(UsageError, match="is not a folder"):
        export_project(kernels, tmp_path / "precious", "mine", ProjectFormat.CMAKE)
    with pytest.raises(BuildError, match="/proc/none"):
        export_project(kernels, Path("/proc/none"), "mine", ProjectFormat.CMAKE)


def test_rows_of_two_arches_make_no_project(kernels: list[Kernel], tmp_path: Path) -> None:
    other = kernels[0].model_copy(update={"arch": "aarch64"})
    with pytest.raises(UsageError, match="one arch, and these rows are of aarch64, "):
        export_project([*kernels[1:], other], tmp_path, "mine", ProjectFormat.CMAKE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--where", "1"], "--out"),
        (["--out", "out"], "--where"),
        (["--where", "1", "--out", "out", "--format", "bazel"], "cmake, make or ninja"),
        (["--where", "hdim=1", "--out", "out"], "Did you mean hdim"),
        (["--where", "hdim_q=1", "--out", "out"], "no kernels"),
        (["--format", "make", "wrap", "--kernel-dir", ".", "--out", "out"], "come after its name"),
        (["--where", "1", "register", "--where", "1", "--out", "out"], "come after its name"),
    ],
)
def test_mistakes_on_the_command_line_are_reported(
    catalog: Catalog, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command.catalog("export", *words, db=catalog.path)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert not (tmp_path / "out").exists()


def test_the_plain_command_writes_a_project_and_says_how_to_build_it(
    catalog: Catalog, kernels: list[Kernel], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    chosen = ["--where", f"id IN {tuple(kernel.id for kernel in kernels)}", "--limit", "1"]
    done = command.catalog("export", "--format", "ninja", *chosen, "--out", out, "--prefix", "mine", db=catalog.path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"1 kernel in {out}: ")
    assert f"ninja -C {out}" in done.stdout
    assert (out / "build.ninja").is_file()
