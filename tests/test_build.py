"""The build: content keys, the cache, the builder; a real compiler, real processes, mostly on a tiny kernel."""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import platform
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.build import processes, toolchains
from catalog.build.builder import Builder, BuildFailure, Target
from catalog.build.cache import ArtifactRecord, Cache
from catalog.build.host.emit import emit
from catalog.build.keys import ContentKey, KeyMaker, hash_parts
from catalog.build.toolchains import Toolchain, find_host_toolchain, parse_make_rule
from catalog.errors import BuildError, CatalogError, ToolchainError
from catalog.schema.fields import Algorithm, Signature
from catalog.schema.kernel import Kernel
from catalog.settings import settings

ARCH = "aarch64" if platform.machine() in {"aarch64", "arm64"} else "x86_64_v3"
TILE = {"tile_m0": 32, "tile_n0": 64, "warp_m0": 4, "warp_n0": 16, "warp_m1": 4, "warp_n1": 16}
FORK = multiprocessing.get_context("fork")


def make_kernel(hdim: int = 64, **traits: object) -> Kernel:
    signature = {"family": "fwd", "dtype": "fp32", "hdim_q": hdim, "hdim_v": hdim, **traits}
    return Kernel(
        arch=ARCH,
        revision="native",
        space="native",
        mask_impl="generic",
        target="",
        signature=Signature.model_validate(signature),
        algorithm=Algorithm.model_validate({"pipeline": "host_panel", **TILE}),
    )


