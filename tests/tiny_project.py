"""A target with tiny headers and kernels, to build many of."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from catalog.build.builder import Builder
from catalog.build.cache import ArtifactRecord
from catalog.build.keys import ContentKey, KeyMaker
from catalog.build.resources import of_host_build
from catalog.build.targets import Target
from catalog.build.toolchains import Toolchain, find_host_toolchain
from catalog.ops.attention.kernel import AttentionKernel
from catalog.ops.attention.traits import Algorithm, Signature

ARCH = "aarch64" if platform.machine() in {"aarch64", "arm64"} else "x86_64_v3"
TILE = {"tile_m0": 32, "tile_n0": 64, "warp_m0": 4, "warp_n0": 16, "warp_m1": 4, "warp_n1": 16}


def make_kernel(hdim: int = 64, **traits: object) -> AttentionKernel:
    signature = {"family": "fwd", "dtype": "fp32", "hdim_q": hdim, "hdim_v": hdim, **traits}
    return AttentionKernel(
        arch=ARCH,
        revision="native",
        space="native",
        mask_impl="generic",
        target="",
        signature=Signature.model_validate(signature),
        algorithm=Algorithm.model_validate({"pipeline": "host_panel", **TILE}),
    )


def answer_of(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


@dataclass
class Project:
    """A target with two headers; its kernels have one function, ``answer``: the head dim plus 1000."""

    folder: Path
    toolchain: Toolchain
    source: str = '#include "entry.hpp"\nextern "C" int answer() {{ return OFFSET + {hdim}; }}\n'

    @property
    def target(self) -> Target:
        return Target(
            lambda: {"project": self.folder},
            self.folder / "abi.h",
            lambda kernel, memory: self.source.format(hdim=kernel.signature.hdim_q),
            lambda arch: self.toolchain,
            of_host_build,
        )

    def builder(self, cache_dir: Path, record: Callable[[ArtifactRecord], None] | None = None) -> Builder:
        return Builder(cache_dir, record, targets=lambda arch: self.target)

    def key(self, scans: Path, hdim: int = 64) -> ContentKey:
        kernel = make_kernel(hdim)
        return KeyMaker(scans).key(self.target.unit(self.target.emit(kernel, scans), kernel), self.toolchain)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def launch_with(self, script: Path, text: str) -> None:
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        self.toolchain = replace(self.toolchain, launcher=(str(script),))

    def move(self) -> None:
        """The same project in another folder."""
        self.folder = self.folder.rename(self.folder.parent / "a folder of $another user")


def make_project(folder: Path) -> Project:
    host = find_host_toolchain(ARCH, None, None, os.environ["PATH"])
    tiny = replace(host, compile_flags=("-O0", "-fPIC"), link_flags=("-shared",))
    project = Project(folder / "include", tiny)
    project.folder.mkdir()
    project.write("entry.hpp", '#include "inner.hpp"\nextern "C" const char* place() { return __FILE__; }\n')
    project.write("inner.hpp", "#define OFFSET 1000\n")
    project.write("abi.h", "#define CATALOG_ABI_VERSION 1\n")
    return project
