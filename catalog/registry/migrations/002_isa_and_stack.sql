-- What the compiler reports about a library.

ALTER TABLE artifact RENAME COLUMN compile_seconds TO compile_s;
ALTER TABLE artifact ADD COLUMN isa TEXT NOT NULL DEFAULT '';
ALTER TABLE artifact ADD COLUMN stack_bytes INTEGER;
