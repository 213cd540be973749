"""The catalog: one SQLite file. Its schema, its migrations, and the connections to it.

Tables derive from :data:`catalog.ops.attention.traits.TRAITS`: a trait is a column. All tables are STRICT. Writers
hold one transaction a job; readers never see half of one (WAL).
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from catalog.errors import RegistryError
from catalog.forks import SPAWN
from catalog.ops.attention.dispatcher_names import dispatcher_name_sql
from catalog.ops.attention.traits import TRAITS
from catalog.registry.timings import SIZES
from catalog.schema.columns import BUILD

SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Errors of using a file: a message of SQLite may quote bytes of a damaged file that are not UTF-8."""

BUSY_TIMEOUT_S = 30.0
CACHE_KIB = 524_288
"""Page cache: a population fits, so that its transaction writes every page once."""

STEPS_PER_SIGNAL_CHECK = 100_000
"""Instructions of SQLite: a few milliseconds."""

LOG_BYTES = 4 << 20
"""The write-ahead log beside the file is cut to this size when it starts over."""

APPLICATION_ID = 0x6B636174  # "kcat": tells a catalog from any other SQLite file

KERNEL_COLUMNS = ("id", "name", *TRAITS.identity, *TRAITS, "hw_valid", "dispatch_order")
"""The columns of table ``kernel``. After the traits: whether the hardware can run the row, and its place in upstream's
dispatch order among the rows of the same enumeration.
"""


def _kernel_ddl() -> str:
    columns = ["id TEXT NOT NULL PRIMARY KEY", "name TEXT NOT NULL"]
    columns += [f"{name} TEXT NOT NULL" for name in TRAITS.identity]
    columns += [
        f"{trait.name} {trait.sql_type} NOT NULL" for trait in TRAITS.values() if trait.name not in TRAITS.later
    ]
    columns += ["hw_valid INTEGER NOT NULL", "dispatch_order INTEGER NOT NULL"]
    return f"CREATE TABLE kernel ({', '.join(columns)}, UNIQUE (name, arch, revision, mask_impl, space)) STRICT"


@cache
def _dispatcher_name() -> str:
    """What CK's dispatcher calls a row: made when it is read, no row carries it."""
    names = " ".join(f"WHEN '{family}' THEN {dispatcher_name_sql(family)}" for family in TRAITS.families)
    return f"iif(space IN ('ck', 'native'), '', CASE family {names} END)"


