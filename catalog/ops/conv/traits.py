"""The traits of convolution kernels, each defined once, in upstream's words.

Source: CK, dispatcher/codegen/unified_grouped_conv_codegen.py, and tile_engine/ops/grouped_conv.
"""

from __future__ import annotations

from catalog.ops.product_words import Dtype, Element, Epilogue, Scheduler
from catalog.ops.protocol import Extension
from catalog.ops.protocol import Family as AddedFamily
from catalog.schema.traits import Count, OpenWord, TraitModel, Traits, Word, trait


class Family(OpenWord, group="catalog.conv.families", kind=AddedFamily):
    """The kinds of convolution kernels: a product for each direction, and upstream's direct depthwise kernels."""

    FORWARD = "forward"
    BWD_DATA = "bwd_data"
    BWD_WEIGHT = "bwd_weight"
    DEPTHWISE = "depthwise"


class Direction(Word):
    """The tensor that is computed: the output, the gradient of the input, or that of the weight."""

    FORWARD = "forward"
    BWD_DATA = "bwd_data"
    BWD_WEIGHT = "bwd_weight"


class Layout(Word):
    """Whether channels are the last axis of images and weights, or come before the extents of an image.

    Kernels of any number of axes have the first two words; upstream's configurations for 3D use the others.
    """

    NHWGC = "nhwgc"
    NGCHW = "ngchw"
    NDHWGC = "ndhwgc"
    NGCDHW = "ngcdhw"


class Elementwise(Word):
    """Function applied to the elements of the result."""

    PASS_THROUGH = "PassThrough"  # noqa: S105 - not a password


class Specialization(Word):
    """Problems that the kernel is compiled for."""

    DEFAULT = "default"
    POINTWISE = "filter1x1_pad0"
    DENSE = "filter1x1_stride1_pad0"
    THREE = "filter3x3"


class Pipeline(OpenWord, group="catalog.conv.pipelines", kind=Extension):
    """Main loop of the kernel; the dispatcher calls basic_v1 compv1. Those of CPUs and of NVIDIA GPUs are
    our own.
    """

    BASIC_V1 = "basic_v1"
    BASIC_ASYNC_V1 = "basic_async_v1"
    MEM = "mem"
    COMPV1 = "compv1"
    COMPV3 = "compv3"
    COMPV4 = "compv4"
    COMPV5 = "compv5"
    COMPV6 = "compv6"
    COMP_ASYNC = "comp_async"
    WAVELET = "wavelet"
    DEPTHWISE = "depthwise"
    HOST_AMX = "host_amx"
    HOST_PANEL = "host_panel"
    HOST_DIRECT = "host_direct"
    HOST_DEPTHWISE = "host_depthwise"
    HOST_DEPTHWISE_DOT = "host_depthwise_dot"
    HOST_GROUPS_AMX = "host_groups_amx"
    HOST_LINES_AMX = "host_lines_amx"
    HOST_PADDED = "host_padded"
    HOST_PADDED_DOT = "host_padded_dot"
    HOST_PIXELS = "host_pixels"
    HOST_SCATTER = "host_scatter"
    HOST_SCATTER_AMX = "host_scatter_amx"
    HOST_SHIFT_AMX = "host_shift_amx"
    HOST_TWO_ROWS = "host_two_rows"
    HOST_TWO_ROWS_DOT = "host_two_rows_dot"
    HOST_WINOGRAD = "host_winograd"
    SM90_WGMMA = "sm90_wgmma"
    SM90_HALO = "sm90_halo"
    SM90_NARROW = "sm90_narrow"


NARROW = (
    *(Pipeline.HOST_DIRECT, Pipeline.HOST_DEPTHWISE, Pipeline.HOST_DEPTHWISE_DOT, Pipeline.HOST_PADDED),
    *(Pipeline.HOST_PADDED_DOT, Pipeline.HOST_PIXELS, Pipeline.HOST_TWO_ROWS, Pipeline.HOST_TWO_ROWS_DOT),
)
"""Pipelines of CPUs for narrow groups."""


class Reduction(Word):
    """Stream-K: how the parts of a tile that several blocks computed are added."""

    NO = "no"
    LINEAR = "linear"
    TREE = "tree"


