"""Guarded first runs: libraries that really crash, hang or are killed, and what becomes of them."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import command
import pytest
from conftest import count_processes, fill, slow_but

from catalog.build import targets
from catalog.build.describe import describe
from catalog.errors import DeviceError, ProblemError, QuarantinedError, SelectionError
from catalog.ops.attention.kernels.host import emit as host
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.answers import reference
from catalog.ops.attention.tolerance import tolerances
from catalog.runtime.catalog import Catalog
from catalog.runtime.guard import GPU_LIMITS, HOST_LIMITS, Limits, guarded_problem
from catalog.runtime.inputs import make_inputs
from catalog.schema.kernel import Kernel
from catalog.settings import settings

PROBLEM = Problem(batch=1, nhead_q=2, seqlen_q=33, hdim_q=32, dtype="fp32")

STAND_IN = """\
#include "abi/catalog_abi.h"
#include <csignal>
#include <cstdlib>
#include <unistd.h>
#define EXPORT extern "C" __attribute__((visibility("default")))
volatile unsigned count;
int* volatile nowhere;
EXPORT const char* catalog_describe() {{ return {description}; }}
EXPORT int32_t catalog_workspace_size(const catalog_args* args, catalog_workspace* size) {{
    *size = {{args->num_splits}};
    return 0;
}}
EXPORT int32_t catalog_launch(const catalog_args* args, void*) {{
    if (args->batch < 0) return 2;  // asked for its ABI
    {flaw}
    return 0;
}}
{beside}
"""
FLAWS = {
    "segfault": ("*nowhere = 1;", "", "died of SIGSEGV"),
    "abort": ("std::abort();", "", "died of SIGABRT"),
    "loop": ("for (;;) ++count;", "", "did not end within 3 s"),
    "deadlock": ("for (;;) pause();", "", "did not end within 3 s"),
    "crash when loaded": ("", "const bool loaded = (std::abort(), true);", "died of SIGABRT"),
}
HARMLESS = {"refusal": ("return 2;", "", "")}
UNKNOWN = {
    "SIGKILL": ("std::raise(SIGKILL);", "", "died of SIGKILL"),
    "SIGTERM": ("std::raise(SIGTERM);", "", "died of SIGTERM"),
    "exit": ("std::exit(0);", "", "ended with exit status 0"),
    "starved": ("std::raise(SIGSTOP);", "", "of CPU time in"),
}
"""What may have come from outside, and does while the variable OUTSIDE is set."""


@pytest.fixture(scope="module")
def cache(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all, which has the sound kernels that most of them run."""
    folder = tmp_path_factory.mktemp("guard")
    return fill(folder / "cache", best_two(Catalog(shutil.copy(host_file, folder / "catalog.db"))))


@pytest.fixture(autouse=True)
def _guarded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATALOG_GUARD", "first_run")
    monkeypatch.setenv("CATALOG_GUARD_TIMEOUT", "30")
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(cache))
    monkeypatch.setattr("catalog.runtime.plan._reported", set())
    monkeypatch.setattr("catalog.build.first_runs._unwritten", {})
    settings.cache_clear()


@pytest.fixture
def new(host_file: Path, tmp_path: Path) -> Catalog:
    """A catalog that knows of no build."""
    return Catalog(shutil.copy(host_file, tmp_path / "new.db"))


