"""The builder: takes a kernel, puts its library into the cache."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from catalog.build import notices, processes
from catalog.build.cache import ArtifactRecord, Cache, Origin
from catalog.build.housekeeping import SizeCap
from catalog.build.keys import ContentKey, KeyMaker, ScanError, TranslationUnit, hash_parts
from catalog.build.permissions import ANOTHER
from catalog.build.pools import Pool, Threads
from catalog.build.remote import Remote
from catalog.build.resources import Resources
from catalog.build.targets import Target
from catalog.build.toolchains import LIBRARY, SOURCE, Toolchain
from catalog.errors import BuildError, CacheError, ToolchainError
from catalog.schema.kernel import Kernel
from catalog.settings import settings

_log = logging.getLogger(__name__)

COMPILE_TIMEOUT_SECONDS = 900.0
"""Time limit of one compiler call: the largest kernels take minutes, a compiler that hangs never ends."""

LOG_CHARACTERS = 20_000
"""Length of the compiler output in a record; the log file has all of it."""

_NO_RESOURCES = Resources()
_ERROR_LINE = re.compile(r"\berror\b|undefined reference", re.IGNORECASE)
# Messages of the C library, the kernel, the drivers of GCC and Clang, and GCC's and LLVM's own memory allocation.
_OUT_OF_RESOURCES = re.compile(
    r"^.*(No space left on device|Disk quota exceeded|File too large|File size limit exceeded|SIGXFSZ"
    r"|Cannot allocate memory|out of memory|[Kk]illed signal|killed by SIGKILL).*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Artifact:
    """A library that is ready to load, and its digest; ``cached`` is false when this call compiled it."""

    key: str
    path: Path
    sha256: str
    so_bytes: int
    kernel_id: str
    compile_seconds: float
    cached: bool


@dataclass(frozen=True)
class BuildFailure:
    """A kernel that could not be built, and why."""

    kernel: Kernel
    error: BuildError | ToolchainError


@dataclass(frozen=True)
class BuildReport:
    """The results of building many kernels, in the order of the request; ``left`` is the number not tried."""

    artifacts: tuple[Artifact, ...]
    failures: tuple[BuildFailure, ...]
    left: int = 0


class CompileError(BuildError):
    """The compiler refused a source; ``record`` is the entry for the registry, if the source is a kernel's."""

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
        """The first line of output that states an error; without one, how the compiler ended."""
        return next((line.strip() for line in self.output.splitlines() if _ERROR_LINE.search(line)), self.failure)


@dataclass(frozen=True)
class Built:
    """A library and its record for the registry."""

    artifact: Artifact
    record: ArtifactRecord


@dataclass(frozen=True)
class _Subject:
    """The purpose of a library: a row, or a helper of ours without a row. ``title`` names it in messages."""

    title: str
    name: str
    arch: str
    kernel_id: str

    @classmethod
    def of_kernel(cls, kernel: Kernel) -> _Subject:
        return cls(f"kernel {kernel.name}", kernel.name, kernel.arch, kernel.id)


@dataclass(frozen=True)
class Job:
    """A source with everything that its build needs; made by :meth:`Builder.job`."""

    subject: _Subject
    target: Target
    unit: TranslationUnit
    toolchain: Toolchain
    key: ContentKey

    @property
    def ingredients(self) -> dict[str, str]:
        """The parts that the key covers, as text that can be compared with another machine's."""
        compiler = self.toolchain.compiler
        return {
            "compiler": f"{compiler.path} ({compiler.version}, digest {compiler.digest[:12]})",
            "ISA": self.toolchain.isa,
            "flags": self.toolchain.flags,
            "ABI": str(self.unit.abi),
            "source": hash_parts({"source": [self.unit.source]})[:12],
            "headers": hash_parts({"digests": tuple(self.key.headers.values())})[:12],
        }

    def record(
        self, output: str, seconds: float, library: bytes | None = None, resources: Resources = _NO_RESOURCES
    ) -> ArtifactRecord:
        """The record of this build; without a library, that of a failure."""
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
        """The origin that goes into the record of this build."""
        return Origin(self.subject.name, self.unit.abi, source_digest(self.unit.source))

    def error(self, failure: _CommandFailed, log: Path, seconds: float) -> CompileError:
        """The error for a source that the compiler refused."""
        compiler = f"{self.toolchain.compiler.path} ({self.toolchain.label})"
        return CompileError(
            f"{self.subject.title} does not compile with {compiler}: {failure.reason}",
            hint=f"The compiler's output is in {log}",
            log=failure.output,
            record=self.record(failure.output, seconds),
        )