def _initial_schema() -> tuple[str, ...]:
    return (
        _kernel_ddl(),
        "CREATE INDEX kernel_signature ON kernel (arch, family, dtype, mode, mask, hdim_q, hdim_v)",
        """CREATE TABLE kernel_receipt (
            kernel_id TEXT NOT NULL REFERENCES kernel (id) ON DELETE CASCADE,
            receipt INTEGER NOT NULL,
            PRIMARY KEY (kernel_id, receipt)) STRICT, WITHOUT ROWID""",
        """CREATE TABLE population (
            arch TEXT NOT NULL, revision TEXT NOT NULL, space TEXT NOT NULL, mask_impl TEXT NOT NULL,
            receipts TEXT NOT NULL,  -- the receipts it is restricted to, space-separated; empty: all
            restriction TEXT NOT NULL,  -- by sweep files, an expression or a filter, in words; empty: none
            digest TEXT NOT NULL,    -- of the spec and of the SQL made from it
            compute_units INTEGER,   -- of the arch: selection rules ask for it
            kernels INTEGER NOT NULL,
            families TEXT NOT NULL,  -- kernels by family, a JSON object
            seconds REAL NOT NULL, created TEXT NOT NULL,
            PRIMARY KEY (arch, revision, space, mask_impl)) STRICT""",
        """CREATE TABLE rule (
            arch TEXT NOT NULL, revision TEXT NOT NULL, space TEXT NOT NULL,
            kind TEXT NOT NULL,      -- variant, constraint, receipt, hardware, invariant, applicability or order
            scope TEXT NOT NULL,     -- the enumeration or family that it is about; empty: all
            id TEXT NOT NULL, position INTEGER NOT NULL,
            expr TEXT NOT NULL, reason TEXT NOT NULL, source TEXT NOT NULL, quirk TEXT,
            PRIMARY KEY (arch, revision, space, kind, scope, id)) STRICT""",
        """CREATE TABLE artifact (
            key TEXT NOT NULL PRIMARY KEY,
            kernel_id TEXT NOT NULL REFERENCES kernel (id) ON DELETE CASCADE,
            arch TEXT NOT NULL, toolchain TEXT NOT NULL, flags TEXT NOT NULL,
            status TEXT NOT NULL CHECK (status IN ('built', 'failed')), log TEXT NOT NULL,
            so_sha256 TEXT, so_bytes INTEGER, compile_seconds REAL NOT NULL, created TEXT NOT NULL,
            registers INTEGER, acc_registers INTEGER, scalar_registers INTEGER, spills INTEGER, scratch_bytes INTEGER,
            shared_bytes INTEGER, occupancy INTEGER, code_bytes INTEGER) STRICT""",
        "CREATE INDEX artifact_kernel ON artifact (kernel_id, status)",
        """CREATE TABLE device (
            id INTEGER PRIMARY KEY,
            arch TEXT NOT NULL, name TEXT NOT NULL, facts TEXT NOT NULL,
            UNIQUE (arch, name, facts)) STRICT""",
        "CREATE TABLE problem (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE) STRICT",
        """CREATE TABLE timing (
            problem_id INTEGER NOT NULL REFERENCES problem (id) ON DELETE CASCADE,
            kernel_id TEXT NOT NULL REFERENCES kernel (id) ON DELETE CASCADE,
            device_id INTEGER NOT NULL REFERENCES device (id) ON DELETE CASCADE,
            artifact_key TEXT NOT NULL REFERENCES artifact (key) ON DELETE CASCADE,
            n INTEGER NOT NULL,
            min_ms REAL NOT NULL, median_ms REAL NOT NULL, p10_ms REAL NOT NULL, p90_ms REAL NOT NULL,
            tflops REAL NOT NULL, gbps REAL NOT NULL, created TEXT NOT NULL,
            PRIMARY KEY (problem_id, kernel_id, device_id, artifact_key)) STRICT""",
        "CREATE INDEX timing_kernel ON timing (kernel_id)",
        """CREATE TABLE miss (
            problem_id INTEGER NOT NULL REFERENCES problem (id) ON DELETE CASCADE,
            arch TEXT NOT NULL, n INTEGER NOT NULL, last TEXT NOT NULL,
            PRIMARY KEY (problem_id, arch)) STRICT""",
        _view(),
    )


_BUILT_HERE = "status = 'built' AND NOT elsewhere"


def _view(more: str = "", warm: str = "", library: str = "status = 'built'") -> str:
    """The rows with what is known of them.

    ``more`` are further columns, ``warm`` says which timings count, ``library`` is true of artifacts to load.
    """
    return f"""CREATE VIEW kernels AS SELECT kernel.*, {_dispatcher_name()} AS dispatcher_name,
        coalesce((SELECT group_concat(receipt, ' ') FROM kernel_receipt WHERE kernel_id = kernel.id), '') AS receipts,
        EXISTS (SELECT 1 FROM artifact WHERE kernel_id = kernel.id AND {library}) AS built,
        (SELECT min(median_ms) FROM timing WHERE kernel_id = kernel.id{warm}) AS best_ms{more}
        FROM kernel"""


def _build_columns() -> str:
    """Columns of a view: resources of a kernel's newest library."""
    newest = "FROM artifact WHERE kernel_id = kernel.id AND status = 'built' ORDER BY created DESC, rowid DESC LIMIT 1"
    return "".join(f", (SELECT {column.name} {newest}) AS {column.name}" for column in BUILD)


