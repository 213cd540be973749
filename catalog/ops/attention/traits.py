"""The traits of attention kernels, each defined once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from catalog.ops.protocol import Extension
from catalog.ops.protocol import Family as AddedFamily
from catalog.schema.traits import Count, OpenWord, TraitModel, Traits, Word, trait


class Family(OpenWord, group="catalog.attention.families", kind=AddedFamily):
    """The nine kernel families of CK Tile's FMHA."""

    FWD = "fwd"
    FWD_SPLITKV = "fwd_splitkv"
    FWD_SPLITKV_COMBINE = "fwd_splitkv_combine"
    FWD_PAGEDKV = "fwd_pagedkv"
    FWD_APPENDKV = "fwd_appendkv"
    BATCH_PREFILL = "batch_prefill"
    BWD_DOT_DO_O = "bwd_dot_do_o"
    BWD_DQ_DK_DV = "bwd_dq_dk_dv"
    BWD_CONVERT_DQ = "bwd_convert_dq"


class Dtype(Word):
    """Element type of Q, K, V and O, unless the name says otherwise.

    fp8bf16 is fp8 in, bf16 out; with bf16kvfp8, K and V alone are fp8, those of a cache, and Q and O are bf16.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    BF8 = "bf8"
    FP8FP16 = "fp8fp16"
    FP8BF16 = "fp8bf16"
    FP8FP32 = "fp8fp32"
    FP16KVFP8 = "fp16kvfp8"
    BF16KVFP8 = "bf16kvfp8"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"


class Mode(Word):
    """How sequences are stored."""

    BATCH = "batch"
    GROUP = "group"


class VLayout(Word):
    """Which axis of V is contiguous: the head dim (row) or the sequence (col)."""

    ROW = "row"
    COL = "col"


class Mask(Word):
    """Mask that a kernel is compiled for; `mask` occurs only with mask_impl simplified."""

    NO = "no"
    CAUSAL = "causal"
    GENERIC = "generic"
    MASK = "mask"


class Bias(Word):
    """Term added to the scores."""

    NO = "no"
    BIAS = "bias"
    ALIBI = "alibi"


class Qscale(Word):
    """Granularity of the scales of quantised Q, K, V."""

    NO = "no"
    PERTENSOR = "pertensor"
    BLOCKSCALE = "blockscale"
    KV_BLOCKSCALE = "kv_blockscale"
    MX = "mx"


class Rope(Word):
    """Rotary position embedding applied to Q and K."""

    NO = "no"
    INTER = "inter"
    HALF = "half"


class KvMemoryLayout(Word):
    """Order of the elements inside a page of the KV cache."""

    NO = "no"
    LINEAR = "linear"
    VECTORIZED = "vectorized"


class KvLookupTable(Word):
    """Form of the table that finds a sequence's pages."""

    NO = "no"
    VLLM = "vllm"
    SGLANG = "sglang"


class KvLoadMode(Word):
    """Instruction that reads the KV cache: buffer loads address 2 GB, global loads any size."""

    NO = "no"
    BLOAD = "bload"
    GLOAD = "gload"


class DropoutVariant(Word):
    """Warp tile for which the backward dropout draws its random numbers."""

    NO = "no"
    WG16 = "wg16"
    WG32 = "wg32"


class Pipeline(OpenWord, group="catalog.attention.pipelines", kind=Extension):
    """Main loop of the kernel."""

    NO = "no"
    QR = "qr"
    QR_ASYNC = "qr_async"
    QR_ASYNC_TRLOAD = "qr_async_trload"
    QR_ASYNC_TRLOAD_V3 = "qr_async_trload_v3"
    QR_HPAD = "qr_hpad"
    QR_NWARP_SSHUFFLE = "qr_nwarp_sshuffle"
    QR_PAGEDKV = "qr_pagedkv"
    QS = "qs"
    UNUSED = "unused"
    KR_KTR_VR = "kr_ktr_vr"
    KR_KTR_VR_IGLP = "kr_ktr_vr_iglp"
    HOST_PANEL = "host_panel"
    HOST_BF16 = "host_bf16"
    HOST_AMX = "host_amx"
    SM90_LATENT = "sm90_latent"
    SM90_LATENT_WHOLE = "sm90_latent_whole"
    SM90_MMA = "sm90_mma"
    SM90_STREAM = "sm90_stream"
    SM90_WGMMA = "sm90_wgmma"
    SM90_WHOLE = "sm90_whole"


Pad = Literal[0, 1, 8]
PageSize = Annotated[int, Field(ge=0)]


