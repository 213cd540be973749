"""How the catalogs in this folder were made: by older versions of the program, and the SQL below for what these lack.

    git archive COMMIT | tar x -C CHECKOUT
    python make.py CHECKOUT version_N.db.xz

- ``version_1``: commit 3daefb2, the last one of that version; it recorded builds, but no timings or misses yet.
- ``version_7``: commit 4aefd35^, the last one that recorded a miss for each problem.
- ``version_8``: commit ad295e3, the last one whose migrations were Python functions.
- ``version_12``: commit c74e52c, the last one whose timings had no policy.
- ``version_15``: commit e4e3c11, the last one whose attention kernels had no block masks.

A file stays as it is once a later version of the schema exists: never make it again with later code.
"""

from __future__ import annotations

import lzma
import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

KERNELS = "hdim_q=64 AND dtype='fp32' AND mode='batch' AND mask='no' AND bias='no' AND NOT logits AND NOT dropout "
KERNELS += "AND NOT lse AND NOT paged_kv AND rope='no'"
PROBLEM = "--batch 1 --nhead-q 1 --seqlen-q 64 --hdim-q 64 --dtype fp32 --arch x86_64_v3"
KEY = (
    '{"batch":1,"dtype":"fp32","hdim_q":64,"hdim_v":64,"layout":"bhsd","lse":false,"mask":"no","nhead_k":1,'
    '"nhead_q":1,"op":"fwd","seqlen_k":64,"seqlen_q":64}'
)
"""The key of that problem."""

TIMED = f"""
INSERT INTO device VALUES (1, 'x86_64_v3', 'a processor', '{{"cores": 2}}');
INSERT INTO problem VALUES (1, '{KEY}');
INSERT INTO miss VALUES (1, 'x86_64_v3', 3, '2026-01-01T00:00:00+00:00');
INSERT INTO timing
SELECT 1, kernel_id, 1, key, 9, 1.0, 2.0 + rowid, 1.5, 8.0, 0.5, 0.5, '2026-01-01T00:00:00+00:00' FROM artifact;
"""
"""What version 1 had tables for, and did not write."""

QUARANTINED = """
UPDATE artifact SET status = 'quarantined', log = 'died of SIGSEGV' WHERE rowid = (SELECT max(rowid) FROM artifact);
"""
"""Only a crash marks a library so."""


def main(checkout: Path, made: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "catalog.db"
        names = {"PYTHONPATH": checkout, "CATALOG_DB": path, "CATALOG_CACHE_DIR": Path(folder) / "cache"}

        def catalog(*words: str) -> None:
            environment = {**os.environ, **{name: str(value.resolve()) for name, value in names.items()}}
            subprocess.run([sys.executable, "-m", "catalog", *words], cwd=checkout, env=environment, check=True)

        catalog("populate", "--arch", "x86_64_v3", "--where", KERNELS)
        catalog("build", "family = 'fwd'", "--arch", "x86_64_v3", "--limit", "3")
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if connection.execute("PRAGMA user_version").fetchone()[0] == 1:
                connection.executescript(TIMED)
            else:
                catalog("tune", *PROBLEM.split())
                for keys in ("200", "210", "2000"):  # the first two are of one bucket
                    catalog("select", *PROBLEM.split(), "--seqlen-k", keys)
                connection.executescript(QUARANTINED)
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("VACUUM")
        made.write_bytes(lzma.compress(path.read_bytes(), preset=9))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
