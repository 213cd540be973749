"""Resources that a compiler reports for a library: registers, spills, memory, code size."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO

from catalog.build.cuda.facts import CudaArch
from catalog.build.toolchains import LIBRARY, STACK_USAGE
from catalog.registry.rows import Count

_BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


@dataclass(frozen=True)
class Resources:
    """Columns of the SQL table ``artifact``; None if the target has no such resource, or nothing was reported.

    For several kernels or functions in one library each figure is the maximum, except ``code_bytes``, which is the sum.

    Attributes:
        registers: vector registers of a thread.
        acc_registers: matrix accumulator registers of a thread.
        scalar_registers: scalar registers of a wave.
        spills: vector and scalar registers spilled to memory.
        scratch_bytes: private memory of a thread, in bytes.
        shared_bytes: shared memory (LDS) of a block; on AMD, the static part.
        occupancy: waves per SIMD that the registers and the shared memory allow.
        code_bytes: size of the machine code.
        stack_bytes: largest stack frame of a function.
        device_functions: kernels that a GPU library has: one row may be compiled to several.
    """

    registers: Count | None = None
    acc_registers: Count | None = None
    scalar_registers: Count | None = None
    spills: Count | None = None
    scratch_bytes: Count | None = None
    shared_bytes: Count | None = None
    occupancy: Count | None = None
    code_bytes: Count | None = None
    stack_bytes: Count | None = None
    device_functions: Count | None = None


RESOURCES = tuple(field.name for field in fields(Resources))
"""Names of the resources, in the order of the columns."""


def of_host_build(folder: Path, _output: str) -> Resources:
    """Code and stack of a library for a CPU.

    Args:
        folder: folder of the build, with the library and the output of ``-fstack-usage``, if any: a launcher may have
            left that elsewhere.

    Raises:
            OSError: a file exists but cannot be read.
    """
    usage = folder / STACK_USAGE
    frames = usage.read_text().splitlines() if usage.exists() else []
    with (folder / LIBRARY).open("rb") as library:
        return Resources(code_bytes=_code_bytes(library), stack_bytes=_largest_frame(frames))


_REMARK = re.compile(r"remark:\s+(?:\S+:\d+:\d+:\s+)?(?P<what>[A-Za-z][A-Za-z ]*?)(?: \[[\w/]+\])?: (?P<count>\d+)\b")

_REMARKS = {
    "VGPRs": "registers",
    "AGPRs": "acc_registers",
    "SGPRs": "scalar_registers",
    "TotalSGPRs": "scalar_registers",
    "ScratchSize": "scratch_bytes",
    "LDS Size": "shared_bytes",
    "Occupancy": "occupancy",
}
"""LLVM's terms in the remarks of kernel-resource-usage (LLVM AMDGPU user guide)."""


def of_hip_build(folder: Path, output: str) -> Resources:
    """Resources that the compiler reported for the kernels of a library for AMD GPUs, and their code size.

    Args:
        folder: folder of the build.
        output: the compiler's output, with remarks of ``kernel-resource-usage``.

    Raises:
        OSError: the library cannot be read.
    """
    found: dict[str, list[int]] = {}
    spills: dict[str, list[int]] = {}
    for remark in _REMARK.finditer(output):
        what, count = remark["what"], int(remark["count"])
        if what.endswith("Spill"):
            spills.setdefault(what, []).append(count)
        elif what in _REMARKS:
            found.setdefault(_REMARKS[what], []).append(count)
    worst = {name: min(counts) if name == "occupancy" else max(counts) for name, counts in found.items()}
    if spills:
        worst["spills"] = max(map(sum, zip(*spills.values(), strict=True)))
    with (folder / LIBRARY).open("rb") as library:
        return Resources(**worst, code_bytes=_device_code_bytes(library), device_functions=_used(found))


