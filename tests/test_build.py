"""The build: the cache, the builder, toolchains; a real compiler, real processes, mostly on a tiny kernel."""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_project import ARCH, Project, answer_of, make_kernel, make_project

from catalog.backends import HOST, target_of
from catalog.build import keys, notices, processes, toolchains
from catalog.build.builder import Builder, BuildFailure
from catalog.build.cache import ArtifactRecord, Cache
from catalog.build.toolchains import Toolchain
from catalog.build.trials import Diagnosis, Trials
from catalog.errors import BuildError, CacheError, CatalogError, ToolchainError
from catalog.ops import read_kernel
from catalog.ops.attention.kernels.host.emit import emit
from catalog.schema.kernel import Kernel
from catalog.settings import settings

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _fresh_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "default cache"))
    monkeypatch.delenv("CATALOG_CXX", raising=False)
    monkeypatch.delenv("CATALOG_COMPILER_LAUNCHER", raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


# Building


def test_a_call_that_compiles_says_so(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(notices, "PATIENCE_SECONDS", 0.01)
    builder, kernel = project.builder(tmp_path / "cache"), make_kernel()
    with caplog.at_level(logging.INFO, logger="catalog"):
        builder.build(make_kernel(32))
    assert [message.split()[0] for message in caplog.messages] == ["compiling", "compiled"]
    builder.build(make_kernel(96))
    assert capsys.readouterr().err == "", "no terminal"

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with notices.shown_elsewhere():
        builder.build(make_kernel(128))
    assert capsys.readouterr().err == "", "a progress bar says more"
    builder.build(kernel)
    assert capsys.readouterr().err == f"catalog: compiling {kernel.name}; later calls find it in the cache\n"


def test_builds_once_and_tells_the_registry(project: Project, tmp_path: Path) -> None:
    records: list[ArtifactRecord] = []
    kernel = make_kernel()
    builder = project.builder(tmp_path / "cache", records.append)
    first, second = builder.build(kernel), builder.build(kernel)

    assert answer_of(first.path) == 1064
    assert not first.cached
    assert second == replace(first, cached=True)
    assert [(r.key, r.kernel_id, r.status, r.so_bytes) for r in records] == [
        (first.key, kernel.id, "built", first.path.stat().st_size)
    ]
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700

    # Another registry over the same cache learns of what is built already.
    project.builder(tmp_path / "cache", records.append).build(kernel)
    assert records[1] == records[0]


def test_libraries_hold_no_folder(project: Project, tmp_path: Path) -> None:
    one = project.builder(tmp_path / "one").build(make_kernel())
    project.move()
    two = project.builder(tmp_path / "two").build(make_kernel())
    assert one.path.read_bytes() == two.path.read_bytes()
    assert str(tmp_path).encode() not in one.path.read_bytes()


def test_environment_adds_no_headers(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "hidden.hpp").touch()
    project.write("inner.hpp", "#if __has_include(<hidden.hpp>)\n#error seen\n#endif\n#define OFFSET 1000\n")
    monkeypatch.setenv("CPATH", str(hidden))
    assert answer_of(project.builder(tmp_path / "cache").build(make_kernel()).path) == 1064


@pytest.fixture(params=["flock", "lease"])
def _locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a local disk, and as on a network file system."""
    monkeypatch.setenv("CATALOG_CACHE_LOCKS", request.param)
    settings.cache_clear()


@pytest.mark.usefixtures("_locks")
def test_sixteen_processes_compile_once(project: Project, tmp_path: Path) -> None:
    project.launch_with(tmp_path / "launcher", f'echo compiled >> "{tmp_path}/compiles"\nexec "$@"')
    barrier, answers = FORK.Barrier(16), FORK.SimpleQueue()

    def build() -> None:
        barrier.wait()
        artifact = project.builder(tmp_path / "cache").build(make_kernel())
        answers.put((answer_of(artifact.path), artifact.cached))

    children = [FORK.Process(target=build) for _ in range(16)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)

    assert sorted(answers.get() for _ in children) == [(1064, False)] + [(1064, True)] * 15
    assert (tmp_path / "compiles").read_text() == "compiled\n"


def _kill_at_rename(count: int, builder: Builder, kernel: Kernel) -> None:
    renames = iter(range(count))

    def rename(source: str, target: str) -> None:
        if next(renames, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        os.rename(source, target)

    os.replace = rename
    builder.build(kernel)


@pytest.mark.parametrize("renames", range(3))
def test_killed_between_steps(renames: int, project: Project, tmp_path: Path) -> None:
    """Renames of a build: the remembered headers, the library, its record."""
    builder = project.builder(tmp_path / "cache")
    child = FORK.Process(target=_kill_at_rename, args=(renames, builder, make_kernel()))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL

    key = project.key(tmp_path).hex
    assert Cache(tmp_path / "cache").load(key) is None
    artifact = builder.build(make_kernel())
    assert not artifact.cached
    assert answer_of(artifact.path) == 1064


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.01)


def _slow_launcher(project: Project, folder: Path) -> None:
    """The compiler starts when the file ``go`` exists."""
    text = f'echo $$ > "{folder}/started"\nuntil [ -e "{folder}/go" ]; do sleep 0.02; done\nexec "$@"'
    project.launch_with(folder / "launcher", text)


@pytest.mark.usefixtures("_locks")
def test_killed_while_compiling(project: Project, tmp_path: Path) -> None:
    _slow_launcher(project, tmp_path)
    builder = project.builder(tmp_path / "cache")
    child = FORK.Process(target=builder.build, args=(make_kernel(),))
    child.start()
    _wait_for(tmp_path / "started")
    child.kill()
    child.join()
    assert not list((tmp_path / "cache").glob("*.so"))

    (tmp_path / "go").touch()  # the orphaned compiler runs too, beside the next build
    assert answer_of(builder.build(make_kernel()).path) == 1064
    # Whoever takes a lease over cannot know that its holder is dead: what that one left is collected after a day.
    left = 0 if settings().cache_locks == "flock" else 1
    assert len(list((tmp_path / "cache" / "tmp").iterdir())) == left


def test_interrupt_ends_the_compilers(project: Project, tmp_path: Path) -> None:
    _slow_launcher(project, tmp_path)
    threading.Thread(
        target=lambda: (_wait_for(tmp_path / "started"), os.kill(os.getpid(), signal.SIGINT)), daemon=True
    ).start()
    with pytest.raises(KeyboardInterrupt):
        project.builder(tmp_path / "cache").build_many([make_kernel(hdim) for hdim in range(8)], jobs=1)

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "started").read_text()), 0)
    left = [path.name for path in (tmp_path / "cache").iterdir() if path.is_file()]
    assert left == []
    assert not list((tmp_path / "cache" / "tmp").iterdir())


def _flip_byte(entry: Path, other: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)


def _swap_with_record(entry: Path, other: Path) -> None:
    shutil.copy(other, entry)
    shutil.copy(other.with_suffix(".json"), entry.with_suffix(".json"))


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "flipped byte": _flip_byte,
    "truncated": lambda entry, other: os.truncate(entry, 100),
    "swapped library": lambda entry, other: shutil.copy(other, entry),
    "swapped entry": _swap_with_record,
    "no record": lambda entry, other: entry.with_suffix(".json").unlink(),
    "half a record": lambda entry, other: os.truncate(entry.with_suffix(".json"), 50),
    "another record": lambda entry, other: entry.with_suffix(".json").write_text('{"kernel_name": ""}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_rebuilt(
    damage: str, project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builder = project.builder(tmp_path / "cache")
    entry, other = (builder.build(make_kernel(hdim)).path for hdim in (64, 128))
    sound = entry.read_bytes()
    DAMAGES[damage](entry, other)
    with caplog.at_level(logging.WARNING):
        artifact = builder.build(make_kernel(64))
    assert not artifact.cached
    assert entry.read_bytes() == sound
    assert "is not what its record says" in caplog.text
    assert builder.build(make_kernel(64)).cached


@pytest.mark.parametrize(
    ("inner", "line"),
    [
        ('static_assert(false, "no such tile");', "no such tile"),
        ("#error wrong ISA", "wrong ISA"),
        ('#include "absent.hpp"', "absent.hpp: No such file"),
    ],
)
def test_failed_compile_keeps_its_log(inner: str, line: str, project: Project, tmp_path: Path) -> None:
    records: list[ArtifactRecord] = []
    kernel = make_kernel()
    project.write("inner.hpp", inner)
    with pytest.raises(BuildError, match=line) as caught:
        project.builder(tmp_path / "cache", records.append).build(kernel)

    (record,) = records
    log = tmp_path / "cache" / "logs" / f"{record.key}.log"
    assert (record.status, record.so_sha256, record.log) == ("failed", None, caught.value.log)
    for said in (kernel.name, str(project.toolchain.compiler.path), str(log)):
        assert said in str(caught.value)
    assert log.read_text().startswith(caught.value.log)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_compiler_that_is_killed_is_not_the_kernel_s_fault(project: Project, tmp_path: Path) -> None:
    """As the kernel does where memory runs out: the kernel would be passed over from then on, had it failed."""
    records: list[ArtifactRecord] = []
    project.launch_with(tmp_path / "launcher", "kill -9 $$")
    with pytest.raises(BuildError, match="for lack of memory or disk space: killed by SIGKILL"):
        project.builder(tmp_path / "cache", records.append).build(make_kernel())
    assert records == []


def test_hung_compiler_is_stopped(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _slow_launcher(project, tmp_path)
    monkeypatch.setattr("catalog.build.builder.COMPILE_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(Toolchain, "verify", lambda self: None)
    with pytest.raises(BuildError, match=r"stopped after 0\.3 s"):
        project.builder(tmp_path / "cache").build(make_kernel())


def test_header_that_changes_while_compiling(project: Project, tmp_path: Path) -> None:
    inner = project.folder / "inner.hpp"
    project.launch_with(tmp_path / "launcher", f'echo "#define OFFSET 7" > "{inner}"\nexec "$@"')
    builder = project.builder(tmp_path / "cache")
    with pytest.raises(BuildError, match=r"inner.hpp changed while it compiled"):
        builder.build(make_kernel())
    assert answer_of(builder.build(make_kernel()).path) == 71


def test_many_kernels(project: Project, tmp_path: Path) -> None:
    """A failure does not stop the others; order and threads are the caller's."""
    threads = set()
    project.source += "static_assert({hdim} != 3);\n"
    builder = project.builder(tmp_path / "cache", lambda record: threads.add(threading.current_thread()))
    done: list[object] = []
    report = builder.build_many([make_kernel(hdim) for hdim in (1, 2, 3, 2, 4)], on_done=done.append)
    assert [answer_of(artifact.path) for artifact in report.artifacts] == [1001, 1002, 1002, 1004]
    assert [(f.kernel.signature.hdim_q, type(f)) for f in report.failures] == [(3, BuildFailure)]
    assert len(done) == 5
    assert threads == {threading.main_thread()}


def test_unwritable_cache(project: Project, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="file") as caught:
        project.builder(tmp_path / "file").build(make_kernel())
    assert "CATALOG_CACHE_DIR" in str(caught.value)


# Toolchains


def diagnoses() -> list[Diagnosis]:
    trials = Trials(Cache(settings().cache_dir))
    return [trials.diagnose(arch, toolchains.host_toolchain) for arch in HOST.isas]


@pytest.mark.parametrize("chosen", [None, "no-such-compiler"])
def test_missing_compiler_says_what_to_install(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if chosen is not None:
        monkeypatch.setenv("CATALOG_CXX", chosen)
    with pytest.raises(ToolchainError) as caught:
        Builder(tmp_path / "cache", targets=target_of).build(make_kernel())
    message = str(caught.value)
    assert (chosen or "g++, clang++, c++") in message
    for remedy in ("apt install g++", "dnf install gcc-c++", "xcode-select --install", "CATALOG_CXX"):
        assert remedy in message
    assert {row.compiler for row in diagnoses()} == {None}


def test_broken_toolchain_is_not_the_kernel_s_fault(project: Project, tmp_path: Path) -> None:
    project.toolchain = replace(project.toolchain, compile_flags=("-march=pdp11",))
    with pytest.raises(ToolchainError, match="pdp11"):
        project.builder(tmp_path / "cache").build(make_kernel())


def test_missing_launcher(project: Project, tmp_path: Path) -> None:
    project.toolchain = replace(project.toolchain, launcher=("no-such-launcher",))
    with pytest.raises(ToolchainError, match="no-such-launcher"):
        project.builder(tmp_path / "cache").build(make_kernel())


def test_doctor_knows_this_machine() -> None:
    rows = {row.arch: row for row in diagnoses()}
    assert rows[ARCH].missing is None
    assert all(row.compiler for row in rows.values())
    foreign = "x86_64_v3" if ARCH == "aarch64" else "aarch64"
    assert "does not compile for" in str(rows[foreign].missing)


def test_a_toolchain_that_works_is_tried_again_only_when_it_changes(project: Project, tmp_path: Path) -> None:
    header, tried = tmp_path / "probe.hpp", tmp_path / "tried"
    header.touch()
    project.launch_with(tmp_path / "launcher", f'echo >> "{tried}"; exec "$@"')
    toolchain = replace(project.toolchain, probe=f'#include "{header}"\n')

    def times(trials: Trials, toolchain: Toolchain = toolchain) -> int:
        """How often a new process tries a toolchain."""
        tried.write_text("")
        for cached in (toolchains._check, keys._settled_digest):
            cached.cache_clear()
        trials.verify(toolchain)
        return len(tried.read_text())

    trials = Trials(Cache(tmp_path / "cache"))
    assert [times(trials) for _ in range(2)] == [1, 0]
    assert times(trials, replace(toolchain, compile_flags=("-O1", "-fPIC"))) == 1
    (stored, _) = sorted((tmp_path / "cache" / "trials").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    stored.write_text("[" * 1000)
    assert [times(trials) for _ in range(2)] == [1, 0]
    trials.forget()
    assert [times(trials) for _ in range(2)] == [1, 0]
    header.write_text("#error broken\n")
    for _ in range(2):
        with pytest.raises(ToolchainError, match="broken"):
            times(trials)
    header.write_text("")
    assert times(trials) == 0


def test_a_toolchain_is_tried_each_time_where_nothing_can_be_stored(project: Project, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    trials = Trials(Cache(tmp_path / "cache"))
    trials.verify(project.toolchain)
    with pytest.raises(CacheError, match="cache"):
        trials.forget()


def test_timeout_ends_the_whole_family_and_keeps_its_output(tmp_path: Path) -> None:
    started = time.monotonic()
    done = processes.run(["/bin/sh", "-c", "echo said; sleep 30; :"], tmp_path, 0.3, threading.Event())
    assert done == processes.Completed("said\n", "stopped after 0.3 s", timed_out=True)
    assert time.monotonic() - started < 10  # a surviving `sleep` would hold the pipe open


# The real host kernels


@pytest.mark.parametrize(
    ("trait", "value"), [("dtype", "mxfp8"), ("qscale", "mx"), ("vlayout", "col"), ("dropout_variant", "wg16")]
)
def test_host_refuses_what_its_headers_lack(trait: str, value: object) -> None:
    with pytest.raises(BuildError, match=rf"{trait} = {value}"):
        emit(make_kernel(**{trait: value}))


def test_a_gpu_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATALOG_HIPCXX", "no-compiler")
    settings.cache_clear()
    kernel = make_kernel().model_copy(update={"arch": "gfx942"})
    with pytest.raises(CatalogError, match="no HIP compiler for gfx942"):
        Builder(tmp_path, targets=target_of).build(kernel)


def test_host_kernel_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/launched"\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CATALOG_COMPILER_LAUNCHER", str(launcher))
    kernel = make_kernel(mask="causal", lse=True)
    records: list[ArtifactRecord] = []
    builder = Builder(record=records.append, targets=target_of)
    artifact = builder.build(kernel)

    assert artifact.path.parent == settings().cache_dir
    assert " -c " in (tmp_path / "launched").read_text()
    library = ctypes.CDLL(str(artifact.path))
    library.catalog_describe.restype = ctypes.c_char_p
    described = json.loads(library.catalog_describe())
    assert (described.pop("id"), described.pop("name")) == (kernel.id, kernel.name)
    assert read_kernel(described) == kernel
    assert library.catalog_launch(None, None) == 2  # CATALOG_BAD_ARGUMENT
    assert records[0].isa in ("x86-64-v3", "armv8-a")
    assert 1000 < (records[0].resources.code_bytes or 0) < artifact.path.stat().st_size
    assert 100 < (records[0].resources.stack_bytes or 0) < 100_000
    assert builder.build(kernel).cached
