"""Timings of kernels that are no rows: tables of other projects are imported, kept whole, queried, merged, exported."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import command
import pytest
from conftest import copy_of
from foreign_tables import FDB, FMOE, GEMM, HEADER, TUNABLEOP, rows, write
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from catalog import settings
from catalog.errors import UsageError
from catalog.foreign.exporting import export_tuned, export_untuned
from catalog.foreign.formats import FORMATS, read_format
from catalog.foreign.importing import import_tables
from catalog.foreign.parsed import Given
from catalog.ops import operation
from catalog.ops.attention.operation import OPERATION
from catalog.ops.attention.problem import Problem
from catalog.ops.gemm.problem import GemmProblem
from catalog.registry import foreign
from catalog.registry.rows import Device, ForeignTiming
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices import DeviceInfo


def dicts(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "catalog.db")


READ = {
    "a8w8_blockscale_tuned_gemm_of_mine.csv": (
        ("aiter-csv", GEMM),
        ("aiter", "gemm", "gfx942", '{"cores": 304}', "a8w8_blockscale", "made_up_256x16x64", 0.0195, ""),
        {"M": 16, "N": 1536, "K": 7168},
    ),
    "tuned_fmoe.csv": (
        ("aiter-csv", FMOE),
        ("aiter", "moe", "gfx950", '{"cores": 256}', "fmoe", "made_up_stage1 + made_up_stage2", 0.15075, ""),
        {"token": 64, "act_type": "Silu", "q_dtype_w": "fp8", "use_g1u1": 1},
    ),
    "tunableop_results0.csv": (
        ("tunableop", TUNABLEOP),
        (
            *("pytorch", "gemm", "gfx942", "{}", "results", "Gemm_Hipblaslt_77", 0.0125),
            "PT_VERSION 2.6.0, GCN_ARCH_NAME gfx942:sramecc+:xnack-",
        ),
        {"op": "GemmTunableOp_Half_TN", "dtypes": "Half", "transposed": "tn", "M": 64, "N": 128, "K": 256},
    ),
    "gfx942130.HIP.3_4_0_ab12.ufdb.txt": (
        ("miopen-fdb", FDB),
        ("miopen", "conv", "gfx942", '{"cores": 304}', "find", "SolverA", 0.25, "MIOpen HIP 3_4_0_ab12"),
        {"C": 64, "Hi": 56, "filter": "3x3", "K": 128, "N": 8, "stride": "2x2", "direction": "F", "group": 2},
    ),
}
"""By a file's name: its format and text, what it states about its first record, and about that record's problem."""


@pytest.mark.parametrize("name", READ)
def test_each_format_is_read_into_the_same_columns(catalog: Catalog, tmp_path: Path, name: str) -> None:
    (form, text), first, problem = READ[name]
    path = write(tmp_path / name, text)
    report = import_tables(catalog, form, [path])
    columns = "source, operation, arch, facts, table_name, name, round(median_ms, 9), tool"
    assert rows(catalog, columns)[0] == first
    stated = json.loads(rows(catalog, "problem")[0][0])
    assert {field: stated.get(field) for field in problem} == problem
    assert report.files[0].added == len(report.files[0].records) == len(rows(catalog, "key"))
    assert import_tables(catalog, form, [path]).files[0].added == 0, "importing again adds nothing"


def test_a_row_without_a_time_is_kept_and_reported(catalog: Catalog, tmp_path: Path) -> None:
    report = import_tables(catalog, "aiter-csv", [write(tmp_path / "tuned_fmoe.csv", FMOE)])
    assert [note.rpartition("/")[2] for note in report.notes] == ["tuned_fmoe.csv:3: kept without a time"]
    assert rows(catalog, "name, median_ms", "line = 3") == [("made_up_one_stage", None)]


def test_what_real_tables_of_aiter_have_is_accepted(catalog: Catalog, tmp_path: Path) -> None:
    """A model's name before the table's, the arch in a column, no result of a failed tuning, rows without last fields.

    A tag distinguishes a row from another of the same problem.
    """
    header, first, *_ = GEMM.splitlines()
    row = first.replace("304", "gfx950,256")
    lines = (f"gfx,{header},_tag", row + ",", row + ",fallback", row.replace(",16,", ",32,").replace("19.50", "inf"))
    short = row.replace(",16,", ",64,").partition(",18.06")[0]
    path = write(tmp_path / "mymodel_a8w8_blockscale_tuned_gemm.csv", "\r\n".join((*lines, short)) + "\r\n")
    report = import_tables(catalog, "aiter-csv", [path])
    assert report.duplicates == ()
    assert rows(catalog, "table_name, arch, facts, median_ms IS NULL") == [
        ("a8w8_blockscale", "gfx950", '{"cores": 256}', number == 2) for number in range(4)
    ]
    [out] = export_tuned(catalog, tmp_path / "out")
    kept = [{name: value or "" for name, value in row.items()} for row in dicts(path)]
    assert dicts(out) == kept


@pytest.mark.parametrize(
    ("table", "element", "fields"),
    [
        ("a8w8", "", {"dtype": "int8", "scales": "row"}),
        ("a8w8", "torch.float8_e4m3fn", {"dtype": "fp8", "scales": "row"}),
        ("a8w8_blockscale", "", {"dtype": "fp8", "scales": "block"}),
        ("a8w8_bpreshuffle", "torch.int8", None),
    ],
)
def test_tables_of_8_bit_products_state_problems_with_scales(
    catalog: Catalog, tmp_path: Path, table: str, element: str, fields: dict[str, Any] | None
) -> None:
    text = f"cu_num,M,N,K,q_dtype_w,us,kernelName\n304,16,1536,7168,{element},19.5,made_up\n"
    import_tables(catalog, "aiter-csv", [write(tmp_path / f"{table}_tuned_gemm.csv", text)])
    [(key,)] = rows(catalog, "problem_key")
    assert (key is None) == (fields is None)
    if fields is not None:
        problem, fields_of = GemmProblem.of_key(key), operation("gemm").foreign_fields
        assert problem == GemmProblem(m=16, n=1536, k=7168, dtype_c="bf16", **fields)
        stated = fields_of("aiter-csv", table, problem)
        assert stated is not None
        assert (stated["M"], stated["N"], stated["K"]) == ("16", "1536", "7168")
        assert fields_of("aiter-csv", table, problem.model_copy(update={"bias": True})) is None


def test_older_entries_of_a_find_db_have_other_columns(catalog: Catalog, tmp_path: Path) -> None:
    import_tables(catalog, "miopen-fdb", [write(tmp_path / "gfx1030_36.HIP.fdb.txt", FDB)])
    [(name, facts, fields)] = rows(catalog, "name, facts, fields", "line = 2")
    assert (name, facts) == ("SolverC", '{"cores": 36}')
    assert json.loads(fields)["cache_config"] == "<unused>"


words = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12).map(str.strip)
table_rows = st.lists(st.fixed_dictionaries({"kernelName": words, "errRatio": words, "new": words}), min_size=1)


@pytest.mark.slow
@given(written=table_rows)
@hypothesis_settings(max_examples=20, deadline=None)
def test_a_round_trip_loses_nothing(tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, str]]) -> None:
    """Any text comes back, as do columns that the format does not know, which distinguish problems."""
    folder = tmp_path_factory.mktemp("tables")
    path = folder / "a8w8_tuned_gemm.csv"
    names = [*HEADER.split(","), "new"]
    common = dicts(write(folder / "one.csv", f"{HEADER}\n304,1,2,3,4,5,0.10,name,,0,\n"))[0]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(common | row | {"M": str(number)} for number, row in enumerate(written))
    for name in ("first", "second"):
        catalog = Catalog(folder / f"{name}.db")
        report = import_tables(catalog, "aiter-csv", [path])
        assert [note.partition(": ")[2].split(":")[0] for note in report.notes] == ["the column new is not known"]
        [out] = export_tuned(catalog, folder / name)
        assert out.name == path.name
        assert dicts(out) == dicts(path)
        catalog.close()
        path = out


def timing(kernel: str, median_ms: float | None, measured: str | None = None, n: int | None = None) -> ForeignTiming:
    return ForeignTiming(
        source="someone",
        operation="attention",
        name=kernel,
        traits="{}",
        device=Device(arch="gfx950", name="", facts="{}"),
        format="aiter-csv",
        table_name="a8w8",
        problem='{"M":16}',
        median_ms=median_ms,
        n=n,
        tool="",
        measured=measured,
        fields='{"us":"1"}',
        file=f"{kernel}.csv",
        line=2,
    )


OLD, NEW = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"


@pytest.mark.parametrize(
    ("better", "worse", "reason"),
    [
        (timing("a", 2.0), timing("b", None, NEW), "it has a time"),
        (timing("a", 2.0, NEW), timing("b", 1.0, OLD, 9), "it is newer"),
        (timing("a", 2.0, OLD), timing("b", 1.0), "it is newer"),
        (timing("a", 2.0, OLD, 9), timing("b", 1.0, OLD, 5), "it has more launches"),
        (timing("a", 1.0), timing("b", 2.0), "it is faster"),
        (timing("a", 1.0), timing("a", 2.0), "it is faster"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_evidence_decides_between_duplicates_in_any_order(
    tmp_path: Path, better: ForeignTiming, worse: ForeignTiming, reason: str
) -> None:
    for order in ((better, worse), (worse, better)):
        catalog = Catalog(tmp_path / f"{order[0] is better}.db")
        with catalog.writing() as connection:
            assert foreign.record(connection, order) == 2
            [found] = foreign.duplicates(connection, order, one_kernel_per_problem=True)
        assert (found.record.key, found.preferred.key, found.reason) == (worse.key, better.key, reason)
        assert rows(catalog, "key", "preferred") == [(better.key,)]


def test_only_the_preferred_record_is_exported(catalog: Catalog, tmp_path: Path) -> None:
    """Two tables that disagree: the newer one counts although it is slower; nothing of the other is lost."""
    slower = GEMM.replace("19.50", "25.00").replace("made_up_256x16x64", "made_up_other")
    old, new = (write(tmp_path / f"a8w8_tuned_gemm{name}.csv", text) for name, text in (("", GEMM), ("_new", slower)))
    import_tables(catalog, "aiter-csv", [old], Given(measured=OLD))
    report = import_tables(catalog, "aiter-csv", [new], Given(measured=NEW))
    assert str(report.duplicates[0]) == (
        "a8w8_tuned_gemm.csv:2 (0.0195 ms): superseded by a8w8_tuned_gemm_new.csv:2 (0.025 ms), because it is newer"
    )
    [out] = export_tuned(catalog, tmp_path / "preferred")
    assert dicts(out) == dicts(new)
    [out] = export_tuned(catalog, tmp_path / "all", superseded=True)
    assert dicts(out) == dicts(old) + dicts(new)
    [out] = export_tuned(catalog, tmp_path / "one", table="a8w8", arch="gfx942")
    assert len(dicts(out)) == 3
    with pytest.raises(UsageError, match="nothing to export"):
        export_tuned(catalog, tmp_path / "none", arch="gfx90a")


def test_solvers_of_a_problem_are_alternatives_but_a_repeated_one_is_a_duplicate(
    catalog: Catalog, tmp_path: Path
) -> None:
    system = write(tmp_path / "gfx942130.HIP.fdb.txt", FDB)
    assert import_tables(catalog, "miopen-fdb", [system]).duplicates == ()
    user = write(tmp_path / "gfx942130.HIP.3_4_0.ufdb.txt", FDB.replace("SolverB:0.5", "SolverB:0.125"))
    found = import_tables(catalog, "miopen-fdb", [user]).duplicates
    assert [(one.record.median_ms, one.preferred.median_ms) for one in found if one.record.name == "SolverB"] == [
        (0.5, 0.125)
    ]
    assert rows(catalog, "name, median_ms", "preferred AND problem LIKE '%56-56%'") == [("SolverB", 0.125)]


def test_what_the_user_states_completes_a_file(catalog: Catalog, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.csv", "M,N,K,bias,outdtype,splitK,us\n128,1280,8192,True,bf16,2,13.85 \n")
    given = Given("asm_a8w8", "gfx942", "bench 1.0", OLD)
    import_tables(catalog, "aiter-csv", [path], given)
    expected = ("asm_a8w8", '{"splitK":2}', "gfx942", "{}", "bench 1.0", OLD)
    assert rows(catalog, "name, traits, arch, facts, tool, measured") == [expected]


def test_queries_list_and_clear_them(tmp_path: Path) -> None:
    db, path = tmp_path / "catalog.db", write(tmp_path / "a8w8_tuned_gemm.csv", GEMM)
    done = command.catalog("import", "aiter-csv", path, "--format", "json", db=db)
    [listed] = json.loads(done.stdout)
    assert (listed["records"], listed["added"], listed["superseded"]) == (3, 3, 0)

    def query(*words: str) -> list[dict[str, Any]]:
        done = command.catalog("query", "--foreign", *words, "--format", "json", db=db)
        return [dict(row) for row in json.loads(done.stdout)]

    found = query("problem ->> 'M' = 16", "--order-by", "median_ms")
    assert [(row["name"], row["facts"]) for row in found] == [
        ("made_up_256x16x64", '{"cores": 304}'),
        ("made_up_128x16x64", '{"cores": 80}'),
    ]
    assert set(query("name LIKE '%32x64'", "--columns", "all")[0]) >= {"fields", "file", "tool", "preferred"}
    assert "did you mean name?" in command.catalog("query", "--foreign", "nam = 1", db=db).stderr.lower()
    assert "Hint: Columns: source, operation, arch," in command.catalog("query", "--foreign", "xyz = 1", db=db).stderr
    assert "exclude each other" in command.catalog("query", "--foreign", "--operation", "gemm", db=db).stderr
    assert command.catalog("query", "--foreign", "--arch", "gfx90a", "--count", db=db).stdout == "0\n"
    done = command.catalog("timings", "clear", "--foreign", "--where", "facts ->> 'cores' = 80", "--yes", db=db)
    assert done.stdout == "Dropped 1 timing\n"
    assert len(query()) == 2
    assert rows(Catalog(db), "count(DISTINCT name)") == [(2,)]


ASKED = Problem(batch=8, nhead_q=32, seqlen_q=2048, hdim_q=128, dtype="bf16")


@pytest.fixture
def with_kernels(gfx950: Catalog, tmp_path: Path) -> Catalog:
    return copy_of(gfx950, tmp_path / "catalog.db")


def test_selection_ignores_them_and_explain_shows_those_of_the_problem(
    with_kernels: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A problem is linked as soon as its operation can state it, also for timings that were recorded before."""
    before = with_kernels.candidates(ASKED, arch="gfx950", limit=5)
    options = ("--batch", 8, "--nhead-q", 32, "--seqlen-q", 2048, "--hdim-q", 128, "--dtype", "bf16")
    for linked in (False, True):
        if linked:
            monkeypatch.setattr(
                type(OPERATION), "foreign_problem", lambda self, form, table, fields: ASKED if fields["M"] else None
            )
        with with_kernels.writing() as connection:
            foreign.record(connection, [timing("a_kernel_of_theirs", 0.001, NEW)])
        assert rows(with_kernels, "problem_key") == [(ASKED.key if linked else None,)]
        with_kernels.forget()
        assert with_kernels.candidates(ASKED, arch="gfx950", limit=5) == before
        shown = command.catalog("explain", *options, "--arch", "gfx950", db=with_kernels.path).stdout
        assert ("a_kernel_of_theirs" in shown) is linked
        done = command.catalog("explain", *options, "--arch", "gfx950", "--format", "json", db=with_kernels.path)
        assert (json.loads(done.stdout)[-1]["kind"] == "foreign") is linked
    assert [key for key, _ in with_kernels.misses("gfx950")] == []
    with_kernels.select(ASKED, arch="gfx950")
    assert [key for key, _ in with_kernels.misses("gfx950")] == [ASKED.key], "a foreign timing is no measurement"