def _device_code_bytes(library: BinaryIO) -> int | None:
    """Bytes of code in the device objects bundled in the section of fat binaries.

    The bundle is a magic word, the number of entries, and for each its offset, size and target's name (Clang's
    documentation of clang-offload-bundler).
    """
    from elftools.elf.elffile import ELFFile

    section = ELFFile(library).get_section_by_name(".hip_fatbin")
    if section is None:
        return None
    bundle = section.data()
    start = bundle.find(_BUNDLE_MAGIC)
    if start < 0:
        return None
    at = start + len(_BUNDLE_MAGIC)
    (entries,) = struct.unpack_from("<Q", bundle, at)
    at += 8
    total = 0
    for _ in range(entries):
        offset, size, name = struct.unpack_from("<QQQ", bundle, at)
        target = bundle[at + 24 : at + 24 + name].decode(errors="replace")
        at += 24 + name
        if size and not target.startswith("host"):
            total += _code_bytes(io.BytesIO(bundle[start + offset : start + offset + size])) or 0
    return total


_PTXAS = {
    "registers": re.compile(r"\bUsed (\d+) registers"),
    "spills": re.compile(r"\b(\d+) bytes spill stores"),
    "scratch_bytes": re.compile(r"\b(\d+) bytes stack frame"),
    "shared_bytes": re.compile(r"\b(\d+) bytes smem"),
}
"""ptxas's report on each kernel with ``-v`` (nvcc documentation, printing code generation statistics)."""

_REGISTER_BYTES = 4


def of_cuda_build(folder: Path, output: str, arch: CudaArch) -> Resources:
    """Resources that ptxas reported for the kernels of a library for NVIDIA GPUs, their occupancy and code size.

    Args:
        folder: folder of the build.
        output: the compiler's output, with ptxas's report with ``-v``.
        arch: resources of a multiprocessor.

    Raises:
        OSError: the library cannot be read.
    """
    found = {name: [int(count) for count in pattern.findall(output)] for name, pattern in _PTXAS.items()}
    worst = {name: max(counts, default=0) for name, counts in found.items()}
    with (folder / LIBRARY).open("rb") as library:
        block, code_bytes = _block(library), _cubin_code_bytes(library)
    occupancy = None
    if block is not None and worst["registers"]:
        threads, shared_bytes = block
        worst["shared_bytes"] = max(worst["shared_bytes"], shared_bytes)
        occupancy = arch.occupancy(worst["registers"], threads, worst["shared_bytes"])
    worst["spills"] //= _REGISTER_BYTES
    return Resources(**worst, occupancy=occupancy, code_bytes=code_bytes, device_functions=_used(found))


def _used(found: Mapping[str, Iterable[int]]) -> int | None:
    """The number of kernels that use registers: headers may define empty ones."""
    return sum(map(bool, found.get("registers", ()))) or None


def _block(library: BinaryIO) -> tuple[int, int] | None:
    """Threads and bytes of shared memory of a block: the symbol ``catalog_block`` of a CUDA library."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    elf = ELFFile(library)
    symbols = elf.get_section_by_name(".dynsym")
    if not isinstance(symbols, SymbolTableSection):
        return None
    for symbol in symbols.get_symbol_by_name("catalog_block") or ():
        section = elf.get_section(symbol["st_shndx"])
        start = symbol["st_value"] - section["sh_addr"]
        threads, shared_bytes = struct.unpack_from("<ii", section.data(), start)
        return threads, shared_bytes
    return None


def _cubin_code_bytes(library: BinaryIO) -> int | None:
    """Bytes of code in the cubins (ELF files) that the section of fat binaries holds uncompressed."""
    from elftools.elf.elffile import ELFFile

    section = ELFFile(library).get_section_by_name(".nv_fatbin")
    if section is None:
        return None
    fat = section.data()
    starts = [found.start() for found in re.finditer(rb"\x7fELF", fat)]
    return sum(_code_bytes(io.BytesIO(fat[start:])) or 0 for start in starts)


def _code_bytes(library: BinaryIO) -> int | None:
    """Bytes of the executable sections of an ELF file; None for another format."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.constants import SH_FLAGS
    from elftools.elf.elffile import ELFFile

    try:
        sections = list(ELFFile(library).iter_sections())
    except ELFError:
        return None
    return sum(section["sh_size"] for section in sections if section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR)


def _largest_frame(lines: Iterable[str]) -> int | None:
    """The maximum of lines of place:function, bytes and a qualifier, tab-separated (GCC 12 manual, section 3.18)."""
    frames = [int(columns[1]) for columns in (line.split("\t") for line in lines) if len(columns) > 1]
    return max(frames, default=None)
