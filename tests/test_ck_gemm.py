"""GEMM rows of AMD arches without a HIP compiler: their sources, compiled for the CPU with templates like CK's."""

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
from catalog.ops.gemm.arguments import ARGUMENTS
from catalog.ops.gemm.kernel import GemmKernel
from catalog.ops.gemm.kernels.ck.emit import emit
from catalog.ops.gemm.problem import GemmProblem
from catalog.rules.restriction import Restriction
from catalog.runtime.catalog import Catalog
from catalog.schema.kernel import Kernel

GEMM = operation("gemm")
IDENTITY = {"arch": "gfx90a", "target": "", "revision": "2026-07", "space": "dispatcher", GEMM.variant.name: ""}
TRAITS = {trait.name: trait.default for trait in GEMM.traits.values()} | {
    **{
        "dtype": "fp32",
        "dtype_a": "fp32",
        "dtype_b": "fp32",
        "dtype_c": "fp32",
        "tile_m": 64,
        "tile_n": 64,
        "tile_k": 64,
    },
    **{"wave_m": 2, "wave_n": 2, "wave_k": 1, "warp_tile_m": 16, "warp_tile_n": 16, "warp_tile_k": 16},
}


def row(family: str, **traits: Any) -> GemmKernel:
    """A row in fp32, whose arithmetic the CPU has."""
    return GemmKernel.from_row(IDENTITY | TRAITS | {"family": family} | traits)


def library_of(kernel: Kernel, revision: str, folder: Path) -> ctypes.CDLL:
    library = compiled_for_cpu(
        emit(kernel, revision), folder, f"-DLIKE_{revision.replace('-', '_')}", headers=GEMM.headers
    )
    library.catalog_describe.restype = ctypes.c_char_p
    assert json.loads(library.catalog_describe())["id"] == kernel.id
    return library


class Call:
    """A call of a library: the argument struct of a problem, with tensors that are filled at random."""

    def __init__(self, problem: GemmProblem, num_splits: int = 1) -> None:
        rng = np.random.default_rng(0)
        forms = problem.tensors
        self.tensors = {name: rng.standard_normal(form.shape).astype(np.float32) for name, form in forms.items()}
        self.expected = GEMM.reference(problem, self.tensors)["c"]
        sizes: dict[str, Any] = {name: getattr(problem, name) for name in ("m", "n", "k")}
        self.args = ARGUMENTS.new(
            **sizes, batch=problem.products, alpha=problem.alpha, beta=problem.beta, num_splits=num_splits
        )
        for name, tensor in self.tensors.items():
            place = getattr(self.args, name)
            place.data, place.stride_outer = tensor.ctypes.data, tensor.shape[-1]
            place.stride_batch = tensor.shape[-1] * tensor.shape[-2] if tensor.ndim == 3 else 0
        self.lists = problem.lists
        if self.lists:
            self.args.starts = self.lists.addresses[0]

    def workspace(self, library: ctypes.CDLL) -> tuple[int, int]:
        """The splits that a launch takes, and the bytes of its workspace, which is reserved."""
        size = ARGUMENTS.workspace()
        assert library.catalog_workspace_size(ctypes.byref(self.args), ctypes.byref(size)) == OK
        self.room = np.zeros(size.c_acc, np.uint8)
        self.args.num_splits, self.args.c_acc.data = size.num_splits, self.room.ctypes.data
        return size.num_splits, size.c_acc

    def launch(self, library: ctypes.CDLL) -> int:
        return int(library.catalog_launch(ctypes.byref(self.args), None))

    def check(self, library: ctypes.CDLL) -> None:
        assert self.launch(library) == OK
        np.testing.assert_allclose(self.tensors["c"], self.expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("revision", slow_but(["2025-11"], ["2025-07", "2025-11"]))
def test_a_product_is_an_instance_of_the_headers_templates(revision: str, tmp_path: Path) -> None:
    """One launch for each product of a batch; parts of K are added to zeros; what CK cannot compute is refused."""
    library = library_of(row("universal", layout="crr"), revision, tmp_path)
    fields: dict[str, Any] = {"n": 6, "k": 256, "dtype": "fp32", "layout": "crr"}
    Call(GemmProblem(m=5, **fields)).check(library)
    Call(GemmProblem(m=5, batch=3, **fields)).check(library)
    Call(GemmProblem(m=5, **fields | {"k": 0})).check(library)
    Call(GemmProblem(m=0, **fields)).check(library)
    split = Call(GemmProblem(m=5, batch=2, **fields), num_splits=3)
    assert split.workspace(library) == (2, 0), "whole tiles of K, equally many in each part"
    split.check(library)
    split.args.num_splits = 3
    assert split.launch(library) == BAD_ARGUMENT
    for wrong in ({"alpha": 2}, {"beta": 1}, {"n": 7}):
        assert Call(GemmProblem(m=5, **fields | wrong)).launch(library) == BAD_ARGUMENT
    far = Call(GemmProblem(m=5, **fields))
    far.args.a.stride_outer = 2**29
    assert far.launch(library) == BAD_ARGUMENT, "CK's offsets have 32 bits"


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["2025-07", "2025-11"])
def test_d_tensors_and_groups(revision: str, tmp_path: Path) -> None:
    kernel = row("multi_d", layout="rcrr", num_d=2, elementwise="MultiDAdd", persistent=True)
    (tmp_path / "d").mkdir()
    library = library_of(kernel, revision, tmp_path / "d")
    of_d: dict[str, Any] = {"dtype": "fp32", "num_d": 2, "elementwise": "MultiDAdd"}
    Call(GemmProblem(m=5, n=6, k=64, batch=2, **of_d)).check(library)
    library = library_of(row("grouped", layout="rrr"), revision, tmp_path)
    grouped = Call(GemmProblem(groups=(3, 0, 5), n=6, k=64, dtype="fp32", layout="rrr"))
    assert grouped.launch(library) == BAD_ARGUMENT, "without a workspace"
    assert grouped.workspace(library)[1] > 0
    grouped.check(library)


@pytest.mark.parametrize(
    ("revision", "family", "traits", "message"),
    [
        ("2025-07", "stream_k", {"reduction": "atomic"}, "headers of 2025-07 have no family = stream_k"),
        ("2025-11", "stream_k", {"reduction": "tree"}, "headers of 2025-11 have no reduction = tree"),
        ("2025-11", "multi_abd", {"num_a": 2}, "the family multi_abd has several"),
    ],
)
def test_a_row_that_the_headers_do_not_implement_is_refused(
    revision: str, family: str, traits: dict[str, Any], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        emit(row(family, **traits), revision)


@pytest.mark.parametrize("arch", slow_but(["gfx942"], ["gfx90a", "gfx942", "gfx950", "gfx1201"]))
def test_every_arch_has_the_fallback_kernel(arch: str, tmp_path: Path) -> None:
    revision, where = GEMM.fallback()
    catalog = Catalog(tmp_path / "catalog.db")
    chosen = Restriction(where=where, families=("universal",))
    catalog.populate(arch, revision=revision, operation="gemm", restriction=chosen)
    [kernel] = catalog.kernels("hw_valid", arch=arch, operation="gemm")
    assert catalog.refusal(kernel) is None, "some headers compile it"
