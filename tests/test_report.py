"""Reports: the numbers behind the plots, and the page as a browser shows it."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import command
import pytest
from browser import browser
from conftest import copy_of

from catalog.ops.attention.problem import Problem
from catalog.ops.attention.shape_names import name_of
from catalog.registry.timings import Timing, record
from catalog.registry.transactions import transaction
from catalog.report.collect import collect
from catalog.report.data import Report
from catalog.report.page import render, write_report
from catalog.report.traced import read_traced
from catalog.rules.restriction import Restriction
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.measure import summarise
from catalog.runtime.peaks import Peaks

GPU = DeviceInfo("gfx950", "<b>MI355X</b> & friends", 256)
OLDER = DeviceInfo("gfx950", "MI350X", 128)
SECTIONS = ("roofline", "lengths", "tiles", "selection", "compile", "coverage")


def problem(**changes: Any) -> Problem:
    return Problem(**({"batch": 8, "nhead_q": 32, "seqlen_q": 2048, "hdim_q": 128, "dtype": "bf16"} | changes))


ON_GPU = [problem(seqlen_q=length) for length in (512, 1024, 4096)] + [problem(mask="causal")]
APPENDING = problem(op="appendkv", seqlen_q=1, seqlen_k=4096, seqlen_new=1)
ON_HOST = [problem(batch=1, nhead_q=2, seqlen_q=length, dtype="fp32") for length in (64, 256)]


def medians_of(catalog: Catalog, asked: Problem, arch: str) -> dict[str, float]:
    """Made-up medians in ms of up to four kernels of the static order: the first is slow, the third the fastest."""
    found = catalog.candidates(asked, arch=arch, limit=4, static=True)
    least = asked.flops / 1e9 / (800 if arch == "gfx950" else 0.05) or 0.01  # appending does no FLOP
    return {one.kernel.id: least * factor for one, factor in zip(found, (2.0, 1.5, 1.0, 1.25), strict=False)}


def record_timings(
    catalog: Catalog, asked: Problem, device: DeviceInfo, medians: Mapping[str, float], *, cold: bool = False
) -> None:
    """As a tuning would, with a library of each kernel that took as many seconds to compile as its id starts with."""
    with transaction(catalog.connection):
        catalog.connection.executemany(
            "INSERT OR IGNORE INTO artifact (key, kernel_id, arch, toolchain, flags, status, log, compile_s, created) "
            "VALUES (?1, ?1, ?2, '', '', 'built', '', ?3, '')",
            [(kernel_id, device.arch, 1 + int(kernel_id[0], 16)) for kernel_id in medians],
        )
        timings = [Timing(id, id, summarise([round(ms * 1e6)] * 9, cold=cold)) for id, ms in medians.items()]
        record(catalog.connection, asked, device, timings)


@pytest.fixture(scope="module")
def filled(gfx950: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """A catalog with timings of two GPUs and of this machine's CPU, a failed build and a miss."""
    catalog = copy_of(gfx950, tmp_path_factory.mktemp("report") / "catalog.db")
    catalog.populate("host", restriction=Restriction(where="hdim_q = 128 AND dtype = 'fp32'"))
    for asked in (*ON_GPU, APPENDING):
        record_timings(catalog, asked, GPU, medians_of(catalog, asked, "gfx950"))
    record_timings(catalog, ON_GPU[0], OLDER, medians_of(catalog, ON_GPU[0], "gfx950"))
    cold = {kernel_id: ms / 9 for kernel_id, ms in medians_of(catalog, ON_GPU[0], "gfx950").items()}
    record_timings(catalog, ON_GPU[0], GPU, cold, cold=True)
    for asked in ON_HOST:
        record_timings(catalog, asked, catalog.device_info("host"), medians_of(catalog, asked, "host"))
    catalog.connection.execute(
        "INSERT INTO artifact (key, kernel_id, arch, toolchain, flags, status, log, compile_s, created) "
        "SELECT 'bad', id, arch, '', '', 'failed', 'error', 1, '' FROM attention_row WHERE arch = 'gfx950' LIMIT 1"
    )
    for _ in range(2):
        catalog.select(problem(seqlen_q=3), arch="gfx950")
        catalog.forget()
    return catalog


@pytest.fixture(scope="module")
def report(filled: Catalog) -> Report:
    return collect(filled, None, {})