@pytest.fixture
def catalog(host_file: Path, tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(shutil.copy(host_file, tmp_path / "catalog.db"))
    yield catalog
    catalog.close()


@pytest.fixture
def flaw(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give rows a source that does something terrible."""

    def install(kernels: list[Kernel], name: str = "segfault", version: str = "") -> None:
        body, beside, _ = (FLAWS | HARMLESS | UNKNOWN)[name]
        if name in UNKNOWN:
            body = f'if (std::getenv("OUTSIDE")) {body}'

        def emit(kernel: Kernel, _memory: Path) -> str:
            if kernel not in kernels:
                return host.emit(kernel)
            source = STAND_IN.format(description=json.dumps(describe(kernel)), flaw=body, beside=beside)
            return f"{source}// {version}\n"

        monkeypatch.setattr(targets, "HOST", replace(targets.HOST, emit=emit))

    return install


def best_two(catalog: Catalog, problem: Problem = PROBLEM) -> list[Kernel]:
    return [candidate.kernel for candidate in catalog.candidates(problem, limit=2)]


def assert_right(catalog: Catalog, expected: list[Kernel], problem: Problem = PROBLEM) -> None:
    """The plan for the problem ends up with these kernels, and its result is right."""
    inputs = make_inputs(problem)
    result = catalog.select(problem).run(inputs)
    assert result.kernels == tuple(kernel.name for kernel in expected)
    assert tolerances(problem, inputs)["o"].allows(result.outputs["o"], reference(problem, inputs)["o"])


@pytest.mark.parametrize("name", slow_but(["segfault"], FLAWS))
def test_a_kernel_that_does_not_come_back_gives_way_to_the_next(  # noqa: PLR0917 - fixtures
    name: str,
    catalog: Catalog,
    new: Catalog,
    flaw: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    best, second = best_two(catalog)
    flaw([best], name)
    if "within 3 s" in FLAWS[name][2]:
        monkeypatch.setenv("CATALOG_GUARD_TIMEOUT", "3")
        settings.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert_right(catalog, [second])
    assert caplog.text.count(f"{best.name} {FLAWS[name][2]}") == 1
    assert f"using {second.name} instead" in caplog.text

    [(status, log)] = catalog.connection.execute("SELECT status, log FROM artifact WHERE kernel_id = ?", [best.id])
    assert status == "quarantined"
    assert FLAWS[name][2] in log
    [quarantine] = [one for one in catalog.build_log.quarantined() if one.log == log]
    assert (quarantine.kernel, quarantine.problem) == (best.name, PROBLEM.key)
    step = next(step for step in catalog.narrowing(PROBLEM)[0] if step.id == "not_quarantined")
    assert step.rejects == 1
    assert "catalog cache unquarantine" in step.reason

    # A new process of the same catalog passes it over when it selects, one with a new catalog when it loads.
    processes = count_processes(monkeypatch, new.path.parent)
    assert Catalog(catalog.path).select(PROBLEM).kernels == (second,)
    assert_right(new, [second])
    assert processes() == 0, "both kernels have run before"

    with pytest.raises(QuarantinedError, match=FLAWS[name][2]):
        catalog.plan(PROBLEM, best).run()

    catalog.build_log.release(best.id)
    assert Catalog(catalog.path).select(PROBLEM).kernels == (best,)


def test_a_kernel_that_refuses_the_call_is_not_quarantined(catalog: Catalog, flaw: Callable[..., None]) -> None:
    best, _ = best_two(catalog)
    flaw([best], "refusal")
    for _ in range(2):
        with pytest.raises(DeviceError, match="was not built for this call") as caught:
            catalog.select(PROBLEM).run()
        assert not isinstance(caught.value, QuarantinedError)
    assert [row.name for row in catalog.kernels("built")] == [best.name]


@pytest.mark.parametrize("name", slow_but(["SIGKILL"], UNKNOWN))
def test_what_may_have_come_from_outside_blames_no_kernel(
    name: str,
    catalog: Catalog,
    flaw: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    best, _ = best_two(catalog)
    flaw([best], name)
    monkeypatch.setenv("CATALOG_GUARD_TIMEOUT", "0.2" if name == "starved" else "30")
    monkeypatch.setenv("OUTSIDE", "")
    settings.cache_clear()
    for _ in range(2):
        with pytest.raises(DeviceError, match=f"proves nothing: it .*{UNKNOWN[name][2]}") as caught:
            catalog.select(PROBLEM).run()
        assert not isinstance(caught.value, QuarantinedError)
    assert caplog.text.count(UNKNOWN[name][2]) == 2
    assert best.id not in {one.kernel_id for one in catalog.build_log.quarantined()}

    monkeypatch.delenv("OUTSIDE")
    assert catalog.select(PROBLEM).run().kernels == (best.name,)


@pytest.mark.slow
def test_a_first_run_without_memory_blames_no_kernel(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its process may have 100 MiB more than what it imports takes, half of what the problem's tensors do."""
    problem = Problem(batch=1, nhead_q=4, seqlen_q=1, seqlen_k=100_000, hdim_q=64, dtype="fp32", lse=True)
    assert guarded_problem(problem) == problem
    taken = subprocess.run(
        [sys.executable, "-c", "import catalog.runtime.guard_child; print(open('/proc/self/status').read())"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    kib = int(taken.partition("VmPeak:")[2].split()[0])
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nulimit -v {kib + 100 * 1024}\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    before = catalog.build_log.quarantined()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        with pytest.raises(DeviceError, match="proves nothing: it ran out of memory"):
            catalog.select(problem).run()
    assert catalog.build_log.quarantined() == before
    catalog.select(problem).run()


SIZES = {"batch": 1, "seqlen_q": 4, "seqlen_k": 64, "nhead_q": 1, "hdim_q": 64, "dtype": "fp32"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"op": "splitkv", "num_splits": 2**31 - 1}, r"num_splits=2147483647: o_acc, .* takes 2,199,023,254,528 bytes"),
        ({"op": "pagedkv", "page_size": 16, "num_pages": 2**31 - 1}, r"num_pages=2147483647, page_size=16: k_cache, "),
        ({"op": "pagedkv", "page_size": 2**31 - 1}, r"num_pages=1, page_size=2147483647: k_cache, float32 \(1, 2147"),
        (
            {"op": "bwd", "deterministic": True, "seqlen_q": 2**20, "seqlen_k": 2**20, "nhead_q": 2**10},
            r"num_splits=8: dq_acc, the partial results of bwd_dq_dk_dv, takes 2,199,023,255,552 bytes",
        ),
        ({"op": "fwd", "seqlen_q": 2**31 - 1}, r"o, float32 \(1, 1, 2147483647, 64\), takes 549,755,813,632 bytes"),
    ],
)
def test_what_cannot_fit_into_memory_is_refused_before_anything_starts(
    fields: dict, message: str, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problem = Problem(**SIZES | fields)
    processes = count_processes(monkeypatch, tmp_path)
    with pytest.raises(ProblemError, match=rf"{message}.* bytes of memory"):
        catalog.select(problem)
    with pytest.raises(ProblemError, match="bytes of memory"):
        make_inputs(problem)
    assert processes() == 0


@pytest.mark.slow
def test_a_limit_of_the_process_counts_as_its_memory(new: Catalog) -> None:
    script = (
        "import resource, sys\nfrom catalog import Catalog, Problem\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))\n"
        "Catalog(sys.argv[1]).select(Problem(batch=1, nhead_q=64, seqlen_q=2**20, hdim_q=64, dtype='fp32'))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(new.path)], check=False, capture_output=True, text=True)
    assert "ProblemError: o, float32" in done.stderr
    assert "this process may use 4,294,967,296 bytes of memory" in done.stderr


@pytest.mark.slow
def test_a_quarantine_ends_by_itself(
    catalog: Catalog, flaw: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    best, second = best_two(catalog)
    flaw([best], version="for some time")
    assert_right(catalog, [second])
    [quarantine] = [one for one in catalog.build_log.quarantined() if one.reason == "died of SIGSEGV"][-1:]
    begin, end = (datetime.fromisoformat(when) for when in (quarantine.when, quarantine.until))
    assert end - begin == timedelta(days=30)

    monkeypatch.setenv("CATALOG_QUARANTINE_DAYS", "1e-9")
    settings.cache_clear()
    again = Catalog(catalog.path)
    assert again.build_log.quarantined() == []
    assert again.select(PROBLEM).kernels == (best,)
    assert next(step for step in again.narrowing(PROBLEM)[0] if step.id == "not_quarantined").rejects == 0
    processes = count_processes(monkeypatch, tmp_path)
    assert_right(again, [second])
    assert processes() == 1, "another guarded first run, which crashed too"


@pytest.mark.slow
def test_of_several_stages_only_the_one_at_fault_is_replaced(catalog: Catalog, flaw: Callable[..., None]) -> None:
    problem = Problem(op="splitkv", batch=1, nhead_q=2, seqlen_q=1, seqlen_k=600, hdim_q=32, dtype="fp32")
    best, second = best_two(catalog, problem)
    combine = catalog.select(problem).kernels[1]
    flaw([best])
    assert_right(catalog, [second, combine], problem)
    [(status,)] = catalog.connection.execute("SELECT status FROM artifact WHERE kernel_id = ?", [combine.id])
    assert status == "built"


@pytest.mark.slow
def test_when_no_kernel_is_left_the_error_says_what_happened_and_how_to_go_on(
    catalog: Catalog, flaw: Callable[..., None]
) -> None:
    append = {"op": "appendkv", "seqlen_q": 1, "seqlen_k": 64, "seqlen_new": 1}
    problem = Problem(batch=1, nhead_q=2, hdim_q=32, dtype="fp32", **append)
    kernels = [candidate.kernel for candidate in catalog.candidates(problem, limit=1000)]
    flaw(kernels, "abort")
    with pytest.raises(QuarantinedError) as caught:
        catalog.select(problem).run()
    assert isinstance(caught.value, DeviceError)
    for words in (kernels[-1].name, "died of SIGABRT", f"catalog cache unquarantine {kernels[-1].id}"):
        assert words in str(caught.value)
    with pytest.raises(SelectionError, match=r"not_quarantined rejects .* catalog cache unquarantine"):
        Catalog(catalog.path).select(problem)
    catalog.build_log.release(None)


@pytest.mark.slow
def test_another_content_key_is_another_chance(catalog: Catalog, flaw: Callable[..., None]) -> None:
    best, second = best_two(catalog)
    flaw([best], "abort", version="one")
    assert_right(catalog, [second])
    again = Catalog(catalog.path)
    flaw([best], "abort", version="two")
    assert again.select(PROBLEM).kernels == (best,)
    assert_right(again, [second])

    # Building it is no chance: the library is what it was.
    again.build(best)
    assert again.select(PROBLEM).kernels == (second,)
    flaw([])
    assert_right(Catalog(catalog.path), [best])


def test_a_failed_build_is_reported_once(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best, second = best_two(catalog)
    with monkeypatch.context() as patch:
        refused = replace(targets.HOST, emit=lambda row, _: "#error no" if row == best else host.emit(row))
        patch.setattr(targets, "HOST", refused)
        with caplog.at_level(logging.WARNING):
            for problem in (PROBLEM, PROBLEM.model_copy(update={"batch": 2})):
                assert_right(catalog, [second], problem)
        assert caplog.text.count("does not compile") == 1


def test_a_sound_library_is_guarded_once(
    catalog: Catalog, new: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    best, _ = best_two(catalog)
    for file in (settings().cache_dir / "guard").glob("*"):
        file.unlink()
    processes = count_processes(monkeypatch, tmp_path)
    for path in (catalog.path, catalog.path, new.path):
        assert_right(Catalog(path), [best])
    assert processes() == 1

    monkeypatch.setenv("CATALOG_GUARD", "never")
    settings.cache_clear()
    for file in (settings().cache_dir / "guard").glob("*"):
        file.unlink()
    assert_right(Catalog(catalog.path), [best])
    assert processes() == 1


@pytest.mark.parametrize("flawed", slow_but([False], [False, True]))
def test_nothing_needs_to_be_writable(
    flawed: bool, catalog: Catalog, flaw: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither the memory of first runs nor the catalog: then the process remembers."""
    best, second = best_two(catalog)
    if flawed:
        flaw([best], version="read-only")
    catalog.build(best), catalog.build(second)
    guard = settings().cache_dir / "guard"
    guard.mkdir(exist_ok=True)  # other tests may have made it before
    guard.rename(tmp_path / "away")
    guard.touch()  # a file: no folder can be made there
    catalog.connection.execute("PRAGMA query_only = ON")
    try:
        processes = count_processes(monkeypatch, tmp_path)
        for problem in (PROBLEM, PROBLEM.model_copy(update={"seqlen_q": 34}), PROBLEM):
            assert_right(catalog, [second if flawed else best], problem)
        assert processes() == 1 + flawed
        assert [one.kernel for one in catalog.build_log.quarantined()] == [best.name] * flawed
    finally:
        guard.unlink()
        (tmp_path / "away").rename(guard)


def test_a_guard_that_does_not_start_is_not_the_kernel_s_fault(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best, _ = best_two(catalog)
    for file in (settings().cache_dir / "guard").glob("*"):
        file.unlink()
    for executable in (str(tmp_path / "no python"), "/bin/false"):
        monkeypatch.setattr(sys, "executable", executable)
        with caplog.at_level(logging.WARNING):
            assert_right(Catalog(catalog.path), [best])
        assert "kernels run unguarded" in caplog.text
        caplog.clear()
    assert not list((settings().cache_dir / "guard").glob("*"))


BIG = 2**20


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"batch": 2, "seqlen_q": 128}, {"batch": 2, "nhead_q": 32, "seqlen_q": 128}),
        ({"batch": 4096, "seqlen_q": 64}, {"batch": 1, "nhead_q": 32, "seqlen_q": 64}),
        ({"batch": 1, "seqlen_q": 3000}, {"nhead_q": 4, "nhead_k": 1, "seqlen_q": 3000}),
        ({"batch": 1, "seqlen_q": BIG}, {"nhead_q": 4, "nhead_k": 1, "seqlen_q": 1024, "seqlen_k": 1024}),
        ({"batch": 1, "seqlen_q": BIG + 72}, {"seqlen_q": 1096}),
        ({"batch": 1, "seqlen_q": BIG, "op": "bwd", "nhead_k": 1, "hdim_q": 256}, {"seqlen_q": 1024, "nhead_k": 1}),
        ({"seqlens_q": [BIG, 7, 0]}, {"seqlens_q": (1024,), "seqlens_k": (1024,), "nhead_q": 4}),
        ({"batch": 1, "seqlen_q": 1, "seqlen_k": 64, "op": "pagedkv", "page_size": 16, "num_pages": BIG},
         {"num_pages": 4}),
        ({"batch": 1, "seqlen_q": 1, "seqlen_k": BIG + 5, "op": "splitkv", "page_size": 16}, {"seqlen_k": 1029}),
        ({"batch": 1, "seqlen_q": 999, "op": "splitkv", "num_splits": 9999}, {"seqlen_q": 999, "num_splits": 8}),
        ({"batch": 64, "seqlen_q": 1, "seqlen_k": BIG, "seqlen_new": 9, "op": "appendkv"}, {"seqlen_k": 1024}),
        ({"seqlens_q": [BIG], "seqlen_k": BIG, "op": "batch_prefill", "page_size": 16}, {"seqlen_k": 1024}),
        ({"batch": 64, "seqlen_q": 4096, "mask": "window", "window": (3000, 0), "lse": True}, {"window": (3000, 0)}),
    ],
)  # fmt: skip
def test_a_first_run_is_small_and_has_the_problems_traits(fields: dict, expected: dict) -> None:
    problem = Problem(**{"nhead_q": 32, "nhead_k": 8, "hdim_q": 128} | fields)
    small = guarded_problem(problem)
    assert {name: getattr(small, name) for name in expected} == expected
    assert_limited(problem, small, HOST_LIMITS)
    assert_limited(problem, guarded_problem(problem, GPU_LIMITS), GPU_LIMITS)


def assert_limited(problem: Problem, small: Problem, limits: Limits) -> None:
    assert small.bytes <= limits.bytes
    assert small.flops <= 4 * limits.flops
    sizes = {"batch", "nhead_q", "nhead_k", "seqlen_q", "seqlen_k", "seqlens_q", "seqlens_k", "num_pages", "seqlen_new"}
    sizes |= {"num_splits"}
    assert small.model_dump(exclude=sizes) == problem.model_dump(exclude=sizes)
    assert (small.ratio > 1, small.mode) == (problem.ratio > 1, problem.mode)


@pytest.mark.slow
def test_the_command_line_lists_and_releases(catalog: Catalog, flaw: Callable[..., None], tmp_path: Path) -> None:
    best, second = best_two(catalog)
    flaw([best], version="command line")
    assert_right(catalog, [second])

    def cli(*words: str) -> subprocess.CompletedProcess[str]:
        return command.catalog("cache", *words, db=catalog.path)

    listed = json.loads(cli("quarantined", "--format", "json").stdout)
    assert {"kernel": best.name, "reason": "died of SIGSEGV", "problem": PROBLEM.key}.items() <= listed[-1].items()
    assert cli("unquarantine").returncode == 2
    assert "no quarantined kernel" in cli("unquarantine", "unknown").stderr
    assert cli("unquarantine", best.name).stdout.startswith(f"released {best.name}")
    assert json.loads(cli("quarantined", "--format", "json").stdout) == []
    assert Catalog(catalog.path).select(PROBLEM).kernels == (best,)
