"""Forks after a launch: what the child may do, and what it must not share with its parent. Each parent is a process."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import missing

from catalog.errors import UsageError
from catalog.forks import Lock
from catalog.runtime.catalog import Catalog
from catalog.settings import settings
from catalog.threads import most_threads, usable_cores

SECONDS = 120
"""A child that hangs must not hang the tests."""

FORKING = """
import multiprocessing, os, sys, threading, time
import numpy as np
from catalog import Catalog, Problem

problem = Problem(batch=2, nhead_q=4, seqlen_q=64, hdim_q=32, dtype="fp32")
other = Problem(batch=3, nhead_q=4, seqlen_q=65, hdim_q=32, dtype="fp32")
catalog = Catalog(sys.argv[1], num_threads=3)

def forked(work):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

LAUNCHED = """
plan = catalog.select(problem)
expected = plan.run().outputs["o"]
bound = plan.bind()

def in_child():
    for _ in range(2):
        assert np.array_equal(plan.run().outputs["o"], expected)
        bound.launch()
        assert np.array_equal(bound.outputs["o"], expected)
    assert bound._call.args.num_threads == catalog.host().threads == 3
    assert len(os.listdir("/proc/self/task")) == 3
    return float(catalog.select(other).run().outputs["o"].sum())
"""


def parent(script: str, path: Path, launched: str = LAUNCHED) -> str:
    """What a process prints that runs ``script`` on the catalog at ``path``, after a launch."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING + launched + script, str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copied(host_file: Path, folder: Path) -> Path:
    path = folder / "catalog.db"
    path.write_bytes(host_file.read_bytes())
    return path


def test_a_forked_child_runs_what_its_parent_has_run_on_threads_of_its_own(host_file: Path, tmp_path: Path) -> None:
    script = """
def child():
    in_child()
    assert ended(forked(in_child)) == 0
for pause in (0, 0.01):  # the threads spin, then sleep
    time.sleep(pause)
    assert ended(forked(child)) == 0
assert plan.run() and catalog.host().threads == 3
"""
    parent(script, copied(host_file, tmp_path))


@pytest.mark.slow
def test_a_fork_during_launches_of_other_threads_leaves_no_lock_behind(host_file: Path, tmp_path: Path) -> None:
    script = """
over = threading.Event()
def launching():
    mine = plan.bind()
    while not over.is_set():
        mine.launch()
threads = [threading.Thread(target=launching) for _ in range(3)]
for thread in threads: thread.start()
assert [ended(forked(in_child)) for _ in range(5)] == [0] * 5
over.set()
for thread in threads: thread.join()
"""
    parent(script, copied(host_file, tmp_path))


@pytest.mark.slow
def test_workers_of_multiprocessing_run_kernels(host_file: Path, tmp_path: Path) -> None:
    script = """
with multiprocessing.get_context("fork").Pool(2) as pool:
    sums = pool.starmap(in_child, [()] * 4)
assert sums == [float(catalog.select(other).run().outputs["o"].sum())] * 4
"""
    parent(script, copied(host_file, tmp_path))


def test_workers_of_a_data_loader_run_kernels(host_file: Path, tmp_path: Path) -> None:
    """PyTorch's tensors, whose second call is a repeat of the first, with the arguments that the parent made."""
    try:
        import torch.utils.data  # noqa: F401
    except ModuleNotFoundError:
        missing("PyTorch")
    script = """
import torch
from torch.utils.data import DataLoader, Dataset
tensors = [torch.randn(2, 4, 64, 32) for _ in "qkv"]
def attention():
    return plan.enqueue(**dict(zip("qkv", tensors)))["o"]
torch.randn(500, 500) @ torch.randn(500, 500)
seen = [attention(), attention()][1]
class Rows(Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return attention()
for row in DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork"):
    assert torch.equal(row, seen)
"""
    parent(script, copied(host_file, tmp_path))


