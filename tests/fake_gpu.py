"""A GPU that is none: the fake HIP runtime, kernels that run on the host, and arrays in what it calls its memory."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from conftest import missing
from tiny_project import ARCH

import catalog
from catalog.build.describe import describe
from catalog.build.resources import of_host_build
from catalog.build.targets import Target
from catalog.build.toolchains import find_host_toolchain
from catalog.ops import operation
from catalog.ops.attention.stages import stages_of
from catalog.ops.attention.traits import Family
from catalog.ops.attention.workspace import workspace_of
from catalog.runtime.bound import take

INCLUDE = Path(catalog.__file__).parent / "build" / "abi"
INCLUDES = (f"-I{INCLUDE}", f"-I{operation().headers['kernels']}")
FAKE = Path(__file__).parent / "fake_hip.c"

STAGES = {
    Family.FWD_SPLITKV: "MAIN",
    Family.FWD_SPLITKV_COMBINE: "COMBINE",
    Family.FWD_APPENDKV: "APPEND",
}
"""The stand-in kernel of a family; of all others WHOLE."""

# O is V of the same token, or of the first where O has one. Of split-KV's stages the main one writes that to the last
# split of the workspace, whence the other takes it. Appending writes the first new row to the cache's begin.
KERNEL = r"""
#include <stdlib.h>
#include <string.h>
#include "catalog_abi.h"
enum { WHOLE, MAIN, COMBINE, APPEND };
void* last_stream;
const char* catalog_describe(void) { return DESCRIBED; }
static char* row(catalog_tensor t, int bytes, int64_t split, int64_t b, int64_t h, int64_t token) {
    return (char*)t.data +
           (split * t.stride_split + b * t.stride_batch + h * t.stride_nhead + token * t.stride_seqlen) * bytes;
}
int32_t catalog_workspace_size(const catalog_args* args, catalog_workspace* size) {
    memset(size, 0, sizeof *size);
    size->num_splits = args->num_splits;
    if (STAGE == MAIN || STAGE == COMBINE) {
        size->lse_acc = args->num_splits * args->nhead_q * args->tokens_q * 4;
        size->o_acc = size->lse_acc * args->hdim_v;
    }
    return CATALOG_OK;
}
int32_t catalog_launch(const catalog_args* args, void* stream) {
    if (args->batch < 0 || args->num_threads) return CATALOG_BAD_ARGUMENT;
    last_stream = stream;
    const int64_t batches = args->seqstart_q ? 1 : args->batch, last = args->num_splits - 1;
    const int64_t tokens = args->seqstart_q ? args->seqstart_q[args->batch] : args->seqlen_q;
    const size_t bytes = args->hdim_v * ELEMENT;
    if (STAGE == APPEND) memcpy(args->k.data, args->k_new.data, bytes);
    else
        for (int64_t b = 0; b < batches; b++)
            for (int64_t h = 0; h < args->nhead_q; h++)
                for (int64_t t = 0; t < tokens; t++) {
                    const char* v = row(args->v, ELEMENT, 0, b, h * args->nhead_k / args->nhead_q, t);
                    char* split = row(args->o_acc, 4, last, b, h, t);
                    char* o = row(args->o, ELEMENT, 0, b, h, t);
                    memcpy(STAGE == MAIN ? split : o, STAGE == COMBINE ? split : v, bytes);
                }
    if (STAGE == WHOLE && args->o_acc.data) *((float*)row(args->o_acc, 4, last + 1, 0, 0, 0) - 1) = 1;
    FLAW
    return CATALOG_OK;
}
"""


def kernel_source(described: str, element_bytes: int, stage: str = "WHOLE", flaw: str = "") -> str:
    """C and C++ of KERNEL; ``described`` is the JSON of its row, ``flaw`` what goes wrong at its end."""
    return (
        KERNEL.replace("DESCRIBED", json.dumps(described))
        .replace("ELEMENT", str(element_bytes))
        .replace("STAGE", stage)
        .replace("FLAW", flaw)
    )


def target(described=lambda row: row, flaws=MappingProxyType({})):
    """Builds the stand-in kernels of rows; ``described`` changes what a library says of its row.

    ``flaws`` are what goes wrong in kernels, by the ids of their rows.
    """
    toolchain = replace(
        find_host_toolchain(ARCH, None, None, os.environ["PATH"]),
        compile_flags=("-O0", "-fPIC"),
        link_flags=("-shared",),
    )

    def emit(kernel, _memory):
        family = kernel.signature.family
        alone = family == Family.FWD_SPLITKV and stages_of("splitkv", kernel) == (family,)
        stage = "WHOLE" if alone else STAGES.get(family, "WHOLE")
        return kernel_source(described(describe(kernel)), 2, stage, flaws.get(kernel.id, ""))

    return Target(
        lambda: {"abi": INCLUDE},
        INCLUDE / "catalog_abi.h",
        emit,
        lambda _arch: toolchain,
        of_host_build,
    )


def held(memory, like):
    """What the memory holds, as an array like another: a real GPU's would be out of reach."""
    return (
        np.ctypeslib.as_array((ctypes.c_uint8 * like.nbytes).from_address(memory.handle))
        .view(like.dtype)
        .reshape(like.shape)
    )


def expected(problem, v):
    """What KERNEL writes to O."""
    heads = problem.tensors["v"].strides[1]
    o = np.repeat(v, problem.nhead_q // problem.nhead_k, axis=heads)
    return o[tuple(slice(extent) for extent in problem.shapes["o"])]


def call_of(device, problem, tensors, num_splits=1):
    """The call with the tensors, checked as those of a plan are."""
    outputs = {name: tensors[name] for name in problem.made if name in tensors}
    inputs = {name: value for name, value in tensors.items() if name not in outputs}
    return device.call(problem, take(problem, device, inputs, outputs, 0).arrays, workspace_of(problem, num_splits))


def compile_kernel(folder, **row):
    """The library of the stand-in kernel for fp32; ``row`` is what it says of its row."""
    source = kernel_source(json.dumps({"id": "ROW"} | row), element_bytes=4)
    return compile_c(folder, source, "-shared", "-fPIC", *INCLUDES)


def compile_c(folder, source, *options):
    """What a C compiler makes of the source, in a folder of its own."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or missing("a C compiler")
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "source.c").write_text(source)
    subprocess.run([compiler, "-Wall", "source.c", "-o", "made", *options], cwd=folder, check=True)
    return folder / "made"


def make_runtime(folder, version):
    """The fake runtime, as of ROCm's version."""
    return compile_c(folder, FAKE.read_text(), "-shared", "-fPIC", "-Werror", f"-DROCM={version}")


class Shared:
    """A NumPy array that says by DLPack that it is in a GPU's memory; counts the calls of its deleter."""

    def __init__(self, array, kind=10, index=0, code=None):
        self.array, self.device, self.code = array, (kind, index), code
        self.streams, self.deleted = [], 0

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream):
        capsule = self.array.__dlpack__()
        self.streams.append(stream)
        pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )(capsule, b"dltensor")
        if self.code is not None:
            ctypes.c_uint8.from_address(pointer + 20).value = self.code
        deleter = ctypes.c_void_p.from_address(pointer + 56)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        numpys = function(deleter.value)

        def delete(managed):
            self.deleted += 1
            numpys(managed)

        self.kept = function(delete)
        deleter.value = ctypes.cast(self.kept, ctypes.c_void_p).value
        return capsule


class Exposed:
    """Memory of a GPU as an object with __cuda_array_interface__."""

    def __init__(self, memory, shape, **changed):
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (memory.handle, False),
            "version": 3,
        } | changed
