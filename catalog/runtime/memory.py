"""Checks that a problem fits into this machine's memory, done before anything is allocated."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping
from functools import cache

from catalog.errors import ProblemError
from catalog.ops import operation_of
from catalog.schema.problem import Problem

ALWAYS_THERE = 2**24
"""Bytes that every process has: more than this is compared with what the machine and the process may use."""


def memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or the limit of ``ulimit -v`` if that is lower."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    return _physical_bytes() if allowed == resource.RLIM_INFINITY else min(allowed, _physical_bytes())


@cache
def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def needed_bytes(problem: Problem, num_splits: int = 0) -> int:
    """Bytes of all tensors of a run of ``problem``, and of the partial results of its stages.

    ``num_splits`` is the number of parts of the work; 0: the problem's own, at least one.
    """
    return problem.bytes + sum(_workspace(problem, num_splits).values())


def check_memory(problem: Problem) -> None:
    """Check that all tensors of a run, and the workspace between its stages, fit into this machine's memory.

    Raises:
        ProblemError: they do not fit; the message names the largest, its size, and the fields that determine it.
    """
    if needed_bytes(problem) > memory_bytes():
        tensors = {name: tensor.bytes for name, tensor in problem.tensors.items() if not tensor.optional}
        _check(problem, {**tensors, **_workspace(problem, 0)}, _at_least_one(problem, 0))


def check_reference(problem: Problem) -> None:
    """Check that the outputs in float64, which a run is compared with, fit into memory beside the tensors of the run.

    Raises:
        ProblemError: they do not fit; the message says how many bytes the comparison needs.
    """
    outputs = [tensor for tensor in problem.tensors.values() if tensor.role in ("output", "updated")]
    needed = needed_bytes(problem) + sum(8 * math.prod(tensor.shape) for tensor in outputs)
    if needed > memory_bytes():
        raise ProblemError(
            f"the comparison with the float64 reference needs {needed:,} bytes, and this process may use "
            f"{memory_bytes():,} bytes of memory",
            hint="Run the problem without validation, or validate a smaller one.",
        )


def check_room(problem: Problem, num_splits: int = 0) -> None:
    """Check that a run's own allocations on the host, and pools such as a paged cache, fit into this machine's memory.

    Other inputs do not count: they belong to the caller and may repeat elements.

    Args:
        problem: the problem to run.
        num_splits: number of parts of the work; 0: the problem's own, at least one.

    Raises:
        ProblemError: as :func:`check_memory`.
    """
    pools = operation_of(problem).pools(problem)
    held = {name: tensor.bytes for name, tensor in problem.tensors.items() if tensor.role == "output" or name in pools}
    _check(problem, {**held, **_workspace(problem, num_splits)}, _at_least_one(problem, num_splits))


def _workspace(problem: Problem, num_splits: int) -> Mapping[str, int]:
    """Bytes of the partial results by their field of the argument struct; ``num_splits`` as in :func:`needed_bytes`."""
    return operation_of(problem).partial_bytes(problem, _at_least_one(problem, num_splits))


def _at_least_one(problem: Problem, num_splits: int) -> int:
    return num_splits or max(1, operation_of(problem).stated_splits(problem))


def _check(problem: Problem, parts: Mapping[str, int], num_splits: int) -> None:
    total, memory = sum(parts.values()), memory_bytes()
    if total <= memory:
        return
    largest = max(parts, key=lambda name: parts[name])
    of = operation_of(problem)
    if largest in problem.tensors:
        tensor, fields = problem.tensors[largest], of.pools(problem).get(largest)
        what = f"{fields + ': ' if fields else ''}{largest}, {tensor.element} {tensor.shape},"
    else:
        stage = of.main_stage(problem)
        what = f"num_splits={num_splits}: {largest}, the partial results of {stage},"
    raise ProblemError(
        f"{what} takes {parts[largest]:,} bytes; the run needs {total:,} bytes in total, and this process may use "
        f"{memory:,} bytes of memory"
    )
