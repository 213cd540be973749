"""Export a product's kernel as a C library, and call it from C: neither Python nor the catalog is needed then."""

import subprocess
import sys
import tempfile
from pathlib import Path

from catalog import Catalog
from catalog.ops.gemm.problem import GemmProblem

PROGRAM = """
#include <stdio.h>
#include "products_register.h"

int main(void) {
    float a[2 * 3] = {1, 2, 3, 4, 5, 6}, b[3 * 2] = {1, 0, 0, 1, 1, 1}, c[2 * 2];
    catalog_args args = {sizeof args, CATALOG_ABI_VERSION};
    args.a = (catalog_tensor){a, 0, 3};
    args.b = (catalog_tensor){b, 0, 2};
    args.c = (catalog_tensor){c, 0, 2};
    args.batch = 1, args.m = 2, args.n = 2, args.k = 3;
    args.num_splits = 1, args.alpha = 1;
    int32_t status = products_kernels(NULL)->launch(&args, NULL);
    printf("%g %g %g %g\\n", c[0], c[1], c[2], c[3]);
    return status;
}
"""

kernel = Catalog.select(GemmProblem(m=64, n=256, k=256, dtype="fp32", layout="rrr")).kernels[0]

with tempfile.TemporaryDirectory() as folder:
    out, main = Path(folder) / "products", Path(folder) / "main"
    export = (
        "export",
        "--operation",
        "gemm",
        "--where",
        f"id='{kernel.id}'",
        "--format",
        "make",
        "--prefix",
        "products",
    )
    commands = [
        (sys.executable, "-m", "catalog", *export, "--out", str(out)),
        ("make", "-s", "-C", str(out)),
        (
            "cc",
            f"{main}.c",
            f"-I{out}",
            f"-I{out}/include",
            f"-L{out}",
            "-lproducts",
            f"-Wl,-rpath,{out}",
            "-o",
            str(main),
        ),
    ]
    main.with_suffix(".c").write_text(PROGRAM)
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603
    printed = subprocess.run([main], check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603

print(f"{kernel.name}, called from C: {printed}")
assert printed == "4 5 10 11"
