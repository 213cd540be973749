"""Targets: the headers, compiler and flags that turn rows of an arch into libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from catalog.build.cuda.facts import CudaArch, cuda_facts
from catalog.build.cuda.toolchain import cuda_toolchain
from catalog.build.hip.toolchain import hip_toolchain
from catalog.build.keys import TranslationUnit, abi_number
from catalog.build.resources import Resources, of_cuda_build, of_hip_build, of_host_build
from catalog.build.toolchains import Toolchain, host_toolchain
from catalog.ops.attention.kernels.ck import emit as ck
from catalog.ops.attention.kernels.cuda import emit as cuda
from catalog.ops.attention.kernels.host import emit as host
from catalog.ops.attention.upstream.sources import family_flags, find_checkout
from catalog.schema.kernel import Kernel

BUILD_DIR = Path(__file__).parent
KERNELS_DIR = Path(host.__file__).parents[1]
HEADERS: Mapping[str, Path] = MappingProxyType({"build": BUILD_DIR, "kernels": KERNELS_DIR})
"""The include folders of our own headers: those shared by all operations, and attention's kernels."""


@dataclass(frozen=True)
class Target:
    """How rows of some archs become libraries.

    ``family_flags`` are flags for the rows of a family, in addition to the toolchain's.
    """

    include_dirs: Callable[[], Mapping[str, Path]]
    abi_header: Path
    emit: Callable[[Kernel, Path], str]
    toolchain: Callable[[str], Toolchain]
    resources: Callable[[Path, str], Resources]
    family_flags: Callable[[str], tuple[str, ...]] = lambda _family: ()

    def toolchain_of(self, kernel: Kernel) -> Toolchain:
        """The toolchain for ``kernel``, with the flags of its family.

        Raises:
            ToolchainError: there is none for its arch.
        """
        toolchain = self.toolchain(kernel.arch)
        return replace(toolchain, compile_flags=(*toolchain.compile_flags, *self.family_flags(kernel.family)))

    def unit(self, source: str) -> TranslationUnit:
        """The translation unit of ``source``, with the target's headers.

        Raises:
            BuildError: the headers are missing, or that of the ABI cannot be read.
        """
        return TranslationUnit(source, self.include_dirs(), abi_number(self.abi_header))


def _emit_host(kernel: Kernel, _memory: Path) -> str:
    return host.emit(kernel)


def _emit_ck(kernel: Kernel, memory: Path) -> str:
    return ck.emit(kernel, find_checkout().source(kernel, memory))


def _emit_cuda(kernel: Kernel, _memory: Path) -> str:
    return cuda.emit(kernel)


def _ck_include_dirs() -> Mapping[str, Path]:
    checkout = find_checkout()
    return {**HEADERS, "fmha": checkout.example, "ck": checkout.include}


_ABI_HEADER = BUILD_DIR / "abi" / "catalog_abi.h"
HOST = Target(lambda: HEADERS, _ABI_HEADER, _emit_host, host_toolchain, of_host_build)
CK = Target(_ck_include_dirs, _ABI_HEADER, _emit_ck, hip_toolchain, of_hip_build, family_flags)


def cuda_target(arch: str) -> Target:
    """The target of an NVIDIA arch, which computes the occupancy of its multiprocessors.

    Raises:
        SpecError: ``data/toolchains/cuda.json`` is missing or malformed.
    """
    return _cuda(cuda_facts().arches[arch])


@functools.cache
def _cuda(arch: CudaArch) -> Target:
    def resources(folder: Path, output: str) -> Resources:
        return of_cuda_build(folder, output, arch)

    return replace(HOST, emit=_emit_cuda, toolchain=cuda_toolchain, resources=resources)
