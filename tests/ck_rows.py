"""Real kernels from a real CK checkout and a real HIP compiler: CK_ROOT=... make test-ck.

A GPU is not needed: libraries are loaded and describe themselves, nothing is launched. Each compile takes minutes.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from catalog.build.builder import Builder
from catalog.build.cache import ArtifactRecord
from catalog.build.resources import RESOURCES, Resources
from catalog.build.targets import CK
from catalog.errors import ToolchainError, UsageError
from catalog.ops import operation
from catalog.ops.attention.kernels.ck.emit import emit_row
from catalog.ops.attention.traits import Family
from catalog.ops.attention.upstream.sources import find_checkout
from catalog.registry.query import Query, run
from catalog.rules.restriction import Restriction, restriction
from catalog.runtime.catalog import Catalog
from catalog.schema.kernel import Kernel
from catalog.settings import choose

DATA = Path(__file__).parent.parent / "data"
SMALLEST = "dtype = 'fp16' AND bias = 'no' AND mask = 'no' AND NOT dropout AND hdim_q <= 128"
FORWARD_ARCHES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


@pytest.fixture(scope="session")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    root = os.environ.get("CK_ROOT") or pytest.exit("set CK_ROOT to a CK checkout: CK_ROOT=... make test-ck", 2)
    choose(ck_root=Path(root))
    folder = tmp_path_factory.mktemp("ck")
    catalog = Catalog(folder / "catalog.db")
    yield catalog
    columns = ("family", "arch", "compile_s", *RESOURCES)
    print("", *columns, sep=" | ")
    for of in ("attention", "gemm", "conv"):
        for row in run(folder / "catalog.db", Query("built", columns=columns, order_by="arch, family", operation=of)):
            print("", *row, sep=" | ")
    catalog.close()


def build(catalog: Catalog, arch: str, where: str) -> None:
    """Build the first row of ``arch`` of those in ``where`` that compile; its library says what it is and uses."""
    revision = find_checkout().generator.revision
    try:
        catalog.populate(arch, revision=revision, mask_impl="simplified")
        kernels = catalog.kernels(f"revision = '{revision}' AND {where}", arch=arch)
        check(catalog, next(kernel for kernel in kernels if catalog.refusal(kernel) is None))
    except (ToolchainError, UsageError) as error:  # a compiler that does not know the arch, a revision without it
        pytest.skip(str(error))


def check(catalog: Catalog, kernel: Kernel) -> None:
    """Build ``kernel``; its library says what it is and uses."""
    artifact = catalog.build(kernel)
    library = ctypes.CDLL(str(artifact.path))
    library.catalog_describe.restype = ctypes.c_char_p
    assert json.loads(library.catalog_describe())["id"] == kernel.id
    assert library.catalog_launch(None, None) == 2, "no arguments"
    columns = ("registers", "occupancy", "code_bytes")
    query = Query(f"id = '{kernel.id}' AND built", columns=columns, operation=kernel.operation)
    ((registers, occupancy, code_bytes),) = run(catalog.path, query)
    assert registers > 0
    assert occupancy > 0
    assert code_bytes > 500


# The combine kernel calls more of the device libraries than others: they may be older than gfx950's compiler.
@pytest.mark.parametrize(
    ("arch", "family"), [*(("gfx90a", family) for family in Family), ("gfx950", Family.FWD_SPLITKV_COMBINE)]
)
def test_a_row_of_every_family(catalog: Catalog, arch: str, family: Family) -> None:
    build(catalog, arch, f"family = '{family}' AND {SMALLEST}")


@pytest.mark.parametrize(
    ("family", "where"),
    [
        *((family, SMALLEST) for family in Family),
        (Family.FWD, "mode = 'group' AND bias = 'alibi' AND mask <> 'no' AND lse AND dropout AND hdim_q = 64"),
        (Family.BWD_DQ_DK_DV, "bias = 'bias' AND dbias AND mask <> 'no' AND dropout AND deterministic AND hdim_q = 64"),
    ],
)
def test_a_rows_own_source_gives_the_generators_kernel(
    catalog: Catalog, family: Family, where: str, tmp_path: Path
) -> None:
    """The same registers, spills, memory and code."""
    checkout = find_checkout()
    revision = checkout.generator.revision
    catalog.populate("gfx90a", revision=revision, mask_impl="simplified")
    kernels = catalog.kernels(f"revision = '{revision}' AND family = '{family}' AND {where}", arch="gfx90a")
    kernel = next(kernel for kernel in kernels if catalog.refusal(kernel) is None)

    def from_traits(kernel: Kernel, memory: Path) -> str:
        return emit_row(kernel, checkout.headers)

    records: list[ArtifactRecord] = []
    Builder(tmp_path, records.append, targets=lambda arch: replace(CK, emit=from_traits)).build(kernel)
    catalog.build(kernel)
    (generated,) = run(catalog.path, Query(f"id = '{kernel.id}' AND built", columns=RESOURCES))
    assert records[0].resources == Resources(*generated)


def test_a_row_of_a_sweep(catalog: Catalog, tmp_path: Path) -> None:
    restricted = restriction(catalog.spec("gfx942", space="rules"), (DATA / "sweeps" / "fwd_ci.json",), "", None)
    catalog.populate("gfx942", space="rules", restriction=restricted)
    kernels = catalog.kernels("space = 'rules' AND hdim_q = 64 AND tile_m0 = 64", arch="gfx942")
    kernel = next(kernel for kernel in kernels if catalog.refusal(kernel) is None)
    assert catalog.build(kernel).so_bytes


@pytest.mark.parametrize("arch", FORWARD_ARCHES)
def test_the_fallback_of_every_arch(catalog: Catalog, arch: str) -> None:
    from catalog.ops.attention.upstream.sources import ck_facts

    build(catalog, arch, ck_facts().fallback)


GEMM_TILE = (
    "dtype = 'fp16' AND layout IN ('rcr', 'rcrr') AND tile_m = 128 AND tile_n = 128 AND tile_k = 64 AND NOT persistent "
    "AND epilogue = 'cshuffle'"
)
SQUARE = f"{GEMM_TILE} AND pipeline = 'compv3' AND wave_m = 2 AND wave_n = 2 AND warp_tile_m = 32 AND warp_tile_k = 16"


@pytest.mark.parametrize(
    ("space", "revision", "family", "where"),
    [
        ("tile_engine", "2025-11", "universal", SQUARE.replace("compv3", "compv4")),
        ("tile_engine", "2025-11", "universal", SQUARE.replace("compv3", "mem")),
        ("tile_engine", "2025-11", "multi_d", f"{SQUARE} AND elementwise = 'MultiDAdd'"),
        ("tile_engine", "2025-11", "preshuffle", f"{GEMM_TILE} AND warp_tile_m = 16"),
        ("dispatcher", "2026-07", "grouped", SQUARE),
        ("dispatcher", "2026-07", "stream_k", f"{SQUARE} AND reduction = 'linear'"),
    ],
)
def test_gemm_rows_of_every_family(catalog: Catalog, space: str, revision: str, family: str, where: str) -> None:
    """Those that the checkout's headers implement; one row is up to ten device functions."""
    chosen = Restriction(where=where, families=(family,))
    catalog.populate("gfx90a", revision=revision, space=space, operation="gemm", restriction=chosen)
    kernel, *_ = catalog.kernels(f"space = '{space}' AND family = '{family}'", arch="gfx90a", operation="gemm")
    if catalog.refusal(kernel) is not None:
        pytest.skip(str(catalog.refusal(kernel)))
    check(catalog, kernel)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_the_gemm_fallback(catalog: Catalog, arch: str) -> None:
    revision, where = operation("gemm").fallback()
    catalog.populate(
        arch, revision=revision, operation="gemm", restriction=Restriction(where=where, families=("universal",))
    )
    [kernel] = catalog.kernels(where, arch=arch, operation="gemm")
    try:
        check(catalog, kernel)
    except ToolchainError as error:  # a compiler that does not know the arch
        pytest.skip(str(error))