@pytest.mark.slow
def test_parent_and_child_have_connections_of_their_own(host_file: Path, tmp_path: Path) -> None:
    """The log that the child writes to outlives the parent's connection, and what both have written is there."""
    path = copied(host_file, tmp_path)
    script = """
before = catalog.connection
ready, go = os.pipe(), os.pipe()
def work():
    write("child")
    os.write(ready[1], b".")
    os.read(go[0], 1)
    write("orphan")
def write(who):
    for number in range(100):
        with catalog.writing() as connection:
            connection.execute("INSERT INTO problem (key) VALUES (?)", [f"{who} {number}"])
pid = forked(work)
assert catalog.connection is not before
write("parent")
os.read(ready[0], 1)
catalog.close()
assert os.path.exists(sys.argv[1] + "-wal")
os.write(go[1], b".")
assert ended(pid) == 0
"""
    parent(script, path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("SELECT count(*) FROM problem WHERE key NOT LIKE '{%'").fetchone()[0] == 300
    connection.close()


@pytest.mark.slow
def test_a_fork_amid_a_transaction_leaves_the_file_to_the_parent(host_file: Path, tmp_path: Path) -> None:
    script = """
catalog_file = sys.modules["catalog.runtime.catalog_file"]
catalog_file._FORK_WAIT_SECONDS = 0.1
began, end = threading.Event(), threading.Event()
def write():
    with catalog.writing() as connection:
        connection.execute("DELETE FROM miss")
        began.set()
        end.wait()
writer = threading.Thread(target=write)
writer.start()
began.wait()
def work():
    assert np.array_equal(plan.run().outputs["o"], expected)
    catalog.select(other)
pid = forked(work)
assert ended(pid) == 1
end.set()
writer.join()
catalog.select(other)
assert [n for _, n in catalog.misses(plan.arch)] == [1]
"""
    output = parent(script, copied(host_file, tmp_path))
    assert "RegistryError" in output
    assert "was open when this process was forked" in output
    assert "spawn" in output


def test_a_fork_before_any_launch_keeps_all_threads(host_file: Path, tmp_path: Path) -> None:
    script = """
def work():
    catalog.select(problem).run()
    assert catalog.host().threads == 3
assert ended(forked(work)) == 0
"""
    parent(script, copied(host_file, tmp_path), launched="")


def test_a_lock_is_free_in_the_child_unless_the_forking_thread_holds_it() -> None:
    held, over = threading.Event(), threading.Event()
    mine, others = Lock(), Lock()

    def hold() -> None:
        with others:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with mine:
        pid = os.fork()
        if not pid:
            taken = others.acquire(timeout=5)
            mine.release()
            os._exit(0 if taken and mine.acquire(timeout=5) else 1)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# How many threads there may be


@pytest.mark.parametrize("number", [-1, 100_000, most_threads() + 1])
def test_more_threads_than_a_machine_can_bear_are_refused(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = rf"num_threads={number}: expected an integer from 0 \(every core\) to {most_threads()}"
    with pytest.raises(UsageError, match=message):
        Catalog(tmp_path / "catalog.db", num_threads=number)
    monkeypatch.setenv("CATALOG_NUM_THREADS", str(number))
    settings.cache_clear()
    with pytest.raises(UsageError, match=rf"CATALOG_NUM_THREADS='{number}': expected an integer from 0"):
        settings()


@pytest.mark.parametrize(
    ("wanted", "threads"),
    [("3", 3), ("3,2", 3), ("", usable_cores()), ("many", usable_cores()), ("100000", most_threads())],
)
def test_openmp_s_own_variable_is_heeded(
    wanted: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert Catalog(tmp_path / "catalog.db").host().threads == threads


def test_the_command_line_says_how_many_threads_there_may_be(tmp_path: Path) -> None:
    command: list[Any] = [sys.executable, "-m", "catalog", "--db", tmp_path / "catalog.db", "bench"]
    problem = ["--batch", "1", "--nhead-q", "1", "--seqlen-q", "16", "--hdim-q", "32", "--threads", "100000"]
    done = subprocess.run([*command, *problem], check=False, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert "num_threads=100000: expected an integer from 0" in done.stderr
