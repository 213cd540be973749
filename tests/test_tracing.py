"""Traces: which calls are recorded, what recording costs, and what a replay does."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import command
import numpy as np
import pytest

import catalog as package
from catalog.errors import DeviceError, UsageError
from catalog.ops.attention.problem import Problem
from catalog.runtime import tracing
from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.runtime.replay import ReplayOptions, replay
from catalog.runtime.tensors import make_outputs
from catalog.runtime.traces import read_trace
from catalog.settings import settings

SMALL = Problem(batch=1, nhead_q=2, seqlen_q=33, hdim_q=32, dtype="fp32")
BF16 = Problem(batch=1, nhead_q=2, seqlen_q=17, hdim_q=40, dtype="bf16", mask="causal", lse=True)
APPEND = Problem(op="appendkv", batch=2, nhead_q=2, seqlen_q=1, seqlen_k=40, seqlen_new=1, hdim_q=32, dtype="fp32")
PADDED = Problem(op="splitkv", batch=2, nhead_q=2, seqlen_q=1, seqlen_k=90, hdim_q=32, dtype="fp32")


@pytest.fixture(scope="module")
def catalog(host_file, tmp_path_factory):
    return Catalog(shutil.copy(host_file, tmp_path_factory.mktemp("tracing") / "catalog.db"))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "calls.jsonl"


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_runs_launches_and_what_is_enqueued_are_recorded(catalog, file):
    plan = catalog.select(SMALL)
    inputs = make_inputs(SMALL)
    bound = plan.bind(inputs)
    with package.trace(file):
        result = plan.run(inputs, repeats=3)
        bound.launch()
        bound.enqueue()
        plan.enqueue(inputs)
        plan.run(seed=7)
        bound.time(5)  # measures; it is no call for a result
    plan.run(inputs)
    recorded = lines(file)
    assert [line["call"] for line in recorded] == ["run", "launch", "enqueue", "enqueue", "run"]
    assert [line["launches"] for line in recorded] == [3, 1, 1, 1, 1]
    assert [line.get("seed") for line in recorded] == [None] * 4 + [7]
    assert recorded[0]["ms"] == pytest.approx(result.time_ms, abs=1e-6)
    for line in recorded:
        assert line["ms"] > 0
        assert line["kernels"] == list(result.kernels)
        assert Problem(**line["problem"]) == SMALL
        assert (line["arch"], line["pid"]) == (plan.arch, os.getpid())
        assert (line["measured_as"], line["cold"]) == ("graph", False), "the timings that selection used"
        assert line["at"] == pytest.approx(time.time(), abs=60)


def test_a_call_that_fails_is_recorded_with_its_error_and_inputs(catalog, file):
    lengths = np.array([90, 3], np.int32)
    bound = catalog.select(PADDED).bind(make_inputs(PADDED) | {"seqlens_k": lengths})
    lengths[1] = 91
    with package.trace(file, tensors=True), pytest.raises(DeviceError):
        bound.launch()
    (line,) = lines(file)
    assert line["error"].startswith("DeviceError: kernel ")
    with np.load(tracing.folder_of(file) / line["tensors"]) as kept:
        assert kept["seqlens_k"].tolist() == [90, 91]
    assert read_trace(file).used[0].failed == 1


@pytest.mark.parametrize("problem", [SMALL, BF16, APPEND, PADDED], ids=lambda problem: f"{problem.op}-{problem.dtype}")
def test_kept_inputs_are_those_before_the_call(catalog, file, problem):
    inputs = {name: array.copy() for name, array in make_inputs(problem, seed=5).items()}
    with package.trace(file, tensors=2):
        for _ in range(3):
            catalog.select(problem).run({name: array.copy() for name, array in inputs.items()})
    assert [("tensors" in line) for line in lines(file)] == [True, True, False]
    (used,) = read_trace(file).used
    for recording in used.recordings:
        kept = recording.load(problem)
        assert kept.keys() == inputs.keys()
        assert all(kept[name].dtype == inputs[name].dtype for name in kept)
        assert all(np.array_equal(kept[name], inputs[name]) for name in kept)


def test_limits_of_calls_and_bytes(catalog, file, caplog):
    plan, inputs = catalog.select(SMALL), make_inputs(SMALL)
    size = sum(array.nbytes for array in inputs.values())
    with package.trace(file, tensors=9, max_bytes=2 * size, max_calls=4):
        for _ in range(6):
            plan.run(inputs)
    recorded = lines(file)
    assert [line["call"] for line in recorded] == ["run"] * 4 + ["full"]
    assert sum("tensors" in line for line in recorded) == 2
    assert len(list(tracing.folder_of(file).iterdir())) == 2
    assert "they would exceed its limit" in caplog.text
    trace = read_trace(file)
    assert (trace.used[0].calls, trace.full) == (4, 1)
    assert "1 process made more calls" in trace.about


@pytest.mark.parametrize("limits", [{"tensors": -1}, {"max_bytes": -1}, {"max_calls": -1}])
def test_negative_limits_and_bad_places_are_refused(limits, file, tmp_path):
    with pytest.raises(UsageError, match="expected 0 or more"), package.trace(file, **limits):
        pass
    with pytest.raises(UsageError, match="the trace cannot be written: Is a directory"), package.trace(tmp_path):
        pass


def test_a_full_disk_ends_the_trace_and_not_the_call(catalog, caplog):
    plan = catalog.select(SMALL)
    with package.trace("/dev/full"):
        assert plan.run().time_ms > 0
        plan.run()
    assert caplog.text.count("calls are no longer recorded: No space left on device") == 1


def test_traces_nest_and_what_the_catalog_does_for_itself_is_left_out(catalog, file, tmp_path):
    plan = catalog.select(SMALL)
    with package.trace(file):
        with package.trace(tmp_path / "inner.jsonl"):
            plan.run()
        with tracing.paused():
            plan.run()
        replay(catalog, read_trace(file).used, ReplayOptions(verify=True))
    assert len(lines(file)) == len(lines(tmp_path / "inner.jsonl")) == 1
    assert tracing.active == ()


def test_the_settings_start_a_trace_and_end_it(catalog, file, tmp_path, monkeypatch):
    for path in (file, tmp_path / "other.jsonl", None):
        if path is None:
            monkeypatch.delenv("CATALOG_TRACE")
        else:
            monkeypatch.setenv("CATALOG_TRACE", str(path))
        settings.cache_clear()
        catalog.forget()
        catalog.select(SMALL).run()
    assert len(lines(file)) == len(lines(tmp_path / "other.jsonl")) == 1
    assert tracing.active == ()


def test_a_setting_that_cannot_be_followed_is_reported(catalog):
    run = ["run", "--batch", 1, "--nhead-q", 2, "--seqlen-q", 33, "--hdim-q", 32, "--dtype", "fp32"]
    done = command.catalog(*run, db=catalog.path, CATALOG_TRACE="/none/calls.jsonl")
    assert done.returncode == 2
    assert done.stderr == "Error: /none/calls.jsonl: the trace cannot be written: No such file or directory\n"


WRITER = """
import sys
from catalog import Catalog, Problem
problem = Problem(batch=1, nhead_q=2, seqlen_q=int(sys.argv[2]), hdim_q=32, dtype="fp32")
bound = Catalog(sys.argv[1], num_threads=1).select(problem).bind()
for call in range(int(sys.argv[3])):
    bound.launch()
    if call == 100:
        print("ready", flush=True)
