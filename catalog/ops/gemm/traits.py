"""The traits of GEMM kernels, each defined once, in upstream's words.

Source: CK, dispatcher/include/ck_tile/dispatcher/kernel_key.hpp, and the configurations of tile_engine/ops/gemm.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from catalog.ops.product_words import Dtype, Element, Epilogue, Scheduler
from catalog.ops.protocol import Extension
from catalog.ops.protocol import Family as AddedFamily
from catalog.schema.traits import Count, OpenWord, TraitModel, Traits, Word, trait


class Family(OpenWord, group="catalog.gemm.families", kind=AddedFamily):
    """The kinds of GEMM kernels; the tile engine and the dispatcher call the first one gemm, universal or standard."""

    UNIVERSAL = "universal"
    MULTI_D = "multi_d"
    MULTI_ABD = "multi_abd"
    PRESHUFFLE = "preshuffle"
    STREAM_K = "stream_k"
    GROUPED = "grouped"
    ROWWISE = "rowwise"
    BLOCKSCALE = "blockscale"
    GROUPED_ROWWISE = "grouped_rowwise"
    GROUPED_BLOCKSCALE = "grouped_blockscale"


class Layout(Word):
    """Layouts of A, B and C, then of the D tensors: r is row-major, c column-major."""

    RCR = "rcr"
    RRR = "rrr"
    CRR = "crr"
    CCR = "ccr"
    RCRR = "rcrr"
    RRRR = "rrrr"
    CRRR = "crrr"
    CCRR = "ccrr"


class Elementwise(Word):
    """Function applied to the elements of an operand, or to those of C and the D tensors together."""

    PASS_THROUGH = "PassThrough"  # noqa: S105 - not a password
    MULTI_D_ADD = "MultiDAdd"
    MULTI_D_MULTIPLY = "MultiDMultiply"


class Pipeline(OpenWord, group="catalog.gemm.pipelines", kind=Extension):
    """Main loop of the kernel; those of CPUs and of NVIDIA GPUs are our own."""

    MEM = "mem"
    COMPV3 = "compv3"
    COMPV4 = "compv4"
    PRESHUFFLEV2 = "preshufflev2"
    HOST_AMX = "host_amx"
    HOST_FEW_COLUMNS = "host_few_columns"
    HOST_PANEL = "host_panel"
    HOST_STREAM = "host_stream"
    SM90_WGMMA = "sm90_wgmma"


class Reduction(Word):
    """How the parts of a tile of C that several blocks computed are added."""

    NO = "no"
    ATOMIC = "atomic"
    LINEAR = "linear"
    TREE = "tree"


class Activation(Word):
    """Function applied to the product, before D tensors are combined with it."""

    NO = "no"
    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"


class Scales(Word):
    """Factors of A and B, which are tensors of the call: none, one for each row of A and column of B, or for blocks.

    A block of A is 1 x 128, a row and a part of K; a block of B is 128 x 128.
    """

    NO = "no"
    ROW = "row"
    BLOCK = "block"


ONE_PRODUCT: Mapping[Scales, Family] = MappingProxyType(
    {Scales.NO: Family.UNIVERSAL, Scales.ROW: Family.ROWWISE, Scales.BLOCK: Family.BLOCKSCALE}
)
"""The families of products without groups and D tensors."""

OF_GROUPS: Mapping[Scales, Family] = MappingProxyType(
    {Scales.NO: Family.GROUPED, Scales.ROW: Family.GROUPED_ROWWISE, Scales.BLOCK: Family.GROUPED_BLOCKSCALE}
)
"""The families of products of groups."""

_SCALES = {family: scales for families in (ONE_PRODUCT, OF_GROUPS) for scales, family in families.items()}


def scales_of(family: str) -> Scales:
    """The scales that kernels of a family take."""
    return _SCALES.get(Family(family), Scales.NO)


class Signature(TraitModel):
    """What a kernel computes."""

    family: Family = trait(..., "kernel family")
    dtype: Dtype = trait(..., "element type that names the kernel: that of A and B")
    layout: Layout = trait(Layout.RCR, "layouts of A, B and C, then of D: r = row-major, c = column-major")
    dtype_a: Element = trait(..., "element type of A")
    dtype_b: Element = trait(..., "element type of B")
    dtype_c: Element = trait(..., "element type of C")
    dtype_acc: Element = trait(Element.FP32, "element type of the accumulator")
    num_a: Count = trait(1, "number of A tensors")
    num_b: Count = trait(1, "number of B tensors")
    num_d: Count = trait(0, "number of D tensors")
    elementwise_a: Elementwise = trait(Elementwise.PASS_THROUGH, "function that combines the A tensors")
    elementwise_b: Elementwise = trait(Elementwise.PASS_THROUGH, "function that combines the B tensors")
    elementwise: Elementwise = trait(Elementwise.PASS_THROUGH, "function that combines the product with the D tensors")
    general: bool = trait(False, "each call states a batch, alpha, beta, a bias and an activation, if it has them")


class Algorithm(TraitModel):
    """How a kernel computes it. Extents are in elements."""

    pipeline: Pipeline = trait(Pipeline.COMPV3, "main loop")
    scheduler: Scheduler = trait(Scheduler.INTRAWAVE, "order of loads and matrix instructions")
    epilogue: Epilogue = trait(Epilogue.CSHUFFLE, "how C leaves the registers")
    tile_m: Count = trait(0, "block tile: rows of C")
    tile_n: Count = trait(0, "block tile: columns of C")
    tile_k: Count = trait(0, "block tile: depth of a step of the main loop")
    wave_m: Count = trait(0, "waves of a block along M (the tile engine's warp_m)")
    wave_n: Count = trait(0, "waves of a block along N (the tile engine's warp_n)")
    wave_k: Count = trait(0, "waves of a block along K (the tile engine's warp_k)")
    warp_tile_m: Count = trait(0, "matrix instruction: rows of C; on CPUs, register tile")
    warp_tile_n: Count = trait(0, "matrix instruction: columns of C; on CPUs, register tile")
    warp_tile_k: Count = trait(0, "matrix instruction: depth")
    pad_m: bool = trait(False, "M need not be a multiple of the tile")
    pad_n: bool = trait(False, "N need not be a multiple of the tile")
    pad_k: bool = trait(False, "K need not be a multiple of the tile")
    persistent: bool = trait(False, "blocks stay on their compute unit and take one tile of C after another")
    double_buffer: bool = trait(False, "LDS holds two tiles: one is loaded while the other is multiplied")
    permute_n: bool = trait(False, "columns of preshuffled B are permuted, so that a lane stores neighbours")
    reduction: Reduction = trait(Reduction.NO, "stream-K: how parts of a tile of C are added")
    num_wave_groups: Count = trait(1, "groups of waves that take turns in the main loop")
    block_per_cu: Count = trait(1, "blocks per compute unit that the kernel is compiled for")
    num_stages: Count = trait(0, "tiles of A and B in shared memory; 0: the pipeline decides")
    cluster_m: Count = trait(1, "blocks of a cluster, one below the other, that load their columns of B once")


TRAITS = Traits(Signature, Algorithm, later=("general", "num_stages", "cluster_m"))
"""Every trait of GEMM by name."""
