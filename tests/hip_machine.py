"""A machine with a HIP compiler: shell scripts that answer what a clang, or Zig, answers about itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from catalog.build.hip import toolchain as hip
from catalog.build.hip.facts import hip_facts
from catalog.build.hip.toolchain import hip_toolchain
from catalog.build.keys import KeyMaker, TranslationUnit
from catalog.build.toolchains import Toolchain, identify
from catalog.settings import settings

TRIPLE = "x86_64-pc-linux-gnu"
CLANG = """#!/bin/sh
for last; do :; done
case "$*" in
  env) echo ".zig_exe = \\"{folder}/zig\\", .lib_dir = \\"$(realpath --relative-to=. {folder}/lib)\\"," ;;
  *--version*) echo "clang version {version}.0.0" ;;
  *-print-resource-dir*) echo "{folder}/resources" ;;
  *-print-prog-name=*) echo "{folder}/${{last#-print-prog-name=}}" ;;
  *-dumpmachine*) echo {triple} ;;
  *" -M "*) echo "kernel.o: kernel.cpp" ;;
  *-emit-llvm*) {make}; cat *.ll > "$last" ;;
esac
"""


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def make_clang(program: Path, version: int, make: str = ":") -> Path:
    write(program.parent / "lib" / "include" / "stddef.h")
    return write(program, CLANG.format(folder=program.parent, version=version, triple=TRIPLE, make=make))


@dataclass
class Machine:
    """A machine with ROCm's device libraries, of before gfx950, in ``root``, and clang 19 with HIP."""

    root: Path
    clang: Path

    def toolchain(self, arch: str = "gfx950") -> Toolchain:
        """What a new process would find."""
        settings.cache_clear()
        identify.cache_clear()
        hip._find.cache_clear()
        return hip_toolchain(arch)

    def key(self) -> str:
        return KeyMaker(self.root).key(TranslationUnit("int f();", {}, 1), self.toolchain()).hex


@pytest.fixture
def hip_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The machine that this one is for the test."""
    root = tmp_path / "rocm"
    for library in ("ocml", "ockl", "oclc_isa_version_90a", "oclc_abi_version_500", "oclc_daz_opt_on"):
        write(root / "amdgcn" / "bitcode" / f"{library}.bc", library)
    clang = make_clang(tmp_path / "clang" / "clang++", 19)
    for header in hip_facts().lent.headers:
        write(clang.parent / "resources" / "include" / header)
    for program in hip_facts().lent.programs:
        write(clang.parent / program, program)
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CATALOG_ROCM_PATH", str(root))
    monkeypatch.setenv("CATALOG_HIPCXX", str(clang))
    monkeypatch.setenv("CATALOG_HIPCXX_DEVICE", str(tmp_path / "no-zig"))
    settings.cache_clear()
    yield Machine(root, clang)
    monkeypatch.undo()
    settings.cache_clear()
