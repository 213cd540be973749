"""A newer clang without HIP, completed with parts of an older one, for archs that the older one does not know.

Zig includes a clang that is newer than most distributions' (``zig clang``), with LLVM's AMDGPU target, but without
HIP's headers and without the programs that link and bundle device code. An older clang provides these. The newer one
then compiles both sides of a kernel, so the two halves of a library never disagree about a header.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from catalog.build.hip.facts import clang_number, hip_facts
from catalog.build.toolchains import Compiler, ask, digest_of, identify
from catalog.errors import ToolchainError

# Zig's driver commands, which are stripped: only its plain clang knows HIP.
_ZIG_DRIVERS = frozenset({"c++", "cc", "clang"})
_ZIG_PLACES = re.compile(r'(zig_exe|lib_dir)"?\s*[=:]\s*"([^"]+)"')


@dataclass(frozen=True)
class Completed:
    """A compiler, and the flags that point to its borrowed parts."""

    compiler: Compiler
    places: tuple[str, ...]


def complete(needed: int, older: Sequence[Compiler], chosen: str | None) -> Completed:
    """The newer compiler if it is clang ``needed``, completed with parts of the first suitable one of ``older``.

    Args:
        needed: clang's required major number.
        older: compilers that may have HIP, the preferred one first.
        chosen: the command of the newer compiler; None: Zig, on PATH or from its Python package.

    Raises:
        ToolchainError: there is no such compiler, or none provides what it lacks; the message lists what was found.
    """
    seen = []
    for words in _commands(chosen):
        try:
            compiler, resources = _identify(words)
        except ToolchainError as error:
            seen.append(error.message if chosen is None else f"CATALOG_HIPCXX_DEVICE={chosen}: {error.message}")
            continue
        if clang_number(compiler.version) < needed:
            seen.append(f"{shlex.join(words)} is {compiler.version}")
        elif all((resources / "include" / header).is_file() for header in hip_facts().lent.headers):
            return Completed(compiler, ())
        else:
            return _borrow(compiler, resources, older)
    raise ToolchainError(
        "; ".join(seen) or "and there is no Zig, with a newer clang, on PATH or as a package of this Python"
    )


def _commands(chosen: str | None) -> Iterator[list[str]]:
    if chosen is not None:
        yield shlex.split(chosen)
        return
    zig = hip_facts().zig
    yield from ([found] for found in map(shutil.which, zig.names) if found is not None)
    package = importlib.util.find_spec(zig.package)
    if package is not None and package.origin is not None:
        yield [str(Path(package.origin).with_name("zig"))]


def _identify(words: Sequence[str]) -> tuple[Compiler, Path]:
    """The compiler run by ``words``, and its resource folder."""
    program = shutil.which(words[0])
    if program is None:
        raise ToolchainError(f"{words[0]} is not a program")
    if not any("zig" in Path(word).name for word in words):
        compiler = identify(Path(program).absolute(), tuple(words[1:]))
        return compiler, Path(ask([*compiler.command, "-print-resource-dir"]))
    zig = words[:-1] if words[-1] in _ZIG_DRIVERS else words
    # Zig requires a cache folder by name, although it does not create it for this query.
    answer = ask(["env", f"ZIG_GLOBAL_CACHE_DIR={tempfile.gettempdir()}", *zig, "env"])
    # The printed paths may be relative to its working directory.
    places = {name: (Path(tempfile.gettempdir()) / place).resolve() for name, place in _ZIG_PLACES.findall(answer)}
    if places.keys() != {"zig_exe", "lib_dir"} or not (places["lib_dir"] / "include" / "stddef.h").is_file():
        raise ToolchainError(f"{shlex.join(zig)} env does not say where Zig and its headers are: {answer}")
    return identify(places["zig_exe"], hip_facts().zig.arguments), places["lib_dir"]


def _borrow(compiler: Compiler, resources: Path, older: Sequence[Compiler]) -> Completed:
    lent = hip_facts().lent
    lacking = []
    for lender in older:
        try:
            headers, programs = _parts(lender)
        except ToolchainError as error:
            lacking.append(error.message)
            continue
        digest = hashlib.sha256("".join([lender.digest, *map(digest_of, programs)]).encode()).hexdigest()
        target = f"--target={ask([*lender.command, '-dumpmachine'])}"
        return Completed(
            replace(compiler, arguments=(*compiler.arguments, target), lender=replace(lender, digest=digest)),
            # HIP's wrappers go before the C++ library's headers, the rest last: the newer clang keeps its own.
            (
                *("-resource-dir", str(resources)),
                *("-isystem", str(headers / lent.wrappers), "-idirafter", str(headers)),
                *sorted({f"-B{Path(program).parent}" for program in programs}),
            ),
        )
    who = "; ".join(lacking) or "there is none"
    raise ToolchainError(f"{compiler.path} is {compiler.version}, without HIP, and no other clang provides it: {who}")


def _parts(lender: Compiler) -> tuple[Path, list[str]]:
    """The headers and the programs that ``lender`` can provide."""
    lent = hip_facts().lent
    headers = Path(ask([*lender.command, "-print-resource-dir"])) / "include"
    programs = {name: shutil.which(ask([*lender.command, f"-print-prog-name={name}"])) for name in lent.programs}
    missing = [name for name in lent.headers if not (headers / name).is_file()]
    missing += [name for name, path in programs.items() if path is None]
    if missing:
        raise ToolchainError(f"{lender.path} lacks {', '.join(missing)}")
    return headers, [path for path in programs.values() if path is not None]
