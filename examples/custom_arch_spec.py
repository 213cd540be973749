"""A custom tile: a copy of the arch specs with one more tile, populated, selected, compiled, run and checked."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from catalog import Catalog, Problem
from catalog.runtime.inputs import make_inputs
from catalog.runtime.validate import check_result

# 48 queries x 128 keys, in CK's notation; register blocks of 6 x 16 fit into the registers of every host arch.
TILE = "b48x128x64x64x128x64_r1x1x1_r1x1x1_w6x16x1_w6x16x1"

with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "data"
    shutil.copytree(Path(__file__).parent.parent / "data", data)
    os.environ["CATALOG_DATA_DIR"] = str(data)
    catalog = Catalog(Path(folder) / "catalog.db")
    arch = catalog.spec("host").arch

    path = data / "arch_specs" / "native" / f"{arch}.json"
    spec = json.loads(path.read_text())
    (group,) = (group for group in spec["enumerations"]["fwd"]["tiles"] if group["hdim"] == "64x64")
    group["tiles"].insert(0, TILE)  # the first tile is the first choice
    path.write_text(json.dumps(spec))

    print(f"{catalog.populate('host').kernels:,} kernels of {arch}, from {path.name} with the tile {TILE}")
    problem = Problem(batch=1, nhead_q=4, seqlen_q=256, hdim_q=64, dtype="fp32")
    print("candidates, best first: queries x keys of a tile, register block")
    for candidate in catalog.candidates(problem, limit=4):
        tile = candidate.kernel.algorithm
        print(f"  {tile.tile_m0:>3} x {tile.tile_n0:<4} {tile.warp_m0:>3} x {tile.warp_n0}")

    inputs = make_inputs(problem)
    result = catalog.select(problem).run(inputs, repeats=5)
    (check,) = check_result(problem, inputs, result)
    print(f"ran    {result.kernels[0]}")
    print(f"time   {result.time_ms:.3f} ms")
    print(f"error  {check.max_error:.1e}, {check.tolerance_used:.0%} of the tolerance")
    assert TILE in result.kernels[0], "our own tile ran"
    assert check.passed, "it is off the float64 reference"
    catalog.close()