class Signature(TraitModel):
    """What a kernel computes."""

    family: Family = Field(description="kernel family")
    dtype: Dtype = Field(description="element type of Q, K, V and O, unless the name adds another: fp8bf16, bf16kvfp8")
    mode: Mode = trait(Mode.BATCH, "batch: equal lengths, dense tensors; group: ragged sequences, packed tokens")
    vlayout: VLayout = trait(VLayout.ROW, "contiguous axis of V: row = head dim, col = sequence")
    hdim_q: Count = Field(description="head dim of Q and K that the kernel is compiled for")
    hdim_v: Count = Field(description="head dim of V and O that the kernel is compiled for")
    mask: Mask = trait(Mask.NO, "mask that the kernel is compiled for")
    bias: Bias = trait(Bias.NO, "term added to the scores: nothing, a tensor, ALiBi slopes")
    lse: bool = trait(False, "stores the log-sum-exp of every row")
    dropout: bool = trait(False, "drops attention weights at random")
    logits: bool = trait(False, "caps the logits softly (tanh)")
    sink: bool = trait(False, "the first tokens stay visible under a window (attention sink)")
    skip_min_seqlen_q: bool = trait(False, "skips sequences whose seqlen_q is below a run-time minimum")
    qscale: Qscale = trait(Qscale.NO, "granularity of the quantisation scales")
    rope: Rope = trait(Rope.NO, "rotary embedding: interleaved or half-rotated pairs")
    paged_kv: bool = trait(False, "K and V lie in pages found through a table")
    page_size: PageSize = trait(0, "tokens of one page; 0: not fixed at compile time")
    kv_memory_layout: KvMemoryLayout = trait(KvMemoryLayout.NO, "order of the elements inside a page")
    kv_lookup_table: KvLookupTable = trait(KvLookupTable.NO, "form of the page table")
    dbias: bool = trait(False, "computes the gradient of the bias")
    dropout_variant: DropoutVariant = trait(DropoutVariant.NO, "warp tile of the backward dropout")
    store_randval: bool = trait(False, "stores the random numbers of the dropout")
    deterministic: bool = trait(False, "sums dQ in a fixed order: bitwise equal results")
    block_mask: bool = trait(False, "attends only to the blocks of queries and keys that a bitmap names")


class Algorithm(TraitModel):
    """How a kernel computes it. Extents are in elements; 0 if the family has no such extent."""

    pipeline: Pipeline = trait(Pipeline.NO, "main loop")
    tile_m0: Count = trait(0, "block tile: query rows")
    tile_n0: Count = trait(0, "block tile: keys")
    tile_k0: Count = trait(0, "block tile: unroll over the head dim in Q K^T")
    tile_n1: Count = trait(0, "block tile: columns of O (backward: unroll of P^T dO)")
    tile_k1: Count = trait(0, "block tile: unroll over the keys in P V (backward: unroll of dO V^T)")
    tile_k0max: Count = trait(0, "block tile: whole head dim of Q (backward: unroll of dS^T Q)")
    tile_bwd6: Count = trait(0, "backward block tile: unroll of dS K")
    tile_bwd7: Count = trait(0, "backward block tile: head dim of Q")
    tile_bwd8: Count = trait(0, "backward block tile: head dim of V")
    wave_m0: Count = trait(0, "warps of a block along M in the first GEMM (CK's r…x…x…)")
    wave_n0: Count = trait(0, "warps of a block along N in the first GEMM")
    wave_k0: Count = trait(0, "warps of a block along K in the first GEMM")
    wave_m1: Count = trait(0, "warps of a block along M in the second GEMM")
    wave_n1: Count = trait(0, "warps of a block along N in the second GEMM")
    wave_k1: Count = trait(0, "warps of a block along K in the second GEMM")
    wave_m2: Count = trait(0, "warps of a block along M in the third GEMM (backward: dQ)")
    wave_n2: Count = trait(0, "warps of a block along N in the third GEMM")
    wave_k2: Count = trait(0, "warps of a block along K in the third GEMM")
    warp_m0: Count = trait(0, "warp tile, rows, first GEMM (CK's w…x…x…; host: register block)")
    warp_n0: Count = trait(0, "warp tile, columns, first GEMM")
    warp_k0: Count = trait(0, "warp tile, depth, first GEMM")
    warp_m1: Count = trait(0, "warp tile, rows, second GEMM")
    warp_n1: Count = trait(0, "warp tile, columns, second GEMM")
    warp_k1: Count = trait(0, "warp tile, depth, second GEMM")
    warp_m2: Count = trait(0, "warp tile, rows, third GEMM (backward: dQ)")
    warp_n2: Count = trait(0, "warp tile, columns, third GEMM")
    warp_k2: Count = trait(0, "warp tile, depth, third GEMM")
    pad_s: Pad = trait(0, "padding of seqlen_q: 0 = it must be a multiple of the tile")
    pad_sk: Pad = trait(0, "padding of seqlen_k")
    pad_d: Pad = trait(0, "padding of hdim_q; 8 = it must be a multiple of 8")
    pad_dv: Pad = trait(0, "padding of hdim_v; 8 = it must be a multiple of 8")
    block_per_cu: Annotated[int, Field(ge=-1)] = trait(-1, "blocks per compute unit; -1: the pipeline decides")
    max_seq_q: Count = trait(0, "longest seqlen_q that the kernel takes; 0: any")
    trload: bool = trait(False, "loads through the transposing LDS read of gfx950")
    kv_load_mode: KvLoadMode = trait(KvLoadMode.NO, "instruction that reads a paged KV cache")
    tile_tag: str = trait("", "label that distinguishes tiles of equal extents")
    num_stages: Count = trait(0, "tiles of K and V in shared memory at a time; 0: the pipeline decides")


TRAITS = Traits(
    Signature,
    Algorithm,
    variant="mask_impl",
    later=("num_stages", "block_mask"),
    spelled={"num_stages": "stages"},
)
"""Every trait of attention by name."""
