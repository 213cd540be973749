-- When a library was dropped from the cache. Its row stays, for the timings that were measured with it.

ALTER TABLE artifact ADD COLUMN dropped TEXT;