def _what_the_compiler_knows() -> tuple[str, ...]:
    """Resources of a kernel's newest library, beside its traits."""
    return (
        "ALTER TABLE artifact RENAME COLUMN compile_seconds TO compile_s",
        "ALTER TABLE artifact ADD COLUMN isa TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE artifact ADD COLUMN stack_bytes INTEGER",
        "DROP VIEW kernels",
        _view(_build_columns()),
    )


_ARTIFACT_COLUMNS = (
    "key, kernel_id, arch, toolchain, isa, flags, status, log, so_sha256, so_bytes, compile_s, created, registers, "
    "acc_registers, scalar_registers, spills, scratch_bytes, stack_bytes, shared_bytes, occupancy, code_bytes"
)


def _quarantine() -> tuple[str, ...]:
    """A third status of artifacts. A CHECK cannot be altered: the table is made anew, its rows keep their rowids.

    Timings refer to it by name; while the steps run foreign keys are off, so that dropping it deletes none.
    """
    return (
        "DROP VIEW kernels",
        """CREATE TABLE artifact_anew (
            key TEXT NOT NULL PRIMARY KEY,
            kernel_id TEXT NOT NULL REFERENCES kernel (id) ON DELETE CASCADE,
            arch TEXT NOT NULL, toolchain TEXT NOT NULL, isa TEXT NOT NULL DEFAULT '',
            flags TEXT NOT NULL,
            status TEXT NOT NULL CHECK (status IN ('built', 'failed', 'quarantined')), log TEXT NOT NULL,
            so_sha256 TEXT, so_bytes INTEGER, compile_s REAL NOT NULL, created TEXT NOT NULL,
            registers INTEGER, acc_registers INTEGER, scalar_registers INTEGER, spills INTEGER, scratch_bytes INTEGER,
            stack_bytes INTEGER, shared_bytes INTEGER, occupancy INTEGER, code_bytes INTEGER) STRICT""",
        f"INSERT INTO artifact_anew (rowid, {_ARTIFACT_COLUMNS}) SELECT rowid, {_ARTIFACT_COLUMNS} FROM artifact",
        "DROP TABLE artifact",
        "ALTER TABLE artifact_anew RENAME TO artifact",
        "CREATE INDEX artifact_kernel ON artifact (kernel_id, status)",
        _view(_build_columns()),
    )


def _built_elsewhere() -> tuple[str, ...]:
    """Artifacts that came by a merge: no library of this machine, nor a failure of its compilers."""
    return (
        "ALTER TABLE artifact ADD COLUMN elsewhere INTEGER NOT NULL DEFAULT 0",
        "DROP VIEW kernels",
        _view(_build_columns(), library=_BUILT_HERE),
    )


