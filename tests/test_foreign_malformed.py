"""Tables of other projects that cannot be imported, and wrong usage: each is one message, and nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import command
import pytest
from foreign_tables import FDB, GEMM, HEADER, TUNABLEOP, rows, write

from catalog.errors import CatalogError
from catalog.foreign.importing import import_tables
from catalog.runtime.catalog import Catalog

GOOD = GEMM.splitlines()[1]


def gemm(*lines: str) -> bytes:
    return "\n".join((HEADER, GOOD, *lines)).encode()


HOSTILE = {
    "binary": (bytes(range(256)) * 100, ":2: not UTF-8 text"),
    "control": (gemm("1,2\x00,3"), ":3: it has control characters"),
    "endless": (gemm("7" * 300_000), ":3: it has 300,000 characters; at most 262,144 are allowed"),
    "zeros": (bytes(30 * 2**20), ":1: it has 31,457,280 characters; at most 262,144 are allowed"),
    "50 MB": (bytes(50 * 2**20), "it has more than 33,554,432 bytes"),
    "empty": (b"", "the header of a tuned table a8w8 lacks M, N, K, us"),
    "no rows": (HEADER.encode(), "has no timings"),
    "untuned": (b"M,N,K\n1,2,3\n", "the header of a tuned table a8w8 lacks us"),
    "twice": (f"{HEADER},M\n{GOOD},1\n".encode(), ":1: the header must have at most 200 different words"),
    "short": (gemm("304,16,1536"), ":3: it has 3 fields; the header has 11"),
    "quote": (gemm('304,"16,1536'), ":3: not CSV: unexpected end of data"),
    "huge": (gemm(GOOD.replace("19.50", "1" + "0" * 400)), f":3: '1{'0' * 39}' is not a time"),
    "infinite": (gemm(GOOD.replace("19.50", "1e400")), ":3: '1e400' is not a time"),
    "nan": (gemm(GOOD.replace("19.50", "nan")), ":3: 'nan' is not a time"),
    "negative": (gemm(GOOD.replace("19.50", "-3")), ":3: '-3' is not a time"),
    "units": (gemm(GOOD.replace("304", "-1")), ":3: '-1' is not a number of compute units"),
    "unknown device": (gemm(GOOD.replace("304", "7")), ":3: the file does not state the arch of the device"),
}


@pytest.mark.parametrize(("content", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_malformed_table_is_one_message_and_no_row(tmp_path: Path, content: bytes, words: str) -> None:
    good = write(tmp_path / "a8w8_blockscale_tuned_gemm.csv", GEMM)
    path, db = tmp_path / "a8w8_tuned_gemm.csv", tmp_path / "catalog.db"
    path.write_bytes(content)
    done = command.catalog("import", "aiter-csv", good, path, db=db)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert f"{path}" in done.stderr
    assert words in done.stderr
    assert done.stderr.count("Error: ") == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 1000
    assert rows(Catalog(db), "key") == [], "nor any of the other file"


@pytest.mark.parametrize(
    ("form", "name", "line"),
    [
        ("tunableop", "results.csv", "GemmTunableOp_Half_TN,tn_1_2_3"),
        ("tunableop", "results.csv", "GemmTunableOp_Half_TN,tn_1_2_3,Default,nan"),
        ("miopen-fdb", "gfx942130.HIP.fdb.txt", "no problem"),
        ("miopen-fdb", "gfx942130.HIP.fdb.txt", "1-2-3=Solver:0.5,0"),
        ("miopen-fdb", "gfx942130.HIP.fdb.txt", "1-2-3=Solver:-1,0,algorithm"),
    ],
)
def test_all_malformed_lines_are_named_up_to_ten(tmp_path: Path, form: str, name: str, line: str) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    text = TUNABLEOP if form == "tunableop" else FDB
    path = write(tmp_path / name, text + f"{line}\n" * 3)
    with pytest.raises(CatalogError) as wrong:
        import_tables(catalog, form, [path])
    first = len(text.splitlines()) + 1
    starts = [message.removeprefix(f"{path}:").split(":")[0] for message in wrong.value.message.splitlines()]
    assert starts == [str(first), str(first + 1), str(first + 2)]
    path = write(path, text + f"{line}\n" * 1000)
    with pytest.raises(CatalogError, match="More lines are malformed") as wrong:
        import_tables(catalog, form, [path])
    assert len(wrong.value.message.splitlines()) == 11


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("aiter", "t.csv"), "no format of tables is called 'aiter'; did you mean aiter-csv?"),
        (("aiter-csv", "t.csv"), "t.csv: the name of the file does not say which table it is"),
        (("aiter-csv", "t.csv", "--table", "a8w9"), "aiter-csv has no table 'a8w9'; did you mean a8w8?"),
        (("tunableop", "t.csv", "--table", "a8w8"), "tunableop has no table 'a8w8'"),
        (("aiter-csv", "t.csv", "--table", "a8w8", "--measured", "2999-01-01"), "'2999-01-01' is not a past date"),
        (("aiter-csv", "t.csv", "--table", "a8w8", "--measured", "today"), "'today' is not a past date"),
        (("aiter-csv", "missing.csv", "--table", "a8w8"), "missing.csv cannot be read: No such file or directory"),
        (("aiter-csv", ".", "--table", "a8w8"), ". cannot be read: it is a folder, not a regular file"),
        (("aiter-csv", "t.csv", "--table", "a8w8", "--arch", "\x07"), "t.csv:2: '\\x07' is not an arch"),
    ],
)
def test_wrong_usage_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv", GEMM)
    done = command.catalog("import", *words, db=tmp_path / "catalog.db")
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(f"Error: {message}")
    assert done.stderr.count("Error: ") == 1
