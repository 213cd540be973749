-- Kernels of several operations: what all kernels have, which enumeration they come from, and a table of traits for
-- each operation. Attention's trait `stages` is called `num_stages` from here on.

CREATE TABLE lineage (
    id INTEGER PRIMARY KEY,
    operation TEXT NOT NULL,
    arch TEXT NOT NULL,
    revision TEXT NOT NULL,
    space TEXT NOT NULL,
    variant TEXT NOT NULL,  -- of attention, the mask implementation
    UNIQUE (operation, arch, revision, space, variant)
) STRICT;

INSERT INTO lineage (operation, arch, revision, space, variant)
SELECT 'attention', arch, revision, space, mask_impl FROM kernel
UNION SELECT 'attention', arch, revision, space, mask_impl FROM population;

CREATE TABLE kernel_anew (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    lineage INTEGER NOT NULL REFERENCES lineage (id),
    family TEXT NOT NULL,
    name TEXT NOT NULL,
    target TEXT NOT NULL,
    hw_valid INTEGER NOT NULL,
    dispatch_order INTEGER NOT NULL,
    UNIQUE (lineage, name)
) STRICT;

INSERT INTO kernel_anew (key, id, lineage, family, name, target, hw_valid, dispatch_order)
SELECT kernel.rowid, kernel.id, lineage.id, family, name, target, hw_valid, dispatch_order
FROM kernel
JOIN lineage ON lineage.arch = kernel.arch AND lineage.revision = kernel.revision
    AND lineage.space = kernel.space AND variant = mask_impl
ORDER BY kernel.rowid;

CREATE TABLE attention (
    kernel INTEGER PRIMARY KEY REFERENCES kernel (key) ON DELETE CASCADE,
    lineage INTEGER NOT NULL,  -- as table kernel has it: the index begins with it

    -- what it computes
    family TEXT NOT NULL,
    dtype TEXT NOT NULL,
    mode TEXT NOT NULL,
    vlayout TEXT NOT NULL,
    hdim_q INTEGER NOT NULL,
    hdim_v INTEGER NOT NULL,
    mask TEXT NOT NULL,
    bias TEXT NOT NULL,
    lse INTEGER NOT NULL,
    dropout INTEGER NOT NULL,
    logits INTEGER NOT NULL,
    sink INTEGER NOT NULL,
    skip_min_seqlen_q INTEGER NOT NULL,
    qscale TEXT NOT NULL,
    rope TEXT NOT NULL,
    paged_kv INTEGER NOT NULL,
    page_size INTEGER NOT NULL,
    kv_memory_layout TEXT NOT NULL,
    kv_lookup_table TEXT NOT NULL,
    dbias INTEGER NOT NULL,
    dropout_variant TEXT NOT NULL,
    store_randval INTEGER NOT NULL,
    deterministic INTEGER NOT NULL,

    -- how it computes it
    pipeline TEXT NOT NULL,
    tile_m0 INTEGER NOT NULL,
    tile_n0 INTEGER NOT NULL,
    tile_k0 INTEGER NOT NULL,
    tile_n1 INTEGER NOT NULL,
    tile_k1 INTEGER NOT NULL,
    tile_k0max INTEGER NOT NULL,
    tile_bwd6 INTEGER NOT NULL,
    tile_bwd7 INTEGER NOT NULL,
    tile_bwd8 INTEGER NOT NULL,
    wave_m0 INTEGER NOT NULL,
    wave_n0 INTEGER NOT NULL,
    wave_k0 INTEGER NOT NULL,
    wave_m1 INTEGER NOT NULL,
    wave_n1 INTEGER NOT NULL,
    wave_k1 INTEGER NOT NULL,
    wave_m2 INTEGER NOT NULL,
    wave_n2 INTEGER NOT NULL,
    wave_k2 INTEGER NOT NULL,
    warp_m0 INTEGER NOT NULL,
    warp_n0 INTEGER NOT NULL,
    warp_k0 INTEGER NOT NULL,
    warp_m1 INTEGER NOT NULL,
    warp_n1 INTEGER NOT NULL,
    warp_k1 INTEGER NOT NULL,
    warp_m2 INTEGER NOT NULL,
    warp_n2 INTEGER NOT NULL,
    warp_k2 INTEGER NOT NULL,
    pad_s INTEGER NOT NULL,
    pad_sk INTEGER NOT NULL,
    pad_d INTEGER NOT NULL,
    pad_dv INTEGER NOT NULL,
    block_per_cu INTEGER NOT NULL,
    max_seq_q INTEGER NOT NULL,
    trload INTEGER NOT NULL,
    kv_load_mode TEXT NOT NULL,
    tile_tag TEXT NOT NULL,
    num_stages INTEGER NOT NULL
) STRICT;