def _how_sure_timings_are() -> tuple[str, ...]:
    """The confidence interval of a median and what it was measured under; problems that are alike."""
    kept = "problem_id, kernel_id, device_id, artifact_key, n, min_ms, median_ms, p10_ms, p90_ms, tflops, gbps, created"
    return (
        "DROP VIEW kernels",
        "ALTER TABLE timing RENAME TO timing_before",
        """CREATE TABLE timing (
            problem_id INTEGER NOT NULL REFERENCES problem (id) ON DELETE CASCADE,
            kernel_id TEXT NOT NULL REFERENCES kernel (id) ON DELETE CASCADE,
            device_id INTEGER NOT NULL REFERENCES device (id) ON DELETE CASCADE,
            artifact_key TEXT NOT NULL REFERENCES artifact (key) ON DELETE CASCADE,
            cold INTEGER NOT NULL,   -- the caches were emptied before every launch
            n INTEGER NOT NULL,
            min_ms REAL NOT NULL, median_ms REAL NOT NULL, p10_ms REAL NOT NULL, p90_ms REAL NOT NULL,
            low_ms REAL NOT NULL, high_ms REAL NOT NULL,  -- 95 % confidence interval of the median
            tflops REAL NOT NULL, gbps REAL NOT NULL,
            load REAL,               -- load average of the machine
            clock_mhz REAL,          -- of the device
            created TEXT NOT NULL,
            PRIMARY KEY (problem_id, kernel_id, device_id, artifact_key, cold)) STRICT""",
        f"INSERT INTO timing ({kept}, cold, low_ms, high_ms) SELECT {kept}, 0, p10_ms, p90_ms FROM timing_before",
        "DROP TABLE timing_before",
        "CREATE INDEX timing_kernel ON timing (kernel_id)",
        "CREATE INDEX timing_device ON timing (device_id)",
        "ALTER TABLE problem ADD COLUMN kind TEXT NOT NULL DEFAULT ''",  # catalog.ops.attention.likeness
        *(f"ALTER TABLE problem ADD COLUMN {name} REAL NOT NULL DEFAULT 0" for name in SIZES),
        "CREATE INDEX problem_kind ON problem (kind)",
        _view(_build_columns(), " AND NOT cold", _BUILT_HERE),
    )


def _dropped_libraries() -> tuple[str, ...]:
    """When a library went from the cache. Its row stays, for the timings that were measured with it."""
    return (
        "ALTER TABLE artifact ADD COLUMN dropped TEXT",
        "DROP VIEW kernels",
        _view(_build_columns(), " AND NOT cold", f"{_BUILT_HERE} AND dropped IS NULL"),
    )


def _stages() -> tuple[str, ...]:
    """How deep kernels of our own for GPUs load ahead. The view names its columns when it is made."""
    return (
        "DROP VIEW kernels",
        "ALTER TABLE kernel ADD COLUMN stages INTEGER NOT NULL DEFAULT 0",
        _view(_build_columns(), " AND NOT cold", f"{_BUILT_HERE} AND dropped IS NULL"),
    )


def _misses_by_bucket() -> tuple[str, ...]:
    """One row for all problems of a bucket (catalog.ops.attention.likeness.bucket_of), with an example.

    Rows from before problems had a kind keep a bucket each. Problems that nothing refers to any more are deleted.
    """
    sizes = " || ',' || ".join(
        f"CAST({name} AS INTEGER)" for name in ("sequences", "heads", "ratio", "queries", "keys")
    )
    return (
        "ALTER TABLE miss RENAME TO miss_before",
        """CREATE TABLE miss (
            arch TEXT NOT NULL,
            bucket TEXT NOT NULL,
            problem_id INTEGER NOT NULL REFERENCES problem (id) ON DELETE CASCADE,  -- the example
            n INTEGER NOT NULL, last TEXT NOT NULL,
            PRIMARY KEY (arch, bucket)) STRICT""",
        f"INSERT INTO miss (arch, bucket, problem_id, n, last) SELECT arch, {sizes} || ' ' || "
        "coalesce(nullif(kind, ''), key), min(problem_id), sum(n), max(last) "
        "FROM miss_before JOIN problem ON problem.id = problem_id GROUP BY 1, 2",
        "DROP TABLE miss_before",
        "CREATE INDEX miss_problem ON miss (problem_id)",
        "DELETE FROM problem "
        "WHERE id NOT IN (SELECT problem_id FROM miss) AND id NOT IN (SELECT problem_id FROM timing)",
    )


_MIGRATIONS: tuple[Callable[[], tuple[str, ...]], ...] = (
    _initial_schema,
    _what_the_compiler_knows,
    _quarantine,
    _built_elsewhere,
    _how_sure_timings_are,
    _dropped_libraries,
    _stages,
    _misses_by_bucket,
)
"""Step i takes a file from user_version i to i + 1."""


def sha256_hex(text: str) -> str:
    """SHA-256 of UTF-8 text, in hex; the ``sha256`` of the SQL that makes kernel ids."""
    return hashlib.sha256(text.encode()).hexdigest()