CONV_TILE = "dtype = 'fp16' AND ndim = 2 AND specialization = 'default' AND num_groups_to_merge = 1 AND hw_valid"


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("forward", "pipeline = 'compv3' AND tile_m = 64 AND tile_n = 64"),
        ("forward", "pipeline = 'compv1' AND tile_m = 64 AND tile_n = 64 AND tile_k = 32"),
        ("bwd_data", "pipeline = 'compv3' AND tile_m = 64 AND tile_n = 64"),
        ("bwd_weight", "pipeline = 'compv3' AND tile_m <= 128 AND tile_n = 128 AND NOT two_stage"),
        ("bwd_weight", "pipeline = 'compv1' AND tile_m = 64 AND tile_n = 64 AND vector_a = 8 AND NOT two_stage"),
    ],
)
def test_convolution_rows_of_every_direction(catalog: Catalog, family: str, where: str) -> None:
    """Those that the checkout's headers implement."""
    chosen = Restriction(where=f"{CONV_TILE} AND {where}", families=(family,))
    catalog.populate("gfx90a", revision="2026-07", operation="conv", restriction=chosen)
    kernels = catalog.kernels(f"family = '{family}'", arch="gfx90a", operation="conv")
    kernel = next((one for one in kernels if catalog.refusal(one) is None), None)
    if kernel is None:
        pytest.skip(str(catalog.refusal(kernels[0])))
    check(catalog, kernel)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_the_convolution_fallback(catalog: Catalog, arch: str) -> None:
    revision, where = operation("conv").fallback()
    catalog.populate(arch, revision=revision, operation="conv", restriction=Restriction(where, ("forward",)))
    [kernel] = catalog.kernels(where, arch=arch, operation="conv")
    try:
        check(catalog, kernel)
    except ToolchainError as error:  # a compiler that does not know the arch
        pytest.skip(str(error))