@pytest.fixture(scope="module")
def page(filled: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(filled, tmp_path_factory.mktemp("page") / "new" / "folder")


@pytest.mark.slow
def test_a_roofline_has_the_fastest_kernel_of_each_problem(filled: Catalog, report: Report) -> None:
    gpu = next(roof for roof in report.rooflines if roof.device.name == GPU.name)
    assert {point.problem for point in gpu.points} == {name_of(asked) for asked in ON_GPU}
    for asked in ON_GPU:
        (point,) = (point for point in gpu.points if point.problem == name_of(asked))
        fastest = list(medians_of(filled, asked, "gfx950"))[2]
        name = filled.connection.execute("SELECT name FROM attention_row WHERE id = ?", (fastest,)).fetchone()[0]
        assert point.kernel == name
        assert point.tflops == pytest.approx(800, rel=1e-3)
        assert point.intensity == pytest.approx(asked.flops / asked.traffic)
    assert not gpu.peaks
    assert gpu.tflops == pytest.approx(800, rel=1e-3)
    rates = (one.traffic / min(medians_of(filled, one, "gfx950").values()) / 1e6 for one in (*ON_GPU, APPENDING))
    assert gpu.gbps == pytest.approx(max(rates), rel=1e-3), "the fastest traffic of all"
    (peaked,) = collect(filled, "gfx950", {gpu.device.id: Peaks(2_000_000.0, 8000.0)}).rooflines[:1]
    assert (peaked.peaks, peaked.tflops, peaked.gbps) == (True, 2000.0, 8000.0)


def test_lengths_compare_problems_that_differ_in_length_only(report: Report) -> None:
    on_gpu = [group for group in report.lengths if group.device.name == GPU.name]
    assert [group.problems for group in on_gpu] == ["b8-h32-s*-d128-bf16"], "the causal one has a single length"
    best, *_ = on_gpu[0].lines.values()
    assert all(speed.tflops == pytest.approx(800, rel=1e-3) for _, speed in best)
    lengths = {length for line in on_gpu[0].lines.values() for length, _ in line}
    assert lengths == {512, 1024, 4096}
    assert on_gpu[0].size == 12
    host = [group.problems for group in report.lengths if group.device.arch.startswith(("x86", "aarch"))]
    assert host == ["b1-h2-s*-d128-fp32"]


def test_tiles_are_compared_within_each_problem(filled: Catalog, report: Report) -> None:
    for kind, problems in (("fwd bf16 batch d128", ON_GPU[:3]), ("fwd bf16 batch d128 mask=causal", ON_GPU[3:])):
        relative: dict[tuple[int, int], list[float]] = {}
        for asked in problems:
            medians = medians_of(filled, asked, "gfx950")
            by_tile: dict[tuple[int, int], list[float]] = {}
            for kernel_id, ms in medians.items():
                tile = tuple(
                    filled.connection.execute(
                        "SELECT tile_m0, tile_n0 FROM attention_row WHERE id = ?", (kernel_id,)
                    ).fetchone()
                )
                by_tile.setdefault(tile, []).append(ms)
            for tile, all_ms in by_tile.items():
                relative.setdefault(tile, []).append(min(medians.values()) / min(all_ms))
        (shown,) = (one for one in report.tiles if one.kind == kind and one.device.name == GPU.name)
        assert {(t.m0, t.n0): (t.relative, t.problems) for t in shown.tiles} == {
            tile: (pytest.approx(mean(parts), rel=1e-4), len(parts)) for tile, parts in relative.items()
        }


def test_selection_is_held_against_the_best_and_the_static_order(filled: Catalog, report: Report) -> None:
    before = filled.misses("gfx950")
    (gpu,) = (one for one in report.selections if one.device.arch == "gfx950")
    assert gpu.device.name == GPU.name, "selection uses the most measured device"
    assert {one.problem for one in gpu.problems} == {name_of(asked) for asked in ON_GPU}
    for one in gpu.problems:
        assert one.evidence == "measured"
        assert one.tflops == one.best == pytest.approx(800, rel=1e-3)
        assert one.static == pytest.approx(400, rel=1e-3)
        assert one.kernel == one.best_kernel
    assert filled.misses("gfx950") == before, "looking is not asking"


@pytest.mark.slow
def test_a_kernel_that_cannot_be_had_is_not_selected(filled: Catalog, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "copy.db") as target:
        filled.connection.backup(target)
    target.close()
    copy = Catalog(tmp_path / "copy.db")
    best = list(medians_of(copy, ON_GPU[0], "gfx950"))[2]
    copy.connection.execute("UPDATE kernel SET hw_valid = 0 WHERE id = ?", (best,))
    (selection,) = collect(copy, "gfx950", {}).selections
    (shown,) = (one for one in selection.problems if one.problem == name_of(ON_GPU[0]))
    assert shown.best == pytest.approx(800, rel=1e-3)
    assert shown.tflops == pytest.approx(640, rel=1e-3), "the next best, a quarter slower"
    copy.close()


def test_compile_times_are_those_of_the_libraries(report: Report) -> None:
    (gpu,) = (one for one in report.compiles if one.device.name == GPU.name)
    assert gpu.libraries
    assert {one.family for one in gpu.libraries} == {"fwd"}
    assert {one.compile_s for one in gpu.libraries} <= set(range(1, 17))
    assert max(one.speed.tflops for one in gpu.libraries) == pytest.approx(800, rel=1e-3)


def test_coverage_and_the_summary_count_rows(filled: Catalog, report: Report) -> None:
    one_by_one = {
        row["id"]: row["receipts"].split()
        for row in filled.connection.execute("SELECT id, receipts FROM kernels WHERE arch = 'gfx950' AND built")
    }
    shown = {one.receipt: one for one in report.coverage if one.lineage.arch == "gfx950"}
    assert (shown[0].kernels, shown[None].kernels) == (34_889, 43_055)
    assert "CK's default build" in shown[0].label
    for receipt in (0, 3, 700):
        listed = sum(str(receipt) in receipts for receipts in one_by_one.values())
        assert (shown[receipt].built, shown[receipt].timed) == (listed, listed)
    gpu = next(device for device in report.devices if device.name == GPU.name)
    appended = len(medians_of(filled, APPENDING, "gfx950"))
    assert (gpu.problems, gpu.timings, gpu.cold) == (len(ON_GPU) + 1, 4 * len(ON_GPU) + 4 + appended, 4)
    assert (gpu.cores, report.problems) == (256, len(ON_GPU) + 1 + len(ON_HOST))
    assert report.artifacts["failed"] == 1
    assert [(miss.problem, miss.count) for miss in report.misses] == [(name_of(problem(seqlen_q=3)), 2)]
    only = collect(filled, "gfx950", {})
    assert {device.arch for device in only.devices} == {one.lineage.arch for one in only.lineages} == {"gfx950"}


def test_the_page_needs_nothing_and_shows_every_figure(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    assert len(text) < 1_000_000
    assert "<script" not in text
    assert "<b>MI355X" not in text, "text of the catalog is no markup"
    assert [path.name for path in page.parent.iterdir()] == ["index.html"]
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    boxes = (
        "[...document.querySelectorAll('figure svg')].map(e => e.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    with browser(tmp_path) as tab:
        paper = {}
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 390)):
            tab.open(page, width=width, scheme=scheme)
            assert tab.complaints() == []
            assert set(tab.requests()) <= {page.as_uri(), "data:,"}
            figures = tab.evaluate(boxes)
            assert len(figures) >= 12
            assert all(wide > 300 and high > 60 for wide, high in figures), figures
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            paper[scheme] = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            ink = "getComputedStyle(document.querySelector('svg text')).fill"
            assert tab.evaluate(ink) != paper[scheme]
        assert paper["light"] != paper["dark"]
        for section in SECTIONS:
            shown = f"document.querySelectorAll('#{section} figure')"
            count = tab.evaluate(f"{shown}.length")
            assert count
            assert (
                tab.evaluate(f"[...{shown}].filter(f => f.querySelector('figcaption') && f.querySelector('td')).length")
                == count
            )
        tips = tab.evaluate("[...document.querySelectorAll('#roofline svg title')].map(e => e.textContent)")
        assert any(name_of(ON_GPU[0]) in tip and "800 TFLOP/s" in tip for tip in tips)
        tab.call("Emulation.setEmulatedMedia", media="print")
        assert tab.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
        tab.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.slow
def test_many_points_are_thinned_evenly(filled: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    from catalog.report import page

    monkeypatch.setattr(page, "MOST_POINTS", 3)
    text = page.render(collect(filled, "gfx950", {}))
    assert "3 of 4 are shown, at even distances from the fastest to the slowest." in text
    shown, note = page._thinned(list(range(7)))
    assert (shown, note.split(" are")[0].strip()) == ([0, 3, 6], "3 of 7")


def test_an_empty_catalog_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    assert catalog.connection.in_transaction is False
    text = write_report(catalog, tmp_path / "empty").read_text()
    assert "<figure" not in text
    assert text.count("catalog tune --shapes smoke") >= len(SECTIONS) - 1
    assert "catalog populate --arch host" in text


@pytest.mark.slow
def test_the_command_writes_a_page_with_measured_peaks(filled: Catalog, tmp_path: Path) -> None:
    done = command.catalog("report", "--out", tmp_path / "out", "--arch", "host", "--peaks", db=filled.path)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "out" / "index.html")), done.stderr
    text = (tmp_path / "out" / "index.html").read_text()
    assert "measured peaks of this machine" in text
    assert "gfx950" not in text


