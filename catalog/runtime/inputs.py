"""Seeded inputs for a problem: the default inputs of a run, also used by benchmarks and tests."""

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
    """Make the inputs of a run, equal for equal problems and seeds; each tensor has its own random generator.

    Tensors are standard normal unless the operation has a better choice. Inputs that are results of other inputs are
    computed by the reference: O and LSE of an attention backward are those of its forward.

    Raises:
        ProblemError: a run needs more memory than this machine has.
    """
    inputs = draw_inputs(problem, seed)
    return {**inputs, **operation_of(problem).complete(problem, inputs)}


def draw_inputs(problem: Problem, seed: int = 0) -> dict[str, Array]:
    """Like :func:`make_inputs`, but all inputs are random: faster, with the right shapes but meaningless results.

    Raises:
        ProblemError: a run needs more memory than this machine has.
    """
    check_memory(problem)
    draw = operation_of(problem).draw
    inputs: dict[str, Array] = {}
    for index, name in enumerate(problem.needed):
        values = draw(problem, name, np.random.default_rng([seed, index]))
        inputs[name] = values.astype(element_type(problem, name), copy=False)
    return inputs
