"""How rows are printed: as a table, on a terminal or not, as JSON, JSON lines and CSV."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys

import pytest

from catalog.formats import Format, write_rows

COLUMNS = ("name", "lse", "hdim_q", "best_ms")
VALUES = [('a "quoted", name', 1, 64, 0.5), ("[bold]b", 0, 128, None)]


def printed(form: Format, rows: list[tuple[object, ...]]) -> str:
    stream = io.StringIO(newline="")
    assert write_rows(COLUMNS, rows, form, stream) == len(rows)
    return stream.getvalue()


def test_json_and_json_lines_have_real_booleans() -> None:
    expected = [
        {"name": 'a "quoted", name', "lse": True, "hdim_q": 64, "best_ms": 0.5},
        {"name": "[bold]b", "lse": False, "hdim_q": 128, "best_ms": None},
    ]
    assert json.loads(printed(Format.JSON, VALUES)) == expected
    assert [json.loads(line) for line in printed(Format.JSONL, VALUES).splitlines()] == expected
    assert printed(Format.JSON, []) == "[]\n"
    assert json.loads(printed(Format.JSONL, [("x", 1, 1, float("inf"))]))["best_ms"] is None


def test_csv_is_what_a_csv_reader_expects() -> None:
    read = list(csv.reader(io.StringIO(printed(Format.CSV, VALUES), newline="")))
    assert read == [list(COLUMNS), ['a "quoted", name', "1", "64", "0.5"], ["[bold]b", "0", "128", ""]]


def test_a_table_outside_a_terminal_cuts_nothing() -> None:
    long = "fmha_" * 100
    lines = printed(Format.TABLE, [(long, 1, 64, 0.5), *VALUES]).splitlines()
    assert len(lines) == 5
    assert lines[2].split() == [long, "1", "64", "0.5"]
    assert lines[4].startswith("[bold]b ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("number", "shown"),
    [(6.615200856002048, "6.6152"), (113.0, "113"), (2.5e-7, "2.5e-07"), (12345678.9, "12345678.9")],
)
def test_a_table_shows_six_digits_of_a_float_and_other_formats_all(number: float, shown: str) -> None:
    row = ("x", 1, 1, number)
    assert printed(Format.TABLE, [row]).split()[-1] == shown
    assert json.loads(printed(Format.JSON, [row]))[0]["best_ms"] == number
    assert float(printed(Format.CSV, [row]).split(",")[-1]) == number


def test_a_table_on_a_terminal_fits_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    fitting, many = Terminal(), Terminal()
    write_rows(COLUMNS, [("fmha_" * 20, 1, 64, 0.5), *VALUES], Format.TABLE, fitting)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", fitting.getvalue()).splitlines()
    assert max(map(len, lines)) <= 50
    assert "".join(line.split()[0] for line in lines if "fmha_" in line) == "fmha_" * 20
    write_rows([f"c{i}" for i in range(40)], [tuple(range(40))], Format.TABLE, many)
    assert "c39  39" in many.getvalue().splitlines()


def test_a_table_on_a_terminal_shows_what_tells_long_names_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    name = "fmha_fwd_d128_bf16_group_b64x128_r4x1x1_r4x1x1_{}_nbias_{}_nsink_gfx950"
    rows = [(name.format(pipeline, lse),) for pipeline, lse in (("qr", "lse"), ("qr_async", "nlse"))]
    page, one = Terminal(), Terminal()
    write_rows(["name"], rows, Format.TABLE, page)
    lines = [line.strip() for line in page.getvalue().splitlines()]
    assert lines[3:5] == ["lse", "async…nlse"]
    assert lines[-1] == (
        "In every name: fmha_fwd_d128_bf16_group_b64x128_r4x1x1_r4x1x1_qr_nbias…nsink_gfx950. In full: --format csv."
    )
    write_rows(["name"], rows[:1], Format.TABLE, one)
    assert rows[0][0] in one.getvalue(), "a single name stays whole"


@pytest.mark.parametrize("form", list(Format))
def test_a_reader_that_goes_away_ends_it_quietly(form: Format) -> None:
    script = (
        "import sys; from catalog.formats import *\n"
        f"write_rows(['name'], ((str(i) * 9,) for i in range(99999)), Format({form.value!r}), sys.stdout)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
