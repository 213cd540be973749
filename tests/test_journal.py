"""Catalogs on file systems that machines share: a rollback journal, or a refusal where locks do not reach them all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import command
import pytest
from rough import FORK, in_child

from catalog.build import file_systems
from catalog.registry.connection import connect
from catalog.registry.transactions import transaction
from catalog.runtime.catalog import Catalog


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Lets a folder look like a mount point of this type, with its options, to this process and its forks."""

    def mounted(mount: str) -> Path:
        folder = tmp_path / "mounted"
        folder.mkdir(exist_ok=True)
        (tmp_path / "mountinfo").write_text(f"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {folder} rw - {mount}\n")
        monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "mountinfo")
        return folder

    return mounted


@pytest.mark.slow
def test_a_catalog_that_machines_share_has_a_rollback_journal(
    mounted: Callable[[str], Path], populated: Callable[..., Path], tmp_path: Path
) -> None:
    with Catalog(shutil.copy(populated("sm_90"), tmp_path / "local.db")) as local:
        assert local.connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    path = mounted("nfs4 server:/home rw,vers=4.2,local_lock=none") / "catalog.db"
    shutil.copy(tmp_path / "local.db", path)

    def write() -> int:
        connection = connect(path)
        for _ in range(25):
            with transaction(connection):
                connection.execute("INSERT INTO device (arch, name, facts) VALUES ('a', hex(randomblob(8)), '{}')")
        return len(list(path.parent.glob("catalog.db-shm")))

    writers = [FORK.Process(target=write) for _ in range(3)]
    assert in_child(write) == 0, "memory that other machines do not see"
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    with Catalog(path) as catalog:
        assert catalog.connection.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
        assert catalog.connection.execute("SELECT count(*) FROM device").fetchone()[0] == 100
        assert catalog.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        catalog.populate("sm_90", force=True)
        assert catalog.connection.execute("PRAGMA journal_mode").fetchone()[0] == "delete"


@pytest.mark.parametrize(
    "mount", ["fuse.sshfs me@server: rw", "nfs server:/home rw,vers=3,nolock", "lustre fs rw,noflock"]
)
def test_where_locks_do_not_reach_other_machines_no_catalog_is_written(
    mount: str, mounted: Callable[[str], Path]
) -> None:
    path = mounted(mount) / "new" / "catalog.db"
    done = command.catalog("populate", "--arch", "sm_90", db=path)
    assert done.returncode == 1
    assert f"the catalog {path} is on a file system that machines share ({mount.split(maxsplit=1)[0]})" in done.stderr
    assert "CATALOG_DB" in done.stderr
    assert "malformed" not in done.stderr
    assert not path.parent.exists()