def answer_of(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


@pytest.fixture(autouse=True)
def _fresh_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "default cache"))
    monkeypatch.delenv("CATALOG_CXX", raising=False)
    monkeypatch.delenv("CATALOG_COMPILER_LAUNCHER", raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()


@dataclass
class Project:
    """A target with two headers; its kernels have one function, ``answer``: the head dim plus 1000."""

    folder: Path
    toolchain: Toolchain
    source: str = '#include "entry.hpp"\nextern "C" int answer() {{ return OFFSET + {hdim}; }}\n'

    @property
    def target(self) -> Target:
        return Target(
            {"project": self.folder},
            self.folder / "abi.h",
            lambda kernel: self.source.format(hdim=kernel.signature.hdim_q),
            lambda arch: self.toolchain,
        )

    def builder(self, cache_dir: Path, record: Callable[[ArtifactRecord], None] | None = None) -> Builder:
        return Builder(cache_dir, record, targets=lambda arch: self.target)

    def key(self, scans: Path, hdim: int = 64) -> ContentKey:
        return KeyMaker(scans).key(self.target.unit(make_kernel(hdim)), self.toolchain)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def launch_with(self, script: Path, text: str) -> None:
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        self.toolchain = replace(self.toolchain, launcher=(str(script),))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    host = find_host_toolchain(ARCH, None, None, os.environ["PATH"])
    tiny = replace(host, compile_flags=("-O0", "-fPIC"), link_flags=("-shared",))
    project = Project(tmp_path / "include", tiny)
    project.folder.mkdir()
    project.write("entry.hpp", '#include "inner.hpp"\nextern "C" const char* place() { return __FILE__; }\n')
    project.write("inner.hpp", "#define OFFSET 1000\n")
    project.write("abi.h", "#define CATALOG_ABI_VERSION 1\n")
    return project


# Content keys


@given(st.dictionaries(st.text(), st.lists(st.text())), st.dictionaries(st.text(), st.lists(st.text())))
def test_parts_hash_alike_only_if_equal(a: dict[str, list[str]], b: dict[str, list[str]]) -> None:
    assert (hash_parts(a) == hash_parts(b)) == (a == b)
    assert hash_parts(dict(reversed(a.items()))) == hash_parts(a)


def test_parts_do_not_run_together() -> None:
    assert hash_parts({"flags": ["-O3", "-g"]}) != hash_parts({"flags": ["-O3-g"]})
    assert hash_parts({"a": ["b"]}) != hash_parts({"a": [], "b": []})


def _with_compiler(field: str, project: Project) -> None:
    compiler = replace(project.toolchain.compiler, **{field: "/opt/other/g++"})
    # The scan has to run the compiler, so a path that differs must exist.
    if field == "path":
        copy = project.folder.parent / "g++"
        copy.symlink_to(project.toolchain.compiler.path)
        compiler = replace(compiler, path=copy)
    project.toolchain = replace(project.toolchain, compiler=compiler)


def _with_flags(field: str, project: Project) -> None:
    flags = (*getattr(project.toolchain, field), "-g")
    project.toolchain = replace(project.toolchain, **{field: flags})


CHANGES: dict[str, Callable[[Project], None]] = {
    "source": lambda p: setattr(p, "source", p.source + "// more\n"),
    "header": lambda p: p.write("entry.hpp", '#include "inner.hpp"\n'),
    "inner header": lambda p: p.write("inner.hpp", "#define OFFSET 1001\n"),
    "abi": lambda p: p.write("abi.h", "#define CATALOG_ABI_VERSION 2\n"),
    "isa": lambda p: setattr(p, "toolchain", replace(p.toolchain, isa="other")),
    "compile flags": partial(_with_flags, "compile_flags"),
    "link flags": partial(_with_flags, "link_flags"),
    "compiler version": partial(_with_compiler, "version"),
    "compiler digest": partial(_with_compiler, "digest"),
    "compiler path": partial(_with_compiler, "path"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_key_changes_with(change: str, project: Project, tmp_path: Path) -> None:
    before = project.key(tmp_path)
    assert project.key(tmp_path) == before
    CHANGES[change](project)
    assert project.key(tmp_path).hex != before.hex


def _move(project: Project) -> None:
    project.folder = project.folder.rename(project.folder.parent / "a folder of $another user")


def _touch(project: Project) -> None:
    for header in project.folder.iterdir():
        os.utime(header, (0, 0))


SAMES: dict[str, Callable[[Project], None]] = {
    "folder": _move,
    "times": _touch,
    "unrelated header": lambda p: p.write("other.hpp", "#error never read"),
    "launcher": lambda p: setattr(p, "toolchain", replace(p.toolchain, launcher=("ccache",))),
}


@pytest.mark.parametrize("change", SAMES)
@pytest.mark.parametrize("memory", ["remembered", "forgotten"])
def test_key_does_not_change_with(change: str, memory: str, project: Project, tmp_path: Path) -> None:
    before = project.key(tmp_path)
    if memory == "forgotten":
        tmp_path = tmp_path / "elsewhere"
    SAMES[change](project)
    assert project.key(tmp_path).hex == before.hex


def test_key_follows_new_includes(project: Project, tmp_path: Path) -> None:
    project.key(tmp_path)
    project.write("late.hpp", "#define OFFSET 1\n")
    project.write("inner.hpp", '#include "late.hpp"\n')
    before = project.key(tmp_path)
    project.write("late.hpp", "#define OFFSET 2\n")
    assert project.key(tmp_path).hex != before.hex


def test_key_covers_system_headers(project: Project, tmp_path: Path) -> None:
    project.write("inner.hpp", "#include <stddef.h>\n#define OFFSET 1000\n")
    headers = project.key(tmp_path).headers
    assert any(path.endswith("/stddef.h") for path in headers)
    assert os.path.realpath(project.folder / "inner.hpp") in headers


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda p: _use_flags(p, "-march=native"), "-march=native"),
        (lambda p: _use_flags(p, "@flags.txt"), "@flags.txt"),
        (lambda p: p.write("inner.hpp", 'asm(".incbin \\"data\\"");\n'), "inner.hpp"),
        (lambda p: p.write("abi.h", "\n"), "CATALOG_ABI_VERSION"),
    ],
)
def test_what_cannot_be_observed_is_not_keyed(
    spoil: Callable[[Project], None], named: str, project: Project, tmp_path: Path
) -> None:
    spoil(project)
    with pytest.raises(BuildError, match=named):
        project.key(tmp_path)


def _use_flags(project: Project, *flags: str) -> None:
    project.toolchain = replace(project.toolchain, compile_flags=flags)


