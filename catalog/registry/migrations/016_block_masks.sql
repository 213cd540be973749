-- Attention kernels that leave out blocks of queries and keys.

ALTER TABLE attention ADD COLUMN block_mask INTEGER NOT NULL DEFAULT 0;
