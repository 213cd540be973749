"""What a compiler knows of a library: registers, spills, memory, code size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Resources:
    """Columns of the SQL table ``artifact``; None where the target has no such thing, or nobody told.

    Of several kernels or functions in one library each figure is the worst one's, ``code_bytes`` that of all together.

    Attributes:
        registers: vector registers of a thread.
        acc_registers: matrix accumulator registers of a thread.
        scalar_registers: scalar registers of a wave.
        spills: registers that live in memory, vector and scalar.
        scratch_bytes: private memory of a thread.
        shared_bytes: static shared memory (LDS) of a block.
        occupancy: waves a SIMD that the registers and the shared memory leave room for.
        code_bytes: machine code.
        stack_bytes: largest stack frame of a function.
    """

    registers: int | None = None
    acc_registers: int | None = None
    scalar_registers: int | None = None
    spills: int | None = None
    scratch_bytes: int | None = None
    shared_bytes: int | None = None
    occupancy: int | None = None
    code_bytes: int | None = None
    stack_bytes: int | None = None


RESOURCES = tuple(field.name for field in fields(Resources))
"""Their names, in the order of the columns."""


def of_host_library(library: Path, stack_usage: Path) -> Resources:
    """Code and stack of a library for a CPU.

    Args:
        library: the shared library.
        stack_usage: what ``-fstack-usage`` wrote, if the compiler wrote it: a launcher may have left it elsewhere.

    Raises:
        OSError: a file that is there cannot be read.
    """
    frames = stack_usage.read_text().splitlines() if stack_usage.exists() else []
    return Resources(code_bytes=code_bytes(library), stack_bytes=_largest_frame(frames))


def code_bytes(library: Path) -> int | None:
    """Bytes of the executable sections of an ELF file; None of another format.

    Raises:
        OSError: the file cannot be read.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.constants import SH_FLAGS
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        try:
            sections = list(ELFFile(file).iter_sections())
        except ELFError:
            return None
        return sum(section["sh_size"] for section in sections if section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR)


def _largest_frame(lines: Iterable[str]) -> int | None:
    """Lines are ``place:function``, bytes and a qualifier, with tabs between them (GCC 12 manual, section 3.18)."""
    frames = [int(columns[1]) for columns in (line.split("\t") for line in lines) if len(columns) > 1]
    return max(frames, default=None)
