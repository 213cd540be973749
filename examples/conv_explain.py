"""Choose among thousands of GPU convolutions with SQL, and see why a problem has none.

No GPU is needed: rows, rules and selection are data.
"""

import tempfile
from pathlib import Path

from catalog import Catalog
from catalog.ops.conv.problem import ConvProblem

ARCH, REVISION = "gfx942", "2026-07"

with tempfile.TemporaryDirectory() as folder, Catalog(Path(folder) / "catalog.db") as catalog:
    catalog.populate(ARCH, revision=REVISION, operation="conv")

    layer = ConvProblem(n=32, c=256, k=256, size=(14, 14), filter=(3, 3), pad=(1, 1), dtype="bf16")
    best, *others = catalog.candidates(layer, arch=ARCH, revision=REVISION, limit=10_000)
    print(f"{1 + len(others):,} kernels answer {layer.name}; the first is {best.kernel.name}")
    assert others

    query = "family = 'forward' AND dtype = 'bf16' AND ndim = 2 AND tile_m >= 128 AND vector_c = 8 AND hw_valid"
    wide = catalog.kernels(query, arch=ARCH, operation="conv")
    print(f"{len(wide):,} of all have large tiles and stores of 16 bytes")
    assert wide

    odd = ConvProblem(n=1, c=30, k=33, size=(56, 56), filter=(3, 3), dtype="bf16", layout="ngchw")
    steps, left = catalog.narrowing(odd, arch=ARCH, revision=REVISION)
    print(f"{len(left)} answer {odd.name}:")
    for step in steps:
        if step.rejects:
            print(f"  {step.rejects:>6,} rejected by {step.id}: {step.reason}")
    assert not left
    assert any(step.id == "same_layout" for step in steps)
