"""Selection by rules: what upstream's dispatch would take, and why nothing fits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but

from catalog.errors import SelectionError
from catalog.ops.attention.names import grammar_of
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.stages import REQUIRED_TRAITS
from catalog.ops.attention.traits import TRAITS, Family
from catalog.runtime.catalog import Catalog


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


PACKED: dict[str, Any] = {"batch": None, "seqlen_q": None, "seqlens_q": [3, 700]}
DECODE = {"seqlen_q": 1, "seqlen_k": 4096}
FP8 = {"dtype": "fp8", "qscale": "pertensor"}
APPEND = {"op": "appendkv", "seqlen_k": 4096, "seqlen_new": 1}
PREFILL = {"op": "batch_prefill", "page_size": 16, "seqlen_k": 4096, **PACKED}


def assert_stages(catalog: Catalog, changes: dict[str, Any], expected: list[str], **where: str) -> None:
    """The plan has as many kernels as ``expected``, each with that text in its name."""
    names = [kernel.name for kernel in catalog.select(problem(**changes), **where).kernels]
    assert len(names) == len(expected), names
    for name, part in zip(names, expected, strict=True):
        assert part in name


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # of several paddings that would do, upstream tries that of the keys first; both stages pad seqlen_q alike
        ({}, ["_splitkv_d128_bf16_batch_b64x128x32x128x32x128_", "_combine_d128_bf16_batch_b32_unused_npad_nlse_"]),
        ({}, ["_qr_vr_psk_nlogits_nbias_nmask_lse_nsquant_npagedkv_nsink_", "_npad_nlse_"]),
        (DECODE | {"lse": True}, ["_qr_vr_ps_nlogits_nbias_nmask_lse_", "_unused_ps_lse_"]),
        ({"seqlen_q": 1, "seqlen_k": 4097}, ["_qr_vr_pssk_", "_unused_ps_nlse_"]),
        # the lengths in a paged cache are known at run time only
        (DECODE | {"page_size": 16}, ["_qr_vr_pssk_nlogits_nbias_nmask_lse_nsquant_pagedkv_", "_unused_ps_"]),
        (PACKED, ["_splitkv_d128_bf16_group_", "_combine_d128_bf16_group_b32_unused_ps_"]),
        ({"hdim_q": 32, "seqlen_q": 32}, ["_splitkv_d32_bf16_batch_b32x64x", "_d32_bf16_batch_b32_unused_npad_"]),
        ({"hdim_q": 64, "seqlen_q": 32}, ["_splitkv_d64_bf16_batch_b64x64x", "_d64_bf16_batch_b32_unused_ps_"]),
        ({"hdim_q": 40}, ["_splitkv_d64_", "_combine_d64_bf16_batch_b32_unused_psdv_"]),
        # upstream takes a tile of head dim 96 for one of 128
        ({"hdim_q": 96}, ["_r4x1x1_w16x16x16_w16x16x16_qr_vr_psskddv_", "_combine_d96_bf16_batch_b32_unused_psdv_"]),
        (FP8, ["_w32x32x32_w32x32x32_qr_vr_npad_", "_combine_d128_fp8_batch_b32_unused_npad_nlse_squant_"]),
        (FP8 | {"seqlen_k": 2049}, ["_qr_vr_pssk_", "_combine_d128_fp8_batch_b32_unused_ps_nlse_squant_"]),
    ],
)  # fmt: skip
def test_split_kv(gfx950: Catalog, changes: dict[str, Any], expected: list[str]) -> None:
    assert_stages(gfx950, changes | {"op": "splitkv"}, expected, arch="gfx950")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"op": "pagedkv", "page_size": 16}, "_pagedkv_d128_bf16_batch_b128x128x32x128x32x128_"),
        ({"op": "pagedkv", "page_size": 16, "mask": "causal"}, "_qr_pagedkv_vr_pssk_nlogits_nbias_mc_nlse_nskip_"),
        ({"op": "pagedkv", "page_size": 64, "hdim_q": 64, "seqlen_k": 9, **PACKED, **FP8}, "_pagedkv_d64_fp8_group_"),
        (APPEND, "fmha_fwd_appendkv_d128_bf16_b64x64x128x128_vr_psk_gfx9"),
        (APPEND | {"seqlen_q": 1, "rope": "half", "page_size": 64}, "_vr_psskddv_half_pagedkv_"),
        (APPEND | {"rope": "inter"}, "_vr_pskd_inter_gfx9"),
        (APPEND | {"hdim_q": 100, "rope": "inter"}, "_appendkv_d128_bf16_b64x64x128x128_vr_psskddv_inter_"),
        (APPEND | {"dtype": "fp8", "hdim_q": 32}, "_appendkv_d64_fp8_b64x64x64x64_vr_psskddv_gfx9"),
        # 2 sequences x 16 heads x 6 blocks of 128 rows keep less than 80 % of 256 compute units busy, x 32 heads do not
        (PREFILL | {"nhead_q": 16}, "_batch_prefill_d128_bf16_group_ps16_bload_b64x128x64x128x64x128_"),
        (PREFILL, "_ps16_bload_b128x128x32x128x32x128_r4x1x1_r4x1x1_w32x32x16_w32x32x16_qr_async_vr_psskddv_"),
        (PREFILL | {"kv_lookup_table": "sglang", "kv_memory_layout": "vectorized"}, "_nsink_vectorized_sglang"),
        # 16 * 32 * 128 elements of 2 bytes a page: 2^14 of them are 2 GB, which pages that hold a tile do not mind
        (PREFILL | {"num_pages": 2**14 - 1}, "_ps16_bload_"),
        (PREFILL | {"num_pages": 2**14}, "_ps16_gload_"),
        (PREFILL | {"num_pages": 2**14, "page_size": 1024}, "_ps1024_bload_"),
        (PREFILL | {"num_pages": 2**14, "dtype": "fp8bf16", "qscale": "pertensor"}, "_fp8bf16_group_ps16_bload_"),
    ],
)  # fmt: skip
def test_caches(gfx950: Catalog, changes: dict[str, Any], expected: str) -> None:
    assert_stages(gfx950, changes, [expected], arch="gfx950")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["_do_o_d128_bf16_b64_batch_o2_npad_", "_b16x192x128x", "_convert_dq_d128_bf16_b64_batch_o2_npad_ndet"]),
        ({"seqlen_q": 100}, ["_o2_ps_", "_maxq0_npad_", "_o2_ps_ndeterministic_"]),
        (PACKED, ["_b64_group_o2_ps_", "_bf16_group_b16x192x128x", "_b64_group_o2_ps_"]),
        # a tile for at most 256 keys, in group mode of all sequences
        ({"seqlen_k": 256}, ["_npad_", "_b32x128x128x32x128x32x32x128x128_", "_npad_"]),
        (PACKED | {"seqlens_q": [128, 128]}, ["_ps_", "_b32x128x128x", "_ps_"]),
        (PACKED | {"seqlens_q": [128, 129]}, ["_ps_", "_b16x192x128x", "_ps_"]),
        # kernels for short queries write dQ themselves
        ({"seqlen_q": 16}, ["_o2_ps_", "_w16x16x32_w16x16x16_o2_maxq16_npad_nbias_ndbias_nmask_"]),
        ({"seqlen_q": 17}, ["_ps_", "_maxq0_", "_ps_"]),
        ({"seqlen_q": 16, "mask": "causal"}, ["_ps_", "_maxq0_npad_nbias_ndbias_mc_", "_ps_"]),
        ({"seqlen_q": 17, "hdim_q": 40}, ["_do_o_d64_bf16_b64_batch_o2_psdv_", "_maxq32_pd8dv8_"]),
        # transposing loads work on 8 elements, and upstream tests their head dims before the others
        ({"hdim_q": 32}, ["_do_o_d64_", "_bwd_d64_bf16_batch_b32x256x64x", "_convert_dq_d64_"]),
        ({"hdim_q": 96}, ["_do_o_d128_", "_bwd_d128_bf16_batch_b16x192x128x", "_convert_dq_d128_"]),
        ({"hdim_q": 30}, ["_o2_pdv_", "_maxq0_pd1dv1_nbias_ndbias_nmask_ndropout_ndeterministic_ntrload_", "_o2_pd_"]),
        ({"hdim_q": 32, "dtype": "fp32"}, ["_do_o_d32_fp32_", "_bwd_d32_fp32_", "_convert_dq_d32_fp32_"]),
        # two head dims: 8 for both comes before other paddings of hdim_q
        ({"hdim_q": 72, "hdim_v": 128}, ["_o2_pdv_", "_pd8dv8_", "_o2_pd_"]),
        ({"hdim_q": 30, "hdim_v": 128}, ["_o2_npad_", "_b16x128x128x16x128x16x32x128x128_", "_o2_pd_"]),
        ({"hdim_q": 128, "hdim_v": 72}, ["_o2_pdv_", "_pd8dv8_", "_o2_pd_"]),
        ({"hdim_q": 256, "hdim_v": 200}, ["_o2_pdv_", "_maxq0_pdv8_", "_o2_npad_"]),
        ({"hdim_q": 30, "hdim_v": 128, "dtype": "fp32"}, ["_o2_pdv_", "_pd1dv1_", "_o2_pd_"]),
        # features
        ({"dropout": 0.1}, ["_npad_", "_ndbias_nmask_dropout_wg16_ndeterministic_", "_ndeterministic_"]),
        ({"dropout": 0.1, "randval": True}, ["_npad_", "_dropout_wg16_storerandval_", "_ndeterministic_"]),
        ({"deterministic": True}, ["_npad_", "_ndropout_deterministic_", "_npad_deterministic_"]),
        ({"bias": "bias", "dbias": True}, ["_npad_", "_bias_dbias_nmask_", "_npad_"]),
        ({"bias": "alibi", "mask": "bottom_right", "window": (9, 0)}, ["_npad_", "_alibi_ndbias_mg_", "_npad_"]),
    ],
)  # fmt: skip
def test_backward(gfx950: Catalog, changes: dict[str, Any], expected: list[str]) -> None:
    assert_stages(gfx950, changes | {"op": "bwd"}, expected, arch="gfx950")


@pytest.fixture(scope="module")
def elsewhere(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """A catalog that fills with the archs and revisions that the tests ask for."""
    path = tmp_path_factory.mktemp("elsewhere") / "catalog.db"
    return Catalog(shutil.copy(populated("gfx942", "2025-07"), path))


@pytest.fixture(scope="module")
def between(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """A catalog of gfx950 at 2025-11."""
    return Catalog(shutil.copy(populated("gfx950", "2025-11"), tmp_path_factory.mktemp("between") / "catalog.db"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # one padding applies: what does not divide is padded, dQ's tile of keys is that of its sum
        ({"op": "bwd"}, ["_npad", "_b16x128x128x", "_convert_dq_d128_bf16_b64x128_batch_o2_npad_"]),
        ({"op": "bwd", "seqlen_q": 48, "seqlen_k": 100}, ["_o2_ps", "_kr_ktr_vr_iglp_psk_", "_b64x128_batch_o2_ps_"]),
        ({"op": "bwd", "seqlen_q": 65, "seqlen_k": 128}, ["_o2_ps", "_kr_ktr_vr_iglp_ps_", "_o2_ps_"]),
        ({"op": "bwd", "hdim_q": 72, **PACKED}, ["_group_o2_psdv", "_kr_ktr_vr_psskddv_", "_group_o2_psd_"]),
        ({"op": "bwd", "hdim_q": 200, "hdim_v": 256}, ["_o2_npad", "_b16x64x256x", "_d256_bf16_b64x64_batch_o2_pd_"]),
        ({"op": "splitkv", **DECODE}, ["_qr_vr_ps_nlogits_nbias_nmask_lse_nsquant_npagedkv", "_unused_ps_nlse_"]),
        ({"op": "splitkv", **DECODE, "page_size": 16}, ["_qr_vr_ps_nlogits_nbias_nmask_lse_nsquant_pagedkv", "_ps_"]),
        ({"op": "splitkv", "hdim_q": 96}, ["_splitkv_d96_", "_combine_d96_bf16_batch_b32_unused_psdv_"]),
        ({"op": "pagedkv", "page_size": 16}, ["_qr_pagedkv_vr_ps_nlogits_nbias_nmask_nlse_nskip_nsquant_pagedkv"]),
        ({"op": "pagedkv", "page_size": 16, "seqlen_k": 100}, ["_qr_pagedkv_vr_pssk_"]),
        (APPEND | {"rope": "half"}, ["fmha_fwd_appendkv_d128_bf16_b64x64x128x128_vr_pskd_half"]),
        (PREFILL | {"page_size": 1, "kv_lookup_table": "sglang"}, ["fmha_batch_prefill_d128_bf16_group_b128x128x32x"]),
    ],
)  # fmt: skip
def test_the_older_revision(elsewhere: Catalog, changes: dict[str, Any], expected: list[str]) -> None:
    assert_stages(elsewhere, changes, expected, arch="gfx942", revision="2025-07")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # the transposing tiles serve short queries, and the one of 64 keys comes before that of 128
        ({}, ["_b128x64x32x128x16x128_r4x1x1_r4x1x1_w32x32x16_w32x32x16_qr_async_trload_vr_npad_"]),
        ({"seqlen_q": 17, "seqlen_k": 4096}, ["_b32x32x128x128x32x128_"]),
        ({"hdim_q": 72}, ["fmha_fwd_d96_bf16_batch_b128x128x32x128x32x96_"]),
        ({"dtype": "fp8bf16", "qscale": "pertensor"}, ["_qr_vr_npad_nlogits_nbias_nmask_nlse_ndropout_nskip_squant_"]),
        # a deterministic dQ is summed over the tiles of keys of the main kernel, any other has one part
        ({"op": "bwd"}, ["_npad_", "_b16x192x128x", "_convert_dq_d128_bf16_b64x0_batch_o2_npad_"]),
        ({"op": "bwd", "deterministic": True}, ["_npad_", "_b16x192x128x", "_b64x192_batch_o2_npad_"]),
        ({"op": "bwd", "deterministic": True, "seqlen_k": 256}, ["_npad_", "_b32x128x128x", "_b64x128_batch_o2_npad_"]),
        ({"op": "bwd", "deterministic": True, "hdim_q": 30, "hdim_v": 128}, ["_npad_", "_b16x128x128x", "_b64x128_"]),
        # at head dim 64 the transposing tile is for at most 256 keys, and pads both head dims or none
        ({"op": "bwd", "hdim_q": 64, "hdim_v": 56}, ["_o2_pdv_", "_maxq0_pdv8_", "_o2_npad_"]),
        ({"op": "bwd", "hdim_q": 64, "hdim_v": 56, "seqlen_k": 256}, ["_o2_pdv_", "_maxq0_pd8dv8_", "_o2_pd_"]),
    ],
)  # fmt: skip
def test_the_revision_between(between: Catalog, changes: dict[str, Any], expected: list[str]) -> None:
    assert_stages(between, changes, expected, arch="gfx950", revision="2025-11")


def test_partial_results_are_combined_by_a_kernel_of_the_same_head_dim(catalog_of: Callable[[str], Catalog]) -> None:
    """RDNA has combine kernels of head dim 96, and no split kernel of it."""
    asked = {"op": "splitkv", "hdim_q": 80}
    expected = ["_splitkv_d128_", "_combine_d128_bf16_batch_b32_unused_psdv_"]
    assert_stages(catalog_of("gfx1100"), asked, expected, arch="gfx1100")


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


@pytest.mark.slow
def test_selecting_populates_what_is_not_there(tmp_path: Any) -> None:
    catalog = Catalog(tmp_path / "new.db")
    assert catalog.select(problem(), arch="gfx942", mask_impl="simplified").kernels[0].variant == "simplified"
    with pytest.raises(SelectionError):
        catalog.select(problem(dtype="bf8"), arch="gfx942", mask_impl="simplified")


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"dtype": "bf8"}, ["dtype=bf8", "the kernels have only: bf16, fp16, fp32"]),
        ({"hdim_q": 257}, ["hdim_fits rejects", "head dims that hold the problem's"]),
        ({"dtype": "fp8bf16", "lse": True}, ["lse=1, but the kernels have only: 0"]),
        ({"op": "splitkv", "dtype": "fp32"}, ["fwd_splitkv", "dtype=fp32, but the kernels have only: bf16, fp16, fp8"]),
        ({"op": "splitkv", "lse": True, **FP8}, ["no fwd_splitkv_combine kernel", "lse=1, but the kernels have only"]),
        ({"op": "splitkv", "page_size": 16, **FP8}, ["paged_kv=1, but the kernels have only: 0"]),
        ({"op": "splitkv", "hdim_q": 48, **FP8}, ["hdim_q_divides rejects", "multiple of the tile's head dim"]),
        ({"op": "splitkv", "num_splits": 129}, ["split_count rejects", "at most 128 splits"]),
        ({"op": "pagedkv", "page_size": 16, "hdim_q": 64}, ["hdim_q_divides rejects 2"]),
        ({"op": "pagedkv", "page_size": 16, "lse": True}, ["lse=1, but the kernels have only: 0"]),
        (APPEND | {"dtype": "fp8", "rope": "inter"}, ["rope=inter, but the kernels have only: no"]),
        (APPEND | {"dtype": "fp32"}, ["dtype=fp32, but the kernels have only: bf16, fp16, fp8"]),
        (PREFILL | {"page_size": 64}, ["page_size_is rejects", "one size of pages: 1, 16 or 1024 tokens"]),
        (PREFILL | {"hdim_q": 100}, ["hdim_q_divides rejects", "16 bytes"]),
        (PREFILL | {"dtype": "fp8bf16"}, ["qscale=no, but the kernels have only: kv_blockscale, pertensor"]),
        (PREFILL | {"dtype": "fp8bf16", "qscale": "kv_blockscale"}, ["page_size_is rejects"]),
        ({"op": "bwd", "dtype": "fp32", "hdim_q": 256}, ["no bwd_dq_dk_dv kernel", "hdim_fits rejects"]),
        ({"op": "bwd", "hdim_q": 264}, ["no bwd_dq_dk_dv kernel", "hdim_fits rejects"]),
        ({"op": "bwd", "dlse": True}, ["no_gradient_of_lse rejects", "takes only the gradient of O"]),
        ({"op": "bwd", "dropout": 1.0}, ["keeps_some_weights rejects"]),
        ({"dropout": 1.0}, ["keeps_some_weights rejects", "kept weights are multiplied by 1 / (1 - dropout)"]),
    ],
)  # fmt: skip
def test_when_nothing_fits_the_error_says_which_trait_or_rule(
    gfx950: Catalog, changes: dict[str, Any], fragments: list[str]
) -> None:
    with pytest.raises(SelectionError) as caught:
        gfx950.select(problem(**changes), arch="gfx950")
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("op", ["fwd", "splitkv"])
def test_a_feature_that_came_later_is_not_ignored(elsewhere: Catalog, op: str) -> None:
    sink = problem(op=op, mask="window", window=(3, 0), sink_size=4)
    with pytest.raises(SelectionError, match="sink=1, but the kernels have only: 0"):
        elsewhere.select(sink, arch="gfx942", revision="2025-07")


@pytest.mark.parametrize("revision", slow_but(["2025-07", "2026-05"], ["2025-07", "2025-11", "2026-05"]))
@pytest.mark.parametrize("family", list(Family))
def test_traits_that_a_family_has_not_are_default_in_all_of_its_rows(
    gfx950: Catalog, elsewhere: Catalog, family: Family, revision: str
) -> None:
    """So asking every family for the default of what its names leave out finds its kernels."""
    catalog = gfx950
    if revision != "2026-05":
        catalog = elsewhere
        catalog.populate("gfx942", revision=revision)
    for name in set(REQUIRED_TRAITS) - grammar_of(family, revision).traits - {"family"}:
        asked = f"SELECT DISTINCT {name} FROM attention_row WHERE family = ? AND revision = ?"
        assert [row[0] for row in catalog.connection.execute(asked, (family, revision))] == [TRAITS[name].default]


def test_hardware_verdicts_are_for_selection_only(catalog_of: Callable[[str], Catalog]) -> None:
    """Parity keeps the fp8 rows of gfx90a, which has no fp8 instructions; selection does not take them."""
    catalog = catalog_of("gfx90a")
    assert catalog.parity("gfx90a", 0).passed
    with pytest.raises(SelectionError, match="the hardware cannot run"):
        catalog.select(problem(dtype="fp8bf16"), arch="gfx90a")
