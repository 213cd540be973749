"""Seeded inputs for a problem: what `run` takes when it is given none, and what benchmarks and tests run on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from catalog.ops import operation_of
from catalog.runtime.elements import element_type
from catalog.runtime.memory import check_memory
from catalog.schema.problem import Problem

Array = NDArray[Any]


def make_inputs(problem: Problem, seed: int = 0) -> dict[str, Array]:
    """The inputs that a run needs, equal for equal problems and seeds; each tensor draws from a generator of its own.

    Tensors are standard normal where the operation has no better choice. Inputs that are results of others are computed
    by the reference: O and LSE of an attention backward are those of its forward.

    Raises:
        ProblemError: what a run needs is larger than this machine's memory.
    """
    inputs = draw_inputs(problem, seed)
    return {**inputs, **operation_of(problem).complete(problem, inputs)}


def draw_inputs(problem: Problem, seed: int = 0) -> dict[str, Array]:
    """As :func:`make_inputs`, but all inputs are random: right shapes, perhaps meaningless results, little time.

    Raises:
        ProblemError: what a run needs is larger than this machine's memory.
    """
    check_memory(problem)
    draw = operation_of(problem).draw
    inputs: dict[str, Array] = {}
    for index, name in enumerate(problem.needed):
        values = draw(problem, name, np.random.default_rng([seed, index]))
        inputs[name] = values.astype(element_type(problem, name), copy=False)
    return inputs
