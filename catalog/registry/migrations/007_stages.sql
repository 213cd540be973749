-- How deep the project's own GPU kernels load ahead.

ALTER TABLE kernel ADD COLUMN stages INTEGER NOT NULL DEFAULT 0;
