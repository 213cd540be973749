-- The confidence interval of a median and the conditions it was measured under; what makes problems alike.

ALTER TABLE timing RENAME TO timing_before;

CREATE TABLE timing (
    problem_id INTEGER NOT NULL REFERENCES problem (id) ON DELETE CASCADE,
    kernel_id TEXT NOT NULL REFERENCES kernel (id) ON DELETE CASCADE,
    device_id INTEGER NOT NULL REFERENCES device (id) ON DELETE CASCADE,
    artifact_key TEXT NOT NULL REFERENCES artifact (key) ON DELETE CASCADE,
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
    PRIMARY KEY (problem_id, kernel_id, device_id, artifact_key, cold)
) STRICT;

-- Older rows have no interval; the percentiles contain it.
INSERT INTO timing (
    problem_id, kernel_id, device_id, artifact_key, n, min_ms, median_ms, p10_ms, p90_ms, tflops, gbps, created,
    cold, low_ms, high_ms
)
SELECT
    problem_id, kernel_id, device_id, artifact_key, n, min_ms, median_ms, p10_ms, p90_ms, tflops, gbps, created,
    0, p10_ms, p90_ms
FROM timing_before;

DROP TABLE timing_before;
CREATE INDEX timing_kernel ON timing (kernel_id);
CREATE INDEX timing_device ON timing (device_id);

ALTER TABLE problem ADD COLUMN kind TEXT NOT NULL DEFAULT '';
ALTER TABLE problem ADD COLUMN sequences REAL NOT NULL DEFAULT 0;
ALTER TABLE problem ADD COLUMN heads REAL NOT NULL DEFAULT 0;
ALTER TABLE problem ADD COLUMN ratio REAL NOT NULL DEFAULT 0;
ALTER TABLE problem ADD COLUMN queries REAL NOT NULL DEFAULT 0;
ALTER TABLE problem ADD COLUMN keys REAL NOT NULL DEFAULT 0;
CREATE INDEX problem_kind ON problem (kind);
