from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import slow_but
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from catalog.errors import CatalogError, QueryError, RegistryError
from catalog.registry.connection import connect
from catalog.registry.query import Query, Result, Session, count, hints, run
from catalog.registry.sandbox import Limits
from catalog.runtime.catalog import Catalog

LIMITS = Limits(seconds=5.0)

SCHEMA = """
CREATE TABLE kernel (id TEXT PRIMARY KEY, name TEXT, arch TEXT, dtype TEXT, mode TEXT, hdim_q INTEGER, hdim_v INTEGER,
                     pipeline TEXT, lse INTEGER);
CREATE TABLE kernel_receipt (kernel_id TEXT, receipt INTEGER);
CREATE TABLE lineage (id INTEGER PRIMARY KEY, operation TEXT, arch TEXT);
CREATE TABLE population (lineage INTEGER);
CREATE TABLE timing (kernel_id TEXT, median_ms REAL);
CREATE TABLE secret (word TEXT);
CREATE VIEW kernels AS SELECT kernel.*,
    coalesce((SELECT group_concat(receipt, ' ') FROM kernel_receipt WHERE kernel_id = kernel.id), '') AS receipts,
    (SELECT min(median_ms) FROM timing WHERE kernel_id = kernel.id) AS best_ms FROM kernel;
INSERT INTO lineage VALUES (1, 'attention', 'gfx942'), (2, 'attention', 'gfx950');
INSERT INTO population VALUES (1), (2);
INSERT INTO secret VALUES ('sesame');
INSERT INTO kernel_receipt VALUES ('k000', 0), ('k000', 2);
INSERT INTO timing VALUES ('k000', 0.5), ('k000', 0.25);
"""

ROWS = 300


def kernel_row(index: int) -> tuple[object, ...]:
    arch = "gfx942" if index % 3 else "gfx950"
    mode = "group" if index % 2 else "batch"
    pipeline = "qr_async" if index % 5 == 0 else "qr"
    return f"k{index:03}", f"fmha_{index}", arch, "bf16", mode, 64 << index % 3, 64, pipeline, index % 2


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a folder") / "100%?mode=rwc#catalog.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO kernel VALUES (?,?,?,?,?,?,?,?,?)", map(kernel_row, range(ROWS)))
    connection.close()
    return path


def ids(db: Path, **query: object) -> list[str]:
    return [row[0] for row in run(db, Query(columns=("id",), **query), LIMITS)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("", 300),
        (" \n", 300),
        ("hdim_q=128", 100),
        ("hdim_q=128 AND pipeline='qr_async'", 20),
        ('"hdim_q" = 128 OR [hdim_q] = 64', 200),
        ("lse = TRUE AND mode IN ('group')", 150),
        ("id IN (SELECT kernel_id FROM kernel_receipt WHERE receipt = 2)", 1),
        ("receipts = '0 2' AND best_ms < 0.3", 1),
        ("name LIKE 'FMHA_1%' AND name GLOB '*0'", 11),
        ("name = 'it''s; -- not a comment /* ? (' OR id = 'k001'", 1),
        ("hdim_q = 128\n  AND lse", 50),
    ],
)
def test_an_expression_selects_rows(db: Path, where: str, expected: int) -> None:
    assert count(db, Query(where), LIMITS) == expected == len(ids(db, where=where))


def test_arch_columns_order_and_limit(db: Path) -> None:
    query = Query("lse", arch="gfx942", columns=("NAME", "hdim_q", "name"), order_by="hdim_q desc, id", limit=2)
    result = run(db, query, LIMITS)
    assert result.columns == ("name", "hdim_q")
    assert list(result) == [("fmha_5", 256), ("fmha_11", 256)]
    assert count(db, query, LIMITS) == 2


