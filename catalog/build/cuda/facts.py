"""Facts about nvcc, its archs and their multiprocessors: the content of ``data/toolchains/cuda.json``."""

from __future__ import annotations

from catalog.build.toolchains import Facts, ToolchainFacts, read_facts


class CudaArch(Facts):
    """An arch for nvcc, the resources of one of its multiprocessors, and the precision of its tensor cores.

    ``registers`` of 32 bits are allocated to warps in units of ``register_unit``, ``shared_bytes`` to blocks;
    ``shared_of_block`` bytes of each block are reserved. Tensor cores keep ``fp8_sum_bits`` bits of a sum of fp8 or bf8
    products; None for all of float32.
    """

    isa: str
    compile: tuple[str, ...]
    registers: int
    register_unit: int
    threads: int
    blocks: int
    shared_bytes: int
    shared_of_block: int
    warp: int
    schedulers: int
    fp8_sum_bits: int | None

    def occupancy(self, registers: int, threads: int, shared_bytes: int) -> int:
        """Warps of a scheduler that fit at the same time.

        Args:
            registers: registers of a thread.
            threads: threads of a block.
            shared_bytes: shared memory of a block, static and dynamic.
        """
        warps = -(-threads // self.warp)
        of_warp = -(-registers * self.warp // self.register_unit) * self.register_unit
        blocks = min(
            self.blocks,
            self.threads // (warps * self.warp),
            self.registers // (of_warp * warps),
            self.shared_bytes // (shared_bytes + self.shared_of_block),
        )
        return blocks * warps // self.schedulers


class ProjectFacts(Facts):
    """nvcc in another build.

    The environment variable ``compiler_variable`` names it, as for CMake; ``driver_flags`` make it accept flags that
    build tools and users pass to a host compiler; ``objects_option`` precedes the name of a file that lists objects.
    """

    compiler_variable: str
    driver_flags: tuple[str, ...]
    objects_option: str


class CudaFacts(ToolchainFacts):
    """The content of ``data/toolchains/cuda.json``.

    ``release`` is the oldest usable CUDA; ``report`` makes nvcc print a kernel's resources; ``package`` is the
    Python package whose folder has ``program``.
    """

    release: tuple[int, int]
    compile: tuple[str, ...]
    link: tuple[str, ...]
    report: tuple[str, ...]
    project: ProjectFacts
    names: tuple[str, ...]
    package: str
    program: str
    arches: dict[str, CudaArch]


def cuda_facts() -> CudaFacts:
    """Arches, flags and places of nvcc.

    Raises:
        SpecError: the file is missing or malformed; the message names it and the field.
    """
    return read_facts(CudaFacts, "toolchains/cuda.json")


def cuda_flags(arch: str) -> tuple[str, ...]:
    """The compile flags of an NVIDIA arch.

    Raises:
        SpecError: ``data/toolchains/cuda.json`` is missing or malformed.
    """
    facts = cuda_facts()
    return (*facts.compile, *facts.arches[arch].compile)
