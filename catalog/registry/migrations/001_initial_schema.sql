CREATE TABLE kernel (
    id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,

    arch TEXT NOT NULL,
    revision TEXT NOT NULL,
    space TEXT NOT NULL,
    mask_impl TEXT NOT NULL,
    target TEXT NOT NULL,

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

    hw_valid INTEGER NOT NULL,
    dispatch_order INTEGER NOT NULL,
    UNIQUE (name, arch, revision, mask_impl, space)
) STRICT;

CREATE INDEX kernel_signature ON kernel (arch, family, dtype, mode, mask, hdim_q, hdim_v);

CREATE TABLE kernel_receipt (
    kernel_id TEXT NOT NULL REFERENCES kernel (id) ON DELETE CASCADE,
    receipt INTEGER NOT NULL,
    PRIMARY KEY (kernel_id, receipt)
) STRICT, WITHOUT ROWID;

CREATE TABLE population (
    arch TEXT NOT NULL,
    revision TEXT NOT NULL,
    space TEXT NOT NULL,
    mask_impl TEXT NOT NULL,
    receipts TEXT NOT NULL,     -- the receipts it is restricted to, space-separated; empty: all
    restriction TEXT NOT NULL,  -- by sweep files, an expression or a filter, in words; empty: none
    digest TEXT NOT NULL,       -- of the spec and of the SQL made from it
    compute_units INTEGER,      -- of the arch: selection rules use it
    kernels INTEGER NOT NULL,
    families TEXT NOT NULL,     -- kernels by family, a JSON object
    seconds REAL NOT NULL,
    created TEXT NOT NULL,
    PRIMARY KEY (arch, revision, space, mask_impl)
) STRICT;

CREATE TABLE rule (
    arch TEXT NOT NULL,
    revision TEXT NOT NULL,
    space TEXT NOT NULL,
    kind TEXT NOT NULL,   -- variant, constraint, receipt, hardware, invariant, applicability or order
    scope TEXT NOT NULL,  -- the enumeration or family that it is about; empty: all
    id TEXT NOT NULL,
    position INTEGER NOT NULL,
    expr TEXT NOT NULL,
    reason TEXT NOT NULL,
    source TEXT NOT NULL,
    quirk TEXT,
    PRIMARY KEY (arch, revision, space, kind, scope, id)
) STRICT;

CREATE TABLE artifact (
    key TEXT NOT NULL PRIMARY KEY,
    kernel_id TEXT NOT NULL REFERENCES kernel (id) ON DELETE CASCADE,
    arch TEXT NOT NULL,
    toolchain TEXT NOT NULL,
    flags TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('built', 'failed')),
    log TEXT NOT NULL,
    so_sha256 TEXT,
    so_bytes INTEGER,
    compile_seconds REAL NOT NULL,
    created TEXT NOT NULL,
    registers INTEGER,
    acc_registers INTEGER,
    scalar_registers INTEGER,
    spills INTEGER,
    scratch_bytes INTEGER,
    shared_bytes INTEGER,
    occupancy INTEGER,
    code_bytes INTEGER
) STRICT;

CREATE INDEX artifact_kernel ON artifact (kernel_id, status);

CREATE TABLE device (
    id INTEGER PRIMARY KEY,
    arch TEXT NOT NULL,
    name TEXT NOT NULL,
    facts TEXT NOT NULL,
    UNIQUE (arch, name, facts)
) STRICT;

CREATE TABLE problem (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE
) STRICT;

CREATE TABLE timing (
    problem_id INTEGER NOT NULL REFERENCES problem (id) ON DELETE CASCADE,
    kernel_id TEXT NOT NULL REFERENCES kernel (id) ON DELETE CASCADE,
    device_id INTEGER NOT NULL REFERENCES device (id) ON DELETE CASCADE,
    artifact_key TEXT NOT NULL REFERENCES artifact (key) ON DELETE CASCADE,
    n INTEGER NOT NULL,
    min_ms REAL NOT NULL,
    median_ms REAL NOT NULL,
    p10_ms REAL NOT NULL,
    p90_ms REAL NOT NULL,
    tflops REAL NOT NULL,
    gbps REAL NOT NULL,
    created TEXT NOT NULL,
    PRIMARY KEY (problem_id, kernel_id, device_id, artifact_key)
) STRICT;

CREATE INDEX timing_kernel ON timing (kernel_id);

CREATE TABLE miss (
    problem_id INTEGER NOT NULL REFERENCES problem (id) ON DELETE CASCADE,
    arch TEXT NOT NULL,
    n INTEGER NOT NULL,
    last TEXT NOT NULL,
    PRIMARY KEY (problem_id, arch)
) STRICT;