def test_make_rules_are_unescaped() -> None:
    assert parse_make_rule("kernel.o: kernel.cpp a\\ b/$$x.h \\\n /c\\#.h\n") == ["kernel.cpp", "a b/$x.h", "/c#.h"]


# Building


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
    _move(project)
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
    assert not list((tmp_path / "cache" / "tmp").iterdir())


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


@pytest.mark.parametrize("chosen", [None, "no-such-compiler"])
def test_missing_compiler_says_what_to_install(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if chosen is not None:
        monkeypatch.setenv("CATALOG_CXX", chosen)
    with pytest.raises(ToolchainError) as caught:
        Builder(tmp_path / "cache").build(make_kernel())
    message = str(caught.value)
    assert (chosen or "g++, clang++, c++") in message
    for remedy in ("apt install g++", "dnf install gcc-c++", "xcode-select --install", "CATALOG_CXX"):
        assert remedy in message
    assert {row.arch: row.compiler for row in toolchains.doctor()} == dict.fromkeys(toolchains.host_facts().arches)


def test_broken_toolchain_is_not_the_kernel_s_fault(project: Project, tmp_path: Path) -> None:
    project.toolchain = replace(project.toolchain, compile_flags=("-march=pdp11",))
    with pytest.raises(ToolchainError, match="pdp11"):
        project.builder(tmp_path / "cache").build(make_kernel())


def test_missing_launcher(project: Project, tmp_path: Path) -> None:
    project.toolchain = replace(project.toolchain, launcher=("no-such-launcher",))
    with pytest.raises(ToolchainError, match="no-such-launcher"):
        project.builder(tmp_path / "cache").build(make_kernel())


def test_doctor_knows_this_machine() -> None:
    rows = {row.arch: row for row in toolchains.doctor()}
    assert rows[ARCH].missing is None
    assert all(row.compiler for row in rows.values())
    foreign = "x86_64_v3" if ARCH == "aarch64" else "aarch64"
    assert "does not compile for" in str(rows[foreign].missing)


def test_timeout_ends_the_whole_family_and_keeps_its_output(tmp_path: Path) -> None:
    started = time.monotonic()
    done = processes.run(["/bin/sh", "-c", "echo said; sleep 30; :"], tmp_path, 0.3, threading.Event())
    assert done == processes.Completed("said\n", "stopped after 0.3 s", timed_out=True)
    assert time.monotonic() - started < 10  # a surviving `sleep` would hold the pipe open


# The real host kernels


@pytest.mark.parametrize(
    ("trait", "value"), [("family", "bwd_dq_dk_dv"), ("dtype", "fp8"), ("dropout", True), ("bias", "alibi")]
)
def test_host_refuses_what_its_headers_lack(trait: str, value: object) -> None:
    with pytest.raises(BuildError, match=rf"{trait} = {value}"):
        emit(make_kernel(**{trait: value}))


def test_no_target_for_a_gpu_yet(tmp_path: Path) -> None:
    kernel = make_kernel().model_copy(update={"arch": "gfx942"})
    with pytest.raises(CatalogError, match="gfx942"):
        Builder(tmp_path).build(kernel)


def test_host_kernel_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/launched"\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CATALOG_COMPILER_LAUNCHER", str(launcher))
    kernel = make_kernel(mask="causal", lse=True)
    builder = Builder()
    artifact = builder.build(kernel)

    assert artifact.path.parent == settings().cache_dir
    assert " -c " in (tmp_path / "launched").read_text()
    library = ctypes.CDLL(str(artifact.path))
    library.catalog_describe.restype = ctypes.c_char_p
    described = json.loads(library.catalog_describe())
    assert (described.pop("id"), described.pop("name")) == (kernel.id, kernel.name)
    assert Kernel.model_validate(described) == kernel
    assert library.catalog_launch(None, None) == 2  # CATALOG_BAD_ARGUMENT

    started = time.perf_counter()
    for _ in range(20):
        assert builder.build(kernel).cached
    assert (time.perf_counter() - started) / 20 < 0.02  # measured: 0.6 ms; the margin is for a busy machine
