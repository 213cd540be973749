"""The builder: a kernel in, a library in the cache out."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from catalog.build import processes
from catalog.build.cache import ArtifactRecord, Cache, Origin
from catalog.build.ck import emit as ck
from catalog.build.ck.facts import hip_facts, hip_flags
from catalog.build.ck.sources import family_flags, find_checkout
from catalog.build.ck.toolchain import hip_toolchain
from catalog.build.host import emit as host
from catalog.build.keys import ContentKey, KeyMaker, ScanError, TranslationUnit, abi_number
from catalog.build.resources import Resources, of_hip_build, of_host_build
from catalog.build.toolchains import LIBRARY, SOURCE, Toolchain, host_facts, host_flags, host_toolchain
from catalog.errors import BuildError, ToolchainError
from catalog.schema.fields import Family
from catalog.schema.kernel import Kernel
from catalog.settings import settings

_log = logging.getLogger(__name__)

COMPILE_TIMEOUT_SECONDS = 900.0
"""Longest that one compiler call may take: the largest kernels take minutes, a compiler that hangs takes for ever."""

LOG_CHARACTERS = 20_000
"""How much of a compiler's output a record carries; the log file has all of it."""

BUILD_DIR = Path(__file__).parent
_NO_RESOURCES = Resources()
_ERROR_LINE = re.compile(r"\berror\b|undefined reference", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """How rows of some arches become libraries: where a new kind of device is added.

    ``flags`` are those of an arch, ``family_flags`` those that rows of a family have besides.
    """

    include_dirs: Callable[[], Mapping[str, Path]]
    abi_header: Path
    emit: Callable[[Kernel, Path], str]
    toolchain: Callable[[str], Toolchain]
    resources: Callable[[Path, str], Resources]
    flags: Callable[[str], tuple[str, ...]]
    family_flags: Callable[[Family], tuple[str, ...]] = lambda _family: ()

    def toolchain_of(self, kernel: Kernel) -> Toolchain:
        """The toolchain for ``kernel``, with the flags of its family.

        Raises:
            ToolchainError: there is none for its arch.
        """
        toolchain = self.toolchain(kernel.arch)
        return replace(toolchain, compile_flags=(*toolchain.compile_flags, *self.family_flags(kernel.family)))

    def unit(self, source: str) -> TranslationUnit:
        """The translation unit of ``source``, with the headers of the target.

        Raises:
            BuildError: the headers are not there, or that of the ABI cannot be read.
        """
        return TranslationUnit(source, self.include_dirs(), abi_number(self.abi_header))


def _emit_host(kernel: Kernel, _memory: Path) -> str:
    return host.emit(kernel)


def _emit_ck(kernel: Kernel, memory: Path) -> str:
    return ck.emit(kernel, find_checkout().source(kernel, memory))


def _ck_include_dirs() -> Mapping[str, Path]:
    checkout = find_checkout()
    return {"build": BUILD_DIR, "fmha": checkout.example, "ck": checkout.include}


_ABI_HEADER = BUILD_DIR / "abi" / "catalog_abi.h"
HOST = Target(lambda: {"build": BUILD_DIR}, _ABI_HEADER, _emit_host, host_toolchain, of_host_build, host_flags)
CK = Target(_ck_include_dirs, _ABI_HEADER, _emit_ck, hip_toolchain, of_hip_build, hip_flags, family_flags)


def target_of(arch: str) -> Target:
    """The target that builds for ``arch``.

    Raises:
        BuildError: none does.
    """
    if arch in host_facts().arches:
        return HOST
    if arch in hip_facts().arches:
        return CK
    raise BuildError(f"kernels for {arch} cannot be built yet", hint="catalog doctor lists the arches that can")


@dataclass(frozen=True)
class Artifact:
    """A library that is ready to be loaded, and its digest; ``cached`` when this call did not compile it."""

    key: str
    path: Path
    sha256: str
    kernel_id: str
    compile_seconds: float
    cached: bool


@dataclass(frozen=True)
class BuildFailure:
    """A kernel that did not become a library, and why."""

    kernel: Kernel
    error: BuildError | ToolchainError


@dataclass(frozen=True)
class BuildReport:
    """What became of many kernels, each in the order in which they were asked for."""

    artifacts: tuple[Artifact, ...]
    failures: tuple[BuildFailure, ...]


class CompileError(BuildError):
    """The compiler refused a source; ``record`` is what the registry should know of it, if it is a kernel's."""

    def __init__(self, message: str, *, hint: str | None, log: str, record: ArtifactRecord) -> None:
        super().__init__(message, hint=hint, log=log)
        self.record = record


class _CommandFailed(Exception):
    """A compiler command failed: ``failure`` says how it ended, ``output`` is all that the build printed."""

    def __init__(self, failure: str, output: str) -> None:
        super().__init__(failure)
        self.failure = failure
        self.output = output

    @property
    def reason(self) -> str:
        """The first line that says what is wrong; how the compiler ended when no line does."""
        return next((line.strip() for line in self.output.splitlines() if _ERROR_LINE.search(line)), self.failure)


@dataclass(frozen=True)
class Built:
    """A library, and what the registry should know of it."""

    artifact: Artifact
    record: ArtifactRecord


@dataclass(frozen=True)
class _Subject:
    """What a library is for, a row or a helper of ours without one: ``title`` is how messages call it."""

    title: str
    name: str
    arch: str
    kernel_id: str

    @classmethod
    def of_kernel(cls, kernel: Kernel) -> _Subject:
        return cls(f"kernel {kernel.name}", kernel.name, kernel.arch, kernel.id)

    @classmethod
    def of_helper(cls, name: str, arch: str) -> _Subject:
        return cls(f"{name} for {arch}", name, arch, kernel_id="")


@dataclass(frozen=True)
class _Job:
    """A source, with all that its build needs."""

    subject: _Subject
    target: Target
    unit: TranslationUnit
    toolchain: Toolchain
    key: ContentKey

    def record(
        self, output: str, seconds: float, library: bytes | None = None, resources: Resources = _NO_RESOURCES
    ) -> ArtifactRecord:
        """The record of this build; it failed when there is no library."""
        return ArtifactRecord(
            key=self.key.hex,
            kernel_id=self.subject.kernel_id,
            arch=self.subject.arch,
            toolchain=self.toolchain.label,
            isa=self.toolchain.isa,
            flags=self.toolchain.flags,
            status="failed" if library is None else "built",
            log=output[:LOG_CHARACTERS],
            so_sha256=None if library is None else hashlib.sha256(library).hexdigest(),
            so_bytes=None if library is None else len(library),
            compile_s=seconds,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            resources=resources,
        )

    @property
    def origin(self) -> Origin:
        return Origin(self.subject.name, self.unit.abi, source_digest(self.unit.source))

    def error(self, failure: _CommandFailed, log: Path, seconds: float) -> CompileError:
        """What is told of a source that the compiler refused."""
        compiler = f"{self.toolchain.compiler.path} ({self.toolchain.label})"
        return CompileError(
            f"{self.subject.title} does not compile with {compiler}: {failure.reason}",
            hint=f"the compiler's output is in {log}",
            log=failure.output,
            record=self.record(failure.output, seconds),
        )


def source_digest(source: str) -> str:
    """SHA-256, in hex, of an emitted source."""
    return hashlib.sha256(source.encode()).hexdigest()


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run_compiler(unit: TranslationUnit, toolchain: Toolchain, folder: Path, stop: threading.Event) -> str:
    """Make the library in ``folder``, and return what the compiler printed."""
    (folder / SOURCE).write_text(unit.source)
    output = ""
    for command in (toolchain.compile_command(tuple(unit.include_dirs.values())), toolchain.link_command()):
        try:
            done = processes.run(command, folder, COMPILE_TIMEOUT_SECONDS, stop)
        except OSError as error:
            raise _CommandFailed(f"{command[0]} cannot be started: {error.strerror}", output) from None
        output += done.output
        if done.failure is not None:
            raise _CommandFailed(done.failure, output)
    return output


class Builder:
    """Builds kernels into the cache, at most once per content key, whatever the number of threads and processes.

    ``record`` is called with every artifact that this builder compiles, fails to compile, or finds in the cache for the
    first time (so that a new registry learns of it), always in the thread that called the builder.
    """

    def __init__(
        self,
        cache_dir: Path | None = None,
        record: Callable[[ArtifactRecord], None] | None = None,
        targets: Callable[[str], Target] = target_of,
    ) -> None:
        self.cache = Cache(cache_dir or settings().cache_dir)
        self._keys = KeyMaker(self.cache.scans)
        self._record = record
        self._targets = targets
        self._recorded: set[str] = set()

    def build(self, kernel: Kernel) -> Artifact:
        """The library of ``kernel``, from the cache if it is there and sound.

        Raises:
            BuildError: it does not compile, or its target implements no such kernel; ``log`` is the compiler's output.
            ToolchainError: no usable compiler for its arch.
        """
        return self._settle(lambda: self._make_kernel(kernel, threading.Event()))

    def build_helper(self, name: str, arch: str, source: str) -> Path:
        """The library of ``source``, which is no row's, from the cache if it is there and sound; it is not recorded.

        Args:
            name: how messages call it.
            arch: what it is compiled for, with that target's headers, compiler and flags.
            source: of its one translation unit.

        Raises:
            BuildError, ToolchainError: as :meth:`build`.
        """
        target = self._targets(arch)
        subject = _Subject.of_helper(name, arch)
        return self._make(subject, target, source, target.toolchain(arch), threading.Event()).artifact.path

    def build_many(
        self,
        kernels: Iterable[Kernel],
        jobs: int | None = None,
        on_done: Callable[[Artifact | BuildFailure], None] | None = None,
    ) -> BuildReport:
        """Build ``kernels``, ``jobs`` at a time (None: one per core); ``on_done`` hears of each as it ends.

        A kernel that fails does not stop the others: nothing is raised for it. Whatever else is raised (by ``record``
        or ``on_done``, by Ctrl-C) ends the running compilers first.
        """
        asked = list(kernels)
        results: dict[int, Artifact | BuildFailure] = {}
        stop = threading.Event()
        pool = ThreadPoolExecutor(jobs or _available_cores(), thread_name_prefix="build")
        try:
            futures = {pool.submit(self._make_kernel, kernel, stop): place for place, kernel in enumerate(asked)}
            for future in as_completed(futures):
                place = futures[future]
                done: Artifact | BuildFailure
                try:
                    done = self._settle(future.result)
                except (BuildError, ToolchainError) as error:
                    done = BuildFailure(asked[place], error)
                results[place] = done
                if on_done is not None:
                    on_done(done)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
        ordered = [results[place] for place in range(len(asked))]
        return BuildReport(
            tuple(done for done in ordered if isinstance(done, Artifact)),
            tuple(done for done in ordered if isinstance(done, BuildFailure)),
        )

    def key_of(self, kernel: Kernel) -> str:
        """The content key that ``kernel`` has now: the name of its library, whether or not the cache has it.

        Raises:
            BuildError, ToolchainError: as :meth:`build`, before anything is compiled.
        """
        target = self._targets(kernel.arch)
        toolchain = target.toolchain(kernel.arch)
        unit = target.unit(target.emit(kernel, self.cache.scans))
        try:
            return self._keys.key(unit, toolchain).hex
        except ScanError as error:
            return error.question  # what its failure is filed under

    def _settle(self, finish: Callable[[], Built]) -> Artifact:
        """The artifact that ``finish`` returns, after the registry has heard of it, or of its failure."""
        try:
            built = finish()
        except CompileError as error:
            self._tell(error.record)
            raise
        if not (built.artifact.cached and built.artifact.key in self._recorded):
            self._tell(built.record)
            self._recorded.add(built.artifact.key)
        return built.artifact

    def _tell(self, record: ArtifactRecord) -> None:
        if self._record is not None:
            self._record(record)

    def _make_kernel(self, kernel: Kernel, stop: threading.Event) -> Built:
        target = self._targets(kernel.arch)
        toolchain = target.toolchain_of(kernel)
        subject = _Subject.of_kernel(kernel)
        self._create_cache(subject)  # where what was emitted is remembered
        return self._make(subject, target, target.emit(kernel, self.cache.scans), toolchain, stop)

    def _make(
        self, subject: _Subject, target: Target, source: str, toolchain: Toolchain, stop: threading.Event
    ) -> Built:
        """Find or compile one library; runs in any thread."""
        unit = target.unit(source)
        self._create_cache(subject)
        try:
            job = _Job(subject, target, unit, toolchain, self._key(subject, target, unit, toolchain, stop))
            return self._find(job) or self._make_once(job, stop)
        except OSError as error:
            raise self._unusable(subject, error) from None

    def _create_cache(self, subject: _Subject) -> None:
        try:
            self.cache.create()
        except OSError as error:
            raise self._unusable(subject, error) from None

    def _unusable(self, subject: _Subject, error: OSError) -> BuildError:
        return BuildError(
            f"{subject.title}: {error.filename or self.cache.folder}: {error.strerror}",
            hint="CATALOG_CACHE_DIR chooses another cache folder",
        )

    def _key(
        self, subject: _Subject, target: Target, unit: TranslationUnit, toolchain: Toolchain, stop: threading.Event
    ) -> ContentKey:
        try:
            return self._keys.key(unit, toolchain)
        except ScanError as error:
            # Without a key the failure is filed under what would have led to one.
            job = _Job(subject, target, unit, toolchain, ContentKey(error.question, {}))
            with self.cache.lock(error.question, stop):
                raise self._refusal(job, _CommandFailed(error.failure, error.log), 0.0) from None
        except BuildError as error:
            raise BuildError(f"{subject.title}: {error.message}", hint=error.hint) from None

    def _refusal(self, job: _Job, failure: _CommandFailed, seconds: float) -> CompileError:
        """File a failed compile; raises ToolchainError when it is the compiler's fault."""
        job.toolchain.verify()
        log = self.cache.keep_log(job.key.hex, f"{failure.output}\n{failure.failure}\n")
        return job.error(failure, log, seconds)

    def _find(self, job: _Job) -> Built | None:
        record = self.cache.load(job.key.hex)
        return None if record is None else self._built(record, cached=True)

    def _make_once(self, job: _Job, stop: threading.Event) -> Built:
        """Compile, unless another builder did while this one waited for the lock."""
        with self.cache.lock(job.key.hex, stop):
            found = self._find(job)
            if found is not None:
                return found
            library = self.cache.so_path(job.key.hex)
            if library.exists():
                _log.warning("%s is not what its record says: building %s again", library, job.subject.title)
            with self.cache.workspace(job.key.hex) as folder:
                return self._compile(job, folder, stop)

    def _compile(self, job: _Job, folder: Path, stop: threading.Event) -> Built:
        started = time.perf_counter()
        try:
            output = _run_compiler(job.unit, job.toolchain, folder, stop)
        except _CommandFailed as failure:
            raise self._refusal(job, failure, time.perf_counter() - started) from None
        seconds = time.perf_counter() - started
        changed = job.key.changed_headers()
        if changed:
            raise BuildError(f"{job.subject.title}: {changed[0]} changed while it compiled", hint="build it again")
        resources = job.target.resources(folder, output)
        record = job.record(output, seconds, (folder / LIBRARY).read_bytes(), resources)
        self.cache.publish(folder / LIBRARY, record, job.origin)
        return self._built(record, cached=False)

    def _built(self, record: ArtifactRecord, cached: bool) -> Built:
        path = self.cache.so_path(record.key)
        sha256 = record.so_sha256 or ""
        return Built(Artifact(record.key, path, sha256, record.kernel_id, record.compile_s, cached), record)
