"""Convolution rows of AMD arches without a HIP compiler: their sources, compiled for the CPU with stand-ins for CK."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import slow_but
from test_ck_sources import BAD_ARGUMENT, OK, compiled_for_cpu

from catalog.errors import BuildError
from catalog.ops import operation
from catalog.ops.conv.arguments import ARGUMENTS
from catalog.ops.conv.kernel import ConvKernel
from catalog.ops.conv.kernels.ck.emit import emit
from catalog.ops.conv.problem import ConvProblem
from catalog.rules.restriction import Restriction
from catalog.runtime.catalog import Catalog
from catalog.schema.kernel import Kernel

CONV = operation("conv")
IDENTITY = {"arch": "gfx90a", "target": "", "revision": "2026-07", "space": "ck", CONV.variant.name: ""}
TRAITS = {trait.name: trait.default for trait in CONV.traits.values()} | {
    **{f"dtype{tensor}": "fp32" for tensor in ("", "_in", "_weight", "_out")},
    **{f"{kind}_{axis}": 16 for kind in ("tile", "warp_tile") for axis in "mnk"},
    **{f"wave_{axis}": 1 for axis in "mnk"},
}
FIELDS: dict[str, Any] = {"n": 2, "c": 8, "k": 32, "g": 2, "size": (7, 6), "filter": (3, 2), "dtype": "fp32"}
GEOMETRY: dict[str, Any] = {"stride": (2, 1), "dilation": (1, 2), "pad": (1, 2)}


def row(direction: str, **traits: Any) -> ConvKernel:
    """A row in fp32, whose arithmetic the CPU has."""
    return ConvKernel.from_row(IDENTITY | TRAITS | {"family": direction, "direction": direction} | traits)


def library_of(kernel: Kernel, revision: str, folder: Path) -> ctypes.CDLL:
    # The headers of 2025-07 lack fp32; what they are asked to compute here is the same.
    source = emit(kernel, "2025-11").replace("headers_2025_11", f"headers_{revision.replace('-', '_')}")
    library = compiled_for_cpu(source, folder, f"-DLIKE_{revision.replace('-', '_')}", headers=CONV.headers)
    library.catalog_describe.restype = ctypes.c_char_p
    assert json.loads(library.catalog_describe())["id"] == kernel.id
    return library


class Call:
    """A call of a library: the argument struct of a problem, with tensors that are filled at random."""

    def __init__(self, problem: ConvProblem) -> None:
        rng = np.random.default_rng(0)
        self.tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in problem.shapes.items()}
        [self.computed] = problem.made
        self.expected = CONV.reference(problem, {name: self.tensors[name] for name in problem.needed})[self.computed]
        self.args = ARGUMENTS.new(**{name: getattr(problem, name) for name in "nckg"})
        for name, tensor in self.tensors.items():
            place = getattr(self.args, name)
            place.data, place.stride_first = tensor.ctypes.data, int(np.prod(tensor.shape[1:]))
        self.lists = problem.lists
        self.args.geometry = self.lists.addresses[0]

    def launch(self, library: ctypes.CDLL) -> int:
        return int(library.catalog_launch(ctypes.byref(self.args), None))

    def check(self, library: ctypes.CDLL) -> None:
        assert self.launch(library) == OK
        np.testing.assert_allclose(self.tensors[self.computed], self.expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("revision", "direction", "pipeline"),
    slow_but(
        [("2025-11", "forward", "compv3")],
        [
            *(("2025-11", direction, "compv3") for direction in ("forward", "bwd_data", "bwd_weight")),
            *(("2025-07", direction, "compv1") for direction in ("forward", "bwd_weight")),
        ],
    ),
)
def test_a_convolution_is_an_instance_of_the_headers_templates(
    revision: str, direction: str, pipeline: str, tmp_path: Path
) -> None:
    """Geometry and groups reach the kernel; what CK cannot compute is refused."""
    library = library_of(row(direction, pipeline=pipeline), revision, tmp_path)

    def call(**changes: Any) -> Call:
        return Call(ConvProblem(direction=direction, **{**FIELDS, **GEOMETRY, **changes}))

    if direction == "bwd_data":
        assert call(k=6).launch(library) == BAD_ARGUMENT, "products with other loops than the first one's"
        call(k=6, stride=(1, 1)).check(library)
    call().check(library)
    call(n=0).check(library)
    assert call(c=6).launch(library) == BAD_ARGUMENT, "as IsSupportedArgument"
    apart = call()
    apart.args.input.stride_first += 1
    assert apart.launch(library) == BAD_ARGUMENT, "CK's images lie side by side"
    far = call()
    far.args.n = 2**28
    assert far.launch(library) == BAD_ARGUMENT, "CK's offsets have 32 bits"
    without = call()
    without.args.geometry = None
    assert without.launch(library) != OK


@pytest.mark.parametrize(
    ("revision", "direction", "traits", "message"),
    [
        ("2025-07", "bwd_data", {}, "headers of 2025-07 have no family = bwd_data"),
        ("2025-07", "forward", {"dtype": "fp16"}, "headers of 2025-07 have no pipeline = compv3"),
        ("2025-11", "bwd_weight", {"two_stage": True}, "headers of 2025-11 have no two_stage = True"),
        ("2025-11", "forward", {"pipeline": "wavelet"}, "headers of 2025-11 have no pipeline = wavelet"),
    ],
)
def test_a_row_that_the_headers_do_not_implement_is_refused(
    revision: str, direction: str, traits: dict[str, Any], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        emit(row(direction, **traits), revision)


@pytest.mark.parametrize("arch", slow_but(["gfx942"], ["gfx90a", "gfx942", "gfx950"]))
def test_every_arch_has_the_fallback_kernel(arch: str, tmp_path: Path) -> None:
    revision, where = CONV.fallback()
    catalog = Catalog(tmp_path / "catalog.db")
    chosen = Restriction(where=where, families=("forward",))
    catalog.populate(arch, revision=revision, operation="conv", restriction=chosen)
    [kernel] = catalog.kernels("hw_valid", arch=arch, operation="conv")
    assert catalog.refusal(kernel) is None, "some headers compile it"
