"""Content keys: a library is named by the hash of everything that shapes it.

A key covers the emitted source, the headers it reaches, the compiler, the flags, the ISA and the ABI number. Only the
compiler knows which headers a source reaches, so it is asked (``-M``). Every header counts by content, system headers
included: libstdc++ and libc are upgraded without their compiler, and clang++ uses those of another package. Project
headers are named relative to their include folder, so that a key depends on neither the checkout nor the user; system
headers keep their path, as they do for the compiler.

A scan costs a preprocessor run, so its result is stored on disk, as names only, and holds while all these headers have
the contents that they had at the scan. Contents decide, never times. Project headers are read again for every key; a
system header once per process, and once more after a build (:meth:`ContentKey.changed_headers`).

Not detected: a new header that an include path would find before the stored one, and files other than headers that a
flag brings in, which is why such flags are refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from catalog.build import processes
from catalog.build.toolchains import PROBE_TIMEOUT_SECONDS, SOURCE, Toolchain, digest_of, parse_make_rule
from catalog.errors import BuildError
from catalog.files import MOST_TEXT_BYTES, Sync, publish, read_given, read_own

KEY_SCHEMA = 2
"""Increase it when the parts of a key change, or what a build does with them."""

# Flags whose effect depends on the machine, or that read files not listed by a dependency scan.
_UNOBSERVABLE_FLAG = re.compile(
    r"-m(arch|cpu|tune)=native|@|-B|-wrapper|--?specs=|--?config|-fplugin|-fpass-plugin|-fprofile-use|-fauto-profile"
)
_UNOBSERVABLE_TEXT = re.compile(rb"\.incbin\b")
_ABI_NUMBER = re.compile(r"^#define\s+CATALOG_ABI_VERSION\s+(\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class TranslationUnit:
    """The input of a compilation: a source, and the project folders that it includes from, by name.

    Folders are searched in order. Their names are part of the key, their locations are not.
    """

    source: str
    include_dirs: Mapping[str, Path]
    abi: int


@dataclass(frozen=True)
class ContentKey:
    """A key in hex, and the digests of the headers that it covers, by path."""

    hex: str
    headers: Mapping[str, str]

    def changed_headers(self) -> list[str]:
        """Headers that have changed since the key was made; reads all of them again."""
        _settled_digest.cache_clear()
        return [path for path, digest in self.headers.items() if not os.path.isfile(path) or digest_of(path) != digest]


class ScanError(BuildError):
    """The compiler cannot list the headers of a source, which therefore has no key.

    ``failure`` says how the compiler ended; ``question`` is a hash of all parts of a key except headers.
    """

    def __init__(self, question: str, failure: str, log: str) -> None:
        super().__init__(f"no content key: the compiler cannot list the headers ({failure})", log=log)
        self.question = question
        self.failure = failure


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def hash_parts(parts: Mapping[str, Sequence[str]]) -> str:
    """SHA-256, in hex, of labelled parts. Lengths are hashed before bytes, so different parts never hash alike.

    The order of the labels does not matter; the order of the values under a label does.
    """
    digest = hashlib.sha256()
    for label in sorted(parts):
        values = parts[label]
        digest.update(_frame(label.encode()) + len(values).to_bytes(8, "big"))
        digest.update(b"".join(_frame(value.encode()) for value in values))
    return digest.hexdigest()


def abi_number(header: Path) -> int:
    """The number of the C ABI that ``header`` declares.

    Raises:
        BuildError: the header cannot be read or declares none.
    """
    try:
        declared = _ABI_NUMBER.search(header.read_text())
    except OSError as error:
        raise BuildError(f"{header}: {error.strerror}") from None
    if declared is None:
        raise BuildError(f"{header} does not define CATALOG_ABI_VERSION")
    return int(declared[1])


@functools.cache
def _settled_digest(path: str) -> str:
    """Digest of a system header, which is assumed not to change while a process runs."""
    return digest_of(path)


def _refuse_flags(flags: Iterable[str]) -> None:
    for flag in flags:
        if _UNOBSERVABLE_FLAG.match(flag):
            raise BuildError(
                f"no content key: the effect of flag {flag} cannot be observed",
                hint="Name the ISA instead of native, and list flags instead of files of flags.",
            )


def _refuse_text(name: str, text: bytes) -> None:
    if _UNOBSERVABLE_TEXT.search(text):
        raise BuildError(f"no content key: {name} embeds a file with .incbin, which the compiler does not list")


class _Headers:
    """The headers of one translation unit: machine-independent names, resolved to this machine's folders."""

    def __init__(self, include_dirs: Mapping[str, Path]) -> None:
        self._roots = {name: os.path.realpath(folder) + os.sep for name, folder in include_dirs.items()}

    def name(self, path: str) -> str:
        """``folder/inner/path`` in a project folder, otherwise the path itself."""
        for name, root in self._roots.items():
            if path.startswith(root):
                return f"{name}/{path[len(root) :]}"
        return path

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """Digests by path, in the order of ``names``; OSError when a header is gone."""
        digests = {}
        for name in names:
            if name.startswith("/"):
                digests[name] = _settled_digest(name)
            else:
                root, _, inner = name.partition("/")
                path = self._roots[root] + inner
                digests[path] = digest_of(path)
        return digests