def source_digest(source: str) -> str:
    """SHA-256, in hex, of an emitted source."""
    return hashlib.sha256(source.encode()).hexdigest()


def _run_compiler(unit: TranslationUnit, toolchain: Toolchain, folder: Path, stop: threading.Event) -> str:
    """Make the library in ``folder`` and return what the compiler printed."""
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
    if not (folder / LIBRARY).is_file():
        raise _CommandFailed(f"{command[0]} ended without an error, but wrote no library", output)
    return output


class Builder:
    """Builds kernels into the cache, at most once per content key across all threads and processes.

    Args:
        cache_dir: the folder of the cache; None for that of the settings.
        record: called with every artifact that this builder compiles, fails to compile, or first finds in the cache
            (so that a new registry gets its record); always in the thread that called the builder.
        targets: returns the target of an arch, as :func:`catalog.backends.target_of`; it may raise BuildError.
        refuse: raises BuildError for a kernel that is known not to compile.
    """

    def __init__(
        self,
        cache_dir: Path | None = None,
        record: Callable[[ArtifactRecord], None] | None = None,
        *,
        targets: Callable[[str], Target],
        refuse: Callable[[Kernel], None] | None = None,
    ) -> None:
        self.cache = Cache(cache_dir or settings().cache_dir)
        self._keys = KeyMaker(self.cache.scans)
        self._record = record
        self._targets = targets
        self._refuse = refuse
        self._recorded: set[str] = set()
        self.cap = SizeCap(self.cache)
        self.remote = Remote.of(settings())

    def build(self, kernel: Kernel) -> Artifact:
        """The library of ``kernel``, from the cache if it is there and intact.

        Raises:
            BuildError: it does not compile, or its target does not implement it; ``log`` is the compiler's output.
            ToolchainError: there is no usable compiler for its arch.
        """
        with notices.compiling(kernel.name):
            return self._settle(lambda: self.make(kernel, threading.Event()))

    def build_helper(self, name: str, arch: str, source: str) -> Artifact:
        """The library of ``source``, which belongs to no row, from the cache if it is there and intact.

        It is not recorded in the registry.

        Args:
            name: its name in messages.
            arch: the arch to compile for, with that target's headers, compiler and flags.
            source: the text of its only translation unit.

        Raises:
            BuildError, ToolchainError: as in :meth:`build`.
        """
        target = self._targets(arch)
        subject = _Subject(f"{name} for {arch}", name, arch, kernel_id="")
        stop = threading.Event()
        return self.finish(self._job(subject, target, target.unit(source), target.toolchain(arch), stop), stop).artifact

    def build_many(
        self,
        kernels: Iterable[Kernel],
        jobs: int | None = None,
        on_done: Callable[[Artifact | BuildFailure], None] | None = None,
        *,
        fail_fast: bool = False,
        pool: Pool | None = None,
    ) -> BuildReport:
        """Build ``kernels``, ``jobs`` at a time (None: one per core); ``on_done`` is called as each one ends.

        A kernel that fails does not stop the others, unless ``fail_fast``, and raises nothing. Any other exception
        (from ``record`` or ``on_done``, or Ctrl-C) first ends the running compilers; finished kernels are in the cache
        by then. ``pool`` builds elsewhere than in threads of this process.

        Raises:
            ClusterError: the machines of ``pool`` are gone.
        """
        asked = list(kernels)
        results: dict[int, Artifact | BuildFailure] = {}
        with closing((pool or Threads(jobs)).results(self, asked)) as ended:
            for place, finish in ended:
                done: Artifact | BuildFailure
                try:
                    done = self._settle(finish)
                except (BuildError, ToolchainError) as error:
                    done = BuildFailure(asked[place], error)
                results[place] = done
                if on_done is not None:
                    on_done(done)
                if fail_fast and isinstance(done, BuildFailure):
                    break
        ordered = [results[place] for place in sorted(results)]
        return BuildReport(
            tuple(done for done in ordered if isinstance(done, Artifact)),
            tuple(done for done in ordered if isinstance(done, BuildFailure)),
            len(asked) - len(results),
        )

    def key_of(self, kernel: Kernel) -> str:
        """The current content key of ``kernel``: the name of its library, whether or not the cache has it.

        Raises:
            BuildError, ToolchainError: as in :meth:`build`, before anything is compiled.
        """
        target = self._targets(kernel.arch)
        toolchain = target.toolchain_of(kernel)
        unit = target.unit(target.emit(kernel, self.cache.scans), kernel)
        try:
            return self._keys.key(unit, toolchain).hex
        except ScanError as error:
            return error.question  # its failure is stored under this hash

    def _settle(self, finish: Callable[[], Built]) -> Artifact:
        """The artifact that ``finish`` returns. Its record, or that of its failure, goes to the registry first."""
        try:
            built = finish()
        except CompileError as error:
            self._record_build(error.record)
            raise
        if not (built.artifact.cached and built.artifact.key in self._recorded):
            self._record_build(built.record)
            self._recorded.add(built.artifact.key)
        return built.artifact

    def _record_build(self, record: ArtifactRecord) -> None:
        if self._record is not None:
            self._record(record)

    def make(self, kernel: Kernel, stop: threading.Event) -> Built:
        """As :meth:`build`, but in any thread and without recording; ends early when ``stop`` is set.

        Raises:
            Interrupted: ``stop`` was set.
            BuildError, ToolchainError: as in :meth:`build`.
        """
        return self.finish(self.job(kernel, stop), stop)

    def job(self, kernel: Kernel, stop: threading.Event, source: str | None = None) -> Job:
        """The source of ``kernel`` (``source`` if it was emitted before), its content key, and what its build needs.

        Raises:
            Interrupted, BuildError, ToolchainError: as in :meth:`make`.
        """
        if self._refuse is not None:
            self._refuse(kernel)
        target, subject = self._targets(kernel.arch), _Subject.of_kernel(kernel)
        toolchain = target.toolchain_of(kernel)
        with self._cache_errors(subject):
            self.cache.create()  # the results of header scans are kept in it
        emitted = target.emit(kernel, self.cache.scans) if source is None else source
        return self._job(subject, target, target.unit(emitted, kernel), toolchain, stop)

    def find(self, job: Job) -> Built | None:
        """The library of ``job``, if the cache has an intact one.

        Raises:
            BuildError: the cache folder cannot be read.
        """
        with self._cache_errors(job.subject):
            record = self.cache.load(job.key.hex)
            if record is None:
                return None
            self.cache.use(job.key.hex)
            return self._built(record, cached=True)

    def finish(self, job: Job, stop: threading.Event) -> Built:
        """The library of ``job``: found in the cache, fetched from the remote cache, or compiled.

        A compiled one is written to the remote cache, if this is allowed.

        Raises:
            Interrupted, BuildError, ToolchainError: as in :meth:`make`.
        """
        with self._cache_errors(job.subject):
            built = self.find(job) or self._make_once(job, stop)
        if self.remote is not None and not built.artifact.cached:
            self.remote.share(built.record.key, self.cache)
        return built

    def admit(
        self, record: ArtifactRecord, origin: Origin, library: bytes, stop: threading.Event, *, cached: bool
    ) -> Built:
        """Publish a library that another machine compiled, or already had (``cached``), unless the cache has it by now.

        Raises:
            Interrupted: ``stop`` was set.
            BuildError: the cache folder cannot be written.
        """
        with self._cache_errors(
            _Subject(f"kernel {origin.kernel_name}", origin.kernel_name, record.arch, record.kernel_id)
        ):
            self.cache.create()
            with self.cache.lock(record.key, stop):
                there = self.cache.load(record.key)
                if there is None:
                    with self.cache.workspace(record.key) as folder:
                        (folder / LIBRARY).write_bytes(library)
                        self.cache.publish(folder / LIBRARY, record, origin)
                    self.cap.grew(len(library))
                return self._built(there or record, cached)

    def admit_failure(self, record: ArtifactRecord, message: str, log: str, stop: threading.Event) -> CompileError:
        """The error for a kernel that another machine could not compile; ``log`` is stored here.

        Raises:
            Interrupted: ``stop`` was set.
            BuildError: the cache folder cannot be written.
        """
        with self._cache_errors(_Subject(message, "", record.arch, record.kernel_id)):
            self.cache.create()
            with self.cache.lock(record.key, stop):
                path = self.cache.keep_log(record.key, log)
        return CompileError(message, hint=f"The compiler's output is in {path}", log=log, record=record)

    def _job(
        self, subject: _Subject, target: Target, unit: TranslationUnit, toolchain: Toolchain, stop: threading.Event
    ) -> Job:
        with self._cache_errors(subject):
            self.cache.create()
            return Job(subject, target, unit, toolchain, self._key(subject, target, unit, toolchain, stop))

    @contextmanager
    def _cache_errors(self, subject: _Subject) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"{subject.title}: {error.filename or self.cache.folder}: {error.strerror or error}", hint=ANOTHER
            ) from None

    def _key(
        self, subject: _Subject, target: Target, unit: TranslationUnit, toolchain: Toolchain, stop: threading.Event
    ) -> ContentKey:
        try:
            return self._keys.key(unit, toolchain)
        except ScanError as error:
            # Without a key, the failure is stored under the hash of the other parts of the key.
            job = Job(subject, target, unit, toolchain, ContentKey(error.question, {}))
            with self.cache.lock(error.question, stop):
                raise self._refusal(job, _CommandFailed(error.failure, error.log), 0.0) from None
        except BuildError as error:
            raise BuildError(f"{subject.title}: {error.message}", hint=error.hint) from None

    def _refusal(self, job: Job, failure: _CommandFailed, seconds: float) -> CompileError:
        """Store a failed compile. Raises if the cause is not the kernel but the compiler or the machine."""
        short = _OUT_OF_RESOURCES.search(f"{failure.output}\n{failure.failure}")
        if short is not None:
            raise BuildError(
                f"{job.subject.title} was not compiled, for lack of memory or disk space: {short[0].strip()}",
                hint=f"Make room in {self.cache.folder} (catalog cache gc) and in the compiler's TMPDIR, or use "
                "fewer --jobs",
                log=failure.output,
            )
        job.toolchain.verify()
        log = self.cache.keep_log(job.key.hex, f"{failure.output}\n{failure.failure}\n")
        return job.error(failure, log, seconds)

    def _make_once(self, job: Job, stop: threading.Event) -> Built:
        """Compile, unless another builder did it while this one waited for the lock, or the remote cache has it."""
        with self.cache.lock(job.key.hex, stop):
            found = self.find(job) or self._pull(job.key.hex)
            if found is not None:
                return found
            library = self.cache.so_path(job.key.hex)
            if library.exists():
                _log.warning("%s is not what its record says: building %s again", library, job.subject.title)
            with self.cache.workspace(job.key.hex) as folder:
                return self._compile(job, folder, stop)

    def _pull(self, key: str) -> Built | None:
        """The library of ``key`` from the remote cache, if it has one; the caller holds the lock of ``key``."""
        record = None if self.remote is None else self.remote.pull(key, self.cache)
        if record is None:
            return None
        self.cap.grew(record.so_bytes or 0)
        return self._built(record, cached=True)

    def _compile(self, job: Job, folder: Path, stop: threading.Event) -> Built:
        _log.info("compiling %s with %s", job.subject.title, job.toolchain.label)
        started = time.perf_counter()
        try:
            output = _run_compiler(job.unit, job.toolchain, folder, stop)
        except _CommandFailed as failure:
            raise self._refusal(job, failure, time.perf_counter() - started) from None
        seconds = time.perf_counter() - started
        changed = job.key.changed_headers()
        if changed:
            raise BuildError(f"{job.subject.title}: {changed[0]} changed while it compiled", hint="Build it again.")
        resources = job.target.resources(folder, output)
        record = job.record(output, seconds, (folder / LIBRARY).read_bytes(), resources)
        self.cache.publish(folder / LIBRARY, record, job.origin)
        self.cap.grew(record.so_bytes or 0)
        _log.info("compiled %s in %.1f s", job.subject.title, seconds)
        return self._built(record, cached=False)

    def _built(self, record: ArtifactRecord, cached: bool) -> Built:
        path = self.cache.loaded_path(record.key)
        digest, size = record.so_sha256 or "", record.so_bytes or 0
        return Built(Artifact(record.key, path, digest, size, record.kernel_id, record.compile_s, cached), record)
