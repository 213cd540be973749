-- A third status of artifacts, `quarantined`. SQLite cannot alter a CHECK, so the table is rebuilt. Rows keep their
-- rowids, and timings, which refer to the table by name, their artifacts: foreign keys are off while the steps run.

CREATE TABLE artifact_anew (
    key TEXT NOT NULL PRIMARY KEY,
    kernel_id TEXT NOT NULL REFERENCES kernel (id) ON DELETE CASCADE,
    arch TEXT NOT NULL,
    toolchain TEXT NOT NULL,
    isa TEXT NOT NULL DEFAULT '',
    flags TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('built', 'failed', 'quarantined')),
    log TEXT NOT NULL,
    so_sha256 TEXT,
    so_bytes INTEGER,
    compile_s REAL NOT NULL,
    created TEXT NOT NULL,
    registers INTEGER,
    acc_registers INTEGER,
    scalar_registers INTEGER,
    spills INTEGER,
    scratch_bytes INTEGER,
    stack_bytes INTEGER,
    shared_bytes INTEGER,
    occupancy INTEGER,
    code_bytes INTEGER
) STRICT;

INSERT INTO artifact_anew (
    rowid, key, kernel_id, arch, toolchain, isa, flags, status, log, so_sha256, so_bytes, compile_s, created,
    registers, acc_registers, scalar_registers, spills, scratch_bytes, stack_bytes, shared_bytes, occupancy, code_bytes
)
SELECT
    rowid, key, kernel_id, arch, toolchain, isa, flags, status, log, so_sha256, so_bytes, compile_s, created,
    registers, acc_registers, scalar_registers, spills, scratch_bytes, stack_bytes, shared_bytes, occupancy, code_bytes
FROM artifact;

DROP TABLE artifact;
ALTER TABLE artifact_anew RENAME TO artifact;
CREATE INDEX artifact_kernel ON artifact (kernel_id, status);
