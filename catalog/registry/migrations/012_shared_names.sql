-- Kernels of one enumeration may share a name: names of GEMM kernels leave traits out. An index replaces the constraint.

CREATE TABLE kernel_anew (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    lineage INTEGER NOT NULL REFERENCES lineage (id),
    family TEXT NOT NULL,
    name TEXT NOT NULL,
    target TEXT NOT NULL,
    hw_valid INTEGER NOT NULL,
    dispatch_order INTEGER NOT NULL
) STRICT;

INSERT INTO kernel_anew (key, id, lineage, family, name, target, hw_valid, dispatch_order)
SELECT key, id, lineage, family, name, target, hw_valid, dispatch_order FROM kernel ORDER BY key;

DROP TABLE kernel;
ALTER TABLE kernel_anew RENAME TO kernel;
CREATE INDEX kernel_name ON kernel (lineage, name);
