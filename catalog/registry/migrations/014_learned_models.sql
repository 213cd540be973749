-- Models of the time of kernels, fitted on the timings of a device under a policy, for problems that were not measured.

CREATE TABLE model (
    kind TEXT NOT NULL,  -- of the problems, as in table problem
    lineage INTEGER NOT NULL REFERENCES lineage (id) ON DELETE CASCADE,
    device_id INTEGER NOT NULL REFERENCES device (id) ON DELETE CASCADE,
    measured_as TEXT NOT NULL CHECK (measured_as IN ('eager', 'graph')),
    cold INTEGER NOT NULL,
    terms TEXT NOT NULL,         -- the names of the terms of the time, a JSON array
    factors TEXT NOT NULL,       -- ms for each unit of each term, by kernel id: a JSON object of arrays
    candidates INTEGER NOT NULL, -- how many of the static order it chooses from
    problems INTEGER NOT NULL,
    timings INTEGER NOT NULL,
    static REAL NOT NULL,        -- cross-validated: time of the choice over that of the best, geometric mean
    nearest REAL NOT NULL,
    predicted REAL NOT NULL,
    created TEXT NOT NULL,
    PRIMARY KEY (kind, lineage, device_id, measured_as, cold)
) STRICT;

CREATE INDEX model_lineage ON model (lineage);
CREATE INDEX model_device ON model (device_id);
