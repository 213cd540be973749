"""Lengths and page tables: their values decide where a kernel reads, so they are checked first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catalog.errors import TensorError
from catalog.ops.attention.problem import Problem

Array = NDArray[Any]


def check_indices(problem: Problem, tensors: Mapping[str, Array]) -> None:
    """Check that every length in ``tensors`` fits into its sequence, and every page number into the cache.

    Raises:
        TensorError: a value does not fit; the message says which, and what is allowed.
    """
    for name in ("seqlens_q", "seqlens_k"):
        if name in tensors:
            _within(name, tensors[name], 0, np.array(_room(problem, name), np.int64))
    if tensors.keys() >= {"kv_indptr", "kv_page_indices", "kv_last_page_lens"}:
        _check_sglang(problem, tensors)
    elif tensors.keys() >= {"block_table", "seqlens_k"}:
        used = -(-_stored(problem, tensors).astype(np.int64) // problem.page_size)
        table = tensors["block_table"]
        columns = np.arange(table.shape[1])
        _within("block_table", table[columns < used[:, np.newaxis]], 0, (problem.num_pages or 0) - 1)


def _room(problem: Problem, name: str) -> list[int]:
    """Maximum number of tokens of each sequence."""
    return [lengths[name == "seqlens_k"] - problem.appended for lengths in problem.sequences]


def _stored(problem: Problem, tensors: Mapping[str, Array]) -> Array:
    """Tokens of each sequence that are in the pages when the kernel is done."""
    return tensors["seqlens_k"] + (problem.seqlen_new or 0)


def _within(name: str, values: Array, least: int, most: Array | int) -> None:
    wrong = np.argwhere((values < least) | (values > most))
    if len(wrong):
        index = tuple(int(i) for i in wrong[0])
        bound = int(np.broadcast_to(most, values.shape)[index])
        place = f"[{', '.join(map(str, index))}]" if values.ndim == 1 else ""
        raise TensorError(f"{name}{place} is {int(values[index])}: must be from {least} to {bound}")


def _check_sglang(problem: Problem, tensors: Mapping[str, Array]) -> None:
    starts, indices, last = (tensors[name] for name in ("kv_indptr", "kv_page_indices", "kv_last_page_lens"))
    pages = np.diff(starts.astype(np.int64))
    if starts[0] < 0 or np.any(pages < 0) or starts[-1] > len(indices):
        raise TensorError(
            f"kv_indptr is {starts.tolist()}: must ascend from 0 or more to at most {len(indices)}, "
            "the length of kv_page_indices"
        )
    _within("kv_indptr's page counts", pages, 0, problem.pages_per_sequence)
    _within("kv_page_indices", indices[starts[0] : starts[-1]], 0, (problem.num_pages or 0) - 1)
    filled = pages > 0
    _within("kv_last_page_lens", last[filled], 1, problem.page_size)
    lengths = np.where(filled, (pages - 1) * problem.page_size + last, 0)
    if np.any(lengths > problem.seqlen_k):
        raise TensorError(f"a sequence has {int(lengths.max())} keys: at most seqlen_k={problem.seqlen_k}")
