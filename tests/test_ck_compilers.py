"""HIP compilers on machines that have some."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hip_machine import TRIPLE, Machine, make_clang, write

from catalog.errors import ToolchainError

# Two processes that make the same module meet here: both have begun before either ends.
MEET = (
    "cd {folder}; touch $$.here; for i in $(seq 99); do [ $(ls *.here | wc -l) -ge 2 ] && break; sleep 0.1; done; cd -"
)


@pytest.fixture
def machine(hip_machine: Machine) -> Machine:
    return hip_machine


@pytest.fixture
def zig(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    zig = make_clang(tmp_path / "zig" / "zig", 22)
    monkeypatch.setenv("CATALOG_HIPCXX_DEVICE", f"{zig} c++")
    return zig


@pytest.mark.parametrize(
    ("arch", "spoil", "says"),
    [
        (
            "gfx950",
            lambda m: None,
            r"gfx950, which needs clang 20 .*clang version 19(.*\n)+.*pip install ziglang",
        ),
        ("gfx950", lambda m: None, r"CATALOG_HIPCXX_DEVICE=.*no-zig is not a program\n.*apt install clang"),
        ("gfx90a", lambda m: m.clang.unlink(), r"CATALOG_HIPCXX=.*is not a program"),
        ("gfx90a", lambda m: m.clang.write_text("#!/bin/sh\necho Traceback"), r"states no version of clang"),
        (
            "gfx90a",
            lambda m: (m.root / "amdgcn/bitcode/ocml.bc").unlink(),
            r"no device libraries.*\n.*rocm-device-libs",
        ),
    ],
)
def test_what_is_missing_is_named(arch: str, spoil: Callable[[Machine], None], says: str, machine: Machine) -> None:
    spoil(machine)
    with pytest.raises(ToolchainError) as raised:
        machine.toolchain(arch)
    assert re.search(says, str(raised.value)), raised.value


def test_a_newer_clang_compiles_with_the_hip_of_an_older_one(
    machine: Machine, zig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATALOG_COMPILER_LAUNCHER", "ccache")
    newer = machine.toolchain("gfx950")
    compiled, linked = newer.compile_command(()), newer.link_command()
    headers = machine.clang.parent / "resources" / "include"
    for command in (compiled, linked, newer.scan_command(())):
        assert command[:4] == [str(zig), "clang", "--driver-mode=g++", f"--target={TRIPLE}"]
        shown = " ".join(command)
        assert f"-resource-dir {zig.parent}/lib -isystem {headers}/cuda_wrappers -idirafter {headers}" in shown
        assert f"-B{machine.clang.parent}" in command
    assert "-mcode-object-version=5 " in " ".join(compiled), "the device libraries have no newer one"
    assert "-Xarch_device -D__AMDGCN_WAVEFRONT_SIZE=64 " in " ".join(compiled)
    (libraries,) = (flag for flag in compiled if flag.startswith("--rocm-device-lib-path="))
    constants = (Path(libraries.partition("=")[2]) / "oclc_isa_version_950.bc").read_text()
    assert "@__oclc_ISA_version " in constants, "the device libraries are older than the arch"
    assert " constant i32 9500," in constants
    assert "@__oclc_daz_opt " in constants, "the driver of clang 22 leaves its module out"
    assert newer.label == f"clang version 22.0.0 with HIP of {machine.clang} (clang version 19.0.0)"

    known = machine.toolchain("gfx90a")
    assert known.compile_command(())[:2] == ["ccache", str(machine.clang)], "the older one knows this arch"
    assert "WAVEFRONT" not in known.flags
    assert "code-object" not in known.flags


def test_a_wave_of_rdna_has_half_the_lanes(machine: Machine) -> None:
    make_clang(machine.clang, 22)
    assert "-Xarch_device -D__AMDGCN_WAVEFRONT_SIZE=32 " in machine.toolchain("gfx1100").flags
    assert machine.toolchain("gfx950").compiler.lender is None, "one clang that knows the arch goes first"


def test_which_zig_is_used(machine: Machine, zig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = make_clang(tmp_path / "on-path" / "zig", 21)
    packaged = make_clang(tmp_path / "site" / "ziglang" / "zig", 20)
    write(packaged.with_name("__init__.py"))
    monkeypatch.syspath_prepend(packaged.parents[1])
    found = [machine.toolchain().compiler.path]
    monkeypatch.delenv("CATALOG_HIPCXX_DEVICE")
    for folder in (on_path.parent, tmp_path):
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        found.append(machine.toolchain().compiler.path)
    assert found == [zig, on_path, packaged]


@pytest.mark.parametrize("lacking", ["lld", "clang-offload-bundler", "resources/include/__clang_hip_runtime_wrapper.h"])
def test_what_nobody_lends_is_named(lacking: str, machine: Machine, zig: Path) -> None:
    (machine.clang.parent / lacking).unlink()
    clang = re.escape(str(machine.clang))
    with pytest.raises(ToolchainError, match=rf"no other clang provides it: {clang} lacks {Path(lacking).name}"):
        machine.toolchain()


def test_the_key_covers_both_compilers(machine: Machine, zig: Path) -> None:
    """And what one lends to the other."""
    keys = [machine.key()]
    assert machine.key() == keys[0]
    for program in (
        zig,
        machine.clang,
        machine.clang.with_name("lld"),
        machine.clang.with_name("clang-offload-bundler"),
    ):
        program.write_text(program.read_text() + "# an update\n")
        keys.append(machine.key())
    make_clang(zig, 23)
    keys.append(machine.key())
    assert len(set(keys)) == len(keys)


def test_processes_that_complete_the_device_libraries_at_once_all_see_them_whole(machine: Machine) -> None:
    make_clang(machine.clang, 20, make=MEET.format(folder=machine.clang.parent))
    script = """
import json
from pathlib import Path
from catalog.build.hip.toolchain import hip_toolchain
(flag,) = (place for place in hip_toolchain("gfx950").places if place.startswith("--rocm-device-lib-path="))
folder = Path(flag.partition("=")[2])
print(json.dumps([str(folder), {path.name: path.read_text() for path in folder.iterdir()}]))
"""
    racers = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    seen = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    assert len(list(machine.clang.parent.glob("*.here"))) >= 2, "they made it at the same time"
    assert seen[0] == seen[1] == seen[2]
    folder, libraries = seen[0]
    originals = {path.name: path.read_text() for path in (machine.root / "amdgcn" / "bitcode").iterdir()}
    constants = libraries.pop("oclc_isa_version_950.bc")
    assert "constant i32 9500," in constants
    assert "daz" not in constants, "the driver of clang 20 finds that module"
    assert libraries == originals
    assert list(Path(folder).parent.iterdir()) == [Path(folder)], "no scratch is left"