"""


@pytest.mark.slow
def test_processes_share_a_file_and_killed_ones_leave_it_readable(catalog, file):
    catalog.select(SMALL).run()
    lengths, counts = (31, 32, 33), (1500, 1500, 10**9)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(catalog.path), str(length), str(count)],
            env={**os.environ, "CATALOG_TRACE": str(file), "CATALOG_TRACE_MAX_CALLS": str(10**9)},
            stdout=subprocess.PIPE,
        )
        for length, count in zip(lengths, counts, strict=True)
    ]
    for writer in writers:
        assert writer.stdout.readline() == b"ready\n"
    assert [writer.wait(60) for writer in writers[:2]] == [0, 0]
    writers[2].send_signal(signal.SIGKILL)
    writers[2].wait()
    trace = read_trace(file)
    calls = {used.problem.seqlen_q: used.calls for used in trace.used}
    assert (calls[31], calls[32]) == (1500, 1500)
    assert calls[33] > 100
    assert trace.torn <= 1


@pytest.fixture
def traced(catalog, file):
    """A trace of two problems with their inputs, a launch of a ms each; of the second there were twenty."""
    with package.trace(file, tensors=True):
        for problem, repeats in ((SMALL, 1), (BF16, 20)):
            catalog.select(problem).run(make_inputs(problem, seed=3), repeats=repeats)
    file.write_text("".join(json.dumps(line | {"ms": 1.0}, separators=(",", ":")) + "\n" for line in lines(file)))
    return file


def test_a_line_that_a_kill_cut_short_is_left_out(traced):
    first, second = traced.read_bytes().splitlines(keepends=True)
    for torn in (first + second[:-40], first[:100] + second, second + b'{"fo', first[:5] + second):
        traced.write_bytes(torn)
        trace = read_trace(traced)
        assert trace.torn == 1
        assert sum(used.calls for used in trace.used) == 1
    assert "1 cut short by a kill" in trace.about


def with_field(name, value):
    return lambda line: json.dumps(json.loads(line) | {name: value}).encode() + b"\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"", "the file contains no calls"),
        (lambda line: line + b"hello\n", "line 2: not JSON: Expecting value (column 1)"),
        (lambda line: b"\xff\xfe\n" + line, "line 1: not UTF-8"),
        (lambda line: line + b"[1]\n", "line 2: a list, expected an object"),
        (lambda line: line + b"[" * 100_000 + b"\n", "line 2: not JSON"),
        (lambda line: b"{}\n" + line, "line 1: format None: this version reads 1"),
        (with_field("format", 2), "line 1: format 2"),
        (with_field("ms", "fast"), "line 1: ms: expected a number"),
        (with_field("ms", 10**400), "line 1: ms: expected a number"),
        (with_field("at", 10**400), "line 1: at: expected a number"),
        (with_field("launches", 10**400), "line 1: launches: must be below"),
        (with_field("problem", {"batch": 10**400}), "line 1: problem: "),
        (lambda line: line[:-2] + b'"' + b" " * 2**21, "line 1: longer than 1,048,576 bytes"),
        (with_field("launches", 0), "line 1: launches: "),
        (with_field("call", "jump"), "line 1: call: "),
        (with_field("what", 1), "line 1: what: unknown field"),
        (with_field("tensors", "../../etc/passwd.npz"), "line 1: tensors: "),
        (with_field("tensors", "12-34.npz"), "calls.jsonl.tensors/12-34.npz are missing"),
        (with_field("problem", {"batch": 1}), "line 1: problem: a problem needs nhead_q"),
        (with_field("problem", {"bach": 1}), "line 1: problem: a problem has no field 'bach'; did you mean batch?"),
    ],
)
def test_bad_files_get_one_message_that_names_the_line(traced, change, message):
    traced.write_bytes(change(traced.read_bytes().splitlines(keepends=True)[0]))
    with pytest.raises(UsageError) as raised:
        read_trace(traced)
    assert message in str(raised.value)


@pytest.mark.parametrize("words", [["replay"], ["tune", "--trace"]])
@pytest.mark.parametrize(
    ("name", "message"), [("none", "cannot be read: No such file"), (".", "cannot be read: it is a folder")]
)
def test_files_that_cannot_be_read_get_one_message(tmp_path, words, name, message):
    done = command.catalog(*words, tmp_path / name)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "cannot be used: "),
        (lambda path: np.savez(path, q=np.zeros(3, np.uint32)), "cannot be used: "),
        (lambda path: np.savez(path, w=np.zeros(3, np.uint32)), "cannot be used: no tensor 'w'"),
        (lambda path: np.savez(path, q=np.array([{}], object)), "cannot be used: object arrays"),
        (lambda path: np.savez_compressed(path, q=np.zeros(2**22, np.uint8)), "is not a member that a trace writes"),
        (lambda path: archive(path, {"q.npy": header((2**40,))}), "shape does not match its content"),
        (lambda path: archive(path, {"q.npy": header((2**400, -1))}), "cannot be used: "),
        (lambda path: archive(path, {"q.npy": header("(" * 9000)}), "cannot be used: "),
        (lambda path: archive(path, {"q.npy": header((3,)).replace(b"'<u4'", b"'(,)'")}), "cannot be used: "),
        (lambda path: archive(path, {"../../q.npy": header((0,))}), "no tensor '../../q'"),
        (lambda path: os.truncate(path, 2**40), "bytes"),
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "are missing"),
    ],
)
def test_damaged_inputs_get_one_message(catalog, traced, damage, message):
    for path in tracing.folder_of(traced).iterdir():
        damage(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError) as raised:
        replay(catalog, read_trace(traced).used)
    assert message in str(raised.value)
    assert ": tensors " in str(raised.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB: nothing large was unpacked"


def header(shape):
    """A .npy file of no data, whose header claims some; of text, what stands where a header should."""
    text = shape if isinstance(shape, str) else f"{{'descr': '<u4', 'fortran_order': False, 'shape': {shape}, }}\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def archive(path, members):
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)


@pytest.mark.parametrize("words", [["replay"], ["tune", "--trace"]])
def test_a_pipe_is_not_waited_for(tmp_path, words):
    os.mkfifo(tmp_path / "pipe")
    done = command.catalog(*words, tmp_path / "pipe")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a pipe, not a regular file" in done.stderr


def test_replay_runs_each_problem_once_most_time_first(catalog, traced):
    with traced.open("ab") as file:
        file.write(traced.read_bytes())
    done = command.catalog("replay", traced, "--verify", "--format", "json", db=catalog.path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["problem"] for row in rows] == ["b1-h2-s17-d40-bf16-causal-lse", "b1-h2-s33-d32-fp32"]
    assert [row["calls"] for row in rows] == [2, 2]
    assert [row["launches"] for row in rows] == [40, 2]
    assert [row["total_ms"] for row in rows] == [40, 2]
    assert [row["inputs"] for row in rows] == ["2 kept", "2 kept"]
    assert [row["error"] for row in rows] == [None, None]
    for row in rows:
        assert row["verified"] is True
        assert row["same_kernels"] is True
        assert row["speedup"] == pytest.approx(1 / row["median_ms"], rel=0.01, abs=0.002)
    assert "4 calls of 2 problems" in done.stderr
    table = command.catalog("replay", traced, "--bench", "--limit", 1, db=catalog.path)
    assert table.stdout.splitlines()[0].split()[:3] == ["problem", "arch", "calls"]
    assert len(table.stdout.splitlines()) == 3


def test_replay_tells_what_is_wrong_and_what_does_not_run(catalog, traced, monkeypatch):
    first, second = traced.read_bytes().splitlines()
    traced.write_bytes(with_field("arch", "gfx942")(first) + second + b"\n")
    failed, right = replay(catalog, read_trace(traced).used[::-1], ReplayOptions(verify=True))
    assert "gfx942 kernels cannot run on this machine" in failed.about
    assert not failed.passed
    assert right.passed
    assert all(done.passed for done in replay(catalog, read_trace(traced).used, ReplayOptions(arch="host")))
    with pytest.raises(UsageError, match="no arch is called"):
        replay(catalog, read_trace(traced).used, ReplayOptions(arch="hots"))
    monkeypatch.setattr(
        "catalog.ops.attention.reference.answers.reference", lambda problem, inputs: make_outputs(problem)
    )
    (wrong,) = replay(catalog, [right.used], ReplayOptions(verify=True))
    assert wrong.verified is False
    assert re.match(r"WRONG: (o|lse) is off by ", wrong.about)
    done = command.catalog("replay", traced, db=catalog.path)
    assert done.returncode == 1
    assert "gfx942 kernels cannot run" in done.stderr


def test_replay_takes_the_seed_of_runs_without_inputs(catalog, file):
    with package.trace(file, tensors=True):
        catalog.select(SMALL).run(seed=11)
    assert not tracing.folder_of(file).exists()
    (done,) = replay(catalog, read_trace(file).used, ReplayOptions(verify=True))
    assert (done.inputs, done.verified) == ("seed 11", True)


@pytest.mark.slow
def test_tuning_a_trace_takes_what_was_used_most_time_first(traced, tmp_path):
    db = tmp_path / "catalog.db"
    options = ["--candidates", 1, "--format", "json"]
    done = command.catalog("tune", "--trace", traced, *options, db=db, CATALOG_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr
    assert [row["problem"] for row in json.loads(done.stdout)] == [
        "b1-h2-s17-d40-bf16-causal-lse",
        "b1-h2-s33-d32-fp32",
    ]
    both = command.catalog("tune", "--trace", traced, "--misses", db=db)
    assert both.returncode == 2
    assert "--trace FILE" in both.stderr
