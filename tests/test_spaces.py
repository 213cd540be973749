"""The dispatcher's sweeps: the same names as upstream's, and restricted as asked."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from test_live import make_checkout

from catalog.build.targets import CK
from catalog.errors import BuildError, ToolchainError, UsageError
from catalog.ops.attention.kernels.ck.headers import all_headers
from catalog.registry.transactions import interruptible
from catalog.rules.explain import Verdict
from catalog.rules.restriction import restriction
from catalog.runtime.catalog import Catalog
from catalog.settings import settings

DATA = Path(__file__).parent.parent / "data"
SWEEPS = {
    (row["arch"], row["config"]): (int(row["kernels"]), row["sha256_of_sorted_names"])
    for row in csv.DictReader((DATA / "parity" / "rules_space.csv").open())
}


def sweep(catalog: Catalog, arch: str, config: Path, *, space: str = "rules", where: str = "", **files: Any) -> int:
    spec = catalog.spec(arch, space=space)
    restricted = restriction(spec, (config,), where, files.get("filter_file"))
    return catalog.populate(arch, space=space, restriction=restricted).kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "config"),
    [(arch, config) for arch in ("gfx942", "gfx950") for config in ("appendkv", "bwd", "fwd_ci", "pagedkv")]
    + [("gfx950", "fwd")],
)
def test_a_sweep_gives_the_dispatchers_names(tmp_path: Path, arch: str, config: str) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    kernels, digest = SWEEPS[arch, config]
    assert sweep(catalog, arch, DATA / "sweeps" / f"{config}.json") == kernels
    names = sorted(name for (name,) in catalog.connection.execute("SELECT dispatcher_name FROM kernels"))
    assert hashlib.sha256("\n".join(names).encode()).hexdigest() == digest


def test_sweeps_stand_beside_upstreams_codegen_and_are_not_selected_from(copied: Catalog) -> None:
    before = copied.connection.execute("SELECT count(*) FROM attention_row WHERE space = 'ck'").fetchone()[0]
    assert sweep(copied, "gfx950", DATA / "sweeps" / "fwd_ci.json") == 1860
    assert copied.connection.execute("SELECT count(*) FROM attention_row WHERE space = 'ck'").fetchone()[0] == before
    assert copied.parity("gfx950", 0).passed


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("EXISTS (SELECT 1 FROM kernel)", "subqueries are not allowed"),
        ("length(replace(dtype, 'f', name)) > 9", "function replace is not allowed"),
        ("max(hdim_q) = 128", "misuse of aggregate"),
        ("hdim_q = 128) OR (1", "never opened"),
        ("hdim_q = 128 AND hdmi_v = 64", "did you mean hdim_v?"),
    ],
)
def test_a_restriction_decides_on_one_row(copied: Catalog, where: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        restriction(copied.spec("gfx950", space="rules"), (), where, None)


def test_ctrl_c_ends_a_statement_that_makes_rows(copied: Catalog) -> None:
    endless = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    ctrl_c = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt), interruptible(copied.connection):
        copied.connection.execute(endless)
    assert copied.connection.execute("SELECT 1").fetchone()[0] == 1, "the connection is of use as before"


@pytest.mark.slow
def test_another_restriction_replaces_the_rows_of_the_space(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    config = DATA / "sweeps" / "fwd_ci.json"
    keep = tmp_path / "keep.py"
    keep.write_text(
        "def filter_config(c):\n    return c.hdim_q == 128 and c.data_type == 'fp16' and c.tile_m0 == 128\n"
    )
    everything = sweep(catalog, "gfx950", config)
    assert sweep(catalog, "gfx950", config, where="hdim_q = 128 AND tile_m0 = 128") == sweep(
        catalog, "gfx950", config, filter_file=keep
    )
    rows = catalog.connection.execute("SELECT DISTINCT hdim_q, tile_m0 FROM attention_row").fetchall()
    assert [tuple(row) for row in rows] == [(128, 128)]
    assert sweep(catalog, "gfx950", config) == everything


def test_an_edited_filter_file_is_another_restriction(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    keep = tmp_path / "keep.py"
    for hdim in (128, 64):
        keep.write_text(f"def filter_config(c):\n    return c.hdim_q == {hdim}\n")
        sweep(catalog, "gfx950", DATA / "sweeps" / "fwd_ci.json", filter_file=keep)
        assert [row[0] for row in catalog.connection.execute("SELECT DISTINCT hdim_q FROM attention_row")] == [hdim]


def test_block_per_cu_is_swept_when_a_file_lists_it(tmp_path: Path) -> None:
    config = tmp_path / "bpc.json"
    document = json.loads((DATA / "sweeps" / "fwd_ci.json").read_text())
    document["trait_config"]["block_per_cu"] = {"values": [-1, 1, 2]}
    config.write_text(json.dumps(document))
    assert sweep(Catalog(tmp_path / "catalog.db"), "gfx950", config) == 3 * 1860


def test_the_exhaustive_space_leaves_the_constraints_out(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    sweep(catalog, "gfx950", DATA / "sweeps" / "fwd_ci.json", space="exhaustive")
    rejected = "hdim_q = 128 AND hdim_v = 128 AND tile_n0 <> 128"
    assert catalog.connection.execute(f"SELECT count(*) FROM attention_row WHERE {rejected}").fetchone()[0]
    sweep(catalog, "gfx950", DATA / "sweeps" / "fwd_ci.json", space="rules")
    where = f"space = 'rules' AND {rejected}"
    assert not catalog.connection.execute(f"SELECT count(*) FROM attention_row WHERE {where}").fetchone()[0]


@pytest.mark.slow
def test_the_headers_refuse_rows_of_a_sweep_before_a_compiler_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATALOG_HIPCXX", str(tmp_path / "no-compiler"))
    settings.cache_clear()
    catalog = Catalog(tmp_path / "catalog.db")
    sweep(catalog, "gfx942", DATA / "sweeps" / "fwd_ci.json")
    (refused,) = catalog.kernels("tile_k0max % tile_k0 <> 0", arch="gfx942", limit=1)
    with pytest.raises(BuildError, match=r"does not compile: the unroll over the head dim must divide"):
        catalog.build(refused)
    (report,) = catalog.builder.build_many([refused]).failures
    assert "does not compile" in report.error.message
    (accepted,) = catalog.kernels("tile_k0max % tile_k0 = 0 AND wave_m0 = 4 AND tile_n0 < 256", arch="gfx942", limit=1)
    assert catalog.refusal(accepted) is None
    with pytest.raises(ToolchainError, match="no-compiler"):
        catalog.build(accepted)
    settings.cache_clear()


@pytest.mark.parametrize("revision", slow_but(["2025-11"], ["2025-07", "2025-11"]))
def test_header_rules_accept_the_tiles_that_upstream_lists(
    revision: str, populated: Callable[..., Path], tmp_path: Path
) -> None:
    catalog = Catalog(shutil.copy(populated("gfx90a", revision), tmp_path / "catalog.db"))
    rules = [rule for rule in catalog.spec("gfx90a", space="rules").demands if revision in rule.headers]
    # Upstream's batch prefill states no page size, and at 2025-07 its dropout overruns LDS.
    of_tiles = [rule.expr for rule in rules if rule.id not in ("pages_of_one_token", "dropout_of_wide_warp_tiles")]
    assert len(of_tiles) > 15
    refused = " OR ".join(f"({expr}) IS NOT 1" for expr in of_tiles)
    assert not catalog.connection.execute(f"SELECT name FROM attention_row WHERE {refused}").fetchall()


COMPILED = [
    ("fwd_pagedkv qr_pagedkv fp16 64x64x32x160x32x256 4 16x16x16", "2025-07", None),
    ("batch_prefill qr_async fp16 16x256x32x128x32x192 1 16x16x16", "2025-07", None),
    ("batch_prefill qr_async bf16 128x32x32x128x32x128 8 16x16x16", "2025-07", None),
    ("fwd_pagedkv qr_pagedkv bf16 16x384x64x128x32x128 1 16x16x16", "2025-11", None),
    ("fwd_pagedkv qr_pagedkv fp16 128x256x32x192x32x192 8 16x16x16", "2025-11", None),
    ("fwd_splitkv qr fp16 128x64x32x160x32x256 8 16x16x16", "2025-11", None),
    ("fwd_pagedkv qr_pagedkv fp16 256x256x32x64x32x64 16 16x16x16", "2025-07", "values_in_pairs"),
    ("batch_prefill qr_async bf16 64x96x16x96x32x96 4 16x16x16", "2025-11", "values_fill_threads"),
    ("batch_prefill qr_async fp16 16x256x96x192x32x192 1 16x16x16", "2025-07", "pages_of_whole_vectors"),
    ("fwd_pagedkv qr_pagedkv fp16 256x256x32x160x32x256 16 16x16x16", "2025-11", "values_fill_rows_of_lds"),
    ("batch_prefill qr_async bf16 256x32x16x128x32x192 16 16x16x16", "2025-11", "keys_fill_async_loads"),
    ("fwd qr fp16 128x64x32x128x16x128 8 16x16x32", "2025-11", "step_holds_a_warp_tile"),
    ("fwd qr fp16 64x32x32x256x32x256 4 16x16x32", "2025-11", "groups_of_8_matrix_instructions"),
    ("fwd_pagedkv qr_pagedkv fp16 64x256x128x256x32x256 4 16x16x16", "2025-11", "lds_holds_keys"),
    ("fwd qr_async_trload bf16 32x192x32x160x32x256 1 32x32x16", "2025-11", "loads_are_counted"),
    ("fwd qr_async_trload bf16 128x192x256x256x32x256 4 32x32x16", "2025-11", "lds_holds_transposed_tiles"),
    ("fwd qr fp8bf16 128x32x32x64x32x64 4 32x32x32 dropout", "2025-11", "no_dropout_of_bytes"),
    ("fwd qr fp8 128x32x32x64x32x64 4 32x32x32 dropout", "2025-07", None),
    ("fwd qr bf16 128x32x96x128x32x192 8 16x16x32 unpadded", "2025-07", "keys_fill_vectors"),
    ("fwd_splitkv qr fp8 64x192x128x256x128x256 2 32x32x32", "2025-07", "unroll_divides_keys"),
    ("fwd qr bf16 16x128x32x96x32x96 1 16x16x32 dropout", "2025-07", "dropout_of_wide_warp_tiles"),
    ("fwd qr bf16 16x128x32x96x32x96 1 16x16x32", "2025-07", None),
    ("bwd_dq_dk_dv no bf16 32x128x96x32x96x32x32x96x96 4 16x16x32 unpadded", "2025-07", "queries_fill_vectors"),
    ("bwd_dq_dk_dv no bf16 32x128x96x32x96x32x32x96x96 4 16x16x32", "2025-07", None),
    ("bwd_dq_dk_dv no fp16 16x192x128x16x128x16x32x128x128 4 16x16x32", "2025-11", "lds_holds_backward_tiles"),
    ("bwd_dq_dk_dv no fp16 16x128x128x16x128x16x32x128x128 4 16x16x32", "2025-11", None),
    ("fwd_pagedkv qr_pagedkv bf8 128x128x32x128x32x128 4 32x32x32", "2025-11", "no_bf8"),
]
"""Family, pipeline, dtype, tile, waves, warp tile and features of compiled rows, and the rule that says the result."""


@pytest.mark.parametrize(("compiled", "headers", "refused"), COMPILED)
def test_header_rules_say_what_the_compiler_said(
    compiled: str, headers: str, refused: str | None, tmp_path: Path
) -> None:
    family, pipeline, dtype, tile, waves, warp, *features = compiled.split()
    stated: dict[str, Any] = {"family": family, "pipeline": pipeline, "dtype": dtype, "vlayout": "row", "bias": "no"}
    stated["trload"] = "trload" in pipeline
    extents = ("tile_m0", "tile_n0", "tile_k0", "tile_n1", "tile_k1", "tile_k0max", *(f"tile_bwd{i}" for i in "678"))
    stated |= dict(zip(extents, map(int, tile.split("x")), strict=False))  # forward tiles have six
    stated |= {"wave_m0": int(waves), "wave_n0": 1, "pad_s": 1, "pad_d": 1, "pad_dv": 1} | dict.fromkeys(features, True)
    if stated.pop("unpadded", False):
        stated |= {"pad_d": 0, "pad_dv": 0}
    for gemm in "01":
        stated |= {f"warp_{axis}{gemm}": int(extent) for axis, extent in zip("mnk", warp.split("x"), strict=True)}
    catalog = Catalog(tmp_path / "catalog.db")
    found = catalog.explain(stated, arch="gfx942", space="rules").findings
    kinds = ("headers", f"headers {headers}")
    rejected = [f.id for f in found if f.kind in kinds and f.verdict is Verdict.REJECTED]
    assert rejected == [] if refused is None else refused in rejected


def test_what_only_one_revisions_headers_refuse_can_be_built_with_others(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    sweep(catalog, "gfx942", DATA / "sweeps" / "receipt0_fwd.json", where="dtype = 'fp8fp32' AND tile_k0 = 32")
    explained = catalog.explain({"family": "fwd", "dtype": "fp8fp32"}, arch="gfx942", space="rules")
    rejected = {(finding.kind, finding.id) for finding in explained.findings if finding.verdict is Verdict.REJECTED}
    assert rejected == {("headers 2025-07", "no_wide_output")}
    assert not explained.rejections


@pytest.mark.parametrize(
    ("where", "family", "answer"),
    [
        ({"space": "rules"}, "fwd", "No rule alone rejects these traits; populate the family fwd of gfx90a"),
        (
            {"operation": "gemm", "space": "dispatcher", "revision": "2026-07"},
            "multi_abd",
            "Not runnable, rejected by: one_a_and_one_b; populate the family multi_abd of gfx90a",
        ),
    ],
)
def test_rules_are_explained_before_any_kernel_is_populated(
    where: dict[str, str], family: str, answer: str, tmp_path: Path
) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    explained = catalog.explain({"family": family, "dtype": "fp16"}, arch="gfx90a", **where)
    assert (explained.kernels, explained.matches) == (0, ())
    assert explained.summary.startswith(answer)


@pytest.mark.parametrize(
    ("headers", "refused"),
    [("", ["sink"]), ("2025-07", ["fp8fp32", "sink"]), ("2025-11", ["sink"]), ("unknown", [])],
    ids=["no checkout", "2025-07", "2025-11", "unknown"],
)
def test_a_rule_holds_for_the_headers_where_it_was_seen(
    headers: str, refused: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checkout, a row is refused if every known revision refuses it."""
    catalog = Catalog(tmp_path / "catalog.db")
    one_tile = "tile_m0 = 128 AND tile_n0 = 128 AND tile_k0 = 32 AND bias = 'no' AND mask = 'no' AND mode = 'batch'"
    sweep(catalog, "gfx942", DATA / "sweeps" / "receipt0_fwd.json", where=f"{one_tile} AND hdim_q = 128")
    if headers:
        root = make_checkout(tmp_path / "ck")
        fmha = root / "include" / "ck_tile" / "ops" / "fmha"
        for name in all_headers()[headers].has if headers in all_headers() else ["new.hpp"]:
            (fmha / name).parent.mkdir(parents=True, exist_ok=True)
            (fmha / name).touch()
        monkeypatch.setenv("CATALOG_CK_ROOT", str(root))
    settings.cache_clear()
    plain = "qscale = 'no' AND NOT logits AND NOT dropout AND pad_sk"
    asked = {"sink": f"dtype = 'fp16' AND sink AND {plain}", "fp8fp32": f"dtype = 'fp8fp32' AND NOT sink AND {plain}"}
    kernels = {name: catalog.kernels(where, arch="gfx942", limit=1)[0] for name, where in asked.items()}
    assert sorted(name for name, kernel in kernels.items() if catalog.refusal(kernel)) == refused
    if headers == "unknown":
        with pytest.raises(BuildError, match="the headers of none of the revisions 2025-07, 2025-11"):
            CK.emit(kernels["sink"], tmp_path)
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("{", ["not JSON"]),
        ("[" * 100_000, ["nested too deeply"]),
        ('{"trait_config": {"block_per_cu": {"values": [%s]}}}' % ("1" * 5000), ["digits"]),
        ("[]", ["object"]),
        ('{"variant": "fwdd"}', ["variant", "'fwdd'", "did you mean fwd?", "splitkv"]),
        ('{"variants": "fwd"}', ["'variants'", "did you mean variant?"]),
        ('{"trait_config": {"datatype": {"values": []}}}', ["'datatype'", "did you mean data_type?"]),
        ('{"trait_config": {"lse": [true]}}', ["trait_config.lse"]),
        ('{"trait_config": {"lse": {"values": [1]}}}', ["trait_config.lse.values: 1", "false, true"]),
        ('{"trait_config": {"mask": {"values": ["causal"]}}}', ['"causal" is not allowed', "top_left"]),
        ('{"trait_config": {"block_per_cu": {"values": [0]}}}', ["integers above 0"]),
    ],
)
def test_a_wrong_sweep_file_names_the_place_and_what_is_allowed(
    tmp_path: Path, text: str, fragments: list[str]
) -> None:
    config = tmp_path / "sweep.json"
    config.write_text(text)
    with pytest.raises(UsageError) as caught:
        sweep(Catalog(tmp_path / "catalog.db"), "gfx950", config)
    for fragment in ["sweep.json", *fragments]:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1", "defines no function filter_config"),
        ("def filter_config(c): return c.hdimq", "hdimq"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("def filter_config(c): raise SystemExit(0)", "SystemExit: 0"),
        ("x = " + "(" * 10_000, "SyntaxError|MemoryError|RecursionError"),
        ("x = 1\0", "null bytes"),
    ],
)
def test_a_filter_that_fails_says_why_and_changes_nothing(tmp_path: Path, code: str, message: str) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    keep = tmp_path / "keep.py"
    keep.write_text(code)
    with pytest.raises(UsageError, match=message):
        sweep(catalog, "gfx950", DATA / "sweeps" / "fwd_ci.json", filter_file=keep)
    assert not catalog.connection.execute("SELECT count(*) FROM attention_row").fetchone()[0]


@pytest.mark.parametrize("option", ["config", "filter_file"])
def test_a_pipe_is_not_waited_for(option: str, tmp_path: Path) -> None:
    files = {"config": DATA / "sweeps" / "fwd_ci.json", "filter_file": None, option: tmp_path / "pipe.py"}
    os.mkfifo(tmp_path / "pipe.py")
    catalog = Catalog(tmp_path / "catalog.db")
    with pytest.raises(UsageError, match="a pipe, not a regular file"):
        sweep(catalog, "gfx950", files["config"], filter_file=files["filter_file"])
