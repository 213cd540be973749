"""Families that other distributions add to an operation: tests/outsider_family to GEMM, and one to attention.

Their kernels compete with the operation's own, and the catalog does not know them.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import command
import pytest
from conftest import forget_packages
from test_outsider import FAMILY, Run, points_of, rows, steady_clock
from test_select_measured import record_timings

from catalog import doctor, ops
from catalog.runtime.catalog import Catalog

ROW = ("gemm", "--m", 1, "--n", 100, "--k", 300, "--dtype", "fp32")
MORE_ROWS = ("gemm", "--m", 2, *ROW[3:])


@pytest.fixture
def with_family(install: Callable[[str, str | Path, str], None], tmp_path: Path) -> Run:
    """The command line on a catalog of GEMM kernels, some of a family of another distribution."""
    install("gemv", FAMILY / "gemv", points_of(FAMILY))
    run = partial(command.catalog, db=tmp_path / "catalog.db")
    done = run("populate", "gemm", "--arch", "host", "--where", "dtype = 'fp32' AND layout = 'rcr'")
    words = done.stdout.split()
    assert words[words.index("gemv") + 1] == "2", done.stderr
    return run


def families_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [row["stage"] for row in rows(done)]


def test_a_family_of_another_distribution_competes_with_the_operation_s_own(with_family: Run, tmp_path: Path) -> None:
    listed = rows(with_family("query", "family = 'gemv'", "--order-by", "name", "--format", "json"))
    assert [row["name"].split("_")[:4] for row in listed] == [["gemv", "fp32", "rcr", n] for n in ("n16", "n64")]
    select = partial(with_family, "select", *ROW, "--format", "json")
    assert families_of(select()) == ["gemv"]
    assert families_of(select("--limit", 4)) == ["gemv", "universal"] * 2, "they take turns until they are measured"
    assert set(families_of(with_family("select", *MORE_ROWS, "--limit", 9, "--format", "json"))) == {"universal"}
    explained = with_family("explain", *MORE_ROWS)
    of_any_columns = "family = 'universal' AND pipeline <> 'host_few_columns'"
    universal = with_family("query", of_any_columns, "--count").stdout.strip()
    assert explained.stdout.startswith(f"{universal} universal, 0 gemv kernels answer the problem")
    assert "one_row" in explained.stdout

    asked = ops.problem_of({"operation": "gemm", "m": 1, "n": 100, "k": 300, "dtype": "fp32"})
    with Catalog(tmp_path / "catalog.db") as own:
        theirs, ours, *_ = (one.kernel for one in own.candidates(asked))
        for medians in ((2.0, 1.0), (1.0, 2.0)):
            times = dict(zip((theirs.id, ours.id), medians, strict=True))
            record_timings(own, asked, times, device=own.device_info("host"))
            own.forget()
            choice = own.choice(asked)
            assert (choice.evidence, choice.candidates[0].kernel.id) == ("measured", min(times, key=times.__getitem__))
            assert own.plan(asked, ours).kernels == (ours,)


def test_a_kernel_of_the_family_is_built_run_and_right(with_family: Run, tmp_path: Path) -> None:
    (ran,) = rows(
        with_family("run", *ROW, "--beta", 0.5, "--bias", "--activation", "silu", "--validate", "--format", "json")
    )
    assert ran["kernel"].startswith("gemv_fp32_rcr_n64_")
    assert ran["validation"] == "passed"
    out = tmp_path / "out"
    assert with_family("export", "--where", "family = 'gemv'", "--format", "make", "--out", out).returncode == 0
    assert (out / "include" / "gemv" / "gemv.hpp").is_file()


@pytest.mark.slow
def test_the_family_conforms_and_is_tuned(with_family: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    steady_clock(monkeypatch)
    found = rows(with_family("conformance", "--arch", "host", "--operation", "gemm", "--format", "json"))
    assert {row["verdict"] for row in found if row["subject"] == "gemv"} == {"passed"}
    (tuned,) = rows(with_family("tune", *ROW, "--precision", 0.2, "--format", "json"))
    assert tuned["kernels"] == int(
        with_family("query", "family IN ('gemv', 'universal') AND pipeline <> 'host_few_columns'", "--count").stdout
    )


@pytest.mark.slow
def test_kernels_of_a_removed_family_are_reported(with_family: Run, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "gemv-1.2.dist-info")
    forget_packages()
    assert families_of(with_family("select", *ROW, "--format", "json")) == ["universal"]
    error, hint = with_family("build", "family = 'gemv'").stderr.splitlines()
    assert error.endswith(": no installed package adds the family 'gemv' to gemm")
    assert hint.startswith("Hint: Install the package, or drop its kernels: catalog populate --arch ")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("FAMILY = Gemv()", "FAMILY = 7"), "is not a catalog.ops.protocol.Family, but 7"),
        (("def grammar", "def grammer"), "Can't instantiate abstract class Gemv"),
        (('"universal"', '"plain"'), "the operation has no family plain; it has blockscale, grouped, "),
    ],
    ids=["object", "abstract", "beside"],
)
def test_a_family_that_cannot_be_used_is_reported_and_left_out(
    install: Callable[[str, str | Path, str], None],
    caplog: pytest.LogCaptureFixture,
    change: tuple[str, str],
    reason: str,
) -> None:
    source = (FAMILY / "gemv" / "__init__.py").read_text()
    install("gemv", source.replace(*change), points_of(FAMILY).partition("[catalog.gemm.pipelines]")[0])
    with caplog.at_level(logging.WARNING):
        assert "gemv" not in ops.operation("gemm").traits.families
    (reported,) = caplog.messages
    assert re.match(rf"family gemv of gemv 1.2 cannot be used: .*{re.escape(reason)}", reported)
    assert any(finding.value == "unusable" and reason in finding.about for finding in doctor.about_plugins())


OF_ATTENTION_ITSELF = """
from dataclasses import replace
from pathlib import Path

