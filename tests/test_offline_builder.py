"""With compiling forbidden: what the cache has is served, no compiler is started, what is missing is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import command
import pytest
from conftest import fill
from tiny_project import ARCH, Project, make_kernel, make_project

from catalog.build.cache import Cache
from catalog.build.offline_builder import OfflineBuilder
from catalog.build.permissions import require_private
from catalog.errors import BuildError, CacheError, MissingKernelError, ToolchainError
from catalog.ops.attention.problem import Problem
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.settings import settings

PROBLEM = Problem(batch=1, nhead_q=2, seqlen_q=33, hdim_q=32, dtype="fp32")

RUN = """\
import json, sys
started = []
PROCESSES = ("subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system")
sys.addaudithook(lambda event, args: started.append(args) if event in PROCESSES else None)
from catalog import Catalog, Problem
result = Catalog(sys.argv[1]).select(Problem(**json.loads(sys.argv[2]))).run()
print(json.dumps({"kernels": result.kernels, "sum": float(result.outputs["o"].sum()), "started": len(started)}))
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


def stored(project: Project, cache: Path) -> OfflineBuilder:
    return OfflineBuilder(cache, targets=lambda arch: project.target)


def forbid(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a compiler that is asked for fails the test."""

    def toolchain(arch: str) -> None:
        raise AssertionError(f"a toolchain for {arch} was asked for")

    monkeypatch.setattr(Project, "target", replace(project.target, toolchain=toolchain, emit=lambda *_: toolchain("")))


def test_what_is_cached_runs_in_a_process_that_starts_none(
    host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(shutil.copy(host_file, tmp_path / "catalog.db"))
    plan = catalog.select(PROBLEM)
    only_this = fill(tmp_path / "cache", plan.kernels)
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(only_this))
    settings.cache_clear()
    catalog.close()
    shutil.copy(catalog.path, tmp_path / "new.db")
    expected = plan.run(make_inputs(PROBLEM)).outputs["o"].sum()
    for name in ("catalog.db", "new.db"):
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path / name), PROBLEM.key],
            env=os.environ | {"CATALOG_COMPILE": "false", "PATH": str(tmp_path), "CATALOG_CXX": "/bin/false"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == {
            "kernels": [kernel.name for kernel in plan.kernels],
            "sum": pytest.approx(float(expected)),
            "started": 0,
        }
    assert Catalog(tmp_path / "new.db").kernels("built") == list(plan.kernels)


@pytest.mark.slow
def test_selection_takes_the_best_of_what_there_is(
    host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(shutil.copy(host_file, tmp_path / "catalog.db"))
    best, *others = (candidate.kernel for candidate in catalog.candidates(PROBLEM, limit=4))
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    forbidding = Catalog(catalog.path, compile=False)
    assert forbidding.select(PROBLEM).kernels == (best,)
    with pytest.raises(MissingKernelError) as caught:
        forbidding.select(PROBLEM).run()
    assert isinstance(caught.value, BuildError)
    for words in (best.name, str(tmp_path / "cache"), f"catalog build \"id='{best.id}'\" --arch {best.arch}"):
        assert words in str(caught.value)

    catalog.build(others[1])
    assert forbidding.select(PROBLEM).run().kernels == (others[1].name,)
    candidates = Catalog(catalog.path, compile=False).candidates(PROBLEM, limit=4)
    assert [candidate.kernel for candidate in candidates] == [others[1]]


def test_without_a_compiler_what_is_cached_runs(
    host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = Catalog(shutil.copy(host_file, tmp_path / "catalog.db")).select(PROBLEM)
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(fill(tmp_path / "cache", before.kernels)))
    monkeypatch.setenv("CATALOG_CXX", str(tmp_path / "no-such-compiler"))
    settings.cache_clear()
    catalog = Catalog(tmp_path / "catalog.db")
    for _ in range(2):
        assert catalog.select(PROBLEM).run(make_inputs(PROBLEM)).kernels == (before.kernels[0].name,)
        catalog.forget()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "no-such-compiler" in line
    assert line.endswith("using only the kernels in the cache")
    with pytest.raises(ToolchainError, match="no-such-compiler"):
        catalog.select(PROBLEM.model_copy(update={"lse": True})).run()


def test_the_command_line_says_what_is_missing_and_how_to_build_it(host_file: Path, tmp_path: Path) -> None:
    kernel = Catalog(shutil.copy(host_file, tmp_path / "catalog.db")).select(PROBLEM).kernels[0]
    environment = {"CATALOG_COMPILE": "false", "CATALOG_CACHE_DIR": tmp_path / "cache"}
    problem = ["--batch", "1", "--nhead-q", "2", "--seqlen-q", "33", "--hdim-q", "32", "--dtype", "fp32"]
    for words in (["build", f"id = '{kernel.id}'"], ["run", *problem]):
        done = command.catalog(*words, db=tmp_path / "catalog.db", **environment)
        assert done.returncode == 1
        assert f"catalog build \"id='{kernel.id}'\"" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def _write_record(path: Path, abi: int = 1, **changes: object) -> None:
    cache = Cache(path.parent)
    record, origin = cache.read(path.stem)
    cache.put_record(replace(record, **changes), replace(origin, abi=abi))


def _break_record(path: Path, **changes: object) -> None:
    """Change what a record says behind the back of its digest."""
    file = path.with_suffix(".json")
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"origin": content["origin"] | changes}))


DAMAGES: dict[str, tuple[Callable[[Path], object], int]] = {
    "the newest, whatever compiled it": (lambda newest: None, 0),
    "of another ABI": (lambda newest: _write_record(newest, abi=2), 1),
    "of no known ABI": (lambda newest: _break_record(newest, abi=None), 1),
    "a record that was changed": (lambda newest: _break_record(newest, kernel_name="another"), 1),
    "a flipped byte": (lambda newest: newest.write_bytes(newest.read_bytes()[:-1] + b"x"), 1),
    "no library": (lambda newest: newest.unlink(), 1),
    "half a record": (lambda newest: os.truncate(newest.with_suffix(".json"), 50), 1),
    "another arch": (lambda newest: _write_record(newest, arch="gfx942"), 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_served_is_the_newest_sound_entry(
    damage: str, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    paths = []
    for year, flag in ((2031, "-O1"), (2030, "-O0")):
        project.toolchain = replace(project.toolchain, compile_flags=(flag, "-fPIC"))
        paths.append(project.builder(cache).build(make_kernel()).path)
        _write_record(paths[-1], created=f"{year}-01-01T00:00:00+00:00")
    change, served = DAMAGES[damage]
    change(paths[0])
    forbid(project, monkeypatch)
    artifact = stored(project, cache).build(make_kernel())
    assert (artifact.path, artifact.cached, artifact.kernel_id) == (paths[served], True, make_kernel().id)


def test_nothing_of_a_cache_that_strangers_can_reach_is_served(project: Project, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    project.builder(cache).build(make_kernel())
    cache.chmod(0o770)
    require_private.cache_clear()  # a new process, as it were
    with pytest.raises(CacheError, match="is open to others"):
        stored(project, cache).build(make_kernel())


def test_entries_that_come_and_go_while_the_process_runs(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    serving = stored(project, cache)
    with pytest.raises(MissingKernelError):
        serving.build(make_kernel())
    path = project.builder(cache).build(make_kernel()).path
    forbid(project, monkeypatch)
    assert serving.build(make_kernel()).path == path
    shutil.rmtree(cache)
    report = serving.build_many([make_kernel(), make_kernel(128)])
    assert [type(failure.error) for failure in report.failures] == [MissingKernelError] * 2


def test_a_helper_is_served_for_its_very_source(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = 'extern "C" int probe() { return 1; }\n'
    path = project.builder(tmp_path).build_helper("probe", ARCH, source).path
    forbid(project, monkeypatch)
    assert stored(project, tmp_path).build_helper("probe", ARCH, source).path == path
    with pytest.raises(MissingKernelError, match=r"probe for .* is not in the cache"):
        stored(project, tmp_path).build_helper("probe", ARCH, source + "// another\n")
