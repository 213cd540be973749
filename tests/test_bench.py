"""``catalog bench``: the peaks are measured by a probe that is compiled here, the kernels by launching them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import command
import pytest

from catalog.backends import target_of
from catalog.build.builder import Builder
from catalog.build.cache import ArtifactRecord
from catalog.errors import BuildError, DeviceError, SelectionError
from catalog.ops.attention.problem import Problem
from catalog.runtime.bench import COLUMNS, bench_problem
from catalog.runtime.bench_shapes import BenchOptions
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host.device import resolve_host_arch
from catalog.runtime.measure import StopRule
from catalog.runtime.peaks import PEAK_PROBE, measure_peaks

PROBLEM = Problem(batch=1, nhead_q=2, seqlen_q=64, hdim_q=64, dtype="fp32")
OPTIONS = ["--batch", "1", "--nhead-q", "2", "--seqlen-q", "64", "--hdim-q", "64", "--dtype", "fp32"]


FOREIGN = "x86_64_v3" if resolve_host_arch() == "aarch64" else "aarch64"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def catalog(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return Catalog(shutil.copy(host_file, tmp_path_factory.mktemp("bench") / "catalog.db"), num_threads=1)


@pytest.mark.slow
def test_peaks_are_plausible_for_any_cpu(cache: Path) -> None:
    one, two = (measure_peaks(Builder(cache, targets=target_of), resolve_host_arch(), threads) for threads in (1, 2))
    assert 1 < one.gflops < 2000
    assert 0.1 < one.gb_per_s < 2000
    assert two.gflops > one.gflops / 2


@pytest.mark.slow
def test_the_probe_is_compiled_once_and_not_recorded(cache: Path) -> None:
    records: list[ArtifactRecord] = []
    builder = Builder(cache, records.append, targets=target_of)
    path = builder.build_helper("peak probe", resolve_host_arch(), PEAK_PROBE).path
    built = path.stat().st_mtime_ns
    assert Builder(cache, targets=target_of).build_helper("peak probe", resolve_host_arch(), PEAK_PROBE).path == path
    assert path.stat().st_mtime_ns == built
    assert records == []


def test_a_helper_that_does_not_compile_is_named(cache: Path) -> None:
    with pytest.raises(BuildError, match=r"^peak probe for \w+ does not compile with .*wrong"):
        Builder(cache, targets=target_of).build_helper("peak probe", resolve_host_arch(), "#error wrong\n")


@pytest.mark.parametrize(("arch", "message"), [("gfx950", "gfx950 is not a CPU"), (FOREIGN, "needs a CPU")])
def test_peaks_of_a_device_that_is_not_here(arch: str, message: str, cache: Path) -> None:
    with pytest.raises(DeviceError, match=message):
        measure_peaks(Builder(cache, targets=target_of), arch, 1)


@pytest.mark.slow
def test_figures_of_a_benchmark_agree(catalog: Catalog) -> None:
    report = bench_problem(catalog, PROBLEM, BenchOptions(candidates=2, rule=StopRule(least=3)))
    best = catalog.candidates(PROBLEM, limit=2)
    assert [benchmark.kernels for benchmark in report.benchmarks] == [(found.kernel.name,) for found in best]
    assert (report.device.arch, report.device.cores) == (resolve_host_arch(), 1)
    for benchmark in report.benchmarks:
        assert benchmark.runs >= 3
        assert 0 < benchmark.min_ms <= benchmark.p10_ms <= benchmark.median_ms <= benchmark.p90_ms
        assert benchmark.gflops * benchmark.median_ms * 1e6 == pytest.approx(PROBLEM.flops)
        assert benchmark.gb_per_s * benchmark.median_ms * 1e6 == pytest.approx(PROBLEM.traffic)
        assert benchmark.percent_of_peak * report.peaks.gflops == pytest.approx(100 * benchmark.gflops)
        assert benchmark.percent_of_bandwidth * report.peaks.gb_per_s == pytest.approx(100 * benchmark.gb_per_s)


@pytest.mark.slow
def test_all_stages_are_timed(catalog: Catalog) -> None:
    problem = Problem(op="splitkv", batch=1, nhead_q=1, seqlen_q=1, seqlen_k=256, hdim_q=64, dtype="fp32")
    [benchmark] = bench_problem(catalog, problem, BenchOptions(rule=StopRule(least=1, cold=True))).benchmarks
    assert benchmark.kernels == tuple(kernel.name for kernel in catalog.select(problem).kernels)
    assert len(benchmark.kernels) == 2


def test_a_problem_without_a_kernel(catalog: Catalog) -> None:
    with pytest.raises(SelectionError):
        bench_problem(catalog, Problem(batch=1, nhead_q=1, seqlen_q=8, hdim_q=999))


@pytest.mark.slow
def test_the_command_prints_rows_and_says_what_the_peaks_are_of(catalog: Catalog) -> None:
    done = command.catalog(
        "bench", *OPTIONS, "--candidates", "2", "--runs", "2", "--threads", "1", "--format", "json", db=catalog.path
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [tuple(row) for row in rows] == [COLUMNS] * 2
    assert all(row["gflops"] > 0 and row["kernels"].endswith(resolve_host_arch()) for row in rows)
    assert f"Measured peaks of {resolve_host_arch()}, 1 thread of " in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            [*OPTIONS, "--arch", FOREIGN],
            1,
            f"Error: {FOREIGN} kernels cannot run on this machine: {FOREIGN} needs a CPU",
        ),
        ([*OPTIONS, "--format", "xml"], 2, "table, json, jsonl or csv"),
        (["--batch", "1"], 2, "nhead_q"),
        ([*OPTIONS, "--runs", "0"], 2, "--runs"),
    ],
)
def test_mistakes_get_one_message_and_an_exit_code(catalog: Catalog, words: list[str], code: int, message: str) -> None:
    done = command.catalog("bench", *words, db=catalog.path)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
