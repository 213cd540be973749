"""Problems of aiter's tuned tables: what the kernels of each table compute.

All take A and B by rows of K (``rcr``). Tables of kernels with a shuffled B state no problem here.

Source: aiter, csrc/ck_gemm_a8w8, csrc/ck_gemm_a8w8_blockscale and csrc/ck_batched_gemm_a8w8, the scripts *_tune.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from catalog.ops.gemm.problem import GemmProblem

_SIZES: Mapping[str, str] = MappingProxyType({"B": "batch", "M": "m", "N": "n", "K": "k"})
_TYPE = "q_dtype_w"
_TYPES: Mapping[str, str] = MappingProxyType(
    {"torch.int8": "int8", "torch.float8_e4m3fn": "fp8", "torch.float8_e4m3fnuz": "fp8"}
)
"""Element types by their names there. Those of gfx942 end in fnuz; kernels of an arch have one of the two."""

_COMPUTED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "a8w8": {"dtype": "int8", "scales": "row", "dtype_c": "bf16"},
        "a8w8_batched": {"dtype": "int8", "scales": "row", "dtype_c": "bf16"},
        "a8w8_blockscale": {"dtype": "fp8", "scales": "block", "dtype_c": "bf16"},
        "bf16_batched": {"dtype": "bf16"},
    }
)
"""What a table's kernels compute, unless a record states another type; older tables state none."""


def problem_of_table(table: str, fields: Mapping[str, Any]) -> GemmProblem | None:
    """The problem that ``fields`` state in a table of aiter; None if a field is not known here.

    Raises:
        ProblemError: there is no such problem.
    """
    if table not in _COMPUTED:
        return None
    computed = dict(_COMPUTED[table])
    stated = {name: value for name, value in fields.items() if value not in (None, "")}
    if table == "a8w8" and _TYPE in stated:
        dtype = _TYPES.get(str(stated.pop(_TYPE)))
        if dtype is None:
            return None
        computed["dtype"] = dtype
    if not stated.keys() <= _SIZES.keys():
        return None
    return GemmProblem(**{_SIZES[name]: value for name, value in stated.items()}, **computed)


def fields_of_table(table: str, problem: GemmProblem) -> Mapping[str, str] | None:
    """The fields that state ``problem`` in a table of aiter, the inverse of :func:`problem_of_table`."""
    if table not in _COMPUTED:
        return None
    sizes = {name: getattr(problem, size) for name, size in _SIZES.items()}
    fields = {name: str(size) for name, size in sizes.items() if size is not None}
    if table == "a8w8":
        fields[_TYPE] = "torch.int8" if problem.dtype == "int8" else "torch.float8_e4m3fn"
    stated = problem_of_table(table, {name: value if name == _TYPE else int(value) for name, value in fields.items()})
    return fields if stated == problem else None
