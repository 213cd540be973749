"""The argument struct of a problem, on whatever device its tensors are."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from catalog.runtime.devices.abi import ABI_VERSION, TENSORS, CatalogArgs
from catalog.runtime.elements import numpy_dtype
from catalog.runtime.tensors import element_strides
from catalog.schema.problem import Problem
from catalog.schema.problem_form import Form

if TYPE_CHECKING:
    Starts = array[int]

TENSOR, POINTER = struct.Struct("@Pqqqq"), struct.Struct("@P")
OFFSETS: Mapping[str, int] = MappingProxyType(
    {name: getattr(CatalogArgs, name).offset for name in (*TENSORS, "seqstart_q", "seqstart_k")}
)
"""Where in the struct a tensor begins, with its address, in bytes."""


@dataclass(frozen=True, slots=True)
class Call:
    """A filled argument struct, with what its pointers point to kept alive."""

    args: CatalogArgs
    pointer: Any = field(repr=False)
    kept: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Template:
    """The arguments of a problem but for the tensors' addresses, and where in the struct these go, in bytes.

    ``starts`` are the arrays seqstart_q and seqstart_k of packed sequences, in host memory, as are their addresses.
    """

    args: CatalogArgs
    starts: Mapping[str, Starts]
    offsets: tuple[int, ...]

    def fill(
        self,
        addresses: Iterable[int],
        workspace: Iterable[tuple[str, int, tuple[int, int, int, int]]],
        starts: Mapping[str, int],
    ) -> CatalogArgs:
        """A copy with the addresses of the tensors, in the template's order.

        ``workspace`` has the place in the struct, the address and the strides in elements of each partial result;
        ``starts`` the addresses of copies of the arrays ``starts``, where the kernel cannot read the host's.
        """
        args = CatalogArgs.from_buffer_copy(self.args)
        for offset, address in zip(self.offsets, addresses, strict=True):
            POINTER.pack_into(args, offset, address)
        for slot, address, strides in workspace:
            TENSOR.pack_into(args, OFFSETS[slot], address, *strides)
        for name, address in starts.items():
            POINTER.pack_into(args, OFFSETS[name], address)
        return args


def first_tokens(q: tuple[int, ...] | None, k: tuple[int, ...] | None) -> dict[str, Starts]:
    """The arrays seqstart_q and seqstart_k of packed sequences of these lengths, by name; of others none."""
    if q is None:
        return {}
    of_q = array("i", accumulate(q, initial=0))
    if k is None:
        return {"seqstart_q": of_q}
    return {"seqstart_q": of_q, "seqstart_k": of_q if k is q else array("i", accumulate(k, initial=0))}


def resize(args: CatalogArgs, extents: Mapping[str, int]) -> None:
    """Give the arguments of a problem of some form the sizes of another, by its extents; not the tensors'."""
    args.batch, args.seqlen_q, args.seqlen_k = extents["batch"], extents["seqlen_q"], extents["seqlen_k"]
    args.tokens_q = extents["tokens_q"]
    if "num_pages" in extents:
        args.num_pages, args.pages_per_sequence = extents["num_pages"], extents["pages_per_sequence"]


def without_tensors(problem: Problem) -> CatalogArgs:
    """The arguments of a problem but for all that is about its tensors."""
    args = CatalogArgs.from_buffer_copy(_without_sizes(problem.form))
    resize(args, problem.extents)
    return args


@lru_cache(maxsize=1024)
def _without_sizes(form: Form) -> CatalogArgs:
    problem = form.blank
    return CatalogArgs(
        struct_bytes=ctypes.sizeof(CatalogArgs),
        abi_version=ABI_VERSION,
        nhead_q=problem.nhead_q,
        nhead_k=problem.nhead_k,
        hdim_q=problem.hdim_q,
        hdim_v=problem.hdim_v,
        window_left=problem.window_left,
        window_right=problem.window_right,
        sink_size=problem.sink_size,
        min_seqlen_q=problem.min_seqlen_q,
        page_size=problem.page_size,
        seqlen_new=problem.seqlen_new or 0,
        rotary_dim=problem.rotary_dim or 0,
        block_scale_size_q=problem.block_scale_size_q,
        block_scale_size_kv=problem.block_scale_size_kv,
        mask_corner=problem.mask_corner,
        scale=problem.softmax_scale,
        logits_soft_cap=problem.logits_soft_cap or 0,
        p_drop=problem.dropout,
    )


@lru_cache(maxsize=1024)
def template(problem: Problem, layout: tuple[tuple[str, tuple[int, ...]], ...]) -> Template:
    """The arguments for tensors with these names and strides, in bytes."""
    starts, args = first_tokens(problem.seqlens_q, problem.seqlens_k), without_tensors(problem)
    for name, tokens in starts.items():
        POINTER.pack_into(args, OFFSETS[name], tokens.buffer_info()[0])
    offsets = []
    for name, strides in layout:
        tensor = problem.tensors[name]
        offsets.append(OFFSETS[tensor.slot])
        TENSOR.pack_into(
            args, offsets[-1], 0, *element_strides(tensor, strides, numpy_dtype(tensor.element).itemsize), 0
        )
    return Template(args, starts, tuple(offsets))
