"""The command line as a user types it: exit codes, one message and no traceback."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import pytest
import typer
from command import catalog
from pydantic import BaseModel, Field

from catalog import ops
from catalog.cli import problem as cli_problem
from catalog.cli.main import app
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host.device import resolve_host_arch


@pytest.fixture(scope="module")
def database(gfx950: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "catalog.db"
    with sqlite3.connect(path) as target:
        gfx950.connection.backup(target)
    target.close()
    return path


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["query", "hdim_q = 128", "--count"], 0, ""),
        pytest.param(
            ["select", "--batch", "1", "--nhead-q", "8", "--seqlen-q", "9", "--hdim-q", "999"],
            1,
            "hdim_q_fits rejects",
            marks=pytest.mark.slow,
        ),
        (["query", "hdim=128"], 2, "Did you mean hdim_v or hdim_q?"),
    ],
)
def test_a_process_exits_with_what_it_found(database: Path, words: list[str], code: int, message: str) -> None:
    command = [sys.executable, "-m", "catalog", "--db", str(database), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, bool(done.stdout)) == (code, code == 0)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_users_own_query_works_as_typed(database: Path) -> None:
    done = catalog("query", "hdim_q=128 AND pipeline='qr_async'", "--format", "json", "--columns", "all", db=database)
    rows = json.loads(done.stdout)
    assert done.returncode == 0
    assert len(rows) > 1000
    assert {(row["hdim_q"], row["pipeline"]) for row in rows} == {(128, "qr_async")}
    counted = catalog("query", "hdim_q=128 AND pipeline='qr_async'", "--count", "--arch", "gfx950", db=database)
    assert int(counted.stdout) == len(rows)


def test_query_options_choose_columns_order_and_number(database: Path) -> None:
    options = ["--columns", "name,tile_m0", "--order-by", "tile_m0 DESC, name", "--limit", "3", "--format", "csv"]
    done = catalog("query", "family='fwd' AND dtype='fp8bf16'", *options, db=database)
    lines = done.stdout.splitlines()
    assert lines[0] == "name,tile_m0"
    assert len(lines) == 4
    assert all(line.endswith(",256") for line in lines[1:])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["query", "hdim=128"], 2, "Did you mean hdim_v or hdim_q?"),
        (["query", "pipeline='qr_asinc'"], 0, "did you mean qr_async?"),
        (["query", "1); DROP TABLE kernel; --"], 2, "Error"),
        (["query", "1", "--arch", "gfx942"], 2, "populate --arch gfx942"),
        (["query", "1", "--format", "xml"], 2, "table, json, jsonl or csv"),
        (["populate", "--arch", "gfx95"], 2, "did you mean gfx950?"),
        (["populate", "--arch", "gfx950", "--receipt", "flahs"], 2, "did you mean flash?"),
        (["populate", "--arch", "host", "--receipt", "0"], 2, "has none"),
        (["populate", "--arch", "gfx950", "--mask-impl", "none"], 2, "generic, simplified"),
        (["parity", "--receipt", "100"], 2, "no reference list for receipt 100"),
        (["select", "--batch", "1", "--nhead-q", "8", "--seqlen-q", "9"], 2, "hdim_q"),
        (
            ["select", "--batch", "1", "--nhead-q", "8", "--seqlen-q", "9", "--hdim-q", "64", "--dtype", "fp61"],
            2,
            "fp16",
        ),
        (
            ["select", "--batch", "1", "--nhead-q", "8", "--seqlen-q", "9", "--hdim-q", "999", "--arch", "sm_90"],
            1,
            "hdim_q_fits rejects",
        ),
        (["select", "--window", "a,b"], 2, "integers separated by commas"),
        (
            ["run", "--batch", "1", "--nhead-q", "8", "--seqlen-q", "9", "--hdim-q", "64", "--arch", "gfx950"],
            1,
            "needs an AMD GPU",
        ),
        (["select", "atention", "--batch", "1"], 2, "did you mean attention?"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_mistakes_get_one_message_and_an_exit_code(database: Path, words: list[str], code: int, message: str) -> None:
    done = catalog(*words, db=database)
    assert done.returncode == code, done
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    "variables",
    [
        {"CATALOG_NUM_THREADS": "many"},
        {"CATALOG_HIPCXX_DEVICE": "zig 'c++"},
        {"CATALOG_DB": "/proc/none/catalog.db"},
        {"CATALOG_DATA_DIR": "/none"},
    ],
)
def test_wrong_settings_are_named(variables: dict[str, str]) -> None:
    done = catalog("populate", "--arch", "gfx950", **variables)
    assert done.returncode in {1, 2}
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr


def test_populate_says_what_it_did(tmp_path: Path) -> None:
    db = tmp_path / "new.db"
    first = catalog("populate", "--arch", "gfx950", "--receipt", "flash", db=db)
    assert first.returncode == 0
    assert "13,871 kernels of gfx950" in first.stdout
    assert catalog("populate", "--arch", "gfx950", "--receipt", "flash", db=db).stdout.startswith("Unchanged: gfx950")


@pytest.mark.slow
def test_populate_and_parity_without_options_and_of_simplified_masks(tmp_path: Path) -> None:
    db = tmp_path / "new.db"
    assert "34,889" in catalog("populate", "--arch", "gfx950", db=db).stdout
    named = catalog("parity", "--receipt", "flash", "--mask-impl", "simplified", db=db)
    assert named.stdout.splitlines() == [
        "PASS: 6,270 kernels across 9 families (gfx950, receipt 2, simplified)",
        "PASS: 8,265 kernels across 9 families (gfx950, receipt 3, simplified)",
    ]


@pytest.mark.slow
def test_parity_and_its_exit_codes(populated: Callable[..., Path], tmp_path: Path) -> None:
    db = shutil.copy(populated("gfx950"), tmp_path / "catalog.db")
    done = catalog("parity", "--receipt", "0", db=db)
    assert done.returncode == 0
    assert done.stdout == "PASS: 34,889 kernels across 9 families (gfx950, receipt 0, generic)\n"
    named = catalog("parity", "--receipt", "flash", db=db)
    assert named.stdout.splitlines() == [
        "PASS: 9,742 kernels across 9 families (gfx950, receipt 2, generic)",
        "PASS: 12,771 kernels across 9 families (gfx950, receipt 3, generic)",
    ]
    gone = "SELECT key FROM attention_row WHERE family = 'fwd_appendkv' AND mask_impl = 'generic'"
    Catalog(db).connection.execute(f"DELETE FROM kernel WHERE key IN ({gone})")
    failed = catalog("parity", db=db)
    assert failed.returncode == 1
    assert failed.stdout.startswith("FAIL: 99 missing, 0 extra of 34,889 kernels")
    assert "fwd_appendkv: 99 missing" in failed.stdout


def test_a_problem_is_selected_built_run_and_validated_from_the_shell(host_file: Path, tmp_path: Path) -> None:
    db = shutil.copy(host_file, tmp_path / "host.db")
    problem = ["--batch", "2", "--nhead-q", "4", "--nhead-k", "2", "--seqlen-q", "33", "--hdim-q", "64"]
    problem += ["--dtype", "fp32", "--mask", "causal", "--lse"]
    [selected] = json.loads(catalog("select", *problem, "--format", "json", db=db).stdout)
    assert selected["name"].endswith(resolve_host_arch())
    done = catalog("run", *problem, "--validate", "--format", "json", db=db)
    [facts] = json.loads(done.stdout)
    assert facts["kernel"] == selected["name"]
    assert facts["validation"] == "passed"
    assert facts["max_error_o"] < 1e-5
    built = catalog("build", f"name='{selected['name']}'", db=db)
    assert "1 kernel: 0 compiled" in built.stdout
    assert catalog("query", "built", "--count", db=db).stdout == "1\n"


def test_columns_are_listed_with_what_they_may_hold() -> None:
    header, *lines = catalog("columns", "--format", "csv").stdout.splitlines()
    assert header == "column,type,domain,default,meaning"
    assert any(line.startswith("hdim_q,INTEGER,") for line in lines)


def test_doctor_lists_every_setting_and_arch(database: Path, tmp_path: Path) -> None:
    def doctor(*words: str, **variables: object) -> subprocess.CompletedProcess[str]:
        without = dict.fromkeys(("CATALOG_HIPCXX", "CATALOG_NVCC"), "no-compiler")  # each try takes seconds
        return catalog("doctor", *words, db=database, **without, **variables)

    shown = doctor().stdout
    for word in ("CATALOG_DB", "CATALOG_CACHE_DIR", "CATALOG_CXX", "gfx950", "x86_64_v3", "aarch64"):
        assert word in shown
    rows = json.loads(doctor("--format", "json").stdout)
    assert len(shown.splitlines()) == len(rows) + 2, "a finding is a line, with its hint"
    (tmp_path / "file").touch()
    retried = doctor("--retry", CATALOG_CACHE_DIR=tmp_path / "file")
    assert (retried.returncode, str(tmp_path / "file") in retried.stderr) == (1, True), "nothing can be forgotten"


class MatmulProblem(BaseModel):
    m: Annotated[int, Field(ge=1)] = Field(description="rows of A and C")
    layout: Literal["rcr", "rrr"] = Field("rcr", description="layouts of A, B and C")
    alpha: float | None = Field(None, description="factor of the product")
    groups: tuple[int, ...] | None = Field(None, description="rows of each group")
    bias: bool = Field(False, description="add a bias")


def test_the_options_of_a_problem_are_those_of_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = SimpleNamespace(name="matmul", problem=MatmulProblem)
    monkeypatch.setattr(ops, "plugins", lambda: [SimpleNamespace(object=matmul)])
    select = catalog("select", "matmul", "--help").stdout
    for line in (
        r"--m <?INT\w*>?\s+Rows of A and C\.",
        r"--layout <?\w+>?\s+Layouts of A, B and C: rcr, rrr; default: rcr\.",
        r"--alpha <?FLOAT>?\s+Factor of the product\.",
        r"--groups INTEGERS\s+Rows of each group\.",
        r"--bias\s+Add a bias\.",
    ):
        assert re.search(line, select, re.IGNORECASE), line
    assert "\n  --arch" in select
    assert "\n  --hdim-q" not in select
    assert catalog("select", "matmul", "--hdim-q", "64").returncode == 2
    for words in (["select"], ["select", "attention"]):
        assert "\n  --hdim-q" in catalog(*words, "--help").stdout


def test_a_problem_has_the_fields_whose_options_are_given() -> None:
    command = typer.main.get_command(app).commands["select"]  # type: ignore[attr-defined]
    words = ["attention", "--batch", "2", "--lse", "--window", "128,0", "--dropout", "0.5", "--dtype", "bf16"]
    context = command.make_context("select", [*words, "--limit", "3"])
    stated = cli_problem.stated_problem(context)
    assert stated.fields == {"batch": 2, "lse": True, "window": [128, 0], "dropout": 0.5, "dtype": "bf16"}
    assert context.params["limit"] == 3
    assert not cli_problem.stated_problem(command.make_context("select", []))


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, runpy; sys.argv = ['catalog', '--help']\n"
    code += "try: runpy.run_module('catalog', run_name='__main__')\nexcept SystemExit: pass\n"
    heavy = {"numpy", "pydantic", "sqlite_utils", "ml_dtypes", "archspec", "sqlite3", "yaml"}
    code += f"print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
