"""The main job, end to end: populate, query, parity, select, build, run, check.

Everything happens in a scratch catalog; only compiled kernels are kept, in the user's cache.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from catalog import Catalog, CatalogError, Problem
from catalog.runtime.inputs import make_inputs
from catalog.runtime.validate import check_result


def shell(*words: str) -> None:
    """Run a command of the catalog as a user would type it, and show both."""
    typed = (word if word == shlex.quote(word) else f'"{word}"' for word in words)
    print(f"\n$ catalog {' '.join(typed)}", flush=True)
    subprocess.run([sys.executable, "-m", "catalog", *words], check=True)  # noqa: S603


def run_a_problem() -> bool:
    """Grouped-query causal attention in bf16 on this machine's CPU, checked against the float64 reference."""
    stated = {
        "batch": 1,
        "nhead_q": 8,
        "nhead_k": 2,
        "seqlen_q": 1024,
        "hdim_q": 128,
        "dtype": "bf16",
        "mask": "causal",
    }
    problem = Problem(**stated, lse=True)
    print(f"\n>>> problem = Problem({', '.join(f'{name}={value!r}' for name, value in stated.items())}, lse=True)")
    print(">>> plan = Catalog.select(problem)")
    plan = Catalog.select(problem)
    print(">>> result = plan.run(q=q, k=k, v=v)")
    inputs = make_inputs(problem)
    first = plan.run(inputs)
    result = plan.run(inputs, repeats=9)
    print(f"    kernel    {result.kernels[0]}")
    compiled = f"{first.compile_seconds:.2f} s" if first.compile_seconds else "in the cache already"
    print(f"    compile   {compiled}")
    print(f"    time      {result.time_ms:.3f} ms, {result.tflops * 1e3:.1f} GFLOP/s")
    checks = check_result(problem, inputs, result)
    for check in checks:
        share = f"{check.tolerance_used:.0%} of what rounding may cost"
        print(f"    {check.tensor:<9} max error {check.max_error:.2e}, {share}")
    return all(check.passed for check in checks)


def main() -> int:
    """Run the demo; return 0 if every step succeeds."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="catalog-demo-") as folder:
        os.environ["CATALOG_DB"] = str(Path(folder) / "catalog.db")
        shell("populate", "--arch", "gfx950")
        shell("populate", "--arch", "host")
        shell("parity", "--receipt", "0", "--arch", "gfx950")
        shell(
            "query",
            "hdim_q=128 AND pipeline='qr_async'",
            "--columns",
            "dtype,mode,mask,bias,tile_m0,receipts",
            "--limit",
            "5",
        )
        passed = run_a_problem()
    print(f"\n{'All good' if passed else 'FAILED'} in {time.perf_counter() - started:.1f} s.")
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CatalogError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
