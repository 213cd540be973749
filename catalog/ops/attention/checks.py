"""Checks that the fields of a problem are consistent: each raises an error that names both fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from catalog.errors import ProblemError
from catalog.ops.attention.fields import (
    ELEMENTS,
    OP_FIELDS,
    QSCALES,
    QUANTISED,
    VECTOR_BYTES,
)
from catalog.ops.attention.traits import Bias, KvMemoryLayout, Mode, Qscale, Rope
from catalog.schema.problem import MAX_SIZE
from catalog.schema.problem_tensors import bytes_of_element

if TYPE_CHECKING:
    from catalog.ops.attention.problem import Problem

_OF_SOME_OPS = frozenset().union(*OP_FIELDS.values())


def check_relevance(problem: Problem) -> None:
    """Check that every stated field applies to the operation.

    Raises:
        ProblemError: one does not apply.
    """
    fields = type(problem).model_fields
    for name in fields:
        value = getattr(problem, name)
        if name in _OF_SOME_OPS and name not in OP_FIELDS[problem.op] and value != fields[name].default:
            ops = [op for op, names in OP_FIELDS.items() if name in names]
            raise ProblemError(
                f"{name}={value!s} does not apply to op={problem.op!r}", hint=f"Ops that take {name}: {', '.join(ops)}."
            )


def check_lengths(problem: Problem) -> None:
    """Check that the sizes agree with each other.

    Raises:
        ProblemError: they do not.
    """
    if problem.nhead_q % problem.nhead_k:
        raise ProblemError(f"nhead_k={problem.nhead_k}: must divide nhead_q={problem.nhead_q}")
    if problem.seqlens_q is None:
        if problem.seqlens_k is not None:
            raise ProblemError("seqlens_k is given without seqlens_q: group mode needs seqlens_q")
        return
    if problem.page_size and problem.seqlens_k is not None:
        raise ProblemError(
            "seqlens_k cannot be combined with a paged cache, whose lengths are a tensor of the run",
            hint="State seqlen_k, the longest sequence that fits into the page table.",
        )
    _check_packed(problem, "q", problem.seqlens_q)
    if problem.seqlens_k is not None:
        if len(problem.seqlens_k) != len(problem.seqlens_q):
            raise ProblemError(
                f"seqlens_k has {len(problem.seqlens_k)} sequences: "
                f"must have as many as seqlens_q, {len(problem.seqlens_q)}"
            )
        _check_packed(problem, "k", problem.seqlens_k)
    if problem.layout != "bhsd":
        raise ProblemError(
            f"layout={problem.layout!r} does not apply to packed sequences, which are (tokens, nhead, hdim)",
            hint="Leave layout out.",
        )


def _check_packed(problem: Problem, axis: str, lengths: tuple[int, ...]) -> None:
    source, longest = f"seqlens_{axis}", f"seqlen_{axis}"
    for name, implied in (("batch", len(lengths)), (longest, max(lengths, default=0))):
        if getattr(problem, name) != implied:
            raise ProblemError(
                f"{name}={getattr(problem, name)} contradicts {source}, which makes it {implied}",
                hint=f"Leave {name} out.",
            )
    if sum(lengths) > MAX_SIZE:
        raise ProblemError(f"{source} adds up to {sum(lengths)} tokens: at most {MAX_SIZE}")


def check_features(problem: Problem) -> None:
    """Check that features have what they require.

    Raises:
        ProblemError: a feature lacks something; the message says what.
    """
    _check_operation(problem)
    _check_quantisation(problem)
    _check_block_mask(problem)
    if problem.bias is Bias.ALIBI and problem.bias_dims == "11":
        raise ProblemError("bias_dims='11' cannot be combined with bias='alibi': slopes are 1h or bh")
    if problem.dbias and problem.bias is not Bias.BIAS:
        raise ProblemError("dbias needs bias='bias': no other bias has a gradient")
    if problem.randval and not problem.dropout:
        raise ProblemError("randval needs dropout: without it there are no random numbers")
    if problem.min_seqlen_q and problem.mode is Mode.BATCH:
        raise ProblemError("min_seqlen_q needs group mode, seqlens_q: sequences of a batch have equal lengths")


def _check_operation(problem: Problem) -> None:
    if problem.op in ("pagedkv", "batch_prefill") and not problem.page_size:
        raise ProblemError(f"op={problem.op!r} needs page_size, the number of tokens in a page of the cache")
    if problem.num_pages is not None and not problem.page_size:
        raise ProblemError("num_pages needs page_size, the number of tokens in a page of the cache")
    if problem.op == "batch_prefill":
        if problem.mode is Mode.BATCH:
            raise ProblemError("op='batch_prefill' needs seqlens_q: its queries are packed")
        _check_vectors(problem)
    if problem.op == "appendkv":
        _check_append(problem)


def _check_block_mask(problem: Problem) -> None:
    covered = {"block_mask_q": "queries", "block_mask_kv": "keys"}
    stated = {name: size for name in covered if (size := getattr(problem, name))}
    if not stated:
        return
    for name, tokens in covered.items():
        if name not in stated:
            [(other, size)] = stated.items()
            raise ProblemError(f"{other}={size} needs {name}, the {tokens} that an entry of the block mask covers")
    if problem.mode is Mode.GROUP:
        raise ProblemError(
            f"block_mask_q={problem.block_mask_q} cannot be combined with packed sequences, seqlens_q: "
            "a block mask has as many blocks for every sequence",
            hint="State batch, seqlen_q and seqlen_k; the tensors seqlens_q and seqlens_k may limit their tokens.",
        )


def _check_vectors(problem: Problem) -> None:
    """Check the vectorized layout, which keeps 16 bytes together: keys along the head dim, values along tokens."""
    if problem.kv_memory_layout is not KvMemoryLayout.VECTORIZED:
        return
    vector = VECTOR_BYTES // bytes_of_element(ELEMENTS[problem.dtype].kv)
    for name in ("hdim_q", "page_size"):
        if getattr(problem, name) % vector:
            raise ProblemError(
                f"{name}={getattr(problem, name)} cannot be combined with kv_memory_layout='vectorized': "
                f"must be a multiple of {vector}, the {problem.dtype} elements of {VECTOR_BYTES} bytes"
            )


def _check_append(problem: Problem) -> None:
    if problem.mode is Mode.GROUP:
        raise ProblemError("seqlens_q cannot be combined with op='appendkv': state batch and seqlen_q")
    if problem.seqlen_new is None:
        raise ProblemError("op='appendkv' needs seqlen_new, the tokens that are appended to each sequence")
    for name in ("seqlen_new", "seqlen_q"):
        if min(getattr(problem, name), problem.appended) > problem.seqlen_k:
            raise ProblemError(
                f"{name}={getattr(problem, name)} does not fit into the cache of seqlen_k={problem.seqlen_k} tokens"
            )
    if problem.rotary_dim is not None and problem.rope is Rope.NO:
        raise ProblemError("rotary_dim needs rope: inter or half")
    if problem.rope is not Rope.NO and problem.hdim_q < 2:
        raise ProblemError(f"hdim_q={problem.hdim_q} cannot be combined with rope, which rotates pairs of elements")
    if problem.rotary_dim is not None and (problem.rotary_dim % 2 or problem.rotary_dim > problem.hdim_q):
        raise ProblemError(f"rotary_dim={problem.rotary_dim}: must be even and at most hdim_q={problem.hdim_q}")


def _check_quantisation(problem: Problem) -> None:
    if problem.dtype in QUANTISED and problem.op == "bwd":
        raise ProblemError(f"dtype={str(problem.dtype)!r} does not apply to op='bwd': there is no quantised backward")
    if problem.qscale is Qscale.NO:
        return
    if problem.dtype not in QUANTISED:
        raise ProblemError(
            f"qscale={str(problem.qscale)!r} cannot be combined with dtype={str(problem.dtype)!r}",
            hint=f"Dtypes with scales: {', '.join(sorted(map(str, QUANTISED)))}.",
        )
    if problem.qscale not in QSCALES[problem.op]:
        allowed = ", ".join(str(scale) for scale in Qscale if scale in QSCALES[problem.op])
        raise ProblemError(f"qscale={str(problem.qscale)!r} does not apply to op={problem.op!r}: allowed: {allowed}")
