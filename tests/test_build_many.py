"""``catalog build`` of many kernels: what it prints, fails, resumes; Ctrl-C; a real ccache."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from build_command import WHERE, build_command
from cluster_processes import wait_until
from conftest import missing, slow_but
from tiny_project import answer_of, make_kernel, make_project

from catalog.backends import target_of
from catalog.build.builder import Artifact, Builder, BuildFailure
from catalog.build.cache import Cache
from catalog.cli.progress import Pace
from catalog.errors import UsageError
from catalog.runtime.build_run import Shard
from catalog.runtime.catalog import Catalog
from catalog.settings import settings


@pytest.fixture
def command(host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``catalog build`` of four kernels; all compilers but the first wait while there is a file ``wait``."""
    shutil.copy(host_file, tmp_path / "catalog.db")
    script = tmp_path / "launcher"
    script.write_text(
        f'#!/bin/sh\ncd_to="{tmp_path}"\nmkdir "$cd_to/asked" 2>/dev/null && exec "$@"\n'
        'echo $$ > "$cd_to/waiting.$$"\nwhile [ -e "$cd_to/wait" ]; do sleep 0.02; done\nexec "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CATALOG_DB", str(tmp_path / "catalog.db"))
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CATALOG_COMPILER_LAUNCHER", str(script))
    return build_command("--compile-only", "--limit", "4", "--jobs", "2")


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(tmp_path.glob("waiting.*"))) == 2, "one is compiled, two compile")
    waiting = [int(path.suffix[1:]) for path in tmp_path.glob("waiting.*")]
    running.send_signal(signal.SIGINT)
    printed, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    [line] = printed.splitlines()
    assert re.fullmatch(
        r"Interrupted\. 4 kernels: 1 compiled in [\d.]+ s of compiler time, 0 already in the cache, 0 failed, "
        "3 left: the same command continues",
        line,
    )
    assert "Traceback" not in errors
    for process_id in waiting:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
    assert not list((tmp_path / "cache" / "tmp").iterdir())

    (tmp_path / "wait").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "1 of 4 kernels already built, 3 left" in done.stderr
    assert "4 kernels: 3 compiled" in done.stdout
    lines = re.findall(r"^(cached|compiled) +[\d.]+ s +\d+ KiB  fmha_\w+$", done.stderr, re.MULTILINE)
    assert sorted(lines) == ["cached", "compiled", "compiled", "compiled"]
    cache = Cache(tmp_path / "cache")
    assert len([path for path in cache.folder.glob("*.so") if cache.load(path.stem) is not None]) == 4


ENDS = [("--keep-going", 3), ("--fail-fast", 1)]


@pytest.mark.parametrize(("option", "tried"), slow_but([], ENDS))
def test_a_failure_ends_the_others_only_on_request(option: str, tried: int, command: list[str], tmp_path: Path) -> None:
    (tmp_path / "launcher").write_text('#!/bin/sh\ngrep -q fmha kernel.cpp || exec "$@"\necho error: refused\nexit 1\n')
    words = ["--jobs", "1", "--limit", "3", option]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    left = f", {3 - tried} left: the same command continues" if tried < 3 else ""
    first = done.stdout.splitlines()[0]
    assert first == f"3 kernels: 0 compiled in 0.0 s of compiler time, 0 already in the cache, {tried} failed{left}"
    assert done.stderr.count("error: refused") == tried
    assert len(re.findall(r"^failed +[\d.]+ s +fmha_\w+$", done.stderr, re.MULTILINE)) == tried


def test_fail_fast_leaves_the_rest(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    project.source += "static_assert({hdim} != 2);\n"
    done: list[Artifact | BuildFailure] = []
    builder = project.builder(tmp_path / "cache")
    report = builder.build_many(map(make_kernel, range(1, 9)), jobs=1, on_done=done.append, fail_fast=True)
    assert [answer_of(artifact.path) for artifact in report.artifacts] == [1001]
    assert [failure.kernel.signature.hdim_q for failure in report.failures] == [2]
    assert report.left == 6
    assert len(done) == 2


@pytest.mark.slow
def test_a_compiler_launcher_caches_for_empty_caches(
    host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ccache = shutil.which("ccache") or missing("ccache")
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path / "ccache"))
    catalog = Catalog(shutil.copy(host_file, tmp_path / "catalog.db"))
    [kernel] = catalog.kernels(WHERE, arch="host", limit=1)
    plain = Builder(tmp_path / "plain", targets=target_of).job(kernel, threading.Event())
    monkeypatch.setenv("CATALOG_COMPILER_LAUNCHER", "ccache")
    settings.cache_clear()
    first, second = (Builder(tmp_path / name, targets=target_of).build(kernel) for name in ("first", "second"))
    assert not second.cached
    assert not plain.toolchain.launcher
    assert plain.key.hex == first.key == second.key
    assert first.path.read_bytes() == second.path.read_bytes()
    printed = subprocess.run([str(ccache), "--print-stats"], capture_output=True, text=True, check=True).stdout
    counts = dict(line.split("\t") for line in printed.splitlines())
    assert (counts["direct_cache_hit"], counts["cache_miss"]) == ("1", "1")


def test_the_time_left_follows_the_last_compiles() -> None:
    pace = Pace(0.0, at_once=2)
    assert pace.left_text(100, 5.0) == "-:--:--"
    for place in range(50):
        pace.ended(5.0 + place / 100, compiled=False)  # the cache had them
    assert pace.left_text(50, 6.0) == "-:--:--"
    for minute in range(1, 11):
        for _ in range(2):  # two compilers, a minute each
            pace.ended(5.49 + 60 * minute, compiled=True)
    assert pace.left(30, 605.49) == pytest.approx(30 * 30)
    estimates = [pace.left(30, 605.49 + second) for second in range(59)]
    assert estimates == pytest.approx([900 - second for second in range(59)]), "a clock that counts down"
    overdue = [pace.left(2, 605.49 + second) or 0.0 for second in (0, 60, 600, 6000)]
    assert overdue[0] == pytest.approx(60)
    assert min(overdue) >= 0
    assert (pace.left(30, 6605.0) or 0.0) > 900, "a compile that never ends slows the pace"


@pytest.mark.parametrize("of", [1, 2, 7])
def test_shards_are_disjoint_and_together_everything(of: int) -> None:
    kernels = [make_kernel(hdim) for hdim in range(1, 40)]
    parts = [Shard.parse(f"{number}/{of}").part(kernels) for number in range(1, of + 1)]
    assert sorted(kernel.id for part in parts for kernel in part) == sorted(kernel.id for kernel in kernels)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/2/3", "a/b"])
def test_a_shard_that_does_not_exist_is_bad_usage(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        Shard.parse(text)


@pytest.mark.slow
def test_builders_of_all_shards_compile_each_kernel_once(command: list[str], tmp_path: Path) -> None:
    shards = [
        subprocess.Popen(
            [*command, "--limit", "2", "--shard", f"{number}/2", "--format", "json"], stdout=subprocess.PIPE, text=True
        )
        for number in (1, 2)
    ]
    rows = [row for shard in shards for row in json.loads(shard.communicate(timeout=300)[0])]
    assert [row["status"] for row in rows] == ["compiled"] * 2
    assert len({row["id"] for row in rows}) == len(Cache(tmp_path / "cache").keys()) == 2
