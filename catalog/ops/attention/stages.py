"""The kernels that answer an operation, in order, and the traits that a problem requires of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from catalog.ops.attention.fields import Op
from catalog.ops.attention.kernel import AttentionKernel
from catalog.ops.attention.names import GRAMMARS, stated_traits
from catalog.ops.attention.traits import TRAITS, Family, KvLookupTable, KvMemoryLayout, Mask, Pipeline

if TYPE_CHECKING:
    from catalog.ops.attention.problem import Problem
    from catalog.schema.kernel import Kernel
    from catalog.schema.lineage import Lineage

STAGES: Mapping[Op, tuple[Family, ...]] = MappingProxyType(
    {
        "fwd": (Family.FWD,),
        "splitkv": (Family.FWD_SPLITKV, Family.FWD_SPLITKV_COMBINE),
        "pagedkv": (Family.FWD_PAGEDKV,),
        "appendkv": (Family.FWD_APPENDKV,),
        "batch_prefill": (Family.BATCH_PREFILL,),
        "bwd": (Family.BWD_DOT_DO_O, Family.BWD_DQ_DK_DV, Family.BWD_CONVERT_DQ),
    }
)
"""Families of the kernels that run for each operation, in order; see :func:`stages_of`."""

MAIN_STAGE: Mapping[Op, Family] = MappingProxyType(
    {op: families[0] for op, families in STAGES.items()} | {"bwd": Family.BWD_DQ_DK_DV}
)
"""The stage that does most of the work of each operation."""


_WHOLE = frozenset({Pipeline.SM90_LATENT_WHOLE, Pipeline.SM90_WHOLE})
"""Pipelines that leave the keys whole."""

_WITHOUT_COMBINE = _WHOLE | {Pipeline.SM90_STREAM}


def stages_of(op: Op, main: Kernel) -> tuple[Family, ...]:
    """The stages of a plan whose main kernel is ``main``.

    A backward kernel for short queries processes all of them at once and writes dQ itself, so no conversion follows.
    A split-KV kernel that leaves the keys whole has no parts to combine, and one whose blocks share all keys evenly
    combines its parts itself.
    """
    spared = set()
    if main.algorithm.max_seq_q:
        spared.add(Family.BWD_CONVERT_DQ)
    if main.algorithm.pipeline in _WITHOUT_COMBINE:
        spared.add(Family.FWD_SPLITKV_COMBINE)
    return tuple(family for family in STAGES[op] if family not in spared)


WORKSPACES = ("o_acc", "lse_acc", "delta", "dq_acc")
"""What stages pass to each other: partial O and LSE of the splits, the row sums of dO * O, partial dQ."""

_WORKSPACES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        Family.FWD_SPLITKV: ("o_acc", "lse_acc"),
        Family.FWD_SPLITKV_COMBINE: ("o_acc", "lse_acc"),
        Family.BWD_DOT_DO_O: ("delta",),
        Family.BWD_DQ_DK_DV: ("delta", "dq_acc"),
        Family.BWD_CONVERT_DQ: ("dq_acc",),
    }
)


def workspaces_of(kernel: Kernel) -> tuple[str, ...]:
    """The :data:`WORKSPACES` that ``kernel`` reads or writes.

    A kernel that writes dQ itself has no partial dQ, and one that leaves the keys whole has no parts.
    """
    used = () if kernel.algorithm.pipeline in _WHOLE else _WORKSPACES.get(kernel.family, ())
    return tuple(name for name in used if name != "dq_acc" or not kernel.algorithm.max_seq_q)


_FIXED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    # The combine kernel weights the splits by their log-sum-exp, whether or not the caller wants it.
    {Family.FWD_SPLITKV: {"lse": True}}
)

# Left out: head dims and page sizes, which may be larger in the kernel than in the problem and are compared by the
# applicability rules; and the warp tile that draws the random numbers of a backward dropout, the kernel's own choice.
REQUIRED_TRAITS = tuple(
    trait.name
    for trait in TRAITS.values()
    if trait.group == "signature" and trait.name not in ("hdim_q", "hdim_v", "page_size", "dropout_variant")
)
"""The traits that a problem requires, in column order."""


def traits_of(problem: Problem) -> dict[str, Any]:
    """The values of all traits for a problem; traits that a family lacks are ignored for it."""
    return {
        "dtype": problem.dtype.value,
        "mode": problem.mode.value,
        "bias": problem.bias.value,
        "lse": problem.lse,
        "dropout": problem.dropout > 0,
        "logits": problem.logits_soft_cap is not None,
        "sink": problem.sink_size > 0,
        "skip_min_seqlen_q": problem.min_seqlen_q > 0,
        "qscale": problem.qscale.value,
        "rope": problem.rope.value,
        "paged_kv": problem.paged,
        "kv_memory_layout": (problem.kv_memory_layout or KvMemoryLayout.NO).value,
        "kv_lookup_table": (problem.kv_lookup_table or KvLookupTable.NO).value,
        "dbias": problem.dbias,
        "store_randval": problem.randval,
        "deterministic": problem.deterministic,
        "block_mask": problem.block_masked,
    }


def required_traits(problem: Problem, family: str, lineage: Lineage) -> dict[str, Any]:
    """The signature that a kernel of ``family`` and ``lineage`` needs to answer ``problem``, without head dims.

    A trait that the family's names neither show nor imply does not exist in the family: its default is required. A
    trait that only the names of a newer revision or of our own kernels show is one that the others lack: requiring it
    matches none of them. A family of another distribution lacks what the family that it stands beside has and its names
    do not state.
    """
    own = family if family in GRAMMARS else MAIN_STAGE[problem.op]
    mask = problem.kernel_mask
    if lineage.variant == "simplified" and mask is not Mask.NO:
        mask = Mask.MASK
    asked = traits_of(problem) | {"mask": mask.value, "family": str(family), **_FIXED.get(own, {})}
    has = stated_traits(own) | AttentionKernel.naming(family, lineage).traits | {"family"}
    return {name: asked[name] if name in has & asked.keys() else TRAITS[name].default for name in REQUIRED_TRAITS}
