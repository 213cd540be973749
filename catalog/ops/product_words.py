"""The values of traits that GEMM and convolution share, in upstream's words.

Source: CK, dispatcher/include/ck_tile/dispatcher/kernel_key.hpp and dispatcher/codegen/unified_grouped_conv_codegen.py.
"""

from __future__ import annotations

from catalog.schema.traits import Word


class Dtype(Word):
    """Element type by which upstream names kernels: that of the operands."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    BF8 = "bf8"
    INT8 = "int8"


class Element(Word):
    """Element type of one tensor."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    BF8 = "bf8"
    INT8 = "int8"
    INT32 = "int32"


class Scheduler(Word):
    """Order in which the main loop issues loads and matrix instructions."""

    INTRAWAVE = "intrawave"
    INTERWAVE = "interwave"
    DEFAULT = "default"


class Epilogue(Word):
    """How the result leaves the registers: through LDS, or directly."""

    CSHUFFLE = "cshuffle"
    DEFAULT = "default"