@pytest.mark.slow
def test_the_kernel_time_of_a_traced_program_stands_apart(filled: Catalog, report: Report, tmp_path: Path) -> None:
    """Two calls of one process, half a second apart: the kernels ran four times, and were measured as graph only."""
    asked = ON_HOST[0]
    kernel_id, median_ms = next(iter(medians_of(filled, asked, "host").items()))
    [name] = filled.connection.execute("SELECT name FROM kernel WHERE id = ?", (kernel_id,)).fetchone()
    wanted = {"arch": "host", "revision": "native", "mask_impl": "generic", "device": "a CPU", "cores": 2}
    call = {"format": 1, "call": "run", "pid": 1, **wanted, "kernels": [name], "problem": json.loads(asked.key)}
    calls = [{"at": 1000.0, "ms": 2.0, "launches": 3}, {"at": 1000.5, "ms": 1.0, "launches": 1}]
    trace = tmp_path / "calls.jsonl"
    trace.write_text("".join(f"{json.dumps(call | one)}\n" for one in calls))
    traced = read_traced(filled, trace)
    (line,) = traced.lines
    assert traced.elapsed_ms == pytest.approx(506)
    assert (line.used.total_ms, line.eager_ms) == (7.0, None)
    assert line.kernel_ms == traced.kernel_ms == pytest.approx(4 * median_ms)
    assert f"In kernels alone: {4 * median_ms:,.1f} ms" in traced.about
    page = render(report, traced)
    assert "End to end, from the first call to the end of the last: 506.0 ms" in page
    shown = command.catalog("top", trace, "--by", "kernels", "--format", "json", db=filled.path)
    times = {"recorded_ms": 7.0, "kernel_ms": round(line.kernel_ms, 4)}
    assert json.loads(shown.stdout) == [{"share": 100.0, "kernels": name, "calls": 2, "launches": 4, **times}]
    assert "End to end" in shown.stderr


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        (["--out", "HERE/page", "--arch", "gfx942"], (2, "populate --arch gfx942")),
        (["--out", "HERE/page", "--arch", "gfx9"], (2, "no arch is called 'gfx9'; did you mean gfx950")),
        (["--out", "HERE/file/page", "--arch", "host"], (1, "cannot be written")),
        ([], (2, "--out")),
    ],
)
def test_what_goes_wrong_is_one_message(
    filled: Catalog, tmp_path: Path, words: list[str], outcome: tuple[int, str]
) -> None:
    (tmp_path / "file").touch()
    here = [word.replace("HERE", str(tmp_path)) for word in words]
    done = command.catalog("report", *here, db=filled.path)
    code, message = outcome
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing half-written"


def test_a_page_needs_an_extra(filled: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = command.catalog("report", "--out", tmp_path / "page", db=filled.path)
    assert done.returncode == 2
    assert "pip install '.[report]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "page").exists()


def test_no_catalog_is_made_to_report_on(tmp_path: Path) -> None:
    done = command.catalog("report", "--out", tmp_path / "page", db=tmp_path / "none.db")
    assert (done.returncode, "there is no catalog" in done.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_the_libraries_of_reports_are_imported_by_reports_alone() -> None:
    code = "import sys, catalog, catalog.cli.main; print({'matplotlib', 'jinja2', 'datasette'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
