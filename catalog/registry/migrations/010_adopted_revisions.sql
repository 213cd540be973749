-- Lineages whose rows are the list of a user's own checkout, and the names in such a list that no grammar reads.

CREATE TABLE adopted (
    lineage INTEGER PRIMARY KEY REFERENCES lineage (id) ON DELETE CASCADE,
    root TEXT NOT NULL,       -- the checkout
    git_commit TEXT NOT NULL, -- of the checkout; empty: not under git, or the generator was edited since
    digest TEXT NOT NULL,     -- of the generator's files
    base TEXT NOT NULL,       -- the nearest known revision
    receipts TEXT NOT NULL,   -- the receipts of the checkout, space-separated
    created TEXT NOT NULL
) STRICT;

CREATE TABLE unknown_name (
    lineage INTEGER NOT NULL REFERENCES lineage (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    part TEXT NOT NULL,       -- the first part of the name that is new
    place TEXT NOT NULL,      -- where a trait for it would go
    PRIMARY KEY (lineage, name)
) STRICT, WITHOUT ROWID;