class Signature(TraitModel):
    """What a kernel computes."""

    family: Family = trait(..., "kernel family")
    direction: Direction = trait(..., "tensor that is computed: output, or gradient of input or weight")
    ndim: Count = trait(2, "spatial axes: 1 to 3")
    dtype: Dtype = trait(..., "element type that names the kernel: that of input and weight")
    layout: Layout = trait(Layout.NHWGC, "whether channels come last (nhwgc) or before the extents (ngchw)")
    dtype_in: Element = trait(..., "element type of the input")
    dtype_weight: Element = trait(..., "element type of the weight")
    dtype_out: Element = trait(..., "element type of the output")
    dtype_acc: Element = trait(Element.FP32, "element type of the accumulator")
    elementwise: Elementwise = trait(Elementwise.PASS_THROUGH, "function applied to the result")
    specialization: Specialization = trait(Specialization.DEFAULT, "problems that the kernel is compiled for")
    filter_size: Count = trait(0, "depthwise kernels: height and width of the filter; 0: any")
    stride_h: Count = trait(0, "depthwise kernels: stride along the height; 0: any")
    stride_w: Count = trait(0, "depthwise kernels: stride along the width; 0: any")
    pad_h: Count = trait(0, "depthwise kernels: padding of the height")
    pad_w: Count = trait(0, "depthwise kernels: padding of the width")


class Algorithm(TraitModel):
    """How a kernel computes it. Extents are in elements; M, N and K are those of the product."""

    pipeline: Pipeline = trait(Pipeline.COMPV3, "main loop")
    scheduler: Scheduler = trait(Scheduler.INTRAWAVE, "order of loads and matrix instructions")
    epilogue: Epilogue = trait(Epilogue.CSHUFFLE, "how the result leaves the registers")
    tile_m: Count = trait(0, "block tile: rows of the result")
    tile_n: Count = trait(0, "block tile: columns of the result")
    tile_k: Count = trait(0, "block tile: depth of a step of the main loop")
    wave_m: Count = trait(0, "waves of a block along M")
    wave_n: Count = trait(0, "waves of a block along N")
    wave_k: Count = trait(0, "waves of a block along K")
    warp_tile_m: Count = trait(0, "matrix instruction: rows; on CPUs, register tile")
    warp_tile_n: Count = trait(0, "matrix instruction: columns; on CPUs, register tile")
    warp_tile_k: Count = trait(0, "matrix instruction: depth")
    vector_a: Count = trait(1, "elements that a load of A reads at once")
    vector_b: Count = trait(1, "elements that a load of B reads at once")
    vector_c: Count = trait(1, "elements that a store of the result writes at once")
    double_buffer: bool = trait(False, "LDS holds two tiles: one is loaded while the other is multiplied")
    num_groups_to_merge: Count = trait(1, "groups of the convolution that one product computes")
    two_stage: bool = trait(False, "backward weight: sums in fp32 in a workspace, which a second kernel converts")
    explicit_gemm: bool = trait(False, "backward weight of a 1x1 filter as a plain product")
    split_image: bool = trait(False, "large images are computed in parts")
    reduction: Reduction = trait(Reduction.NO, "stream-K: how parts of a tile are added")
    persistent: bool = trait(False, "stream-K: blocks stay on their compute unit")
    num_wave_groups: Count = trait(1, "groups of waves that take turns in the main loop")
    block_per_cu: Count = trait(1, "blocks per compute unit that the kernel is compiled for")
    pad_m: bool = trait(True, "M need not be a multiple of the tile")
    pad_n: bool = trait(True, "N need not be a multiple of the tile")
    pad_k: bool = trait(True, "K need not be a multiple of the tile")
    tile_h: Count = trait(0, "depthwise kernels: height of the part of an image that a block computes")
    tile_w: Count = trait(0, "depthwise kernels: width of that part")
    subtile_h: Count = trait(0, "depthwise kernels: height of what a lane computes")
    subtile_w: Count = trait(0, "depthwise kernels: width of what a lane computes")
    images: Count = trait(0, "depthwise kernels: images that a block computes")


TRAITS = Traits(Signature, Algorithm)
"""Every trait of convolution by name."""
