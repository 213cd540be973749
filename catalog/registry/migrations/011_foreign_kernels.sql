-- Kernels that are no rows of ours, by the names that other projects give them, and timings of them that others made.

CREATE TABLE foreign_kernel (
    id INTEGER PRIMARY KEY,
    source TEXT NOT NULL,     -- the project that has the kernel
    operation TEXT NOT NULL,  -- what it computes; no operation of that name needs to be installed
    arch TEXT NOT NULL,
    name TEXT NOT NULL,
    traits TEXT NOT NULL,     -- those that are known, canonical JSON
    digest TEXT NOT NULL,     -- SHA-256 of the traits
    UNIQUE (source, operation, arch, name, digest)
) STRICT;

CREATE TABLE foreign_timing (
    key TEXT PRIMARY KEY,  -- SHA-256 of what was measured and found, whichever file states it
    kernel_id INTEGER NOT NULL REFERENCES foreign_kernel (id) ON DELETE CASCADE,
    device_id INTEGER NOT NULL REFERENCES device (id),
    problem_id INTEGER REFERENCES problem (id),  -- NULL: no operation here can state the problem
    format TEXT NOT NULL,
    table_name TEXT NOT NULL,  -- of the format
    problem TEXT NOT NULL,     -- the fields that state it in the format, canonical JSON
    median_ms REAL,            -- NULL: listed without a time
    n INTEGER,                 -- launches; NULL: not stated
    tool TEXT NOT NULL,        -- program that measured, with its version; empty: not stated
    measured TEXT,             -- NULL: not stated
    fields TEXT NOT NULL,      -- every field of the file, in order: a JSON object of texts
    file TEXT NOT NULL,
    line INTEGER NOT NULL,
    created TEXT NOT NULL
) STRICT;

CREATE INDEX foreign_timing_kernel ON foreign_timing (kernel_id);
CREATE INDEX foreign_timing_device ON foreign_timing (device_id);
CREATE INDEX foreign_timing_problem ON foreign_timing (problem_id);
CREATE INDEX foreign_timing_of ON foreign_timing (format, table_name, device_id, problem);