def test_a_device_without_records_gets_those_of_its_nearest_sibling(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = {16: ASKED, 32: Problem(**{**ASKED.key_fields(), "batch": 9})}
    monkeypatch.setattr(
        type(operation("gemm")), "foreign_problem", lambda self, form, table, fields: problems[fields["M"]]
    )
    import_tables(catalog, "aiter-csv", [write(tmp_path / "a8w8_tuned_gemm.csv", GEMM)])
    monkeypatch.setattr("catalog.runtime.planner.why_unavailable", lambda arch: None)

    def listed(units: int, problem: Problem, arch: str = "gfx942") -> list[int]:
        monkeypatch.setattr(catalog._devices, "info", lambda arch: DeviceInfo(arch, "made up", units))
        return [json.loads(row["facts"])["cores"] for row in catalog.foreign_timings(problem, arch)]

    assert listed(80, problems[16]) == listed(120, problems[16]) == [80, 304]
    assert listed(228, problems[16]) == [304, 80]
    assert listed(80, problems[32]) == listed(80, problems[32], "gfx950") == [304], "what only the sibling has"
    assert listed(80, problems[16], "gfx1100") == [], "another family"


def test_misses_are_written_in_the_untuned_schema(
    with_kernels: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kernels.select(ASKED, arch="gfx950")
    with pytest.raises(UsageError, match="nothing to export"):
        export_untuned(with_kernels, tmp_path / "none")

    def fields(self: object, form: str, table: str, problem: Problem) -> dict[str, str] | None:
        return {"M": str(problem.batch), "N": "2", "K": "3"} if (form, table) == ("aiter-csv", "a8w8") else None

    monkeypatch.setattr(type(OPERATION), "foreign_fields", fields)
    assert export_untuned(with_kernels, tmp_path / "out") == {tmp_path / "out" / "a8w8_untuned_gemm.csv": 1}
    assert (tmp_path / "out" / "a8w8_untuned_gemm.csv").read_text() == "M,N,K\n8,2,3\n"
    done = command.catalog("export", "aiter-csv", "--untuned", "--out", tmp_path / "cli", db=with_kernels.path)
    assert done.stdout == f"{tmp_path}/cli/a8w8_untuned_gemm.csv: 1 row\n"


def test_merging_adds_them_once_and_refuses_invalid_ones(tmp_path: Path) -> None:
    other, path = Catalog(tmp_path / "other.db"), write(tmp_path / "a8w8_tuned_gemm.csv", GEMM)
    import_tables(other, "aiter-csv", [path])
    everything = "source, operation, name, traits, arch, facts, problem, median_ms, fields, file, line, key"
    catalog = Catalog(tmp_path / "catalog.db")
    for added in (3, 0):
        [merged] = catalog.merge([other.path])
        assert merged.counts["foreign_timing"] == {"added": added, "the same": 3 - added}
        assert rows(catalog, everything) == rows(other, everything)
    assert ["other.db", "foreign timings", 0, 0, 3] in merged.rows
    with other.writing() as connection:
        for line, column, value in ((2, "median_ms", -1.0), (3, "fields", "[]"), (4, "problem", '{"M": 1}')):
            connection.execute(f"UPDATE foreign_timing SET {column} = ? WHERE line = ?", (value, line))
    [merged] = Catalog(tmp_path / "third.db").merge([other.path])
    assert sorted(reason.partition(":")[0] for table, reason in merged.refused) == ["fields", "median_ms", "problem"]
    assert merged.counts["foreign_timing"] == {}


@pytest.mark.parametrize("name", FORMATS)
def test_the_data_of_a_format_is_complete(name: str) -> None:
    form = read_format(name, settings.data_dir())
    assert form.about
    assert all(form.origin)
    assert all(column.about for column in form.columns.values())
    assert len(form.columns_of("time")) == 1
    for table in form.tables.values():
        assert set(table.problem) <= set(form.columns_of("problem"))
