-- One row for all problems of a bucket, with an example. Rows from before problems had a kind keep a bucket each.

ALTER TABLE miss RENAME TO miss_before;

CREATE TABLE miss (
    arch TEXT NOT NULL,
    bucket TEXT NOT NULL,
    problem_id INTEGER NOT NULL REFERENCES problem (id) ON DELETE CASCADE,  -- the example
    n INTEGER NOT NULL,
    last TEXT NOT NULL,
    PRIMARY KEY (arch, bucket)
) STRICT;

INSERT INTO miss (arch, bucket, problem_id, n, last)
SELECT
    arch,
    CAST(sequences AS INTEGER) || ',' || CAST(heads AS INTEGER) || ',' || CAST(ratio AS INTEGER) || ','
        || CAST(queries AS INTEGER) || ',' || CAST(keys AS INTEGER) || ' ' || coalesce(nullif(kind, ''), key),
    min(problem_id),
    sum(n),
    max(last)
FROM miss_before JOIN problem ON problem.id = problem_id
GROUP BY 1, 2;

DROP TABLE miss_before;
CREATE INDEX miss_problem ON miss (problem_id);

-- Problems that nothing refers to any more.
DELETE FROM problem
WHERE id NOT IN (SELECT problem_id FROM miss) AND id NOT IN (SELECT problem_id FROM timing);