INSERT INTO attention (
    kernel, lineage,
    family, dtype, mode, vlayout, hdim_q, hdim_v, mask, bias, lse, dropout, logits, sink, skip_min_seqlen_q, qscale,
    rope, paged_kv, page_size, kv_memory_layout, kv_lookup_table, dbias, dropout_variant, store_randval,
    deterministic, pipeline, tile_m0, tile_n0, tile_k0, tile_n1, tile_k1, tile_k0max, tile_bwd6, tile_bwd7,
    tile_bwd8, wave_m0, wave_n0, wave_k0, wave_m1, wave_n1, wave_k1, wave_m2, wave_n2, wave_k2, warp_m0, warp_n0,
    warp_k0, warp_m1, warp_n1, warp_k1, warp_m2, warp_n2, warp_k2, pad_s, pad_sk, pad_d, pad_dv, block_per_cu,
    max_seq_q, trload, kv_load_mode, tile_tag, num_stages
)
SELECT
    kernel.rowid, lineage.id,
    family, dtype, mode, vlayout, hdim_q, hdim_v, mask, bias, lse, dropout, logits, sink, skip_min_seqlen_q, qscale,
    rope, paged_kv, page_size, kv_memory_layout, kv_lookup_table, dbias, dropout_variant, store_randval,
    deterministic, pipeline, tile_m0, tile_n0, tile_k0, tile_n1, tile_k1, tile_k0max, tile_bwd6, tile_bwd7,
    tile_bwd8, wave_m0, wave_n0, wave_k0, wave_m1, wave_n1, wave_k1, wave_m2, wave_n2, wave_k2, warp_m0, warp_n0,
    warp_k0, warp_m1, warp_n1, warp_k1, warp_m2, warp_n2, warp_k2, pad_s, pad_sk, pad_d, pad_dv, block_per_cu,
    max_seq_q, trload, kv_load_mode, tile_tag, stages
FROM kernel
JOIN lineage ON lineage.arch = kernel.arch AND lineage.revision = kernel.revision
    AND lineage.space = kernel.space AND variant = mask_impl
ORDER BY kernel.rowid;

DROP TABLE kernel;
ALTER TABLE kernel_anew RENAME TO kernel;
CREATE INDEX attention_signature ON attention (lineage, family, dtype, mode, mask, hdim_q, hdim_v);

ALTER TABLE population RENAME TO population_before;

CREATE TABLE population (
    lineage INTEGER PRIMARY KEY REFERENCES lineage (id),
    receipts TEXT NOT NULL,     -- the receipts it is restricted to, space-separated; empty: all
    restriction TEXT NOT NULL,  -- by sweep files, an expression or a filter, in words; empty: none
    digest TEXT NOT NULL,       -- of the spec and of the SQL made from it
    compute_units INTEGER,      -- of the arch: selection rules use it
    kernels INTEGER NOT NULL,
    families TEXT NOT NULL,     -- kernels by family, a JSON object
    seconds REAL NOT NULL,
    created TEXT NOT NULL
) STRICT;

INSERT INTO population
SELECT lineage.id, receipts, restriction, digest, compute_units, kernels, families, seconds, created
FROM population_before
JOIN lineage ON lineage.arch = population_before.arch AND lineage.revision = population_before.revision
    AND lineage.space = population_before.space AND variant = mask_impl;

DROP TABLE population_before;

ALTER TABLE rule RENAME TO rule_before;

CREATE TABLE rule (
    operation TEXT NOT NULL,
    arch TEXT NOT NULL,
    revision TEXT NOT NULL,
    space TEXT NOT NULL,
    kind TEXT NOT NULL,   -- variant, constraint, receipt, hardware, headers, invariant, applicability or order
    scope TEXT NOT NULL,  -- the enumeration or family that it is about; empty: all
    id TEXT NOT NULL,
    position INTEGER NOT NULL,
    expr TEXT NOT NULL,
    reason TEXT NOT NULL,
    source TEXT NOT NULL,
    quirk TEXT,
    PRIMARY KEY (operation, arch, revision, space, kind, scope, id)
) STRICT;

INSERT INTO rule
SELECT 'attention', arch, revision, space, kind, scope, id, position, expr, reason, source, quirk FROM rule_before;

DROP TABLE rule_before;

-- The sizes of a problem, log2(1 + extent), in the order in which its operation names them.
ALTER TABLE problem ADD COLUMN operation TEXT NOT NULL DEFAULT 'attention';
ALTER TABLE problem RENAME COLUMN sequences TO size_1;
ALTER TABLE problem RENAME COLUMN heads TO size_2;
ALTER TABLE problem RENAME COLUMN ratio TO size_3;
ALTER TABLE problem RENAME COLUMN queries TO size_4;
ALTER TABLE problem RENAME COLUMN keys TO size_5;
