"""The tensors of attention: those of a problem's form, and the extents in which problems of one form differ."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from catalog.ops.attention.fields import BYTE_ELEMENTS, ELEMENTS, OF_CACHES, VECTOR_BYTES, Op
from catalog.ops.attention.traits import Bias, KvLookupTable, KvMemoryLayout, Mode, Qscale, Rope
from catalog.schema.arguments import Lists
from catalog.schema.problem_tensors import Axis, Role, Strides, TensorForm, bytes_of_element

if TYPE_CHECKING:
    from catalog.ops.attention.problem import Problem
    from catalog.schema.problem_form import Form


def plain_extents(batch: int, seqlen_q: int, seqlen_k: int, tokens_q: int, tokens_k: int) -> dict[str, int]:
    """The extents in which problems without pages, block scales and block masks differ, by name."""
    return {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "tokens_q": tokens_q,
        "tokens_k": tokens_k,
    }


def extents_of(problem: Problem) -> Mapping[str, int]:
    """The extents in which problems of one form differ, by name."""
    extents = plain_extents(problem.batch, problem.seqlen_q, problem.seqlen_k, problem.tokens_q, problem.tokens_k)
    if problem.paged:
        pages = problem.pages_per_sequence
        extents |= {"num_pages": problem.num_pages or 0, "pages_per_sequence": pages, "pages": problem.batch * pages}
        extents["page_starts"] = problem.batch + 1
    if problem.block_masked:
        extents["mask_blocks_q"] = -(-problem.seqlen_q // problem.block_mask_q)
        extents["mask_blocks_kv"] = -(-problem.seqlen_k // problem.block_mask_kv)
    if problem.qscale is Qscale.BLOCKSCALE:
        extents["blocks_q"] = -(-problem.seqlen_q // problem.block_scale_size_q)
        extents["blocks_k"] = -(-problem.seqlen_k // problem.block_scale_size_kv)
    return extents


def first_tokens(q: tuple[int, ...], k: tuple[int, ...] | None) -> Lists:
    """The arrays seqstart_q and, if the keys are packed, seqstart_k, for sequences of these lengths."""
    of_q = array("i", (0, *accumulate(q)))
    of_k = None if k is None else of_q if k is q else array("i", (0, *accumulate(k)))
    return Lists(seqstart_q=of_q, seqstart_k=of_k)


class _Shapes:
    """Builds tensors from the meaning of their axes; uses only the names of the problem's sizes."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.elements = ELEMENTS[problem.dtype]
        self.group = problem.mode is Mode.GROUP

    def rows(self, slot: str, axis: Literal["q", "k", "new"], hdim: int, role: Role = "input") -> TensorForm:
        """(batch, nhead, seqlen, hdim) in the problem's layout, or (tokens, nhead, hdim) for packed sequences."""
        problem = self.problem
        nhead = problem.nhead_q if axis == "q" else problem.nhead_k
        elements = self.elements
        element = elements.o if slot in ("o", "grad_o") else elements.kv if slot in ("k", "v") else elements.q
        if self.group:
            tokens = "tokens_q" if axis == "q" else "tokens_k"
            return TensorForm((tokens, nhead, hdim), element, role, (None, 1, 0), slot)
        seqlen: Axis = problem.seqlen_new or 0 if axis == "new" else f"seqlen_{axis}"
        if problem.layout == "bhsd":
            return TensorForm(("batch", nhead, seqlen, hdim), element, role, (0, 1, 2), slot)
        return TensorForm(("batch", seqlen, nhead, hdim), element, role, (0, 2, 1), slot)

    def cache(self, slot: str, hdim: int, role: Role = "input") -> TensorForm:
        """Pages of tokens if the problem has pages, otherwise as :meth:`rows`."""
        problem = self.problem
        if not problem.paged:
            return self.rows(slot, "k", hdim, role)
        size, nhead, element = problem.page_size, problem.nhead_k, self.elements.kv
        if problem.kv_memory_layout is not KvMemoryLayout.VECTORIZED:
            return TensorForm(("num_pages", size, nhead, hdim), element, role, (0, 2, 1), slot)
        vector = VECTOR_BYTES // bytes_of_element(element)
        inside = (hdim // vector, size, vector) if slot == "k" else (size // vector, hdim, vector)
        return TensorForm(("num_pages", nhead, *inside), element, role, (0, 1, None), slot, contiguous=3)

    def lse(self, role: Role) -> TensorForm:
        """float32, (batch, nhead_q, seqlen_q), or (nhead_q, tokens_q) for packed sequences."""
        problem = self.problem
        if self.group:
            return TensorForm((problem.nhead_q, "tokens_q"), "float32", role, (None, 0, 1), "lse", contiguous=0)
        axes = ("batch", problem.nhead_q, "seqlen_q")
        return TensorForm(axes, "float32", role, (0, 1, 2), "lse", contiguous=0)

    def scores(self, slot: str, element: str, role: Role, dims: str = "bh") -> TensorForm:
        """(batch, nhead_q, seqlen_q, seqlen_k), or (nhead_q, tokens_q, seqlen_k) for packed sequences.

        A 1 in ``dims`` gives that axis one element, shared by all.
        """
        problem = self.problem
        nhead = 1 if dims[1] == "1" else problem.nhead_q
        head_axis = None if dims[1] == "1" else 0
        if self.group:
            return TensorForm((nhead, "tokens_q", "seqlen_k"), element, role, (None, head_axis, 1), slot)
        batch: Axis = 1 if dims[0] == "1" else "batch"
        strides = (None if dims[0] == "1" else 0, None if head_axis is None else 1, 2)
        return TensorForm((batch, nhead, "seqlen_q", "seqlen_k"), element, role, strides, slot)

    def list_of(self, slot: str, element: str, *axes: Axis) -> TensorForm:
        """A dense array; only its first axis, if any, has a stride in the argument struct."""
        strides: Strides = (0, None, None) if len(axes) > 1 else (None, None, None)
        return TensorForm(axes, element, "input", strides, slot)


def _attention(shapes: _Shapes) -> dict[str, TensorForm]:
    problem = shapes.problem
    tensors = {"q": shapes.rows("q", "q", problem.hdim_q)}
    suffix = "_cache" if problem.paged else ""
    tensors["k" + suffix] = shapes.cache("k", problem.hdim_q)
    tensors["v" + suffix] = shapes.cache("v", problem.hdim_v)
    if problem.paged:
        tensors |= _page_table(shapes)
    tensors |= _block_mask(shapes) | _bias(shapes) | _descales(shapes)
    tensors["sink"] = TensorForm((problem.nhead_q,), "float32", "input", (None, 0, None), "sink", 0, optional=True)
    tensors |= _optional(shapes)
    tensors["o"] = shapes.rows("o", "q", problem.hdim_v, "output")
    if problem.lse:
        tensors["lse"] = shapes.lse("output")
    return tensors | _randval(shapes)


def _page_table(shapes: _Shapes) -> dict[str, TensorForm]:
    if shapes.problem.kv_lookup_table is KvLookupTable.SGLANG:
        return {
            "kv_indptr": shapes.list_of("kv_indptr", "int32", "page_starts"),
            "kv_page_indices": replace(shapes.list_of("kv_page_indices", "int32", "pages"), pool=True),
            "kv_last_page_lens": shapes.list_of("kv_last_page_lens", "int32", "batch"),
        }
    return {
        "block_table": shapes.list_of("block_table", "int32", "batch", "pages_per_sequence"),
        "seqlens_k": shapes.list_of("seqlens_k", "int32", "batch"),
    }


def _block_mask(shapes: _Shapes) -> dict[str, TensorForm]:
    """A byte for each block of queries and keys: 0 where it is left out. All strides are free, 0 among them."""
    if not shapes.problem.block_masked:
        return {}
    axes = ("batch", shapes.problem.nhead_q, "mask_blocks_q", "mask_blocks_kv")
    return {"block_mask": TensorForm(axes, "uint8", "input", (0, 1, 2), "block_mask")}


def _bias(shapes: _Shapes) -> dict[str, TensorForm]:
    problem = shapes.problem
    if problem.bias is Bias.BIAS:
        element = "float32" if shapes.elements.q in BYTE_ELEMENTS else shapes.elements.q
        return {"bias": shapes.scores("bias", element, "input", problem.bias_dims)}
    if problem.bias is Bias.ALIBI:
        axes: tuple[Axis, ...] = ("batch" if problem.bias_dims == "bh" else 1, problem.nhead_q)
        strides: Strides = (0 if problem.bias_dims == "bh" else None, 1, None)
        return {"alibi_slopes": TensorForm(axes, "float32", "input", strides, "alibi_slopes", contiguous=0)}
    return {}


def _descales(shapes: _Shapes) -> dict[str, TensorForm]:
    """Factors of Q, K and V, float32: one for each tensor, one for each block of tokens, or one for each page.

    Q has one if it is quantised.
    """
    problem = shapes.problem

    def blocks(axis: Literal["q", "k", "v"]) -> TensorForm:
        slot = f"{axis}_descale"
        one = TensorForm((1,), "float32", "input", (None, None, None), slot)
        if problem.qscale is Qscale.KV_BLOCKSCALE and axis != "q":
            return TensorForm(("num_pages", problem.nhead_k), "float32", "input", (0, 1, None), slot, contiguous=0)
        if problem.qscale is not Qscale.BLOCKSCALE:
            return one
        axes = ("batch", problem.nhead_q, "blocks_q") if axis == "q" else ("batch", problem.nhead_k, "blocks_k")
        return TensorForm(axes, "float32", "input", (0, 1, 2), slot, contiguous=0)

    if problem.qscale is Qscale.NO:
        return {}
    of_q = {} if problem.dtype in OF_CACHES else {"q_descale": blocks("q")}
    return of_q | {"k_descale": blocks("k"), "v_descale": blocks("v")}


def _optional(shapes: _Shapes) -> dict[str, TensorForm]:
    problem = shapes.problem
    tensors = {}
    if problem.dropout:
        tensors["rng_state"] = shapes.list_of("rng_state", "uint64", 2)
    if not problem.paged:
        tensors["seqlens_q"] = shapes.list_of("seqlens_q", "int32", "batch")
        tensors["seqlens_k"] = shapes.list_of("seqlens_k", "int32", "batch")
    return {name: replace(tensor, optional=True) for name, tensor in tensors.items()}


def _randval(shapes: _Shapes) -> dict[str, TensorForm]:
    return {"randval": shapes.scores("randval", "uint8", "output")} if shapes.problem.randval else {}


def _append(shapes: _Shapes) -> dict[str, TensorForm]:
    problem = shapes.problem
    tensors = {
        "q": shapes.rows("q", "q", problem.hdim_q),
        "k_cache": shapes.cache("k", problem.hdim_q, "updated"),
        "v_cache": shapes.cache("v", problem.hdim_v, "updated"),
        "k_new": shapes.rows("k_new", "new", problem.hdim_q),
        "v_new": shapes.rows("v_new", "new", problem.hdim_v),
        "seqlens_k": shapes.list_of("seqlens_k", "int32", "batch"),
    }
    if problem.dtype in OF_CACHES:
        for slot in ("k_descale", "v_descale"):
            tensors[slot] = TensorForm((1,), "float32", "input", (None, None, None), slot, optional=True)
    if problem.paged:
        tensors |= {"block_table": _page_table(shapes)["block_table"]}
    if problem.rope is not Rope.NO:
        for name in ("rotary_cos", "rotary_sin"):
            axes = ("seqlen_k", (problem.rotary_dim or 0) // 2)
            tensors[name] = TensorForm(axes, shapes.elements.q, "input", (None, None, 0), name)
    q_out = replace(shapes.rows("q_out", "q", problem.hdim_q, "output"), result="q")
    return {"q_out": q_out} | tensors


def _backward(shapes: _Shapes) -> dict[str, TensorForm]:
    problem = shapes.problem
    tensors = {
        "q": shapes.rows("q", "q", problem.hdim_q),
        "k": shapes.rows("k", "k", problem.hdim_q),
        "v": shapes.rows("v", "k", problem.hdim_v),
        "o": shapes.rows("o", "q", problem.hdim_v),
        "lse": shapes.lse("input"),
        "do": shapes.rows("grad_o", "q", problem.hdim_v),
    }
    if problem.dlse:
        tensors["dlse"] = replace(shapes.lse("input"), slot="dlse")
    tensors |= _block_mask(shapes) | _bias(shapes) | _optional(shapes)
    tensors |= {
        "dq": shapes.rows("dq", "q", problem.hdim_q, "output"),
        "dk": shapes.rows("dk", "k", problem.hdim_q, "output"),
        "dv": shapes.rows("dv", "k", problem.hdim_v, "output"),
    }
    if problem.dbias:
        tensors["dbias"] = shapes.scores("dbias", shapes.elements.q, "output")
    return tensors | _randval(shapes)


_TENSORS: Mapping[Op, Callable[[_Shapes], dict[str, TensorForm]]] = MappingProxyType(
    {
        "fwd": _attention,
        "splitkv": _attention,
        "pagedkv": _attention,
        "batch_prefill": _attention,
        "appendkv": _append,
        "bwd": _backward,
    }
)


def forms_of(problem: Problem) -> Mapping[str, TensorForm]:
    """Every tensor of problems with the form of ``problem`` by name: inputs in the order of a call, then outputs."""
    return _TENSORS[problem.op](_Shapes(problem))


def traffic_of(problem: Problem) -> int:
    """Minimum bytes of memory traffic of a run: every input read once, every output written once.

    For a cache that is appended to, only the new tokens count.
    """
    tensors = problem.tensors
    total = problem.bytes
    if problem.op == "appendkv":
        total += sum(
            tensors[new].bytes - tensors[cache].bytes for cache, new in (("k_cache", "k_new"), ("v_cache", "v_new"))
        )
    return total


def zeroed_outputs(form: Form, inputs: Collection[str]) -> frozenset[str]:
    """The outputs that kernels do not fill completely, given inputs of these names.

    They do not write rows after the real length of a sequence, skipped sequences, elements of dbias that a mask hides,
    and elements of randval without a key.
    """
    if form.blank.min_seqlen_q > 0 or "seqlens_q" in inputs or "seqlens_k" in inputs:
        return frozenset(form.made)
    return _NEVER_FILLED


_NEVER_FILLED = frozenset({"dbias", "randval"})
