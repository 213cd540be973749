"""nvcc of this machine: a CUDA toolkit, or NVIDIA's Python packages. No GPU is needed to compile."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from catalog.build.cuda.facts import cuda_facts, cuda_flags
from catalog.build.toolchains import Compiler, Toolchain, ask, digest_of, find_host_compiler, first_error
from catalog.errors import ToolchainError
from catalog.settings import Settings, settings

_RELEASE = re.compile(r"^.*release (\d+)\.(\d+).*$", re.MULTILINE)
_FOLDER = re.compile(r"^#\$ (?P<name>_HERE_|CICC_PATH|LIBRARIES)= *(?P<value>.*?) *$", re.MULTILINE)
_SEARCHED = re.compile(r'"-L([^"]+)"')

_PROGRAMS = ("nvcc", "cudafe++", "ptxas", "fatbinary")
_RUNTIME = "libcudart_static.a"
_PROBE = (
    "__global__ void catalog_probe(float* x) { *x = expf(*x); }\nint main() { catalog_probe<<<1, 1>>>(nullptr); }\n"
)


def cuda_toolchain(arch: str) -> Toolchain:
    """The toolchain for an NVIDIA arch.

    Raises:
        ToolchainError: there is no nvcc, it is too old, or it lacks a part or a host compiler.
        SpecError: ``data/toolchains/cuda.json`` is missing or malformed.
    """
    return _find(arch, settings(), os.environ.get("PATH", os.defpath))


@functools.cache
def _find(arch: str, chosen: Settings, search_path: str) -> Toolchain:
    facts = cuda_facts()
    host = find_host_compiler(chosen.cxx, search_path)
    return Toolchain(
        compiler=_identify(_find_nvcc(chosen.nvcc, search_path), host),
        isa=facts.arches[arch].isa,
        compile_flags=(*cuda_flags(arch), *facts.report),
        link_flags=facts.link,
        launcher=tuple(shlex.split(chosen.compiler_launcher or "")),
        places=(f"-ccbin={host.path}",),
        to_host_compiler=("-Xcompiler",),
        probe=_PROBE,
        check=check,
    )


def _candidates(chosen: str | None, search_path: str) -> Iterator[str]:
    facts = cuda_facts()
    for name in facts.names if chosen is None else (chosen,):
        found = shutil.which(name, path=search_path)
        if found is not None:
            yield found
    if chosen is None:
        parent = facts.package.rpartition(".")[0]
        if importlib.util.find_spec(parent) is not None and (package := importlib.util.find_spec(facts.package)):
            yield from (
                str(Path(folder) / facts.program)
                for folder in package.submodule_search_locations or ()
                if (Path(folder) / facts.program).is_file()
            )


def _find_nvcc(chosen: str | None, search_path: str) -> Path:
    """The first nvcc that is new enough.

    Raises:
        ToolchainError: there is none.
    """
    facts = cuda_facts()
    seen = [] if chosen is None else [f"CATALOG_NVCC={chosen}"]
    for candidate in _candidates(chosen, search_path):
        release = _RELEASE.search(ask([candidate, "--version"]))
        if release is not None and (int(release[1]), int(release[2])) >= facts.release:
            return Path(candidate).absolute()
        seen.append(f"{candidate} is {release[0] if release else 'no nvcc'}")
    needed = ".".join(map(str, facts.release))
    tried = "; ".join(seen) or "none is on PATH, in /usr/local/cuda or installed by pip"
    raise ToolchainError(
        f"no nvcc of CUDA {needed} or newer: {tried}",
        hint=f"Install it ({facts.remedy('compiler')}), or set CATALOG_NVCC.",
    )


@functools.cache
def _identify(path: Path, host: Compiler) -> Compiler:
    """Identify nvcc with everything that it runs and links: its programs, the static runtime, the host compiler.

    Raises:
        ToolchainError: a part is missing.
    """
    release = _RELEASE.search(ask([str(path), "--version"]))
    answer = ask([str(path), f"-ccbin={host.path}", "--dryrun", "-x", "cu", "-c", os.devnull])
    places = {found["name"]: found["value"] for found in _FOLDER.finditer(answer)}
    here = Path(places.get("_HERE_", path.parent))
    parts = [here / name for name in _PROGRAMS]
    parts.append(Path(places.get("CICC_PATH", here.parent / "nvvm" / "bin")) / "cicc")
    searched = [Path(folder) / _RUNTIME for folder in _SEARCHED.findall(places.get("LIBRARIES", ""))]
    parts.append(next((library for library in searched if library.is_file()), here.parent / "lib64" / _RUNTIME))
    try:
        digests = [digest_of(str(part)) for part in parts]
    except OSError as error:
        raise ToolchainError(
            f"{path} lacks {error.filename}", hint=f"Install all of it ({cuda_facts().remedy('compiler')})."
        ) from None
    digest = hashlib.sha256("\n".join([*digests, host.digest]).encode()).hexdigest()
    version = release[0] if release else ""
    return Compiler(path, "nvcc", f"{version}, {host.version}", digest)


def check(toolchain: Toolchain) -> None:
    """Compile and link a trivial kernel, to distinguish a broken toolchain from a broken kernel.

    Raises:
        ToolchainError: it does not compile; the message has the compiler's words.
    """
    failed = first_error(toolchain.probe, toolchain.compile_command(()), toolchain.link_command())
    if failed is not None:
        raise ToolchainError(
            f"{toolchain.compiler.path} does not build for {toolchain.isa}: {failed[0]}",
            hint="nvcc accepts only host compilers of its time: set CATALOG_CXX to one that it supports, "
            f"or install another ({cuda_facts().remedy('compiler')}).",
        )
