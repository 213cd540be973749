"""Random convolutions and tensors for kernels of our own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from catalog.errors import ProblemError
from catalog.ops import operation
from catalog.ops.conv import traits
from catalog.ops.conv.problem import ConvProblem
from catalog.runtime.catalog import Catalog
from catalog.runtime.elements import element_type
from catalog.runtime.here import resolve_arch
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import Array
from catalog.schema.kernel import Kernel

CONV = operation("conv")
EXTENTS = {1: (1, 2, 7, 40, 130), 2: (1, 3, 6, 11, 17), 3: (1, 2, 5, 7)}
POISON = 77
NARROW = tuple(pipeline.value for pipeline in traits.NARROW)


def rows(catalog: Catalog, where: str, arch: str = "host") -> list[Kernel]:
    """Convolution kernels of an arch, in the order of its spec."""
    found = catalog.connection.execute(
        f"SELECT * FROM conv_row WHERE arch = ? AND {where} ORDER BY dispatch_order", (resolve_arch(arch),)
    )
    return [CONV.kernel.from_row(row) for row in found]


def problem_of_row(kernel: Kernel, rng: random.Random) -> ConvProblem:
    """A problem that ``kernel`` answers, of any sizes and geometry."""
    signature = kernel.signature
    ndim = signature.ndim
    while True:
        fields: dict[str, Any] = {
            "size": [rng.choice(EXTENTS[ndim]) for _ in range(ndim)],
            "filter": rng.choice(((1,) * ndim, (3,) * ndim, tuple(rng.randint(1, 4) for _ in range(ndim)))),
            "pad": [rng.choice((0, 0, 1, 2)) for _ in range(ndim)],
            "stride": [rng.choice((1, 1, 2, 3)) for _ in range(ndim)],
            "dilation": [rng.choice((1, 1, 1, 2, 4)) for _ in range(ndim)],
            "n": rng.choice((0, 1, 2, 3)),
            "g": (g := rng.choice((1, 1, 2, 5, 33))),
        }
        if kernel.algorithm.pipeline in NARROW:
            fields |= _narrow_fields(kernel, fields, rng)
        elif kernel.algorithm.pipeline == "host_winograd":
            fields |= {"filter": (3,) * ndim, "stride": (1,) * ndim, "dilation": (1,) * ndim}
            fields |= {name: g * rng.choice((1, 4, 17, 33, 70)) for name in "ck"}
        elif kernel.algorithm.pipeline == "host_groups_amx":
            width, g = rng.choice((2, 4, 8, 16, 32)), rng.choice((5, 16, 19))
            fields |= {"g": g} | dict.fromkeys("ck", g * width)
        elif kernel.algorithm.pipeline == "sm90_narrow":
            fields |= {"g": (g := rng.choice((2, 5, 33)))} | dict.fromkeys("ck", g * rng.choice((1, 2, 4, 8, 16, 32)))
        elif kernel.algorithm.pipeline == "sm90_halo":
            reach = [min(taps, 2) if signature.direction == "bwd_data" else 1 for taps in fields["filter"]]
            fields |= {"g": 1, "stride": [rng.randint(1, most) for most in reach], "dilation": (1,) * ndim}
            fields |= {name: rng.choice((1, 4, 7, 16, 33, 96)) for name in "ck"}
        elif signature.family == "depthwise":
            fields |= {"c": g, "k": g}
        else:
            fields |= {name: g * rng.choice((1, 2, 4, 7, 16, 33, 64, 70)) for name in "ck"}
        try:
            return ConvProblem(
                direction=signature.direction.value,
                dtype=signature.dtype.value,
                layout=signature.layout.value,
                **fields,
            )
        except ProblemError:
            continue  # the filter is larger than the image


def _narrow_fields(kernel: Kernel, fields: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Channels of narrow groups and, where a pipeline is for some filters only, one of these."""
    algorithm, signature = kernel.algorithm, kernel.signature
    pipeline, vector, backward = algorithm.pipeline.value, algorithm.vector_c, signature.direction == "bwd_data"
    dots = pipeline.endswith("_dot")
    if pipeline == "host_pixels":
        g = rng.choice((1, 3, 5, 8, vector - 1, vector, vector + 3))
        read, made = rng.choice((1, 1, 2, 3, 6, 17, 32)), rng.choice((1, 1, 2, 3, 8, 19))
        return {"g": g, "c": g * (made if backward else read), "k": g * (read if backward else made)}
    if pipeline in ("host_direct", "host_padded", "host_padded_dot"):
        wide = signature.dtype == "fp32" or (dots and signature.direction != "bwd_weight")
        most = vector * (2 if wide else 1)
        width = rng.choice([width for width in (1, 2, 4, 8, 16, 32) if dots < width <= most])
        least = 1 if pipeline == "host_direct" else -(-vector * (1 + dots) // width)
        g = max(least, fields["g"])
    else:
        width, g = 1, rng.choice((vector, vector + 1, 33, 5 * vector - 2))
    across: dict[str, int] = {}
    if pipeline != "host_direct":
        across = {"dilation": 1} if backward else {"dilation": 1, "stride": rng.choice((1, 2))}
    if pipeline in ("host_depthwise", "host_depthwise_dot", "host_two_rows", "host_two_rows_dot"):
        across |= {"filter": 3, "size": rng.choice((15, 16, 17, 40))}
        across |= {"stride": 1, "pad": rng.choice((1, 2))} if backward else {"pad": rng.choice((0, 1))}
    down = across | {"size": fields["size"][0]} if "two_rows" in pipeline else {}
    changed = {name: list(fields[name]) for name in ("size", "filter", "stride", "dilation", "pad")}
    for name, numbers in changed.items():
        numbers[0] = down.get(name, numbers[0])
        numbers[-1] = across.get(name, numbers[-1])
    return changed | {"g": g, **dict.fromkeys("ck", g * width)}


def tensors_of(problem: ConvProblem, rng: random.Random) -> tuple[dict[str, Array], Array, Array]:
    """Inputs with any stride along the first axis; the result, whose elements are NaN; and the memory around it."""
    inputs = {name: _spread(array, rng)[0] for name, array in make_inputs(problem, rng.randrange(100)).items()}
    [made] = problem.made
    element = element_type(problem, made)
    empty = np.full(problem.shapes[made], POISON if problem.dtype == "int8" else np.nan, element)
    return inputs, *_spread(empty, rng)


def check(catalog: Catalog, kernel: Kernel, problems: int) -> float:
    """Run a kernel on drawn problems; the largest share of a tolerance that was used."""
    rng = random.Random(kernel.name)  # noqa: S311
    return max((check_problem(catalog, kernel, problem_of_row(kernel, rng), rng) for _ in range(problems)), default=0.0)


def check_problem(catalog: Catalog, kernel: Kernel, problem: ConvProblem, rng: random.Random) -> float:
    """Run a kernel on a problem; the share of the tolerance that was used."""
    inputs, result, around = tensors_of(problem, rng)
    [made] = problem.made
    expected = CONV.reference(problem, inputs)[made]
    allowed = CONV.tolerances(problem, inputs, CONV.arithmetic(kernel))[made]
    catalog.plan(problem, kernel).bind(inputs, outputs={made: result}).launch()
    share = allowed.used(result, expected)
    assert share <= 1, f"{made} is off by {share:.1f} of the tolerance: {problem.key} on {kernel.name}"
    result[...] = POISON
    assert np.all(around == np.asarray(POISON, around.dtype)), f"{problem.key} wrote elsewhere on {kernel.name}"
    return share


def _spread(array: Array, rng: random.Random) -> tuple[Array, Array]:
    """A copy with a gap after each element of the first axis, and the memory that it is in."""
    first, *others = array.shape
    inner = int(np.prod(others))
    around = np.full((first + 1, inner + rng.choice((0, 0, 3))), POISON, array.dtype)
    view = np.lib.stride_tricks.as_strided(around, array.shape, (around.strides[0], *array.strides[1:]))
    view[...] = array
    return view, around
