"""Metadata for Datasette: what tables and columns are, and queries to start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from catalog.ops import operation
from catalog.registry.tables import tables_of
from catalog.registry.timings import UNMEASURED
from catalog.registry.views import VIEW


class Canned(NamedTuple):
    """A query: its name in the address, title, description, and SQL, in which ``:name`` is a field to fill in."""

    name: str
    title: str
    about: str
    sql: str


QUERIES = (
    Canned(
        "fastest_kernels",
        "The fastest kernel of each problem",
        "Warm medians, on each device.",
        """SELECT device.name AS device, problem.key AS problem, kernel.name AS kernel, min(median_ms) AS median_ms,
  tflops, gbps, count(*) AS timings
FROM timing JOIN device ON device.id = device_id JOIN problem ON problem.id = problem_id
JOIN kernel ON kernel.id = kernel_id
WHERE measured_as = 'graph' AND NOT cold GROUP BY device.id, problem.id ORDER BY device.id, problem.id""",
    ),
    Canned(
        "built_never_timed",
        "Kernels that are built but were never timed",
        "catalog tune times them where they answer a problem.",
        """SELECT arch, family, name, compile_s, id FROM kernels
WHERE id IN (SELECT kernel_id FROM artifact) AND built AND best_ms IS NULL ORDER BY arch, family, name""",
    ),
    Canned(
        "slowest_compiles",
        "The slowest compiles",
        "Libraries by the seconds that they took to compile.",
        """SELECT compile_s, artifact.arch, kernel.family, kernel.name, toolchain, so_bytes
FROM artifact JOIN kernel ON kernel.id = kernel_id WHERE status = 'built' ORDER BY compile_s DESC LIMIT 100""",
    ),
    Canned(
        "spills",
        "Kernels that spill registers",
        "Registers that live in memory, beside the speed.",
        """SELECT spills, scratch_bytes, registers, occupancy, arch, family, name, best_ms FROM kernels
WHERE id IN (SELECT kernel_id FROM artifact WHERE spills > 0) AND spills > 0 ORDER BY spills DESC, name""",
    ),
    Canned(
        "coverage_of_receipt",
        "Coverage of a receipt",
        "How many kernels a receipt (a number; 0 is CK's default build) lists, and how many are built and timed.",
        """SELECT arch, revision, mask_impl, family, count(*) AS kernels, sum(built) AS built,
  sum(best_ms IS NOT NULL) AS timed
FROM kernel_receipt JOIN kernels ON kernels.id = kernel_id
WHERE receipt = CAST(:receipt AS INTEGER) GROUP BY arch, revision, mask_impl, family""",
    ),
    Canned(
        "misses",
        "Problems selected but never measured",
        "Most frequent first; catalog tune --misses measures them.",
        f"""SELECT miss.arch, miss.n AS times, last, problem.key AS example
FROM miss JOIN problem ON problem.id = problem_id
WHERE {UNMEASURED} ORDER BY times DESC, problem.id""",
    ),
    Canned(
        "failed_builds",
        "Builds that failed, and kernels in quarantine",
        "With the compiler's output.",
        """SELECT created, status, artifact.arch, kernel.name, toolchain, log
FROM artifact JOIN kernel ON kernel.id = kernel_id WHERE status <> 'built' ORDER BY created DESC""",
    ),
    Canned(
        "best_tiles",
        "The tiles of each kind of problem",
        "relative is the best median of a problem over that of the tile, on average: 1 is the fastest.",
        """WITH tile AS (SELECT device_id, problem_id, tile_m0, tile_n0, min(median_ms) AS ms, max(tflops) AS tflops
  FROM timing JOIN attention_row AS kernel ON kernel.id = kernel_id WHERE measured_as = 'graph' AND NOT cold
  GROUP BY device_id, problem_id, tile_m0, tile_n0),
best AS (SELECT device_id, problem_id, min(ms) AS ms FROM tile GROUP BY device_id, problem_id)
SELECT device.name AS device, kind, tile_m0, tile_n0, avg(best.ms / tile.ms) AS relative, max(tflops) AS tflops,
  count(*) AS problems
FROM tile JOIN best USING (device_id, problem_id) JOIN problem ON problem.id = problem_id
JOIN device ON device.id = device_id
GROUP BY device_id, kind, tile_m0, tile_n0 ORDER BY device_id, kind, relative DESC""",
    ),
    Canned(
        "rules_of_family",
        "The rules of a family",
        "fwd, bwd_dq_dk_dv, ...; empty: those of every family. With their reasons.",
        """SELECT arch, revision, space, kind, scope, id, expr, reason, source, quirk FROM rule
WHERE :family = '' OR scope IN ('', :family) ORDER BY arch, revision, space, kind, scope, position""",
    ),
)
"""Queries to start from."""


def metadata(database: str) -> dict[str, Any]:
    """The metadata for a catalog file named ``database``, without its suffix."""
    tables: dict[str, Any] = {
        name: {"description": table.about, "columns": dict(table.columns)}
        for name, table in tables_of(operation()).items()
    }
    tables[VIEW] |= {"facets": ["arch", "family", "dtype"], "size": 50}
    tables["kernel"]["label_column"] = "name"
    tables["timing"]["sort"] = "median_ms"
    queries = {
        canned.name: {"title": canned.title, "description": canned.about, "sql": canned.sql} for canned in QUERIES
    }
    about = (
        "One queryable catalog of every attention, GEMM and convolution kernel that can exist: whether it is built, "
        "and how fast it is."
    )
    described = {"description": f"Start with the view {VIEW}.", "tables": tables, "queries": queries}
    return {"title": "Kernel catalog", "description": about, "databases": {database: described}}


def metadata_text(db_path: Path) -> str:
    """The metadata for the catalog at ``db_path``, which need not exist, as the text of a JSON file."""
    return json.dumps(metadata(db_path.stem), indent=2) + "\n"
