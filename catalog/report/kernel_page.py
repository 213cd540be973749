"""A kernel on one page: its traits, its source, the libraries made of it, its timings, and the kernels that are most
like it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from catalog.backends import target_of
from catalog.build.cache import Cache
from catalog.errors import CatalogError, UsageError
from catalog.ops import problem_of_key
from catalog.registry.kernels import kernel_of
from catalog.registry.views import rows_of
from catalog.schema.kernel import Kernel
from catalog.settings import settings

LIKE = 12
"""Maximum number of similar kernels."""

MOST_TIMINGS = 500
"""Maximum number of timings."""


@dataclass(frozen=True)
class KernelPage:
    """What there is to say about a kernel.

    Attributes:
        kernel: the kernel.
        traits: name, value and meaning of each trait.
        source: the C++ source, or why there is none here.
        libraries: a row of table ``artifact`` for each build, the newest first, without what is missing.
        timings: device, policy, problem, median in ms, TFLOP/s and GB/s.
        similar: id, changed traits as ``name=value``, and lowest median in ms of kernels with the same signature.
    """

    kernel: Kernel
    traits: Sequence[tuple[str, Any, str]]
    source: str
    libraries: Sequence[dict[str, Any]]
    timings: Sequence[dict[str, Any]]
    similar: Sequence[dict[str, Any]]


def kernel_page(connection: sqlite3.Connection, kernel_id: str) -> KernelPage:
    """The page of a kernel of the catalog that ``connection`` reads.

    Raises:
        UsageError: the catalog has no such kernel.
    """
    kernel = kernel_of(connection, kernel_id)
    if kernel is None:
        raise UsageError(f"the catalog has no kernel {kernel_id}")
    row = kernel.to_row()
    return KernelPage(
        kernel,
        [(name, row[name], trait.meaning) for name, trait in kernel.traits.items()],
        _source(kernel),
        [
            {name: _short(value) for name, value in dict(library).items() if value not in (None, "")}
            for library in connection.execute(
                "SELECT status, toolchain, isa, flags, compile_s, so_bytes, registers, acc_registers, "
                "scalar_registers, spills, scratch_bytes, stack_bytes, shared_bytes, occupancy, code_bytes, "
                "device_functions, log, created, key FROM artifact WHERE kernel_id = ? ORDER BY created DESC, key",
                [kernel_id],
            )
        ],
        [
            {name: _short(value) for name, value in dict(timing).items()} | {"problem": _name(timing["problem"])}
            for timing in connection.execute(
                "SELECT device.name AS device, measured_as, cold, problem.key AS problem, median_ms, tflops, gbps "
                "FROM timing JOIN problem ON problem.id = problem_id JOIN device ON device.id = device_id "
                "WHERE kernel_id = ? ORDER BY device, measured_as, cold, median_ms, problem_id LIMIT ?",
                [kernel_id, MOST_TIMINGS],
            )
        ],
        _similar(connection, kernel, row),
    )


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _source(kernel: Kernel) -> str:
    try:
        return target_of(kernel.arch).emit(kernel, Cache(settings().cache_dir).scans)
    except CatalogError as error:
        return "\n".join(f"// {line}" for line in str(error).splitlines())


def _name(key: str) -> str:
    try:
        return problem_of_key(key).name
    except CatalogError:  # its operation is not installed
        return key


def _similar(connection: sqlite3.Connection, kernel: Kernel, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels of the same lineage and signature, those that differ in the fewest traits of the algorithm first."""
    of, algorithm = rows_of(kernel.operation), tuple(type(kernel.algorithm).model_fields)
    same = " AND ".join(f"{name} IS :{name}" for name in type(kernel.signature).model_fields)
    changes = " + ".join(f"({name} IS NOT :{name})" for name in algorithm)
    found = connection.execute(
        f"SELECT id, {', '.join(algorithm)}, (SELECT min(median_ms) FROM timing WHERE kernel_id = id) AS best_ms "
        f"FROM {of} WHERE lineage = (SELECT lineage FROM {of} WHERE id = :id) AND {same} AND id <> :id "
        f"ORDER BY {changes}, id LIMIT {LIKE}",
        {**row, "id": kernel.id},
    )
    return [
        {
            "id": other["id"],
            "changes": ", ".join(f"{name}={other[name]}" for name in algorithm if other[name] != row[name]),
            "best_ms": _short(other["best_ms"]),
        }
        for other in found
    ]