from catalog.ops.attention.kernels.host.emit import HOST
from catalog.ops.attention.names import grammar_of
from catalog.ops.protocol import Family
from catalog.schema.name_parts import Literal


class Parts(Family):
    specs = Path(__file__).parent / "specs"
    beside = ("fwd_splitkv",)
    after = ("fwd_splitkv_combine",)
    order = -1

    def grammar(self, family, lineage):
        own = grammar_of("fwd_splitkv", lineage.known)
        return replace(own, family=family, parts=(Literal("parts"), *own.parts[1:]))

    def emit(self, kernel, backend, memory):
        return HOST.source(kernel, "fmha_fwd_splitkv")


FAMILY = Parts()
"""
PARTS = {
    "source": "here",
    "tiles_of": "fwd",
    "first_tiles": 1,
    "variants": [
        {
            "id": "parts",
            "dtype": ["fp32"],
            "traits": {"mode": "batch", "lse": True, "pipeline": "host_panel"}
            | dict.fromkeys(("pad_s", "pad_sk", "pad_d", "pad_dv"), 1),
        }
    ],
    "yields": [{"family": "parts"}],
}
HEAD_DIMS = {
    "id": "head_dims",
    "expr": "hdim_q = :hdim_q AND hdim_v = :hdim_v",
    "reason": "no padding",
    "source": "here",
}


@pytest.mark.slow
def test_a_family_of_attention_runs_with_the_operation_s_own_stages(
    install: Callable[[str, str | Path, str], None], tmp_path: Path
) -> None:
    install("parts", OF_ATTENTION_ITSELF, "[catalog.attention.families]\nparts = parts:FAMILY\n")
    spec = tmp_path / "specs" / "native" / "host.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"enumerations": {"parts": PARTS}, "select": {"parts": {"rules": [HEAD_DIMS]}}}))
    run = partial(command.catalog, db=tmp_path / "catalog.db")
    where = "family IN ('fwd_splitkv', 'fwd_splitkv_combine', 'parts')"
    done = run("populate", "--arch", "host", "--where", where)
    assert done.returncode == 0, done.stderr
    split = ("--op", "splitkv", "--batch", 1, "--nhead-q", 2, "--seqlen-k", 900, "--hdim-q", 32, "--dtype", "fp32")
    best = rows(run("select", *split, "--seqlen-q", 3, "--format", "json"))
    assert [row["stage"] for row in best] == ["parts", "fwd_splitkv_combine"]
    assert best[0]["name"].startswith("parts_d32_fp32_batch_")
    for asked in ((), ("--num-splits", 3)):
        (ran,) = rows(run("run", *split, "--seqlen-q", 3, *asked, "--validate", "--format", "json"))
        assert ran["validation"] == "passed"
