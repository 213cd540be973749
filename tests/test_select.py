"""Selection: what upstream's dispatch would take, what was measured first, and why nothing fits."""

from __future__ import annotations

from typing import Any

import pytest

from catalog.errors import SelectionError
from catalog.runtime.catalog import Catalog
from catalog.runtime.plan import Plan
from catalog.schema.problem import Problem


def problem(**changes: Any) -> Problem:
    fields: dict[str, Any] = {"batch": 8, "nhead_q": 32, "seqlen_q": 2048, "hdim_q": 128, "dtype": "bf16"}
    return Problem(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # the trload tile of 64 keys comes before the one of 128
        ({}, "_b128x64x32x128x16x128_r4x1x1_r4x1x1_w32x32x16_w32x32x16_qr_async_trload_vr_npad_"),
        # 256 blocks of 64 rows fill no more than the 256 compute units: the small tile; 128 keys divide 2048, not 2049
        ({"batch": 1, "nhead_q": 8}, "_b64x128x32x128x32x128_r4x1x1_r4x1x1_w16x16x32_w16x16x16_qr_async_vr_psddv_"),
        ({"batch": 1, "nhead_q": 8, "seqlen_k": 2049}, "_w16x16x32_w16x16x16_qr_async_vr_psskddv_"),
        ({"batch": 1, "nhead_q": 9}, "_b128x64x32x128x16x128_"),
        # short queries take the small trload tiles
        ({"seqlen_q": 1, "seqlen_k": 4096}, "_b16x32x64x128x32x128_"),
        ({"seqlen_q": 17, "seqlen_k": 4096}, "_b32x32x128x128x32x128_"),
        # a head dim that 8 divides goes through asynchronous loads; its bucket is the next larger head dim
        ({"hdim_q": 72}, "fmha_fwd_d80_bf16_batch_b128x128x16x96x32x80_"),
        ({"hdim_q": 192, "hdim_v": 128}, "fmha_fwd_d192_bf16_batch_b128x128x32x128x32x192_"),
        ({"hdim_q": 256, "mask": "causal", "lse": True}, "_qr_vr_npad_nlogits_nbias_mc_lse_"),
        ({"mask": "bottom_right", "window": (128, 0)}, "_nbias_mg_nlse_"),
        # two queries or more of fp8 try the V3 pipeline first
        ({"dtype": "fp8bf16"}, "_qr_async_trload_v3_vr_pssk_"),
        ({"dtype": "fp8bf16", "seqlen_q": 1}, "fmha_fwd_d128_fp8bf16_batch_b128x128x32x128x32x128_"),
    ],
)  # fmt: skip
def test_the_static_order_is_upstreams_dispatch(gfx950: Catalog, changes: dict[str, Any], expected: str) -> None:
    assert expected in gfx950.select(problem(**changes), arch="gfx950").kernels[0].name


def test_group_mode_takes_padded_kernels(gfx950: Catalog) -> None:
    ragged = Problem(seqlens_q=[3, 0, 700], nhead_q=8, hdim_q=64, dtype="fp16", lse=True)
    name = gfx950.select(ragged, arch="gfx950").kernels[0].name
    assert "_group_" in name
    assert "_psskddv_" in name


def test_any_one_kernel_that_upstream_would_not_dispatch_is_not_a_candidate(gfx950: Catalog) -> None:
    candidates = gfx950.candidates(problem(seqlen_q=100, seqlen_k=100), arch="gfx950", limit=1000)
    kernels = [candidate.kernel for candidate in candidates]
    assert len(kernels) > 1
    for kernel in kernels:
        algorithm = kernel.algorithm
        assert algorithm.tile_m0 >= 64
        assert algorithm.pad_sk or algorithm.pipeline.value.startswith("qr_async_trload")
        assert kernel.signature.hdim_q >= 128


def record_timing(catalog: Catalog, plan: Plan, kernel_id: str, median_ms: float) -> None:
    connection = catalog.connection
    connection.execute("INSERT OR IGNORE INTO device VALUES (1, ?, 'a device', '{}')", (plan.arch,))
    connection.execute("INSERT OR IGNORE INTO problem (key) VALUES (?)", (plan.problem.key,))
    connection.execute(
        "INSERT INTO artifact (key, kernel_id, arch, toolchain, flags, status, log, compile_seconds, created) "
        "VALUES (?1, ?1, ?2, '', '', 'built', '', 0, '')",
        (kernel_id, plan.arch),
    )
    connection.execute(
        "INSERT INTO timing SELECT id, ?, 1, ?, 9, ?, ?, ?, ?, 1, 1, '' FROM problem WHERE key = ?",
        (kernel_id, kernel_id, *[median_ms] * 4, plan.problem.key),
    )


def test_a_measured_kernel_comes_before_the_static_order(copied: Catalog) -> None:
    asked = problem()
    first = copied.select(asked, arch="gfx950")
    static = [candidate.kernel.id for candidate in copied.candidates(asked, arch="gfx950", limit=5)]
    assert static[0] == first.kernels[0].id
    record_timing(copied, first, static[3], 2.0)
    record_timing(copied, first, static[2], 3.0)
    measured = copied.candidates(asked, arch="gfx950", limit=5)
    assert [candidate.kernel.id for candidate in measured] == [static[i] for i in (3, 2, 0, 1, 4)]
    assert [candidate.median_ms for candidate in measured] == [2.0, 3.0, None, None, None]
    other = copied.candidates(problem(batch=9), arch="gfx950", limit=1)[0]
    assert other.median_ms is None


def test_a_choice_is_remembered_until_the_catalog_changes(copied: Catalog) -> None:
    plan = copied.select(problem(), arch="gfx950")
    assert copied.select(problem(), arch="gfx950") is plan
    copied.populate("gfx950", force=True)
    again = copied.select(problem(), arch="gfx950")
    assert again is not plan
    assert again.kernels == plan.kernels


def test_selecting_populates_what_is_not_there(tmp_path: Any) -> None:
    catalog = Catalog(tmp_path / "new.db")
    assert catalog.select(problem(), arch="gfx942", mask_impl="simplified").kernels[0].mask_impl == "simplified"
    with pytest.raises(SelectionError):
        catalog.select(problem(dtype="bf8"), arch="gfx942", mask_impl="simplified")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "bf8"}, ["dtype=bf8", "there is only: bf16, fp16, fp32"]),
        ({"hdim_q": 257}, ["hdim_fits rejects", "head dims that hold the problem's"]),
        ({"dtype": "fp8bf16", "lse": True}, ["lse=1, and there is only: 0"]),
    ],
)
def test_when_nothing_fits_the_error_says_which_trait_or_rule(
    gfx950: Catalog, changes: dict[str, Any], told: list[str]
) -> None:
    with pytest.raises(SelectionError) as caught:
        gfx950.select(problem(**changes), arch="gfx950")
    for words in told:
        assert words in str(caught.value)


def test_hardware_verdicts_are_for_selection_only(tmp_path: Any) -> None:
    """Parity keeps the fp8 rows of gfx90a, which has no fp8 instructions; selection does not take them."""
    catalog = Catalog(tmp_path / "catalog.db")
    assert catalog.parity("gfx90a", 0).passed
    with pytest.raises(SelectionError, match="the hardware cannot run"):
        catalog.select(problem(dtype="fp8bf16"), arch="gfx90a")
