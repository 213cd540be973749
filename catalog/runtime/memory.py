"""Whether what a problem needs fits into this machine's memory: asked before anything of it is made."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from functools import cache

from catalog.errors import ProblemError
from catalog.ops import operation_of
from catalog.schema.problem import Problem

_ANY_SPLITS = 4096
"""More parts of the work than are ever chosen: a few for each thread."""


def memory_bytes() -> int:
    """Memory that this process may have: the machine's, or less where ``ulimit -v`` says so."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    return _physical_bytes() if allowed == resource.RLIM_INFINITY else min(allowed, _physical_bytes())


@cache
def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def needed_bytes(problem: Problem, num_splits: int = 0) -> int:
    """Bytes of all tensors that a run of ``problem`` needs, and of the partial results of its stages.

    ``num_splits`` are the parts that the work is divided into, 0: as many as the problem states, at least one.
    """
    return problem.bytes + sum(_workspace(problem, num_splits).values())


def surely_fits(problem: Problem) -> bool:
    """Whether all of it fits into this machine's memory, however many splits are chosen: what is cheap to ask first."""
    if not problem.divided:
        return problem.bytes <= memory_bytes()
    operation = operation_of(problem)
    partials = operation.partial_bytes(problem, operation.stated_splits(problem) or _ANY_SPLITS)
    return problem.bytes + sum(partials.values()) <= memory_bytes()


def check_memory(problem: Problem) -> None:
    """All tensors of a run, and what its stages hand to each other, fit into this machine's memory.

    Raises:
        ProblemError: they don't; names the largest, its size, and the fields that make it so large.
    """
    if needed_bytes(problem) > memory_bytes():
        tensors = {name: tensor.bytes for name, tensor in problem.tensors.items() if not tensor.optional}
        _check(problem, {**tensors, **_workspace(problem, 0)}, _at_least_one(problem, 0))


def check_room(problem: Problem, num_splits: int = 0) -> None:
    """What a run makes on the host in any case, and pools such as a paged cache, fit into this machine's memory.

    Other inputs do not count: they are the caller's, and may repeat elements.

    Args:
        problem: what is run.
        num_splits: the parts that its work is divided into, 0: as many as the problem states, at least one.

    Raises:
        ProblemError: as :func:`check_memory`.
    """
    pools = operation_of(problem).pools(problem)
    held = {name: tensor.bytes for name, tensor in problem.tensors.items() if tensor.role == "output" or name in pools}
    _check(problem, {**held, **_workspace(problem, num_splits)}, _at_least_one(problem, num_splits))


def _workspace(problem: Problem, num_splits: int) -> Mapping[str, int]:
    """Bytes of the partial results, by their place in the argument struct; ``num_splits`` as :func:`needed_bytes`."""
    return operation_of(problem).partial_bytes(problem, _at_least_one(problem, num_splits))


def _at_least_one(problem: Problem, num_splits: int) -> int:
    return num_splits or max(1, operation_of(problem).stated_splits(problem))


def _check(problem: Problem, parts: Mapping[str, int], num_splits: int) -> None:
    total, memory = sum(parts.values()), memory_bytes()
    if total <= memory:
        return
    largest = max(parts, key=lambda name: parts[name])
    operation = operation_of(problem)
    if largest in problem.tensors:
        tensor, fields = problem.tensors[largest], operation.pools(problem).get(largest)
        what = f"{fields + ': ' if fields else ''}{largest}, {tensor.element} {tensor.shape},"
    else:
        stage = operation.main_stage(problem)
        what = f"num_splits={num_splits}: {largest}, the partial results of {stage},"
    raise ProblemError(
        f"{what} takes {parts[largest]:,} bytes; all that is needed at once is {total:,} bytes, and this process may "
        f"have {memory:,} bytes of memory"
    )
