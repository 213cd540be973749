-- The policy that a timing was measured under is part of its key: what its time counts, and the state of the caches.
-- So far every timing was the device's own time of launches of a bound plan.

CREATE TABLE timing_anew (
    problem_id INTEGER NOT NULL REFERENCES problem (id) ON DELETE CASCADE,
    kernel_id TEXT NOT NULL REFERENCES kernel (id) ON DELETE CASCADE,
    device_id INTEGER NOT NULL REFERENCES device (id) ON DELETE CASCADE,
    artifact_key TEXT NOT NULL REFERENCES artifact (key) ON DELETE CASCADE,
    measured_as TEXT NOT NULL CHECK (measured_as IN ('eager', 'graph')),
    cold INTEGER NOT NULL,  -- the caches were emptied before every launch
    n INTEGER NOT NULL,
    min_ms REAL NOT NULL,
    median_ms REAL NOT NULL,
    p10_ms REAL NOT NULL,
    p90_ms REAL NOT NULL,
    low_ms REAL NOT NULL,   -- 95 % confidence interval of the median
    high_ms REAL NOT NULL,
    tflops REAL NOT NULL,
    gbps REAL NOT NULL,
    load REAL,              -- load average of the machine
    clock_mhz REAL,         -- of the device
    created TEXT NOT NULL,
    PRIMARY KEY (problem_id, kernel_id, device_id, artifact_key, measured_as, cold)
) STRICT;

INSERT INTO timing_anew (
    problem_id, kernel_id, device_id, artifact_key, measured_as, cold, n, min_ms, median_ms, p10_ms, p90_ms, low_ms,
    high_ms, tflops, gbps, load, clock_mhz, created
)
SELECT
    problem_id, kernel_id, device_id, artifact_key, 'graph', cold, n, min_ms, median_ms, p10_ms, p90_ms, low_ms,
    high_ms, tflops, gbps, load, clock_mhz, created
FROM timing
ORDER BY rowid;

DROP TABLE timing;
ALTER TABLE timing_anew RENAME TO timing;
CREATE INDEX timing_kernel ON timing (kernel_id);
CREATE INDEX timing_device ON timing (device_id);

-- Timings of other projects' kernels that were measured here have a policy, too; tables do not state one.
ALTER TABLE foreign_timing ADD COLUMN measured_as TEXT;
ALTER TABLE foreign_timing ADD COLUMN cold INTEGER;