def connect(path: Path) -> sqlite3.Connection:
    """A read-write connection to the catalog at ``path``, made and migrated when needed.

    The connection is in autocommit mode: use :func:`transaction` to write. Where the file cannot be written, it reads.

    Raises:
        RegistryError: the file cannot be opened or made, is no catalog, or comes from a newer version.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = _open_as_allowed(path)
    except (OSError, *SQLITE_ERRORS) as error:
        raise _cannot_open(path, error) from None
    try:
        _migrate(connection, path)
    except SQLITE_ERRORS as error:
        connection.close()
        raise _cannot_open(path, error) from None
    except BaseException:
        connection.close()
        raise
    return connection


_crossed: set[tuple[int, int]] = set()
"""Device and inode of the files whose connections this process has inherited through a fork."""


def leak(connection: sqlite3.Connection, path: Path) -> None:
    """Never close a connection that a fork has copied, and never open its file again in this process.

    SQLite keeps a record of the locks on a file for each process. The child's copy claims the locks of the parent,
    which the child does not hold: another connection could damage the file, and closing this one could delete the
    parent's log.
    """
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    with suppress(OSError):
        _crossed.add(_file_of(path))


def _file_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _open_as_allowed(path: Path) -> sqlite3.Connection:
    try:
        return _open(path)
    except sqlite3.OperationalError as error:
        parameters = unwritable(path, error)
        if parameters is None:
            raise
        return _open(path, parameters)


def unwritable(path: Path, error: sqlite3.Error) -> str | None:
    """How to open a file that SQLite refused with ``error`` because its folder cannot be written; None: not at all.

    A file in WAL mode needs its -shm file even to be read. Where that cannot be made, the file can be read as one that
    nobody changes, unless a log beside it has changes that such a reader would miss.
    """
    log = path.with_name(path.name + "-wal")
    refused = any(words in str(error) for words in ("unable to open", "readonly"))
    return "mode=ro&immutable=1" if refused and path.is_file() and not _has_bytes(log) else None


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def message_of(error: Exception) -> str:
    """The message of an error of :data:`SQLITE_ERRORS`."""
    return "its schema is damaged: it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def check_side_files(path: Path) -> None:
    """Refuse a file whose journal or log is not a regular file: opening a pipe there would wait forever.

    Raises:
        sqlite3.OperationalError: says which file it is.
    """
    for suffix in ("-journal", "-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        if beside.exists() and not beside.is_file():
            raise sqlite3.OperationalError(f"{beside.name} beside it is not a regular file")


def _open(path: Path, parameters: str = "mode=rwc") -> sqlite3.Connection:
    if _crossed and path.exists() and _file_of(path) in _crossed:
        raise RegistryError(
            f"the catalog {path} was in use when this process was forked, and cannot be used in it", hint=SPAWN
        )
    check_side_files(path)
    uri = f"{path.resolve().as_uri()}?{parameters}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        # WAL with NORMAL cannot corrupt the file; a power cut may lose the last transaction, never half of one.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        connection.create_function("sha256", 1, sha256_hex, deterministic=True)
        _versions(connection)  # reads the file
    except BaseException:
        connection.close()
        raise
    return connection


def _cannot_open(path: Path, error: Exception) -> RegistryError:
    hint = "Choose another file with --db or CATALOG_DB, or mend its permissions."
    if isinstance(error, UnicodeDecodeError) or "not a database" in str(error) or "malformed" in str(error):
        hint = "It is no SQLite file, or a damaged one: move it away and populate again."
    elif _has_bytes(path.with_name(path.name + "-wal")) and "unable to open" in str(error):
        hint = "It has a log of changes (-wal) that cannot be read in a folder that cannot be written: copy both away."
    elif "locked" in str(error):
        hint = "Another process is writing to it; try again when it is done."
    return RegistryError(f"the catalog {path} cannot be opened: {message_of(error)}", hint=hint)


def schema_version(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the schema of the file at ``path``; 0 if it has none yet.

    Raises:
        RegistryError: it is no catalog, or comes from a newer version.
        sqlite3.Error: it cannot be read.
    """
    version, application_id = _versions(connection)
    if not 0 <= version <= len(_MIGRATIONS) and application_id == APPLICATION_ID:
        raise RegistryError(
            f"the catalog {path} has schema version {version}; this program knows up to {len(_MIGRATIONS)}",
            hint="Upgrade kernel-catalog, or choose another file with --db or CATALOG_DB.",
        )
    if application_id != APPLICATION_ID and connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        raise RegistryError(
            f"{path} is a SQLite file, but no catalog", hint="Choose another file with --db or CATALOG_DB."
        )
    return int(version) if application_id == APPLICATION_ID else 0