@dataclass(frozen=True)
class _Reach:
    """The headers that a source reaches: one hash of names and contents, and digests by path."""

    contents: str
    digests: Mapping[str, str]


def _reach(names: Sequence[str], headers: _Headers) -> _Reach:
    digests = headers.digests(names)
    return _Reach(_contents(tuple(names), tuple(digests.values())), digests)


@functools.lru_cache(maxsize=256)
def _contents(names: tuple[str, ...], digests: tuple[str, ...]) -> str:
    """Hash of names and contents, cached because all kernels of a target reach much the same hundreds of headers."""
    return hash_parts({"names": names, "digests": digests})


def _scan(unit: TranslationUnit, toolchain: Toolchain, question: str, memory: Path) -> list[str]:
    """Ask the compiler which headers the source reaches. Works in ``memory``, where leftovers are collected."""
    place = memory if os.access(memory, os.W_OK) else None
    with _disk_errors(place), tempfile.TemporaryDirectory(prefix="tmp", dir=place) as folder:
        work_dir = Path(os.path.realpath(folder))
        (work_dir / SOURCE).write_text(unit.source)
        command = toolchain.scan_command(tuple(unit.include_dirs.values()))
        try:
            done = processes.run(command, work_dir, PROBE_TIMEOUT_SECONDS, threading.Event())
        except OSError as error:
            raise ScanError(question, f"{command[0]} cannot be started: {error.strerror}", "") from None
        if done.failure is not None:
            raise ScanError(question, done.failure, done.output)
        read = {os.path.realpath(work_dir / word) for word in parse_make_rule(done.output)}
        return sorted(read - {str(work_dir / SOURCE)})


@contextlib.contextmanager
def _disk_errors(place: Path | None) -> Iterator[None]:
    """Report a full or read-only disk as an error that names ``place`` (None: the folder for temporary files).

    Raises:
        BuildError: the disk is full, or cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"no content key: {error.filename or place or tempfile.gettempdir()}: {error.strerror}",
            hint="Make room there (catalog cache gc), or set CATALOG_CACHE_DIR and TMPDIR to other folders.",
        ) from None


class KeyMaker:
    """Makes content keys, and stores in ``folder`` which headers a source reaches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def key(self, unit: TranslationUnit, toolchain: Toolchain) -> ContentKey:
        """The key of the library that ``toolchain`` makes from ``unit``.

        Raises:
            ScanError: the compiler cannot list the headers; ``log`` is its output.
            BuildError: something else that shapes the library cannot be observed (a header that cannot be read, a flag
                that depends on the machine); the message names it.
        """
        _refuse_flags((*toolchain.compile_flags, *toolchain.link_flags))
        parts: dict[str, Sequence[str]] = {
            "schema": [str(KEY_SCHEMA)],
            "source": [unit.source],
            "include_dirs": list(unit.include_dirs),
            "abi": [str(unit.abi)],
            "isa": [toolchain.isa],
            "compiler": toolchain.compiler.identity,
            "compile_flags": toolchain.compile_flags,
            "link_flags": toolchain.link_flags,
        }
        # Two steps, because only a scan shows the headers: the hash of all other parts names the stored scan, and the
        # key is the hash of that hash and the headers' contents. So a warm key starts no compiler.
        question = hash_parts(parts)
        memo = self._folder / f"{question}.json"
        headers = _Headers(unit.include_dirs)
        reach = _recall(memo, headers) or _ask(memo, headers, unit, _scan(unit, toolchain, question, self._folder))
        return ContentKey(hash_parts({"question": [question], "headers": [reach.contents]}), reach.digests)


class _Answer(BaseModel):
    """The stored result of a scan: the names of the headers, and a hash of names and contents."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    names: tuple[str, ...]
    contents: str


def _recall(memo: Path, headers: _Headers) -> _Reach | None:
    """The stored result, if the headers that it names are unchanged."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        remembered = _Answer.model_validate_json(read_own(memo, MOST_TEXT_BYTES))
        reach = _reach(remembered.names, headers)
        if reach.contents == remembered.contents:
            return reach
    return None


def _ask(memo: Path, headers: _Headers, unit: TranslationUnit, scanned: Sequence[str]) -> _Reach:
    """A new result, checked and stored."""
    names = sorted(map(headers.name, scanned))
    _refuse_text("the emitted source", unit.source.encode())
    try:
        reach = _reach(names, headers)
        for path, name in zip(reach.digests, names, strict=True):
            if not name.startswith("/"):  # system headers are assumed to embed no files
                _refuse_text(path, read_given(Path(path)))
    except OSError as error:
        raise BuildError(f"no content key: header {error.filename}: {error.strerror}") from None
    _remember(memo, _Answer(names=tuple(names), contents=reach.contents))
    return reach


def _remember(memo: Path, answer: _Answer) -> None:
    """Store the result if possible: it only saves time."""
    with contextlib.suppress(OSError):
        publish(memo, answer.model_dump_json(), Sync.NONE)
