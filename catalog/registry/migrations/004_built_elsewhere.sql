-- Artifacts that came by a merge: neither a library of this machine nor a failure of its compilers.

ALTER TABLE artifact ADD COLUMN elsewhere INTEGER NOT NULL DEFAULT 0;
