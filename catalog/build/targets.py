"""Targets: the headers, compiler and flags that turn rows of an arch into libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from catalog.build.cuda.facts import CudaArch, cuda_facts
from catalog.build.cuda.toolchain import cuda_toolchain
from catalog.build.hip.toolchain import hip_toolchain
from catalog.build.keys import TranslationUnit, abi_number
from catalog.build.resources import Resources, of_cuda_build, of_hip_build, of_host_build
from catalog.build.toolchains import Toolchain, host_toolchain
from catalog.ops import emitters_of
from catalog.ops.protocol import Emitter
from catalog.schema.kernel import Kernel

BUILD_DIR = Path(__file__).parent
HEADERS: Mapping[str, Path] = MappingProxyType({"build": BUILD_DIR})
"""The include folder of the headers shared by all operations."""


@dataclass(frozen=True)
class Target:
    """How rows of some archs become libraries.

    ``include_dirs`` are folders of headers by name, to which those of a row's operation are added. ``backend`` is the
    name under which an operation is asked for headers, sources and flags: ``host``, ``hip`` or ``cuda``.
    """

    include_dirs: Callable[[], Mapping[str, Path]]
    abi_header: Path
    emit: Callable[[Kernel, Path], str]
    toolchain: Callable[[str], Toolchain]
    resources: Callable[[Path, str], Resources]
    backend: str = "host"

    def toolchain_of(self, kernel: Kernel) -> Toolchain:
        """The toolchain for ``kernel``, with the kernel's own flags.

        Raises:
            ToolchainError: there is none for its arch.
        """
        toolchain = self.toolchain(kernel.arch)
        return replace(toolchain, compile_flags=(*toolchain.compile_flags, *self.flags_of(kernel)))

    def flags_of(self, kernel: Kernel) -> tuple[str, ...]:
        """The flags that ``kernel`` needs in addition to the toolchain's."""
        return emitters_of(kernel)[-1].flags(kernel, self.backend)

    def headers_of(self, emitters: Sequence[Emitter]) -> Mapping[str, Path]:
        """The include folders, by name, for sources that the last of ``emitters`` emits.

        Raises:
            BuildError: headers from elsewhere are missing.
        """
        own = {name: path for emitter in emitters for name, path in emitter.headers.items()}
        return {**self.include_dirs(), **own, **emitters[-1].other_headers(self.backend)}

    def other_headers(self, emitters: Sequence[Emitter]) -> Mapping[str, Path]:
        """The folders of :meth:`headers_of` that come from neither the catalog nor ``emitters``.

        Raises:
            BuildError: the headers are missing.
        """
        own = {*HEADERS, *(name for emitter in emitters for name in emitter.headers)}
        return {name: path for name, path in self.headers_of(emitters).items() if name not in own}

    def unit(self, source: str, kernel: Kernel | None = None) -> TranslationUnit:
        """The translation unit of ``source``, with the headers of ``kernel``'s emitters, if given, and of the target.

        Raises:
            BuildError: the headers are missing, or that of the ABI cannot be read.
        """
        folders = self.include_dirs() if kernel is None else self.headers_of(emitters_of(kernel))
        return TranslationUnit(source, folders, abi_number(self.abi_header))


def _target(backend: str, toolchain: Callable[[str], Toolchain], resources: Callable[[Path, str], Resources]) -> Target:
    """A target whose sources come from each row's operation, or from the extension with its pipeline."""

    def emit(kernel: Kernel, memory: Path) -> str:
        return emitters_of(kernel)[-1].emit(kernel, backend, memory)

    return Target(lambda: HEADERS, BUILD_DIR / "abi" / "catalog_abi.h", emit, toolchain, resources, backend)


HOST = _target("host", host_toolchain, of_host_build)
CK = _target("hip", hip_toolchain, of_hip_build)


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

    return _target("cuda", cuda_toolchain, resources)