def test_without_columns_every_column_comes(db: Path) -> None:
    result = run(db, Query("id = 'k000'"), LIMITS)
    assert (result.columns[0], result.columns[-2:]) == ("id", ("receipts", "best_ms"))
    assert list(result) == [(*kernel_row(0), "0 2", 0.25)]


@pytest.mark.parametrize(
    ("order_by", "first"),
    [
        ("", "k000"),
        ("id DESC", "k299"),
        ("best_ms IS NULL DESC, max(lse, 0) ASC, id DESC", "k298"),
        ("best_ms DESC NULLS LAST", "k000"),
        ("best_ms NULLS FIRST, id", "k001"),
        ("name COLLATE NOCASE, id", "k000"),
    ],
)
def test_orderings(db: Path, order_by: str, first: str) -> None:
    assert ids(db, order_by=order_by, limit=1) == [first]


@pytest.mark.parametrize(
    ("marked", "said", "hint"),
    [
        ("lse AND «hdimq»=128", "no such column: hdimq", "Did you mean hdim_q?"),
        ("lse AND pipeline=«qr_async»", "no such column: qr_async", "Use single quotes for text: 'qr_async'"),
        ('pipeline=«"qr_async"»', "no such column: qr_async", "use single quotes for text: 'qr_async'"),
        ("mode='group' AND mode=«group»", "syntax error", "Use single quotes for text: 'group'"),
        ("lse AND hdim_q=1 AND «AND» lse", "syntax error", ""),
        ("lse «ORDER» BY name", "syntax error", "--order-by"),
        ("lse &«&» lse", "syntax error", "AND"),
        ("«SELECT» * FROM kernels", "not part of a condition", "WHERE"),
        ("«lowr»(name)='a'", "no such function: lowr", "lower"),
        ("name «REGEXP» 'a'", "no such function: REGEXP", "GLOB"),
        ("1=1 AND «count»(*)>1", "misuse of aggregate", ""),
        ("hdim_q=1«,»2", "only one expression", ""),
        ("1«)» OR (1", "never opened", ""),
        ("lse AND «(»hdim_q = 1", "never closed", ""),
        ("name = «'»x", "never closed", ""),
        ("1=1 «--» lse", "comments", ""),
        ("1=1 «/*» lse", "comments", ""),
        ("1«;» SELECT 1", "without ';'", ""),
        ("hdim_q = «?»", "parameters", ""),
        ("hdim_q = 12 AND «12ab»", "unrecognized token", ""),
        ("lse = 0 OR« »", "incomplete", ""),
    ],
)
def test_an_error_points_at_the_token(db: Path, marked: str, said: str, hint: str) -> None:
    before, under, after = re.split("[«»]", marked)
    with pytest.raises(QueryError) as caught:
        run(db, Query(before + under + after), LIMITS)
    first, _, carets = caught.value.message.split("\n")
    assert said in first
    assert carets == " " * (4 + len(before)) + "^" * len(under)
    assert hint in str(caught.value)


