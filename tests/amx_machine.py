"""What the state of AMX has to survive, a scenario for each process: ``amx_machine.py SCENARIO CATALOG LIBRARY``.

LIBRARY is ``amx_state.cpp``, compiled and preloaded. Exits with an error where a scenario goes wrong.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from amx import PAIRS

from catalog.errors import DeviceError
from catalog.ops.attention.problem import Problem
from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host import device as host_device
from catalog.runtime.inputs import make_inputs
from catalog.runtime.plan import Plan
from catalog.schema.problem import Problem as AnyProblem

ROUNDS = 40
PROBLEMS: tuple[AnyProblem, ...] = (
    GemmProblem(m=300, n=260, k=700, dtype="bf16"),
    Problem(batch=1, nhead_q=4, seqlen_q=300, hdim_q=64, dtype="bf16", mask="causal"),
    Problem(op="bwd", batch=1, nhead_q=4, seqlen_q=300, hdim_q=64, dtype="bf16"),
)


class Case:
    """A plan that uses AMX, its inputs, and the bits of its first results."""

    def __init__(self, catalog: Catalog, problem: AnyProblem) -> None:
        self.plan: Plan = catalog.select(problem, arch="x86_64_v4")
        assert "host_amx" in str(self.plan.kernels), self.plan.kernels
        self.inputs = make_inputs(problem, 7)

    def bits(self) -> list[bytes]:
        return [array.tobytes() for array in self.plan.run(self.inputs).outputs.values()]


def cases(catalog: Catalog) -> list[Case]:
    return [Case(catalog, problem) for problem in PROBLEMS]


def in_threads(count: int, body: Callable[[], None]) -> None:
    """Run ``body`` in threads at once, and raise what one of them raised."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def refused(catalog: Catalog, state: ctypes.CDLL) -> None:
    """A system that does not permit AMX is asked once for each library, and every launch is a DeviceError."""
    host_device.cpu_features = lambda: PAIRS["host_amx"]  # also where the CPU has none
    case = Case(catalog, PROBLEMS[0])

    def call() -> None:
        with pytest.raises(DeviceError, match="does not permit"):
            case.plan.run(case.inputs)

    call()
    assert state.asked() == 1
    in_threads(4, call)
    assert state.asked() == 1


def permitted(catalog: Catalog, state: ctypes.CDLL) -> None:
    """The first launches, in threads, ask once for each library, and leave no tiles in use."""
    for number, case in enumerate(cases(catalog), 1):
        found: list[list[bytes]] = []

        def call(case: Case = case, found: list[list[bytes]] = found) -> None:
            found.append(case.bits())
            assert state.tiles_in_use() == 0

        in_threads(4, call)
        call()
        assert all(bits == found[0] for bits in found)
        assert state.asked() == number


def signals(catalog: Catalog, state: ctypes.CDLL) -> None:
    """A signal handler may use tiles of its own."""
    all_cases = cases(catalog)
    expected = [case.bits() for case in all_cases]
    state.interrupt(500)
    for _ in range(ROUNDS):
        assert [case.bits() for case in all_cases] == expected
    assert state.interrupt(0) > 5, "hardly any signal arrived"


def forks(catalog: Catalog, state: ctypes.CDLL) -> None:
    """Children of a process whose threads use AMX compute, too."""
    all_cases = cases(catalog)
    expected = [case.bits() for case in all_cases]
    stop = threading.Event()

    def keep_on() -> None:
        while not stop.is_set():
            assert all_cases[0].bits() == expected[0]

    thread = threading.Thread(target=keep_on)
    thread.start()
    try:
        for _ in range(ROUNDS // 4):
            child = os.fork()
            if child == 0:
                right = state.tiles_in_use() == 0 and [case.bits() for case in all_cases] == expected
                os._exit(0 if right else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()


def pytorch(catalog: Catalog, state: ctypes.CDLL) -> None:
    """PyTorch's products in tiles before, between and beside ours."""
    import torch

    a, b = (torch.randn(400, 400, dtype=torch.bfloat16) for _ in "ab")
    product = a @ b
    all_cases = cases(catalog)
    expected = [case.bits() for case in all_cases]

    def alternate() -> None:
        for _ in range(ROUNDS):
            assert torch.equal(a @ b, product)
            assert [case.bits() for case in all_cases] == expected

    alternate()
    in_threads(2, alternate)
    assert state.tiles_in_use() == 0


def main() -> None:
    scenario, db, library = sys.argv[1:]
    catalog, state = Catalog(Path(db)), ctypes.CDLL(library)
    {one.__name__: one for one in (refused, permitted, signals, forks, pytorch)}[scenario](catalog, state)


if __name__ == "__main__":
    main()