def blank(version: int) -> sqlite3.Connection:
    """A database in memory with the empty tables of ``version``, without views; foreign keys are not enforced."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.row_factory = sqlite3.Row
    _run_on_tables(connection, _MIGRATIONS[:version])
    return connection


def upgrade(connection: sqlite3.Connection, version: int) -> None:
    """Migrate a database of :func:`blank` and its rows from ``version`` to the schema of this program."""
    _run_on_tables(connection, _MIGRATIONS[version:])


def _run_on_tables(connection: sqlite3.Connection, steps: Iterable[Callable[[], tuple[str, ...]]]) -> None:
    for statement in (statement for step in steps for statement in step()):
        if not statement.startswith(("CREATE VIEW", "DROP VIEW")):
            connection.execute(statement)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    if schema_version(connection, path) == len(_MIGRATIONS):
        return
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = OFF")  # a step may make anew a table that others refer to
    try:
        with transaction(connection):
            version, _ = _versions(connection)  # another process may have migrated while this one waited for the lock
            for step in _MIGRATIONS[version:]:
                for statement in step():
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(_MIGRATIONS)}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    finally:
        connection.execute("PRAGMA foreign_keys = ON")


def _versions(connection: sqlite3.Connection) -> tuple[int, int]:
    return (
        connection.execute("PRAGMA user_version").fetchone()[0],
        connection.execute("PRAGMA application_id").fetchone()[0],
    )


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One write transaction: everything inside happens, or nothing.

    Raises:
        RegistryError: the file is locked for longer than the busy timeout, read-only, or the disk is full.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise RegistryError(f"the catalog cannot be written: {error}", hint="Nothing was changed.") from None


@contextmanager
def interruptible(connection: sqlite3.Connection) -> Iterator[None]:
    """Let Ctrl-C end a long statement: Python handles signals when SQLite calls back."""
    connection.set_progress_handler(lambda: False, STEPS_PER_SIGNAL_CHECK)
    try:
        yield
    except sqlite3.OperationalError as error:
        if str(error) != "interrupted":
            raise
        raise KeyboardInterrupt from None  # which SQLite swallowed when it ended the statement
    finally:
        connection.set_progress_handler(None, 0)


@contextmanager
def impatient(connection: sqlite3.Connection) -> Iterator[None]:
    """Wait for no other writer."""
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        yield
    finally:
        connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")


def shorten_log(connection: sqlite3.Connection) -> None:
    """Move the write-ahead log into the file and empty it, unless another connection is using it."""
    with impatient(connection), suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@contextmanager
def written_once(connection: sqlite3.Connection) -> Iterator[None]:
    """For a transaction about as large as the file: a rollback journal where nobody else has the file open.

    In WAL every page is written twice, to the log and to the file; with a rollback journal new pages are written once.
    """
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        with suppress(sqlite3.OperationalError):  # locked: somebody else has the file open, and WAL it stays
            connection.execute("PRAGMA journal_mode = TRUNCATE")
            connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
        yield
    finally:
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