def test_a_caret_in_a_long_expression_of_many_lines_shows_its_surroundings(db: Path) -> None:
    where = "lse\nAND " + "hdim_q = 128 OR " * 50 + "hdim_w = 1" + " OR lse" * 50
    with pytest.raises(QueryError) as caught:
        run(db, Query(where), LIMITS)
    _, line, carets = caught.value.message.split("\n")
    assert len(line) < 120
    assert line[carets.index("^") : carets.rindex("^") + 1] == "hdim_w"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        (Query(columns=("name", "hdimq")), "Did you mean hdim_q"),
        (Query(columns=("1 FROM secret --",)), "no such column"),
        (Query(order_by="name,,id"), "a term is empty"),
        (Query(order_by="name DESC,"), "a term is empty"),
        (Query(order_by="2"), "a number orders nothing"),
        (Query(order_by="hdimq DESC"), "order-by: no such column: hdimq"),
        (Query(order_by="id LIMIT 1"), "syntax error"),
        (Query(order_by="count(*)"), "misuse of aggregate"),
        (Query(limit=-1), "negative"),
        (Query(arch="gfx90a"), "has no kernels of gfx90a, but of gfx942, gfx950\nAdd them: catalog --db "),
        (Query(arch="\udcff"), "not valid UTF-8"),
        (Query("lse = '\udcff'"), "not valid UTF-8"),
        (Query("1\0"), "NUL"),
        (Query("1 OR " * 100_000 + "1"), "at most"),
        (Query("(" * 9_000 + "1" + ")" * 9_000), "stack overflow"),
        (Query("abs(-9223372036854775807 - hdim_q / hdim_q)"), "integer overflow"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("ask", [run, count])
def test_a_wrong_question_is_a_query_error(db: Path, ask: object, query: Query, said: str) -> None:
    with pytest.raises(QueryError) as caught:
        list(run(db, query, LIMITS)) if ask is run else count(db, query, LIMITS)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


ATTACKS = [
    "1); DELETE FROM kernel; --",
    "1) UNION SELECT word FROM secret --",
    "id IN (SELECT word FROM secret)",
    "id IN secret",
    "EXISTS (SELECT 1 FROM secret)",
    "id IN (SELECT name FROM sqlite_master)",
    "id IN (SELECT name FROM sqlite_schema)",
    "id IN (SELECT name FROM main.pragma_table_info('secret'))",
    "EXISTS (SELECT 1 FROM pragma_database_list)",
    "EXISTS (SELECT 1 FROM (SELECT * FROM secret) kernels)",
    "id IN (WITH kernels AS (SELECT word FROM secret) SELECT word FROM kernels)",
    "id IN (WITH RECURSIVE t(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM t) SELECT a FROM t)",
    "id IN (DELETE FROM kernel RETURNING id)",
    "id IN (SELECT value FROM json_each('[1]'))",
    "ATTACH 'x.db' AS x",
    "PRAGMA writable_schema = 1",
    "load_extension('evil')",
    "fts3_tokenizer('simple', x'00')",
    "readfile('/etc/passwd') IS NULL",
    "writefile('x', 'y')",
    "edit(name)",
    "randomblob(1000000000) IS NULL",
    "length(zeroblob(1000000000)) > 1",
    "length(printf('%1000000000d', 1)) > 1",
    "1 /*",
    "1 --",
    "RAISE(ABORT, 'x')",
]


@pytest.mark.parametrize("attack", slow_but(ATTACKS[::2], ATTACKS))
def test_an_attack_is_refused_and_changes_nothing(db: Path, attack: str) -> None:
    before = db.read_bytes()
    for query in (Query(attack), Query(order_by=attack)):
        with pytest.raises(QueryError):
            list(run(db, query, LIMITS))
        with pytest.raises(QueryError):
            count(db, query, LIMITS)
    assert db.read_bytes() == before
    assert os.listdir(db.parent) == [db.name]


SQL_PIECES = r"""
    ( ) ' " ` [ ] , ; -- /* */ . = < || -> ? :a @b $c # \ 0x1F 1e9 .5 x'00' 'a' lse hdim_q kernel secret abs( é
    SELECT FROM WHERE AND OR NOT IN IS NULL CASE WHEN END CAST AS WITH ORDER BY DESC NULLS LAST LIMIT COLLATE
"""
SQL = st.lists(st.sampled_from([*SQL_PIECES.split(), "\0", "\n", "\udc80"]), max_size=12).map(" ".join)


@pytest.fixture(scope="module")
def session(db: Path) -> Iterator[Session]:
    with Session(db, LIMITS) as session:
        yield session


@pytest.mark.slow
@hypothesis_settings(max_examples=400, deadline=None)
@given(text=st.text(st.characters(), max_size=30) | SQL)
def test_any_text_gives_rows_or_a_query_error(db: Path, session: Session, text: str) -> None:
    before = db.stat().st_mtime_ns
    for query in (Query(text), Query(order_by=text), Query(columns=(text,)), Query(arch=text)):
        with contextlib.suppress(QueryError):
            hints(query)
            _, rows = session.ask(query)
            assert len(list(rows)) <= ROWS
    assert session.count(Query()) == ROWS, "an error ends no session"
    assert db.stat().st_mtime_ns == before


def many(character: str) -> str:
    """SQL of a text of 250,000 such characters."""
    return f"replace('{'x' * 500}', 'x', '{character * 500}')"


SLOW = {
    "join": "(SELECT count(*) FROM kernel a, kernel b, kernel c, kernel d) = 0",
    "distinct": "(SELECT count(*) FROM (SELECT DISTINCT a.id, b.id, c.id FROM kernel a, kernel b, kernel c)) = 0",
    "trim": f"length(trim({many('a')}, {many('b')} || 'a')) = lse",
    "instr": " + ".join([f"instr({many('a')}, substr({many('a')}, 1, 100000) || 'b')"] * 20) + " = lse",
}


@pytest.mark.parametrize("bomb", SLOW)
def test_a_bomb_ends_in_time(db: Path, bomb: str) -> None:
    start = time.monotonic()
    with pytest.raises(QueryError, match=r"longer than 0\.5 s.*\n.*CATALOG_QUERY_TIMEOUT"):
        count(db, Query(SLOW[bomb]), Limits(0.5))
    assert time.monotonic() - start < 5, "the time limit holds inside of one function too"


LARGE = {
    "value": f"length(replace({many('xx')}, 'xx', {many('y')})) = lse",
    "registers": "EXISTS (SELECT "
    + ", ".join(f"a || {i}" for i in range(1990))
    + f" FROM (SELECT {many('a')} || id AS a FROM kernel UNION SELECT id FROM kernel))",
    "distinct": f"(SELECT count(*) FROM (SELECT DISTINCT {many('a')} || a.id || b.id FROM kernel a, kernel b)) = 0",
    "sort": f"(SELECT a.id FROM kernel a, kernel b ORDER BY a.id || b.id || {many('a')} LIMIT 1 OFFSET 9999) = 1",
}


@pytest.mark.parametrize("bomb", LARGE)
def test_memory_is_limited_that_of_sorted_rows_too(db: Path, bomb: str) -> None:
    with pytest.raises(QueryError, match=r"more than 64 MiB of memory.*\n.*CATALOG_QUERY_MEMORY"):
        count(db, Query(LARGE[bomb]), Limits(30, 64 * 2**20))


def sandbox_of(command: subprocess.Popen[bytes]) -> int:
    """The id of the process in which a command's query runs, once that has used 0.2 s of CPU time."""
    while True:
        assert command.poll() is None
        for child in map(int, Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()):
            if int(Path(f"/proc/{child}/stat").read_text().split()[13]) >= 0.2 * os.sysconf("SC_CLK_TCK"):
                return child
        time.sleep(0.01)


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_query_ends_with_its_command_at_once(db: Path, how: signal.Signals, status: int) -> None:
    command = [sys.executable, "-m", "catalog", "--db", db, "query", SLOW["trim"], "--columns", "id"]
    environment = os.environ | {"CATALOG_QUERY_TIMEOUT": "300"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        sandbox = sandbox_of(process)
        process.send_signal(how)
        _, printed = process.communicate(timeout=10)
    assert (process.returncode, printed) == (status, b"")
    deadline = time.monotonic() + 10
    while Path(f"/proc/{sandbox}").exists():
        assert time.monotonic() < deadline, "the query goes on"
        time.sleep(0.01)


def test_a_process_that_does_not_start_is_one_message(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(CatalogError, match="the process of the query ended: status 1"):
        run(db, Query())


def test_the_time_of_the_reader_does_not_count(db: Path) -> None:
    rows = iter(run(db, Query(), Limits(0.2)))
    next(rows)
    time.sleep(0.3)
    assert len(list(rows)) == ROWS - 1


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "there is no catalog"), (b"", "not a catalog"), (b"hello " * 1000, "is not an SQLite file")],
)
def test_a_file_that_is_no_catalog(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "catalog.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RegistryError, match=said):
        count(path, Query(), LIMITS)
    assert os.listdir(tmp_path) == ([] if content is None else ["catalog.db"])


def test_a_catalog_without_kernels_of_an_operation_says_how_to_add_them(host_file: Path) -> None:
    with pytest.raises(RegistryError, match=r"no kernels of conv\n.*catalog --db \S+ populate conv --arch ARCH"):
        count(host_file, Query(operation="conv"), LIMITS)


def test_words_of_an_operations_traits_are_recognised_as_text(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    Catalog(path).populate("sm_90", operation="conv")
    for word, hint in (("nhwgc", "single quotes"), ("qr_async", "catalog columns")):
        with pytest.raises(QueryError) as raised:
            count(path, Query(f"layout IN ({word})", operation="conv"), LIMITS)
        assert hint in (raised.value.hint or "")


def test_archs_of_other_operations_do_not_count(populated: Callable[..., Path], tmp_path: Path) -> None:
    path = Path(shutil.copy(populated("gfx942"), tmp_path))
    Catalog(path).populate("sm_90", operation="conv")
    with pytest.raises(QueryError, match=r"no kernels of gfx942, but of sm_90\n.* populate conv --arch gfx942"):
        count(path, Query(operation="conv", arch="gfx942"), LIMITS)
    with pytest.raises(QueryError, match=r"no kernels of sm_90, but of gfx942\n.* populate --arch sm_90"):
        count(path, Query(arch="sm_90"), LIMITS)


def _not_utf8(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE kernel", b"CREATE TABLE \xff\xfe\xfd\xff(("))


def _pipe_beside(path: Path) -> None:
    os.mkfifo(path.with_name(path.name + "-journal"))


@pytest.mark.parametrize(
    ("damage", "said"), [(_not_utf8, "damaged"), (_pipe_beside, "-journal beside it is not a regular file")]
)
def test_a_damaged_file_gets_one_message(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    path = tmp_path / "catalog.db"
    with contextlib.closing(connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    damage(path)
    with pytest.raises(RegistryError, match=said):
        count(path, Query(), LIMITS)
    with pytest.raises(RegistryError, match=said):
        connect(path)


def test_a_query_reads_beside_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.executescript(SCHEMA)
    writer.execute("INSERT INTO kernel (id) VALUES ('unfinished')")
    assert count(path, Query(), LIMITS) == 0
    writer.close()


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("pipeline='qr_asink'", ["pipeline has no value 'qr_asink'; did you mean qr_async?"]),
        ("lse AND 'FP16' = dtype", ["dtype has no value 'FP16'; did you mean fp16?"]),
        ("k.mode NOT IN ('batch', 'grup')", ["mode has no value 'grup'; did you mean group?"]),
        ("lse = 't' AND pad_d IS 4", ["lse has no value 't'; it has: 0, 1", "pad_d has no value 4; it has: 0, 1, 8"]),
        ("hdim_q = 7 AND name = 'x' AND pad_d + 4 = 8 AND 8 * pad_d = 64", []),
        ("space = 'ck2'", ["space has no value 'ck2'; did you mean ck?"]),
        ("", []),
    ],
)
def test_hints_name_values_that_cannot_be(where: str, expected: list[str]) -> None:
    assert hints(Query(where), {"space": ("ck", "rules", "exhaustive")}) == expected


def test_a_result_lets_go_of_the_file(db: Path) -> None:
    with run(db, Query(), LIMITS) as result:
        assert isinstance(result, Result)
        next(iter(result))
    with pytest.raises(QueryError):
        list(result)
